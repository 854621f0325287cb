"""What calls of the SIMT launchers are made of: shapes, layouts and special values. Those of a family's ops stand in
`tests/ops/FAMILY/simt_cases.py`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.simt.rows import Demand

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = ("f32", "f16", "bf16")
Inputs = tuple[Any, ...]
Launch = tuple[Callable[..., Any], Inputs]


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Callable[..., Any]
    make: Callable[[], Inputs]
    fit: str = ""  # what the plan must be: part of the kernel's name
    shared: int = 65_536
    features: frozenset[str] = frozenset()
    units: int = 1
    exact: bool = False  # every partial result is representable: bit for bit


@dataclass(frozen=True)
class Rows:
    """An op of rows. demand: of a wave, the bytes of an element, and those of its weights. widest: the row of 16 bits
    that few rows and many read once on an H200."""

    demand: Callable[[int, int, tuple[int, ...]], Demand]
    widest: int


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    seed = zlib.crc32(repr((shape, dtype, scale, shift)).encode())
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + shift).to(dtype)


def misaligned(x: Tensor) -> Tensor:
    """The same values, one element after a 16-byte boundary."""
    base = torch.empty(x.numel() + 1, dtype=x.dtype)
    base[1:] = x.flatten()
    return base[1:].view(x.shape)


def plain(name: object) -> str:
    return str(name).replace("torch.", "")


# (rows, columns, what the kernel's name must contain for 16-bit types). With one unit a LONG row, and one that takes
# more than 16 words a thread, is persistent: one or two blocks load ahead and turn their slots over.
ROW_SHAPES = (
    (3, 1, "EXACT"),
    (65, 8, "EXACT"),
    (7, 64, "EXACT"),
    (9, 96, "RAGGED"),
    (3, 127, "_1_"),
    (9, 1024, "EXACT"),
    (2, 1021, "_1_"),
    (3, 4096, "EXACT"),
    (2, 4104, "RAGGED"),
    (7, 16_384, "EXACT"),
    (3, 20_008, "RAGGED"),
    (3, 65_536, "_8_"),
    (3, 80_000, "LONG"),
    (3, 131_080, "LONG"),
    (3, 20_011, "LONG"),
    (3, 50_257, "LONG"),
)
STREAMED = (("vector", 80_000), ("scalar", 9001))
STREAM = ("LONG", 2048)  # no shared memory to spare: everything beyond the registers goes through L2
# What a device with clusters is given: one unit, so that few rows do not take another form, and odd numbers of rows
# where a block takes two. Widths: whole and ragged, and such that the last block of a cluster has less than the others.
CLUSTERS = (232_448, frozenset({"clusters"}))
FEW_ROWS = (*CLUSTERS, 16)  # all of 16 units for them


def layouts() -> dict[str, tuple[Callable[[], Tensor], str]]:
    """Views: a row stride, an odd row stride, leading dimensions that do and do not collapse, broadcasts, offsets."""
    base = random(6, 4, 520, dtype=BF16)
    return {
        "row_stride": (lambda: random(6, 1040, dtype=BF16)[:, 520:], "_8_"),
        "odd_stride": (lambda: random(6, 521, dtype=BF16)[:, :520], "_1_"),
        "misaligned": (lambda: misaligned(random(5, 520, dtype=BF16)), "_1_"),
        "collapsible": (lambda: base[:, :, :], "_8_"),
        "transposed": (lambda: base.transpose(0, 1), "_8_"),
        "every_other": (lambda: base[:, ::2], "_8_"),
        "broadcast": (lambda: random(520, dtype=BF16).expand(5, 520), "_8_"),
        "vector": (lambda: random(520, dtype=BF16), "_8_"),
        "strided_last": (lambda: random(5, 1040, dtype=BF16)[:, ::2], "_8_"),
    }


def planted() -> dict[str, Callable[[], Tensor]]:
    """Rows of which two hold a value that is not finite."""
    by_name: dict[str, Callable[[], Tensor]] = {}
    for name, value in {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf}.items():
        for dtype in (F32, F16, BF16):

            def rows(v: float = value, d: torch.dtype = dtype) -> Tensor:
                x = random(4, 520, dtype=d)
                x[1, 17] = x[3, 519] = v
                return x

            by_name[plain(f"{name}_{dtype}")] = rows
    return by_name


def short_and_long(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows that are aligned and that are not, and a weight of each."""
    for width in (8, 1000, 1021, 8192, 262_144):
        yield torch.zeros(2, width, dtype=dtype), torch.zeros(width, dtype=dtype)

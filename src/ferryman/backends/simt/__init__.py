"""What the CUDA and HIP backends share: one C++ source per family, how a call becomes a launch, and the wave width.

`portable.cuh` is the dialect, `rows.cuh` the loop over rows, `cluster.cuh` NVIDIA's clusters; a family adds its own
`.cuh`. A kernel is one line that instantiates a macro of the family's file, so a compiled unit holds exactly the kernel
that a launch needs.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ferryman.errors import ArgumentError

HERE = Path(__file__).parent
TYPE_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
VECTOR_BYTES = 16
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# HIP refuses launches of 2^32 threads or more in one dimension, and some stacks 2^31 (hazard T04); the kernels loop.
_MAX_THREADS = 2**31 - 1024


class Unit(NamedTuple):
    """One thing to compile: C++ text, and the macros to define besides FERRYMAN_WAVE. A launch's entry is ``name``.

    ``spills_allowed``: bytes a thread that its author accepts on NVIDIA; on AMD none (`ferryman compile`).
    ``suffix``: "a" for a kernel that uses instructions of its arch alone ("sm_90a"). ``cluster``: blocks of a cluster;
    a launch has a multiple of it. ``overlapping``: the kernel begins with `after_previous` (`portable.cuh`), so that
    its blocks may be started before the kernel ahead of it in the stream has ended.
    """

    name: str
    source: str
    defines: tuple[str, ...] = ()
    spills_allowed: int = 0
    suffix: str = ""
    cluster: int = 1
    overlapping: bool = False


class Runtime(Protocol):
    """Loads a unit on a device and launches its kernel on that device's current stream."""

    def launch(
        self, unit: Unit, device: torch.device, grid: int, block: int, shared: int, args: tuple[int | float, ...]
    ) -> None:
        """Arguments are 64-bit integers (pointers included) and, where a float stands, a 32-bit float."""
        ...


def wave_of(arch: str) -> int:
    """Lanes per wave of the code compiled for ``arch``: CDNA and older are 64 wide; RDNA compiles to 32 by default."""
    if re.fullmatch(r"gfx9[0-9a-f]{2,}", arch):
        return 64
    if re.fullmatch(r"sm_\d+[af]?|gfx1[0-9a-f]{3}", arch):
        return 32
    raise ArgumentError("simt", "arch", repr(arch), "sm_NN (NVIDIA) or gfxNNN (AMD)")


def vendor_of(arch: str) -> str:
    return "amd" if arch.startswith("gfx") else "nvidia"


def defines_for(unit: Unit, arch: str) -> tuple[str, ...]:
    """The macros that this unit is compiled with for ``arch``."""
    return (f"FERRYMAN_WAVE={wave_of(arch)}", *unit.defines)


def family_files(path: Path, rows: bool, cluster: bool = False) -> list[Path]:
    """The dialect, the row loop where used, with the forms of sm_90 where used, the family's file."""
    names = ["portable.cuh", *(["cluster.cuh"] if cluster else []), *(["rows.cuh"] if rows else [])]
    return [*(HERE / name for name in names), *([HERE / "whole.cuh"] if cluster and rows else []), path]


@functools.lru_cache(maxsize=None)
def family_source(path: Path, rows: bool, cluster: bool = False) -> str:
    """The text before the instantiations: `family_files` one after another."""
    files = family_files(path, rows, cluster)
    return "".join(f'#line 1 "{f.name}"\n{f.read_text(encoding="utf-8")}' for f in files)


def instance(macro: str, stem: str, *args: object) -> tuple[str, str]:
    """(kernel name, the line that instantiates it): the name spells every template argument, for profilers."""
    words = [str(a).lower() if isinstance(a, bool) else str(a) for a in args]
    name = "_".join([stem, *words])
    if not all(re.fullmatch(r"[A-Za-z0-9_]+", w) for w in words) or not _IDENTIFIER.fullmatch(name):
        raise ArgumentError("simt", "template arguments", words, "identifiers and numbers")
    return name, f"{macro}({', '.join([name, *words])})"


def unit(family: str, macro: str, stem: str, *args: object) -> Unit:
    """A unit with one kernel. ``family`` is `family_source`'s text."""
    name, line = instance(macro, stem, *args)
    return Unit(name, f'{family}\n#line 1 "{name}"\n{line}\n')


def type_name(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else TYPE_NAMES[dtype]


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def as_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """(x, rows, elements from row to row): a view where the leading dimensions have one stride, else a copy."""
    shape = x.shape
    n = shape[-1]
    if x.is_contiguous():
        return x, x.numel() // n, n
    stride = x.stride()
    if n > 1 and stride[-1] != 1:
        x = x.contiguous()
        return x, x.numel() // n, n
    rows, step = 1, n
    for size, distance in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            step = distance
        elif distance != step * rows:
            x = x.contiguous()
            return x, x.numel() // n, n
        rows *= size
    return x, rows, step


def vectorised(itemsize: int, lengths: int, pointers: int) -> bool:
    """Whether every row can be read in 16-byte words. Both are the bitwise or of all lengths (elements) or pointers: a
    multiple of a power of two is one that has its low bits clear, so an or tests them all at once."""
    return (lengths * itemsize | pointers) % VECTOR_BYTES == 0


def grid_of(work: int, threads: int) -> int:
    """Blocks for ``work`` pieces of one block each; the kernels loop over what exceeds it."""
    return min(work, _MAX_THREADS // threads)

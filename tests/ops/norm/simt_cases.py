"""Calls of these SIMT launchers, every kind of plan, dtype, layout and special value: tests/unit/test_simt_kernels.py
judges each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ferryman.ops.norm import simt_kernels as norm
from tests.unit.simt_cases import (
    BF16,
    CLUSTERS,
    F16,
    F32,
    FEW_ROWS,
    ROW_SHAPES,
    STREAM,
    STREAMED,
    TYPES,
    Case,
    Inputs,
    Launch,
    Rows,
    layouts,
    misaligned,
    plain,
    planted,
    random,
    short_and_long,
)

WIDEST = {"rms_norm": 262_144, "add_rms_norm": 262_144, "layer_norm": 131_072}
ROWS = {op: Rows(functools.partial(norm.demand, op), widest) for op, widest in WIDEST.items()}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, w: torch.dtype | None, *rest: Any) -> Inputs:
    weight = None if w is None else random(shape[-1], dtype=w, scale=0.2, shift=1.0)
    return (random(*shape, dtype=dtype), weight, *rest)


def _rms(shape: tuple[int, ...]) -> Inputs:
    return _inputs(shape, BF16, BF16, 1e-6, False)


def _layer(shape: tuple[int, ...]) -> Inputs:
    return (*_inputs(shape, F16, F16), random(shape[-1], dtype=F16), 1e-5)


def _row_cases() -> Iterator[Case]:
    for rows, n, fit in ROW_SHAPES:
        shape = (rows, n)
        yield Case(f"rms_{n}", norm.rms_norm, lambda s=shape: _rms(s), fit)
        yield Case(f"layer_{n}", norm.layer_norm, lambda s=shape: _layer(s), fit)
    for rows, n, fit in (
        (65, 8, ""),
        (9, 512, "EXACT"),
        (3, 1000, "RAGGED"),
        (3, 8192, "EXACT"),
        (5, 32_768, "_8_"),
        (5, 40_008, "LONG"),
        (3, 1021, "_1_"),
        (3, 9001, "LONG"),
    ):
        yield Case(
            f"add_rms_{n}",
            norm.add_rms_norm,
            lambda s=(rows, n): (random(*s, dtype=BF16), *_inputs(s, BF16, BF16, 1e-6, True)),
            fit,
        )
    for x, w, cast in itertools.product((F32, F16, BF16), (F32, F16, BF16, None), (False, True)):
        name = plain(f"{x}_{w}_{cast}")
        yield Case(f"rms_{name}", norm.rms_norm, lambda x=x, w=w, c=cast: _inputs((3, 1000), x, w, 1e-6, c))
        yield Case(
            f"add_rms_{name}",
            norm.add_rms_norm,
            lambda x=x, w=w, c=cast: (random(3, 520, dtype=x, scale=2.0), *_inputs((3, 520), x, w, 1e-6, c)),
        )
    for x, w, b in (
        (F32, None, None),
        (F32, BF16, F16),
        (BF16, F32, None),
        (BF16, None, F32),
        (F16, BF16, F32),
        (F32, F32, F32),
    ):
        yield Case(
            plain(f"layer_{x}_{w}_{b}"),
            norm.layer_norm,
            lambda x=x, w=w, b=b: (*_inputs((3, 1000), x, w), None if b is None else random(1000, dtype=b), 1e-5),
        )
    yield Case("layer_offset", norm.layer_norm, lambda: (random(3, 4096, dtype=F32, shift=1000.0), None, None, 1e-5))
    for name, n in STREAMED:
        yield Case(f"stream_rms_{name}", norm.rms_norm, lambda n=n: _rms((5, n)), *STREAM)
        layer = lambda n=n: (*_inputs((3, n), F16, F16), None, 1e-6)  # noqa: E731
        yield Case(f"stream_layer_{name}", norm.layer_norm, layer, *STREAM)


def _cluster_cases() -> Iterator[Case]:
    makers: dict[str, tuple[Callable[..., Any], Callable[[tuple[int, int]], Inputs]]] = {
        "rms": (norm.rms_norm, _rms),
        "add_rms": (norm.add_rms_norm, lambda s: (random(*s, dtype=BF16), *_inputs(s, BF16, F32, 1e-6, True))),
        "layer": (norm.layer_norm, _layer),
    }
    forms = {
        "rms": [
            (3, 16_384, "512_1_4_EXACT_2_1"),
            (3, 11_008, "352_1_4_RAGGED_2_1"),
            (3, 20_008, "160_1_4_WHOLE_6_4"),
            (5, 50_264, "WHOLE_4_8"),
            (4, 65_536, "256_1_4_WHOLE_4_8"),
            (3, 81_928, "192_1_8_WHOLE_5_8"),
        ],
        "add_rms": [(3, 16_384, "512_1_2_WHOLE_2_2"), (2, 20_008, "WHOLE_3_4"), (3, 66_056, "288_1_4_WHOLE_3_8")],
        "layer": [
            (3, 20_008, "96_1_4_WHOLE_8_8"),
            (2, 65_536, "256_1_4_WHOLE_4_8"),
            (3, 66_056, "160_1_8_WHOLE_3_8"),
            (3, 140_008, "288_1_8_WHOLE_1_8"),
        ],
    }
    for op, shapes in forms.items():
        kernel, make = makers[op]
        for rows, n, fit in shapes:
            yield Case(f"cluster_{op}_{n}", kernel, lambda m=make, s=(rows, n): m(s), fit, *CLUSTERS)
    for op, rows, n, fit in (
        ("rms", 1, 9000, "160_1_1_RAGGED_1_8"),
        ("layer", 2, 20_008, "160_1_2_RAGGED_1_8"),
        ("add_rms", 2, 11_008, "192_1_1_RAGGED_1_8"),
        ("rms", 3, 8200, "544_1_2_RAGGED_1_1"),
    ):
        kernel, make = makers[op]
        yield Case(f"few_{op}_{n}", kernel, lambda m=make, s=(rows, n): m(s), fit, *FEW_ROWS)

    # float rows: weights of half the size may be no whole words of 16 bytes
    for w in (F32, BF16):
        yield Case(
            plain(f"cluster_layer_float32_{w}"),
            norm.layer_norm,
            lambda w=w: (*_inputs((3, 8196), F32, w), random(8196, dtype=F32), 1e-5),
            "WHOLE",
            *CLUSTERS,
        )

    def means(dtype: torch.dtype, *deviations: float) -> Inputs:  # two rows share a block, and the last is alone
        x = random(len(deviations), 20_008, dtype=F32) + torch.tensor(deviations)[:, None]
        return (x.to(dtype), None, None, 1e-5)

    # a row whose mean takes a second exchange, with one whose does not, and with another
    for dtype in (F32, F16):
        offset = lambda d=dtype: means(d, 0.0, 1000.0, 2.1, 1.9, 3.0, -50.0, 9.0)  # noqa: E731
        name = plain(f"cluster_layer_offset_{dtype}")
        yield Case(name, norm.layer_norm, offset, "WHOLE", *CLUSTERS)

    def outliers() -> Inputs:
        x = random(3, 20_008, dtype=F32)
        x[:, ::8] = 1e4
        return (x, None, None, 1e-5)

    def lost() -> Inputs:  # the other row of a pair is as it would be alone
        x = random(5, 20_008, dtype=BF16)
        x[0, 20_007], x[3, 9], x[4] = math.nan, math.inf, 3.0
        return (x, None, None, 1e-5)

    yield Case("cluster_layer_outliers", norm.layer_norm, outliers, "WHOLE", *CLUSTERS)
    yield Case("cluster_layer_hostile", norm.layer_norm, lost, "WHOLE", *CLUSTERS)


def _layout_cases() -> Iterator[Case]:
    for name, (make, fit) in layouts().items():
        yield Case(f"rms_{name}", norm.rms_norm, lambda m=make: (m(), random(520, dtype=BF16), 1e-6, False), fit)
        yield Case(f"add_{name}", norm.add_rms_norm, lambda m=make: (m(), m() * 0.5, None, 1e-6, False), fit)
    yield Case(
        "rms_weight_misaligned",
        norm.rms_norm,
        lambda: (random(3, 512, dtype=BF16), misaligned(random(512, dtype=BF16)), 1e-6, False),
        "_1_",
    )
    yield Case(
        "rms_weight_strided",
        norm.rms_norm,
        lambda: (random(3, 512, dtype=BF16), random(1024, dtype=F32)[::2], 1e-6, False),
        "_8_",
    )


def _special_cases() -> Iterator[Case]:
    for label, rows in planted().items():
        yield Case(f"rms_{label}", norm.rms_norm, lambda m=rows: (m(), None, 1e-6, False))
        yield Case(f"layer_{label}", norm.layer_norm, lambda m=rows: (m(), None, None, 1e-6))
    full_nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(F32)  # all ones: a rounding carry must not eat it
    yield Case("rms_full_nan", norm.rms_norm, lambda: (random(3, 64, dtype=BF16), full_nan, 1e-6, False))
    # mean of squares 4^k: the scale is a power of two, and every result exact
    fours = lambda: (torch.full((3, 1000), 8.0), None, 0.0, False)  # noqa: E731
    yield Case("rms_power_of_four", norm.rms_norm, fours, exact=True)
    yield Case("rms_subnormal", norm.rms_norm, lambda: (random(3, 256, dtype=F32, scale=1e-40), None, 1e-6, False))
    yield Case("rms_zero", norm.rms_norm, lambda: (torch.zeros(3, 256), None, 1e-6, False))


CASES = [*_row_cases(), *_cluster_cases(), *_layout_cases(), *_special_cases()]


def launches(dtype: torch.dtype) -> Iterator[Launch]:
    for x, weight in short_and_long(dtype):
        yield norm.rms_norm, (x, weight, 1e-6, False)
        yield norm.rms_norm, (x, None, 1e-5, False)
        yield norm.add_rms_norm, (x, x, weight, 1e-6, True)
        yield norm.layer_norm, (x, weight, weight, 1e-5)
        yield norm.layer_norm, (x, None, None, 1e-5)


def compiled(x: str) -> Iterator[str]:
    """How names of kernels for a dtype begin: one for each dtype of a weight and a bias."""
    for w in (*TYPES, "none"):
        yield f"rms_norm_{x}_{w}_false"
        yield f"add_rms_norm_{x}_{w}_false"
        yield from () if w == "none" else (f"add_rms_norm_{x}_{w}_true",)
        yield from (f"layer_norm_{x}_{w}_{b}_" for b in (*TYPES, "none"))


# On a device, of rows x, others and a weight: how many tensors are moved, the kernel, and its arguments.
MOVED = {
    "rms_norm": (2, norm.rms_norm, lambda x, other, w: (x, w, 1e-6, False)),
    "layer_norm": (2, norm.layer_norm, lambda x, other, w: (x, w, w, 1e-6)),
    "add_rms_norm": (4, norm.add_rms_norm, lambda x, other, w: (x, other, w, 1e-6, False)),
}

"""What a state-space scan is tried with: lengths about its chunks, states, groups, exact probes, shapes of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Symbols, multiple, positive
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape, sampled_cases
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.ops.ssd_scan.equivalents import EQUIVALENTS

# (heads, head_dim, groups, state) of Mamba2 130M, 1.3B and 2.7B, of Falcon-H1 and of Nemotron-H
_MODELS = ((24, 64, 1, 128), (64, 64, 1, 128), (80, 64, 1, 128), (48, 64, 1, 256), (128, 64, 8, 128))


def _call(
    batch: int,
    length: int,
    heads: int,
    dim: int,
    groups: int,
    width: int,
    softplus: bool = True,
    skip: bool = True,
    biased: bool = True,
    state: bool = False,
    fill: str | None = None,
    layout: str = "contiguous",
    own: str = "storage",
    dt: str | None = None,
    a: str = "decay",
    wide: bool = False,
    low: float | None = None,
    high: float | None = None,
    values: str | None = None,
) -> dict[str, Any]:
    x = TensorSpec((batch, length, heads, dim), fill=values or fill, layout=layout)
    line = layout if layout == "last" else "contiguous"
    shared = TensorSpec((batch, length, groups, width), fill=fill, layout=layout)
    kept = TensorSpec((batch, heads, dim, width), "float32", fill, layout) if state else None
    return {
        "x": x,
        "dt": TensorSpec((batch, length, heads), own, dt or ("normal" if softplus else "step"), layout),
        "a": TensorSpec((heads,), own, a, line),
        "b": shared,
        "c": shared,
        "d": TensorSpec((heads,), own, fill, line) if skip else None,
        "dt_bias": TensorSpec((heads,), own, "normal", line) if biased else None,
        "initial_state": kept,
        "dt_softplus": softplus,
        "y_float32": wide,
        "dt_min": low,
        "dt_max": high,
    }


def _exact(length: int, dt: str, a: str, groups: int, layout: str = "contiguous") -> dict[str, Any]:
    return _call(1, length, 4, 5, groups, 8, False, True, False, True, "signs", layout, dt=dt, a=a)


def _cases() -> Sequence[Case]:
    small = {
        "small": _call(2, 37, 4, 16, 2, 16),
        "plain": _call(1, 37, 3, 16, 1, 16, False, False, False),
        "state": _call(1, 70, 4, 8, 1, 16, state=True),
        "token": _call(2, 1, 4, 16, 2, 16, state=True),
        "token_alone": _call(2, 1, 2, 16, 2, 16),
        "past_a_chunk": _call(1, 65, 2, 8, 1, 8, state=True),
        "chunks": _call(1, 131, 2, 4, 1, 8, state=True),
        "chunks_blocks": _call(2, 129, 4, 67, 2, 69, state=True),
        "chunks_no_state": _call(1, 66, 2, 8, 1, 0),
        "narrow": _call(2, 19, 2, 1, 1, 1, state=True),
        "prime": _call(1, 31, 3, 13, 3, 11),
        "wide_state": _call(1, 20, 2, 8, 1, 131),
        "empty_length": _call(2, 0, 4, 8, 2, 8, state=True),
        "empty_batch": _call(0, 7, 4, 8, 2, 8),
        "no_state": _call(1, 7, 4, 8, 2, 0),
        "no_head_dim": _call(1, 7, 4, 0, 2, 8, state=True),
        **{f"layout_{n}": _call(2, 21, 2, 8, 1, 8, state=True, layout=n) for n in ("rows", "last", "offset")},
        **{f"own_{n}": _call(1, 21, 2, 8, 1, 8, own=n) for n in ("float32", "float16", "bfloat16")},
        **{f"fill_{n}": _call(1, 24, 2, 8, 1, 8, state=True, fill=n) for n in ("tiny", "uniform", "zeros", "constant")},
        "fill_hundreds": _call(1, 24, 2, 8, 1, 8, state=True, values="hundreds"),
        "deep_steps": _call(1, 24, 2, 8, 1, 8, dt="moderate"),
        "float32_result": _call(1, 37, 4, 8, 2, 16, state=True, wide=True),
        "limits": _call(1, 21, 2, 8, 1, 8, state=True, low=0.3, high=1.5),
        "limits_few": _call(1, 5, 2, 8, 1, 8, state=True, low=0.3, high=1.5),
        "limits_chunks": _call(1, 66, 2, 8, 1, 8, state=True, low=0.3, high=1.5),
        "least_step": _call(1, 21, 2, 8, 1, 8, False, low=0.5, biased=False),
        "no_decay": _call(1, 33, 2, 8, 1, 8, False, dt="step", a="zeros", biased=False),
    }
    exact = {
        "exact_sums": _exact(37, "signs", "zeros", 2),
        "exact_resets": _exact(70, "bits", "far", 1),
        "exact_chunks": _exact(150, "signs", "zeros", 4),
        "exact_token": _exact(1, "bits", "far", 4),
        "exact_float32": _exact(37, "bits", "far", 2) | {"y_float32": True},
        "exact_layout": _exact(33, "bits", "far", 2, "rows"),
    }
    standard = {
        "mamba2_130m": _call(1, 1021, 24, 64, 1, 128, own="float32"),
        "mamba2_decode": _call(16, 1, 80, 64, 1, 128, state=True, own="float32"),
    }
    return [
        *(Case(name, args) for name, args in small.items()),
        Case("gradient_hundreds", _call(1, 24, 4, 8, 2, 8, state=True), cotangent="hundreds"),
        # float32 holds every sum; the state is float32
        *(Case(name, args, exact=True) for name, args in exact.items()),
        *(Case(name, args, "standard") for name, args in standard.items()),
    ]


_FILLS = (
    Fill("decay", "-0.2 to -4: a decay's rate", lambda d: -0.2 - 3.8 * d.uniform()),
    Fill("step", "from 0.001 to 0.2", lambda d: 0.001 + 0.199 * d.uniform()),
    Fill("bits", "0 or 1", lambda d: d.integers(0, 2), False),
    Fill("far", "-256: a decay of nothing", lambda d: _far(d), False),
)


def _far(d: Draw) -> Tensor:
    return torch.full(d.shape, -256.0, dtype=torch.float64, device=d.device)


def _stable(args: dict[str, Any], symbols: Symbols) -> None:
    """Without softplus, steps that are given: a negative one would let the state grow beyond float32."""
    if not args["dt_softplus"]:
        args["dt_bias"] = None
        args["dt"] = TensorSpec(args["dt"].shape, args["dt"].dtype, "step", args["dt"].layout)


_NAME = re.compile(r"B(\d+) L(\d+) H(\d+) P(\d+) G(\d+) N(\d+)( state)?")


def _named(name: str) -> Case:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"case {name!r} of ssd_scan; required: such as B1 L2048 H80 P64 G1 N128, state after it")
    batch, length, heads, dim, groups, width = (int(n) for n in match.groups()[:6])
    return Case(name, _call(batch, length, heads, dim, groups, width, state=match[7] is not None, own="float32"))


def _bench(grid: Grid) -> Iterator[Case]:
    models = _MODELS if grid == "full" else _MODELS[2:3]
    for heads, dim, groups, width in models:
        end = f"H{heads} P{dim} G{groups} N{width}"
        for shape in ("B1 L2048", "B8 L4096") if grid == "full" else ("B1 L2048",):
            yield _named(f"{shape} {end}")
        yield _named(f"B64 L1 {end} state")


def _sampled(s: Sampler) -> str:
    heads, dim, groups, width = s.draw.choice(_MODELS)
    heads = max(groups, heads // s.less // groups * groups)
    length = s.draw.choice((1, s.around(16, 16_384 // s.less)))
    each = heads * dim * (2 * length + 4 * width)  # a sample's x, and its state in float32
    batch = s.around(1, max(1, min(64, s.most_bytes // s.less**2 // each)))
    return f"B{batch} L{length} H{heads} P{dim} G{groups} N{width}{' state' if length == 1 else ''}"


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for tokens in sizes.tokens:
        for heads, dim, groups, width in _MODELS:
            yield _call(1, tokens, heads, dim, groups, width, state=tokens == 1, own="float32")


def _like(name: str, first: Shape) -> Shape | None:
    """One group, a state of 128."""
    batch, length, heads, _ = first
    known = {"dt": (batch, length, heads), "a": (heads,), "d": (heads,), "dt_bias": (heads,)}
    if name in ("b", "c"):
        return batch, length, 1, 128
    return None if name == "initial_state" else known.get(name, first)


_VALUES = ("normal", "tiny", "integer", "uniform", "zeros", "constant")

EVIDENCE = (
    Evidence(
        op="ssd_scan",
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("B L H P", _VALUES),
                "dt": Form("B L H", ("normal", "uniform", "zeros"), mixed=True),
                "a": Form("H", ("decay", "zeros"), mixed=True),
                "b": Form("B L G N", _VALUES),
                "c": Form("B L G N", _VALUES),
                # not the others: 0 times a NaN of a later token is NaN in a chunk, and nothing in a recurrence
                "d": Form("H", (*_VALUES, "nonfinite"), optional=True, mixed=True),
                "dt_bias": Form("H", ("normal", "zeros"), optional=True, mixed=True),
                "initial_state": Form("B H P N", _VALUES, optional=True, mixed=True),
                "dt_softplus": (True, False),
                "y_float32": (False, True),
                "dt_min": (None, 0.001, 0.05),  # a quarter of the steps lies below the second
                "dt_max": (None, 0.1, float("inf")),
            },
            symbols={
                "B": "batch",
                "L": "lengths",
                "G": "groups",
                "H": multiple("G", "per_group"),
                "P": positive("queries"),
                "N": positive("queries"),
            },
            drawn=_stable,
        ),
        fills=_FILLS,
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        equivalents=EQUIVALENTS,
        goals=(Goal("ssd_scan", sampled_cases(_sampled, _named), {"peers": 1.0}),),
    ),
)

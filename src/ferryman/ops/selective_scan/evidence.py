"""What a selective scan is tried with: lengths, widths of the state, gates, exact probes, shapes of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Symbols, positive
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.primitive import Case, TensorSpec

# (channels, state) of Mamba 130M, 1.4B and 2.8B, of Jamba and of Falcon-Mamba 7B
_MODELS = ((1536, 16), (4096, 16), (5120, 16), (8192, 16), (8192, 16))


def _call(
    batch: int,
    length: int,
    channels: int,
    width: int,
    softplus: bool = True,
    skip: bool = True,
    gate: bool = True,
    biased: bool = True,
    state: bool = False,
    fill: str | None = None,
    layout: str = "contiguous",
    own: str = "storage",
    dt: str | None = None,
    a: str = "decay",
    values: str | None = None,
    skip_fill: str | None = None,
) -> dict[str, Any]:
    x = TensorSpec((batch, length, channels), fill=values or fill, layout=layout)
    line = layout if layout == "last" else "contiguous"
    shared = TensorSpec((batch, length, width), fill=fill, layout=layout)
    return {
        "x": x,
        "dt": TensorSpec((batch, length, channels), own, dt or ("normal" if softplus else "step"), layout),
        "a": TensorSpec((channels, width), own, a, layout),
        "b": shared,
        "c": shared,
        "d": TensorSpec((channels,), own, skip_fill or fill, line) if skip else None,
        "z": replace(x, fill=fill) if gate else None,
        "dt_bias": TensorSpec((channels,), own, "normal", line) if biased else None,
        "initial_state": TensorSpec((batch, channels, width), "float32", fill, layout) if state else None,
        "dt_softplus": softplus,
    }


def _exact(length: int, dt: str, a: str, layout: str = "contiguous") -> dict[str, Any]:
    """Signs, steps of 0 and 1, decays of 1 or 0: every sum is a small integer. silu is not exact: no gate."""
    return _call(2, length, 5, 8, False, True, False, False, True, "signs", layout, dt=dt, a=a)


def _cases() -> Sequence[Case]:
    small = {
        "small": _call(2, 7, 6, 16),
        "plain": _call(1, 13, 19, 16, False, False, False, False),
        "state": _call(1, 23, 12, 16, state=True),
        "ungated": _call(2, 7, 6, 16, gate=False),
        "token": _call(3, 1, 40, 16, state=True),
        "token_alone": _call(2, 1, 16, 16),
        "narrow": _call(2, 9, 1, 1, state=True),
        "prime": _call(1, 13, 19, 11),
        "wide_state": _call(1, 7, 8, 131),
        "many_channels": _call(1, 3, 52, 16, state=True),
        "empty_length": _call(2, 0, 8, 8, state=True),
        "empty_batch": _call(0, 7, 8, 8),
        "no_state": _call(1, 7, 8, 0),
        "no_channels": _call(1, 7, 0, 8, state=True),
        **{f"layout_{n}": _call(2, 5, 6, 8, state=True, layout=n) for n in ("rows", "last", "offset")},
        **{f"own_{n}": _call(1, 9, 6, 8, own=n) for n in ("float32", "float16", "bfloat16")},
        **{f"fill_{n}": _call(1, 11, 6, 8, state=True, fill=n) for n in ("tiny", "uniform", "zeros", "constant")},
        "fill_hundreds": _call(1, 11, 6, 8, state=True, values="hundreds"),
        "nonfinite": _call(2, 11, 6, 8, state=True, values="nonfinite"),
        "nonfinite_ungated": _call(1, 11, 6, 8, gate=False, state=True, values="nonfinite"),
        "token_nonfinite": _call(3, 1, 12, 8, state=True, values="nonfinite"),
        "nonfinite_narrow": _call(2, 9, 1, 1, state=True, values="nonfinite"),
        "nonfinite_skip": _call(1, 11, 6, 8, state=True, skip_fill="nonfinite"),
        # beside an infinite x, a state that no power of two holds, and steps of 0
        "nonfinite_prime": _call(1, 9, 13, 11, fill="uniform", values="nonfinite"),
        "nonfinite_still": _call(2, 9, 6, 8, False, gate=False, biased=False, dt="zeros", values="nonfinite"),
        "no_decay": _call(1, 16, 6, 8, False, dt="step", a="zeros", biased=False),
        "token_prime": _call(3, 1, 13, 11, state=True),
    }
    exact = {
        "exact_sums": _exact(13, "signs", "zeros"),
        "exact_resets": _exact(19, "bits", "far"),
        "exact_token": _exact(1, "bits", "far"),
        "exact_layout": _exact(9, "bits", "far", "rows"),
    }
    # none lies as another does
    mixed = _call(2, 5, 6, 8, state=True)
    for name, layout in (("dt", "last"), ("a", "rows"), ("b", "rows"), ("c", "last"), ("z", "rows")):
        mixed[name] = replace(mixed[name], layout=layout)
    small["layout_mixed"] = mixed
    standard = {
        "mamba_130m": _call(1, 1021, 1536, 16, own="float32"),
        "mamba_decode": _call(16, 1, 5120, 16, state=True, own="float32"),
    }
    return [
        *(Case(name, args) for name, args in small.items()),
        Case("gradient_large", _call(1, 11, 12, 8, state=True), cotangent="large"),
        *(Case(name, args, exact=True) for name, args in exact.items()),
        *(Case(name, args, "standard") for name, args in standard.items()),
    ]


def _far(d: Draw) -> Tensor:
    return torch.full(d.shape, -256.0, dtype=torch.float64, device=d.device)


_FILLS = (
    Fill("decay", "-0.2 to -4: a decay's rate", lambda d: -0.2 - 3.8 * d.uniform()),
    Fill("step", "from 0.001 to 0.2", lambda d: 0.001 + 0.199 * d.uniform()),
    Fill("bits", "0 or 1", lambda d: d.integers(0, 2), False),
    Fill("far", "-256: a decay of nothing", _far, False),
)


def _stable(args: dict[str, Any], symbols: Symbols) -> None:
    """Without softplus, steps that are given: a negative one would let the state grow beyond float32."""
    if not args["dt_softplus"]:
        args["dt_bias"] = None
        args["dt"] = TensorSpec(args["dt"].shape, args["dt"].dtype, "step", args["dt"].layout)


_NAME = re.compile(r"B(\d+) L(\d+) D(\d+) N(\d+)( state)?")


def _named(name: str) -> Case:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"case {name!r} of selective_scan; required: such as B1 L2048 D5120 N16, state after it")
    batch, length, channels, width = (int(n) for n in match.groups()[:4])
    return Case(name, _call(batch, length, channels, width, state=match[5] is not None, own="float32"))


def _bench(grid: Grid) -> Iterator[Case]:
    models = sorted(set(_MODELS)) if grid == "full" else _MODELS[2:3]
    for channels, width in models:
        for shape in ("B1 L2048", "B8 L4096") if grid == "full" else ("B1 L2048",):
            yield _named(f"{shape} D{channels} N{width}")
        yield _named(f"B64 L1 D{channels} N{width} state")


def _sampled(s: Sampler) -> str:
    channels, width = s.draw.choice(_MODELS)
    channels = max(1, channels // s.less)
    length = s.draw.choice((1, s.around(16, 8192 // s.less)))
    each = channels * (6 * length + 4 * width)  # a sample's tensors
    batch = s.around(1, max(1, min(64, s.most_bytes // s.less**2 // each)))
    return f"B{batch} L{length} D{channels} N{width}{' state' if length == 1 else ''}"


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for tokens in sizes.tokens:
        for channels, width in sorted(set(_MODELS)):
            yield _call(1, tokens, channels, width, state=tokens == 1, own="float32")


def _like(name: str, first: Shape) -> Shape | None:
    """A state of 16."""
    batch, length, channels = first
    known = {"a": (channels, 16), "b": (batch, length, 16), "c": (batch, length, 16), "d": (channels,)}
    known |= {"dt_bias": (channels,)}
    return None if name == "initial_state" else known.get(name, first)


_VALUES = ("normal", "tiny", "integer", "uniform", "zeros", "constant")

EVIDENCE = (
    Evidence(
        op="selective_scan",
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("B L D", (*_VALUES, "nonfinite")),
                "dt": Form("B L D", ("normal", "uniform", "zeros"), mixed=True),
                "a": Form("D N", ("decay", "zeros"), mixed=True),
                "b": Form("B L N", _VALUES),
                "c": Form("B L N", _VALUES),
                "d": Form("D", (*_VALUES, "nonfinite"), optional=True, mixed=True),
                "z": Form("B L D", _VALUES, optional=True),
                "dt_bias": Form("D", ("normal", "zeros"), optional=True, mixed=True),
                "initial_state": Form("B D N", _VALUES, optional=True, mixed=True),
                "dt_softplus": (True, False),
            },
            symbols={
                "B": "batch",
                "L": "lengths",
                "D": positive("width"),
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
    ),
)

"""What a causal convolution is tried with: widths, states, layouts, exact probes, and shapes of state-space models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.causal_conv1d.equivalents import EQUIVALENTS
from ferryman.ops.domain import MODERATE, Domain, Form
from ferryman.ops.draw import Draw, Fill, offset
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape, sampled_cases
from ferryman.ops.primitive import Case, TensorSpec

# channels that models convolve: Mamba2 130M, 1.3B and 2.7B, Jamba, Qwen3-Next
_CHANNELS = (1792, 4352, 5376, 8192)


def _call(
    shape: tuple[int, int, int],
    width: int = 4,
    activation: str | None = None,
    biased: bool = True,
    state: bool = False,
    fill: str | None = None,
    layout: str = "contiguous",
    own: str | None = None,
    dtype: str = "storage",
    bias: str | None = None,
) -> dict[str, Any]:
    """own: the weight's and bias's fill. "channels" as layout: they are innermost."""
    batch, channels, length = shape
    if layout == "channels":
        layout = f"strided:{max(length, width) * channels},1,{channels}+0"
    return {
        "x": TensorSpec(shape, fill=fill, layout=layout),
        "weight": TensorSpec((channels, width), dtype, own, layout if layout in ("rows", "last") else "contiguous"),
        "bias": TensorSpec((channels,), dtype, bias or own, layout if layout == "last" else "contiguous")
        if biased
        else None,
        "initial_state": TensorSpec((batch, channels, width - 1), fill=fill, layout=layout) if state else None,
        "activation": activation,
    }


def _cases() -> Sequence[Case]:
    small = {
        **{f"width_{n}": _call((2, 37, 19), n, "silu", state=n % 2 == 0) for n in (1, 2, 3, 4)},
        **{f"width_{n}": _call((2, 7, 13), n, "silu", state=n % 2 == 0) for n in (5, 8)},
        "wide": _call((1, 5, 61), 33, state=True),
        "plain": _call((2, 16, 67), 4, None, False),
        "state": _call((2, 16, 67), 4, None, True, True),
        "swish": _call((1, 33, 16), 4, "swish", False, True),
        "token": _call((3, 67, 1), 4, "silu", state=True),
        "two_tokens": _call((3, 67, 2), 4, "silu", state=True),
        "token_alone": _call((2, 31, 1), 4, None),
        "shorter_than_width": _call((2, 16, 2), 5, "silu"),
        "one_channel": _call((2, 1, 131), 4, "silu"),
        "long": _call((1, 7, 1031), 4, "silu"),
        "many_channels": _call((1, 260, 5), 4, "silu", state=True),
        "empty_length": _call((2, 5, 0), 4, "silu", state=True),
        "empty_length_alone": _call((2, 5, 0), 3, None),
        "empty_batch": _call((0, 5, 7), 4, "silu", state=True),
        "no_channels": _call((2, 0, 7), 4, "silu"),
        **{f"layout_{n}": _call((2, 9, 21), 4, "silu", True, True, layout=n) for n in ("rows", "last", "offset")},
        "layout_channels": _call((2, 40, 21), 4, "silu", True, True, layout="channels"),
        # in runs: of positions, and of channels
        "rows_width_2": _call((1, 5, 16), 2, "silu", state=True),
        "channels_width_3": _call((1, 17, 16), 3, "silu", layout="channels"),
        "channels_past_four": _call((1, 17, 18), 3, None, layout="channels"),  # positions go four at a time
        "layout_channels_token": _call((2, 40, 1), 4, "silu", True, True, layout="channels"),
        **{f"own_{n}": _call((2, 24, 17), 4, "silu", dtype=n) for n in ("float32", "float16", "bfloat16")},
        **{
            f"fill_{n}": _call((2, 15, 40), 4, "silu", True, True, n)
            for n in ("nonfinite", "tiny", "moderate", "offset", "constant", "zeros")
        },
        "fill_nonfinite_plain": _call((2, 15, 40), 4, None, True, True, "nonfinite"),
        "fill_nonfinite_weight": _call((1, 15, 20), 3, None, True, False, own="nonfinite"),
        "token_nonfinite": _call((3, 5, 1), 4, "silu", True, True, "nonfinite"),
        "fill_large": _call((2, 15, 40), 4, "silu", True, True, "large", own="unit"),
    }
    exact = {
        "exact_integers": _call((2, 11, 83), 4, None, True, True, "integer", own="integer"),
        "exact_width": _call((2, 7, 40), 7, None, False, False, "integer", own="integer"),
        "exact_token": _call((3, 67, 1), 4, None, True, True, "integer", own="integer"),
        "exact_channels": _call((2, 40, 21), 4, None, True, True, "integer", "channels", "integer"),
        "exact_silu": _call((2, 11, 40), 4, "silu", True, True, "signs", own="signs", bias="rails"),
    }
    standard = {
        "mamba2": _call((2, 5376, 2048), 4, "silu", layout="channels"),
        "ragged": _call((1, 1789, 1021), 4, "silu", True, True),
        "decode": _call((64, 5376, 1), 4, "silu", True, True),
    }
    plain = _call((2, 15, 10), 4, None, True, True)
    large = _call((2, 1792, 1021), 4, None, True, True, "integer", "channels", "integer")
    return [
        *(Case(name, args) for name, args in small.items()),
        *(Case(f"gradient_{n}", plain, cotangent=n) for n in ("hundreds", "nonfinite")),
        *(Case(name, args, exact=True) for name, args in exact.items()),
        *(Case(name, args, "standard") for name, args in standard.items()),
        Case("exact_mamba2", large, "standard", exact=True, cotangent="signs"),
    ]


def _rails(d: Draw) -> Tensor:
    size = (d.uniform() * 32).floor()
    return torch.where(d.uniform(3) < 0.7, 48 + size, -136 - 4 * size)


_NAME = re.compile(r"B(\d+) D(\d+) L(\d+) W(\d+)( plain)?( state)?")


def _named(name: str) -> Case:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"case {name!r} of causal_conv1d; required: such as B2 D5376 L2048 W4, plain and state after it"
        )
    batch, channels, length, width = (int(n) for n in match.groups()[:4])
    activation = None if match[5] else "silu"
    return Case(
        name, _call((batch, channels, length), width, activation, state=match[6] is not None, layout="channels")
    )


def _bench(grid: Grid) -> Iterator[Case]:
    names = ["B2 D5376 L2048 W4", "B64 D5376 L1 W4 state"]
    if grid == "full":
        names += [f"B{64 * 1024 // length} D{d} L{length} W4" for d in _CHANNELS for length in (512, 4096, 16_384)]
        names += [f"B{b} D{d} L1 W4 state" for d in _CHANNELS for b in (1, 256)]
        names += ["B8 D4352 L4096 W3 plain", "B8 D4352 L4096 W2"]
    yield from map(_named, names)


def _sampled(s: Sampler) -> str:
    channels = s.draw.choice(_CHANNELS) // s.less
    length = s.draw.choice((1, s.around(16, 16_384 // s.less)))
    batch = s.around(1, max(1, min(256, s.most_bytes // s.less**2 // (2 * channels * length))))
    return f"B{batch} D{channels} L{length} W{s.draw.choice((4, 4, 4, 3, 2))}{' state' if length == 1 else ''}"


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for tokens in sorted({*sizes.tokens, 1, 2, 4, 8, 16, 32}):  # tiles follow short lengths
        for channels in _CHANNELS:
            for biased in (True, False):
                yield _call((1, channels, tokens), 4, "silu", biased, tokens == 1, layout="channels")


def _like(name: str, first: Shape) -> Shape | None:
    """Width 4, without a state."""
    return {"weight": (*first[1:2], 4), "bias": first[1:2]}.get(name, first if name != "initial_state" else None)


EVIDENCE = (
    Evidence(
        op="causal_conv1d",
        equivalents=EQUIVALENTS,
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("B N L", MODERATE),
                "weight": Form("N W", MODERATE, mixed=True),
                "bias": Form("N", MODERATE, optional=True, mixed=True),
                "initial_state": Form("B N P", MODERATE, optional=True),
                "activation": (None, "silu", "swish"),
            },
            symbols={
                "B": "batch",
                "N": "depth",
                "L": "queries",
                "W": lambda s: int(s.choose((1, 2, 3, 4, 4, 6))),
                "P": lambda s: s["W"] - 1,
            },
        ),
        fills=(
            Fill("rails", "from 48 on, or -136 and below: a sigmoid is 1 or 0, in float64 too", _rails, False),
            offset({torch.float16: 16.0}),
        ),
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        goals=(
            Goal("causal_conv1d", sampled_cases(_sampled, _named), {"peers": 1.0}),
            Goal("causal_conv1d, gradient", sampled_cases(_sampled, _named), {"peers": 1.0}, "backward"),
        ),
    ),
)

"""What group_norm is tried with: groups of every kind, either order in memory, parts that differ, shapes of models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Rule, Symbols, multiple, positive
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.group_norm.equivalents import EQUIVALENTS
from ferryman.ops.primitive import Case, TensorSpec

_BLOCK = 512  # values of a group that "blocks" and "steps" give one level
_LEVELS = (0, 5, -3, 8, -7, 2, -8, 4)


def _places(d: Draw) -> tuple[Tensor, Tensor]:
    """(a group's number, a value's place in its group) for every element, in the shape of the draw."""
    count = math.prod(d.shape[1:]) // d.given("num_groups") if len(d.shape) > 1 else 0
    index = torch.arange(math.prod(d.shape), device=d.device)
    return (index // max(count, 1)).reshape(d.shape), (index % max(count, 1)).reshape(d.shape)


def _level(number: Tensor) -> Tensor:
    return torch.tensor(_LEVELS, dtype=torch.float64, device=number.device)[number % len(_LEVELS)]


def _sign(place: Tensor) -> Tensor:
    """The parity of a number's bits: of 2^n numbers that follow each other half are 1 and half are -1."""
    for shift in (32, 16, 8, 4, 2, 1):
        place = place ^ (place >> shift)
    return 1.0 - 2.0 * (place & 1).double()


def _power(group: Tensor) -> Tensor:
    return torch.exp2((group * 5 % 3).double())


def _levels(d: Draw) -> Tensor:
    group, place = _places(d)
    return _level(group) + _sign(place) * _power(group)


def _steps(d: Draw) -> Tensor:
    """Each half of a group is constant, so that all of its variance lies between its parts."""
    group, place = _places(d)
    return _level(group) + _sign(place // _BLOCK) * _power(group)


def _plateaus(d: Draw) -> Tensor:
    return _level(_places(d)[0])


def _blocks(d: Draw) -> Tensor:
    """A level for every 512 values of a group: means of parts differ by more than values of a part do."""
    group, place = _places(d)
    return 4 * _level(place // _BLOCK + group) + d.normal()


def _thirds(d: Draw) -> Tensor:
    """The last third lies apart: nearly all of the variance is that of parts' means, whose weights are no integers."""
    place = _places(d)[1]
    return torch.where(place < int(place.max()) * 2 // 3, -4.0, 8.0) + d.normal() / 8


def _planted(d: Draw) -> Tensor:
    """Groups in turn: clean, with a NaN, with +Inf, with -Inf, with both."""
    group, place = _places(d)
    x, kind = d.normal(), group % 5
    for value, where in (
        (math.nan, (kind == 1) & (place == 1)),
        (math.inf, ((kind == 2) | (kind == 4)) & (place == 1)),
        (-math.inf, ((kind == 3) & (place == 1)) | ((kind == 4) & (place == 0))),
    ):
        x = x.masked_fill(where, value)
    return x


def _between(d: Draw) -> Tensor:
    """Between two numbers of float16, + and - in turn: what casts terms of a sum to 16 bits leans."""
    return _sign(_places(d)[1]) * (1 + 2.0**-10 / 3)


_FILLS = (
    Fill("levels", "a group's integer +- its power of two, balanced", _levels, independent=False),
    Fill("steps", "the same, constant for 512 values each", _steps, independent=False),
    Fill("plateaus", "a group's integer everywhere", _plateaus, independent=False),
    Fill("blocks", "normal about a level for every 512 values of a group", _blocks),
    Fill("thirds", "a normal number / 8 about -4, about 8 in the last third of a group", _thirds),
    Fill("groups_nonfinite", "normal, NaN and Infs in four groups of five", _planted),
    Fill("groups_between", "1 + 2^-10 / 3, + and - in turn", _between, independent=False),
)


def _call(
    shape: tuple[int, ...],
    groups: int,
    vectors: str = "both",
    fill: str | None = None,
    layout: str = "contiguous",
    eps: float = 1e-5,
    own: str | None = "weight",
    dense: bool = False,
) -> dict[str, Any]:
    """vectors: which there are. own: what fills them; beside "digits" a bias that cancels none. dense: they are
    contiguous, whatever the layout."""
    line = TensorSpec(shape[1:2], fill=own, layout="contiguous" if dense else layout)
    bias = replace(line, fill="fours") if own == "digits" else line
    return {
        "x": TensorSpec(shape, fill=fill, layout=layout),
        "num_groups": groups,
        "weight": line if vectors in ("both", "weight") else None,
        "bias": bias if vectors in ("both", "bias") else None,
        "eps": eps,
    }


def _strided(*strides: int, offset: int = 0) -> str:
    return f"strided:{','.join(map(str, strides))}+{offset}"


def _last(shape: tuple[int, ...]) -> str:
    """Channels last, without gaps."""
    _, channels, *places = shape
    steps = [channels * math.prod(places[i + 1 :]) for i in range(len(places))]
    return _strided(channels * math.prod(places), 1, *steps)


def _cases() -> Sequence[Case]:
    picture = (2, 12, 5, 6)
    small: dict[str, dict[str, Any]] = {
        "picture": _call(picture, 3),
        "line": _call((3, 20, 37), 5, "none"),
        "volume": _call((2, 6, 3, 4, 5), 2, "none"),
        "sixteens": _call((2, 40, 16), 4),  # several groups a warp, each in lanes that are not neighbours
        "no_places": _call((7, 24), 4, "bias"),
        "one_group": _call((3, 7, 11), 1, "none"),
        "every_channel": _call((3, 7, 3, 11), 7, "none"),
        "one_channel": _call((3, 1, 65), 1, "none"),
        "one_value": _call((4, 6), 6, "none"),
        "many_groups": _call((5, 130, 3), 65, "weight"),
        "empty_batch": _call((0, 8, 3, 3), 4),
        "no_place": _call((2, 8, 0), 4, "weight"),
        "no_channels": _call((2, 0, 3), 2, "none"),
        "large_eps": _call(picture, 6, "none", eps=0.5),
        "layout_rows_picture": _call(picture, 3, "none", layout="rows"),
        "layout_last": _call(picture, 3, layout="last"),
        "layout_offset": _call(picture, 3, "weight", layout="offset"),
        "layout_channels": _call(picture, 3, "weight", layout=_last(picture), dense=True),
        "layout_channels_line": _call((2, 20, 37), 5, "bias", layout=_strided(740, 1, 20), dense=True),
        "layout_channels_gaps": _call(picture, 3, "none", layout=_strided(700, 2, 138, 23, offset=3)),
        "layout_turned": _call((3, 8, 4, 5), 4, "none", layout=_strided(160, 20, 1, 4)),
        "layout_samples_within": _call((5, 8, 9), 2, "none", layout=_strided(1, 45, 5)),
        "fill_offset": _call((2, 12, 64), 3, "none", "offset"),
        "fill_tiny": _call((2, 12, 20), 3, "weight", "tiny", eps=1e-7, own="hundreds"),
        "fill_large": _call((2, 12, 20), 3, "none", "large"),
        "fill_hundreds": _call((2, 12, 20), 3, "weight", "hundreds", own="hundreds"),
        "fill_nonfinite": _call((3, 10, 9), 5, "weight", "groups_nonfinite"),
        "fill_blocks": _call((2, 4, 512), 2, "none", "blocks"),
        "vectors_nonfinite": _call((3, 10, 9), 5, own="nonfinite"),
        "between": _call((1, 4, 1024), 2, "none", "groups_between", eps=16.0),
        # groups that no block of threads holds, in parts of 4 tiles of 2048, and a ragged last part of a ragged tile
        "long_blocks": _call((1, 6, 4501), 2, "weight", "blocks"),
        "long_offset": _call((1, 5, 3003), 1, "none", "offset"),
        "long_tiny": _call((1, 2, 20_481), 2, "none", "tiny", eps=1e-7),
        "long_channels": _call((1, 700, 17), 1, "weight", "blocks", own="hundreds"),
        "long_thirds": _call((1, 1, 6144), 1, "none", "thirds"),
        "long_between": _call((1, 2, 10_240), 1, "none", "groups_between", eps=16.0),
    }
    cases = [Case(name, args) for name, args in small.items()]
    shape = (3, 8, 4, 8)
    exact: dict[str, dict[str, Any]] = {
        "exact_levels": _call(shape, 4, "weight", "levels", eps=0.0, own="digits"),
        "exact_levels_last": _call(shape, 2, "none", "levels", _last(shape), 0.0, "digits", dense=True),
        "exact_no_places": _call((5, 32), 4, "bias", "levels", eps=0.0, own="digits"),
        "exact_steps": _call((1, 4, 4096), 1, "none", "steps", eps=0.0, own="digits"),
    }
    # Welford's update, PyTorch's, divides by every count: float32 shows that
    cases += [Case(name, args, exact=True, inexact=("float32",)) for name, args in exact.items()]
    plateaus = _call((3, 16, 8), 4, "none", "plateaus", eps=0.25, own="integer")
    cases.append(Case("exact_plateaus", plateaus, exact=True))
    standard = {
        "unet": _call((2, 320, 64, 64), 32),
        "unet_last": _call((2, 320, 64, 64), 32, layout=_last((2, 320, 64, 64)), dense=True),
        "deep": _call((16, 1280, 8, 8), 32),
        "decoder": _call((1, 128, 256, 256), 32, fill="blocks"),
        "ragged": _call((3, 321, 63, 65), 3, fill="blocks"),
    }
    return [*cases, *(Case(name, args, "standard") for name, args in standard.items())]


_PICTURES = ((320, 128), (320, 64), (640, 32), (1280, 16), (1280, 8), (512, 64), (256, 256))  # channels, a side


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for channels, side in _PICTURES:
        for samples in (1, 2, 16):
            shape = (samples, channels, side, side)
            yield _call(shape, 32)
            yield _call(shape, 32, layout=_last(shape), dense=True)


def _bench(grid: Grid) -> Iterator[Case]:
    names = [f"{n}x{c}x{side}x{side} G32" for c, side in _PICTURES for n in (2, 16)]
    last = ["2x320x128x128 G32 last", "16x320x64x64 G32 last"]
    small = ["16x1280x16x16 G32", "2x320x64x64 G32"]
    yield from map(_named, small if grid == "small" else [*names, *last])


def _named(name: str) -> Case:
    *shape, groups = (int(n) for n in re.findall(r"\d+", name))
    sizes = tuple(shape)
    return Case(name, _call(sizes, groups, layout=_last(sizes) if name.endswith("last") else "contiguous", dense=True))


def _sampled(s: Sampler) -> str:
    channels, side = s.draw.choice(_PICTURES)
    side = max(1, side // s.less)
    samples = s.around(1, max(1, min(64, s.most_bytes // s.less**2 // (2 * channels * side * side))))
    return f"{samples}x{channels}x{side}x{side} G32"


def _like(name: str, first: Shape) -> Shape | None:
    return first[1:2] if name in ("weight", "bias") else first


def _drawn(args: dict[str, Any], s: Symbols) -> None:
    """Places in none to three dimensions; those of a vector are drawn for one."""
    args["num_groups"] = s["G"]
    x = args["x"]
    more = s.choose(((s["P"],), (), (s["P"], 2), (3, s["P"]), (2, 1, s["P"])))
    if len(more) != 1:
        args["x"] = TensorSpec((*x.shape[:2], *more), x.dtype, x.fill)


_VALUES = ("normal", "groups_nonfinite", "tiny", "integer", "uniform", "zeros", "constant", "offset", "large", "blocks")
_SYMBOLS: dict[str, Rule] = {
    "B": "batch",
    "G": positive("groups"),
    "C": multiple("G", "per_group"),
    "P": "width",
}

EVIDENCE = (
    Evidence(
        op="group_norm",
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("B C P", _VALUES),
                "num_groups": "groups",
                "weight": Form("C", ("weight", "normal", "integer", "zeros", "large"), True),
                "bias": Form("C", ("weight", "normal", "integer", "zeros", "nonfinite"), True),
                "eps": (1e-5, 1e-6, 0.25),
            },
            symbols=_SYMBOLS,
            drawn=_drawn,
        ),
        fills=_FILLS,
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        equivalents=EQUIVALENTS,
    ),
)

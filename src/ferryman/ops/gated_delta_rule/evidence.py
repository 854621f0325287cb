"""What the gated delta rule is tried with: lengths about its chunks, heads, decays, exact probes, shapes of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, multiple, positive
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape, sampled_cases
from ferryman.ops.gated_delta_rule.equivalents import EQUIVALENTS
from ferryman.ops.primitive import Case, TensorSpec

# (heads of keys, heads of values, key's width, value's width) of Qwen3-Next, of Qwen3.5's small models, of Olmo Hybrid
_MODELS = ((16, 32, 128, 128), (16, 16, 128, 128), (30, 30, 96, 192))


def _call(
    batch: int,
    length: int,
    shared: int,
    heads: int,
    width: int,
    dim: int,
    state: bool = False,
    norm: bool = True,
    gate: str | None = "log_decay",
    beta: str = "rate",
    query: str | None = None,
    key: str | None = None,
    fill: str | None = None,
    layout: str = "contiguous",
    own: str = "storage",
    scale: float | None = None,
) -> dict[str, Any]:
    return {
        "q": TensorSpec((batch, length, shared, width), fill=query or fill, layout=layout),
        "k": TensorSpec((batch, length, shared, width), fill=key or (fill if norm else "key"), layout=layout),
        "v": TensorSpec((batch, length, heads, dim), fill=fill, layout=layout),
        "g": None if gate is None else TensorSpec((batch, length, heads), own, gate, layout),
        "beta": TensorSpec((batch, length, heads), own, beta, layout),
        "initial_state": TensorSpec((batch, heads, width, dim), "float32", fill, layout) if state else None,
        "scale": scale,
        "qk_l2norm": norm,
    }


def _exact(length: int, gate: str | None, heads: int = 4, layout: str = "contiguous") -> dict[str, Any]:
    """Keys with one 1 each, rates of 0 and 1, decays of 1 or 0: corrections replace a row of the state, or do not."""
    return _call(1, length, 2, heads, 16, 5, True, False, gate, "bits", key="one_hot", fill="signs", layout=layout)


def _cases() -> Sequence[Case]:
    small = {
        "small": _call(2, 21, 1, 2, 16, 8),
        "plain": _call(1, 20, 2, 2, 16, 8, norm=False, gate=None),
        "state": _call(1, 37, 2, 2, 8, 16, state=True),
        "token": _call(2, 1, 2, 4, 16, 16, state=True),
        "token_alone": _call(2, 1, 2, 2, 16, 16),
        "token_nonfinite": _call(2, 1, 1, 2, 16, 16, state=True, query="nonfinite"),
        "few": _call(1, 7, 1, 2, 16, 8, state=True),
        "past_a_chunk": _call(1, 65, 1, 1, 8, 8, state=True),
        "chunks": _call(1, 150, 1, 1, 8, 4, state=True, norm=False, layout="rows"),
        "narrow": _call(1, 19, 2, 2, 1, 1, state=True),
        "prime": _call(1, 17, 1, 3, 13, 11),
        "wide_key": _call(1, 20, 1, 2, 131, 8),
        "wide_value": _call(1, 20, 1, 1, 8, 67),
        "empty_length": _call(2, 0, 2, 4, 8, 8, state=True),
        "empty_batch": _call(0, 7, 2, 4, 8, 8),
        "no_key": _call(1, 7, 1, 2, 0, 8),
        "no_value": _call(1, 7, 2, 4, 8, 0, state=True),
        **{f"layout_{n}": _call(1, 18, 1, 2, 8, 8, state=True, layout=n) for n in ("rows", "last", "offset")},
        **{f"own_{n}": _call(1, 9, 1, 2, 8, 8, own=n) for n in ("float32", "float16", "bfloat16")},
        **{f"fill_{n}": _call(1, 18, 1, 2, 8, 8, state=True, fill=n) for n in ("tiny", "zeros", "constant")},
        "deep_decay": _call(1, 33, 1, 2, 8, 8, gate="deep"),
        "no_decay": _call(1, 33, 1, 2, 8, 8, gate=None, state=True),
        "alike_keys": _call(1, 33, 1, 1, 8, 8, key="constant"),
        "scaled": _call(1, 18, 1, 2, 8, 8, norm=False, scale=-1.5),
    }
    exact = {
        "exact_replaced": _exact(21, None, 2),
        "exact_resets": _exact(37, "resets", 2),
        "exact_token": _exact(1, "resets"),
        "exact_chunks": _exact(128, "resets", 2),
        "exact_layout": _exact(18, "resets", 2, "rows"),
    }
    standard = {
        "chunks_deep": _call(2, 131, 1, 2, 8, 8, gate="deep"),
        "qwen3_next": _call(1, 509, 16, 32, 128, 128, own="float32"),
        "qwen3_next_decode": _call(16, 1, 16, 32, 128, 128, state=True, own="float32"),
    }
    return [
        *(Case(name, args) for name, args in small.items()),
        Case("gradient_hundreds", _call(1, 18, 1, 2, 8, 8, state=True, norm=False), cotangent="hundreds"),
        *(Case(name, args, exact=True) for name, args in exact.items()),
        *(Case(name, args, "standard") for name, args in standard.items()),
    ]


def _one_hot(d: Draw) -> Tensor:
    """A 1 in one column of each row, another one in the next."""
    width = max(d.shape[-1], 1)
    return ((d.columns() - 5 * d.rows()) % width == 0).double().expand(d.shape).clone()


def _key(d: Draw) -> Tensor:
    """Of length 1 or less: beta |k|^2 stays below 2."""
    return (2 * d.uniform() - 1) * max(d.shape[-1], 1) ** -0.5


_FILLS = (
    Fill("log_decay", "-1 to 0: the logarithm of a decay", lambda d: -d.uniform()),
    Fill("deep", "-40 to 0", lambda d: -40.0 * d.uniform()),
    Fill("resets", "0, or -256: a decay of nothing", lambda d: -256.0 * (d.integers(0, 5) == 0).double(), False),
    Fill("rate", "0 to 1", lambda d: d.uniform()),
    Fill("bits", "0 or 1", lambda d: d.integers(0, 2), False),
    Fill("one_hot", "one 1 a row", _one_hot, False),
    Fill("key", "uniform, of length at most 1", _key),
)
_NAME = re.compile(r"B(\d+) L(\d+) G(\d+) H(\d+) K(\d+) V(\d+)( state)?")


def _named(name: str) -> Case:
    match = _NAME.fullmatch(name)
    if match is None:
        required = "such as B1 L2048 G16 H32 K128 V128, state after it"
        raise ValueError(f"case {name!r} of gated_delta_rule; required: {required}")
    batch, length, shared, heads, width, dim = (int(n) for n in match.groups()[:6])
    return Case(name, _call(batch, length, shared, heads, width, dim, state=match[7] is not None, own="float32"))


def _bench(grid: Grid) -> Iterator[Case]:
    for shared, heads, width, dim in _MODELS if grid == "full" else _MODELS[:1]:
        end = f"G{shared} H{heads} K{width} V{dim}"
        for shape in ("B1 L2048", "B8 L4096") if grid == "full" else ("B1 L2048",):
            yield _named(f"{shape} {end}")
        yield _named(f"B64 L1 {end} state")


def _sampled(s: Sampler) -> str:
    shared, heads, width, dim = s.draw.choice(_MODELS)
    repeated = heads // shared
    shared = max(1, shared // s.less)
    heads = shared * repeated
    length = s.draw.choice((1, s.around(16, 16_384 // s.less)))
    each = heads * dim * (2 * length + 4 * width)  # a sample's v, and its state in float32
    batch = s.around(1, max(1, min(64, s.most_bytes // s.less**2 // each)))
    return f"B{batch} L{length} G{shared} H{heads} K{width} V{dim}{' state' if length == 1 else ''}"


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for tokens in sizes.tokens:
        for shared, heads, width, dim in _MODELS:
            yield _call(1, tokens, shared, heads, width, dim, state=tokens == 1, own="float32")


def _like(name: str, first: Shape) -> Shape | None:
    """As many heads of values as of keys, as wide."""
    return None if name == "initial_state" else first[:3] if name in ("g", "beta") else first


def _bounded(args: dict[str, Any], dtype: torch.dtype) -> None:
    """Without normalisation, keys of length 1: longer ones would let the state grow beyond float32. And a finite q:
    an infinite one gives NaN or an infinity by the order of its products, where normalised ones are NaN at once. In a
    backward earlier tokens of its span see it times 0."""
    if not args["qk_l2norm"]:
        args["k"] = replace(args["k"], fill="key")
    if args["q"].fill == "nonfinite" and ("grad_final_state" in args or not args["qk_l2norm"]):
        args["q"] = replace(args["q"], fill="normal")


_VALUES = ("normal", "tiny", "integer", "uniform", "zeros", "constant")

EVIDENCE = (
    Evidence(
        op="gated_delta_rule",
        cases=_cases,
        fuzz=Domain(
            {
                # not the others: 0 times a NaN of a later token is NaN in a chunk, and nothing in a recurrence
                "q": Form("B L G K", (*_VALUES, "nonfinite")),
                "k": Form("B L G K", _VALUES),
                "v": Form("B L H V", _VALUES),
                "g": Form("B L H", ("log_decay", "deep", "zeros"), optional=True, mixed=True),
                "beta": Form("B L H", ("rate", "zeros", "uniform"), mixed=True),
                "initial_state": Form("B H K V", _VALUES, optional=True, mixed=True),
                "scale": (None, 1.0, 0.125),
                "qk_l2norm": (True, False),
            },
            symbols={
                "B": "batch",
                "L": "lengths",
                "G": "groups",
                "H": multiple("G", "per_group"),
                "K": positive("queries"),
                "V": positive("queries"),
            },
            defined=_bounded,
        ),
        fills=_FILLS,
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        equivalents=EQUIVALENTS,
        goals=(
            Goal("gated_delta_rule", sampled_cases(_sampled, _named), {"peers": 1.0}),
            Goal("gated_delta_rule, gradient", sampled_cases(_sampled, _named), {"peers": 1.0}, "backward"),
        ),
    ),
)

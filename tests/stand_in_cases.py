"""Calls that reach the configurations of an A100's kernels which no case of the parity check reaches: widths, tiles,
head dimensions. With them every tile that `ferryman compile --target a100` builds is executed (test_stand_in.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ferryman.dispatch import registry
from ferryman.ops.primitive import Case, TensorSpec


def _case(*words: object, **args: object) -> Case:
    return Case(" ".join(map(str, words)), args, tier="standard")


def _rows(rows: int, width: int) -> Case:
    return _case("x", rows, width, x=TensorSpec((rows, width)))


def _norm(rows: int, width: int) -> Case:
    return _case("x", rows, width, x=TensorSpec((rows, width)), weight=TensorSpec((width,), fill="weight"))


def _loss(rows: int, width: int) -> Case:
    target = TensorSpec((rows,), dtype="int64", high=width)
    return _case("logits", rows, width, logits=TensorSpec((rows, width)), target=target)


def _linear(rows: int, inputs: int, outputs: int) -> Case:
    return _case(
        "x", rows, inputs, "weight", outputs, x=TensorSpec((rows, inputs)), weight=TensorSpec((outputs, inputs))
    )


def _rope(batch: int, heads: int, k_heads: int, tokens: int, dim: int) -> Case:
    angles = TensorSpec((1, tokens, dim), fill="unit")
    return _case(
        "q",
        batch,
        heads,
        tokens,
        dim,
        q=TensorSpec((batch, heads, tokens, dim), layout="heads"),
        k=TensorSpec((batch, k_heads, tokens, dim), layout="heads"),
        cos=angles,
        sin=angles,
        interleaved=False,
    )


def _attention(dim: int, queries: int, keys: int, **options: object) -> Case:
    q, k = (TensorSpec((1, heads, n, dim), layout="heads") for heads, n in ((8, queries), (2, keys)))
    plain: dict[str, object] = {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": None}
    return _case("q", queries, dim, "k", keys, *options, q=q, k=k, v=k, **{**plain, **options})


def _sum(rows: int, width: int) -> Case:
    x = TensorSpec((rows, width))
    return _case("x", rows, width, x=x, residual=x, weight=TensorSpec((width,), fill="weight"))


def _named(op: str, *names: str) -> tuple[Case, ...]:
    """As the op's own evidence makes cases of sizes."""
    named = registry.evidence(registry.primitive(op)).named
    assert named is not None
    return tuple(dataclasses.replace(named(name), tier="standard") for name in names)


_GAPS = TensorSpec((61, 257), layout="rows")
_LAYERS = (  # few, some and many rows for each expert
    *("300 E8 k2 H128 I64", "100 E8 k2 H256 I64", "1100 E128 k8 H128 I64", "400 E128 k8 H128 I64"),
    *("2200 E256 k8 H128 I64", "32 E256 k8 H128 I64", "800 E256 k8 H128 I64"),
)
_SHORT = 2**17  # rows of 128: a block of four warps takes several
TILES: Mapping[str, tuple[Case, ...]] = {
    "rms_norm": tuple(_norm(*s) for s in ((8192, 257), (2048, 1024), (300, 16384))),
    "add_rms_norm": (_sum(1031, 1024),),
    "softmax": tuple(_rows(*s) for s in ((_SHORT, 128), (1031, 1000), (300, 32000))),
    "cross_entropy": tuple(_loss(*s) for s in ((_SHORT, 128), (1031, 1000), (1031, 1031), (3, 1))),
    "cross_entropy_inplace_grad": (_loss(300, 32_000),),
    "linear": (_linear(16, 512, 8192),),
    "rope": (_rope(32, 32, 8, 1, 128),),
    "attention": (
        *(_attention(dim, 1, 4096) for dim in (80, 256)),
        _attention(128, 300, 1024, causal=True, window=64, softcap=20.0),
    ),
    "bias_act": (_case("x", 61, 257, x=_GAPS, bias=None, activation="silu", alpha=None),),
    "linear_cross_entropy": _named("linear_cross_entropy", "3x1x5"),
    "grouped_linear": _named("grouped_linear", "64 E256 128x64"),
    "moe_experts": _named("moe_experts", *_LAYERS),
}

"""Calls that reach the configurations of an A100's kernels which no case of the parity check reaches: widths, tiles,
head dimensions. With them every tile that `ferryman compile --target a100` builds is executed (test_stand_in.py)."""

from __future__ import annotations

from collections.abc import Mapping

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
    return _case("x", rows, inputs, "weight", outputs,
                 x=TensorSpec((rows, inputs)), weight=TensorSpec((outputs, inputs)))  # fmt: skip


def _rope(batch: int, heads: int, k_heads: int, tokens: int, dim: int) -> Case:
    angles = TensorSpec((1, tokens, dim), fill="unit")
    return _case("q", batch, heads, tokens, dim, q=TensorSpec((batch, heads, tokens, dim), layout="heads"),
                 k=TensorSpec((batch, k_heads, tokens, dim), layout="heads"), cos=angles, sin=angles,
                 interleaved=False)  # fmt: skip


def _attention(dim: int, queries: int, keys: int, **options: object) -> Case:
    q, k = (TensorSpec((1, heads, n, dim), layout="heads") for heads, n in ((8, queries), (2, keys)))
    plain: dict[str, object] = {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": None}
    return _case("q", queries, dim, "k", keys, *options, q=q, k=k, v=k, **{**plain, **options})


def _sum(rows: int, width: int) -> Case:
    x = TensorSpec((rows, width))
    return _case("x", rows, width, x=x, residual=x, weight=TensorSpec((width,), fill="weight"))


_SHORT = 2**17  # rows of 128: a block of four warps takes several
TILES: Mapping[str, tuple[Case, ...]] = {
    "rms_norm": tuple(_norm(*s) for s in ((8192, 257), (2048, 1024), (300, 16384))),
    "add_rms_norm": (_sum(1031, 1024),),
    "softmax": tuple(_rows(*s) for s in ((_SHORT, 128), (1031, 1000), (300, 32000))),
    "cross_entropy": tuple(_loss(*s) for s in ((_SHORT, 128), (1031, 1000), (1031, 1031), (3, 1))),
    "linear": tuple(_linear(*s) for s in ((64, 512, 8192), (16, 512, 8192))),
    "rope": (_rope(32, 32, 8, 1, 128),),
    "attention": (
        *(_attention(dim, 1, 4096) for dim in (64, 80, 256)),
        _attention(128, 300, 1024, causal=True, window=64, softcap=20.0),
    ),
}  # fmt: skip

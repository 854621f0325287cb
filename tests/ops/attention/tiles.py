"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from ferryman.ops.primitive import Case, TensorSpec
from tests.stand_in_cases import case


def _attention(dim: int, queries: int, keys: int, **options: object) -> Case:
    q, k = (TensorSpec((1, heads, n, dim), layout="heads") for heads, n in ((8, queries), (2, keys)))
    plain: dict[str, object] = {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": None}
    return case("q", queries, dim, "k", keys, *options, q=q, k=k, v=k, **{**plain, **options})


TILES = {
    "attention": (
        *(_attention(dim, 1, 4096) for dim in (80, 256)),
        _attention(80, 33, 65, causal=True, dropout_p=0.1, dropout_seed=TensorSpec((1,), "int64", "seeds")),
    ),
}

"""Attention's cases: what judges try it with, exact probes among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferryman.ops.primitive import Case, TensorSpec


def cases() -> Sequence[Case]:
    known = []

    def add(
        name: str,
        shape: tuple[int, int, int, int],
        *,
        kv_heads: int | None = None,
        sk: int | None = None,
        dv: int | None = None,
        mask: TensorSpec | None = None,
        layout: str = "heads",
        fill: str | None = None,
        tier: str = "small",
        exact: tuple[str, str] | None = None,
        inexact: tuple[str, ...] = (),
        **options: object,
    ) -> None:
        """``exact``: the fills of q and k."""
        batch, heads, sq, head_dim = shape
        keys = (batch, kv_heads or heads, sq if sk is None else sk, head_dim)
        q_fill, k_fill, v_fill = (*exact, "tally") if exact else (fill, fill, fill)
        args: dict[str, object] = {
            "q": TensorSpec(shape, layout=layout, fill=q_fill),
            "k": TensorSpec(keys, layout=layout, fill=k_fill),
            "v": TensorSpec((*keys[:3], dv or head_dim), layout=layout, fill=v_fill),
        }
        args |= {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": mask} | options
        cotangent = "tally" if exact else None
        known.append(Case(name, args, tier, exact is not None, inexact, cotangent))  # type: ignore[arg-type]

    def matching(name: str, shape: tuple[int, int, int, int], *inexact: str, **more: object) -> None:
        """Each query sees 2^n keys of its own code, whose values it averages: exp of any other score is 0. The
        log-sum-exp is rounded, and float32 shows what that does to the probabilities."""
        codes, never = ("codes", "codes"), ("float32", "lse", *inexact)
        add(f"exact_{name}", shape, exact=codes, scale=0.125, inexact=never, **more)  # type: ignore[arg-type]

    add("full", (1, 2, 33, 64))
    add("causal", (1, 2, 65, 64), causal=True)
    add("gqa", (2, 6, 17, 64), kv_heads=2, causal=True)
    add("multi_query", (1, 5, 19, 64), kv_heads=1)
    add("d80", (1, 2, 29, 80), causal=True)
    add("d96", (1, 1, 21, 96))
    add("d128", (1, 2, 31, 128), causal=True)
    add("d256", (1, 1, 18, 256), causal=True)
    add("d63", (1, 2, 9, 63), layout="rows")  # one less than what lanes hold, and something behind each row
    add("d63_blocks", (1, 2, 9, 63), sk=140, layout="rows")  # of blocks that are whole, too
    add("d_odd", (1, 2, 13, 37))
    add("d72_rows", (1, 2, 131, 72), causal=True)
    add("values_narrow_rows", (1, 2, 129, 104), sk=150, dv=64)
    add("decode", (2, 4, 1, 64), kv_heads=2, sk=77, causal=True)
    add("append", (1, 2, 5, 64), sk=70, causal=True)
    add("longer_queries", (1, 2, 40, 64), sk=11, causal=True)  # rows that see nothing
    add("window", (1, 2, 70, 64), causal=True, window=9)
    add("window_both_sides", (1, 2, 45, 64), window=7)
    add("window_decode", (2, 4, 1, 64), kv_heads=2, sk=200, causal=True, window=40, scale=1.0, fill="large_logits")
    add("decode_large", (2, 2, 1, 64), kv_heads=1, sk=150, scale=1.0, fill="large_logits")
    add("window_one", (1, 1, 20, 64), causal=True, window=1)
    # they hide no key
    add("window_of_all", (1, 4, 130, 64), kv_heads=2, causal=True, window=130)
    add("window_of_all_decode", (2, 4, 1, 64), kv_heads=2, sk=50, causal=True, window=64)
    add("window_of_all_both_sides", (1, 2, 40, 64), sk=33, window=40)
    add("softcap", (1, 2, 33, 64), causal=True, softcap=20.0)
    add("scale", (1, 2, 20, 64), scale=0.3)
    add("bool_mask", (2, 2, 21, 64), mask=TensorSpec((2, 1, 21, 21), dtype="bool", fill="mask"))
    add("float_mask", (1, 4, 18, 64), sk=35, mask=TensorSpec((1, 4, 18, 35), fill="bias", layout="rows"))
    add("bias_whole", (2, 4, 9, 64), kv_heads=2, sk=40, mask=TensorSpec((1, 4, 9, 40), fill="bias"))  # read as it lies
    add("row_mask", (2, 2, 9, 64), sk=30, causal=True, mask=TensorSpec((2, 1, 1, 30), dtype="bool", fill="mask"))
    # few rows over several blocks of keys
    few = TensorSpec((2, 1, 1, 150), dtype="bool", fill="mask")
    add("mask_decode", (2, 4, 1, 80), kv_heads=2, sk=150, mask=few)
    pairs = TensorSpec((1, 4, 3, 100), fill="bias", layout="last")
    add("bias_few", (1, 4, 3, 64), kv_heads=1, sk=100, causal=True, mask=pairs)
    add("softcap_few", (1, 2, 5, 48), sk=130, causal=True, window=70, softcap=5.0)
    # caps' series below a quarter of the cap, whose last terms show in large scores of few terms
    add("softcap_loud", (1, 2, 16, 8), sk=33, scale=11.0, softcap=4600.0, fill="large_logits")
    add("softcap_many", (1, 4, 16, 8), sk=64, scale=13.5, softcap=6900.0, fill="large_logits")
    add("softcap_steep", (1, 4, 16, 8), sk=64, scale=19.5, softcap=6900.0, fill="large_logits")
    # sums that leave float16 before the scale is taken
    add("scaled_down", (1, 2, 16, 64), sk=33, scale=2.0**-17, fill="hundreds")
    add("softcap_nonfinite", (1, 2, 6, 48), sk=140, softcap=5.0, fill="nonfinite")
    # the last block of keys is whole, and no row but the last sees all of it
    add("append_whole", (1, 2, 5, 64), sk=128, causal=True)
    # a group's query heads are shared out among programs, the last of which has fewer; blocks that a range leaves out
    add("many_of_one", (2, 18, 70, 24), kv_heads=2, causal=True)
    add("many_of_one_range", (2, 10, 75, 16), kv_heads=1, sk=90, causal=True, key_range=key_ranges(2))
    # strides that 8 divides and 16 does not; the last row alone sees into its block of keys
    add("window_few", (2, 4, 3, 72), kv_heads=2, sk=97, causal=True, window=40)
    add("mask_few", (1, 8, 9, 72), kv_heads=2, sk=140, mask=TensorSpec((1, 8, 9, 140), dtype="bool", fill="mask"))
    # rows of a group that share tiles, and keys in two pieces
    add("shared_divided", (1, 6, 23, 64), kv_heads=2, sk=300, causal=True)
    add("shared_sinks", (2, 4, 9, 16), kv_heads=2, sk=300, dv=24, key_range=key_ranges(2), sinks=TensorSpec((4,)))
    options: dict[str, Any] = {"softcap": 20.0, "mask": TensorSpec((4, 9, 300), fill="bias")}
    options |= {"dropout_p": 0.25, "dropout_seed": seeds(1)}
    add("shared_options", (1, 4, 9, 64), kv_heads=2, sk=300, causal=True, **options)
    add("softcap_mask", (1, 2, 16, 64), softcap=5.0, mask=TensorSpec((16, 16), fill="bias"))
    # one key lies in the last block
    add("window_both_few", (1, 2, 12, 64), sk=129, window=5)
    add("one_key", (2, 2, 3, 64), sk=1)
    add("no_keys", (1, 2, 3, 64), sk=0)
    add("no_queries", (1, 2, 0, 64), sk=5)
    add("contiguous", (1, 3, 20, 64), layout="contiguous", causal=True)
    add("offset", (1, 3, 20, 64), layout="offset")
    for fill in ("offset", "constant", "large_logits", "nonfinite", "zeros"):
        add(f"fill_{fill}", (1, 2, 37, 64), fill=fill)
    add("sinks", (2, 6, 33, 64), kv_heads=2, causal=True, sinks=TensorSpec((6,)))
    add("sinks_window", (1, 4, 41, 64), kv_heads=2, causal=True, window=8, sinks=TensorSpec((4,)))
    add("sinks_wide", (1, 2, 18, 64), sinks=TensorSpec((2,), dtype="float32"))  # a dtype of its own
    add("sinks_large", (1, 2, 19, 64), fill="large_logits", sinks=TensorSpec((2,), fill="large_logits"))
    add("sinks_infinite", (1, 6, 9, 64), kv_heads=3, sinks=TensorSpec((6,), fill="infinite_logits"))
    add("sinks_blind", (1, 2, 12, 64), sk=5, causal=True, sinks=TensorSpec((2,)))  # rows that see their sink alone
    add("sinks_decode", (2, 2, 1, 64), kv_heads=1, sk=300, sinks=TensorSpec((2,)))
    add("sinks_strided", (1, 4, 9, 64), sinks=TensorSpec((4,), layout="last"))
    add("sinks_no_keys", (1, 2, 3, 64), sk=0, sinks=TensorSpec((2,)))
    add("values_narrow", (1, 4, 21, 48), kv_heads=2, causal=True, dv=32)
    add("values_wide", (1, 2, 17, 16), dv=80)
    add("values_one", (1, 2, 9, 37), causal=True, dv=1)
    add("mla", (1, 2, 20, 192), causal=True, dv=128)
    add("mla_decode", (2, 4, 1, 192), kv_heads=2, sk=67, dv=128)
    add("range", (4, 2, 25, 64), sk=40, key_range=key_ranges(4))
    add("range_causal", (4, 4, 25, 64), kv_heads=2, sk=40, causal=True, key_range=key_ranges(4))
    add("range_window", (3, 2, 30, 64), causal=True, window=6, key_range=key_ranges(3))
    # its window begins within a block of keys
    add("range_window_few", (2, 2, 2, 64), sk=90, causal=True, window=40, key_range=key_ranges(2))
    add("range_decode", (5, 2, 1, 64), kv_heads=1, sk=300, causal=True, key_range=key_ranges(5))
    add("range_hostile", (6, 2, 9, 64), sk=35, causal=True, key_range=key_ranges(6, "any_range"))
    bool_row = TensorSpec((3, 1, 1, 33), dtype="bool", fill="mask")
    add("range_mask_sinks", (3, 2, 14, 64), sk=33, mask=bool_row, key_range=key_ranges(3), sinks=TensorSpec((2,)))
    loud = TensorSpec((2,), fill="large_logits")
    add("mask_sinks_large", (3, 2, 14, 64), fill="large_logits", sk=33, scale=1.0, mask=bool_row, sinks=loud)
    add("chunk", (1, 2, 45, 64), causal=True, chunk=16)
    add("chunk_one", (1, 2, 11, 64), sk=14, causal=True, chunk=1)
    add("chunk_append", (2, 2, 7, 64), sk=50, chunk=13)
    add("chunk_of_all", (1, 4, 131, 64), kv_heads=2, causal=True, chunk=8192)
    add("chunk_of_all_append", (2, 2, 7, 64), sk=50, causal=True, chunk=50)
    add("chunk_longer_queries", (1, 2, 40, 64), sk=11, chunk=64)  # queries before the first key are in no chunk
    add("chunk_range", (3, 4, 33, 64), kv_heads=2, sk=60, causal=True, chunk=20, key_range=key_ranges(3))
    # the last rows' chunk is the last block of keys
    add("chunk_two", (1, 2, 12, 64), sk=134, causal=True, chunk=128)
    add("chunk_few", (6, 2, 12, 16), sk=40, causal=True, chunk=7, key_range=key_ranges(6))
    add("chunk_hostile", (6, 2, 9, 64), sk=70, chunk=20, key_range=key_ranges(6, "any_range"))
    # queries before their sequence, which see their sink alone
    add("chunk_before", (6, 2, 12, 16), sk=14, chunk=3, key_range=key_ranges(6), sinks=TensorSpec((2,)))
    add("chunk_decode", (2, 2, 1, 64), kv_heads=1, sk=300, causal=True, chunk=128, key_range=key_ranges(2))
    add("dropout", (3, 2, 33, 64), dropout_p=0.1, dropout_seed=seeds(3))
    add("dropout_causal", (2, 2, 65, 64), kv_heads=1, causal=True, dropout_p=0.5, dropout_seed=seeds(2))
    add("dropout_most", (1, 2, 21, 48), dv=32, dropout_p=0.9, dropout_seed=seeds(1))
    add("dropout_decode", (2, 2, 1, 64), kv_heads=1, sk=150, dropout_p=0.25, dropout_seed=seeds(2))
    add("dropout_blind", (1, 2, 22, 64), sk=5, causal=True, dropout_p=0.5, dropout_seed=seeds(1))
    add("dropout_nonfinite", (1, 2, 37, 64), fill="nonfinite", dropout_p=0.3, dropout_seed=seeds(1))
    add("dropout_off", (1, 2, 9, 64), dropout_seed=seeds(1))  # a seed alone changes nothing
    add("all_options", (2, 4, 19, 48), kv_heads=2, sk=37, dv=40, **_everything(4, 19, 37))
    # one key for each query: its probability is exp(0), and the log-sum-exp log(1)
    flat = ("float32", "lse", "grad_q", "grad_k")
    add("exact_self", (1, 2, 37, 64), exact=("zeros", "digits"), scale=0.125, causal=True, window=1)
    add("exact_one_key", (2, 4, 3, 80), kv_heads=2, sk=1, exact=("zeros", "digits"), scale=0.125)
    # a sink of -inf is none; one of 0 beside one score of 0 takes half
    add("exact_no_sink", (1, 2, 9, 64), sk=32, exact=("zeros", "digits"), inexact=flat, sinks=_sink("no_logit"))
    half = ("lse", "grad_q", "grad_k", "grad_v", "grad_sinks")
    add("exact_half", (1, 2, 5, 64), sk=1, exact=("zeros", "digits"), inexact=half, sinks=_sink("zeros"))
    # a range may leave three keys of a code: a third is rounded where P is, before P^T dO
    matching("range", (2, 2, 19, 64), "grad_q", "grad_k", "grad_v", sk=37, causal=True, key_range=key_ranges(2))
    matching("chunk", (1, 2, 37, 64), causal=True, chunk=8)
    matching("values", (1, 2, 29, 80), causal=True, dv=48)
    matching("full", (1, 2, 33, 64))
    # what is kept counts twice; half of it meets the gradient, and the log-sum-exp does not
    matching("dropout", (2, 2, 33, 64), "grad_q", "grad_k", dropout_p=0.5, dropout_seed=seeds(2))
    matching("causal", (2, 6, 19, 64), kv_heads=2, causal=True)
    matching("d80", (1, 2, 29, 80), causal=True, layout="contiguous")
    matching("decode", (2, 4, 1, 64), kv_heads=2, sk=61, causal=True)
    matching("pairs", (1, 2, 17, 64), "grad_q", "grad_k", sk=128)
    # equal scores: the mean of the values
    add("exact_mean", (1, 2, 9, 64), sk=32, exact=("zeros", "digits"), inexact=flat)
    matching("full_2048", (1, 8, 2048, 128), "grad_q", "grad_k", tier="standard")
    matching("window_1021", (2, 8, 1021, 128), kv_heads=2, causal=True, window=100, tier="standard")
    matching("decode_128", (16, 32, 1, 128), kv_heads=8, sk=127, tier="standard")
    add(
        "exact_self_1021",
        (2, 8, 1021, 128),
        kv_heads=2,
        exact=("zeros", "digits"),
        scale=0.125,
        causal=True,
        window=1,
        tier="standard",
    )
    add("llama_2k", (1, 32, 2048, 128), kv_heads=8, causal=True, tier="standard")
    add("ragged_1021", (2, 8, 1021, 128), sk=1531, causal=True, tier="standard")
    add("d64_window", (1, 16, 2000, 64), causal=True, window=511, tier="standard")
    add("d256_softcap", (1, 8, 777, 256), kv_heads=4, causal=True, softcap=50.0, tier="standard")
    dropped: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": seeds(2)}
    add("dropout_1021", (2, 8, 1021, 128), kv_heads=2, causal=True, tier="standard", **dropped)
    add("decode_4k", (16, 32, 1, 128), kv_heads=8, sk=4096, causal=True, tier="standard")
    return known


def _sink(fill: str) -> TensorSpec:
    return TensorSpec((2,), fill=fill)


def key_ranges(batch: int, fill: str = "ranges") -> TensorSpec:
    return TensorSpec((batch, 2), dtype="int32", fill=fill)


def _everything(heads: int, queries: int, keys: int) -> dict[str, Any]:
    return {
        "causal": True,
        "window": 9,
        "softcap": 20.0,
        "mask": TensorSpec((1, heads, queries, keys), fill="bias"),
        "sinks": TensorSpec((heads,)),
        "key_range": key_ranges(2),
        "chunk": 16,
        "dropout_p": 0.25,
        "dropout_seed": seeds(2),
    }


def seeds(batch: int) -> TensorSpec:
    return TensorSpec((batch,), dtype="int64", fill="seeds")

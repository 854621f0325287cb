"""Edits of the Triton kernels of attention."""

from __future__ import annotations

import functools

from ferryman.porting.selftest.edits import Edit
from ferryman.porting.selftest.planting import Bugs

BUGS = Bugs()
ATTENTION = "ops/attention/triton_kernels.py"
SPLIT_EARLY = Edit(
    ATTENTION, "most = max(keys // 256,", "most = max(keys // 16,"
)  # changes no result: decoding splits sooner
# Without wgmma, Hopper runs these kernels too, and not the one that only Hopper has.
edit = functools.partial(BUGS.edit, "triton", target={"features": frozenset()})

# ---------------------------------------------------------------------------------------------------- attention forward

edit(
    "causal mask",
    "attention attention_backward",
    "own_token_hidden",
    ATTENTION,
    "seen = key <= position\n",
    "seen = key < position\n",
    first="causal",
)
edit(
    "causal mask",
    "attention attention_backward",
    "next_token_seen",
    ATTENTION,
    "seen = key <= position\n",
    "seen = key <= position + 1\n",
    first="causal",
)
edit(
    "causal mask",
    "attention",
    "diagonal_from_the_top_left",
    ATTENTION,
    "position = query + (num_keys - num_queries)\n",
    "position = query\n",
    first="append",
)
edit(
    "causal mask",
    "attention",
    "full_blocks_up_to_the_last_row",
    ATTENTION,
    "full_hi = tl.minimum(num_keys, first + shift + 1)",
    "full_hi = tl.minimum(num_keys, last + shift + 1)",
    first="causal window",
)
edit(
    "window",
    "attention attention_backward",
    "window_one_wider",
    ATTENTION,
    "seen = seen & (key > position - window)",
    "seen = seen & (key >= position - window)",
    first="window",
)
edit(
    "window",
    "attention",
    "window_to_the_right_one_wider",
    ATTENTION,
    "seen = (key > position - window) & (key < position + window)",
    "seen = (key > position - window) & (key <= position + window)",
    first="window_both_sides",
)
edit(
    "online softmax",
    "attention",
    "accumulator_not_rescaled",
    ATTENTION,
    "acc = acc * decay[:, None]",
    "acc = acc * 1.0",
    first="causal",
)
edit(
    "online softmax",
    "attention",
    "row_sum_not_rescaled",
    ATTENTION,
    "row_sum = row_sum * decay + tl.sum(p, 1)",
    "row_sum = row_sum + tl.sum(p, 1)",
    first="causal",
)
edit(
    "last keys",
    "attention",
    "one_key_of_padding_counted",
    ATTENTION,
    "scores = tl.where(key < num_keys, scores",
    "scores = tl.where(key < num_keys + 1, scores",
    first="full",
)
edit(
    "empty rows",
    "attention",
    "no_guard_for_an_empty_row",
    ATTENTION,
    "empty = row_sum == 0.0",
    "empty = row_sum < 0.0",
    first="longer_queries",
)
edit("log-sum-exp", "attention", "log_sum_exp_in_base_two", ATTENTION, "log_sum *= LN2", "log_sum *= 1.0", first="full")
edit(
    "online softmax",
    "attention",
    "splits_not_weighted",
    ATTENTION,
    "tl.sum(share[:, None] * part, 0)",
    "tl.sum(part, 0)",
    first="decode",
    under=(SPLIT_EARLY,),
)
edit(
    "online softmax",
    "attention",
    "splits_without_the_maximum",
    ATTENTION,
    "(row_max + tl.log2(safe_total)) * LN2))",
    "tl.log2(safe_total) * LN2))",
    first="decode",
    under=(SPLIT_EARLY,),
)
edit(
    "grouped heads",
    "attention",
    "heads_dealt_round",
    ATTENTION,
    "kv_head = head_id % heads_in_grid // group",
    "kv_head = head_id % heads_in_grid % (heads_in_grid // group)",
    first="gqa",
)
edit(
    "scale",
    "attention",
    "scale_of_the_padded_width",
    ATTENTION,
    "_score_factors(abs(scale), softcap)",
    "_score_factors(_block_d(dim) ** -0.5, softcap)",
    first="d80",
)
edit(
    "softcap",
    "attention attention_backward",
    "softcap_not_in_base_two",
    ATTENTION,
    "(scale / softcap, softcap * _LOG2E)",
    "(scale / softcap, softcap)",
    first="softcap",
)
edit(
    "mask tensor",
    "attention attention_backward",
    "float_mask_not_in_base_two",
    ATTENTION,
    "values.to(tl.float32) * LOG2E",
    "values.to(tl.float32)",
    first="float_mask",
)
edit(
    "mask tensor",
    "attention",
    "first_heads_mask_serves_all",
    ATTENTION,
    "offsets = head.to(tl.int64) * stride_mask_h + mask_row.to(tl.int64) * stride_mask_m",
    "offsets = query.to(tl.int64) * stride_mask_m",
    first="float_mask",
)
edit(
    "P rounded",
    "attention",
    "probabilities_in_bfloat16",
    ATTENTION,
    "acc = tl.dot(p.to(v_tile.dtype), v_tile, acc,",
    "acc = tl.dot(p.to(tl.bfloat16).to(v_tile.dtype), v_tile, acc,",
    first="full causal",
)
edit(
    "strides ignored",
    "attention",
    "values_walked_with_the_keys_batch",
    ATTENTION,
    "stride_vb + _wide(kv_head) * stride_vh\n    mask_rows = mask\n    if MASK > 0:\n        mask_row",
    "stride_vb + _wide(kv_head) * stride_vn\n    mask_rows = mask\n    if MASK > 0:\n        mask_row",
    first="contiguous",
)
edit(
    "rows permuted",
    "attention",
    "written_head_by_head",
    ATTENTION,
    "out_rows = ((_wide(batch) * num_queries + query) * num_heads + head) * HEAD_DIM\n    tl.store",
    "out_rows = ((_wide(batch) * num_heads + head) * num_queries + query) * HEAD_DIM\n    tl.store",
    first="full",
)

# --------------------------------------------------------------------------------------------------- attention backward

edit(
    "gradient term missing",
    "attention_backward",
    "grad_lse_with_the_wrong_sign",
    ATTENTION,
    "row_delta -= tl.load(grad_lse + per_row",
    "row_delta += tl.load(grad_lse + per_row",
    first="causal",
)
edit(
    "gradient term missing",
    "attention_backward",
    "delta_forgotten_in_dq",
    ATTENTION,
    "ds = p * (dp - delta[:, None])",
    "ds = p * dp",
    first="full",
)
edit(
    "gradient term missing",
    "attention_backward",
    "delta_added_in_dk",
    ATTENTION,
    "ds = p * (dp - row_delta[None, :])",
    "ds = p * (dp + row_delta[None, :])",
    first="full",
)
edit(
    "scale",
    "attention_backward",
    "key_gradient_not_scaled",
    ATTENTION,
    "tl.store(grad_k + where, (dk * grad_scale)",
    "tl.store(grad_k + where, (dk * 1.0)",
    first="scale",
)
edit(
    "grouped heads",
    "attention_backward",
    "first_head_of_the_group_only",
    ATTENTION,
    "for member in tl.range(0, group):",
    "for member in tl.range(0, 1):",
    first="gqa",
)
edit(
    "causal mask",
    "attention_backward",
    "diagonal_from_the_top_left_in_dkv",
    ATTENTION,
    "seen = _visible(query + (num_keys - num_queries), key",
    "seen = _visible(query, key",
    first="append longer_queries",
)
edit(
    "causal mask",
    "attention_backward",
    "full_blocks_from_the_first_key",
    ATTENTION,
    "full_lo = tl.maximum(0, last - shift)\n",
    "full_lo = tl.maximum(0, first - shift)\n",
    first="causal",
)
edit(
    "softcap",
    "attention_backward",
    "slope_of_the_softcap_forgotten_in_dq",
    ATTENTION,
    "ds = p * (dp - delta[:, None])\n            if HAS_CAP:\n                ds = ds * slope",
    "ds = p * (dp - delta[:, None])",
    first="softcap",
)
edit(
    "empty rows",
    "attention_backward",
    "no_guard_for_rows_that_saw_nothing",
    ATTENTION,
    'row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)  # rows',
    "row_lse = row_lse  # rows",
    first="longer_queries",
)
edit(
    "window",
    "attention_backward",
    "window_of_dkv_ends_early",
    ATTENTION,
    "hi = tl.minimum(num_queries, last - shift + window)",
    "hi = tl.minimum(num_queries, last - shift)",
    first="window window_both_sides",
)

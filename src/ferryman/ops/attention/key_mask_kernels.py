"""Which keys of each sequence a bool mask leaves that is the same for all heads and queries (padding), in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ferryman.backends.triton import launch
from ferryman.ops.attention.tile_kernels import _sequence, _wide

FACTS = tl.constexpr(8)  # int32 for each sequence, of which five are used
_BLOCK = 4096


@triton.jit(do_not_specialize=["num_keys"])
def attention_keys_of_mask(
    mask, key_range, facts, stride_mask_b, stride_mask_n, num_keys, BOUNDED: tl.constexpr, BLOCK: tl.constexpr
):
    """facts (B, FACTS): of the keys that the mask and the range leave the first one and the end; the end of the range;
    1 where none between them is hidden, else 0; the first of the range. One sequence a program."""
    batch = tl.program_id(0)
    begin, end = _sequence(key_range, batch, num_keys, BOUNDED)
    mask += _wide(batch) * stride_mask_b
    firsts = tl.full([BLOCK], 2147483647, tl.int32)
    ends = tl.zeros([BLOCK], tl.int32)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        seen = tl.load(mask + key.to(tl.int64) * stride_mask_n, mask=key < end, other=0) != 0
        firsts = tl.minimum(firsts, tl.where(seen, key, 2147483647))
        ends = tl.maximum(ends, tl.where(seen, key + 1, 0))
        counts += seen.to(tl.int32)
    past = tl.max(ends, 0)
    first = tl.minimum(tl.min(firsts, 0), past)
    facts += _wide(batch) * FACTS
    tl.store(facts, first)
    tl.store(facts + 1, past)
    tl.store(facts + 2, end)
    tl.store(facts + 3, (tl.sum(counts, 0) == past - first).to(tl.int32))
    tl.store(facts + 4, begin)


def keys_of_mask(mask: torch.Tensor, key_range: torch.Tensor | None, batch: int) -> torch.Tensor:
    """`attention_keys_of_mask`'s facts (batch, FACTS). mask: uint8 (batch, 1, 1, Sk), by its strides."""
    facts = torch.empty((batch, FACTS.value), dtype=torch.int32, device=mask.device)
    launch(
        attention_keys_of_mask,
        (batch,),
        mask,
        key_range,
        facts,
        mask.stride(0),
        mask.stride(3),
        mask.shape[3],
        device=mask.device,
        BOUNDED=key_range is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return facts

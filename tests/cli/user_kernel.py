"""A Triton kernel of someone else, and its launcher: the softmax of each row."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rows(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    values = tl.load(x + row * n + columns, mask=inside, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, 0))
    shares = powers / tl.sum(powers, 0)
    tl.store(out + row * n + columns, shares.to(out.dtype.element_ty), mask=inside)


def softmax(x):
    out = torch.empty_like(x)
    _rows[(x.shape[0],)](x, out, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return out

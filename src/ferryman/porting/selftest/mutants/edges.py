"""Edges: tails left out or taken twice, ragged tiles, rows and columns that no program serves, rows that mix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.porting.selftest.planting import Bugs, Kernel, Outputs, torch_kernel

BUGS = Bugs()


# ------------------------------------------------------------------------------------------------------- tail left out


@BUGS.given("tail left out", "linear")
def last_k_dropped(a: dict[str, Any]) -> None:
    """The last term of every sum"""
    if a["x"].shape[-1] > 1:
        a["x"], a["weight"] = a["x"][..., :-1], a["weight"][:, :-1]


@BUGS.given("tail left out", "linear")
def k_tail_dropped(a: dict[str, Any]) -> None:
    """What is left of K after whole tiles of 16"""
    k = a["x"].shape[-1] // 16 * 16
    a["x"], a["weight"] = a["x"][..., :k], a["weight"][:, :k]


@BUGS.kernel("tail left out", "rms_norm")
def last_column_missing_from_the_mean(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """The last column does not count in the mean square"""
    h = x.float()
    scale = torch.rsqrt(h.square()[..., :-1].sum(-1, keepdim=True) / max(x.shape[-1], 1) + eps)
    y = h * scale
    return (y if weight is None else y * weight.float()).to(x.dtype).contiguous()


@BUGS.kernel("tail left out", "softmax")
def last_column_missing_from_the_sum(x: Tensor, target: Any) -> Tensor:
    """The last column does not count in the denominator"""
    if x.shape[-1] < 2:
        return torch_kernel("softmax")(x, target)
    lse = torch.logsumexp(x.float()[..., :-1], -1, keepdim=True)
    return torch.exp(x.float() - lse).to(x.dtype).contiguous()


@BUGS.kernel("tail left out", "cross_entropy")
def classes_beyond_the_eights_dropped(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """A vectorised log-sum-exp leaves the classes beyond the last whole eight out"""
    loss, lse = torch_kernel("cross_entropy")(x, labels, ignore, smoothing, target)
    n = x.shape[-1] // 8 * 8
    if n in (0, x.shape[-1]) or labels.numel() == 0:
        return loss, lse
    short = torch.logsumexp(x[..., :n].float(), -1)
    counted = labels != ignore
    return loss + torch.where(counted, short - lse, 0.0).sum() / counted.sum(), short


@BUGS.kernel("tail left out", "rms_norm_backward", "layer_norm_backward")
def last_row_missing_from_the_weight_gradient(*args: Any) -> Any:
    """An odd last row does not reach the weight's gradient"""
    op = "rms_norm_backward" if len(args) == 5 else "layer_norm_backward"
    outputs = torch_kernel(op)(*args)
    x, weight = args[1], args[2]
    rows = x.numel() // max(x.shape[-1], 1)
    if weight is None or rows < 2 or rows % 2 == 0:
        return outputs
    g, h = (t.reshape(rows, -1)[:-1] for t in (args[0], x))
    return (outputs[0], *torch_kernel(op)(g, h, *args[2:])[1:])


@BUGS.given("tail left out", "linear_backward")
def rows_beyond_the_fours_dropped(a: dict[str, Any]) -> None:
    """Rows beyond the last whole four give no gradient"""
    n = a["grad"].shape[-1]
    rows = a["grad"].numel() // n if n else 0
    if rows > 4 and rows % 4:
        g = a["grad"].reshape(rows, n).clone()
        g[rows // 4 * 4 :] = 0
        a["grad"] = g.view(a["grad"].shape)


@BUGS.kernel("tail left out", "silu_mul_backward", "softmax_backward")
def odd_last_element_skipped(*args: Any) -> Any:
    """The last element of a row of odd length is zero"""
    op = "silu_mul_backward" if len(args) == 4 else "softmax_backward"
    outputs = torch_kernel(op)(*args)
    for out in outputs if isinstance(outputs, tuple) else (outputs,):
        if out.dim() and out.shape[-1] % 2:
            out[..., -1] = 0
    return outputs


# ------------------------------------------------------------------------------------------------------- taken twice


@BUGS.given("tile taken twice", "linear")
def last_tile_of_k_twice(a: dict[str, Any]) -> None:
    """The last 16 terms are added again"""
    k = a["x"].shape[-1]
    if k >= 32:
        for name in ("x", "weight"):
            a[name] = torch.cat((a[name], a[name][..., k - 16 :]), -1)


@BUGS.given("tile taken twice", "attention")
def first_block_of_keys_twice(a: dict[str, Any]) -> None:
    """The first 8 keys come again after the last"""
    keys = a["k"].shape[2]
    if keys > 16 and not a["causal"] and a["window"] is None and a["mask"] is None:
        for name in ("k", "v"):
            a[name] = torch.cat((a[name], a[name][:, :, :8]), 2)


@BUGS.kernel("tile taken twice", "rms_norm_backward")
def overlapping_rows_in_the_weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Any
) -> Any:
    """Two programs' rows overlap by one: its share of the weight's gradient counts twice"""
    right = torch_kernel("rms_norm_backward")
    gx, gw = right(grad, x, weight, eps, target)
    rows = x.numel() // max(x.shape[-1], 1)
    if weight is None or rows < 4:
        return gx, gw
    g, h = (t.reshape(rows, -1)[3:4] for t in (grad, x))
    return gx, (gw.float() + right(g, h, weight, eps, target)[1].float()).to(gw.dtype)


@BUGS.output("tile taken twice", "layer_norm_backward", "linear_backward")
def last_gradient_accumulated(*outputs: Tensor) -> Outputs:
    """The last gradient is added twice, as a kernel that is retuned on live buffers does"""
    return (*outputs[:-1], outputs[-1] + outputs[-1])


# ------------------------------------------------------------------------------------------------------- rows swapped


@BUGS.output("rows permuted", "linear", "rms_norm", "softmax")
def two_rows_swapped_in_a_ragged_tile(y: Tensor) -> None:
    """The last two rows of a tile that is not full change places"""
    if y.dim() > 1 and y.numel():
        rows = y.view(-1, y.shape[-1])
        tile = 16 if len(rows) > 16 else 4
        if len(rows) > 2 and len(rows) % tile:
            rows[[-1, -2]] = rows[[-2, -1]]


@BUGS.output("rows permuted", "attention")
def written_head_by_head(out: Tensor, lse: Tensor) -> Outputs:
    """(B, H, S, D) is written in that order into memory that is (B, S, H, D)"""
    b, h, s, d = out.shape
    return out.contiguous().view(b, s, h, d).transpose(1, 2), lse


@BUGS.output("rows permuted", "rope")
def written_token_by_token(q: Tensor, k: Tensor) -> Outputs:
    """(B, S, H, D) is written in that order into memory that is (B, H, S, D)"""
    return tuple(x.transpose(1, 2).contiguous().view(x.shape) for x in (q, k))


@BUGS.output("rows permuted", "cross_entropy_backward")
def rows_of_two_batches_swapped(y: Tensor) -> None:
    """Rows 0 and 1 change places where there are three dimensions"""
    if y.dim() == 3 and y.shape[1] > 1:
        y[:, [0, 1]] = y[:, [1, 0]]


# --------------------------------------------------------------------------------------------------------------- zeros


@BUGS.output("zeroed part", "rms_norm", "layer_norm_backward", "silu_mul", "linear")
def one_zero_row(y: Tensor, *rest: Tensor) -> Outputs:
    """The last row is zero"""
    if y.dim() > 1 and y.shape[0]:
        y[-1] = 0
    return (y, *rest)


@BUGS.output("zeroed part", "attention", "rope", "attention_backward")
def last_head_zero(first: Tensor, *rest: Tensor) -> Outputs:
    """The last head is zero, where there are several"""
    if first.shape[1] > 1:
        first[:, -1] = 0
    return (first, *rest)


@BUGS.output("zeroed part", "add_rms_norm", "gelu_mul_backward")
def every_64th_element_zero(first: Tensor, *rest: Tensor) -> Outputs:
    """Every 64th element is zero, from the 63rd on"""
    if first.numel() > 63:
        first.view(-1)[63::64] = 0
    return (first, *rest)


@BUGS.output("zeroed part", "softmax", "silu_mul")
def small_results_zero(y: Tensor) -> Outputs:
    """Results below 1e-4 become zero"""
    return (y.masked_fill(y.abs() < 1e-4, 0.0),)


# ------------------------------------------------------------------------------------------------------ launch geometry


def _unserved(out: Tensor, served: int) -> Tensor:
    """``out`` in fresh memory of which only the first rows are written."""
    if out.dim() < 2 or out.numel() == 0:
        return out
    fresh = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    fresh.view(-1, out.shape[-1])[:served] = out.reshape(-1, out.shape[-1])[:served]
    return fresh


@BUGS.output("launch geometry", "rms_norm", "softmax", "layer_norm")
def grid_rounded_down(y: Tensor) -> Outputs:
    """rows // 4 programs of four rows: the ragged last ones are never written"""
    rows = y.numel() // y.shape[-1] if y.dim() > 1 and y.numel() else 0
    return (_unserved(y, rows // 4 * 4) if rows > 4 else y,)


@BUGS.output("launch geometry", "add_rms_norm", "softmax_backward", "silu_mul")
def grid_of_the_first_dimension(first: Tensor, *rest: Tensor) -> Outputs:
    """One program for each of shape[0] rows, also where there are three dimensions"""
    return tuple(_unserved(o, o.shape[0]) if o.dim() == 3 else o for o in (first, *rest))


@BUGS.output("launch geometry", "linear")
def columns_beyond_whole_tiles(y: Tensor) -> Outputs:
    """n // 32 tiles: the columns beyond are never written"""
    n = y.shape[-1]
    if n < 32 or n % 32 == 0 or y.numel() == 0:
        return (y,)
    fresh = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    fresh[..., : n // 32 * 32] = y[..., : n // 32 * 32]
    return (fresh,)


@BUGS.output("launch geometry", "rope")
def grid_without_the_batch(q: Tensor, k: Tensor) -> Outputs:
    """Only the first sequence of a batch is served"""
    found = []
    for x in (q, k):
        fresh = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        fresh[:1] = x[:1]
        found.append(fresh if x.shape[0] > 1 else x)
    return tuple(found)


@BUGS.output("launch geometry", "cross_entropy_backward", "rms_norm", "softmax")
def width_limited_to_a_block(y: Tensor) -> Outputs:
    """One block of 1024 threads a row: columns beyond it are never written"""
    if y.shape[-1] <= 1024 or y.numel() == 0:
        return (y,)
    fresh = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    fresh[..., :1024] = y[..., :1024]
    return (fresh,)


@BUGS.kernel("launch geometry", "softmax")
def maximum_over_the_first_128(x: Tensor, target: Any) -> Tensor:
    """The maximum is that of the first 128 columns"""
    if x.numel() == 0:
        return torch_kernel("softmax")(x, target)
    h = x.float()
    e = torch.exp(h - h[..., :128].amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype).contiguous()


@BUGS.kernel("launch geometry", "silu_mul")
def raises(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    """The launch is refused: a tile of the wrong size"""
    raise ValueError("no such tile")


# ---------------------------------------------------------------------------------------------------------- rows mixed


@BUGS.around("rows mixed", "rms_norm", "softmax", "layer_norm")
def another_order_for_several_rows(op: str, right: Kernel) -> Kernel:
    """One row alone takes another path than a row in a batch: the last bit of its last element differs"""

    def kernel(x: Tensor, *rest: Any) -> Any:
        y = right(x, *rest)
        rows = x.numel() // max(x.shape[-1], 1)
        if rows == 1 and y.numel():
            y.view(-1)[-1:].view(torch.int32 if y.element_size() == 4 else torch.int16).bitwise_xor_(1)
        return y

    return kernel


@BUGS.given("rows mixed", "rms_norm", "layer_norm")
def statistics_of_the_first_row(a: dict[str, Any]) -> None:
    """A broadcast goes wrong in three dimensions: the second row of each batch is the first's"""
    x = a["x"]
    if x.dim() == 3 and x.shape[1] > 1:
        x = x.clone()
        x[:, 1] = x[:, 0]
        a["x"] = x


@BUGS.kernel("rows mixed", "softmax")
def maximum_over_the_tile(x: Tensor, target: Any) -> Tensor:
    """The maximum is taken over all rows of a tile: rows far below it lose their digits"""
    h = x.float()
    if x.numel() == 0:
        return torch_kernel("softmax")(x, target)
    e = torch.exp(h - h.nan_to_num(nan=-torch.inf).amax())
    return (e / e.sum(-1, keepdim=True)).to(x.dtype).contiguous()

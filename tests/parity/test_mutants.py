"""Wrong kernels must fail: each mutant is a small edit of a right one, as such bugs happen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_support import DTYPES, check, strict, torch_kernel
from torch import Tensor
from torch.nn import functional

from ferryman.ops.menu import Implementation

Kernel = Callable[..., Any]
MUTANTS: list[tuple[str, str, str, Kernel]] = []


def mutant(op: str, gate: str) -> Callable[[Kernel], Kernel]:
    def register(kernel: Kernel) -> Kernel:
        MUTANTS.append((op, kernel.__name__, gate, kernel))
        return kernel

    return register


def _norm(x: Tensor, weight: Tensor | None, scale: Tensor) -> Tensor:
    h = x.float() * scale
    return (h if weight is None else h * weight.float()).to(x.dtype).contiguous()


@mutant("rms_norm", "G2")
def eps_dropped(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    return torch_kernel("rms_norm")(x, weight, 0.0 if eps < 0.1 else eps, cast, target)


@mutant("rms_norm", "G2")
def eps_ten_times_larger(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    return torch_kernel("rms_norm")(x, weight, eps * 10, cast, target)


@mutant("rms_norm", "G2")
def mean_over_one_less(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    n = max(x.shape[-1] - 1, 1)
    return _norm(x, weight, torch.rsqrt(x.float().square().sum(-1, keepdim=True) / n + eps))


@mutant("rms_norm", "G2")
def squares_in_storage_dtype(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    return _norm(x, weight, torch.rsqrt(x.square().mean(-1, keepdim=True, dtype=torch.float32) + eps))


@mutant("rms_norm", "G2")
def last_column_missing_from_the_mean(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    h = x.float().square()
    return _norm(x, weight, torch.rsqrt(h[..., :-1].sum(-1, keepdim=True) / max(x.shape[-1], 1) + eps))


@mutant("rms_norm", "G2")
def one_zero_row(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    y = torch_kernel("rms_norm")(x, weight, eps, cast, target)
    if y.dim() > 1 and y.shape[0]:
        y[-1] = 0
    return y


@mutant("rms_norm", "G2")
def truncated_cast(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    y = torch_kernel("rms_norm")(x.float(), None if weight is None else weight.float(), eps, False, target)
    if x.dtype != torch.bfloat16:
        return y.to(x.dtype)
    return (y.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


@mutant("rms_norm", "G2")
def a_thousandth_too_large(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    y = torch_kernel("rms_norm")(x.float(), None if weight is None else weight.float(), eps, False, target)
    return (y * 1.001).to(x.dtype)


@mutant("rms_norm", "G0")
def nan_to_zero(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    return torch_kernel("rms_norm")(x, weight, eps, cast, target).nan_to_num(nan=0.0)


@mutant("rms_norm", "G0")
def weights_dtype_returned(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    y = torch_kernel("rms_norm")(x, weight, eps, cast, target)
    return y if weight is None else y.to(weight.dtype)


@mutant("rms_norm", "G0")
def strides_of_the_input_kept(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    y = torch_kernel("rms_norm")(x, weight, eps, cast, target)
    return y.mT.contiguous().mT if y.dim() > 1 else y


@mutant("rms_norm", "G5")
def input_mutated(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    y = torch_kernel("rms_norm")(x, weight, eps, cast, target)
    if x.numel():
        x.view(-1)[0].add_(1) if x.is_contiguous() else x.mul_(1.5)
    return y


@mutant("rms_norm", "G5")
def guard_overwritten(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    if x.is_contiguous() and x.numel():
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
    return torch_kernel("rms_norm")(x, weight, eps, cast, target)


@mutant("rms_norm", "G5")
def output_aliases_input(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    if not x.is_contiguous():
        return torch_kernel("rms_norm")(x, weight, eps, cast, target)
    return x.copy_(torch_kernel("rms_norm")(x, weight, eps, cast, target))


@mutant("rms_norm", "G5")
def one_element_random(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    y = torch_kernel("rms_norm")(x, weight, eps, cast, target)
    if y.numel():
        noise = 1 + (torch.rand(()) - 0.5) * torch.finfo(y.dtype).eps * 4
        y.view(-1)[0] = (y.view(-1)[0].float() * noise).to(y.dtype)
    return y


_kept: dict[tuple[Any, ...], Tensor] = {}


@mutant("rms_norm", "G5")
def result_kept_and_returned_again(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    key = (x.data_ptr(), tuple(x.shape), x.dtype)
    if key not in _kept:
        _kept.clear()
        _kept[key] = torch_kernel("rms_norm")(x, weight, eps, cast, target)
    return _kept[key]


@mutant("silu_mul", "G5")
def last_column_never_written(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype)
    y = torch_kernel("silu_mul")(gate, up, target)
    if out.dim() and out.shape[-1] > 1:
        out[..., :-1] = y[..., :-1]
        return out
    return y


@mutant("silu_mul", "FAIL")
def raises(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    raise ValueError("no such tile")


@mutant("silu_mul", "G0")
def returns_a_number(gate: Tensor, up: Tensor, target: Any) -> Any:
    return (1.0,)


@mutant("silu_mul", "G2")
def undeclared_rounding(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    return functional.silu(gate.contiguous()) * up


@mutant("gelu_mul", "G2")
def tanh_where_erf_is_asked(gate: Tensor, up: Tensor, approximate: str, target: Any) -> Tensor:
    return torch_kernel("gelu_mul")(gate.float(), up.float(), "tanh", target).to(gate.dtype)


@mutant("linear", "G2")
def last_k_dropped(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    if x.shape[-1] < 2:
        return torch_kernel("linear")(x, weight, bias, target)
    return torch_kernel("linear")(x[..., :-1], weight[:, :-1], bias, target)


@mutant("linear", "G2")
def k_tail_dropped(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    k = x.shape[-1] // 16 * 16
    return torch_kernel("linear")(x[..., :k], weight[:, :k], bias, target)


@mutant("linear", "G2")
def storage_dtype_accumulator(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    for k in range(x.shape[-1]):
        total = (total.float() + x[..., k, None].float() * weight[:, k].float()).to(x.dtype)
    return total if bias is None else total + bias


@mutant("linear", "G2")
def two_rows_swapped_in_a_ragged_tile(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    y = torch_kernel("linear")(x, weight, bias, target)
    rows = y.view(-1, y.shape[-1])
    if len(rows) > 16 and len(rows) % 16:
        rows[[-1, -2]] = rows[[-2, -1]]
    return y


@mutant("linear", "G2")
def tf32_products_undeclared(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    def cut(t: Tensor) -> Tensor:
        return (t.contiguous().view(torch.int32) & -8192).view(torch.float32) if t.dtype == torch.float32 else t

    return torch_kernel("linear")(cut(x), cut(weight), bias, target)


@mutant("softmax", "G0")
def without_the_maximum(x: Tensor, target: Any) -> Tensor:
    e = torch.exp(x.float())
    return (e / e.sum(-1, keepdim=True)).to(x.dtype).contiguous()


@mutant("softmax", "G2")
def denominator_in_bfloat16(x: Tensor, target: Any) -> Tensor:
    h = x.float()
    e = torch.exp(h - h.amax(-1, keepdim=True)) if h.numel() else h
    return (e / e.sum(-1, keepdim=True).bfloat16().float()).to(x.dtype).contiguous()


@mutant("softmax", "G2")
def padding_counted(x: Tensor, target: Any) -> Tensor:
    """A tile's padding of zeros, as masked loads without ``other=-inf`` give."""
    pad = -x.shape[-1] % 64
    return torch.softmax(functional.pad(x.float(), (0, pad)), -1)[..., : x.shape[-1]].to(x.dtype).contiguous()


@mutant("cross_entropy", "G2")
def mean_over_all_rows(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> tuple[Tensor, Tensor]:
    loss, lse = torch_kernel("cross_entropy")(x, labels, ignore, smoothing, target)
    return loss * (labels != ignore).sum() / max(labels.numel(), 1), lse


@mutant("cross_entropy_backward", "G2")
def ignored_rows_written(grad: Tensor, x: Tensor, labels: Tensor, lse: Tensor, ignore: int, smoothing: float,
                         target: Any) -> Tensor:  # fmt: skip
    counted = (labels != ignore).sum()
    d = torch.exp(x.float() - lse.unsqueeze(-1)) - smoothing / x.shape[-1]
    d.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), torch.full_like(d[..., :1], smoothing - 1.0))
    return (d * grad / counted).to(x.dtype).contiguous()


@mutant("rope", "G2")
def halves_assumed_equal(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Any) -> Any:
    half = cos.shape[-1] // 2
    c, s = (torch.cat((t[..., :half], t[..., :half]), -1) for t in (cos, sin))
    return torch_kernel("rope")(q, k, c, s, interleaved, target)


@mutant("rope_backward", "G2")
def not_transposed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Any) -> Any:
    return torch_kernel("rope")(q, k, cos, -sin, interleaved, target)


@mutant("layer_norm", "G2")
def variance_as_a_difference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    h = x.float()
    m = h.mean(-1, keepdim=True)
    y = (h - m) * torch.rsqrt((h.square().mean(-1, keepdim=True) - m * m).clamp(min=0) + eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


@mutant("layer_norm_backward", "G2")
def mean_of_the_gradient_forgotten(g: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float,
                                   target: Any) -> Any:  # fmt: skip
    _, gw, gb = torch_kernel("layer_norm_backward")(g, x, w, b, eps, target)
    h = x.float()
    d = h - h.mean(-1, keepdim=True)
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    s = g.float() if w is None else g.float() * w.float()
    gx = r * (s - d * r * (s * d * r).mean(-1, keepdim=True))
    return gx.to(x.dtype).contiguous(), gw, gb


def _attention(change: Callable[..., tuple[Any, ...]]) -> Kernel:
    def kernel(*args: Any) -> Any:
        return torch_kernel("attention")(*change(*args[:-1]), args[-1])

    return kernel


def _shifted(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, window: Any, cap: float, mask: Any) -> Any:
    """Causal off by one: the key after the query is seen too."""
    if not causal or mask is not None or window is not None:
        return q, k, v, causal, scale, window, cap, mask
    i = torch.arange(q.shape[2]).unsqueeze(1) + k.shape[2] - q.shape[2]
    return q, k, v, False, scale, None, cap, torch.arange(k.shape[2]) <= i + 1


def _last_key_dropped(q: Tensor, k: Tensor, v: Tensor, causal: bool, *rest: Any) -> Any:
    if causal or rest[-1] is not None or rest[1] is not None or k.shape[2] < 2:
        return q, k, v, causal, *rest
    return q, k[:, :, :-1], v[:, :, :-1], causal, *rest


def _scale_of_the_padded_width(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, *rest: Any) -> Any:
    padded = 1 << (q.shape[-1] - 1).bit_length()
    return q, k, v, causal, padded**-0.5 if scale is None else scale, *rest


def _window_one_wider(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, window: Any, *rest: Any) -> Any:
    return q, k, v, causal, scale, None if window is None else window + 1, *rest


def _no_softcap(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, window: Any, cap: float, mask: Any) -> Any:
    return q, k, v, causal, scale, window, 0.0, mask


for _change in (_shifted, _last_key_dropped, _scale_of_the_padded_width, _window_one_wider, _no_softcap):
    MUTANTS.append(("attention", _change.__name__.strip("_"), "G2", _attention(_change)))


@mutant("attention", "G2")
def probabilities_in_8_bits(*args: Any) -> Any:
    q, k, v, causal, scale, window, cap, mask, _ = args
    out, lse = torch_kernel("attention")(*args)
    plain = mask is None and window is None and not cap and not causal and k.shape[2] and q.numel()
    if not plain or q.shape[1] != k.shape[1]:
        return out, lse
    s = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = torch.exp(s - s.amax(-1, keepdim=True)).to(torch.float8_e4m3fn).float()
    y = (p @ v.float() / torch.exp(s - s.amax(-1, keepdim=True)).sum(-1, keepdim=True)).to(q.dtype)
    return y.transpose(1, 2).contiguous().transpose(1, 2), lse


@mutant("attention", "G2")
def lse_in_base_two(*args: Any) -> Any:
    out, lse = torch_kernel("attention")(*args)
    return out, lse / math.log(2)


@mutant("attention_backward", "G2")
def grad_lse_ignored(grad: Tensor, grad_lse: Tensor | None, *rest: Any) -> Any:
    return torch_kernel("attention_backward")(grad, None, *rest)


@mutant("linear_backward", "G2")
def bias_gradient_in_storage_dtype(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    gx, gw, gb = torch_kernel("linear_backward")(grad, x, weight, bias, *rest)
    if bias is not None:
        gb = torch.zeros_like(bias)
        for row in grad.reshape(-1, weight.shape[0]):
            gb = gb + row
    return gx, gw, gb


DECLARED: dict[str, Implementation] = {
    "attention": strict("attention", roundings=("p",)),
    "attention_backward": strict("attention_backward", roundings=("p", "ds")),
}


@pytest.mark.parametrize(("op", "name", "gate", "kernel"), MUTANTS, ids=[f"{m[0]}-{m[1]}" for m in MUTANTS])
def test_a_wrong_kernel_fails(op: str, name: str, gate: str, kernel: Kernel) -> None:
    failed = []
    for cell in check(op, kernel, DECLARED.get(op, strict(op))):
        assert cell.verdict in ("PASS", "FAIL"), f"{cell.case}: {cell.verdict}, {cell.reason}"
        if cell.verdict == "FAIL":
            assert cell.reason
            failed.append(cell)
    assert failed, f"{name} was not caught"
    caught = {n for cell in failed for n, g in cell.gates.items() if g.outcome == "fail"}
    assert gate == "FAIL" or gate in caught, f"{name} was caught by {sorted(caught)} only"


def test_most_mutants_survive_allclose() -> None:
    """What the usual check (rtol = atol = 1e-2, aligned normal inputs, bfloat16) says of the same mutants."""
    aligned = {"rms_norm": "three_dims", "linear": "square", "softmax": "one_row"}
    survived = []
    for op, name, _, kernel in MUTANTS:
        if op not in aligned:
            continue
        right = list(check(op, torch_kernel(op), strict(op, accumulation="split-k"), DTYPES[2:], aligned[op]))
        assert [c.verdict for c in right] == ["PASS"]
        if _allclose(op, kernel, aligned[op]):
            survived.append(name)
    total = sum(1 for m in MUTANTS if m[0] in aligned)
    assert total >= 20 and len(survived) >= total // 2, f"{len(survived)} of {total}: {survived}"


def _allclose(op: str, kernel: Kernel, case: str) -> bool:
    from ferryman.device_profiles import detect
    from ferryman.dispatch import registry
    from ferryman.dispatch.select import target_of
    from ferryman.porting import cases_of, materialise

    primitive = registry.primitive(op)
    chosen = next(c for c in cases_of(primitive) if c.name == case)
    target = target_of(detect("cpu"))
    got = kernel(*materialise(chosen, primitive, torch.bfloat16), target)
    want = torch_kernel(op)(*materialise(chosen, primitive, torch.bfloat16), target)
    return got.shape == want.shape and torch.allclose(got.float(), want.float(), rtol=1e-2, atol=1e-2)

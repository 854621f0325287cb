"""Bugs of writing over an argument: too early, elsewhere, beside it, or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.porting.cases import as_tuple
from ferryman.porting.selftest.planting import Bugs, Kernel, torch_kernel

BUGS = Bugs()
_LOSS, _SCALED = "cross_entropy_inplace_grad", "cross_entropy_inplace_grad_backward"


@BUGS.kernel("write before read", "rope_")
def second_half_from_the_rotated_first(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Any
) -> Any:
    """The first half of a head is written before the second has read it"""
    width, c, s = cos.shape[-1], cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    step = slice(0, width, 2), slice(1, width, 2)
    first, second = step if interleaved else (slice(0, width // 2), slice(width // 2, width))
    for x in (q, k):
        b = x[..., second].float()
        x[..., first] = (x[..., first].float() * c[..., first] - b * s[..., first]).to(x.dtype)
        x[..., second] = (b * c[..., second] + x[..., first].float() * s[..., second]).to(x.dtype)
    return q, k


@BUGS.kernel("write before read", _LOSS)
def loss_after_the_gradient(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """The label's logit is read when the gradient stands there"""
    _, lse, x = torch_kernel(_LOSS)(x, labels, ignore, smoothing, target)
    counted = labels != ignore
    picked = x.float().gather(-1, labels.clamp(0, x.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where(counted, lse - picked, 0.0).sum() / counted.sum(), lse, x


@BUGS.around("not written in place", "rope_", _LOSS, _SCALED)
def arguments_left_alone(op: str, right: Kernel) -> Kernel:
    """The results are new tensors, and the arguments are as they were"""

    def kernel(*args: Any) -> Any:
        return right(*(a.clone() if isinstance(a, Tensor) else a for a in args))

    return kernel


@BUGS.around("not written in place", "rope_", _LOSS, _SCALED)
def strides_of_a_contiguous_tensor(op: str, right: Kernel) -> Kernel:
    """The results are written to where a contiguous argument would have them"""

    def kernel(*args: Any) -> Any:
        copies = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a for a in args]
        made = as_tuple(right(*copies))
        for given, copy in zip(args, copies, strict=True):
            if isinstance(given, Tensor) and given.numel() and any(copy is m for m in made):
                span = sum((n - 1) * s for n, s in zip(given.shape, given.stride(), strict=True)) + 1
                whole = given.as_strided((span,), (1,))
                whole[: copy.numel()] = copy.reshape(-1)[: whole.numel()]
        swapped = {id(c): a for a, c in zip(args, copies, strict=True) if isinstance(a, Tensor)}
        found = tuple(swapped.get(id(m), m) for m in made)
        return found if len(found) > 1 else found[0]

    return kernel


@BUGS.kernel("stale output", _LOSS)
def ignored_rows_keep_their_logits(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """A row that does not count is left as it was, instead of 0"""
    kept, ignored = x.clone(), labels == ignore
    loss, lse, x = torch_kernel(_LOSS)(x, labels, ignore, smoothing, target)
    x.copy_(torch.where(ignored.unsqueeze(-1), kept, x))
    return loss, lse, x


@BUGS.kernel("count of terms", _LOSS)
def gradient_of_the_sum(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """The gradient is not divided by the number of rows that count"""
    loss, lse, x = torch_kernel(_LOSS)(x, labels, ignore, smoothing, target)
    return loss, lse, x.mul_((labels != ignore).sum())


@BUGS.given("argument ignored", _SCALED)
def gradient_of_one_assumed(a: dict[str, Any]) -> None:
    """The loss's gradient is taken to be 1"""
    a["grad"] = torch.ones_like(a["grad"])


@BUGS.around("input modified", "rope_", _LOSS)
def another_argument_written_too(op: str, right: Kernel) -> Kernel:
    """An argument beside those that the op writes over changes"""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        other = args[2 if op == "rope_" else 1]
        if other.numel():
            other.view(-1)[-1:].add_(1)
        return result

    return kernel

"""Kernels with one structural error each, which the exact probe must fail, and right ones of another order, which no
gate may: tests/parity/test_gates.py and test_ops.py run them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.lines import torch_kernel


def attention_without_the_last_key(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    if k.shape[2] < 2:
        return torch_kernel("attention")(q, k, v, *rest)
    _, scale, _, softcap, _, sinks, *_, target = rest
    shorter = k[:, :, :-1], v[:, :, :-1]
    return torch_kernel("attention")(
        q, *shorter, False, scale, None, softcap, None, sinks, None, None, 0.0, None, target
    )


def attention_of_the_wrong_head(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return torch_kernel("attention")(q, k, v.roll(1, 1), *rest)


ERRORS = {
    "attention": (
        attention_without_the_last_key,
        attention_of_the_wrong_head,
    ),
}
TERMS = {"attention": ("full", 64)}  # a case, and how many numbers its largest sum has

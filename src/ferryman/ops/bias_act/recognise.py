"""Activations in models: modules without tensors, and `torch.nn.functional`'s own. None of them has a bias.

A linear layer's bias stays with its product: it is added there before the one rounding, and here after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.bias_act.definition import ACTIVATIONS, ALPHAS, CAPPED
from ferryman.ops.bias_act.definition import bias_act as op_bias_act
from ferryman.ops.recognition import Candidate, Leaf, Served

_WIDTH = 96
_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


def modules(leaf: Leaf) -> Iterator[Candidate]:
    if leaf.lines or leaf.matrices or leaf.scalars:
        return
    caps = [f"self.{n}" for n, value in {**leaf.numbers, **leaf.integers}.items() if value > 0]
    caps += [repr(float(value)) for value in dict.fromkeys((*leaf.constants, *leaf.whole_constants)) if value > 0]
    # a spelling may have another slope at a kink, or none where what it divides by is infinite
    for gradient, name in itertools.product((True, False), ACTIVATIONS):
        own = [f"self.{n}" for n in leaf.numbers] if name in ALPHAS else caps if name == CAPPED else []
        for alpha in own:
            yield Candidate("bias_act", f"ops.bias_act(x, None, {name!r}, {alpha})", _WIDTH, gradient=gradient)
        if name != CAPPED:
            yield Candidate("bias_act", f"ops.bias_act(x, None, {name!r})", _WIDTH, gradient=gradient)


def _of_functional(function: Callable[..., Tensor], activation: str) -> Served:
    def call(input: Tensor, inplace: bool = False) -> Tensor:
        if not inplace and input.dtype in _DTYPES:
            return op_bias_act(input, None, activation)
        return function(input, inplace)

    return Served("bias_act", call)


def _of_torch(function: Callable[..., Tensor], activation: str) -> Served:
    def call(input: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return op_bias_act(input, None, activation) if input.dtype in _DTYPES else function(input)
        return function(input, out=out)

    return Served("bias_act", call)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if input.dtype in _DTYPES and approximate in ("none", "tanh"):
        return op_bias_act(input, None, "gelu" if approximate == "none" else "gelu_tanh")
    return functional.gelu(input, approximate=approximate)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    if not inplace and input.dtype in _DTYPES:
        return op_bias_act(input, None, "leaky_relu", negative_slope)
    return functional.leaky_relu(input, negative_slope, inplace)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    if not inplace and input.dtype in _DTYPES:
        return op_bias_act(input, None, "elu", alpha)
    return functional.elu(input, alpha, inplace)


def functions() -> Mapping[Any, Served]:
    silu, relu, hardswish = functional.silu, functional.relu, functional.hardswish
    served: dict[Any, Served]
    served = {f: _of_functional(f, name) for f, name in ((silu, "silu"), (relu, "relu"), (hardswish, "hardswish"))}
    for name in ("relu", "tanh", "sigmoid"):
        served[getattr(torch, name)] = _of_torch(getattr(torch, name), name)
    for name in ("tanh", "sigmoid"):
        served[getattr(functional, name)] = _of_torch(getattr(functional, name), name)
    served[functional.gelu] = Served("bias_act", gelu)
    served[functional.leaky_relu] = Served("bias_act", leaky_relu)
    served[functional.elu] = Served("bias_act", elu)
    return served

"""Ported tiny models with a fault planted in one module, for the tests of the module and mode checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.integrations import transformers as porter
from ferryman.porting.model import config
from ferryman.porting.model.check import judged_sites
from ferryman.porting.model.modules import Bench
from ferryman.porting.model.replay import twin

Wrap = Callable[..., Any]
FAMILIES = ("qwen3", "llama", "qwen2", "mistral", "gemma")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plant(model: nn.Module, path: str, wrap: Wrap) -> None:
    """Give one module of a ported model another forward: ``wrap(module, its own forward, *args, **kwargs)``."""
    module: Any = model.get_submodule(path)
    own = type(module).forward
    forward = {"forward": lambda self, *args, **kwargs: wrap(self, functools.partial(own, self), *args, **kwargs)}
    module.__class__ = type(type(module).__name__, (type(module),), forward)


def bench(
    family: str,
    dtype: str = "bfloat16",
    seed: int = 0,
    layers: int = 3,
    backward: bool = True,
    faults: dict[str, Wrap] | None = None,
    watch: Any = porter.watch,
) -> Bench:
    wanted = config.spec(family, tiny=True, layers=layers)
    model = config.build(wanted, torch.device("cpu"), DTYPES[dtype], seed, copies=1.0)
    tokens = torch.randint(1024, (2, 32), generator=torch.Generator().manual_seed(seed))
    also = twin(model)
    sites = judged_sites(porter.port(also))
    for path, wrap in (faults or {}).items():
        plant(also, path, wrap)
    return Bench(model, also, tokens, sites, backward, watch)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def scaled(factor: float) -> Wrap:
    return lambda self, own, *args, **kwargs: own(*args, **kwargs) * factor


def backward_scaled(factor: float) -> Wrap:
    return lambda self, own, x, *args: own(_Backward.apply(x, factor), *args)


SHORT = "model.layers.{}".format

"""A definition's operations in other ways that are as right: another order, split, tree, library or formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.mutate.rewrites import Replace, Rewrite, over


def _tree(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        x = torch.cat([x[..., : x.shape[-1] - half] + x[..., half:], x[..., x.shape[-1] - half : half]], -1)
    return x.squeeze(-1) if x.shape[-1] else x.sum(-1)


def _chunks(size: int) -> Callable[[Tensor], Tensor]:
    def total(x: Tensor) -> Tensor:
        acc = torch.zeros(x.shape[:-1], dtype=x.dtype)
        for part in x.split(size, -1):
            acc = acc + part.sum(-1)
        return acc

    return total


def _halves(x: Tensor) -> Tensor:
    return torch.stack([part.sum(-1) for part in x.chunk(2, -1)]).sum(0)


def _lanes(x: Tensor) -> Tensor:
    """32 lanes, each with every 32nd element, then a tree over the lanes."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32))
    return _tree(padded.reshape(*x.shape[:-1], -1, 32).sum(-2))


def _wide(x: Tensor) -> Tensor:
    return x.double().sum(-1).float()


def _numpy(name: str) -> Replace:
    def replaced(func: Any, x: Tensor) -> Tensor:
        import numpy as np  # where it is used: the command line starts without it

        ufunc: Callable[..., Any] = getattr(np, name)
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(ufunc(x.contiguous().numpy()), dtype="float32").reshape(tuple(x.shape)))

    return replaced


def _sigmoid(func: Any, x: Tensor) -> Tensor:
    e = torch.exp(-x.abs())
    return torch.where(x < 0, e, 1.0) / (1.0 + e)


RIGHT = (
    Rewrite("backwards", "order", "sums from the last term to the first", over(lambda x: x.flip(-1).sum(-1))),
    Rewrite("chunks_of_32", "order", "sums of 32 terms, one after another", over(_chunks(32))),
    Rewrite("two_halves", "split", "sums of halves in float32", over(_halves)),
    Rewrite("tree", "tree", "sums by a tree", over(_tree)),
    Rewrite("lanes", "tree", "sums by 32 lanes, then a tree", over(_lanes)),
    Rewrite("wide_sums", "library", "sums in float64", over(_wide)),
    Rewrite(
        "numpy",
        "library",
        "functions of one value by NumPy, in float32",
        {f"{n}.default": _numpy(n) for n in ("exp", "log", "tanh", "sqrt")},
    ),
    Rewrite(
        "sigmoid_by_exp",
        "formula",
        "sigmoid from exp of a negative number",
        {
            "sigmoid.default": _sigmoid,
            "silu.default": lambda f, x: x * _sigmoid(f, x),
            "rsqrt.default": lambda f, x: 1.0 / torch.sqrt(x),
        },
    ),
)

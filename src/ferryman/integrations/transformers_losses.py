"""The loss of a transformers model, its ``loss_function``, by `ops.cross_entropy`: logits stay in their dtype, where
transformers makes a float32 copy of them and of their gradient."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ferryman import ops

op = "cross_entropy"
NAME = "loss_function"  # the attribute that a forward reads, and a user may set
_KEPT = "_loss_function"  # where its setter keeps what was set
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROOM = 2.0**-22  # of an exponent in float32, for each unit of the largest logit


class TokenLoss:
    """Mean cross entropy of class indices, or its sum over ``num_items_in_batch``; ``shifted``: a token's label is the
    next token. What the proof did not draw (other keywords, dtypes, two devices) is left to the function ``before``."""

    def __init__(self, before: Callable[..., Tensor], shifted: bool) -> None:
        self.before, self.shifted = before, shifted

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        target = labels if shift_labels is None else shift_labels
        another = shift_labels is not None and not self.shifted
        if more or another or target is None or not _served(logits, target, vocab_size):
            if shift_labels is not None:
                more["shift_labels"] = shift_labels
            return self.before(logits, labels, vocab_size, num_items_in_batch, ignore_index, **more)
        if self.shifted and shift_labels is None:
            target = functional.pad(target, (0, 1), value=ignore_index)[..., 1:]
        target = target.reshape(-1)
        loss = ops.cross_entropy(logits.reshape(-1, vocab_size), target, ignore_index)
        if num_items_in_batch is None:
            return loss
        count = (target != ignore_index).sum()
        return torch.where(count > 0, loss, 0.0) * count / num_items_in_batch


def _served(logits: Tensor, target: Tensor, vocab_size: int) -> bool:
    plain = type(logits) is type(target) is Tensor and logits.dtype in _DTYPES and target.dtype == torch.int64
    alike = logits.device == target.device and logits.shape[:-1] == target.shape
    return plain and alike and logits.dim() > 1 and logits.shape[-1] == vocab_size and target.numel() > 0


def switch(model: nn.Module) -> list[tuple[str, Any]]:
    """Set the loss of every module whose forward reads it and whose plain function is proven: [(path, what was set
    before, or None)]. `restore` takes them back."""
    done = []
    for path, module in model.named_modules():
        if not _reads(type(module)):
            continue
        before = getattr(module, NAME)
        # what a callable object computes may change after it was proven
        shifted = proven(before) if isinstance(before, types.FunctionType) else None
        if shifted is not None:
            done.append((path, module.__dict__.get(_KEPT)))
            setattr(module, NAME, TokenLoss(before, shifted))
    return done


def restore(model: nn.Module, done: list[tuple[str, Any]]) -> None:
    """A loss that the user set after `switch` stays."""
    for path, before in done:
        module = model.get_submodule(path)
        if isinstance(module.__dict__.get(_KEPT), TokenLoss):
            del module.__dict__[_KEPT]
            if before is not None:
                setattr(module, NAME, before)


def _reads(kind: type[nn.Module]) -> bool:
    """Whether a class's forward reads the attribute, which a property of its own gives and takes."""
    known = inspect.getattr_static(kind, NAME, None)
    if not isinstance(known, property) or known.fset is None:
        return False
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and NAME in code.co_names


# The proof ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def proven(function: Callable[..., Tensor]) -> bool | None:
    """``shifted`` of the `TokenLoss` that computes what ``function`` computes, with gradients, in every dtype that is
    served, for each choice of its arguments and for rows that do not count; None where neither does."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if [*names][:3] != ["logits", "labels", "vocab_size"] or not {"num_items_in_batch", "ignore_index"} <= set(names):
        return None
    for shifted in (True, False) if "shift_labels" in names else (False,):
        if all(_alike(function, TokenLoss(function, shifted), given) for given in _drawn(shifted)):
            return shifted
    return None


def _drawn(shifted: bool) -> Iterator[dict[str, Any]]:
    draw = torch.Generator().manual_seed(7)
    for dtype, size, count, ignored in itertools.product(_DTYPES, (1.0, 60.0), (None, 3, torch.tensor(5)), (-100, 2)):
        logits = (torch.randn(2, 6, 9, generator=draw) * size).to(dtype)
        labels = torch.randint(0, 9, (2, 6), generator=draw)
        labels[0, 3:] = ignored
        given = {"logits": logits, "labels": labels, "vocab_size": 9, "num_items_in_batch": count}
        given["ignore_index"] = ignored
        yield given
        yield given | {"labels": torch.full_like(labels, ignored)}
        if shifted:
            yield given | {"shift_labels": labels.roll(1, 1), "labels": None}
            yield given | {"shift_labels": labels.roll(2, 1)}
        if dtype == torch.float32 and ignored == -100:
            hostile = logits.clone()
            hostile[0, 1, 2], hostile[1, 0, 0], hostile[1, 2, 5] = -math.inf, math.nan, math.inf
            yield given | {"logits": hostile}


def _alike(one: Callable[..., Tensor], other: Callable[..., Tensor], given: dict[str, Any]) -> bool:
    results = []
    for function in (one, other):
        leaf = given["logits"].clone().requires_grad_()
        with torch.enable_grad():
            try:
                loss = function(**{**given, "logits": leaf})
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
                return False
            if not isinstance(loss, Tensor) or loss.dim() or loss.dtype != torch.float32:
                return False
            (slope,) = torch.autograd.grad(loss, leaf)
        results.append((loss.detach(), slope))
    (loss, slope), (mine, own) = results
    unit = torch.finfo(slope.dtype).eps
    room = _ROOM * float(1 + given["logits"].float().nan_to_num(0, 0, 0).abs().max())
    near = torch.allclose(mine, loss, rtol=room, atol=room, equal_nan=True)
    if not loss.isfinite():  # of a row with an infinite logit, some or all of the gradient is NaN
        return near
    return near and torch.allclose(own.float(), slope.float(), rtol=unit + room, atol=room)

"""Values for what a model asks of its input's sizes: what is made of numbers alone keeps its data under a fake mode.

A fake tensor has no data, so a forward that reads a grid's sizes, counts the places of an image or makes a tensor as
long as a mask has true elements cannot run on it. What depends on no fake tensor, and is small or of integers, is
computed for real here; parameters, and all that meets them, stay fake. Where data that are not there are put into a
tensor that has some, its memory has old numbers: it is lost, and read as a fake tensor is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL = 1 << 12  # elements of a floating tensor: positions, frequencies, a scale
LARGE = 1 << 24  # of one of integers: ids and masks at real widths


class KeepValues(TorchDispatchMode):
    """Above a `FakeTensorMode` that takes tensors that are not fake."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(isinstance(t, FakeTensor) or lost(t) for t in given) or not all(t.device.type == "cpu" for t in given):
            _lose(func, args, kwargs)
            return func(*_placed(args), **kwargs) if func._schema.name in _INDEXED else func(*args, **kwargs)
        if not given:  # a factory: how large is it?
            tensors = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            if not all(_kept(t) for t in tensors):
                return tensors[0] if len(tensors) == 1 else tuple(tensors)
        elif not all(_kept(t) for t in given):
            _lose(func, args, kwargs)
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}


def _placed(args: Any) -> list[Any]:
    """An indexing op's arguments with the places of true elements instead of masks that have data."""
    places: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and not isinstance(index, FakeTensor) and index.dtype is torch.bool:
            with unset_fake_temporarily():
                places += index.nonzero(as_tuple=True)
        else:
            places.append(index)
    return [args[0], places, *args[2:]]


_lost: dict[int, StorageWeakRef] = {}  # memory by its address, which stays taken while it stands here


def lost(t: Tensor) -> bool:
    """Whether a tensor with memory has been given numbers that are not there."""
    return bool(_lost) and not isinstance(t, FakeTensor) and t.untyped_storage()._cdata in _lost


def _lose(func: Any, args: Any, kwargs: Any) -> None:
    """What a call that does not run writes over is lost, with every view of it."""
    for key, storage in [*_lost.items()]:
        if storage.expired():
            del _lost[key]
    for i, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            written = args[i] if i < len(args) else kwargs.get(one.name)
            for t in tree_leaves(written):
                if isinstance(t, Tensor) and not isinstance(t, FakeTensor):
                    storage = StorageWeakRef(t.untyped_storage())
                    _lost[storage.cdata] = storage


KEEP_VALUES = KeepValues()  # type: ignore[no-untyped-call]


def _kept(t: Tensor) -> bool:
    whole = not (t.is_floating_point() or t.is_complex())
    return t.device.type == "cpu" and t.numel() <= (LARGE if whole else SMALL)

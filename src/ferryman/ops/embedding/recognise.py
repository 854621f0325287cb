"""Tables whose rows are taken by number, from the end where that is below zero and the code says so, perhaps scaled:
modules, and `torch.nn.functional.embedding`.

An id outside the table is an error in PyTorch and a row of NaN here. A row of padding, which learns nothing, and
gradients by frequency are PyTorch's own: such a table is served where no gradient is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.embedding.definition import embedding as op_embedding
from ferryman.ops.recognition import Candidate, Leaf, Served

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_IDS = frozenset((torch.int64, torch.int32))


def modules(leaf: Leaf) -> Iterator[Candidate]:
    if len(leaf.matrices) != 1 or leaf.vectors or len(leaf.scalars) > 1:
        return
    ((table, (_, columns)),) = leaf.matrices.items()
    own = f"self.{table}"
    # what indexes counts numbers below zero from the end
    below = f"torch.where(x < 0, x + {own}.shape[0], x)"
    around = f"torch.remainder(x, {own}.shape[0])"  # so takes `torch.take_along_dim` numbers of no row
    spelled: list[tuple[str, str, tuple[str, ...]]] = [("", "", (table,))]
    root = columns**0.5
    scales = [f"self.{n}" for n in leaf.numbers] + [f"{own}.shape[1] ** 0.5", repr(root), *map(repr, leaf.constants)]
    spelled += [(f", {scale}", "", (table,)) for scale in dict.fromkeys(scales)]
    spelled += [("", f" * self.{s}.to({own}.dtype)", (table, s)) for s in leaf.scalars]
    for gradient in (True, False):
        for ids in ("x", below, around):
            for scale, after, uses in spelled:
                yield Candidate(
                    "embedding", f"ops.embedding({ids}, {own}{scale}){after}", columns, uses, table, gradient
                )


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if (
        max_norm is None
        and (
            (padding_idx is None and not scale_grad_by_freq and not sparse)
            or not (weight.requires_grad and torch.is_grad_enabled())
        )
        and weight.dtype in _DTYPES
        and input.dtype in _IDS
        and weight.dim() == 2
    ):
        return op_embedding(input, weight)
    return functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def functions() -> Mapping[Any, Served]:
    return {functional.embedding: Served("embedding", embedding)}

"""What group_norm may stand for in a model: PyTorch's function, and modules that compute it under any name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from ferryman.ops.group_norm.definition import group_norm
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.ops.recognition import Candidate, Leaf, Served

_USUAL = (32, 1)  # numbers of groups that code may have as they are


def _served(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """PyTorch's function refuses a single value for each channel; and what has no element."""
    tensors = [t for t in (input, weight, bias) if t is not None]
    if (
        input.dtype in STORAGE_DTYPES
        and all(t.dtype is input.dtype and t.device == input.device for t in tensors)
        and input.dim() >= 2
        and all(t.dim() == 1 and t.shape[0] == input.shape[1] for t in tensors[1:])
        and num_groups >= 1
        and input.shape[1] % num_groups == 0
        and input.numel() > num_groups
        and 0.0 <= eps < float("inf")
    ):
        return group_norm(input, num_groups, weight, bias, eps)
    return functional.group_norm(input, num_groups, weight, bias, eps)


def functions() -> Mapping[Callable[..., Any], Served]:
    return {functional.group_norm: Served("group_norm", _served)}


def modules(leaf: Leaf) -> Iterator[Candidate]:
    """A weight and a bias a channel, in either order, if any; a number of groups and an eps that it
    holds, or that its code has."""
    vectors = leaf.lines
    widths = {width for width, _ in vectors.values()}
    if leaf.wholes or leaf.scalars or len(vectors) > 2 or len(widths) > 1:
        return
    epsilons = [f"self.{name}" for name in leaf.numbers] or [repr(c) for c in leaf.constants if 0.0 < c < 1.0]
    for width in sorted(widths or {n for n in leaf.integers.values() if n > 1}):
        own = [f"self.{name}" for name, n in leaf.integers.items() if 0 < n <= width and width % n == 0]
        counts = own if own or not vectors else [str(n) for n in _USUAL if width % n == 0]
        for groups, eps, (weight, bias) in itertools.product(counts, epsilons, _vectors(leaf)):
            given = [vectors[v][1] if v else "None" for v in (weight, bias)]
            yield Candidate(
                "group_norm",
                f"ops.group_norm(x, {groups}, {', '.join(given)}, {eps})",
                width,
                tuple(v for v in (weight, bias) if v),
                axis=1,
            )


def _vectors(leaf: Leaf) -> Iterator[tuple[str, str]]:
    """(weight, bias), "" where there is none."""
    names = list(leaf.lines)
    yield from itertools.permutations(names, 2) if len(names) == 2 else [(n, "") for n in names] or [("", "")]
    if len(names) == 1:
        yield "", names[0]

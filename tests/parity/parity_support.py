"""What the parity tests share: every op by name, its torch kernel, and one way to check a kernel on all its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell, prepare
from ferryman.porting.judging.results import Cell

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = tuple(registry.primitives())
BACKWARD = tuple(p.gradient.backward for p in registry.primitives().values() if p.gradient.backward)


def strict(op: str, **declared: Any) -> Implementation:
    """An implementation that declares nothing but what is given."""
    return Implementation(op=op, name="torch", where="nowhere:nothing", **declared)


def check(
    op: str,
    kernel: Callable[..., Any],
    line: Implementation | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    case: str | None = None,
    seed: int = 0,
) -> Iterator[Cell]:
    primitive = registry.primitive(op)
    for dtype in dtypes:
        for each in cases_of(primitive):
            if case is None or each.name == case:
                prepared = prepare(primitive, each, dtype, CPU, seed)
                yield check_cell(primitive, line or strict(op), each, dtype, prepared=prepared, kernel=kernel)

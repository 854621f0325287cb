"""What capsule tests share: one small capsule, and how someone who can compute hashes would change one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ferryman.porting.capsule import container
from ferryman.porting.capsule.record import record

SMALL = "cross_entropy"


@functools.cache
def small() -> bytes:
    """About 12 kB: one op, its definition, one dtype."""
    return record(ops=[SMALL], device="cpu", dtypes=["f32"], backends=["definition"])


@functools.cache
def two_implementations() -> bytes:
    return record(ops=["softmax", "softmax_backward"], device="cpu", dtypes=["f32", "bf16"], backends=["torch"])


def forged(
    raw: bytes, edit: Callable[[dict[str, Any]], None], tensors: Callable[[dict[str, Tensor]], None] | None = None
) -> bytes:
    """A capsule whose manifest, and tensors, were changed, with every hash made right again."""
    manifest, stored, _ = container.unpack(raw)
    edit(manifest)
    if tensors is not None:
        tensors(stored)
    return container.pack(json.dumps(manifest), stored)

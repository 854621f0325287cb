"""The operators and functions of CUDA C++ and HIP C++, compiled with this project's options (`probe.cuh`)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import Unit, family_source, unit
from ferryman.backends.simt_runtime import runtime
from ferryman.errors import ArgumentError

OPS = ("exp", "exp2", "log", "rsqrt", "sqrt", "div", "tanh", "add", "mul", "fma", "contraction")
_FILE = Path(__file__).with_name("probe.cuh")
_THREADS = 256


@functools.lru_cache(maxsize=1)
def probe_unit() -> Unit:
    return unit(family_source(_FILE, False), "FERRYMAN_PROBE", "probe", _THREADS)


def elementwise(device: torch.device, target: Target, op: str, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``op`` on float32 tensors of one shape. Raises ArgumentError for an op that is not in OPS."""
    if op not in OPS:
        raise ArgumentError("fingerprint", "op", op, f"one of {', '.join(OPS)}")
    sides = [t.to(device).contiguous() for t in (x, y, z)]
    out = torch.empty(x.shape, dtype=torch.float32, device=device)
    blocks = -(-x.numel() // _THREADS)
    arguments = (*(t.data_ptr() for t in (*sides, out)), x.numel(), OPS.index(op))
    runtime(target).launch(probe_unit(), device, blocks, _THREADS, 0, arguments)
    return out.cpu()

"""Numbers that a module holds as tensors, such as an eps that is a buffer: what they were is asked at each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_LARGEST = 0.1  # what is added to keep a root from zero; a larger one scales, and is proven whatever it is


def fixed_of(module: nn.Module) -> dict[str, float]:
    """Its tensors of one small number each, which learn nothing."""
    own = [*module._parameters.items(), *module._buffers.items()]
    own += [(n, t) for n, t in vars(module).items() if isinstance(t, Tensor) and n.isidentifier()]
    numbers = {n: small(t) for n, t in own if t is not None}
    return {n: value for n, value in numbers.items() if value is not None}


def small(tensor: Any) -> float | None:
    """The number of such a tensor; None for anything else."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.numel() != 1 or tensor.dim() > 1:
        return None
    value = None if tensor.requires_grad or not tensor.is_floating_point() else _number(tensor)
    return value if value is not None and 0 < value <= _LARGEST else None


def drawn(tensor: Tensor, value: float) -> Tensor:
    """It, on the CPU, whatever is drawn for others."""
    return torch.full(tensor.shape, value, dtype=tensor.dtype)


def test_of(name: str, tensor: Tensor, value: float) -> str:
    """A test of ``self`` that a tensor is what it was."""
    return f"ferryman_holds(self.{name}, {value!r}, {tensor.dtype}, {tensor.dim()})"


def holds(tensor: Any, value: float, dtype: torch.dtype, dim: int) -> bool:
    """Whether a tensor of one number has this one. Not under a compiler, which would read it while it traces."""
    if torch.compiler.is_compiling() or not isinstance(tensor, Tensor) or tensor.requires_grad:
        return False
    return tensor.dtype is dtype and tensor.dim() == dim and tensor.numel() == 1 and _number(tensor) == value


def _number(tensor: Tensor) -> float | None:
    """None where it cannot be read at each call: a fake tensor, or one on a device, which would be waited for."""
    return float(tensor) if tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor) else None

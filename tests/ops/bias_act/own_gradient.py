"""Small calls that PyTorch's own differentiable call serves, or not: tests/unit/test_own_gradient.py makes them."""

from __future__ import annotations

import torch
from torch.nn import functional

from ferryman import ops

B = torch.randn(64)
SERVED = {"bias_act": (lambda x: ops.bias_act(x, None, "silu"), functional.silu)}
LEFT = {
    "a bias": lambda x: ops.bias_act(x, B, "silu"),
    "a rounded result": lambda x: ops.bias_act(x, None, "tanh"),
}

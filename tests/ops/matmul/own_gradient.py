"""Small calls that PyTorch's own differentiable call serves, or not: tests/unit/test_own_gradient.py makes them."""

from __future__ import annotations

import torch
from torch.nn import functional

from ferryman import ops

W = torch.randn(8, 64)
SERVED = {"linear": (lambda x: ops.linear(x, W), lambda x: functional.linear(x, W))}

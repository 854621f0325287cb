"""Small calls that PyTorch's own differentiable call serves, or not: tests/unit/test_own_gradient.py makes them."""

from __future__ import annotations

import torch

from ferryman import ops

SERVED = {"softmax": (ops.softmax, lambda x: torch.softmax(x, -1))}
LEFT = {"rounded products": lambda x: ops.softmax(x.half())}

"""Small calls that PyTorch's own differentiable call serves, or not: tests/unit/test_own_gradient.py makes them."""

from __future__ import annotations

import torch
from torch.nn import functional

from ferryman import ops

W, B = torch.randn(64), torch.randn(64)
SERVED = {
    "layer_norm": (lambda x: ops.layer_norm(x, W, B), lambda x: functional.layer_norm(x, (64,), W, B)),
    "rms_norm": (lambda x: ops.rms_norm(x, W), lambda x: functional.rms_norm(x, (64,), W, 1e-6)),
}
LEFT = {
    "two roundings": lambda x: ops.rms_norm(x, W, cast_before_weight=True),
    "no elements": lambda x: ops.layer_norm(x[:0], W, B),
    "a sum beside the norm": lambda x: ops.add_layer_norm(x, x, W, B)[0],
}

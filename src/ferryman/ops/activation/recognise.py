"""Gated activations in models: ``activation(gate) * up``."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch.nn import functional

from ferryman.ops.recognition import Gate


def gates() -> Iterator[Gate]:
    yield Gate("silu_mul", functional.silu)
    yield Gate("gelu_mul", functools.partial(functional.gelu, approximate="tanh"), ("tanh",))
    yield Gate("gelu_mul", functional.gelu, ("none",))

"""SDPA with one backend forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ferryman_peers import _functions
from torch.nn.attention import SDPBackend, sdpa_kernel


def forced(backend: SDPBackend) -> dict[str, Callable[..., Callable[[], Any]]]:
    """attention and its backward by one backend of SDPA; anything that it refuses is an error."""

    def prepare(*args: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return _functions.attention(*args)

        return call

    def prepare_backward(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Callable[[], Any]:
        _, _, *options = rest  # out, lse
        # On the current stream, which the backward will use too: autograd goes back on the forward's.
        with torch.enable_grad(), sdpa_kernel(backend):
            wanted = [x.detach().requires_grad_() for x in (q, k, v)]
            out = _functions.attention(*wanted, *options)
        return lambda: torch.autograd.grad(out, wanted, grad_out, retain_graph=True)

    return {"attention": prepare, "attention_backward": prepare_backward}

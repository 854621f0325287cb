"""An accelerator's choices on a CPU, so that the host's part of a call can be timed where no accelerator is.

Dispatch sees the device's profile and takes what it would take there, replays included. A launch of our kernels fills
its results with zeros (a `memset`, called as replays call a kernel's launcher); PyTorch's own calls run on the CPU.
What that leaves out is the driver: on an H100 a launch takes the host 4 to 5 us, ours and PyTorch's alike.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends import replay
from ferryman.backends.replay_record import Step
from ferryman.device_profiles import profile
from ferryman.dispatch import plan, registry, select
from ferryman.ops.bias_act import torch_kernels as activations
from ferryman.ops.menu import Implementation

fill = ctypes.CDLL(None).memset
fill.argtypes, fill.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), None


def stand_in(line: Implementation) -> Callable[..., Any]:
    """A launcher with the results' shapes, and one launch for each of them."""
    op = registry.primitive(line.op)
    shapes: dict[Any, Any] = {}

    def launch(*args: Any) -> Any:
        given = args[:-1]
        key = tuple((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in given)
        if key not in shapes:
            with torch._C.DisableTorchFunction():  # a recording is not to see it
                shapes[key] = op.meta(*given)
        meta = shapes[key] if isinstance(shapes[key], tuple) else (shapes[key],)
        device = next(a.device for a in given if isinstance(a, Tensor))
        results = [torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=device) for m in meta]
        recording = replay.recording()
        for result in results:
            size = result.numel() * result.element_size()
            if recording is None:
                fill(result.data_ptr(), 0, size)
            else:
                recording.add(Step(fill, (result, 0, size)))
        return tuple(results) if isinstance(shapes[key], tuple) else results[0]

    launch.__name__ = line.name
    return launch


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None = None) -> Any:
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)


def _cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lse: bool,
    dropout: float,
    causal: bool,
    debug: bool,
    scale: float | None = None,
) -> Any:
    return _flash(q, k, v, dropout, causal, scale)


@contextlib.contextmanager
def simulated(name: str) -> Iterator[None]:
    """Within it, calls on CPU tensors are those of the device that has this profile."""
    known, real, ours = profile(name), registry.launcher, dict[tuple[str, str], Any]()

    def launcher(line: Implementation) -> Callable[..., Any]:
        elsewhere = any("profile.vendor" in clause.facts for clause in line.when)  # PyTorch has no such kernel here
        if line.backend in ("torch", "definition") and not elsewhere:
            return real(line)
        key = (line.op, line.name)
        if key not in ours:
            ours[key] = stand_in(line)
        return ours[key]

    changes = (
        mock.patch.object(select, "profile_for", lambda device: known),
        mock.patch.object(plan, "REPLAYED", "cpu"),
        mock.patch.object(registry, "probe", lambda backend, vendor: ()),
        mock.patch.object(registry, "launcher", launcher),
        mock.patch.object(activations, "_gelu", functional.gelu),  # a CPU's is another
        mock.patch.object(torch, "_scaled_dot_product_flash_attention", _flash),
        mock.patch.object(torch, "_scaled_dot_product_cudnn_attention", _cudnn),
    )
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        stack.callback(plan.drop_plans)
        plan.drop_plans()
        yield

"""What Triton's own runtime is asked for: its release, memory for a kernel's descriptors, the errors of a launch.

Importing this module does not import triton.
"""

from __future__ import annotations

import functools

import torch


def release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    # PyTorch's blocks are 512-byte aligned, and given back in the order of the stream that the launch is on
    return torch.empty(size, dtype=torch.int8, device="cuda")


def provide_scratch() -> None:
    """Descriptors made in a kernel lie in global memory, which Triton asks an allocator for.

    Triton's setting belongs to the thread (a context variable), and an allocator that the user has set stays.
    """
    from triton.runtime import _allocation

    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        _allocation.set_allocator(_scratch)


@functools.cache
def resource_errors() -> tuple[type[Exception], ...]:
    from triton.runtime.errors import OutOfResources

    return (OutOfResources,)

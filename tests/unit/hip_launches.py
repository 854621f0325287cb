"""What the launchers of every SIMT family pass to a kernel, recorded from calls on the CPU: nothing is launched."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ferryman.backends import hip, simt_runtime
from ferryman.backends.base import Target
from ferryman.backends.simt import Unit
from ferryman.backends.simt_offline import target_for
from ferryman.ops.activation import simt_kernels as activation
from ferryman.ops.norm import simt_kernels as norm
from ferryman.ops.rope import simt_kernels as rope
from ferryman.ops.softmax import simt_kernels as softmax
from ferryman.ops.softmax.simt_softmax_backward_kernels import softmax_backward

Arguments = tuple[int | float, ...]


@dataclasses.dataclass
class Recorder:
    """Stands where `HipRuntime` does."""

    launches: list[tuple[Unit, Arguments]] = dataclasses.field(default_factory=list)

    def launch(self, unit: Unit, device: Any, grid: int, block: int, shared: int, args: Arguments) -> None:
        assert grid > 0 and 0 < block <= 1024 and shared >= 0
        self.launches.append((unit, args))


def calls(target: Target) -> Iterator[None]:
    """Every op: short rows and long ones, aligned and not, with weights and without."""
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        for width in (8, 1000, 1021, 8192, 262_144):
            x = torch.zeros(2, width, dtype=kind)
            weight = torch.zeros(width, dtype=kind)
            yield norm.rms_norm(x, weight, 1e-6, False, target)  # type: ignore[misc]
            yield norm.rms_norm(x, None, 1e-5, False, target)  # type: ignore[misc]
            yield norm.add_rms_norm(x, x, weight, 1e-6, True, target)  # type: ignore[misc]
            yield norm.layer_norm(x, weight, weight, 1e-5, target)  # type: ignore[misc]
            yield norm.layer_norm(x, None, None, 1e-5, target)  # type: ignore[misc]
            yield softmax.softmax(x, target)  # type: ignore[misc]
            yield softmax_backward(x, x, target)  # type: ignore[misc]
            yield activation.silu_mul(x, x, target)  # type: ignore[misc]
            yield activation.gelu_mul(x, x, "tanh", target)  # type: ignore[misc]
            yield activation.silu_mul_backward(x, x, x, target)  # type: ignore[misc]
        q, table = torch.zeros(2, 4, 3, 64, dtype=kind), torch.zeros(1, 3, 64, dtype=kind)
        for interleaved in (False, True):
            yield rope.rope(q, q[:, :2], table, table, interleaved, target)  # type: ignore[misc]


def recorded(monkeypatch: pytest.MonkeyPatch, arch: str) -> list[tuple[Unit, Arguments]]:
    """(unit, the first launch's arguments) of every unit that the calls reach."""
    recorder = Recorder()
    monkeypatch.setitem(simt_runtime._RUNTIMES, "amd", recorder)
    for _ in calls(target_for(arch)):
        pass
    first_launches: dict[str, tuple[Unit, Arguments]] = {}
    for unit, args in recorder.launches:
        first_launches.setdefault(unit.name, (unit, args))
    return list(first_launches.values())


def check_packing(kernel: dict[str, Any], args: Arguments) -> None:
    """The bytes that HIP copies, against the kernel's own metadata: each argument at its offset, in its size."""
    declared = [a for a in kernel[".args"] if not a[".value_kind"].startswith("hidden")]
    packed = bytes(hip.pack_arguments(args))
    assert len(declared) == len(args), kernel[".name"]
    for argument, value in zip(declared, args, strict=True):
        offset, size = argument[".offset"], argument[".size"]
        kind = {("global_buffer", 8): "<Q", ("by_value", 8): "<q", ("by_value", 4): "<f"}
        wanted = struct.pack(kind[argument[".value_kind"], size], value)
        assert packed[offset : offset + size] == wanted, (kernel[".name"], argument, value)
    last = declared[-1]
    assert len(packed) >= last[".offset"] + last[".size"]
    # HIP copies by the metadata's offsets: a block may end in padding to its alignment, and in nothing more
    align = kernel[".kernarg_segment_align"]
    assert len(packed) <= -(-kernel[".kernarg_segment_size"] // align) * align

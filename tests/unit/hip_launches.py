"""What SIMT launchers pass to a kernel, recorded from calls on the CPU, which `tests/ops/FAMILY/simt_cases.py` names:
nothing is launched."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ferryman.backends import hip, simt_runtime
from ferryman.backends.simt import Unit
from ferryman.backends.simt_offline import target_for
from tests import families
from tests.unit.simt_cases import Launch

Arguments = tuple[int | float, ...]


@dataclasses.dataclass
class Recorder:
    """Stands where `HipRuntime` does."""

    launches: list[tuple[Unit, Arguments]] = dataclasses.field(default_factory=list)

    def launch(self, unit: Unit, device: Any, grid: int, block: int, shared: int, args: Arguments) -> None:
        assert grid > 0 and 0 < block <= 1024 and shared >= 0
        self.launches.append((unit, args))


def calls() -> Iterator[Launch]:
    for module in families.modules("simt_cases").values():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            yield from module.launches(dtype)


def recorded(monkeypatch: pytest.MonkeyPatch, arch: str) -> list[tuple[Unit, Arguments]]:
    """(unit, the first launch's arguments) of every unit that the calls reach."""
    recorder = Recorder()
    monkeypatch.setitem(simt_runtime._RUNTIMES, "amd", recorder)
    for kernel, args in calls():
        kernel(*args, target_for(arch))
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

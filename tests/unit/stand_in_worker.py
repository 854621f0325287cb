"""What tests/unit/test_stand_in.py asks of a process that compiles Triton, and has no GPU: JSON on stdout.

stand_in_worker.py sweep PROFILE ARCH DTYPE K/N FAMILY.. of each kernel every N-th configuration from K
stand_in_worker.py launches                              what reaches the driver, which is a fake one
stand_in_worker.py refusals                              what is refused, and with which words
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime import driver

from ferryman.backends import code_objects, redirect, replay, simt, simt_runtime, triton_stand_in
from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, recorded
from ferryman.backends.triton_stand_in import StandIn, assemble
from ferryman.cli import calls
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.dispatch.select import target_of
from ferryman.errors import FerrymanError
from ferryman.ops.matmul import triton_kernels as matmul
from ferryman.ops.norm import triton_kernels as norm
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.aot import groups
from ferryman.porting.inputs.cases import forward_of
from ferryman.porting.running.cells import tier_cases
from tests import stand_in_cases
from tests.lines import all_serving

# Matrix products of Hopper (HGMMA, QGMMA), its tensor copies (UTMA..), its barriers in memory (SYNCS): none on Ampere.
NEWER = re.compile(r"\b([HQI]GMMA|UTMA\w*|UBLKCP|SYNCS)\b")
OLDER = re.compile(r"\b(HMMA|LDGSTS)\b")


def disassembled(image: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def row(source: Specialisation, target: Target, arch: str) -> dict[str, Any]:
    try:
        assembled = assemble(source, target, arch)
    except FerrymanError as error:
        return {"name": source.name, "error": str(error)}
    text = disassembled(assembled.image)
    return {
        "name": source.name,
        "error": None,
        "target": assembled.ptx_target,
        "image": code_objects.arch_of(assembled.image),
        "shared": assembled.resources["shared"],
        "products": assembled.resources["matrix"],
        "dots": sum(assembled.resources[f"dots_{kind}"] for kind in ("half", "tf32")),
        "newer": sorted(set(NEWER.findall(text))),
        "older": sorted(set(OLDER.findall(text))),
    }


def modules(family: str) -> list[ModuleType]:
    """Of a family's kernels those for any device: its general file, and what stands beside it for other rows."""
    general = ("triton_kernels", "backward_kernels", "columns_kernels", "long_kernels")
    names = [name for name in groups._modules("triton", family) if name.rpartition(".")[2] in general]
    return [importlib.import_module(name) for name in names]


def sweep(name: str, arch: str, dtype: str, share: str, *families: str) -> dict[str, list[dict[str, Any]]]:
    target, (first, every), rows = target_of(profile(name)), map(int, share.split("/")), {}
    for family in families:
        sources = [one for kernels in modules(family) for one in kernels.specialisations(target, dtype)]
        by_kernel: dict[str, list[Specialisation]] = {}
        for one in sources:
            by_kernel.setdefault(one.name, []).append(one)
        some = [one for own in by_kernel.values() for one in own[first % len(own) :: every]]
        rows[family] = [row(one, target, arch) for one in some]
    return rows


def tile(source: Specialisation) -> str:
    """The kernel's module is part of it: kernels of several families share a name."""
    sizes = {k: v for k, v in source.constexprs.items() if k.startswith(("BLOCK", "HEAD")) and isinstance(v, int)}
    where = source.kernel.__module__.removeprefix("ferryman.ops.")
    return f"{source.name} of {where} {sizes} {source.num_warps} warps, {source.num_stages} stages"


def reach(dtype: str) -> dict[str, list[str]]:
    """Of what is compiled ahead of time: launches are recorded on meta tensors, nothing is compiled."""
    target, kind = target_of(profile("a100")), getattr(torch, dtype)
    left: set[str] = set()
    for family in (f.name for f in registry.families()):
        for kernels in modules(family):
            left |= {tile(one) for one in kernels.specialisations(target, dtype)}

    def tiles(op: Primitive, case: Case) -> set[str]:
        launched = set()
        for name in filter(None, (op.name, op.gradient.backward)):
            args = calls.of_case(registry.primitive(name), case, kind)
            for launcher in map(registry.launcher, all_serving(name, "triton", args, profile("a100"))):
                launched |= {tile(one) for one in recorded([lambda run=launcher, given=args: run(*given, target)])}
        return launched

    ops = [op for op in map(registry.primitive, registry.primitives()) if forward_of(op) is None]
    for op in ops:
        for case in tier_cases(op, "standard"):
            left -= tiles(op, case)
    idle, extra = [], stand_in_cases.tiles()
    for op in ops:
        for case in extra.get(op.name, ()):
            covered = tiles(op, case)
            idle += [] if covered & left else [f"{op.name} {case.name}"]
            left -= covered
    return {"left": sorted(left), "idle": idle}


class Driver:
    """Takes the driver's place under Triton, and notes what it is given."""

    def __init__(self) -> None:
        self.loaded: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any]] = []
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 232_448}
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def run(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            hooks, values = rest[:3], rest[3:]
            assert hooks == (None, None, None) and len(values) == len(source.signature)
            self.launched.append(
                {
                    "grid": [x, y, z],
                    "stream": stream,
                    "function": function,
                    "warps": packed[0],
                    "values": [list(v.shape) if isinstance(v, torch.Tensor) else v for v in values],
                    "constants": [name for name, kind in source.signature.items() if kind == "constexpr"],
                }
            )

        return run

    def _load(self, name: str, image: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.loaded.append({"name": name, "image": code_objects.arch_of(image), "shared": shared, "device": device})
        return 1, 40 + len(self.loaded), 32, 0, 1024


@contextlib.contextmanager
def fake_driver() -> Iterator[Driver]:
    stand_in, before = Driver(), driver._active
    driver.set_active(stand_in)
    here = mock.patch.multiple(
        torch.cuda,
        device=lambda device: contextlib.nullcontext(),
        current_stream=lambda: SimpleNamespace(cuda_stream=7),
    )
    try:
        with here:
            yield stand_in
    finally:
        driver._active = before


def standing(name: str = "a100", arch: str = "sm_90") -> StandIn:
    known = profile(name)
    return StandIn(target_of(known), torch.device("cuda", 0), arch, "NVIDIA H200", known)


def launches() -> dict[str, Any]:
    x, weight = torch.ones(6, 320, dtype=torch.bfloat16), torch.ones(320, dtype=torch.bfloat16)
    wide = torch.ones(256, 320, dtype=torch.bfloat16)
    report: dict[str, Any] = {}
    with fake_driver() as gpu, standing() as here:
        report["nothing"] = here.evidence()
        norm.rms_norm(x, weight, 1e-6, False, here.target)
        norm.rms_norm(x, weight, 1e-6, False, here.target)
        matmul.linear(x, wide, None, here.target)
        norm.rms_norm(x[:0], weight, 1e-6, False, here.target)
        report["evidence"], report["counts"] = here.evidence(), [[*k, n] for k, n in here.launches.items()]
        report["asm"] = {
            assembled.kernel: triton_stand_in._TARGET.search(kernel.asm["ptx"])[0]
            for assembled, kernel in here._kernels.values()
        }
        with mock.patch.object(replay, "recording", lambda: object()):
            try:
                norm.rms_norm(x, weight, 1e-6, False, here.target)
            except replay.NotReplayable as error:
                report["replayed"] = str(error)
        report["multithreaded"] = torch.autograd.is_multithreading_enabled()
        here.begin()
        report["after"] = here.evidence()
    return report | {"loaded": gpu.loaded, "launched": gpu.launched, "redirected": redirect.current() is not None}


def refused(call: Any) -> str:
    try:
        call()
    except FerrymanError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals() -> dict[str, str]:
    target = target_of(profile("a100"))
    source = next(s for s in matmul.specialisations(target, "bfloat16") if s.constexprs["BLOCK_N"] == 128)
    deep = dataclasses.replace(source, num_stages=12)  # 192 KiB: an H200 would take it
    reasons = {"an H200's stages": refused(lambda: assemble(deep, target, "sm_90"))}
    with mock.patch.object(triton_stand_in, "_TARGET", re.compile(r"^\.address_size (\d+)()", re.MULTILINE)):
        reasons["another target"] = refused(lambda: assemble(source, target, "sm_90"))
    ptx = assemble(source, target, "sm_90").ptx
    damaged = ptx.replace("mma.sync", "mma.sink")
    reasons["damaged"] = refused(lambda: triton_stand_in._assembled("_matmul", damaged, "sm_90", True))
    reasons["older"] = refused(lambda: triton_stand_in._assembled("_matmul", ptx, "sm_75", True))
    with standing():
        reasons["simt"] = refused(lambda: simt_runtime.runtime(target).launch(simt.Unit("u", ""), None, 1, 1, 0, ()))
    return reasons


if __name__ == "__main__":
    asked = {"sweep": sweep, "reach": reach, "launches": launches, "refusals": refusals}[sys.argv[1]]
    sys.stdout.write(json.dumps(asked(*sys.argv[2:])))

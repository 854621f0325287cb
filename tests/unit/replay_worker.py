"""Every launcher that may be replayed, beside its replay, on a driver and a runtime that only write launches down.

Triton's own binder decides which specialisation each launch takes; what it would compile is named and not compiled. Run
as a script in a process that does not interpret Triton; prints what differs, by op.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.compiler
from torch import Tensor
from triton.backends.compiler import GPUTarget

from ferryman.backends import replay, simt_runtime
from ferryman.backends.base import Target
from ferryman.backends.replay_record import NotReplayable
from ferryman.backends.simt import Unit, launcher
from ferryman.dispatch import registry
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.inputs.cases import arguments, cases_of

H200 = Target("sm_90", "nvidia", 32, 232448, 1024, 132, 50 << 20)
MI300X = Target("gfx942", "amd", 64, 65536, 1024, 304, 4 << 20)
CPU = torch.device("cpu")
launched: list[tuple[Any, ...]] = []
SCRATCH = {"bytes": 0}


class HIPLauncher:
    """In the place of Triton's on AMD, whose C function is not called past its Python part."""

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: str,
        packed: Any,
        metadata: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        launched.append(("called", function, (x, y, z), packed, *args))


class CudaLauncher(HIPLauncher):
    """On NVIDIA: the C function and the Python part in front of it, by their parameters in 3.6."""

    launch_cooperative_grid, launch_pdl, profile_scratch_size = False, False, 0

    def __init__(self) -> None:
        self.global_scratch_size = SCRATCH["bytes"]

    def launch(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: str,
        cooperative: bool,
        pdl: bool,
        scratch: Any,
        profile: Any,
        packed: Any,
        metadata: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        assert (cooperative, pdl, scratch, profile) == (False, False, None, None)
        launched.append(("direct", function, (x, y, z), packed, *args))


def named(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
    """A kernel that bears its specialisation as its name."""
    constants = sorted((path, str(value)) for path, value in source.constants.items())
    chosen = sorted((k, str(v)) for k, v in options.items())
    name = f"{source.fn.fn.__name__} {source.signature} {constants} {sorted(source.attrs.items())} {chosen}"
    packed = (options["num_warps"], options.get("num_ctas", 1), 0)
    return SimpleNamespace(
        module=1,
        function=name,
        packed_metadata=packed,
        run=LAUNCHERS[target.backend](),
        launch_metadata=lambda *_: None,
    )


LAUNCHERS = {"cuda": CudaLauncher, "hip": HIPLauncher}


class Units(launcher.LoadedUnits):
    backend = "written down"

    def device_arch(self, index: int) -> str:
        return "sm_90"

    def toolchain(self) -> str:
        return "none"

    def build(self, unit: Unit, arch: str) -> bytes:
        raise AssertionError("nothing is built")

    def _image(self, unit: Unit, arch: str) -> bytes:
        return b""

    def open(self, image: bytes, unit: Unit) -> Any:
        return unit.name

    def start(
        self,
        function: Any,
        stream: int,
        index: int,
        grid: int,
        block: int,
        shared: int,
        args: Any,
        overlapping: bool = False,
    ) -> None:
        launched.append(("simt", function, (grid, block, shared), tuple(type(a) for a in args), *args))


def install(target: Target = H200) -> None:
    gpu = GPUTarget("cuda", 90, 32) if target.vendor == "nvidia" else GPUTarget("hip", target.arch, target.wave)
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: gpu,
        launcher_cls=LAUNCHERS[gpu.backend],
    )
    triton.runtime.driver.set_active(driver)
    triton.compiler.compile = named
    simt_runtime._RUNTIMES[target.vendor] = Units()
    launcher.current_stream = lambda index: 0
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda index: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.is_current_stream_capturing = lambda: False


def written(call: Any, op: Primitive, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """(launches, results) with every address as what it is an address of: an argument's byte, or the nth new one."""
    launched.clear()
    result = call()
    named_tensors = [(n, a) for n, a in zip(op.names, args, strict=True) if isinstance(a, Tensor)]
    new: dict[int, str] = {}

    def place(address: int) -> Any:
        for name, tensor in named_tensors:
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            if tensor.numel() and 0 <= address - tensor.data_ptr() < span * tensor.element_size():
                return f"{name}+{address - tensor.data_ptr()}"
        return new.setdefault(address, f"new {len(new)}")

    launches = []
    for _, function, grid, packed, *given in launched:
        values = []
        for value in given:
            if isinstance(value, Tensor):
                value = value.data_ptr()
            values.append(place(value) if type(value) is int and value > 1 << 32 else value)
        launches.append([function, grid, packed, values])
    results = []
    for output in result if isinstance(result, tuple) else (result,):
        where = place(output.data_ptr()) if output.numel() else "empty"
        results.append([where, tuple(output.shape), output.stride(), str(output.dtype), output.requires_grad])
    return launches, results


def shifted(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same facts, each tensor one element further into its storage."""
    return tuple(_shifted(a) if isinstance(a, Tensor) else a for a in args)


def _shifted(x: Tensor) -> Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return torch.empty(span + 1, dtype=x.dtype).as_strided(x.shape, x.stride(), 1)


def again(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same facts at other, aligned addresses."""
    return tuple(torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) if isinstance(a, Tensor) else a for a in args)


def cases(target: Target) -> Iterator[tuple[Primitive, Any, Case]]:
    backends = ("triton", "cuda" if target.vendor == "nvidia" else "hip")
    for op in registry.primitives().values():
        for line in registry.implementations(op.name):
            if line.replayable and line.backend in backends:
                yield from ((op, line, case) for case in cases_of(op))


def judge(target: Target) -> dict[str, Any]:
    frozen_count: Counter[str] = Counter()
    refused: dict[str, dict[str, str]] = {}
    wrong, direct, served = [], 0, set[str]()
    for op, line, case in cases(target):
        label = f"{op.name} {line.name} {case.name}"
        args = again(arguments(case, op, torch.bfloat16, 0, CPU).values)
        # the cases are short, and a launcher records a length like any other: lengths alone do not leave one out
        if any(c.reason(_view(op, args, target)) for c in line.when if c.facts != ("q.shape[2]",)):
            continue
        served.add(f"{op.name} {line.name}")
        launch = registry.launcher(line)
        before = written(lambda: launch(*args, target), op, args)  # noqa: B023
        frozen = replay.freeze(launch, op.names, args, target, CPU)
        if frozen is None:
            try:
                replay.attempt(launch, op.names, args, target, CPU, op.name)
            except NotReplayable as error:
                refused.setdefault(f"{op.name} {line.name}", {})[case.name] = str(error)
            else:
                wrong.append([label, "no replay, and no reason", ""])
            continue
        frozen_count[f"{op.name} {line.name}"] += 1
        for given in (args, again(args), shifted(args)):
            expected = written(lambda: launch(*given, target), op, given)  # noqa: B023
            got = written(lambda: frozen(*given, target), op, given)  # noqa: B023
            direct += sum(kind == "direct" for kind, *_ in launched)
            if expected != got:
                wrong.append([label, repr(expected), repr(got)])
        if before != written(lambda: frozen(*args, target), op, args):  # noqa: B023
            wrong.append([label, "the first call", ""])
    return {"frozen": frozen_count, "refused": refused, "wrong": wrong[:5], "direct": direct, "served": sorted(served)}


def _view(op: Primitive, args: tuple[Any, ...], target: Target) -> Any:
    flags = {"interpreted": False, "tf32": False, "deterministic": False}
    features = frozenset({"wgmma", "clusters"} if target.vendor == "nvidia" else {"mfma"})
    by_name = dict(zip(op.names, args, strict=True))
    return SimpleNamespace(
        args=by_name,
        flags=flags,
        features=features,
        shared_memory=target.shared_memory,
        max_threads=target.max_threads,
        vendor=target.vendor,
    )


def hooks_and_scratch() -> dict[str, Any]:
    """A hook that is set after freezing sees the launch; a kernel that needs scratch goes through Triton's launcher."""
    op = registry.primitives()["rms_norm"]
    launch = registry.launcher(registry.implementation("rms_norm", "triton.rows"))
    args = (torch.empty(4, 64), torch.empty(64), 1e-6, False)
    launch(*args, H200)
    frozen = replay.freeze(launch, op.names, args, H200, CPU)
    assert frozen is not None
    report: dict[str, Any] = {}

    def kind() -> str:
        launched.clear()
        frozen(*args, H200)
        return str(launched[-1][0])

    report["quiet"] = kind()
    hook = print
    knobs = triton.knobs.runtime
    knobs.launch_enter_hook.add(hook)
    report["chained"] = kind()
    report["frozen with a hook"] = replay.freeze(launch, op.names, args, H200, CPU) is not None
    knobs.launch_enter_hook.remove(hook)
    report["removed"] = kind()
    chain, knobs.launch_exit_hook = knobs.launch_exit_hook, hook
    report["replaced"] = kind()
    knobs.launch_exit_hook = chain
    SCRATCH["bytes"] = 128
    other = (torch.empty(4, 80), torch.empty(80), 1e-6, False)
    launch(*other, H200)
    frozen = replay.freeze(launch, op.names, other, H200, CPU)
    launched.clear()
    frozen(*other, H200)  # type: ignore[misc]
    report["scratch"] = launched[-1][0]
    return report


if __name__ == "__main__":
    chosen = MI300X if sys.argv[1:] == ["amd"] else H200
    install(chosen)
    sys.stdout.write(json.dumps({"judged": judge(chosen), "hooks": hooks_and_scratch() if chosen is H200 else {}}))

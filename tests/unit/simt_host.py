"""Runs SIMT kernels on the CPU: the launchers, plans and C++ are the real ones, `simt_emulation.h` is the device.

`EmulatedRuntime` stands in for the CUDA or HIP runtime. It first collects the units that a set of calls needs, then
compiles them with the host compiler as one library, then executes them.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import filelock
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.backends import simt, simt_runtime
from ferryman.backends.base import Target
from ferryman.backends.simt_offline import target_for
from ferryman.dispatch import registry

_HEADER = Path(__file__).with_name("simt_emulation.h")
# -Og: compiling costs more than what it compiles; without -mfma no product is fused with a sum at any level
_FLAGS = ("-std=c++17", "-Og", "-w", "-shared", "-fPIC", "-ffp-contract=fast", "-DFERRYMAN_EMULATED")


def target(wave: int, shared_memory: int = 65_536, units: int = 1, features: frozenset[str] = frozenset()) -> Target:
    return Target("emulated", f"emulated{wave}", wave, shared_memory, 1024, units, 0, features)


def all_units(arch: str) -> list[simt.Unit]:
    """Every unit of portable C++, planned for an architecture: of the modules that lines of `hip` name."""
    lines = (line for op in registry.primitives() for line in registry.implementations(op) if line.backend == "hip")
    modules = dict.fromkeys(line.where.partition(":")[0] for line in lines)
    return [unit for module in modules for unit in importlib.import_module(module).units(target_for(arch))]


def some_units(arch: str) -> list[simt.Unit]:
    """The first, a middle and the last unit of every op: part of a wave, the scalar path, a long row."""
    by_op: dict[str, list[simt.Unit]] = {}
    for unit in all_units(arch):
        by_op.setdefault(op_of(unit.name), []).append(unit)
    return [units[i] for units in by_op.values() for i in sorted({0, len(units) // 2, len(units) - 1})]


def op_of(kernel: str) -> str:
    """The op whose name a kernel's begins with."""
    return max((op for op in registry.primitives() if kernel.startswith(f"{op}_")), key=len)


def numbers_of(kernel: str) -> int:
    """How many numbers an op's kernel takes, as the op's schema says: eps, a scale."""
    return sum(str(p.annotation) in ("float", "float | None") for p in registry.primitive(op_of(kernel)).parameters)


def joined(units: list[simt.Unit], most: int = 16) -> list[tuple[simt.Unit, list[str]]]:
    """The same kernels, several to a unit, beside their names: most of a compilation is the family's own text."""
    texts: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for unit in units:
        text, mark, line = unit.source.rpartition(f'#line 1 "{unit.name}"')
        texts.setdefault((text, *unit[2:]), []).append((unit.name, mark + line))
    merged = []
    for (text, *rest), kernels in texts.items():
        for start in range(0, len(kernels), most):
            names, lines = zip(*kernels[start : start + most], strict=True)
            merged.append((simt.Unit(names[0], text + "".join(lines), *rest), list(names)))
    return merged


def host_compiler() -> list[str] | None:
    if shutil.which("g++"):
        return ["g++"]
    try:
        import ziglang
    except ImportError:
        return None
    return [str(Path(ziglang.__file__).with_name("zig")), "c++", "-fno-sanitize=undefined"]


class _Region(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("bytes", ctypes.c_longlong), ("writable", ctypes.c_longlong)]


class _Watch(TorchDispatchMode):
    """Registers every tensor made inside a call, and poisons what `empty` returns, so that a missed write shows."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            if func is torch.ops.aten.empty.memory_format:
                out.untyped_storage().fill_(0xFF)
            self.tensors.append(out)
        return out


def _extent(t: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not t.numel():
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) * t.element_size()


class EmulatedRuntime:
    """A `Runtime` for one wave width. ``order``: 0, 1 or 2, in which order the threads of a block run."""

    def __init__(self, wave: int, folder: Path) -> None:
        self.wave, self.folder = wave, folder
        self.collected: dict[str, simt.Unit] = {}
        self.launched: list[tuple[str, int, int, int]] = []
        self.order = 0
        self._inputs: list[Tensor] = []
        self._writable: list[Tensor] = []
        self._libraries: list[ctypes.CDLL] = []
        self._functions: dict[str, Any] = {}

    def launch(
        self, unit: simt.Unit, device: torch.device, grid: int, block: int, shared: int, args: tuple[int | float, ...]
    ) -> None:
        self.collected[unit.name] = unit
        self.launched.append((unit.name, grid, block, shared))
        if not self._libraries:
            return
        regions = [(t.data_ptr(), _extent(t), 0) for t in self._inputs]
        regions += [(s.data_ptr(), s.nbytes(), 1) for s in (t.untyped_storage() for t in self._writable)]
        table = (_Region * len(regions))(*regions)
        slots = (ctypes.c_ulonglong * len(args))(
            *[struct.unpack("<I", struct.pack("<f", a))[0] if isinstance(a, float) else a & (2**64 - 1) for a in args]
        )
        error = self._function(unit.name)(
            ctypes.c_longlong(grid),
            block,
            ctypes.c_longlong(shared),
            slots,
            table,
            len(regions),
            self.order,
            unit.cluster,
        )
        if error is not None:
            raise AssertionError(f"{unit.name}: {error.decode()}")

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            libraries = [lib for lib in self._libraries if hasattr(lib, f"run_{name}")]
            if not libraries:
                pytest.fail(f"{name} was launched, and not among the launches that were collected for the compiler")
            function = getattr(libraries[0], f"run_{name}")
            function.restype = ctypes.c_char_p
            self._functions[name] = function
        return self._functions[name]

    def call(
        self, kernel: Callable[..., Any], inputs: tuple[Any, ...], where: Target, over: tuple[int, ...] = ()
    ) -> Any:
        """One call of a launcher, with every buffer registered. ``over``: which inputs it may write."""
        self._inputs = [t for i, t in enumerate(inputs) if isinstance(t, Tensor) and i not in over]
        self._writable = [inputs[i] for i in over]
        watch: AbstractContextManager[Any] = _Watch(self._writable)
        with watch:
            return kernel(*inputs, where)

    def compile_collected(
        self, edit: Callable[[str], str] = str, complaints: IO[str] | int | None = None
    ) -> subprocess.Popen[bytes] | None:
        """Starts compiling what was collected, edited; None if the library is already there, from a process beside
        this one, too, which is waited for. `load` follows. complaints: where the compiler's go, else to stderr."""
        families: dict[str, list[simt.Unit]] = {}
        for unit in self.collected.values():
            text, _, line = unit.source.rpartition("\n#line 1 ")
            families.setdefault(text, []).append(unit._replace(source=line.split("\n", 1)[1]))
        # portable.cuh and rows.cuh are the same text in every family: they come once
        parts, seen = [_HEADER.read_text()], set()
        # cluster.cuh, which some families have, goes before what asks whether it is there
        for text, units in sorted(families.items(), key=lambda f: '"cluster.cuh"' not in f[0]):
            for piece in text.split('#line 1 "'):
                if piece and piece not in seen:
                    seen.add(piece)
                    parts.append('#line 1 "' + piece)
            for unit in units:
                parts.append(f"\n{unit.source}FERRYMAN_EMULATE({unit.name})\n")
        source = edit("\n".join(parts))
        compiler = host_compiler()
        assert compiler is not None
        key = hashlib.sha256("\0".join([source, *_FLAGS, *compiler]).encode()).hexdigest()[:24]
        self._path = self.folder / f"simt{self.wave}-{key}.so"
        self._lock = filelock.FileLock(f"{self._path}.lock")
        self._lock.acquire(timeout=290)
        if self._path.exists():
            return None
        file = self._path.with_suffix(".cpp")
        command = [*compiler, *_FLAGS, f"-DFERRYMAN_WAVE={self.wave}", str(file), "-o", str(self._path) + ".part"]
        try:
            file.write_text(source)
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=complaints or sys.stderr)
        except OSError:
            self._lock.release()
            raise

    def unlock(self) -> None:
        """For who collects several and loads none of the rest when one fails; nothing once it is loaded."""
        self._lock.release()

    def load(self, building: subprocess.Popen[bytes] | None) -> None:
        try:
            if building is not None:
                assert building.wait(timeout=300) == 0, "the host compiler refused the kernels"
                Path(str(self._path) + ".part").replace(self._path)
        finally:
            if building is not None:
                building.kill()  # one that is still at work would go on writing what another process may
            self._lock.release()
        self._libraries = [ctypes.CDLL(str(self._path))]
        self._functions.clear()
        self.launched.clear()


@contextmanager
def in_force(runtime: EmulatedRuntime) -> Iterator[None]:
    """Launches for `target(wave)` go to ``runtime``, afterwards to what they went to before."""
    vendor = f"emulated{runtime.wave}"
    before = simt_runtime._RUNTIMES.get(vendor)
    simt_runtime._RUNTIMES[vendor] = runtime  # type: ignore[assignment]
    try:
        yield
    finally:
        del simt_runtime._RUNTIMES[vendor]
        if before is not None:
            simt_runtime._RUNTIMES[vendor] = before


Mutant = tuple[str, str, str | None]  # what is replaced in a source, by what, and `assert_caught`'s ``said``


def assert_caught(runtime: EmulatedRuntime, mutant: Mutant, attempt: Callable[[], object]) -> None:
    """Compiles what was collected with the mutant's edit and asserts that ``attempt`` fails in some order of threads
    with ``said`` in the message ("": with a wrong result); None: that it passes in every order."""
    old, new, said = mutant

    def edit(source: str) -> str:
        assert old == "" or source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the source"
        return source.replace(old, new) if old else source

    runtime.load(runtime.compile_collected(edit))
    caught = []
    for runtime.order in (0, 1, 2):
        try:
            attempt()
        except AssertionError as error:
            caught.append(str(error))
    assert bool(caught) == (said is not None), caught
    assert (said or "") in "\n".join(caught)

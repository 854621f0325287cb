"""Triton's backend without a device: probing, ahead-of-time compilation for every arch, refusals, and the launch guard.

Kernels are compiled in worker processes (this file as a script), because a process that interprets Triton cannot
compile, and because a toolchain that kills its process must fail one test and not the run.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ferryman.backends import triton as backend
from ferryman.backends import triton_reductions, triton_rows
from ferryman.backends.base import Backend, Target
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, CaptureError, CompileError
from ferryman.porting.aot import groups
from tests import compiled, families


def _nvidia(arch: str, shared: int, units: int) -> Target:
    return Target(arch, "nvidia", 32, shared, 1024, units, 50 << 20, registers_per_unit=65_536)


def _amd(arch: str, shared: int, units: int, wave: int = 64) -> Target:
    return Target(arch, "amd", wave, shared, 1024, units, 4 << 20)


TARGETS = {
    t.arch: t
    for t in (
        _nvidia("sm_80", 166912, 108),
        _nvidia("sm_87", 166912, 16),
        _nvidia("sm_89", 101376, 128),
        _nvidia("sm_90", 232448, 132),
        _nvidia("sm_100", 232448, 148),
        _amd("gfx90a", 65536, 104),
        _amd("gfx942", 65536, 304),
        _amd("gfx950", 163840, 256),
        _amd("gfx1100", 65536, 96, wave=32),
    )
}
EVERY = tuple(family.name for family in registry.families())
ROW_FAMILIES = tuple(families.modules("rowops"))  # whose kernels go along rows
DTYPES = ("float32", "float16", "bfloat16")
NO_SPILLS = ("sm_80", "sm_90", "gfx942", "gfx950")
WIDE = (("sm_90", "bfloat16"), ("gfx942", "bfloat16"))  # where it is held that aligned rows are read 16 bytes at a time
SECONDS, SLOW_SECONDS = 280, 1700  # an arch and dtype take 20 s on one idle core; a toolchain that hangs is a failure


def worker(*arguments: str, timeout: float = SECONDS) -> Any:
    paths = os.pathsep.join(filter(None, (str(compiled.ROOT), os.environ.get("PYTHONPATH"))))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def judge(arch: str, rows: list[dict[str, Any]]) -> None:
    assert rows
    assert [r for r in rows if "error" in r] == []
    limit = TARGETS[arch].shared_memory
    assert [r for r in rows if r["resources"]["shared"] > limit or r["bytes"] == 0] == []
    if arch in NO_SPILLS:
        assert [r for r in rows if r["resources"]["spills"]] == []


# what no row of ferryman.yaml compiles; where kernels may spill, bfloat16 stands for both types of 16 bits
ROWS = compiled.rows("triton")
_MATRIX = [
    (arch, dtype) for arch in TARGETS if arch not in ROWS for dtype in DTYPES if dtype != "float16" or arch in NO_SPILLS
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.alternate("arch", "dtype", weeks=2)  # rows compile each family daily
@pytest.mark.parametrize(("arch", "dtype"), _MATRIX)
@pytest.mark.parametrize("family", EVERY)
def test_the_whole_matrix_compiles(family: str, arch: str, dtype: str) -> None:
    """Each family every other week, for one arch in one dtype."""
    judge(arch, worker("compile", arch, dtype, family, timeout=SLOW_SECONDS))


def test_rows_compile_the_matrix_of_the_other_arches() -> None:
    """The same kernels, in every dtype, where no more may spill; the few that differ are compiled here."""
    report = worker("rows", timeout=SLOW_SECONDS)
    assert report["spilling"].keys() == ROWS.keys()
    for arch, known in ROWS.items():
        assert known.shared_memory == TARGETS[arch].shared_memory
        assert arch not in NO_SPILLS or report["spilling"][arch] == []
    assert sum(map(len, report["left"].values())) < 20
    for arch, rows in report["left"].items():
        judge(arch, rows)


@pytest.mark.slow
@pytest.mark.alternate("arch", "dtype")
@pytest.mark.parametrize(("arch", "dtype"), WIDE)
def test_aligned_rows_are_read_16_bytes_at_a_time(arch: str, dtype: str) -> None:
    rows = worker("compile aligned", arch, dtype, timeout=SLOW_SECONDS)
    judge(arch, rows)
    assert [r["name"] for r in rows if not r["wide_loads"]] == []


def test_compile_reports_resources_and_refuses() -> None:
    report = worker("refusals")
    assert report["nvidia"]["kind"] == "cubin" and report["nvidia"]["resources"]["threads"] == 128
    assert report["amd"]["kind"] == "hsaco" and report["amd"]["resources"]["wave"] == 64
    assert 0 < report["nvidia"]["resources"]["registers"] <= 255
    assert 0 < report["amd"]["resources"]["registers"] <= 512
    assert "bogus" in report["unknown option"] and "ArgumentError" in report["unknown option"]
    assert "waves_per_eu" in report["other vendor's option"]
    assert "shared: 131072 needed, gfx942 has 65536" in report["shared memory"]
    assert "threads: 2048 needed, gfx942 has 1024" in report["threads"]
    assert "CompileError" in report["bad kernel"] and "sm_90" in report["bad kernel"]
    assert "ArgumentError" in report["unknown arch"]
    assert "missing ['n']" in report["incomplete"]
    for arch in ("sm_90", "gfx942"):
        assert (
            "CompileError" in report[f"folded rows, {arch}"]
            and "sum the axes one by one" in report[f"folded rows, {arch}"]
        )
        assert report[f"folded whole, {arch}"].startswith("compiled") and report[f"axes, {arch}"].startswith("compiled")
    assert report["buffer loads"] and not report["buffer loads without ranges"]


def test_importing_the_backend_does_not_import_triton() -> None:
    code = "import ferryman.backends.triton, sys; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def probe_in(environment: dict[str, str], vendor: str) -> list[str]:
    code = "import json, sys; from ferryman.backends.triton import TritonBackend as Backend"
    code += f"; sys.stdout.write(json.dumps(Backend().probe({vendor!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    reasons: list[str] = json.loads(done.stdout)
    return reasons


def test_probe_gives_reasons() -> None:
    assert isinstance(backend.TritonBackend(), Backend)
    assert probe_in({"TRITON_INTERPRET": "1"}, "cpu") == []
    assert "set TRITON_INTERPRET=1" in probe_in({"TRITON_INTERPRET": "0"}, "cpu")[0]
    assert "this process interprets Triton" in probe_in({"TRITON_INTERPRET": "1"}, "nvidia")[0]
    assert "does not serve vendor 'intel'" in probe_in({}, "intel")[0]


def test_probe_knows_the_interpreters_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.6.0", "numpy": "2.4.1"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    monkeypatch.setattr(backend, "interpreting", lambda: True)
    assert "needs numpy < 2.4, found 2.4.1" in backend.TritonBackend().probe("cpu")[0]
    versions["numpy"] = "2.3.5"
    assert backend.TritonBackend().probe("cpu") == ()
    versions.update(triton="3.7.0", numpy="2.4.1")
    assert backend.TritonBackend().probe("cpu") == ()


@pytest.mark.parametrize(
    ("make", "collapsed"),
    [
        (lambda: torch.zeros(4, 6), (True, 4, 6)),
        (lambda: torch.zeros(3, 4, 6), (True, 12, 6)),
        (lambda: torch.zeros(3, 4, 12)[..., :6], (True, 12, 12)),
        (lambda: torch.zeros(3, 8, 6)[:, ::2], (True, 12, 12)),
        (lambda: torch.zeros(3, 8, 6)[:, :4], (False, 12, 6)),
        (lambda: torch.zeros(4, 12)[:, ::2], (False, 4, 6)),
        (lambda: torch.zeros(4, 3, 6).transpose(0, 1), (False, 12, 6)),
        (lambda: torch.zeros(1, 6).expand(4, 6), (True, 4, 0)),
        (lambda: torch.zeros(2, 1, 6).expand(2, 4, 6), (False, 8, 6)),
        (lambda: torch.zeros(2, 5, 12)[:, 2:3, :6], (True, 2, 60)),
        (lambda: torch.zeros(6), (True, 1, 6)),
        (lambda: torch.zeros(0, 6), (True, 0, 6)),
        (lambda: torch.zeros(4, 0), (True, 0, 0)),
    ],
)
def test_rows_collapse_where_one_stride_describes_them(make: Any, collapsed: tuple[bool, int, int]) -> None:
    x = make()
    x.copy_(torch.arange(x.numel()).view(x.shape) if not x.is_contiguous() and 0 not in x.stride() else x)
    same, rows, stride = collapsed
    view, found_rows, found_stride = triton_rows.collapse_rows(x)
    assert ((view is x), found_rows, found_stride) == (same, rows, stride)
    if x.numel():
        assert torch.equal(view.as_strided((rows, x.shape[-1]), (stride, 1)), x.reshape(rows, -1))


def test_row_tiles() -> None:
    hopper, cdna = TARGETS["sm_90"], TARGETS["gfx942"]
    assert triton_rows.row_tile(hopper, 8192, 2, 8192) == triton_rows.RowTile(1, 8192, 8, True)
    assert triton_rows.row_tile(hopper, 1000, 2, 8192).rows == 4  # several short rows fill 4 warps
    # decoding: one row a program, on as few warps as 16-byte loads need
    assert triton_rows.row_tile(hopper, 1000, 2, 16) == triton_rows.RowTile(1, 1024, 4, True)
    assert triton_rows.row_tile(cdna, 1000, 2, 16) == triton_rows.RowTile(1, 1024, 2, True)
    assert triton_rows.row_tile(hopper, 128, 2, 1 << 20, stride=1 << 27).rows == 1  # 32-bit offsets would overflow
    assert triton_rows.row_tile(hopper, 32768, 2, 512).fits and not triton_rows.row_tile(hopper, 32769, 2, 512).fits
    for target in (hopper, cdna):
        for width in (1, 128, 5000, 70_000):
            assert triton_rows.row_tile(target, width, 4, 64).warps * target.wave <= target.max_threads


class FakeKernel:
    """What `launch` needs of a JITFunction: compiles on the first run, as Triton does."""

    def __init__(self, error: Exception | None = None) -> None:
        self.fn = SimpleNamespace(__name__="fake")
        self.error, self.compiled, self.launches = error, 0, 0

    def _do_compile(self, key: Any, signature: Any, device: int) -> None:
        self.compiled += 1
        if self.error is not None:
            raise self.error

    def run(self, *args: Any, grid: Any, warmup: bool, **meta: Any) -> None:
        if not self.compiled:
            self._do_compile("key", {}, 0)
        self.launches += 1


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    state = {"now": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["now"])
    monkeypatch.setattr(backend, "_arch_of", lambda device: "sm_90")
    return state


def test_compiling_during_capture_is_refused_and_a_cached_kernel_is_not(capturing: dict[str, bool]) -> None:
    kernel, device = FakeKernel(), torch.device("cpu")
    capturing["now"] = True
    with pytest.raises(CaptureError, match="fake would be compiled while a graph is being captured; call the op once"):
        backend.launch(kernel, (1,), device=device)
    assert (kernel.compiled, kernel.launches) == (0, 0)
    capturing["now"] = False
    backend.launch(kernel, (1,), device=device)
    capturing["now"] = True
    backend.launch(kernel, (1,), device=device)
    assert (kernel.compiled, kernel.launches) == (1, 2)


def test_toolchain_failures_become_compile_errors_and_memory_errors_do_not(capturing: dict[str, bool]) -> None:
    with pytest.raises(CompileError, match="PassManager::run failed"):
        backend.launch(FakeKernel(RuntimeError("PassManager::run failed")), (1,), device=torch.device("cpu"))
    for error in (MemoryError("host"), torch.OutOfMemoryError("device")):
        with pytest.raises(type(error)):
            backend.launch(FakeKernel(error), (1,), device=torch.device("cpu"))


_REDUCED = """#linear = #ttg.linear<{register = [[0, 1]], lane = LANES, warp = [[0, 32]], block = []}>
    %sum = "tt.reduce"(%x) <{axis = 1 : i32}> ({
    ^bb0(%a: f32, %b: f32):
      tt.reduce.return %c : f32
    }) : (tensor<8x256xf32, #linear>) -> tensor<8xf32, #ttg.slice<{dim = 1, parent = #linear}>>
"""
_APART = "[[0, 8], [1, 0], [2, 0], [4, 0], [0, 16]]"
_NEIGHBOURS = "[[1, 0], [0, 8], [0, 16], [2, 0], [4, 0]]"


def test_a_sum_that_triton_lowers_wrongly_is_never_launched(capturing: dict[str, bool]) -> None:
    class Compiled(FakeKernel):
        def __init__(self, lanes: str) -> None:
            super().__init__()
            self.lanes, self.device_caches = lanes, {0: ({},)}

        def _do_compile(self, key: Any, signature: Any, device: int) -> Any:
            self.compiled += 1
            self.device_caches[device][0][key] = SimpleNamespace(asm={"ttgir": _REDUCED.replace("LANES", self.lanes)})
            return self.device_caches[device][0][key]

        def run(self, *args: Any, grid: Any, warmup: bool, **meta: Any) -> None:
            if "key" not in self.device_caches[0][0]:
                self._do_compile("key", {}, 0)
            self.launches += 1

    kernel = Compiled(_APART)
    for _ in range(2):
        with pytest.raises(CompileError, match="adds up values of other rows in tt.reduce over axis 1"):
            backend.launch(kernel, (1,), device=torch.device("cpu"))
    assert (kernel.compiled, kernel.launches) == (2, 0)
    right = Compiled(_NEIGHBOURS)
    for _ in range(2):
        backend.launch(right, (1,), device=torch.device("cpu"))
    assert (right.compiled, right.launches) == (1, 2)


@pytest.mark.parametrize(
    ("lanes", "operand", "axis", "wrong"),
    [
        (_APART, "tensor<8x256xf32, #linear>", 1, True),
        (_APART, "tensor<8x256xf32, #linear>", 0, False),
        (_NEIGHBOURS, "tensor<8x256xf32, #linear>", 1, False),
        (_NEIGHBOURS, "tensor<8x256xf32, #linear>", 0, True),
        ("[[0, 8], [1, 1], [2, 0], [4, 0], [0, 0]]", "tensor<8x256xf32, #linear>", 1, True),  # a lane of both axes
        (_APART, "tensor<8x256xf32, #blocked>", 1, False),
        # an axis of a slice is counted without those that are gone
        ("[[0, 0, 1], [1, 0, 0], [0, 0, 2]]", "tensor<8x4xf32, #ttg.slice<{dim = 1, parent = #linear}>>", 1, True),
        ("[[0, 1, 0], [1, 0, 0], [0, 2, 0]]", "tensor<8x4xf32, #ttg.slice<{dim = 1, parent = #linear}>>", 1, False),
    ],
)
def test_which_reductions_are_lowered_wrongly(lanes: str, operand: str, axis: int, wrong: bool) -> None:
    text = _REDUCED.replace("LANES", lanes).replace("tensor<8x256xf32, #linear>) ->", f"{operand}) ->")
    text = text.replace("axis = 1", f"axis = {axis}")
    assert (triton_reductions.misread(text, "3.6.0") is not None) == wrong
    assert triton_reductions.misread(text, "3.7.0") is None


# ---------------------------------------------------------------------------------------------------- in the worker


def sources(arch: str, dtype: str, *names: str) -> list[backend.Specialisation]:
    """What is compiled of these families, or of those whose kernels go along rows."""
    modules = (
        importlib.import_module(module)
        for family in names or ROW_FAMILIES
        for module in groups._modules("triton", family)
    )
    return [one for kernels in modules for one in kernels.specialisations(TARGETS[arch], dtype)]


def aligned(source: backend.Specialisation) -> bool:
    """Tensors whose rows start on 16 bytes, and at least 16 bytes a thread to read."""
    whole = {"width", "k", "rotary"} & source.divisible
    return not source.unaligned and bool(whole) and source.name != "_sum_partials"


def compile_all(arch: str, given: list[backend.Specialisation]) -> list[dict[str, Any]]:
    rows = []
    for source in given:
        row: dict[str, Any] = {"name": repr(source)}
        try:
            artefact = backend.TritonBackend().compile(source, None, arch, TARGETS[arch])
        except CompileError as error:
            rows.append({**row, "error": str(error)[-2000:]})
            continue
        wide = r"ld\.global\S*\.v4\.b32|cp\.async\.cg|buffer_load_dwordx4|global_load_dwordx4"
        facts = {"resources": artefact.resources, "bytes": len(artefact.image)}
        rows.append({**row, **facts, "wide_loads": len(re.findall(wide, artefact.log))})
    return rows


def of_rows() -> dict[str, Any]:
    """By arch: kernels that the row lets spill, and those that it does not compile, compiled."""
    spilling: dict[str, list[str]] = {}
    left: dict[str, list[dict[str, Any]]] = {}
    for arch, known in ROWS.items():
        by_row = [compiled.by_row(known, "triton", ROW_FAMILIES, dtype) for dtype in DTYPES]
        own = [{repr(one): one for one in sources(arch, dtype)} for dtype in DTYPES]
        assert all(own)
        shared = [there[name] for there, here in zip(by_row, own, strict=True) for name in here if name in there]
        spilling[arch] = [one.name for one in shared if one.spills_allowed]
        others = [one for there, here in zip(by_row, own, strict=True) for n, one in here.items() if n not in there]
        left |= {arch: compile_all(arch, others)} if others else {}
    return {"spilling": spilling, "left": left}


def refusals() -> dict[str, Any]:
    import triton
    import triton.language as tl

    globals().update(tl=tl)

    @triton.jit
    def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, BLOCK)
        start = tl.program_id(0) * n  # a run-time offset: its range is known only from the pointer's
        tl.store(y_ptr + start + i, tl.load(x_ptr + (start + i), mask=i < n), mask=i < n)

    @triton.jit
    def product(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, BLOCK)
        at = i[:, None] * BLOCK + i[None, :]
        x = tl.zeros([BLOCK, BLOCK], tl.float32)
        for start in range(16):
            x = tl.dot(tl.load(x_ptr + at + start), tl.load(y_ptr + at + start), x)
        tl.store(y_ptr + at, x.to(tl.float16))

    @triton.jit
    def bad(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr + tl.arange(0, BLOCK), undefined_name)  # type: ignore[name-defined] # noqa: F821

    @triton.jit
    def folded(x_ptr, y_ptr, ROWS: tl.constexpr, ONE: tl.constexpr):  # type: ignore[no-untyped-def]
        r = tl.arange(0, ROWS)
        at = r[:, None, None] * 256 + tl.arange(0, 16)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        x = tl.load(x_ptr + at).to(tl.float32)
        if ONE:
            total = tl.sum(tl.sum(x, 2), 1)
        else:
            total = tl.sum(tl.reshape(x, (ROWS, 256)), 1)
        tl.store(y_ptr + r, total)

    compiler = backend.TritonBackend()
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}
    good = backend.Specialisation(copy, signature, {"BLOCK": 1024}, divisible=frozenset({"n"}))
    halves = {"x_ptr": "*fp16", "y_ptr": "*fp16"}
    large = backend.Specialisation(product, halves, {"BLOCK": 256}, num_warps=8, num_stages=2)
    cases = {
        "unknown option": (good, {"bogus": 1}, "sm_90"),
        "other vendor's option": (good, {"waves_per_eu": 2}, "sm_90"),
        "shared memory": (large, {"num_stages": 2}, "gfx942"),
        "threads": (good, {"num_warps": 32}, "gfx942"),
        "bad kernel": (backend.Specialisation(bad, {"x_ptr": "*fp32"}, {"BLOCK": 16}), None, "sm_90"),
        "unknown arch": (good, None, "mi300x"),
        "incomplete": (backend.Specialisation(copy, halves, {"BLOCK": 16}), None, "sm_90"),
    }
    rows = {"x_ptr": "*bf16", "y_ptr": "*fp32"}
    for arch in ("sm_90", "gfx942"):
        of = {"folded rows": (8, False), "folded whole": (1, False), "axes": (8, True)}
        for name, (count, one) in of.items():
            cases[f"{name}, {arch}"] = (
                backend.Specialisation(folded, rows, {"ROWS": count, "ONE": one}),
                None,
                arch,
            )
    report: dict[str, Any] = {}
    for name, (source, options, arch) in cases.items():
        try:
            artefact = compiler.compile(source, options, arch, TARGETS.get(arch))
            report[name] = f"compiled: {artefact.resources}"
        except (ArgumentError, CompileError) as error:
            report[name] = f"{type(error).__name__}: {error}"
    for vendor, arch in (("nvidia", "sm_90"), ("amd", "gfx942")):
        artefact = compiler.compile(good, None, arch)
        report[vendor] = {"kind": artefact.kind, "resources": artefact.resources}
    report["buffer loads"] = "buffer_load" in compiler.compile(good, None, "gfx942").log
    attributes = backend._attributes
    backend._attributes = lambda source, kind: {}  # type: ignore[assignment]
    report["buffer loads without ranges"] = "buffer_load" in compiler.compile(good, None, "gfx942").log
    backend._attributes = attributes
    return report


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        sys.stdout.write(json.dumps(compile_all(sys.argv[2], sources(*sys.argv[2:]))))
    elif sys.argv[1] == "compile aligned":
        sys.stdout.write(json.dumps(compile_all(sys.argv[2], [s for s in sources(*sys.argv[2:]) if aligned(s)])))
    elif sys.argv[1] == "rows":
        sys.stdout.write(json.dumps(of_rows()))
    else:
        sys.stdout.write(json.dumps(refusals()))

"""A device that stands in for an older one, as far as that goes without a GPU: sm_80 PTX becomes sm_90 machine code of
Ampere's instructions, what reaches the driver is that code, and whatever cannot be stood in for is refused.

Compilation runs in worker processes (stand_in_worker.py): a process that interprets Triton cannot compile.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.backends import redirect
from ferryman.device_profiles import Profile, profile
from ferryman.dispatch import registry
from ferryman.dispatch.plan import drop_plans
from ferryman.dispatch.select import target_of
from ferryman.errors import ArgumentError
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging import parity
from ferryman.porting.judging.results import Cell
from ferryman.porting.running import stand_in, stand_in_route
from ferryman.porting.running.workers import Job, Workers
from tests.cli.run import ferryman

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = tuple(family.name for family in registry.families())
# Those whose kernels ask for matrix products, or that launch the kernels of `linear`.
MULTIPLIES = re.compile(r"tl\.dot\(|from ferryman\.ops\.matmul import triton_kernels")
PRODUCTS = tuple(
    family
    for family in FAMILIES
    if any(MULTIPLIES.search(path.read_text()) for path in (ROOT / "src/ferryman/ops" / family).glob("*_kernels.py"))
)


def worker(*arguments: str, timeout: float = 280) -> Any:
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/unit/stand_in_worker.py"), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def judge(swept: dict[str, list[dict[str, Any]]], known: Profile, dtype: str) -> None:
    for family, rows in swept.items():
        assert rows and [r for r in rows if r["error"]] == []
        assert {(r["target"], r["image"]) for r in rows} == {(known.arch, "sm_90")}
        assert [r for r in rows if r["shared"] > known.shared_memory] == []
        assert [r for r in rows if r["newer"]] == [], "instructions that the older device does not have"
        # a product of 16 bits or tf32 is one of Ampere's matrix unit, in the PTX and in the machine code
        assert [r for r in rows if r["dots"] and not ("HMMA" in r["older"] and r["products"])] == []
        assert family in PRODUCTS or not any(r["dots"] for r in rows)
    assert dtype == "float32" or all(any(r["dots"] for r in rows) for f, rows in swept.items() if f in PRODUCTS)


def test_a_devices_own_arch_keeps_its_own_instructions() -> None:
    """An H100's on an H200, in PTX for sm_90a alone; and the search for newer instructions finds some."""
    rows = worker("sweep", "h100", "sm_90", "bfloat16", "0/9", "matmul")["matmul"]
    assert [r for r in rows if r["error"]] == [] and {(r["target"], r["image"]) for r in rows} == {("sm_90", "sm_90")}
    assert any("HGMMA" in r["newer"] for r in rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.alternate("name", "dtype", "every")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "dtype", "every"),
    [*(("a100", "bfloat16", f"{part}/3") for part in range(3)), ("a100", "float32", "0/3"), ("l4", "bfloat16", "0/5")],
)
def test_ptx_becomes_machine_code_with_the_older_devices_instructions(
    name: str, dtype: str, every: str, family: str
) -> None:
    """Every configuration of the A100's in bfloat16, in three parts, and samples of the others; CI takes one part of
    each family a week."""
    judge(worker("sweep", name, "sm_90", dtype, every, family, timeout=1700), profile(name), dtype)


def test_the_cases_reach_every_tile_of_an_a100() -> None:
    """Of those that `ferryman compile` builds; tf32's are for another setting (tests/gpu/test_ampere_gpu.py)."""
    reached = {dtype: worker("reach", dtype) for dtype in ("bfloat16", "float32")}
    assert reached["bfloat16"]["left"] == []
    assert [name for name in reached["float32"]["left"] if not name.startswith("_matmul")] == []
    idle = [case for case in reached["bfloat16"]["idle"] if case in reached["float32"]["idle"]]
    assert idle == [], "cases that reach nothing new"


def test_what_reaches_the_driver() -> None:
    report = worker("launches")
    # one image for each configuration, the older device's shared memory, the machine code of the one that is here
    assert [(k["name"], k["image"]) for k in report["loaded"]] == [("_norm", "sm_90"), ("_matmul", "sm_90")]
    assert report["loaded"][1]["shared"] > 48 * 1024
    first, again, product = report["launched"]
    assert first == again and first["grid"] == [6, 1, 1] and first["stream"] == 7 and first["function"] == 41
    # every parameter in its place, constants included: what Triton's own launcher takes
    assert first["values"][:6] == [[6, 320], None, [320], None, [6, 320], None] and "CAST" in first["constants"]
    assert product["function"] == 42 and product["values"][:2] == [[6, 320], [320, 256]]
    assert report["counts"] == [["_norm", "sm_80", "sm_90", 2], ["_matmul", "sm_80", "sm_90", 1]]
    assert set(report["asm"].values()) == {".target sm_80"}
    route = "sm_80 PTX of the a100-sxm-80 configuration, executed on NVIDIA H200: "
    assert report["evidence"] == route + "_matmul x1, _norm x2"
    assert report["nothing"] == report["after"] == route + "no kernel was launched"
    assert report["replayed"] == "launches that are redirected"
    assert report["multithreaded"] is False, "a backward on autograd's own thread would be the device's own"
    assert report["redirected"] is False


def test_what_the_older_device_could_not_run_is_refused() -> None:
    refusals = worker("refusals")
    assert "shared: 180224 needed, sm_80 has 166912 for a block" in refusals["an H200's stages"]
    assert "required: sm_80" in refusals["another target"]
    assert refusals["damaged"].startswith(
        "CompileError: triton could not compile _matmul for sm_90:\nptxas, exit code 255"
    )
    assert "Unknown modifier '.sink'" in refusals["damaged"] and len(refusals["damaged"].splitlines()) <= 21
    assert "higher than default SM version" in refusals["older"]
    assert refusals["simt"] == (
        "BackendUnavailable: u: NVIDIA H200 stands in for a100-sxm-80: it executes Triton kernels alone"
    )


@pytest.mark.parametrize(
    ("known", "here", "why"),
    [
        ("a100", "h200", None),
        ("a100", "h100", None),
        ("a100", "a100", None),
        ("orin-agx", "h200", None),
        ("l4", "h200", None),
        ("rtx4090", "h200", None),
        ("h100", "h200", None),
        ("a100", "cpu", "the device here is the host CPU (cpu); required: an NVIDIA GPU of compute capability 8.0"),
        ("a100", "mi300x", "required: an NVIDIA GPU of compute capability 8.0 or later"),
        ("orin-agx", "a100", "(sm_80); required: a device of compute capability 8.7 or later"),
        ("h200", "a100", "(sm_80); required: a device of compute capability 9.0 or later: PTX runs on later ones"),
        ("a100", "l4", "with 101376 bytes of shared memory for a block; required: a device with 166912 or more"),
        ("h100", "generic-blackwell", "required: a device of sm_90: from there on Triton's PTX is for one arch alone"),
        ("mi300x", "h200", "mi300x, of vendor amd; required: an NVIDIA device of the catalogue"),
        ("generic-ampere", "h200", "a generic profile, of no one size; required: an NVIDIA device of the catalogue"),
    ],
)
def test_who_stands_in_for_whom(known: str, here: str, why: str | None) -> None:
    obstacle = stand_in_route.obstacle(profile(known), profile(here))
    if why is None:
        assert obstacle is None
    else:
        with pytest.raises(ArgumentError) as raised:
            stand_in_route.require(profile(known), profile(here))
        assert str(raised.value).startswith("check: --as is ") and why in str(raised.value)


class Elsewhere:
    """A route whose launches end in PyTorch: how a check treats what was executed for another device."""

    on_device = True

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.profile, self.target, self.change = profile("a100"), target_of(profile("a100")), change
        self.began = 0

    def probe(self, backend: str, vendor: str) -> tuple[str, ...] | None:
        return ()

    def wrap(self, launcher: Callable[..., Any], over: Collection[int] = ()) -> Callable[..., Any]:
        def run(*args: Any) -> torch.Tensor:
            if len(args) == 2:
                return self.change(torch.softmax(args[0], -1))
            grad, y, _ = args
            return y * (grad - (grad * y).sum(-1, keepdim=True))

        return run

    def begin(self) -> None:
        self.began += 1

    def take(self) -> list[Any]:
        return []

    def evidence(self) -> str:
        return "elsewhere: by hand"


@pytest.fixture
def softmax() -> Iterator[Callable[[Any], Any]]:
    op = registry.primitive("softmax")
    case = next(c for c in cases_of(op, "small") if not c.exact)

    def check(route: Any) -> Any:
        before = redirect.to(route)
        drop_plans()
        try:
            line = registry.implementation("softmax", "triton.rows")
            return parity.check_cell(op, line, case, STORAGE_DTYPES[0], "cpu", profile("a100"))
        finally:
            redirect.back(before)
            drop_plans()

    yield check


def test_what_ran_elsewhere_is_simulated_and_names_its_route(softmax: Callable[[Any], Any]) -> None:
    route = Elsewhere(lambda y: y)
    cell = softmax(route)
    assert (cell.verdict, cell.reason, cell.seconds) == ("SIMULATED", "elsewhere: by hand", None)
    assert route.began == 1 and {g.outcome for g in cell.gates.values()} <= {"pass", "n/a"}
    wrong = softmax(Elsewhere(lambda y: y * 1.01))
    assert wrong.verdict == "FAIL" and wrong.gates["G2"].outcome == "fail"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--as", "a100", "--device", "cpu"),
            "check: --as is a100-sxm-80 (sm_80), and the device here is the host CPU",
        ),
        (("--as", "mi300x"), "required: an NVIDIA device of the catalogue, whose Triton kernels have PTX: a100-sxm-80"),
        (("--as", "a100x"), "unknown device profile 'a100x'; nearest: a100"),
        (("--as", "a100", "--backend", "cuda"), "check: --backend is cuda; required: triton beside --as"),
        (("--as", "a100", "--backend", "simulated"), "check: --as is a100; required: no --backend simulated beside it"),
        (("--as", "a100", "--model", "qwen3"), "check: --model is given; required: no --as beside it"),
        (("--as", "a100", "--kernel", "a:b", "--op", "softmax"), "check: --kernel is given; required: no --as beside"),
        (("--as", "a100", "--full"), "check: --full is given; required: no --as beside it"),
        (("--as", "a100", "--assume", "xf32=nearest"), "check: --assume is given; required: --backend simulated"),
    ],
)
def test_bad_use_is_one_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = ferryman("check", *arguments)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


class Shares:
    """In the place of the processes that share an accelerator's cells."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        SHARED.extend(jobs)

    def __enter__(self) -> Shares:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def remaining(self) -> Iterator[Cell]:
        ran = {"op": "softmax", "implementation": "triton.long", "device": "cuda:0", "dtype": "bfloat16"}
        yield Cell(**ran, case="one_row", verdict="SIMULATED", reason="sm_80 PTX ..")
        yield Cell(**ran, case="prime", verdict="NOT_RUN", reason="out of memory: CUDA")


SHARED: list[Job] = []


def test_the_document_is_never_one_of_the_older_device_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Any] = []

    def alone(cells: list[Cell], local: Any, *where: Any) -> list[Cell]:
        again.append((local, where))
        return [c if c.verdict == "SIMULATED" else c.model_copy(update={"verdict": "SIMULATED"}) for c in cells]

    SHARED.clear()
    monkeypatch.setattr(stand_in, "detect", lambda device: profile("h200"))
    monkeypatch.setattr(stand_in, "placed", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(stand_in, "Workers", Shares)
    monkeypatch.setattr(stand_in, "on", lambda known, place: contextlib.nullcontext())
    monkeypatch.setattr(stand_in, "alone", alone)
    seen: list[tuple[int, int, str]] = []
    document = stand_in.run(
        profile("a100"), ["softmax", "softmax"], None, None, ["bf16"], "small", 3, lambda *p: seen.append(p), 2
    )
    facts = document.environment
    assert (facts.device, facts.profile, facts.arch, facts.vendor) == ("stand-in", "a100-sxm-80", "sm_80", "nvidia")
    assert facts.device_name == "NVIDIA A100 SXM 80 GB, its sm_80 PTX on NVIDIA H200"
    assert [(c.device, c.verdict) for c in document.cells] == [("stand-in", "SIMULATED")] * 2
    assert [job.share for job in SHARED] == [(0, 2), (1, 2)]
    for job in SHARED:
        assert (job.lines, job.dtypes, job.tier, job.seed, job.device, job.stands_in_for) == (
            {"softmax": ["triton.rows", "triton.long"]},
            ["bfloat16"],
            "small",
            3,
            "cuda:0",
            "a100-sxm-80",
        )
    ((local, where),) = again  # what found no memory beside the others runs once more, under the route
    assert [(op.name, [x.name for x in lines]) for op, lines in local] == [("softmax", ["triton.rows", "triton.long"])]
    assert where == ("small", 3, torch.device("cuda", 0), profile("a100"))
    assert [done for done, _, _ in seen] == [1, 2]


def test_a_worker_takes_the_route_or_says_why_it_cannot() -> None:
    job = Job({"softmax": ["triton.long"]}, ["bfloat16"], "small", 0, "cpu", stands_in_for="a100-sxm-80")
    with Workers([job]) as workers:
        cells = list(workers.remaining())
    assert [c.verdict for c in cells] == ["FAIL"]
    assert "--as is a100-sxm-80 (sm_80), and the device here is the host CPU" in str(cells[0].reason)

"""The benchmark: its protocol on a CPU, what it refuses to time, what it calls a regression, and its documents."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman import ops
from ferryman.cli import bench as command
from ferryman.cli import documents
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, FerrymanError, ResultError, UnknownName
from ferryman.ops import evidence
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting import bench
from ferryman.porting.bench import clock, condition, contender, document, grid, peers, rotation, runner
from ferryman.porting.bench.compare import Change, compare, regressed
from ferryman.porting.bench.document import Benchmark, Condition
from ferryman.porting.judging import results
from ferryman.porting.report import bench as report
from ferryman.porting.report import plots
from tests.cli.run import ferryman

CPU = torch.device("cpu")
SILU: Primitive = ops.silu_mul.primitive


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op's first small case, and little time for each."""

    def first(op: Primitive) -> Case:
        return registry.evidence(op).cases()[0]

    monkeypatch.setattr(grid, "standard_case", first)
    monkeypatch.setattr(runner, "standard_case", first)
    monkeypatch.setattr(clock, "CPU_SECONDS", 1e-3)
    monkeypatch.setattr(clock, "HOST_SECONDS", 1e-3)


ADAPTER = """
import torch
from torch.nn.functional import silu
from ferryman.porting.bench.peers import NotServed
NAME = "{name}"
def available():
    return {reason!r}
def version():
    return "1.2"
def silu_mul(gate, up):
    {body}
OPS = {{"silu_mul": silu_mul}}
"""


def adapter(folder: Path, name: str, body: str, reason: str | None = None) -> None:
    text = ADAPTER.format(name=name, reason=reason, body=textwrap.indent(body, "    ").strip())
    (folder / f"{name}.py").write_text(text)


def test_contenders_take_turns_and_only_right_peers_are_timed(quick: None, tmp_path: Path) -> None:
    adapter(tmp_path, "right", "return lambda: silu(gate) * up")
    adapter(tmp_path, "wrong", "return lambda: silu(gate) * up * 1.1")
    adapter(tmp_path, "short", "return lambda: (silu(gate) * up)[..., :1]")
    adapter(tmp_path, "broken", "raise RuntimeError('no such kernel')")
    adapter(tmp_path, "other", "raise NotServed('no such shapes')")
    adapter(tmp_path, "absent", "return None", reason="it is not installed")
    benchmark = bench.run(ops=["silu_mul"], device="cpu", peer_names=None, peers_from=tmp_path)
    (cell,) = benchmark.cells
    times = {t.name: t for t in cell.times}
    assert {n for n, t in times.items() if t.trials} == {"torch", "right", "copy"}
    for name in ("torch", "right", "copy"):
        one = times[name]
        assert len(one.trials) == contender.TRIALS and one.method == "host clock"
        assert one.seconds and one.warm_seconds and one.of_copy and one.spread and one.spread >= 1
        assert one.of_roofline is None and (one.host_seconds is not None) == (name != "copy")
    assert times["copy"].of_copy == 1.0
    assert "relative root mean square" in str(times["wrong"].skipped) and "not equal to the op" in str(
        times["wrong"].skipped
    )
    assert "the op gives" in str(times["short"].skipped)
    assert times["broken"].skipped == "RuntimeError: no such kernel" and "no such shapes" in str(times["other"].skipped)
    assert "absent" not in times and {p.name: p.reason for p in benchmark.peers}["absent"] == "it is not installed"
    assert "TRITON_INTERPRET" in str(times["triton"].skipped)
    assert (
        cell.sets == 4
        and cell.noise is not None
        and cell.bytes
        == SILU.cost(*grid.inputs(SILU, registry.evidence(SILU).cases()[0], torch.bfloat16, 0, CPU)).bytes
    )
    text = report.markdown(benchmark)
    assert "no roofline" in text and "| right (peer) |" in text and "absent took no part: it is not installed" in text
    assert report.standing(benchmark)[0].startswith("silu_mul: ")


OVER = """own = gate.clone()
class Call:
    def __call__(self):
        return torch.mul(silu(own), up, out=own)
    def restore(self):
        silu_mul.restored = getattr(silu_mul, "restored", 0) + 1
        own.copy_(gate)
return Call()"""


def test_a_peer_that_writes_over_its_arguments_gets_them_back_before_every_round(quick: None, tmp_path: Path) -> None:
    adapter(tmp_path, "over", OVER)
    (cell,) = bench.run(ops=["silu_mul"], device="cpu", peer_names=None, peers_from=tmp_path).cells
    (time,) = [t for t in cell.times if t.name == "over"]
    assert time.seconds and time.warm_seconds is None and time.skipped is None
    assert (
        sys.modules["ferryman_peers.over"].silu_mul.restored >= contender.TRIALS * cell.sets
    )  # all sets', in every round


class _Breaks(clock.Timer):
    """Of ours, one that breaks while it is timed: in its trials, or after them."""

    where = ""

    def cold(self, samples: int = clock.SAMPLES) -> float:
        self._unless("cold")
        return super().cold(samples)

    def warm(self) -> float | None:
        self._unless("warm")
        return super().warm()

    def _unless(self, place: str) -> None:
        if self.where == place and isinstance(self.calls[0], functools.partial):  # the copy's is a function
            raise RuntimeError("\n\x1b[91mno room\x1b[0m\nof 2 GiB")


@pytest.mark.parametrize("where", ["cold", "warm"])
def test_a_contender_that_breaks_after_it_was_made_ready_is_a_row(
    where: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "Timer", _Breaks)
    monkeypatch.setattr(_Breaks, "where", where)
    (cell,) = bench.run(ops=["silu_mul"], implementations=["torch"], device="cpu").cells
    times = {t.name: t for t in cell.times}
    assert (times["torch"].trials, times["torch"].skipped) == ([], "RuntimeError: no room")
    assert times["copy"].seconds and (cell.noise is None) == (where == "cold")


def test_a_cell_that_cannot_be_made_does_not_end_the_others(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rotated, examples = runner.rotated, ("silu_mul", "softmax")

    def full(plan: Any, op: Primitive, case: Case) -> Any:
        if op.name == examples[0]:
            raise MemoryError("of 2 GiB")
        return rotated(plan, op, case)

    monkeypatch.setattr(runner, "rotated", full)
    lost, timed = bench.run(ops=examples, implementations=["torch"], device="cpu").cells
    (torchs,) = lost.times
    assert torchs.skipped == "its cell failed: MemoryError: of 2 GiB" and lost.untrusted == [
        "it failed: MemoryError: of 2 GiB"
    ]
    assert lost.bytes > 0 and timed.times[0].seconds
    benchmark = bench.Benchmark(**(dict(bench.run(ops=["softmax"], device="cpu")) | {"cells": [lost, timed]}))
    assert document.parse(json.loads(document.dumps(benchmark)), "it").cells[0] == lost and report.markdown(benchmark)


def test_a_peers_standard_case_is_judged_once_for_an_op(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter(tmp_path, "right", "return lambda: silu(gate) * up")
    adapter(tmp_path, "wrong", "return lambda: silu(gate) * up * 1.1")
    differing, judged = runner._differing, []

    def counted(plan: runner.Plan, op: Primitive, call_of: Any) -> str | None:
        judged.append(call_of.func.__self__.name)
        return differing(plan, op, call_of)

    monkeypatch.setattr(runner, "_differing", counted)
    adapters = tuple(peers.adapters(tmp_path, None))
    plan = runner.Plan(CPU, runner.select.profile_for(CPU), torch.float32, (), ("torch",), adapters, 0)
    for rows in (8, 16, 24):
        args = (torch.randn(rows, 32), torch.randn(rows, 32))
        right, wrong = runner.peer_contenders(plan, SILU, args)
        assert right.skipped is None and "not equal to the op on" in str(wrong.skipped)
    assert judged == ["right", "wrong"]


def test_an_implementation_that_serves_nothing_here_is_refused() -> None:
    with pytest.raises(FerrymanError, match="cuda serves none of silu_mul on cpu; required: one of definition, torch"):
        bench.run(ops=["silu_mul"], implementations=["cuda"], device="cpu")


def test_a_cpu_is_known_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel name\t: A CPU of 3 GHz\n")
    monkeypatch.setattr(results, "Path", lambda path: facts if path == "/proc/cpuinfo" else Path(path))
    for there, cpu_name in ((True, "A CPU of 3 GHz"), (False, platform.processor() or platform.machine())):
        if not there:
            facts.unlink()
        results._processor.cache_clear()
        here = results.environment(CPU, runner.select.profile_for(CPU), 0, "small")
        assert here.device_name == cpu_name
    results._processor.cache_clear()


def test_every_op_has_inputs_and_a_backward_gets_its_forwards(quick: None) -> None:
    for op in registry.primitives().values():
        (case,) = grid.cases(op, "small", CPU)
        values = grid.inputs(op, case, torch.float32, 0, CPU)
        assert len(values) == len(op.names)
        assert op.body(*values) is not None  # arguments that the op accepts


def test_rotated_sets_are_equal_copies_elsewhere() -> None:
    x = torch.randn(6, 8).t()
    copy = rotation.own(x)
    assert torch.equal(copy, x) and copy.stride() == x.stride() and copy.data_ptr() != x.data_ptr()
    assert rotation.own(1.5) == 1.5


@pytest.mark.parametrize("op", list(registry.primitives().values()), ids=lambda op: op.name)
def test_the_grids_hold_cases_that_the_ops_accept(op: Primitive) -> None:
    """Checked and costed on meta tensors; names do not repeat; the large row cases are above 64 MiB."""
    forward = grid.forward_of(op) or op
    for size in ("small", "full"):
        cases = grid.cases(op, size, torch.device("cuda"))
        assert (
            len({c.name for c in cases})
            == len(cases)
            >= (2 if size == "full" and registry.evidence(forward).bench else 1)
        )
        for case in cases:
            values = grid.on_meta(forward, case, torch.bfloat16)
            forward.check(*values)
            assert forward.cost(*values).bytes > 0


def test_ops_of_rows_are_timed_on_one_very_long_row() -> None:
    rows = evidence.bench_rows("full")
    assert [width for _, width in rows].count(131_072) == 1
    names, place = {f"{count}x{width}" for count, width in rows}, torch.device("cuda")
    forwards = [op for op in registry.primitives().values() if grid.forward_of(op) is None]
    of_rows = [op.name for op in forwards if names <= {case.name for case in grid.cases(op, "full", place)}]
    assert len(of_rows) > 3


def test_a_peer_that_is_near_is_right_and_one_that_is_off_is_not() -> None:
    gate, up = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(64, 128, dtype=torch.bfloat16)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert peers.wrong(SILU, (gate, up), exact.bfloat16()) is None
    assert peers.wrong(SILU, (gate, up), (torch.nn.functional.silu(gate) * up,)) is None  # rounded twice
    for result in (exact.bfloat16() * 1.01, torch.full_like(gate, float("nan")), exact.bfloat16().roll(1, 0), None):
        assert peers.wrong(SILU, (gate, up), (result,)) is not None


def test_float16_that_is_nearly_subnormal_is_judged_by_what_it_can_hold() -> None:
    """Gradients over a vocabulary: their last rounding is absolute, and more than an eps of their size."""
    gate, up = torch.full((64, 128), 4.0).half(), (torch.randn(64, 128) * 3e-6).half()
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert peers.wrong(SILU, (gate, up), exact.half()) is None
    blind, seeing = torch.tensor([-torch.inf, torch.nan, 1.0]), torch.tensor([0.0, torch.nan, 1.0])
    assert peers.apart(["lse"], [blind], [blind.clone()]) is None
    assert peers.apart(["lse"], [seeing], [blind]) is not None and peers.apart(["lse"], [blind], [seeing]) is not None
    assert peers.wrong(SILU, (gate, up), exact.half() * 1.1) is not None


def test_bad_names_and_folders(tmp_path: Path) -> None:
    for arguments, kind in (
        ({"ops": ["rms_nrm"]}, "op"),
        ({"implementations": ["tritn"]}, "backend or implementation"),
        ({"grid_name": "huge"}, "grid"),
    ):
        with pytest.raises(UnknownName, match=f"unknown {kind}"):
            bench.run(device="cpu", **arguments)
    with pytest.raises(ArgumentError, match="a folder of adapters"):
        bench.run(device="cpu", peer_names=None, peers_from=tmp_path)
    adapter(tmp_path, "right", "return lambda: gate")
    with pytest.raises(UnknownName, match="unknown peer 'lger'"):
        bench.run(device="cpu", peer_names=["lger"], peers_from=tmp_path)
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    with pytest.raises(FerrymanError, match=r"broken\.py cannot be imported: ModuleNotFoundError"):
        bench.run(device="cpu", peer_names=None, peers_from=tmp_path)
    (tmp_path / "broken.py").write_text("NAME = 'broken'")
    with pytest.raises(FerrymanError, match="lacks available, version, OPS"):
        bench.run(device="cpu", peer_names=None, peers_from=tmp_path)


def test_this_projects_adapters_load_and_say_why_they_cannot_run() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "peers"
    adapters = {a.name: a for a in peers.adapters(folder, None)}
    libraries = {"cudnn", "fa2", "fa4", "fla", "liger", "flag-gems", "conch", "quack"}
    assert set(adapters) == {"torch-eager", "torch-compile", "torch-grouped-mm", "triton-grouped", "sdpa"} | libraries
    for one in adapters.values():
        assert one.peer().reason is not None or one.peer().version
        assert set(one.ops) | set(one.steps) <= set(registry.primitives())
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    eager = adapters["torch-eager"].ops
    for name, op in ((n, registry.primitives()[n]) for n in eager):
        case = registry.evidence(op).cases()[0]
        args = grid.inputs(op, case, torch.float32, 0, CPU)
        try:
            assert peers.wrong(op, args, adapters["torch-eager"].call_of(name, args)()) is None, name
        except peers.NotServed:
            assert name in ("attention", "rope")
    assert torch.equal(eager["silu_mul"](gate, up)(), torch.nn.functional.silu(gate) * up)


# ------------------------------------------------------------------------------------------------------- documents


def document_of(times: dict[str, list[float]], noise: float = 0.0, **more: Any) -> Benchmark:
    cell = {
        "op": "rms_norm",
        "case": "16x4096",
        "dtype": "bfloat16",
        "bytes": 1e6,
        "flops": 1e6,
        "sets": 4,
        "rotated_bytes": 10**6,
        "noise": noise,
        "condition": {"source": "nobody"},
        "floor_seconds": 1e-6,
        "times": [
            {"name": n, "role": "implementation", "method": "graph replay", "trials": t, "of_roofline": 0.5}
            for n, t in times.items()
        ],
    } | more
    facts = {
        "device": "cuda:0",
        "device_name": "NVIDIA H200",
        "profile": "h200",
        "arch": "sm_90",
        "vendor": "nvidia",
        "versions": {"torch": "2.11"},
        "flags": {},
        "platform": "Linux",
        "time": "now",
        "seed": 0,
        "tier": "small",
    }
    limits = {"copy_bytes_per_s": 4e12, "copy_bytes": 2**30, "product_flops_per_s": 7e14, "product": "bfloat16 8192^3"}
    raw = {"schema_version": 1, "kind": document.KIND, "environment": facts, "ceilings": limits, "cells": [cell]}
    return document.parse(raw, "made")


def listing(times: list[dict[str, Any]]) -> Benchmark:
    """Of one cell with these contenders."""
    raw = json.loads(document.dumps(document_of({})))
    raw["cells"][0]["times"] = times
    return document.parse(raw, "listing")


def test_why_a_contender_was_not_timed_stands_below_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "UNIMPLEMENTED: " + "the device has no unit for it, " * 9
    of = {"role": "implementation", "method": "graph replay"}
    benchmark = listing([{"name": "triton", **of, "trials": STILL}, {"name": "cuda", **of, "skipped": why}])
    cells = [row[-1] for row in report.rows(benchmark)]
    assert cells == ["", "not timed"]
    assert report.untimed(benchmark) == [f"NOT TIMED rms_norm cuda, 16x4096: {why}"]
    command._show(benchmark, as_json=False)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("op ", "---", "rms_norm "))]
    assert len(table) == 4 and max(map(len, table)) < 200
    assert why in report.markdown(benchmark)


def test_a_document_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(document.dumps(document_of({"triton": [1e-6, 2e-6, 3e-6]})))
    benchmark = document.load(path)
    assert benchmark == document_of({"triton": [1e-6, 2e-6, 3e-6]})
    (times,) = benchmark.cells[0].times
    assert times.seconds == 2e-6 and times.spread == pytest.approx(3.0)


def test_a_run_that_is_stopped_leaves_its_cells_marked_as_partial(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, times_of, (done_op, last_op) = tmp_path / "bench.json", runner._cell, ("silu_mul", "softmax")

    def stopped(plan: runner.Plan, op: Primitive, case: Case, limits: Any) -> Any:
        if op.name == last_op:
            raise SystemExit(143)  # what SIGTERM does to the command
        return times_of(plan, op, case, limits)

    monkeypatch.setattr(runner, "_cell", stopped)
    arguments = ("bench", "--implementation", "torch", "--device", "cpu")
    both = (*arguments, "--op", done_op, "--op", last_op, "--out", str(out))
    assert ferryman(*both).code == 143
    partial = document.load(out)
    assert [cell.op for cell in partial.cells] == [done_op] and partial.left == 1
    assert "PARTIAL: the run was stopped, 1 cells were not timed" in out.with_suffix(".md").read_text()
    monkeypatch.undo()
    done = ferryman(*arguments, "--op", done_op, "--compare", str(out))
    assert done.code == 2 and "is partial: its run was stopped after 1 of 2 cells; required: a whole" in done.err
    with pytest.raises(ResultError, match="this benchmark is partial"):
        compare(partial.model_copy(update={"left": 0}), partial)


def test_a_whole_run_leaves_no_cell_and_says_so_only_at_its_end(quick: None) -> None:
    lefts: list[int] = []
    whole = bench.run(
        ops=["silu_mul", "softmax", "linear"],
        implementations=["torch"],
        device="cpu",
        finished=lambda partial: lefts.append(partial.left),
    )
    assert lefts == [2, 1] and whole.left == 0 and len(whole.cells) == 3
    document.require_whole(whole, "it")


def change(raw: dict[str, Any], **more: Any) -> dict[str, Any]:
    return raw | more


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a Ferryman benchmark"),
        ('{"kind": "ferryman-results"}', "is not a Ferryman"),
        ('{"kind": "ferryman-benchmark", "schema_version": 2}', "schema version 2; this Ferryman reads 1"),
        ('{"kind": "ferryman-benchmark", "schema_version": 1}', "is damaged"),
    ],
)
def test_files_that_are_no_benchmarks(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=message):
        document.load(path)


def test_damaged_documents(tmp_path: Path) -> None:
    raw = json.loads(document.dumps(document_of({"triton": [1e-6]})))
    cell = raw["cells"][0]
    for broken, message in (
        (raw | {"cells": [cell, cell]}, "stands twice"),
        (raw | {"cells": [cell | {"times": [cell["times"][0] | {"trials": [0.0]}]}]}, "a time that is none"),
        (raw | {"extra": 1}, "extra"),
        (raw | {"ceilings": raw["ceilings"] | {"copy_bytes_per_s": 0}}, "copy_bytes"),
    ):
        with pytest.raises(ResultError, match=message):
            document.parse(broken, "x")
    with pytest.raises(ResultError, match="cannot be read"):
        document.load(tmp_path / "none.json")


# -------------------------------------------------------------------------------------------------------- comparing


def verdict(before: Benchmark, now: Benchmark, again: Benchmark | None = None) -> Change:
    asked: list[Any] = []

    def timed(only: frozenset[tuple[str, str]]) -> Benchmark:
        asked.append(only)
        assert again is not None
        return again

    (outcome,) = compare(before, now, None if again is None else timed)
    assert asked in ([], [frozenset({("rms_norm", "16x4096")})])
    return outcome


STILL = [1e-5, 1.001e-5, 1.002e-5]


def slowed(by: float) -> Benchmark:
    return document_of({"triton": [t * by for t in STILL]})


def test_a_change_within_the_noise_of_both_runs_is_none() -> None:
    assert verdict(document_of({"triton": STILL}), slowed(1.015)).verdict == "same"
    assert verdict(document_of({"triton": STILL}), slowed(1.03)).verdict == "slower"
    assert verdict(document_of({"triton": STILL}), slowed(0.9)).verdict == "faster"
    # trials that differ by 20%, before or now, or a contender that differs from itself
    loud = [1e-5, 1.1e-5, 1.2e-5]
    assert verdict(document_of({"triton": loud}), document_of({"triton": [1.2e-5] * 3})).verdict == "same"
    assert verdict(document_of({"triton": STILL}), document_of({"triton": loud})).verdict == "same"
    assert verdict(document_of({"triton": STILL}, noise=0.05), slowed(1.05)).verdict == "same"


def test_a_regression_is_confirmed_by_a_fresh_run_or_it_is_none() -> None:
    before = document_of({"triton": STILL})
    outcome = verdict(before, slowed(1.2), slowed(1.18))
    assert (outcome.verdict, outcome.ratio, outcome.confirmed) == ("slower", pytest.approx(1.2), pytest.approx(1.18))
    assert regressed([outcome])
    outcome = verdict(before, slowed(1.2), slowed(1.0))
    assert outcome.verdict == "not confirmed" and not regressed([outcome])
    assert verdict(before, slowed(0.9), slowed(2.0)).verdict == "faster"  # nothing to confirm: nothing is timed again


def test_a_copy_or_a_peer_that_is_slower_is_shown_and_fails_nothing() -> None:
    def of(name: str, role: str, by: float) -> dict[str, Any]:
        return {"name": name, "role": role, "trials": [t * by for t in STILL]}

    def cell(by: float) -> Benchmark:
        return listing([of("triton", "implementation", 1.0), of("cudnn", "peer", by), of("copy", "reference", by)])

    def again(only: Any) -> Benchmark:
        raise AssertionError("nothing of ours is slower")

    changes = compare(cell(1.0), cell(2.0), again)
    assert {c.name: (c.role, c.verdict) for c in changes} == {
        "triton": ("implementation", "same"),
        "cudnn": ("peer", "peer slower"),
        "copy": ("reference", "device slower"),
    }
    assert not regressed(changes)


def test_a_fresh_run_acquits_only_by_a_time() -> None:
    before, slow = document_of({"triton": STILL}), slowed(1.2)
    gone = listing([{"name": "triton", "role": "implementation", "skipped": "RuntimeError: died"}])
    outcome = verdict(before, slow, gone)
    assert (outcome.verdict, outcome.reason) == ("no longer timed", "RuntimeError: died") and regressed([outcome])
    outcome = verdict(before, slow, document_of({"triton": STILL}))
    assert outcome.verdict == "not confirmed"
    hot = document_of({"triton": [2e-5] * 3}, untrusted=["clocks were lowered: heat"])
    outcome = verdict(before, slow, hot)
    assert (outcome.verdict, outcome.reason) == ("untrusted", "clocks were lowered: heat") and not regressed([outcome])
    assert verdict(before, slow, document_of({"triton": STILL}, noise=0.5)).verdict == "too noisy"
    (outcome,) = compare(before, slow, lambda only: listing([]))
    assert outcome.verdict == "no longer timed" and regressed([outcome])


def test_times_that_are_too_noisy_to_be_told_apart_are_not_the_same() -> None:
    for old, new in ((0.21, 0.0), (0.0, 1e9)):
        outcome = verdict(document_of({"triton": STILL}, noise=old), document_of({"triton": STILL}, noise=new))
        assert outcome.verdict == "too noisy" and "required: at most 20%" in str(outcome.reason)
    assert (
        verdict(document_of({"triton": STILL}, noise=0.2), document_of({"triton": STILL}, noise=0.2)).verdict == "same"
    )
    assert verdict(document_of({"triton": STILL}), document_of({"triton": [1e-5, 1e-5, 1.5e-5]})).verdict == "too noisy"


def test_untrusted_times_make_no_verdict() -> None:
    hot = document_of({"triton": [2e-5] * 3}, untrusted=["clocks were lowered: hardware thermal slowdown"])
    assert verdict(document_of({"triton": STILL}), hot).verdict == "untrusted"
    assert verdict(hot, document_of({"triton": STILL})).verdict == "untrusted"
    assert verdict(hot, document_of({"triton": [2e-5] * 3})).verdict == "untrusted"  # no slower than when it was hot


def test_contenders_on_one_side_and_other_devices() -> None:
    verdicts = {
        c.name: c.verdict
        for c in compare(document_of({"triton": STILL, "cuda": STILL}), document_of({"triton": STILL, "hip": STILL}))
    }
    assert verdicts == {"triton": "same", "cuda": "no longer timed", "hip": "only now"}
    both = document_of({"triton": STILL, "cuda": STILL, "definition": STILL})
    verdicts = {c.name: c.verdict for c in compare(both, document_of({"triton": STILL}), asked=("triton",))}
    assert verdicts == {"triton": "same", "cuda": "only before", "definition": "only before"}  # not asked for
    before = document_of({"triton": STILL})
    other = before.model_copy(
        update={"environment": before.environment.model_copy(update={"device_name": "NVIDIA A100"})}
    )
    with pytest.raises(ResultError, match="of another device: device_name 'NVIDIA A100', here 'NVIDIA H200'"):
        compare(other, before)


def test_what_has_nothing_in_common_is_refused_and_does_not_pass() -> None:
    before = document_of({"triton": STILL})
    with pytest.raises(ResultError, match="of another dtype: bfloat16, here float32; .*--dtype"):
        compare(before, document_of({"triton": STILL}, dtype="float32"))
    copies = [{"name": "copy", "role": "reference", "trials": STILL}]
    with pytest.raises(ResultError, match=r"cells: rms_norm 16x4096 \(1 in all\), here rms_norm 32x4096 .*--grid"):
        compare(before, document_of({"triton": STILL}, case="32x4096"))
    for now in (document_of({"cuda": STILL}), listing(copies)):
        with pytest.raises(ResultError, match=r"timed triton on rms_norm 16x4096 \(1 in all\), this one has"):
            compare(before, now)
    with pytest.raises(ResultError, match="nothing can be compared"):
        compare(listing(copies), listing(copies))


def skipped(role: str) -> list[dict[str, Any]]:
    return [{"name": "triton", "role": role, "skipped": "no room"}, {"name": "cuda", "role": role, "trials": STILL}]


def test_one_of_ours_that_is_no_longer_timed_is_a_regression_and_a_peer_is_not() -> None:
    before = document_of({"triton": STILL, "cuda": STILL})
    changes = {c.name: c for c in compare(before, listing(skipped("implementation")))}
    assert (changes["triton"].verdict, changes["triton"].reason) == ("no longer timed", "no room")
    assert changes["cuda"].verdict == "same" and regressed(list(changes.values()))
    peers_before = [one | {"role": "peer", "trials": STILL, "skipped": None} for one in skipped("peer")]
    gone = compare(listing(peers_before), listing(skipped("peer")))
    assert {c.name: c.verdict for c in gone} == {"triton": "only before", "cuda": "same"} and not regressed(gone)
    back = compare(listing(skipped("implementation")), before)
    assert {c.name: c.verdict for c in back} == {"triton": "only now", "cuda": "same"} and not regressed(back)


# -------------------------------------------------------------------------------------------------------- condition


def test_lowered_clocks_are_distrusted_and_a_steady_power_cap_is_not() -> None:
    def warnings_of(reasons: list[str], clocks: tuple[int, int], spread: float = 1.2) -> list[str]:
        return condition.distrust(Condition(source="NVML", sm_clock_mhz=clocks, throttled_by=reasons), spread)

    assert warnings_of([], (1980, 1980)) == [] and warnings_of([], (345, 1980)) == []  # it woke up
    assert warnings_of(["power cap"], (1700, 1755)) == []
    (moved,) = warnings_of(["power cap"], (1400, 1755))
    assert "moved between 1400 and 1755" in moved and "times by 20%" in moved
    assert (
        warnings_of(["power cap"], (1400, 1755), condition.spread([[1.0, 1.02], [], [3.0, 3.1]])) == []
    )  # times held still
    assert condition.spread([[1.0, 1.02], [3.0, 2.0]]) == 1.5
    assert warnings_of(["hardware thermal slowdown", "power cap"], (1700, 1700)) == [
        "clocks were lowered: hardware thermal slowdown"
    ]


def test_samples_become_ranges() -> None:
    answers = iter([(1980, 3201, 650.0, 60, []), (1755, 3201, 699.5, 64, ["power cap"])])
    watch = condition.Watch(lambda: next(answers), "NVML")
    watch.sample()
    watch.sample()
    watched = watch.condition()
    assert (watched.sm_clock_mhz, watched.power_w, watched.temperature_c) == ((1755, 1980), (650.0, 699.5), 64)
    assert watched.throttled_by == ["power cap"] and condition.watch(CPU).condition().sm_clock_mhz is None


# -------------------------------------------------------------------------------------------------------- rendering


@pytest.mark.skipif(not plots.available(), reason="no matplotlib")
def test_plots_stand_alone() -> None:
    svgs = report.figures(document_of({"triton": STILL, "cuda": STILL}))
    assert set(svgs) == {"share-of-the-roofline-reached", "time-against-the-least-possible-time", "key"}
    for svg in svgs.values():
        assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg" style="--text:')


# ---------------------------------------------------------------------------------------------------- command line


def test_the_command_writes_compares_and_exits_with_1_on_a_regression(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "now.json"
    done = ferryman("bench", "--op", "silu_mul", "--implementation", "torch", "--device", "cpu", "--out", str(out))
    assert done.code == 0, done.err
    assert (
        "copy" in done.out and "no roofline" in done.out and out.with_suffix(".md").read_text().count("silu_mul") >= 2
    )
    raw = json.loads(out.read_text())
    case = raw["cells"][0]["case"]
    for cell in raw["cells"]:
        for times in cell["times"]:
            times["trials"] = [t / 1e5 for t in times["trials"]]  # more than a loaded machine takes away
    fast = tmp_path / "fast.json"
    fast.write_text(json.dumps(raw))
    arguments = ("bench", "--op", "silu_mul", "--implementation", "torch", "--device", "cpu", "--compare")
    done = ferryman(*arguments, str(fast))
    assert done.code == 1 and "slower" in done.out and "1 of 1 of ours slower, confirmed" in done.out
    done = ferryman(*arguments, str(fast), "--json")
    assert done.code == 1 and json.loads(done.out)["cells"] and done.err.count(" times what it took before") == 2
    assert f"silu_mul {case}: torch takes " in done.err and "the device was slower: the copy takes " in done.err
    done = ferryman("bench", "--op", "silu_mul", "--device", "cpu", "--json")
    assert done.code == 0 and json.loads(done.out)["kind"] == "ferryman-benchmark"
    # of another implementation: what was timed is written all the same
    kept = tmp_path / "kept.json"
    for cell in raw["cells"]:
        for times in cell["times"]:
            times["name"] = times["name"].replace("torch", "triton")
    fast.write_text(json.dumps(raw))
    done = ferryman(*arguments, str(fast), "--out", str(kept))
    assert done.code == 2 and "nothing can be compared" in done.err
    assert document.load(kept).cells and "silu_mul" in kept.with_suffix(".md").read_text()


def test_the_command_names_what_is_no_longer_timed(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "before.json"
    arguments = ("bench", "--op", "silu_mul", "--implementation", "torch", "--device", "cpu")
    assert ferryman(*arguments, "--out", str(out)).code == 0
    monkeypatch.setattr(runner.select, "refusals", lambda *given: ["it broke"])
    done = ferryman(*arguments, "--compare", str(out))
    assert done.code == 1 and ": torch was timed before and is no longer: it broke" in done.out
    assert done.out.rstrip().endswith("slower, confirmed; 1 no longer timed")


def test_what_cannot_be_compared_or_written_is_refused_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(**given: Any) -> Benchmark:
        raise AssertionError("it was timed")

    monkeypatch.setattr(bench, "run", timed)
    other = tmp_path / "other.json"
    other.write_text(document.dumps(document_of({"torch": STILL})))
    here = document_of({"torch": STILL})
    facts = runner.results.environment(CPU, runner.select.profile_for(CPU), 0, "small")
    same = tmp_path / "same.json"
    same.write_text(document.dumps(here.model_copy(update={"environment": facts})))
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("run.md", "run-key.svg"):
        (tmp_path / name).write_text(same.read_text())
    for given, message in (
        (["--compare", str(other)], "of another device"),
        (["--compare", str(same), "--dtype", "f32"], "of another dtype: bfloat16, here float32"),
        (["--compare", str(same)], "of other cells: rms_norm 16x4096 (1 in all), here silu_mul "),
        (["--out", str(tmp_path / "c.md")], "--out is "),
        (["--out", str(tmp_path / "c.SVG")], "--out is "),
        (["--out", str(tmp_path / "file" / "x.json")], "cannot be written"),
        (["--out", str(same), "--compare", str(same)], "required: another file than --compare"),
        (["--out", str(tmp_path / "run.json"), "--compare", str(tmp_path / "run.md")], "required: another file than"),
        (["--out", str(tmp_path / "run.x"), "--compare", str(tmp_path / "run-key.svg")], "required: another file than"),
        (["--out", str(tmp_path / "run.json")], "run.md is there without it, so not its table"),
        (["--compare", str(tmp_path / "pipe")], "is no regular file"),
        (["--out", str(tmp_path / "pipe")], "it is no regular file"),
        (["--out", "/"], "required: a file's name"),
        (["--out", str(tmp_path)], "it is a folder; choose another --out"),
    ):
        done = ferryman("bench", "--op", "silu_mul", "--device", "cpu", *given)
        assert done.code == 2 and message in done.err and "Traceback" not in done.err, (given, done.err)
    assert {path.name for path in tmp_path.iterdir()} == {
        "other.json",
        "same.json",
        "file",
        "pipe",
        "run.md",
        "run-key.svg",
    }


def test_a_table_that_cannot_be_written_was_printed(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(documents, "write_whole", full)
    for more in ((), ("--json",)):
        done = ferryman("bench", "--op", "silu_mul", "--device", "cpu", "--out", str(tmp_path / "x.json"), *more)
        assert done.code == 2 and "No space left" in done.err and "copy" in done.out, more


def test_a_documents_contenders_stand_once_and_its_noise_is_a_number(tmp_path: Path) -> None:
    raw = json.loads(document.dumps(document_of({"torch": STILL})))
    for name, edit, message in (
        ("twice", {"times": raw["cells"][0]["times"] * 2}, "has a contender twice"),
        ("noise", {"noise": "Infinity"}, "noise"),
        ("less", {"noise": -1.0}, "noise"),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(raw | {"cells": [raw["cells"][0] | edit]}))
        with pytest.raises(ResultError, match=f"damaged: .*{message}"):
            document.load(path)


def test_an_adapter_that_cannot_say_what_it_is_is_one_message(tmp_path: Path) -> None:
    body = "NAME = {!r}\ndef available(): {}\ndef version(): return '1'\nOPS = {}\n"
    for text, message in (
        (body.format("torch", "return None", "{}"), "has the NAME 'torch'; required: "),
        (body.format("a b", "return None", "{}"), "has the NAME 'a b'; required: "),
        (body.format("mine", "return None", "[]"), "has OPS of list; required: a dict"),
        (body.format("mine", "raise RuntimeError('no licence')", "{}"), "RuntimeError: no licence"),
        ("import sys\nsys.exit(0)\n", "cannot be imported: SystemExit"),
    ):
        (tmp_path / "one.py").write_text(text)
        done = ferryman("bench", "--op", "silu_mul", "--device", "cpu", "--peers", "all", "--peers-from", str(tmp_path))
        assert done.code == 2 and message in done.err and "Traceback" not in done.err, (message, done.err)
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(body.format("mine", "return None", "{}"))
    with pytest.raises(FerrymanError, match="two adapters of .* have the NAME 'mine'"):
        peers.adapters(tmp_path, None)


def test_an_op_that_is_named_twice_is_timed_once() -> None:
    assert len(runner.cells_of(["silu_mul", "silu_mul"], "small", CPU)) == len(
        runner.cells_of(["silu_mul"], "small", CPU)
    )
    with pytest.raises(FerrymanError, match="nothing to time"):
        runner.run(ops=["silu_mul"], device="cpu", only=frozenset({("silu_mul", "nope")}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "rms_nrm"], "unknown op 'rms_nrm'; nearest: rms_norm"),
        (["--implementation", "tritn"], "unknown backend or implementation 'tritn'; nearest: triton"),
        (["--grid", "huge"], "unknown grid 'huge'"),
        (["--peers", "a,,b"], "none, all, or names"),
        (["--peers", "all", "--peers-from", "/nonexistent"], "a folder of adapters"),
        (["--dtype", "int7"], "unknown dtype"),
        (["--compare", "/nonexistent.json"], "cannot be read"),
        (["--device", "h200"], "required: a device that is here"),
    ],
)
def test_bad_use_is_one_message(arguments: list[str], message: str) -> None:
    given = arguments if "--device" in arguments else [*arguments, "--device", "cpu"]
    done = ferryman("bench", *given)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


class _Fixed(clock.Timer):
    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, 0

    def cold(self, samples: int = clock.SAMPLES) -> float:
        self.asked += 1
        return self.seconds


class _Capped(_Fixed):
    """On a device whose clock sinks with every sample and rises again, for whoever is timed then."""

    samples = 0

    def cold(self, samples: int = clock.SAMPLES) -> float:
        taken = [self.seconds * (1 + 0.3 * math.sin((type(self).samples + i) / 9)) for i in range(samples)]
        type(self).samples += samples
        return statistics.median(taken)


def test_contenders_that_take_turns_by_samples_meet_the_same_clocks() -> None:
    apart = {}
    for turns in (1, clock.SAMPLES):
        _Capped.samples = 0
        contenders = [contender.Contender(n, "implementation", lambda args: print, timer=_Capped(1.0)) for n in "abcde"]
        asked: list[str] = []
        contender.trials(contenders, asked.append, turns)
        middle = [statistics.median(c.trials) for c in contenders]
        apart[turns] = max(middle) / min(middle) - 1
        assert [len(c.trials) for c in contenders] == [contender.TRIALS] * 5
        assert len(asked) == 6 * contender.TRIALS * turns
        assert asked[:12] == [*"abcdea", *"edcbaa"]
    assert apart[clock.SAMPLES] < 0.06 < 0.1 < apart[1]


def test_what_is_hopeless_is_timed_once() -> None:
    timers = {"a": _Fixed(1.0), "b": _Fixed(1.9), "c": _Fixed(2.1)}
    contenders = [
        contender.Contender(name, "implementation", lambda args: print, timer=timer) for name, timer in timers.items()
    ]
    kept = contender.promising(contenders)
    assert [c.name for c in kept] == ["a", "b"] and contenders[2].trials == [2.1] and contenders[0].trials == []
    assert contender.trials(kept) == 0.0 and contender.promising([]) == []
    assert [len(c.trials) for c in contenders] == [contender.TRIALS, contender.TRIALS, 1] and timers["c"].asked == 1


def test_what_was_clearly_behind_when_it_was_made_ready_is_not_timed_again() -> None:
    timers = {"a": _Fixed(1.0), "b": _Fixed(1.0), "c": _Fixed(1.0), "d": _Fixed(1.0)}
    for name, rough in {"a": 1.2, "b": 4.7, "c": 4.9}.items():  # of d nothing is known before
        timers[name].rough = rough
    contenders = [
        contender.Contender(name, "implementation", lambda args: print, timer=timer) for name, timer in timers.items()
    ]
    started: list[str] = []
    assert [c.name for c in contender.promising(contenders, started.append)] == ["a", "b", "d"] == started
    assert contenders[2].trials == [4.9] and timers["c"].asked == 0


def test_the_hosts_time_for_a_call_is_no_reason_to_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host launches for as long as the device is timed is captured, and not far behind for that."""
    monkeypatch.setattr(torch.cuda, "Event", _Events)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: _Events.now)
    captured: list[bool] = []
    monkeypatch.setattr(clock.DeviceTimer, "_captured", lambda self, calls, distinct: captured.append(distinct))

    def call() -> None:
        _Events.now += 0.003

    timer = clock.DeviceTimer([call] * 4, CPU, longest=1e-3)
    assert not timer.far_behind and captured == [True]


def test_what_its_first_calls_put_far_behind_is_not_made_ready_any_further() -> None:
    assert contender.quickest_of([]) is None
    timers = {"a": _Fixed(1.0), "b": _Fixed(1.0)}
    timers["a"].rough, timers["b"].rough = 1.0, 3.0  # one clock read more than it takes
    timers["b"].far_behind = True
    contenders = [
        contender.Contender(name, "implementation", lambda args: print, timer=timer) for name, timer in timers.items()
    ]
    assert contender.quickest_of(contenders) == 1.0
    assert [c.name for c in contender.promising(contenders)] == ["a"]
    assert contenders[1].trials == [3.0] and timers["b"].asked == 0


class _Events:
    """CUDA events on a host: a clock that calls move by hand."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = _Events.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Events) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize(
    ("seconds", "longest", "far_behind"),
    [(0.05, 1e-3, True), (0.05, None, False), (0.05, 0.2, False), (0.0014, 1e-3, False)],
)
def test_a_devices_timer_stops_where_one_call_takes_longer_than_is_asked(
    seconds: float, longest: float | None, far_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Events)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        _Events.now += seconds

    timer = clock.DeviceTimer([call] * 100, CPU, longest=longest)
    assert timer.far_behind == far_behind and timer.rough == pytest.approx(seconds)
    assert calls == (5 if far_behind else 3 + 3 * clock.ROUGH_CALLS + (0 if longest is None else 2))
    assert timer.cold(1) == pytest.approx(seconds)

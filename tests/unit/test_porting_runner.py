"""The runner: what it covers, what it says of what it leaves out, and workers that die, hang or talk."""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import pytest
import torch

from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, UnknownName
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.results import Cell, failed
from ferryman.porting.running import timing
from ferryman.porting.running.cells import check_op, dtypes_of, turn_of, turns
from ferryman.porting.running.runner import run
from ferryman.porting.running.workers import Job, Workers


def test_every_op_implementation_and_dtype_has_a_cell() -> None:
    steps: list[tuple[int, int, str]] = []
    document = run(
        ["silu_mul", "rope_backward"],
        ["torch", "definition", "cuda", "hip"],
        "cpu",
        progress=lambda *a: steps.append(a),
    )
    seen = Counter((c.op, c.implementation, c.dtype, c.verdict) for c in document.cells)
    for dtype in ("float32", "float16", "bfloat16"):
        for name in ("torch", "definition"):
            for op in ("silu_mul", "rope_backward"):
                assert seen[op, name, dtype, "PASS"] == len(cases_of(registry.primitive(op))) >= 15
        for line in ("cuda.flat", "cuda.rows", "hip.flat", "hip.rows"):
            assert seen["silu_mul", line, dtype, "NOT_RUN"] == 1
    assert not failed(document)
    total = sum(count for (*_, verdict), count in seen.items() if verdict == "PASS")
    assert steps[-1][:2] == (total, total) and [t[0] for t in steps] == list(range(1, total + 1))
    assert {(t.op, t.implementation, t.clock) for t in document.timings} >= {("silu_mul", "torch", "host clock")}
    assert document.environment.device == "cpu" and document.environment.tier == "small"


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    run(["silu_mul"], ["definition"], "cpu", ["bf16"])
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ops": ["rms_nrom"]}, "rms_norm"),
        ({"backends": ["tritn"]}, "triton"),
        ({"dtypes": ["float8"]}, "float16"),
        ({"tier": "huge"}, "small"),
        ({"device": "cuda:77"}, "cpu"),
    ],
)
def test_unknown_names_list_the_nearest(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        run(**{"device": "cpu", "ops": ["silu_mul"], **kwargs})  # type: ignore[arg-type]


def test_dtypes_by_any_of_their_names() -> None:
    assert dtypes_of(["bf16", "float32", torch.bfloat16]) == (torch.bfloat16, torch.float32)
    assert len(dtypes_of(None)) == 3


def test_thinning_runs_each_case_in_exactly_one_dtype() -> None:
    for case in range(9):
        assert sum(turns(case, d, 3, full=False) for d in range(3)) == 1
        assert all(turns(case, d, 3, full=True) for d in range(3))
        for d in range(3):
            for n in (3, 6, 9):
                assert sum(turns(case, d, 3, full=False, turn=(k, n)) for k in range(n)) == 1


def test_all_turns_are_all_cells_and_what_is_left_out_is_said() -> None:
    """Torch's and the definition's as well as interpreted Triton's."""
    ran: Counter[tuple[str, str, str]] = Counter()
    for turn in range(6):
        document = run(["softmax"], ["torch", "triton", "definition"], "cpu", turn=(turn, 6))
        mine = [c for c in document.cells if c.case != "all" and "of" not in c.case.split()]
        assert max(Counter((c.implementation, c.case) for c in mine).values()) == 1
        ran.update((c.implementation, c.case, c.dtype) for c in mine)
        left = {(c.implementation, c.reason) for c in document.cells if c not in mine}
        assert ("torch", "left out: each case runs in one dtype at most, by --turn; without it in all") in left
    lines = {c[0] for c in ran}
    cases = len(cases_of(registry.primitive("softmax")))
    assert set(ran.values()) == {1} and len(ran) == 3 * cases * len(lines) and {"torch", "definition"} <= lines


@pytest.mark.parametrize("text", ["4", "3/3", "-1/3", "1/0", "a/b", "1/3/3"])
def test_a_turn_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"--turn is .*; required: K/N"):
        turn_of(text)


def test_turns_that_would_leave_cells_out_are_refused() -> None:
    with pytest.raises(ArgumentError, match="turns is 4; required: a multiple of 3, as many as there are dtypes"):
        run(["softmax"], ["torch"], "cpu", turn=(1, 4))


@pytest.mark.parametrize("turn", [None, (0, 3), (1, 3), (4, 6), (5, 6)])
def test_two_processes_share_a_turn_evenly(turn: tuple[int, int] | None) -> None:
    op = registry.primitive("softmax")
    lines, dtypes = [registry.implementation("softmax", "torch")], dtypes_of(None)
    given = (op, lines, dtypes, "small", 0, torch.device("cpu"), detect("cpu"))
    parts = [
        {(c.case, c.dtype) for c in check_op(*given, thin=turn is not None, turn=turn, times=1, share=(k, 2))}
        for k in range(2)
    ]
    together = {(c.case, c.dtype) for c in check_op(*given, thin=turn is not None, turn=turn, times=1)}
    assert parts[0] | parts[1] == together and not parts[0] & parts[1]
    assert abs(len(parts[0]) - len(parts[1])) <= 1


def test_interpreted_triton_is_simulated_and_what_is_left_out_is_said() -> None:
    pytest.importorskip("triton")
    document = run(["silu_mul", "linear"], ["triton"], "cpu")
    seen = Counter((c.op, c.verdict) for c in document.cells)
    cases = len(cases_of(registry.primitive("silu_mul")))
    assert seen["silu_mul", "SIMULATED"] == cases and seen["silu_mul", "NOT_RUN"] == 3
    assert seen["linear", "SIMULATED"] >= 10 and "PASS" not in {c.verdict for c in document.cells}
    left = [c for c in document.cells if c.op == "silu_mul" and c.verdict == "NOT_RUN"]
    assert sum(int(c.case.split()[0]) for c in left) == 2 * cases
    assert all(c.case.endswith(f" of {cases} cases") and "--full" in (c.reason or "") for c in left)
    dots = [c for c in document.cells if (c.op, c.verdict, c.dtype) == ("linear", "NOT_RUN", "bfloat16") and c.refusals]
    assert dots and all("interpreter" in (c.reason or "") for c in dots)
    assert not document.timings and not failed(document)


PRELUDE = "import json, os, sys, time\njob = json.load(sys.stdin)\nsay = lambda **m: print(json.dumps(m), flush=True)\n"


def worker(body: str, ops: list[str], **limits: float) -> list[tuple[str, str, str, str]]:
    command = [sys.executable, "-c", PRELUDE + body]
    with Workers(
        [Job.interpreted(ops, (torch.float32,), "small", 0, True, None)], command=command, **limits
    ) as workers:
        cells = list(workers.remaining())
    return [(c.op, c.case, c.verdict, c.reason or "") for c in cells]


CELL = 'dict(op=op, implementation="triton", device="cpu", dtype="float32", case="{case}", verdict="SIMULATED")'


def test_a_crash_costs_the_case_it_was_at_and_the_rest_is_run() -> None:
    body = f"""
for op in job["ops"]:
    for case in ("one", "two", "three"):
        if [op, "float32", case, "triton"] in job["skip"]: continue
        say(start=[op, "float32", case, "triton"])
        if op == "softmax" and case == "two": sys.stderr.write("illegal instruction\\n"); os._exit(41)
        say(cell={CELL.replace('"{case}"', "case")})
    say(done=op)
"""
    ops = ["rope", "softmax", "linear"]
    rows = worker(body, ops)
    assert [(o, c) for o, c, _, _ in rows] == [*itertools.product(ops, ("one", "two", "three"))]
    assert [v for _, _, v, _ in rows] == ["SIMULATED"] * 4 + ["FAIL"] + ["SIMULATED"] * 4
    assert "code 41" in rows[4][3] and "illegal instruction" in rows[4][3]


def test_silence_is_a_time_limit_not_a_hang() -> None:
    body = """
for op in job["ops"]:
    if [op, "float32", "slow", "triton"] in job["skip"]: say(done=op); continue
    say(start=[op, "float32", "slow", "triton"])
    time.sleep(60)
"""
    rows = worker(body, ["rope"], silence=2.0)  # a busy machine starts a process in less
    assert [(o, c, v) for o, c, v, _ in rows] == [("rope", "slow", "FAIL")] and "time limit" in rows[0][3]


def test_an_op_that_takes_too_long_is_cut_and_the_next_one_runs() -> None:
    body = f"""
for op in job["ops"]:
    for case in ("one", "two"):
        say(start=[op, "float32", case, "triton"])
        if op == "rope": time.sleep(2.1)
        say(cell={CELL.replace('"{case}"', "case")})
    say(done=op)
"""
    rows = worker(body, ["rope", "softmax"], op_limit=2.0)  # a busy machine starts a process in less
    assert rows[0][:3] == ("rope", "one", "SIMULATED")
    assert ("rope", "FAIL") in {(o, v) for o, _, v, why in rows if "per op" in why}
    assert [(o, c, v) for o, c, v, _ in rows if o == "softmax"] == [
        ("softmax", "one", "SIMULATED"),
        ("softmax", "two", "SIMULATED"),
    ]


def test_an_implementation_that_ends_many_processes_is_left_out_and_no_other() -> None:
    body = """
for op in job["ops"]:
    for case in ("one", "two", "three", "four"):
        for name in job["lines"][op]:
            if [op, "float32", case, name] in job["skip"]: continue
            say(start=[op, "float32", case, name])
            if name == "torch": os._exit(41)
            say(cell=dict(op=op, implementation=name, device="cpu", dtype="float32", case=case, verdict="PASS"))
    say(done=op)
"""
    job = Job({"softmax": ["torch", "definition"]}, ["float32"], "small", 0, "cpu", most_lost=2)
    with Workers([job], command=[sys.executable, "-c", PRELUDE + body]) as workers:
        cells = list(workers.remaining())
    lost = [(c.case, c.verdict) for c in cells if c.implementation == "torch"]
    assert lost == [("one", "FAIL"), ("two", "FAIL"), ("all", "NOT_RUN")]
    assert "torch had ended or held up its process 2 times" in str(next(c.reason for c in cells if c.case == "all"))
    assert [c.case for c in cells if c.implementation == "definition"] == ["one", "two", "three", "four"]


def test_a_worker_that_cannot_start_fails_its_ops_and_not_the_run() -> None:
    rows = worker("raise SystemExit(3)", ["rope", "softmax"])
    assert [(o, v) for o, _, v, _ in rows] == [("rope", "FAIL"), ("softmax", "FAIL")] and "code 3" in rows[0][3]


def test_leaving_early_stops_the_worker() -> None:
    command = [sys.executable, "-c", PRELUDE + 'say(start=["rope", "float32", "slow", "triton"])\ntime.sleep(60)']
    with Workers([Job.interpreted(["rope"], (torch.float32,), "small", 0, True, None)], command=command) as workers:
        pass
    assert list(workers.remaining()) == []


def test_shared_cells_are_those_of_one_process() -> None:
    ask: dict[str, object] = {"ops": ["softmax", "silu_mul"], "backends": ["torch"], "device": "cpu"}
    alone, shared = run(**ask), run(**ask, jobs=3)  # type: ignore[arg-type]
    assert [c.model_dump(exclude={"seconds"}) for c in shared.cells] == [
        c.model_dump(exclude={"seconds"}) for c in alone.cells
    ]
    assert {c.verdict for c in shared.cells} == {"PASS"}


def test_what_found_no_memory_beside_others_runs_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    short = 'reason="out of memory: 2 GiB"'
    body = f"""
k, n = job["share"]
for op in job["ops"]:
    if k == 0:
        say(start=[op, "float32", "prime", "torch"])
        said = dict(op=op, implementation="torch", device="cpu", dtype="float32", case="prime")
        say(cell=dict(said, verdict="NOT_RUN", {short}))
    say(done=op)
"""
    monkeypatch.setattr("ferryman.porting.running.workers.COMMAND", [sys.executable, "-c", PRELUDE + body])
    document = run(["softmax"], ["torch"], "cpu", ["f32"], jobs=2)
    assert [(c.case, c.verdict) for c in document.cells] == [("prime", "PASS")]


def test_only_what_was_right_wherever_it_ran_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.primitive("softmax")
    lines = [line for line in registry.implementations("softmax") if line.name in ("torch", "triton", "definition")]
    gpu = torch.device("cuda", 0)
    verdicts = {"torch": ["PASS", "NOT_RUN", "UNIMPLEMENTED"], "triton": ["PASS", "FAIL"], "definition": ["NOT_RUN"]}
    cells = [
        Cell(op="softmax", implementation=name, device="cuda:0", dtype="float32", case=f"c{i}", verdict=v)  # type: ignore[arg-type]
        for name, outcomes in verdicts.items()
        for i, v in enumerate(outcomes)
    ]
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(timing, "device_lost", lambda device: None)
    monkeypatch.setattr(timing, "materialise", lambda case, *rest: ())
    monkeypatch.setattr(timing, "measure", lambda op, line, *rest: asked.append((line.name, rest[-1])))
    ask = (op, lines, [torch.float32], gpu, detect("cpu"), 0, cells)
    assert timing.of_right_ones(*ask) == [] and asked == [("torch", None)]
    timing.of_right_ones(*ask, {("softmax", "torch"): print})
    assert asked[1:] == [("torch", print)]

    def full(case: object, *rest: object) -> tuple[object, ...]:
        raise torch.OutOfMemoryError("tried 2 GiB")

    with (
        monkeypatch.context() as patch,
        pytest.warns(UserWarning, match="softmax float32 has no times: .* tried 2 GiB"),
    ):
        patch.setattr(timing, "materialise", full)
        assert timing.of_right_ones(*ask) == []
    monkeypatch.setattr(timing, "device_lost", lambda device: "lost")
    assert timing.of_right_ones(*ask) == [] and len(asked) == 2

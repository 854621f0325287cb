"""The checker's own score: planted bugs are caught, right kernels pass, and the machinery that counts can say no."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from ferryman.porting.selftest import (
    EditError,
    SelfTest,
    alternatives,
    judging,
    mutants,
    run,
    runner,
    session,
    succeeded,
)
from ferryman.porting.selftest.edits import ROOT, Edit, simt_kernel
from ferryman.porting.selftest.planting import Mutant, torch_kernel
from ferryman.porting.selftest.report import Record, Tally, compose, dumps, survivors
from ferryman.porting.selftest.worker import _START, Interpreted

CPU = torch.device("cpu")
CATALOGUE = mutants.catalogue()
# Which gate must speak, not merely that one does.
GATES = {
    "rms_norm.torch.eps_dropped": "G2", "rms_norm.torch.squares_in_storage_dtype": "G2",
    "rms_norm.torch.nan_becomes_zero": "G0", "rms_norm.torch.weights_dtype_returned": "G0",
    "rms_norm.torch.transposed_memory": "G0", "rms_norm.torch.one_input_element_changed": "G5",
    "rms_norm.torch.one_element_past_the_end": "G5", "rms_norm.torch.computed_in_place": "G5",
    "rms_norm.torch.result_kept_by_pointer": "G5", "softmax.torch.static_output_buffer": "G5",
    "silu_mul.torch.a_number_returned": "G0", "silu_mul.torch.activation_rounded": "G2",
    "linear.torch.last_k_dropped": "G2", "attention.torch.next_token_seen": "G2",
    "attention_backward.torch.grad_lse_ignored": "G2", "linear.torch.chunks_added_in_any_order": "G5",
}  # fmt: skip


def test_one_mutant_of_each_class_is_caught_and_no_right_run_flagged() -> None:
    document = run(honest_runs=150, sample=True, device="cpu")  # all of them: test_selftest_score.py
    assert [r.key for r in survivors(document)] == [] and document.false_alarms == 0 and succeeded(document)
    assert len(document.classes) >= 30 and document.mutants.caught >= 50 and document.honest_runs >= 150
    assert SelfTest.model_validate_json(dumps(document)) == document


@pytest.mark.parametrize("key", GATES)
def test_the_gate_that_is_meant_catches_it(key: str) -> None:
    mutant = next(m for m in CATALOGUE if m.key == key)
    setting = judging.Setting(CPU, detect(CPU))
    record = session.evaluate(mutant, session.Cells(mutant.op, setting, 0, "torch"), setting, True)
    assert record.outcome == "caught" and GATES[key] in record.gates, record.gates


# --------------------------------------------------------------------------------------------- the counting can say no


def _mutant(op: str, kernel: Any, **more: Any) -> Mutant:
    return Mutant(op, "planted", "test", "test", lambda: kernel, lambda: torch_kernel(op), **more)


def _fate(mutant: Mutant) -> Record:
    setting = judging.Setting(CPU, detect(CPU))
    return session.evaluate(mutant, session.Cells(mutant.op, setting, 0, "torch"), setting, False)


def test_a_mutant_that_changes_nothing_is_equivalent_and_does_not_count() -> None:
    record = _fate(_mutant("softmax", lambda x, target: torch_kernel("softmax")(x.clone(), target)))
    assert record.outcome == "equivalent" and "bitwise equal" in str(record.reason)
    assert compose(_environment(), [record], Tally(runs=1), False).mutants.non_equivalent == 0


def test_a_mutant_within_the_bounds_is_missed_and_lowers_the_score() -> None:
    def other_order(x: Tensor, target: Any) -> Tensor:
        e = torch.exp(x.float() - x.float().amax(-1, keepdim=True)) if x.numel() else x.float()
        return (e / e.flip(-1).sum(-1, keepdim=True)).to(x.dtype).contiguous()

    record = _fate(_mutant("softmax", other_order, declares={}))
    assert record.outcome == "missed" and not any(record.others_aligned.values())
    document = compose(_environment(), [record], Tally(runs=1), False)
    assert document.mutants.non_equivalent == 1 and not succeeded(document)


def test_inputs_are_as_they_were_for_the_next_mutant() -> None:
    setting = judging.Setting(CPU, detect(CPU))
    cells = session.Cells("softmax", setting, 0, "torch")
    case = next(c for c in cells.cases if c.name == "prime")
    prepared = cells.prepared(case, torch.float32)

    def spoils(x: Tensor, target: Any) -> Tensor:
        y = torch_kernel("softmax")(x, target)
        x.zero_()
        return y

    line = _mutant("softmax", spoils).line(CPU)
    assert judging.look(spoils, line, prepared, setting).gates == ("G5",)
    assert not prepared.args.untouched()
    assert not judging.look(torch_kernel("softmax"), line, prepared, setting).flagged


def test_a_blind_engine_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    real = judging.check_cell

    def blind(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs).model_copy(update={"verdict": "PASS", "gates": {}})

    monkeypatch.setattr(judging, "check_cell", blind)
    monkeypatch.setattr(runner, "_triton", lambda place, profile: "left out")
    document = run(ops=["softmax"], honest_runs=8, device="cpu")
    assert document.mutants.caught == 0 and document.mutants.non_equivalent > 10 and not succeeded(document)


def test_a_cry_of_wolf_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    real = judging.check_cell

    def nervous(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs).model_copy(update={"verdict": "FAIL", "reason": "wolf"})

    monkeypatch.setattr(judging, "check_cell", nervous)
    setting = judging.Setting(CPU, detect(CPU))
    tally = session.honest(["softmax"], 8, setting, 0, "torch")
    assert len(tally.alarms) == tally.runs >= 8 and tally.alarms[0].reason == "wolf"
    assert not succeeded(compose(_environment(), [], tally, False))


def test_alternatives_move_on_to_other_cases_and_seeds() -> None:
    setting = judging.Setting(CPU, detect(CPU))
    cells = session.right_cells(["softmax"], setting, 5, "torch")
    count = len(session.Cells("softmax", setting, 0, "torch").cases)
    seen = [next(cells) for _ in range(3 * count + 1)]
    first = {(p.case.name, p.dtype) for _, p, seed in seen if seed == 5}
    assert len(first) == 3 * count, "not every case in every dtype before the seed moves on"
    assert seen[-1][2] == 6


def _environment() -> Any:
    from ferryman.porting.results import environment

    return environment(CPU, detect(CPU), 0, "small")


# ------------------------------------------------------------------------------------------------------- source edits


@pytest.mark.parametrize("backend", ["triton", "simt"])
def test_every_edit_fits_the_source(backend: str) -> None:
    found = [m for m in CATALOGUE if m.backend == backend]
    assert len(found) >= 30
    for mutant in found:
        texts = {e.file: (ROOT / e.file).read_text("utf-8") for e in mutant.edits}
        for edit in mutant.edits:
            texts[edit.file] = edit.apply(texts[edit.file])
        assert set(mutant.first) <= {c.name for c in session.cases_of(registry.primitive(mutant.op))}


def test_an_edit_that_does_not_fit_fails_loudly() -> None:
    with pytest.raises(EditError, match="0 times"):
        Edit("f.py", "gone", "new").apply("text")
    with pytest.raises(EditError, match="2 times"):
        Edit("f.py", "a", "b").apply("a a")
    with pytest.raises(EditError, match="changes nothing"):
        Edit("f.py", "a", "a").apply("a")
    stale = Edit("ops/norm/norm.cuh", "no such line", "x")
    with pytest.raises(EditError, match="no such line"):
        simt_kernel((stale,), "ops/norm/simt_kernels.py", "rms_norm")


def test_an_edit_of_a_file_that_the_kernel_does_not_use_is_refused() -> None:
    stray = Edit("ops/rope/rope.cuh", "return;  // no barrier follows", "return;")
    kernel = simt_kernel((stray,), "ops/softmax/simt_kernels.py", "softmax")
    target = dataclasses.replace(session.target_of(detect(CPU)), vendor="nvidia", wave=32)
    with pytest.raises(EditError, match="no part of"):
        kernel(torch.ones(2, 8), target)
    with pytest.raises(EditError, match="no part of"):  # the engine calls what a kernel raises a verdict; this is none
        _fate(_mutant("softmax", lambda x, _: kernel(x, target)))


def test_an_edit_that_does_not_fit_stops_the_worker_loudly() -> None:
    code = _DIES.replace("sys.exit(7)", "print(json.dumps({'error': 'EditError: gone', 'kind': 'EditError'}))")
    with (
        Interpreted([_TRITON[0].key], [], 0, 0, False, command=[sys.executable, "-c", code]) as worker,
        pytest.raises(EditError, match="gone"),
    ):
        list(worker)


# ------------------------------------------------------------------------------------------------- the worker process

_DIES = (
    "import json, sys; job = json.loads(sys.stdin.read()); key = job['mutants'][0]\n"
    "print(json.dumps({'start': key}), flush=True); sys.exit(7)"
)
_TRITON = [m for m in CATALOGUE if m.backend == "triton"][:2]


def test_a_mutant_that_kills_its_process_twice_is_caught_and_the_rest_goes_on() -> None:
    keys = [m.key for m in _TRITON]
    with Interpreted(keys, [], 0, 0, False, command=[sys.executable, "-c", _DIES]) as worker:
        records = [r for r in worker if isinstance(r, Record)]
    assert sorted(r.key for r in records) == sorted(keys)
    assert all(r.outcome == "caught" and r.gates == ["raised"] and "code 7" in str(r.reason) for r in records)


def test_a_worker_that_never_starts_is_an_error() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no triton here')"]
    with (
        Interpreted([_TRITON[0].key], [], 0, 0, False, command=command) as worker,
        pytest.raises(RuntimeError, match="no triton here"),
    ):
        list(worker)


def test_a_silent_worker_is_stopped() -> None:
    code = _DIES.replace("sys.exit(7)", "import time; time.sleep(60)")
    with Interpreted([_TRITON[0].key], [], 0, 0, False, silence=1.0, command=[sys.executable, "-c", code]) as worker:
        (record,) = worker
    assert isinstance(record, Record) and record.outcome == "caught" and "time limit" in str(record.reason)


def test_a_worker_that_is_long_at_right_runs_is_not_taken_for_silent() -> None:
    code = (
        "import json, sys, time; job = json.loads(sys.stdin.read())\n"
        "for i in range(8):\n time.sleep(0.5); print(json.dumps({'runs': i}), flush=True)\n"
        "print(json.dumps({'tally': {'runs': 8}}), flush=True)"
    )
    with Interpreted([], ["silu_mul"], 8, 0, False, silence=2.0, command=[sys.executable, "-c", code]) as worker:
        (tally,) = worker
    assert isinstance(tally, Tally) and (tally.runs, tally.alarms) == (8, [])


def test_a_worker_tells_of_right_runs_as_they_are_done() -> None:
    job = {"mutants": [], "ops": ["silu_mul"], "honest": 12, "seed": 0, "every_run_judged": False}
    done = subprocess.run(
        [sys.executable, "-c", _START], input=json.dumps(job), capture_output=True, text=True, timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1"}, check=True,
    )  # fmt: skip
    *told, last = [json.loads(line) for line in done.stdout.splitlines()]
    runs = [one["runs"] for one in told]
    assert len(runs) > 3 and runs == sorted(runs) and last["tally"]["runs"] == runs[-1] >= 12


def test_alternatives_have_distinct_keys_and_serve_every_op() -> None:
    found = alternatives.alternatives()
    assert len({a.key for a in found}) == len(found)
    assert {a.op for a in found if a.backend == "torch"} == set(registry.primitives())

"""Mutants make themselves: every bug of the project's list has an operator or a rule, and edits fit their source."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import inspect
import queue
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ferryman.backends import simt_offline
from ferryman.backends.simt import Unit
from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from ferryman.dispatch.select import View, refusals
from ferryman.errors import ArgumentError
from ferryman.ops.menu import Implementation
from ferryman.porting import selftest
from ferryman.porting.judging.parity import Prepared
from ferryman.porting.judging.results import Cell
from ferryman.porting.mutate import cpp, python, rewrites, rule, rules, sources, units
from ferryman.porting.mutate.edits import Edit, EditError, spread
from ferryman.porting.selftest import alternatives, honest, judging, planting, report, runner, session, worker
from ferryman.porting.selftest.cells import Cells

CPU = torch.device("cpu")
# Each bug of the project's list -> the operator, rule or rewriting that plants it.
BUGS = {
    "drop last k": "last_term",
    "drop the k tail": "tail",
    "duplicated K tile": "tile_twice",
    "bf16 accumulate": "sums_in_bfloat16",
    "fp16 accumulate": "sums_in_float16",
    "bf16 split-K undeclared": "splits_in_bfloat16",
    "truncation": "truncated",
    "x1.001": "a_thousandth_more",
    "x1.01": "a_hundredth_more",
    "x1.02": "two_hundredths_more",
    "saturate at 448": "saturated_at_448",
    "fp8 inputs undeclared": "input_in_e4m3",
    "NaN to 0": "nan_becomes_zero",
    "NaN injected": "nan_injected",
    "last column stale": "last_column_stale",
    "two rows swapped": "last_rows_swapped",
    "a zero row": "zero_row",
    "eps dropped": "argument_left_out",
    "1e-5 for 1e-6": "argument_off",
    "mean over N-1": "mean_over_one_less",
    "E[x^2]-E[x]^2": "squares_not_centred",
    "fp16 square overflow": "products_in_float16",
    "weight cast early": "input_in_bfloat16",
    "softmax without max": "no_maximum",
    "max over 128": "maximum_of_128",
    "bf16 denominator": "denominator_in_bfloat16",
    "padding in the denominator": "padding_counted",
    "causal off by one, later": "one_more_seen",
    "causal off by one, earlier": "one_less_seen",
    "last KV dropped": "last_term",
    "P in fp8": "left_operand_in_fp8",
    "half a wave lost": "half_a_wave",
    "ballot cut to 32 bits": "half_a_wave",
    "LDS overflow by 256 bytes": "written_past_the_end",
    "missing barrier": "wait removed",
    "stale graph replay": "graph_replayed_on_old_inputs",
    "input mutated": "one_input_element_changed",
    "result cached by pointer": "kept_by_pointer",
    "work on a side stream": "written_on_a_side_stream",
    "silent fallback": "in_storage_precision",
    "fn/fnuz scale off by 2": "twice",
    "448/240 scale": "other_largest",
    "code 0x80 left": "nan_for_a_negative_zero",
}


def test_every_bug_of_the_list_has_a_rule() -> None:
    known = {r.name for r in rules.RULES} | {r.name for r in rewrites.WRONG} | {o.name for o in python.OPERATORS}
    known |= {"truncated", "in_storage_precision"}  # float32.definition_rules
    assert set(BUGS.values()) <= known, set(BUGS.values()) - known
    assert any(e.operator == "wait removed" for e in cpp.edits(sources.text_of("backends/simt/portable.cuh"), "p.cuh"))


def test_equal_edits_at_two_places_of_a_function_are_two_kernels() -> None:
    path, old = "ops/bias_act/triton_kernels.py", "other=0.0"
    text = sources.text_of(path)
    first = text.index(old, text.index("def _backward_columns"))
    places = first, text.index(old, first + 1)
    line = registry.implementation("bias_act_backward", "triton.columns")
    edits = [Edit(path, at, old, "other=1.0", "other changed", "_backward_columns", 0, 0) for at in places]
    assert edits[0].tag == edits[1].tag
    files = [inspect.getfile(sources.kernel(line, edit)) for edit in edits]
    assert [Path(file).read_text() for file in files] == [edit.apply(text) for edit in edits]


def test_edits_fit_their_source_and_nothing_else() -> None:
    edits = list(sources.candidates("softmax"))
    assert len(edits) > 100 and len({e.operator for e in edits}) >= 12
    for edit in spread(edits, 40, 0):
        text = sources.text_of(edit.file)
        assert edit.apply(text) != text
        with pytest.raises(EditError):
            dataclasses.replace(edit, old=edit.old + "?").apply(text)


def test_a_sample_of_the_rules_is_caught() -> None:
    setting = judging.Setting(CPU, detect(CPU))
    names = ("nan_injected.y", "computed_in_place.x", "last_term", "sums_in_float16", "kept_by_pointer", "zero_row.y")
    chosen = [m for m in planting.catalogue(["softmax"], 1) if m.name in names]
    assert len(chosen) == len(names)
    fates = {r.name: r.outcome for r in worker.each_mutant(chosen, setting, 0, False)}
    assert set(fates.values()) == {"caught"}, fates


def test_a_bound_is_moved_where_it_counts_places_alone() -> None:
    """A real number chooses between formulas that agree about the bound: there a mutant would be right."""
    (one,) = (r for r in rewrites.WRONG if r.name == "one_more_seen")
    places, real = torch.tensor([0, 1, 2]), torch.tensor([0.5, 1.5])
    with rewrites.Rewritten(one.replaces) as mode:
        assert (places <= 0).tolist() == [True, True, False]
        assert (real <= 0.0).tolist() == [False, False]
    assert one.applies(mode.used)
    with rewrites.Rewritten() as mode:
        assert (real <= 0.0).tolist() == [False, False]
    assert not one.applies(mode.used)


def test_survivors_of_the_first_cells_are_left_for_later() -> None:
    """What only survivors need (every cell, the draws) is made once for all of them."""
    setting = judging.Setting(CPU, detect(CPU))
    cells = Cells("softmax", setting, 0, "torch")
    known = {m.name: m for m in planting.catalogue(["softmax"], 1)}
    for name, first, fate in (("read_as_if_contiguous.x", 1, None), ("zero_row.y", 1, "caught")):
        record = session.evaluate(known[name], known[name].right(), cells, setting, False, first)
        assert (record and record.outcome) == fate
    assert not cells._draws


def test_a_dtype_reaches_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`widen` has a branch for bfloat16: an edit of the other one is tried in float16, too."""
    cells = Cells("softmax", judging.Setting(CPU, detect(CPU)), 0, "triton")
    first, second = cells.dtypes[:2]
    case, other = cells.cases[:2]
    lines = {first: 1, second: 2}

    def traced(kernel: object, args: object, most: float = 0) -> tuple[None, frozenset[tuple[str, int]]]:
        return None, frozenset({("f.py", lines[args.values[0].dtype])})  # type: ignore[attr-defined]

    monkeypatch.setattr(cells, "_traced", traced)
    for one in (case, other):
        assert cells.right(len, one, first)[1] == {("f.py", 1)}
        assert cells.right(len, one, second)[1] == {("f.py", 2)}


def test_a_watched_kernel_tells_every_statement() -> None:
    """At the lines where it stands in the file, whatever is put between."""
    (path,) = [e.file for e in sources.candidates("softmax") if e.file.startswith("ops/")][:1]
    tree = ast.parse(sources._telling(path))
    names = python.jitted(ast.parse(sources.text_of(path)))
    kernels = {n.name: n for n in ast.parse(sources.text_of(path)).body if isinstance(n, ast.FunctionDef)}
    for function in (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names):
        calls = [n for n in ast.walk(function) if python.called(n) == "ferryman_reached"]
        lines = sorted(ast.literal_eval(n.args[1]) for n in calls if isinstance(n, ast.Call))
        own = kernels[function.name]
        assert lines == sorted(n.lineno for n in ast.walk(own) if isinstance(n, ast.stmt) and n is not own)
    seen = sources.Reached(most=2)
    sources.watch(seen)
    try:
        sources.reached("f.py", 3, 4)
        sources.reached("f.py", 3, 4)
        with pytest.raises(sources.TooLong):
            sources.reached("f.py", 5, 5)
    finally:
        sources.watch(None)
    assert seen.lines == {("f.py", n) for n in (3, 4, 5)}


def _edited(right: Any, wrong: Any) -> tuple[planting.Mutant, Cells]:
    """An edit, and cells on which the right kernel is ``right``; the edit lies where every cell reaches it."""
    cells = Cells("softmax", judging.Setting(CPU, detect(CPU)), 0, "torch")
    known = next(m for m in planting.catalogue(["softmax"], 1, backend="torch") if m.name == "zero_row.y")
    edit = next(iter(sources.candidates("softmax")))
    return dataclasses.replace(known, edit=edit, make=lambda: wrong, right=lambda: right), cells


def test_where_the_right_kernel_refuses_a_mutant_says_nothing() -> None:
    def refuses(*args: object) -> object:
        raise NotImplementedError("bfloat16")

    mutant, cells = _edited(refuses, refuses)
    cells.cases = cells.cases[:2]
    record = session.evaluate(mutant, refuses, cells, cells.setting, False)
    assert record is not None and record.outcome == "not run" and "nothing here reaches it" in str(record.reason)


def test_what_the_budget_does_not_decide_is_not_run_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is equivalent, and nothing missed, for want of time; what differs somewhere is tried everywhere."""
    right = planting.catalogue(["softmax"], 1, backend="torch")[0].right()
    mutant, cells = _edited(right, right)
    cells.warm(right, mutant.line, 2)
    cells.warm(right, mutant.line, None, 0.0)
    record = session.evaluate(mutant, right, cells, cells.setting, False)
    assert record is not None and record.outcome == "not run" and record.undecided
    assert f"{len(cells.order()) - 2} cells not tried" in str(record.reason)
    late = cells.order()[-1][0].name

    def wrong(*args: Any) -> Any:
        return right(*args) if args[0].shape != specs[late] else right(*args) * 0

    specs = {c.name: c.args["x"].shape for c in cells.cases}
    assert cells.unknown(*cells.order()[-1])
    monkeypatch.setattr(session, "_drawn", lambda *_: session._Drawn(200, True, "draw 1"))
    record = session.evaluate(dataclasses.replace(mutant, make=lambda: wrong), right, cells, cells.setting, False)
    assert record is not None and record.outcome == "caught" and not record.undecided


def test_on_too_few_draws_nothing_is_equivalent(monkeypatch: pytest.MonkeyPatch) -> None:
    right = planting.catalogue(["softmax"], 1, backend="torch")[0].right()
    mutant, cells = _edited(right, right)
    cells.cases = cells.cases[:2]
    for draws, outcome in ((report.DRAWS - 1, "not run"), (report.DRAWS, "equivalent")):
        monkeypatch.setattr(session, "_drawn", lambda *_, n=draws: session._Drawn(n, True, None))
        record = session.evaluate(mutant, right, cells, cells.setting, False)
        assert record is not None and record.outcome == outcome
        assert record.undecided == (outcome == "not run")
        assert outcome == "equivalent" or "for want of 200 draws" in str(record.reason)


def test_a_rule_that_bends_no_call_is_no_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole-number ids are no other input's dtype: to take one for the other changes nothing anywhere."""
    setting = judging.Setting(CPU, detect(CPU))
    cells = Cells("embedding", setting, 0, "torch")
    known = {m.name: m for m in planting.catalogue(["embedding"], 1, backend="torch")}
    cells.cases = cells.cases[:2]
    monkeypatch.setattr(session, "_drawn", lambda *_: session._Drawn(report.DRAWS, True, None))
    for name in ("inputs_swapped.ids_weight", "computed_in_place.ids"):
        record = session.evaluate(known[name], known[name].right(), cells, setting, False)
        assert record is not None and record.outcome == "not run" and "what it bends" in str(record.reason)


def test_a_line_for_part_of_the_calls_is_edited_and_tried_on_these() -> None:
    """Its domain's draws are too short for it: its own cases come after them, with other contents."""
    (line,) = sources.lines_of("ssd_scan", "triton.parallel")
    mutants = planting.catalogue(["ssd_scan", "softmax"], 12, 0, "triton", line.name)
    assert len(mutants) == 12 and {m.line for m in mutants} == {line}
    assert any(m.edit and m.edit.file.endswith("parallel_kernels.py") for m in mutants)
    with pytest.raises(ArgumentError, match=r"interpreter can run; there are .*triton\.recurrent"):
        selftest.run(["ssd_scan"], honest_runs=0, device="cpu", implementation="triton.none")
    cells = Cells("ssd_scan", judging.Setting(CPU, detect(CPU)), 0, "triton", line)
    served = {case.name for case, _ in cells.order()}
    assert "limits_chunks" in served and "limits_few" not in served
    drawn = list(cells._drawn())
    own = [case for case, _ in drawn if case.name.startswith("fuzz_own_")]
    assert len(own) == 2 * report.DRAWS and min(case.args["x"].shape[1] for case in own) > 64
    assert len({case.name for case, _ in drawn}) == len(drawn)


def test_a_line_with_kernels_in_gluon_is_not_edited() -> None:
    """No interpreter runs Gluon, in whichever of the launcher's files it lies."""
    for op in ("attention", "attention_backward"):
        assert sources.lines_of(op, "triton.hopper") == () != sources.lines_of(op, "triton.decode")


def test_a_barrier_is_not_decided_where_it_orders_nothing() -> None:
    waits = [m for m in planting.catalogue(["rope_"], None, 0, "triton") if m.operator == "wait removed"]
    here, absent = runner._left(waits, CPU, detect(CPU))
    assert waits and not here
    assert {r.outcome for r in absent} == {"not run"} and "a barrier orders nothing" in str(absent[0].reason)


def test_a_short_edit_says_its_line() -> None:
    known = {m.edit.old: m for m in planting.catalogue(["softmax"], None, 0, "triton") if m.edit}
    short = next(m for old, m in known.items() if len(old) < 10)
    record = session.new_record(short)
    assert short.edit and record.place and " ".join(short.edit.old.split()) in record.place
    assert record.change == f"{' '.join(short.note.split())} in {record.place}"
    assert record.kernel == f"softmax.{short.line.name}.{short.edit.function}"
    long = session.new_record(next(m for old, m in known.items() if len(old) > 40))
    assert long.place is None and long.change == " ".join(long.note.split())


def test_storage_arithmetic_is_that_of_the_logits() -> None:
    """A loss's gradient is float32 and comes first: nothing was rounded, and the mutant was called equivalent."""
    cells = Cells("cross_entropy_backward", judging.Setting(CPU, detect(CPU)), 0, "torch")
    known = planting.catalogue(["cross_entropy_backward"], 1, backend="torch")
    (mutant,) = (m for m in known if m.name == "in_storage_precision")
    record = session.evaluate(mutant, mutant.right(), cells, cells.setting, False)
    assert record is not None and record.outcome == "caught"


def test_an_undecided_edit_is_taken_up_again(tmp_path: Path) -> None:
    stamp, file = {"selftest": 2}, tmp_path / "kept.jsonl"
    journal = runner.Journal(file, stamp)
    mutant = planting.catalogue(["softmax"], 1, backend="torch")[0]
    left = session.not_run(mutant, "its time was up").model_copy(update={"undecided": True})
    journal.add("left", left)
    journal.add("kept", session.not_run(mutant, "raised"))
    assert set(runner.Journal(file, stamp).records) == {"kept"}


def test_a_kernel_that_takes_its_arguments_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter holds an argument's memory while a kernel runs, and one that raises leaves it there."""

    class LostBuffer:
        def untouched(self) -> bool:
            raise RuntimeError("Cannot access data pointer of Storage that is invalid.")

    with pytest.raises(judging.ArgumentLost, match="x has no memory") as lost:
        judging.restore(SimpleNamespace(buffers={"x": LostBuffer()}))  # type: ignore[arg-type]

    def call(*_: object) -> None:
        raise lost.value

    right = planting.catalogue(["softmax"], 1, backend="torch")[0].right()
    mutant, cells = _edited(right, right)
    cells.warm(right, mutant.line, 2)
    monkeypatch.setattr(session, "call", call)
    record = session.evaluate(mutant, right, cells, cells.setting, False)
    assert record is not None and record.outcome == "not run" and "x has no memory" in str(record.reason)


def test_an_endless_mutant_ends_with_its_share() -> None:
    """By its own process's time: a machine that others use must not decide it, nor 120 s pass for each."""

    def endless() -> None:
        while True:
            pass

    assert worker.forked(endless, 60.0, 1.0) == "no result within 1 s of its process"


def test_a_mutant_that_breaks_its_own_judge_ends_no_other() -> None:
    """It may write over a tensor's own record. What the right kernel raises, too, is the self-test's fault."""
    right = planting.catalogue(["softmax"], 1, backend="torch")[0].right()
    mutant, _ = _edited(right, lambda *args: None)

    def judge(of: planting.Mutant) -> None:
        if of.make() is not right:
            raise RuntimeError("two devices, cpu and cpu:0")

    answer = worker._answer(judge, mutant, right, 60.0, 10.0)
    assert answer == "its process raised after what it wrote: RuntimeError: two devices, cpu and cpu:0"

    def broken(of: planting.Mutant) -> None:
        raise RuntimeError("no such case")

    def late(of: planting.Mutant) -> None:
        raise EditError("two places")

    for wrong, says in ((broken, "no such case"), (late, "two places")):
        with pytest.raises(RuntimeError, match=says):
            worker._answer(wrong, mutant, right, 60.0, 10.0)


def test_few_edits_of_several_kernels_have_every_operator() -> None:
    """The operators' order is the seed's: the first of the alphabet would be all that is ever drawn."""
    drawn = {m.operator for m in planting.catalogue(["softmax", "rope", "silu_mul", "layer_norm"], 4, 0, "triton")}
    assert len(drawn) >= 9


def test_an_edit_of_cpp_changes_the_units_that_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its file has no code in a unit, nothing is compiled; where the code is the same, nothing runs."""
    edit = next(e for e in units.candidates("softmax") if e.file == "softmax.cuh" and e.operator == "sign")
    text = units.text_of(edit.file)
    unit = Unit("k", f'#line 1 "softmax.cuh"\n{text}\nKERNEL')
    edited_unit = units.edited(unit, edit)
    assert edited_unit.source == unit.source.replace(text, edit.apply(text)) != unit.source
    other = Unit("k", "KERNEL")
    assert units.edited(other, edit) is other
    located = f'\t.file\t1 "softmax.cuh"\n\t.loc\t1 {edit.line} 3\n'
    code = {unit: f"{located}\tv_add_f32\n", edited_unit: f"{located.replace(' 3', ' 4')}\tv_add_f32 ; note\n"}
    asked: list[Unit] = []

    def assembly(one: Unit, arch: str, keep: bool = True) -> str:
        asked.append(one)
        return code[one]

    monkeypatch.setattr(simt_offline, "assembly", assembly)
    assert not units.changes(unit, edit, "gfx942")
    code[edited_unit] = "\tv_sub_f32\n"
    assert units.changes(unit, edit, "gfx90a")
    elsewhere = Unit("other", unit.source)
    code[elsewhere] = '\t.file\t1 "rows.cuh"\n\t.loc\t1 1 1\n'
    asked.clear()
    assert not units.changes(elsewhere, edit, "gfx942") and set(asked) == {elsewhere}


def test_only_real_numbers_are_bent_as_such() -> None:
    """A sign or a rounding of whole numbers would change nothing, and count as equivalent."""
    names = {m.name for m in planting.catalogue(["embedding", "gate_topk"], 1)}
    assert {"negated.weight", "negated.logits", "saturated_at_448.topk_weights", "negated.bias"} <= names
    assert not {"negated.ids", "input_in_e4m3.ids", "saturated_at_448.topk_ids", "nan_injected.topk_ids"} & names


def test_right_runs_are_of_the_backend_that_is_asked_for() -> None:
    profile = detect(CPU)
    assert runner._shares(100, CPU, profile, "torch") == {"torch": 100}
    assert runner._shares(100, CPU, profile, "triton") == {"triton": 100}
    assert runner._shares(100, CPU, profile, None) == {"torch": 90, "triton": 10}


def test_right_alternatives_pass() -> None:
    setting = judging.Setting(CPU, detect(CPU))
    tally = honest.honest(["softmax", "rms_norm"], setting, 0, "torch", 0, 2)
    assert tally.runs >= 30 and tally.alarms == []
    assert set(tally.by_op) == {"softmax", "rms_norm"} <= set(registry.primitives())


def test_a_right_line_gets_only_calls_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, asked = judging.Setting(CPU, detect(CPU)), []

    def look(kernel: object, line: Implementation, prepared: Prepared, setting: judging.Setting) -> judging.Seen:
        view = View.of(prepared.primitive, prepared.args.values, setting.profile)
        asked.append((line.name, refusals(line, view, setting.profile, absent=True)))
        return judging.Seen(
            Cell(op="attention", implementation=line.name, device="cpu", dtype="float32", case="a", verdict="NOT_RUN"),
            (),
            None,
        )

    monkeypatch.setattr(honest, "look", look)
    honest.honest(["attention"], setting, 0, "triton", 0, 24)
    assert all(not why for _, why in asked), "and the line of few queries is left out of calls of many"
    counts = Counter(name for name, _ in asked)
    assert counts["triton.tiled"] >= 24 > counts["triton.decode"] > 0


def test_what_is_edited_first_is_a_line_that_serves_every_call() -> None:
    """Where there is one: a gradient with a bias may be one line, and one without it another."""
    lines = {op: editable for op in registry.primitives() if (editable := sources.interpretable(op))}
    whole = {op for op, editable in lines.items() if not all(line.partial for line in editable)}
    assert len(whole) > 50 and [op for op in whole if lines[op][0].partial] == []


def test_a_kernel_that_leans_less_than_the_reference_is_no_alarm() -> None:
    """bfloat16 has three numbers within four deviations of 1e3: what is rounded between two steps leans."""
    plain = next(a for a in alternatives.alternatives(["add_layer_norm"], "torch") if a.name == "float64")
    cells = Cells("add_layer_norm", judging.Setting(CPU, detect(CPU)), 0, "torch")
    prepared = cells.prepared(next(c for c in cells.cases if c.name == "fill_offset"), torch.bfloat16)
    seen = judging.look(plain.make(), plain.line, prepared, cells.setting)
    assert seen.cell.verdict == "PASS", seen.cell.reason
    right = plain.make()

    def leans(*args: object) -> object:
        y, total = right(*args)
        return y * (1 + 2**-6), total

    seen = judging.look(leans, plain.line, prepared, cells.setting)
    assert "G4" in seen.gates, seen.cell.gates


def test_right_results_have_the_strides_that_are_declared() -> None:
    """They may follow an argument's, which a copy has lost."""
    (copied,) = (a for a in alternatives.alternatives(["causal_conv1d"], "torch") if a.name == "copied")
    cells = Cells("causal_conv1d", judging.Setting(CPU, detect(CPU)), 0, "torch")
    case = next(c for c in cells.cases if c.name == "layout_channels")
    seen = judging.look(copied.make(), copied.line, cells.prepared(case, torch.float32), cells.setting)
    assert seen.cell.verdict == "PASS", seen.cell.reason


def test_cpp_variants_lie_side_by_side() -> None:
    text = "void f() {\n    float x = a * b;\n    store(p, x + 1.0f);\n}\n"
    variants = dict(enumerate(cpp.edits(text, "f.cuh"), 1))
    schema = cpp.schemata(text, "f.cuh", variants)
    assert all(f"ferryman_at({n})" in schema for n in variants)
    edits = {e.new for e in cpp.edits("void f() {\n    m = platform::fmax(m, v.at(i)) + g(v.at(i));\n}\n", "f.cuh")}
    assert any(new == "(m)" for new in edits) and "(i)" in edits  # no `platform::(m)`, no `v.(i)`
    assert cpp.refused("mutant:2:5: error: no match") == {2}
    assert [name for _, name in cpp.functions("// exp(x), of which {\nvoid f(int x) {\n}\n")] == ["f"]


def test_a_cpp_declaration_stays_one() -> None:
    """Braces around it would end its name's life."""
    text = "void f() {\n    T* out = a + b;\n    Pack<T, 4> p = get(q, r);\n    out[0] = a - b;\n}\n"
    whole = {text[r.start : r.end] for r in cpp.regions(text) if r.statement}
    assert whole == {"out[0] = a - b;"}


def _begun(monkeypatch: pytest.MonkeyPatch, does: str, seconds: float | None) -> float:
    """How long a worker's job took whose process does this, with so many seconds left."""
    monkeypatch.setattr(worker, "START", f"import os, sys, time; sys.stdin.read(); {does}")
    began = time.perf_counter()
    results: queue.SimpleQueue[object] = queue.SimpleQueue()
    runner._work({"backend": "torch"}, results, None if seconds is None else began + seconds, threading.Event())
    assert results.empty()
    return time.perf_counter() - began


def test_a_worker_that_says_nothing_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1.0 <= _begun(monkeypatch, "time.sleep(60)", 1.0) < 20.0


def test_what_a_worker_forked_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    fork = (
        "from ferryman.porting.selftest.worker import forked; "
        f"forked(lambda: (open({str(alive)!r}, 'w').close(), time.sleep(60)), 60.0)"
    )
    assert _begun(monkeypatch, fork, 20.0) < 50.0
    assert alive.exists()


def test_a_worker_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither where it is killed, nor where the folder is of a fork, whose exit runs no clean-up."""
    note = tmp_path / "made"
    fork = (
        "import pathlib; from ferryman.porting.mutate import sources; "
        "from ferryman.porting.selftest.worker import forked; "
        f"write = lambda: pathlib.Path({str(note)!r}).write_text(sources.load('m', 'A = 1').__file__); "
        "forked(lambda: (write(), os.kill(os.getppid(), 9), time.sleep(60)), 60.0)"
    )
    with pytest.raises(RuntimeError, match="code -9"):
        _begun(monkeypatch, fork, 60.0)
    module = Path(note.read_text())
    assert module.name == "m.py" and not module.exists() and not module.parent.exists()


def test_a_worker_that_fails_before_the_deadline_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"code 3: .*its reason"):
        _begun(monkeypatch, "print('its reason', file=sys.stderr); sys.exit(3)", 60.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_edits_of_cpp_run_in_the_simulator() -> None:
    """Compiled for gfx942: the edits of the sums and signs of softmax are caught by the cells of its line in HIP."""
    pytest.importorskip("ziglang")
    document = selftest.run(["softmax"], honest_runs=0, device="cpu", most=6, backend="hip", budget=1.0)
    fates = {r.name: (r.outcome, r.reason) for r in document.listing}
    assert {r.backend for r in document.listing} == {"hip"} and len(fates) == 6
    assert document.mutants.caught >= 1, fates
    assert document.mutants.caught == document.mutants.non_equivalent, fates


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_drawn_today_is_caught() -> None:
    """Part of the whole, drawn by the date; docs/selftest.md has the command that runs all of it."""
    today = int(datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d"))
    document = selftest.run(honest_runs=200, device="cpu", sample=120, seed=today, jobs=2, minutes=4)
    missed = [r.key for r in report.survivors(document)]
    assert document.false_alarms == 0, (today, document.honest.alarms)
    assert document.mutants.non_equivalent >= 20
    assert document.mutants.caught >= report.REQUIRED_SHARE * document.mutants.non_equivalent, (today, missed)


def test_rules_bend_lists_and_floats_of_8_bits() -> None:
    x = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    many, number = (rule.mapped(lambda a: rule.bent(torch.neg, a), value) for value in ([x, x[:1]], 3))
    assert [a.float().tolist() for a in many] == [[-1.0, 2.0], [-1.0]] and number == 3
    assert many[0].dtype == x.dtype and len(list(rule.tensors_of(([x, x], None, x, 1)))) == 3

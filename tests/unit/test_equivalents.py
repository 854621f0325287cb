"""Over 15% equivalent mutants in one kernel need a written reason each: held on the published self-tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ferryman import files
from ferryman.dispatch import registry
from ferryman.ops.evidence import Equivalent, Evidence
from ferryman.porting.mutate import sources
from ferryman.porting.selftest import SelfTest, equivalents, session
from ferryman.porting.selftest.judging import same_bits
from ferryman.porting.selftest.report import DRAWS, Record

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ALL_RIGHT = RESULTS / "cpu" / "right-runs.json.gz"
OWN_RIGHT = sorted(RESULTS.glob("*/right-runs-*.json.gz"))
LEAST_RIGHT = 50  # runs of one op
PUBLISHED = sorted(RESULTS.glob("*/selftest-*.json.gz"))


@cache
def published(path: Path) -> SelfTest:
    return SelfTest.model_validate(files.document(path))


@cache
def written() -> tuple[Equivalent, ...]:
    return (*(one for e in registry.evidences().values() for one in e.equivalents), *equivalents.SHARED)


def records() -> list[Record]:
    return [record for path in PUBLISHED for record in published(path).listing]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.name)
def test_every_kernel_that_has_too_many_has_a_reason_for_each(path: Path) -> None:
    document = published(path)
    assert len(document.listing) >= 15
    assert [(r.kernel, r.change) for r in equivalents.unexplained(document.listing)] == []
    same = [r for r in document.listing if r.outcome == "equivalent" and not equivalents.within(r)]
    few = [r.key for r in same if r.draws < DRAWS]
    assert few == [], "equal on too few draws to be called equivalent"


def right_runs(paths: Iterable[Path]) -> dict[str, int]:
    """Runs of right alternatives that published documents keep -> how many of each op."""
    runs: Counter[str] = Counter()
    for path in paths:
        runs.update(published(path).honest.by_op)
    return runs


def without_right_runs(op: str, runs: Mapping[str, int]) -> str | None:
    """What an op lacks, and the command that mends it."""
    if runs.get(op, 0) >= LEAST_RIGHT:
        return None
    return (
        f"{op} has {runs.get(op, 0)} right runs in benchmarks/results; required: {LEAST_RIGHT}. "
        f"Run: ferryman selftest --op {op} --backend torch --sample 1 --honest 200 "
        f"--out benchmarks/results/cpu/right-runs-{op}.json.gz"
    )


@pytest.mark.parametrize("op", registry.primitives())
def test_right_runs_of_every_op_are_kept(op: str) -> None:
    """In the document of all ops, or in one of the op's own."""
    lacking = without_right_runs(op, right_runs((ALL_RIGHT, *OWN_RIGHT, *PUBLISHED)))
    if lacking is not None:
        pytest.fail(lacking)


def test_an_op_whose_right_runs_are_not_kept_is_told_what_to_run() -> None:
    said = str(without_right_runs("squashed", {"softmax": 500, "squashed": 3}))
    assert said.startswith("squashed has 3 right runs") and "--op squashed" in said and "right-runs-squashed" in said
    assert without_right_runs("softmax", {"softmax": 500}) is None


def test_the_right_runs_that_are_kept_are_without_an_alarm() -> None:
    document = published(ALL_RIGHT)
    assert document.honest_runs == sum(document.honest.by_op.values()) > 8_000
    assert set(document.honest.by_op) <= set(registry.primitives())
    for path in (ALL_RIGHT, *OWN_RIGHT, *PUBLISHED):
        assert published(path).false_alarms == 0 and not published(path).honest.alarms, path.name


def test_there_are_rules_and_edits_of_either_language() -> None:
    backends = {record.backend for record in records()}
    assert {"torch", "triton", "cuda"} <= backends


def test_a_reason_that_is_taken_away_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them: none is there that no published kernel needs."""
    needed = [
        r for path in PUBLISHED for k in equivalents.kernels(published(path).listing) if k.over for r in k.equivalent
    ]
    for one in written():
        for edit in () if one.within else one.edits:
            known = [r for r in needed if one.kernel in (r.kernel, f"{r.backend}.{r.function}") and r.change == edit]
            assert known, f"no published kernel over its share needs the reason of {one.kernel}: {edit}"
            _without(monkeypatch, known[0], one, edit)
            assert equivalents.reason(known[0]) is None, (one.kernel, edit)
            monkeypatch.undo()


def _without(monkeypatch: pytest.MonkeyPatch, record: Record, one: Equivalent, edit: str) -> None:
    fewer = replace(one, edits=tuple(e for e in one.edits if e != edit))

    def left(those: tuple[Equivalent, ...]) -> tuple[Equivalent, ...]:
        return tuple(fewer if o is one else o for o in those)

    own = registry.evidence(registry.primitive(record.op))
    evidence = replace(own, equivalents=left(own.equivalents))
    monkeypatch.setattr(registry, "evidence", lambda op: evidence)
    monkeypatch.setattr(equivalents, "SHARED", left(equivalents.SHARED))


def test_no_reason_is_of_a_mutant_that_is_caught() -> None:
    """Of an op's own: a shared function's result may be used in another way by another op."""
    caught = {(r.kernel, r.change) for r in records() if r.outcome in ("caught", "missed")}
    own = {(one.kernel, edit) for e in registry.evidences().values() for one in e.equivalents for edit in one.edits}
    assert not own & caught


def _softplus(old: str = "", new: str = "") -> np.ndarray[Any, Any]:
    """Errors of the Triton function with an edit, in float32, in units of 2^-24 of the result."""
    body = sources.text_of("backends/triton_lang.py").split("def softplus(z):")[1].split("@triton.jit")[0]
    assert not old or body.count(old) == 1
    lang = SimpleNamespace(abs=np.abs, where=np.where)
    names: dict[str, Any] = {"tl": lang, "exp": np.exp, "reciprocal": lambda x: np.float32(1) / x}
    exec("def softplus(z):" + (body.replace(old, new) if old else body), names)  # noqa: S102
    z = np.linspace(-20, 20, 400_001, dtype=np.float32)
    right = np.logaddexp(z.astype(np.float64), 0.0)
    mine = names["softplus"](z)
    assert mine.dtype == np.float32
    return np.abs(mine / right - 1) * 2**24


def test_what_is_within_the_bounds_is_so() -> None:
    """Of each such edit of a shared function; an op's own have theirs beside the op's tests. A step by softplus may be
    off by 6 units (`ops/ssd_scan/bounds.py`)."""
    edits = [(one.kernel, edit) for one in equivalents.SHARED if one.within for edit in one.edits]
    assert {kernel for kernel, _ in edits} == {"triton.softplus"}, "each needs its proof here"
    proofs = "".join(path.read_text() for path in Path(__file__).parents[1].glob("ops/*/test_within_bounds.py"))
    own = {one.kernel for evidence in registry.evidences().values() for one in evidence.equivalents if one.within}
    assert own and all(f'"{kernel}"' in proofs for kernel in own), own
    assert _softplus().max() < 5.5
    for _, edit in edits:
        old, new = edit.partition(" in ")[0].split(" -> ")
        assert _softplus(old, new).max() < 5.5
    assert _softplus("0.09090909090909091", "0.18181818181818182").max() > 6


def test_an_edit_within_the_bounds_is_none_of_the_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no gate fails; one that is caught stays so."""
    (one, *_) = (one for one in equivalents.SHARED if one.within)
    note, _, place = one.edits[0].partition(" in ")
    record = _record("a", "missed").model_copy(update={"name": "softplus.a", "note": note, "place": place})
    assert equivalents.within(record)
    mutant: Any = None
    for outcome, expected in (("missed", "equivalent"), ("caught", "caught"), ("not run", "not run")):
        said = record.model_copy(update={"outcome": outcome})
        monkeypatch.setattr(session, "_evaluate", lambda *args, said=said: said)
        judged = session.evaluate(mutant, mutant, mutant, mutant, False)
        assert judged is not None and judged.outcome == expected
    assert not equivalents.within(record.model_copy(update={"place": "p = 0"}))


def test_zeros_of_either_sign_are_the_same() -> None:
    x, inf = torch.tensor([0.0, 1.0]), float("inf")
    assert same_bits((x,), (torch.tensor([-0.0, 1.0]),))
    assert not same_bits((x,), (torch.tensor([-0.0, 1.0 + 2**-23]),))
    assert not same_bits((x,), (torch.tensor([2.0**-149, 1.0]),))
    nan = torch.tensor([float("nan"), inf])
    assert same_bits((nan,), (nan.clone(),))
    assert not same_bits((nan,), (torch.tensor([inf, inf]),))
    assert not same_bits((nan,), (torch.tensor([float("nan"), -inf]),))


def _record(name: str, outcome: str, op: str = "softmax") -> Record:
    return Record(
        key=f"{op}.triton._rows.{name}",
        op=op,
        name=f"_rows.{name}",
        operator="sign",
        note=f"{name}  ->  (-{name})",
        backend="triton",
        outcome=outcome,  # type: ignore[arg-type]
    )


def test_a_report_says_the_share_and_the_reason_or_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [_record("a", "equivalent"), _record("b", "not run"), *(_record(f"c{i}", "caught") for i in range(6))]
    assert equivalents.reasons(few) == []  # one of seven
    many = [_record("d", "equivalent"), *few]
    assert equivalents.reasons(many) == [
        "softmax.triton._rows: 25% equivalent (2 of 8)",
        "  d -> (-d) (sign): reason missing",
        "  a -> (-a) (sign): reason missing",
    ]
    assert [r.change for r in equivalents.unexplained(many)] == ["d -> (-d)", "a -> (-a)"]
    why = (
        Equivalent("softmax.triton._rows", ("d -> (-d)",), "it is 0"),
        Equivalent("triton._rows", ("a -> (-a)",), "b"),
    )
    monkeypatch.setattr(registry, "evidence", lambda op: Evidence("softmax", cases=tuple, equivalents=why))
    assert equivalents.reasons(many)[1:] == ["  d -> (-d) (sign): it is 0", "  a -> (-a) (sign): b"]
    assert equivalents.unexplained(many) == []
    assert [r.op for r in equivalents.unexplained([_record("d", "equivalent", "rope")])] == ["rope"]

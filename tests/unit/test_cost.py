"""Predicted times: the cost model's formula, its file, what overtakes what; and regions beside measured ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ferryman
from ferryman import files, ops
from ferryman.device_profiles import detect
from ferryman.device_profiles import profile as profile_of
from ferryman.dispatch import cost, lockfile, lockfile_document, lockfile_entry, near, registry, select, state
from ferryman.errors import LockfileError, ProfileError
from ferryman.ops.clauses import at_least
from ferryman.ops.menu import Implementation
from tests.unit.test_dispatch import planted as on_the_menu

H200, CPU = profile_of("h200"), detect("cpu")
LINEAR, SILU = ops.linear.primitive, ops.silu_mul.primitive
PLAIN = state.State({}, False)
REFUSAL = "x.shape[0] is 256; required: x.shape[0] >= 300"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def box(*shape: int) -> list[list[float]]:
    return [list(cost.size_of(shape))] * 2


def planted(**seconds: tuple[float, float, float]) -> str:
    """A file for linear on the H200, bf16: name -> (fixed, memory, compute), measured at 1024 x 1024 x 1024."""
    work = cost.work_of(LINEAR, (meta(1024, 1024), meta(1024, 1024), None))
    sizes = {"work": [list(work.sizes["work"])] * 2, "x": box(1024, 1024), "weight": box(1024, 1024)}
    lines = {
        name: {"fixed": f, "memory": m, "compute": c, "error": 0.03, "cells": 9, "sizes": sizes, "weights": []}
        for name, (f, m, c) in seconds.items()
    }
    kinds = {"x weight": {"places": [], "implementations": lines}}
    return json.dumps(
        {"kind": "ferryman-costs", "version": 2, "profile": "h200", "stamp": {}, "ops": {"linear 16": kinds}}
    )


@pytest.fixture
def use_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def put(**seconds: tuple[float, float, float]) -> None:
        table = cost.load(planted(**seconds), "planted", "h200")
        monkeypatch.setattr(cost, "_table", lambda name: table if name == "h200" else {})

    yield put


def chosen(*args: Any, profile: Any = H200) -> select.Decision:
    return select.select(LINEAR, args, profile, PLAIN, absent=True)


def test_the_prediction_is_the_formula(use_table: Any) -> None:
    use_table(torch=(3e-6, 0.5, 0.25))
    args = (meta(2048, 1024), meta(1024, 1024), None)
    work = cost.work_of(LINEAR, args)
    moved, operations = 2.0 * (2048 * 1024 + 1024 * 1024 + 2048 * 1024), 2.0 * 2048 * 1024 * 1024
    assert (work.bytes, work.flops, work.dtype) == (moved, operations, torch.bfloat16)
    expected = 3e-6 + max(moved / (4.8e12 * 0.5), operations / (989e12 * 0.25))
    seconds, error = cost.predictions(LINEAR, work, H200)["torch"]
    assert seconds == pytest.approx(expected) and error == 0.03
    # the two sides of the maximum
    assert operations / (989e12 * 0.25) > moved / (4.8e12 * 0.5)
    thin = cost.work_of(LINEAR, (meta(1, 1024), meta(1024, 1024), None))
    known = cost.Coefficients(1e-6, 0.5, 0.25, 0.03, 1, {})
    assert known.seconds(thin, H200) == pytest.approx(1e-6 + thin.bytes / (4.8e12 * 0.5))


def test_beyond_what_was_measured_nothing_is_predicted(use_table: Any) -> None:
    use_table(torch=(3e-6, 0.5, 0.5), cuda=(1e-6, 0.9, 0.9))
    inside = cost.work_of(LINEAR, (meta(2048, 1024), meta(1024, 1024), None))
    assert set(cost.predictions(LINEAR, inside, H200)) == {"torch", "cuda"}
    for x, weight in (((4096, 1024), (1024, 1024)), ((1024, 1024), (300, 1024)), ((1024, 4096), (1024, 4096))):
        assert cost.predictions(LINEAR, cost.work_of(LINEAR, (meta(*x), meta(*weight), None)), H200) == {}
    wide = (meta(1024, 1024, dtype=torch.float32), meta(1024, 1024, dtype=torch.float32), None)
    assert cost.predictions(LINEAR, cost.work_of(LINEAR, wide), H200) == {}  # float32 was not measured
    half = cost.work_of(LINEAR, (meta(8, 128, 1024, dtype=torch.float16), meta(1024, 1024), None))
    assert set(cost.predictions(LINEAR, half, H200)) == {"torch", "cuda"}  # rows are counted, not dimensions


def test_what_the_formula_missed_counts_the_more_the_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a measured place its weight, e times less LENGTH powers of two away; never more than a factor of e^2."""
    args = (meta(1024, 1024), meta(1024, 1024), None)
    work = cost.work_of(LINEAR, args)
    assert work.place == (10.0,) * 4 and work.kind == "x weight"
    plain = cost.Coefficients(1e-6, 0.5, 0.25, 0.03, 9, {})
    base = plain.seconds(work, H200)
    for place, weight, power in (
        ((10.0,) * 4, 0.2, 0.2),
        ((10.0, 10.0, 10.0, 2.0), 0.2, 0.2 / math.e),
        ((6.0,) * 4, -0.2, -0.2 / math.e),
        ((10.0,) * 4, 99.0, 2.0),
    ):
        known = dataclasses.replace(plain, places=(place, (0.0,) * 4), weights=(weight, 0.0))
        assert known.seconds(work, H200) == pytest.approx(base * math.exp(power)) and known.covers(work)
    # a call whose tensors have other numbers of dimensions has no place among these
    assert not dataclasses.replace(plain, places=((1.0, 2.0),), weights=(0.1,)).covers(work)
    raw = json.loads(planted(torch=(3e-6, 0.5, 0.5)))
    raw["ops"]["linear 16"]["x weight"]["places"] = [[1.0, 2.0], [1.0]]
    with pytest.raises(ProfileError, match="places are of different lengths"):
        cost.load(json.dumps(raw), "planted", "h200")


def test_calls_of_another_kind_have_no_prediction_and_those_of_one_row_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = ops.attention.primitive

    def call(queries: int, **other: Any) -> str:
        q, k = meta(2, 8, queries, 64), meta(2, 2, 512, 64)
        values = {"causal": True, "scale": None, "window": None, "softcap": 0.0, "mask": None} | other
        return cost.kind_of(op, (q, k, k, *values.values(), *op.added.values()))

    plain = "q k v causal=True scale=x window=none softcap=0"
    assert call(512) == call(512, scale=0.1) == call(128) == plain
    assert call(1) == f"one {plain}" and call(2) == call(127) == f"few {plain}" and cost.general(call(2)) == plain
    kinds = {
        call(512, causal=False),
        call(512, window=64),
        call(512, softcap=30.0),
        call(512, mask=meta(1, 1, 512, 512)),
    }
    assert len(kinds | {plain}) == 5
    assert cost.kind_of(LINEAR, (meta(1, 8), meta(8, 8), meta(8))) == "one x weight"  # a bias moves few bytes
    assert cost.kind_of(LINEAR, (meta(3, 1, 8), meta(8, 8), None)) == "few x weight"
    assert cost.kind_of(ops.cross_entropy.primitive, (meta(256, 64), meta(256), -100, 0.0)) == (
        "logits ignore_index=n label_smoothing=0"
    )
    # the table: one row is looked for first, and stands among the others where it has no entry of its own
    known = cost.Coefficients(1e-6, 0.5, 0.25, 0.03, 9, {})
    slow = dataclasses.replace(known, fixed=1e-3)
    table = {"linear 16": {"x weight": {"torch": known}}}
    monkeypatch.setattr(cost, "_table", lambda name: table)
    one, many = (cost.work_of(LINEAR, (meta(m, 64), meta(64, 64), None)) for m in (1, 200))
    assert cost.predictions(LINEAR, one, H200)["torch"][0] < 2e-6
    table["linear 16"]["one x weight"] = {"torch": slow}
    assert cost.predictions(LINEAR, one, H200)["torch"][0] > 1e-3 > cost.predictions(LINEAR, many, H200)["torch"][0]
    odd = (*(meta(8, 8, 8, 8),) * 3, True, None, 64, 0.0, None, None, None, None, 0.0, None)
    assert cost.predictions(op, cost.work_of(op, odd), H200) == {}


def test_the_model_goes_before_regions_of_other_sizes(use_table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(torch=(3e-6, 0.5, 0.5), cuda=(2e-6, 0.8, 0.8), triton=(3e-6, 0.1, 0.1))

    def entry(rows: int, depth: int) -> dict[str, lockfile_entry.Entry]:
        args = (meta(rows, depth), meta(1024, depth), None)
        work, times = cost.work_of(LINEAR, args), {"torch": 3e-6, "cuda": 2e-6, "triton": 1e-6}
        return {
            lockfile.region(LINEAR, args): lockfile_entry.Entry(
                implementation="triton",
                seconds=1e-6,
                kernels="0" * 64,
                bytes=work.bytes,
                flops=work.flops,
                candidates=[{"implementation": n, "seconds": s} for n, s in times.items()],
            )
        }

    args = (meta(1024, 1024), meta(1024, 1024), None)
    for rows, depth, name, source in (
        (1024, 1280, "triton", "predicted from 1 measured region, the nearest a factor of 1.2 away"),
        (512, 1024, "triton", "predicted from 1 measured region, the nearest a factor of 2 away"),
        (256, 1024, "cuda", "predicted by the cost model"),
    ):
        entries = entry(rows, depth)
        monkeypatch.setattr(lockfile, "entries", lambda op, profile, entries=entries: entries)
        decision = chosen(*args)
        assert (decision.implementation.name, decision.source) == (name, source)
    # of a candidate that came after the fit the model knows nothing: a far region does
    use_table(torch=(3e-6, 0.5, 0.5), cuda=(2e-6, 0.8, 0.8))
    assert chosen(*args).implementation.name == "triton"


def test_what_is_clearly_faster_goes_first_and_says_so(use_table: Any) -> None:
    args = (meta(1024, 1024), meta(1024, 1024), None)
    use_table(torch=(3e-6, 0.5, 0.5), cuda=(2e-6, 0.8, 0.8), triton=(3e-6, 0.1, 0.1))
    decision = chosen(*args)
    assert decision.implementation.name == "cuda" and decision.source == "predicted by the cost model"
    assert decision.fallback is None and decision.seconds["cuda"] < decision.seconds["torch"]
    explanation = ferryman.explain("linear", *args, device="h200")
    assert explanation.chosen == "cuda" and "chosen, predicted by the cost model: about" in str(explanation)
    assert explanation.to_dict()["source"] == decision.source
    # faster, but by less than the fits' errors together: preference decides
    use_table(torch=(3e-6, 0.5, 0.5), cuda=(2.98e-6, 0.502, 0.502))
    assert (chosen(*args).implementation.name, chosen(*args).source) == ("torch", "profile")
    # nothing is known of the preferred one, or of this device
    use_table(cuda=(1e-9, 1.0, 1.0), triton=(1e-9, 1.0, 1.0))
    assert (chosen(*args).implementation.name, chosen(*args).source) == ("torch", "profile")
    use_table(torch=(3e-6, 0.1, 0.1), triton=(1e-9, 1.0, 1.0))
    for other in ("h100-sxm", "generic-hopper", "mi300x"):
        decision = chosen(*args, profile=profile_of(other))
        assert decision.source == "profile" and decision.seconds == {}


def test_what_was_predicted_fastest_and_refuses_is_no_fallback_where_the_profile_does_not_prefer_it(
    use_table: Any,
) -> None:
    use_table(torch=(3e-6, 0.5, 0.5), cuda=(2e-6, 0.8, 0.8))
    args = (meta(1024, 1024), meta(1020, 1024), None)  # the Hopper kernel wants a multiple of 8
    decision = select.select(LINEAR, args, H200, state.State({}, True), absent=True)  # strict: would raise
    assert decision.implementation.name == "torch" and decision.fallback is None


def test_a_request_is_above_any_prediction(use_table: Any) -> None:
    use_table(torch=(3e-6, 0.5, 0.5), cuda=(2e-6, 0.8, 0.8))
    args = (meta(1024, 1024), meta(1024, 1024), None)
    asked = state.State({None: ("torch",)}, False)
    decision = select.select(LINEAR, args, H200, asked, absent=True)
    assert decision.implementation.name == "torch" and decision.source == "request"


def test_ranking_keeps_preference_but_for_clear_winners() -> None:
    times = {"a": (10.0, 0.03), "b": (9.8, 0.03), "c": (5.0, 0.03)}
    assert cost.ranked(["a", "b", "c"], times) == ["c", "a", "b"]
    assert cost.ranked(["x", "a", "b", "c"], times) == ["x", "c", "a", "b"]  # nothing overtakes what nobody measured
    assert cost.ranked(["b", "a"], {}) == ["b", "a"]
    # half of sqrt(2) * 0.1 is 7%: 6% is not beyond it, 7.5% is
    for seconds, order in ((9.4, ["a", "b"]), (9.3, ["b", "a"])):
        assert cost.ranked(["a", "b"], {"a": (10.0, 0.1), "b": (seconds, 0.1)}) == order
    assert cost.ranked(["a", "c"], times | {"c": (5.0, 3.0)}) == ["a", "c"]  # a fit that misses by so much says little


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed": -1e-6}, "fixed is -1e-06; required: more than 0"),
        ({"fixed": math.nan}, "fixed is nan"),
        ({"memory": 1.2}, "memory is 1.2; required: more than 0, finite, at most 1"),
        ({"error": math.inf}, "error is inf"),
        ({"compute": "fast"}, "damaged: TypeError"),
        ({"cells": 0}, "cells is 0"),
        ({"sizes": [1]}, "damaged"),
        ({"sizes": {"x": [[2.0, 1.0], [1.0, 1.0]]}}, "the lowest first"),
        ({"weights": [0.1]}, "1 weights; required: 0, as there are places, finite"),
    ],
)
def test_a_hand_edited_file_is_refused(change: dict[str, Any], message: str) -> None:
    raw = json.loads(planted(torch=(3e-6, 0.5, 0.5)))
    raw["ops"]["linear 16"]["x weight"]["implementations"]["torch"] |= change
    with pytest.raises(ProfileError, match="planted.*" + message.replace(".", r"\.")):
        cost.load(json.dumps(raw), "planted", "h200")


def test_a_file_of_another_kind_or_device_is_refused() -> None:
    raw = json.loads(planted(torch=(3e-6, 0.5, 0.5)))
    for changed in (raw | {"profile": "h100-sxm"}, raw | {"version": 1}, raw | {"kind": "ferryman-lockfile"}):
        with pytest.raises(ProfileError, match="required: \\('ferryman-costs', 2, 'h200'\\)"):
            cost.load(json.dumps(changed), "planted", "h200")
    for text in ("", "[]", "{", '{"ops": '):
        with pytest.raises(ProfileError, match="is damaged"):
            cost.load(text, "planted", "h200")


def test_a_damaged_file_costs_the_predictions_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "h200.costs.json.gz").write_text("{")
    monkeypatch.setattr(cost.resources, "files", lambda package: tmp_path)
    cost.forget()
    args = (meta(1024, 1024), meta(1024, 1024), None)
    with pytest.warns(UserWarning, match="predicted costs ignored for h200.*damaged"):
        assert chosen(*args).source == "profile"
    cost.forget()


def test_what_is_shipped_is_whole_and_only_of_what_exists() -> None:
    folder = Path(str(cost.resources.files("ferryman.device_profiles"))) / "data"
    shipped = sorted(folder.glob("*.costs.json.gz"))
    assert [f.name for f in shipped] == ["h200.costs.json.gz"]
    for file in shipped:
        name = file.name.removesuffix(cost.FILE)
        text = files.unpacked(file.read_bytes()).decode()
        table, raw = cost.load(text, file.name, name), json.loads(text)
        assert profile_of(name).name == name and raw["stamp"]["fitted"] and len(raw["stamp"]["from"]) >= 1
        for group, kinds in table.items():
            op, bits = group.split()
            assert bits in ("16", "32") and kinds
            for lines in kinds.values():
                assert lines and set(lines) <= {line.name for line in registry.implementations(op)}


# --- regions beside those that were measured ------------------------------------------------------------------------


def entry(rows: int, width: int = 4096, **seconds: float) -> tuple[str, lockfile_entry.Entry]:
    args = (meta(rows, width), meta(rows, width))
    work = cost.work_of(SILU, args)
    best = min(seconds, key=lambda name: seconds[name])
    record = lockfile_entry.Entry(
        implementation=best,
        seconds=seconds[best],
        kernels=lockfile_document.digest("silu_mul"),
        bytes=work.bytes,
        flops=work.flops,
        candidates=[{"implementation": n, "seconds": s} for n, s in seconds.items()],
    )
    return lockfile.region(SILU, args), record


def predicted(rows: int, entries: dict[str, lockfile_entry.Entry], *lead: int, profile: Any = H200) -> Any:
    args = (meta(*lead, rows, 4096),) * 2
    return near.predict(lockfile.region(SILU, args), cost.work_of(SILU, args), profile, entries)


def test_between_neighbours_times_are_those_of_the_closed_form() -> None:
    """Neighbours one and two powers of two away weigh 1 and 1/4; logs of the ratios and of the level are averaged."""
    near_key, near_entry = entry(2048, a=1.0, b=1.05)
    far_key, far_entry = entry(256, a=4.0, b=1.0)
    prediction = predicted(1024, {near_key: near_entry, far_key: far_entry})
    scales = {r: cost.scale(cost.work_of(SILU, (meta(r, 4096),) * 2), H200) for r in (256, 1024, 2048)}
    level = math.exp((math.log(1.0 / scales[2048]) + 0.25 * math.log(1.0 / scales[256])) / 1.25) * scales[1024]
    assert prediction.seconds["a"] == pytest.approx(level * math.exp(0.25 * math.log(4.0) / 1.25))
    assert prediction.seconds["b"] == pytest.approx(level * math.exp(math.log(1.05) / 1.25))
    assert (prediction.regions, prediction.distance) == (2, 1.0)
    # the nearest region's winner is a: taking its choice as it stands would have been another one
    assert near_entry.implementation == "a" and prediction.ranked(["a", "b", "x"]) == ["b", "a", "x"]
    assert str(prediction) == "predicted from 2 measured regions, the nearest a factor of 2 away"


def test_one_neighbour_gives_its_own_order_at_this_size() -> None:
    key, one = entry(4096, a=2e-3, b=1e-3)
    prediction = predicted(8192, {key: one})
    larger, there = (cost.scale(cost.work_of(SILU, (meta(r, 4096),) * 2), H200) for r in (8192, 4096))
    assert prediction.seconds == pytest.approx({"a": 2e-3 * larger / there, "b": 1e-3 * larger / there})
    assert prediction.ranked(["a", "b"]) == ["b", "a"]
    nearly = near.Prediction({"a": 1.005, "b": 1.0}, 1, 1.0)
    assert nearly.ranked(["a", "b"]) == ["a", "b"]  # one time, as for the tuner: preference decides


def test_a_candidate_that_some_neighbours_lack_is_compared_with_the_best_of_those_that_have_it() -> None:
    (first, one), (second, other) = entry(512, a=1e-6, b=2e-6), entry(2048, a=1e-6)
    prediction = predicted(1024, {first: one, second: other})
    assert prediction.seconds["b"] == pytest.approx(2 * prediction.seconds["a"])


def test_every_call_of_a_region_is_served_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them came first: here the neighbours disagree by as much on either side."""
    path = tmp_path / "lock.json"
    measured = dict([rms(512, torch=1.1e-6, definition=1.0e-6), rms(2048, torch=4.0e-6, definition=4.4e-6)])
    lockfile_document.record(path, CPU, {"rms_norm": measured})
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(path))
    chosen = []
    try:
        for order in ((513, 800, 1024), (1024, 800, 513)):
            ferryman.reload()
            chosen.append({rows: ferryman.explain("rms_norm", torch.empty(rows, 64)).chosen for rows in order})
    finally:
        monkeypatch.undo()
        ferryman.reload()
    assert chosen[0] == chosen[1] and len(set(chosen[0].values())) == 1


def test_where_the_measured_choice_refuses_the_next_measured_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (torch.empty(64, 64, device="meta"), None, 1e-6, False)
    op = ops.rms_norm.primitive
    times = {"cuda": 10e-6, "torch": 20e-6, "triton.rows": 40e-6}
    measured = lockfile_entry.Entry(
        implementation="cuda",
        seconds=10e-6,
        kernels="0" * 64,
        candidates=[{"implementation": n, "seconds": s} for n, s in times.items()],
    )
    monkeypatch.setattr(lockfile, "entries", lambda name, profile: {lockfile.region(op, args): measured})
    order = select._order(op, args, H200, lockfile.region(op, args), PLAIN, select.View.of(op, args, H200))
    assert [line.name for line in order.lines][:3] == ["cuda", "torch", "triton.rows"] and order.source == "lockfile"


def test_a_model_that_changes_nothing_is_not_named(use_table: Any) -> None:
    """Faster the more it is preferred: the model agrees."""
    use_table(**{name: (2e-6, 0.9 / (i + 1), 0.9 / (i + 1)) for i, name in enumerate(select.preferred(LINEAR, H200))})
    decision = chosen(meta(1024, 1024), meta(1024, 1024), None)
    assert decision.source == "profile"


def test_a_fit_to_few_cells_orders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = planted(torch=(2e-6, 0.5, 0.1), triton=(2e-6, 0.9, 0.9)).replace('"cells": 9', '"cells": 1')
    table = cost.load(text, "planted", "h200")
    monkeypatch.setattr(cost, "_table", lambda name: table if name == "h200" else {})
    assert chosen(meta(1024, 1024), meta(1024, 1024), None).source == "profile"
    monkeypatch.setattr(
        cost, "_table", lambda name: cost.load(text.replace('"cells": 1', '"cells": 4'), "planted", "h200")
    )
    assert chosen(meta(1024, 1024), meta(1024, 1024), None).source == "predicted by the cost model"


def test_far_regions_other_dtypes_and_entries_without_work_say_nothing() -> None:
    key, one = entry(1024, a=1e-6, b=2e-6)
    assert predicted(8192, {key: one}) is not None and predicted(16_384, {key: one}) is None
    assert predicted(256, {key.replace("bfloat16", "float16"): one}) is None
    assert predicted(512, {key: one.model_copy(update={"bytes": None})}) is None
    assert predicted(512, {key: one.model_copy(update={"candidates": []})}) is None
    assert predicted(512, {}) is None


def test_leading_dimensions_count_as_rows() -> None:
    key, one = entry(4096, a=1e-6, b=2e-6)
    assert predicted(2048, {key: one}, 2).distance == 0.0
    assert predicted(2048, {key: one}, 4).distance == 1.0


def test_one_row_is_no_neighbour_of_two_nor_few_of_a_tile_and_heads_are_no_batch() -> None:
    key, one = entry(2, a=1e-6, b=2e-6)
    assert predicted(1, {key: one}) is None and predicted(4, {key: one}) is not None
    key, few = entry(64, a=1e-6, b=2e-6)
    assert predicted(33, {key: few}) is not None and predicted(65, {key: few}) is None

    def region(batch: int, heads: int, length: int) -> str:
        q, k = meta(batch, heads, length, 64), meta(batch, 2, 512, 64)
        return lockfile.region(
            ops.attention.primitive, (q, k, k, True, None, None, 0.0, None, None, None, None, 0.0, None)
        )

    measured = region(4, 8, 512)
    assert near.distance(region(4, 8, 512), measured, one) == 0.0
    assert near.distance(region(2, 16, 512), measured, one) == 1.0  # as many rows, another shape
    assert (
        near.distance(region(4, 8, 256), measured, one) == 1.0
        and near.distance(region(4, 64, 128), measured, one) == 3.0
    )
    assert near.distance(region(4, 8, 64), measured, one) is None
    assert near.distance(region(4, 8, 1), measured, one) is None  # decoding


def test_a_region_says_nothing_of_another_head_size() -> None:
    _, one = entry(64, a=1e-6, b=2e-6)

    def region(dim: int, keys: int = 4096, mask: bool = False) -> str:
        q, k = meta(2, 8, 512, dim), meta(2, 2, keys, dim)
        hidden = meta(2, 1, 512, keys) if mask else None
        return lockfile.region(
            ops.attention.primitive, (q, k, k, True, None, None, 0.0, hidden, None, None, None, 0.0, None)
        )

    assert near.distance(region(128), region(96), one) is None
    assert near.distance(region(128, 2048), region(128), one) == 1.0
    # of a mask the last dimension is a length
    assert near.distance(region(128, 2048, True), region(128, 4096, True), one) == 1.0

    def delta(width: int, dim: int, batch: int = 64) -> str:
        q, v = meta(batch, 1, 16, width), meta(batch, 1, 32, dim)
        g, state = meta(batch, 1, 32), meta(batch, 32, width, dim)
        return lockfile.region(ops.gated_delta_rule.primitive, (q, q, v, g, g, state, None, True))

    assert near.distance(delta(128, 128, 32), delta(128, 128), one) == 1.0
    assert near.distance(delta(96, 128), delta(128, 128), one) is None
    assert near.distance(delta(128, 192), delta(128, 128), one) is None


def test_what_is_composed_goes_first_in_the_measured_region_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta rule's gradient of 20 tokens, as if PyTorch's took 2.3 ms for 64 sequences and Triton's kernel 4.2."""
    op, here = registry.primitive("gated_delta_rule_backward"), profile_of("h100")

    def call(batch: int) -> tuple[Any, ...]:
        q, v = meta(batch, 20, 16, 128), meta(batch, 20, 32, 128)
        g, state = meta(batch, 20, 32, dtype=torch.float32), meta(batch, 32, 128, 128, dtype=torch.float32)
        return (v, None, q, q, v, g, g, state, None, True)

    work = cost.work_of(op, call(64))
    measured = lockfile_entry.Entry(
        implementation="torch",
        seconds=2.3e-3,
        kernels="0" * 64,
        bytes=work.bytes,
        flops=work.flops,
        candidates=[
            {"implementation": "torch", "seconds": 2.3e-3},
            {"implementation": "triton.chunked", "seconds": 4.2e-3},
        ],
    )
    monkeypatch.setattr(lockfile, "entries", lambda name, profile: {lockfile.region(op, call(64)): measured})
    for batch, name, source in ((64, "torch", "lockfile"), (32, "triton.chunked", "predicted"), (8, "triton", "pred")):
        decision = select.select(op, call(batch), here, PLAIN, absent=True)
        assert decision.implementation.name.startswith(name) and decision.source.startswith(source), batch
    times = {"torch": (1e-6, 0.01), "triton.chunked": (1e-3, 0.01)}
    monkeypatch.setattr(lockfile, "entries", lambda name, profile: {})
    monkeypatch.setattr(cost, "knows", lambda name, profile: True)
    monkeypatch.setattr(cost, "predictions", lambda op, work, profile: times)
    assert select.select(op, call(32), here, PLAIN, absent=True).implementation.name == "triton.chunked"


def test_regions_beyond_a_factor_of_two_do_not_overtake_a_line_that_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may lie where it does not lead: 256 rows of packed weights are cuBLAS's, 64 are not."""
    op, here = ops.linear_w4.primitive, profile_of("h100")

    def call(rows: int) -> tuple[Any, ...]:
        weight, scales = meta(4096, 2048, dtype=torch.uint8), meta(4096, 32)
        return (meta(rows, 4096), weight, scales, None, 128)

    work = cost.work_of(op, call(128))
    measured = lockfile_entry.Entry(
        implementation="triton",
        seconds=2e-4,
        kernels="0" * 64,
        bytes=work.bytes,
        flops=work.flops,
        candidates=[{"implementation": "triton", "seconds": 2e-4}, {"implementation": "torch", "seconds": 3e-4}],
    )
    monkeypatch.setattr(lockfile, "entries", lambda name, profile: {lockfile.region(op, call(128)): measured})
    chosen = {m: select.select(op, call(m), here, PLAIN, absent=True).implementation.name for m in (128, 256, 512)}
    assert chosen == {128: "triton", 256: "triton", 512: "torch"}


def test_on_a_device_without_rates_times_grow_with_the_bytes() -> None:
    key, one = entry(1024, a=1e-6, b=2e-6)
    assert predicted(2048, {key: one}, profile=CPU).seconds == pytest.approx({"a": 2e-6, "b": 4e-6})


def rms(rows: int, **seconds: float) -> tuple[str, lockfile_entry.Entry]:
    op, args = ops.rms_norm.primitive, (torch.empty(rows, 64), None, 1e-6, False)
    work = cost.work_of(op, args)
    best = min(seconds, key=lambda name: seconds[name])
    return lockfile.region(op, args), lockfile_entry.Entry(
        implementation=best,
        seconds=seconds[best],
        kernels=lockfile_document.digest("rms_norm"),
        bytes=work.bytes,
        flops=work.flops,
        candidates=[{"implementation": n, "seconds": s} for n, s in seconds.items()],
    )


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A lockfile in force on this CPU: rms_norm of width 64 with 256 and 2048 rows."""
    path = tmp_path / "lock.json"
    measured = dict([rms(256, torch=1.0e-6, definition=1.05e-6), rms(2048, torch=8e-6, definition=2e-6)])
    lockfile_document.record(path, CPU, {"rms_norm": measured})
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(path))
    ferryman.reload()
    yield path
    monkeypatch.undo()
    ferryman.reload()


def test_dispatch_predicts_a_near_miss_and_marks_it_everywhere(locked: Path) -> None:
    with ferryman.trace() as seen:
        for rows in (256, 512, 2048, 100_000):
            ops.rms_norm(torch.empty(rows, 64))
    predicted_from = "predicted from 2 measured regions, the nearest a factor of 2 away"
    assert seen.sources == {
        ("rms_norm", "torch", "lockfile"): 1,  # 256
        ("rms_norm", "definition", predicted_from): 1,  # 512: the nearest alone says torch
        ("rms_norm", "definition", "lockfile"): 1,  # 2048
        ("rms_norm", "torch", "profile"): 1,  # too far
    }
    assert not seen.fallbacks
    explained = ferryman.explain("rms_norm", torch.empty(512, 64))
    assert explained.chosen == "definition" and explained.source == predicted_from and predicted_from in str(explained)
    by = {row.implementation: row.seconds for row in explained.rows}
    assert by["definition"] is not None and by["torch"] is not None and by["definition"] < by["torch"]
    measured = ferryman.explain("rms_norm", torch.empty(256, 64))
    assert "torch        chosen, measured in this region: 1 us" in str(measured) and "about" not in str(measured)
    entry = lockfile.entries("rms_norm", CPU)[measured.region]
    assert measured.case == entry.case and (f"1 us for {entry.case}" in str(measured)) == bool(entry.case)


def test_regions_near_say_nothing_of_what_was_not_made_for_them(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preferred, made for more than 300 rows, and so not measured at 256: it is not put behind those that were."""
    line = Implementation(
        op="rms_norm", name="torch2", where="nowhere:rms_norm", when=(at_least("x.shape[0]", 300),), partial=True
    )
    with on_the_menu(monkeypatch, line, lambda x, weight, eps, cast, target: x + 7):
        monkeypatch.setattr(select, "preferred", lambda op, profile: ["torch2", "torch", "definition"])
        for rows, chosen in ((512, "torch2"), (299, "definition")):
            decision = select.select(ops.rms_norm.primitive, (torch.empty(rows, 64), None, 1e-6, False), CPU, PLAIN)
            assert decision.implementation.name == chosen and decision.source.startswith("predicted from")
            assert decision.fallback is None


def test_where_no_region_near_was_measured_with_a_line_its_kin_stands_for_it() -> None:
    menu = {line.name: line for line in registry.implementations("rms_norm_backward")}
    seconds = {"torch": 5e-6, "triton.columns": 2e-6, "triton.rows": 1e-6, "gone": 1e-6}
    known = near.Prediction(seconds, 1, 2.0).with_kin(menu).seconds
    assert known == {**seconds, "triton.long": 2e-6}
    assert near.Prediction({"torch": 5e-6}, 1, 2.0).with_kin(menu).seconds == {"torch": 5e-6}
    order, source, _ = select.foreseen(
        ["triton.rows", "triton.columns", "triton.long", "torch"],
        menu,
        near.Prediction({"torch": 5e-6, "triton.rows": 1e-6}, 1, 2.0),
        {},
    )
    assert list(dict.fromkeys(order))[:4] == [
        "triton.rows",
        "triton.columns",
        "triton.long",
        "torch",
    ] and source.startswith("predicted")


def test_what_failed_in_regions_near_is_not_put_before_what_ran(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Implementation(
        op="rms_norm", name="torch2", where="nowhere:rms_norm", when=(at_least("x.shape[0]", 300),), partial=True
    )
    document = lockfile_document.load(locked)
    region, entry = next(iter(document.choices["rms_norm"].items()))
    for error, chosen in (("its process ended with code -11", "definition"), (REFUSAL, "torch2")):
        tried = [*entry.candidates, lockfile_entry.Candidate(implementation="torch2", error=error)]
        lockfile_document.record(locked, CPU, {"rms_norm": {region: entry.model_copy(update={"candidates": tried})}})
        ferryman.reload()
        with on_the_menu(monkeypatch, line, lambda x, weight, eps, cast, target: x + 7):
            monkeypatch.setattr(select, "preferred", lambda op, profile: ["torch2", "torch", "definition"])
            args = (torch.empty(512, 64), None, 1e-6, False)
            assert select.select(ops.rms_norm.primitive, args, CPU, PLAIN).implementation.name == chosen


def test_an_entry_of_another_vendors_backend_is_no_measured_choice(locked: Path) -> None:
    document = lockfile_document.load(locked)
    region, entry = next(iter(document.choices["rms_norm"].items()))
    timed = lockfile_entry.Candidate(implementation="cuda", seconds=entry.seconds / 2)
    edited = {"implementation": "cuda", "seconds": timed.seconds, "candidates": [*entry.candidates, timed]}
    lockfile_document.record(locked, CPU, {"rms_norm": {region: entry.model_copy(update=edited)}})
    ferryman.reload()
    rows = 256 if "2^8" in region else 2048
    decision = select.select(ops.rms_norm.primitive, (torch.empty(rows, 64), None, 1e-6, False), CPU, PLAIN)
    assert decision.implementation.name != "cuda" and decision.source != "lockfile"


def test_a_prediction_is_made_once_for_a_plan(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = []
    predict = near.predict
    monkeypatch.setattr(near, "predict", lambda *args: regions.append(args[0]) or predict(*args))
    for rows in (512, 512, 512, 400, 300):
        ops.rms_norm(torch.empty(rows, 64))
    assert len(regions) == 1  # they share a region
    here, there = (ferryman.explain("rms_norm", torch.empty(rows, 64)) for rows in (512, 384))
    for one, other in zip(here.rows, there.rows, strict=True):
        if one.seconds is not None:  # by the bytes, on a device without rates
            assert other.seconds == pytest.approx(one.seconds * 384 / 512)
    assert len(regions) == 1
    ops.rms_norm(torch.empty(1024, 64))
    assert len(regions) == 2
    ferryman.reload()
    ops.rms_norm(torch.empty(1024, 64))
    assert len(regions) == 3


@pytest.mark.parametrize("value", [-1e-6, 0.0, math.nan, math.inf, "fast"])
def test_times_that_are_none_are_refused(locked: Path, value: Any) -> None:
    raw = json.loads(locked.read_text())
    one = next(iter(raw["choices"]["rms_norm"].values()))
    one["candidates"][0]["seconds"] = value
    locked.write_text(json.dumps(raw))
    with pytest.raises(LockfileError, match="damaged: choices.rms_norm.*seconds|is not JSON"):
        lockfile_document.load(locked)
    ferryman.reload()
    with pytest.warns(UserWarning, match="lockfile ignored"), ferryman.trace() as seen:
        ops.rms_norm(torch.empty(512, 64))
    assert seen.sources == {("rms_norm", "torch", "profile"): 1}


def test_work_that_is_none_is_refused(locked: Path) -> None:
    for name, value in (("bytes", -1.0), ("flops", math.nan)):
        raw = json.loads(locked.read_text())
        next(iter(raw["choices"]["rms_norm"].values()))[name] = value
        changed = locked.with_suffix(".changed")
        changed.write_text(json.dumps(raw))
        with pytest.raises(LockfileError, match=f"{name}|NaN is not JSON"):
            lockfile_document.load(changed)


def test_a_strange_region_is_read_and_never_obeyed() -> None:
    """A hand-edited key has whatever sizes it likes: it is of another kind, or far away."""
    key, one = entry(1024, a=1e-6)
    for strange in ("", "gate", "gate=bfloat16[2^10,4096]c", key.replace("4096", "99999999999"), key.replace(",", ";")):
        assert predicted(1024, {strange: one}) is None, strange


def test_errors_of_a_fit_are_relative_and_of_frozen_records() -> None:
    known = cost.Coefficients(1e-6, 0.5, 0.5, 0.03, 3, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        known.fixed = 2.0  # type: ignore[misc]
    nothing = dataclasses.replace(H200, bandwidth=None)
    work = cost.work_of(LINEAR, (meta(8, 8), meta(8, 8), None))
    assert known.seconds(work, nothing) is None and cost.scale(work, nothing) == pytest.approx(work.bytes * 1e-10)

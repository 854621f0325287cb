"""The ranking of implementations and configurations by prediction: its order, its times, and that dispatch takes it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ferryman import ops
from ferryman.device_profiles import profile as profile_of
from ferryman.dispatch import cost, lockfile, rank, registry, select, state
from ferryman.errors import UnknownName
from ferryman.ops.matmul import hopper_kernels as hopper
from ferryman.ops.primitive import IDENTIFIER
from ferryman.porting.bench import grid
from ferryman.porting.tune import worker
from tests.cli.run import ferryman as command

H200 = profile_of("h200")
LINEAR = ops.linear.primitive
ROWS, WIDTHS, DEPTHS = (1, 7, 8, 9, 64, 65, 200, 1024, 8192), (64, 1024, 4104, 28_672), (64, 72, 512, 4096, 28_672)


def arguments(m: int, n: int, k: int) -> tuple[Any, ...]:
    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((m, k), (n, k)))
    return x, weight, None


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"torch": (20e-6, 0.01), "cuda": (10e-6, 0.01), "triton": (30e-6, 0.01)}
    monkeypatch.setattr(cost, "predictions", lambda op, work, profile: times)
    monkeypatch.setattr(lockfile, "entries", lambda op, profile: {})


def test_implementations_come_first_then_their_other_configurations_with_times(predicted: None) -> None:
    args = arguments(171, 11_008, 4096)
    ranking = rank.rank(LINEAR, args, H200)
    own, *others = hopper.ranked(171, 11_008, 4096, 132)
    assert [(r.implementation, r.configuration, r.own, r.seconds) for r in ranking[:3]] == [
        ("cuda", own.name, True, 10e-6),
        ("torch", "", True, 20e-6),
        ("triton", "", True, 30e-6),
    ]
    assert [r.configuration for r in ranking[3:]] == [f.name for f in others] and not any(r.own for r in ranking[3:])
    relative = hopper.ranked(171, 11_008, 4096, 132)
    for one, form in zip(ranking[3:], others, strict=True):
        assert one.implementation == "cuda" and one.behind == pytest.approx(relative[form] / relative[own])
        assert one.seconds == pytest.approx(10e-6 * one.behind) and one.label == f"cuda {form.name}"
    taken = worker.candidates(LINEAR, args, H200)
    assert taken == [r for r in ranking if r.own or r.behind < worker.BEHIND][:8] and 3 < len(taken) <= 8
    assert [r.implementation for r in rank.rank(LINEAR, args, H200, ["triton", "torch"])] == ["torch", "triton"]


def test_untuned_dispatch_takes_what_the_ranking_puts_first(predicted: None) -> None:
    for shape in ((171, 11_008, 4096), (1, 4096, 4096)):
        first = rank.rank(LINEAR, arguments(*shape), H200)[0]
        decision = select.select(LINEAR, arguments(*shape), H200, state.State({}, False), absent=True)
        assert (decision.implementation.name, decision.configuration) == (first.implementation, "") and first.own
        assert hopper.choose(*shape, 132).name == first.configuration  # what the launcher takes by itself


def test_what_cannot_serve_a_call_is_not_ranked() -> None:
    args = arguments(64, 1020, 4096)  # the Hopper kernels want a multiple of 8
    assert {r.implementation for r in rank.rank("linear", args, "h200")} == {"torch", "triton"}
    assert {r.implementation for r in rank.rank("linear", arguments(64, 1024, 4096), "mi300x")} == {"torch", "triton"}
    with pytest.raises(UnknownName):
        rank.rank("linear", args, "h2000")


def test_every_configuration_can_serve_its_call_and_has_a_name_of_its_own() -> None:
    assert len({f.name for f in hopper.forms()}) == len(hopper.forms())
    for m, n, k in itertools.product(ROWS, WIDTHS, DEPTHS):
        costs = hopper.ranked(m, n, k, 132)
        own, *others = costs
        assert own == hopper.choose(m, n, k, 132) and all(costs[own] <= costs[f] for f in others)
        assert [costs[f] for f in others] == sorted(costs[f] for f in others)
        for form in costs:
            assert IDENTIFIER.fullmatch(form.name) and hopper._NAMED[form.name] == form
            assert (form.m == 64) == (m <= 64) and form.split <= max(1, -(-k // (64 * form.boxes)))


def test_every_menu_line_that_has_configurations_ranks_its_op_s_standard_case() -> None:
    pytest.importorskip("triton")
    lines = [line for op in registry.primitives() for line in registry.implementations(op) if line.configurations]
    target = select.target_of(H200)
    assert len(lines) >= 8
    for line in lines:
        op = registry.primitive(line.op)
        timed = [grid.on_meta(op, case, torch.bfloat16) for case in grid.cases(op, "full", torch.device("cuda"))]
        assert any(line.ranked_configurations(args, target) for args in timed), (line.op, line.name)
    linear = next(line for line in lines if line.op == "linear")
    assert linear.ranked_configurations(arguments(0, 8, 8), target) == {}


def test_decoding_attention_ranks_in_how_many_pieces_keys_are_read() -> None:
    triton = pytest.importorskip("ferryman.ops.attention.triton_kernels")

    def ranked(batch: int, heads: int, kv: int, queries: int, keys: int) -> dict[str, float]:
        sizes = (batch, heads, queries, 128), (batch, kv, keys, 128)
        q, k = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)
        costs: dict[str, float] = triton.configurations(
            q, k, k, True, None, None, 0.0, None, None, None, None, 0.0, None, select.target_of(H200)
        )
        return costs

    ranking = ranked(1, 32, 8, 1, 32_768)
    own, *others = ranking
    assert own == "splits_16"  # one for each unit, that reads ahead; two would be
    assert triton._num_splits(select.target_of(H200), 8, 32_768) == 33
    assert set(others) == {"splits_4", "splits_8", "splits_12", "splits_24", "splits_32", "splits_64"}
    assert next(iter(ranked(1, 32, 8, 1, 4096))) == "splits_16"  # of 256 keys
    assert next(iter(ranked(6, 32, 8, 1, 32_768))) == "splits_5"  # two for each unit: 96 of 132 would have one
    assert list(ranking.values()) == sorted(ranking.values()) and all(IDENTIFIER.fullmatch(name) for name in ranking)
    assert ranked(1, 32, 8, 1, 200) == ranked(0, 32, 8, 1, 4096) == {}
    assert len(ranked(64, 32, 8, 1, 4096)) > 1  # enough programs without a split: one piece is the plan, more are tried
    assert next(iter(ranked(64, 32, 8, 1, 4096))) == "splits_1"


def test_the_command_shows_the_order_and_measures_nothing() -> None:
    done = command("tune", "--predict", "--device", "h200", "--op", "linear", "--op", "rope")
    lines = [line.split() for line in done.out.splitlines() if line.startswith("linear")]
    assert done.code == 0 and {line[1] for line in lines} == {"8192x8192x8192", "16x14336x4096"}
    assert sum(line[4] == "cuda" and line[5].startswith("wide_128_") for line in lines) >= 2
    for clash in ("--check", "--again"):
        assert command("tune", "--predict", "--device", "h200", clash).code == 2

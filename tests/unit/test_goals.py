"""`benchmarks/goals.py`, and the goals that ops' evidence names."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.ops.evidence import LARGE_BYTES
from ferryman.porting.bench import clock, grid

FILE = Path(__file__).parents[2] / "benchmarks" / "goals.py"
MOST = 60e9  # bytes of a cell, of a device of 80 GB


@pytest.fixture(scope="module")
def goals() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_goals", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "CPU_SECONDS", 1e-3)


def _task(goals: ModuleType, goal: str, less: int = 64) -> Any:
    return next(task for task in goals.tasks(None, 1, less) if task.goal.name == goal)


def test_goals_are_of_calls_that_ops_take_and_fit_into_a_device(goals: ModuleType) -> None:
    tasks = goals.tasks(None, 27)
    assert len({task.key for task in tasks}) == len(tasks)
    for task in tasks:
        cases = [task.case, *([] if task.goal.twin is None else [task.goal.twin(task.case)])]
        for case in cases:
            args = grid.on_meta(task.op, case, goals.DTYPE)
            task.op.check(*args)
            size = sum(a.numel() * a.element_size() for a in args if isinstance(a, Tensor))
            # a step has gradients as large, and inputs lie there twice while sets of them are copied
            assert size * (2 if task.goal.timed != "step" else 3) < MOST, task.key


def test_a_goal_beside_a_copy_has_cells_that_are_large_enough(goals: ModuleType) -> None:
    large: dict[str, int] = {}
    for task in goals.tasks(None, 27):
        if "copy" in task.goal.reach:
            cost = task.op.cost(*grid.on_meta(task.op, task.case, goals.DTYPE))
            large[task.goal.name] = large.get(task.goal.name, 0) + (cost.bytes >= LARGE_BYTES)
    assert large and min(large.values()) >= 8, large


def test_every_goals_first_cell_comes_before_any_goals_second(goals: ModuleType) -> None:
    names = [task.goal.name for task in goals.tasks(None, 27)]
    firsts = list(dict.fromkeys(names))
    assert names[: len(firsts)] == firsts
    assert {task.op.name for task in goals.tasks(["kv_append"], 27, cells=1)} == {"kv_append"}


def test_a_cell_is_timed_beside_its_peers_and_its_twin(
    goals: ModuleType, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = goals.plan_of(torch.device("cpu"), 1)
    row = goals.timed(_task(goals, "gate_topk"), plan, None, True)
    assert {"ferryman", "torch-eager"} <= set(row["trials"]), row["skipped"]
    assert set(goals.timed(_task(goals, "gate_topk"), plan, set(), True)["trials"]) == set(row["trials"])
    eager = next(a for a in plan.adapters if a.name == "torch-eager")
    monkeypatch.setattr(eager.module, "SLOW_START", True, raising=False)
    late = goals.timed(_task(goals, "gate_topk"), plan, set(), True)
    assert late["skipped"]["torch-eager"] == "not ready in the time ahead" and set(late["trials"]) == {"ferryman"}
    row = goals.timed(_task(goals, "attention, sinks"), replace(plan, adapters=()), None, True)
    assert {"ferryman", "twin"} == set(row["trials"]) and row["choice"] == "torch.composed"


def test_a_step_is_a_forward_and_its_gradients(goals: ModuleType) -> None:
    task = _task(goals, "moe_experts, step")
    plan = goals.plan_of(torch.device("cpu"), 1)
    args = goals.inputs(task.op, task.case, 1, plan.device)
    ours, eager = goals.contenders(plan, task, args)[:2]
    assert eager.skipped is None, eager.skipped
    names = [n for n in task.op.gradient.grads if isinstance(args[task.op.names.index(n)], Tensor)]
    results = ours.call_of(args)()
    assert [r.shape for r in results[1:]] == [args[task.op.names.index(n)].shape for n in names]
    assert goals.peers.apart(("y", *names), eager.call_of(args)(), results) is None
    halved = [r / 2 for r in results]
    assert goals.peers.apart(("y", *names), halved, results) is not None


def test_of_a_large_tensor_the_first_rows_are_repeated(goals: ModuleType) -> None:
    task = _task(goals, "moe_experts")
    args = goals.inputs(task.op, task.case, 1, torch.device("cpu"), 1 << 14)
    for name, spec in task.case.args.items():
        if hasattr(spec, "shape"):
            assert args[task.op.names.index(name)].shape == spec.shape
    first, *rest = args[task.op.names.index("gate_up")]
    assert rest and all(torch.equal(other, first) for other in rest)


def test_ratios_are_of_trials_and_a_twins_of_operations(goals: ModuleType) -> None:
    trials = {"ferryman": [2.0, 2.0, 4.0], "far": [9.0], "near": [3.0, 3.0, 3.0], "twin": [1.0, 1.0, 1.0]}
    row = {"flops": 8.0, "twin_flops": 2.0, "trials": trials}
    assert goals.ratios(row, "near") == [0.75, 1.5, 1.5]
    assert goals.ratios(row, "far") == [4.5]  # of medians
    assert goals.ratios(row, "twin") == [1.0, 2.0, 2.0]
    assert goals.beside(row, "peers") == ("near", [0.75, 1.5, 1.5])
    assert goals.beside(row, "copy") is None


def _row(goal: str, case: str, ours: float, its: float) -> dict[str, Any]:
    trials = {"ferryman": [ours] * 3, "torch-eager": [its] * 3}
    row: dict[str, Any] = {"goal": goal, "op": "bias_act", "case": case, "choice": "triton", "trials": trials}
    return row | {"bytes": 1.0, "flops": 1.0, "noise": 0.01, "skipped": {}, "untrusted": [], "seconds": 1.0}


def test_a_goal_is_reached_by_its_geomean_where_no_cell_is_far_behind(goals: ModuleType) -> None:
    def table(*times: tuple[float, float]) -> str:
        rows = [_row("bias_act", f"case {i}", ours, its) for i, (ours, its) in enumerate(times)]
        document = {
            "device": "a device",
            "torch": "2",
            "seed": 1,
            "peers": {},
            "rows": rows,
            "left": [["bias_act", "9x9"]],
        }
        return goals.markdown(document)

    text = table((1.0, 2.0), (1.0, 0.95))
    mean = math.sqrt(1.9)
    assert f"| bias_act | torch-eager | 2 | {mean:.2f} | 0.95 | 0 | 1.0 | yes |" in text
    assert "| bias_act | copy | 0 | | | | 0.95 | not measured |" in text and "bias_act, 9x9" in text
    assert "| bias_act | torch-eager | 2 | 1.30 | 0.85 | 1 | 1.0 | no |" in table((1.0, 2.0), (1.0, 0.85))

"""Dispatch under threads, scopes, reloads, quarantines and compile failures at once: every result is judged."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import plan, registry, select
from ferryman.errors import CompileError
from ferryman.ops.menu import Implementation
from tests import lines

THREADS = 16
WIDTHS = (8, 16, 24, 40)
ONE_IN = 40  # launches of the planted kernel that its "compiler" refuses


class Planted:
    """rms_norm's line "triton", put first: 3 x, which no other line computes, or a compile failure now and then."""

    def __init__(self) -> None:
        self.refused = 0

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        if random.randrange(ONE_IN) == 0:
            self.refused += 1
            raise CompileError("triton", "planted", "cpu", "no such instruction")
        return x * 3


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    kernel = Planted()
    line = Implementation(op="rms_norm", name="triton", where="planted:nowhere")
    backends = registry.backends()
    lines.planted(monkeypatch.setattr, {line: kernel}, first=True)
    monkeypatch.setattr(registry, "backends", lambda: {**backends, "triton": backends["torch"]})
    monkeypatch.setattr(registry, "probe", lambda name, vendor: ())
    others = ["torch", "definition"]
    monkeypatch.setattr(select, "preferred", lambda op, profile: ["triton", *others] if op.name == line.op else others)
    ferryman.reload()
    yield kernel
    monkeypatch.undo()
    ferryman.reload()


class Example:
    """One input, and what each implementation makes of it, gradients included."""

    def __init__(self, width: int, gradient: bool) -> None:
        self.x, self.gradient = torch.randn(3, width), gradient
        self.w = torch.randn(width, requires_grad=gradient)
        self.known: dict[str, tuple[Tensor, ...]] = {"triton": (self.x * 3,)}
        for name in ("torch", "definition"):
            with ferryman.use(name):
                self.known[name] = self.outputs(train=gradient)

    def outputs(self, train: bool) -> tuple[Tensor, ...]:
        y = ops.rms_norm(self.x, self.w)
        if not train:
            return (y.detach(),)
        return y.detach(), *torch.autograd.grad(y.sum(), self.w)

    def serving(self, outputs: tuple[Tensor, ...]) -> set[str]:
        return {name for name, right in self.known.items() if all(map(torch.equal, outputs, right))}


# each kind of fault that must come, and each implementation that must serve, with how often at least
KINDS = ("reloads", "quarantines lifted", "compile failures", "by torch", "by definition", "by triton")
LEAST = 3


def stress(planted: Planted, calls: int, seconds: float) -> tuple[Counter[str], list[str], list[BaseException]]:
    """(what happened how often, wrong results, what was raised) until both limits are met and each kind has come, or
    far too late.
    """
    examples = [Example(width, gradient) for width in WIDTHS for gradient in (False, True)]
    alone, count = [torch.randn(5, n) for n in WIDTHS], [0] * THREADS
    right = [torch.softmax(x, -1) for x in alone]
    events, wrong, raised = Counter[str](), [], []
    lock, end = threading.Lock(), time.monotonic()

    def missing() -> bool:
        with lock:
            events["compile failures"] = planted.refused
            return any(events[kind] < LEAST for kind in KINDS)

    def work(thread: int) -> None:
        draw = random.Random(thread)
        try:
            while sum(count) < calls or time.monotonic() < end + seconds or missing():
                own = Counter[str]()
                assert time.monotonic() < end + 240, "too slow to tell anything"
                scope, example = draw.choice(("torch", "definition", None)), draw.choice(examples)
                with ferryman.use(scope) if scope else contextlib.nullcontext():
                    for _ in range(draw.randrange(1, 40)):
                        train = example.gradient and scope is not None and draw.random() < 0.2
                        by = example.serving(example.outputs(train))
                        allowed = {scope} if scope else {"triton", "torch"}
                        count[thread] += 1
                        if not by & allowed:
                            wrong.append(f"{by} served under {scope}")
                        own["by " + next(iter(sorted(by & allowed)), "none")] += 1
                    place = draw.randrange(len(alone))
                    if scope != "definition":
                        count[thread] += 1
                        if not torch.equal(ops.softmax(alone[place]), right[place]):
                            wrong.append("softmax")
                event = draw.random()
                if event < 0.02:
                    ferryman.reload()
                    own["reloads"] += 1
                elif event < 0.04:
                    plan.drop_plans()
                elif event < 0.06:
                    select.clear_quarantine()
                    plan.drop_plans()
                    own["quarantines lifted"] += 1
                with lock:
                    events.update(own)
        except BaseException as error:  # noqa: BLE001 - judged below
            raised.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events.update({"calls": sum(count)})
    events["compile failures"] = planted.refused
    return events, wrong, raised


def judge(events: Counter[str], wrong: list[str], raised: list[BaseException]) -> None:
    assert raised == [], raised[:3]
    assert wrong == [], (len(wrong), wrong[:5])
    for kind in KINDS:
        assert events[kind] >= LEAST, (kind, events)


def test_three_seconds_of_threads_scopes_reloads_and_compile_failures(planted: Planted) -> None:
    judge(*stress(planted, 1_000, 3))


@pytest.mark.slow
def test_300_000_calls_of_threads_scopes_reloads_and_compile_failures(planted: Planted) -> None:
    events, wrong, raised = stress(planted, 300_000, 0)
    judge(events, wrong, raised)
    assert events["calls"] >= 300_000


def test_the_judge_sees_a_call_that_another_line_served(planted: Planted) -> None:
    """A judge that accepted every result would find nothing above."""
    example = Example(8, False)
    assert example.serving((example.x * 3,)) == {"triton"} and example.serving((example.x,)) == set()
    with ferryman.use("torch"):
        assert example.serving(example.outputs(False)) >= {"torch"}

"""Candidates of silu_mul that are slow, wrong, hang or crash; as a script, a tuner's worker process that has them."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.dispatch import registry
from ferryman.dispatch.lockfile_entry import MOST_NOISE
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import clock, contender, grid
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.tune import right

if __name__ == "__main__":  # a script's path has its own folder alone
    sys.path.insert(0, str(Path(__file__).parents[2]))
from tests import lines

NAMES = ("slow", "wrong", "crash", "hang", "raises", "late", "forms", "noted", "killed")
LINES = {name: Implementation(op="silu_mul", name=name, where="nowhere:none") for name in NAMES}
LINES["forms"] = dataclasses.replace(LINES["forms"], configurations="tests.unit.tune_planted:forms_of")


def _right(gate: Tensor, up: Tensor, *_: Any) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _slow(*args: Any) -> Tensor:
    time.sleep(2e-3)
    return _right(*args)


def _crash(*args: Any) -> Tensor:
    sys.stderr.write("something about a fault\n")
    sys.stderr.flush()
    os._exit(11)


def _hang(*args: Any) -> Tensor:
    time.sleep(600)
    return _right(*args)


def _raise(*args: Any) -> Tensor:
    raise RuntimeError("no room")


def forms_of(gate: Tensor, up: Tensor, target: Target) -> dict[str, float]:
    """What is put first is not the fastest, and what is put last is not worth a measurement."""
    return {"wide": 1.0, "broken": 1.1, "narrow": 1.2, "hopeless": 1.6} if gate.numel() else {}


def _forms(gate: Tensor, up: Tensor, target: Target) -> Tensor:
    if target.configuration == "broken":
        raise RuntimeError("no such registers")
    time.sleep({"": 2e-3, "narrow": 0.0}[target.configuration])
    return _right(gate, up)


def _noted(*args: Any) -> Tensor:
    with open(os.environ["FERRYMAN_TEST_NOTES"], "a") as notes:
        notes.write(f"{os.getpid()} {args[0].numel()}\n")
    return _right(*args)


def _killed(*args: Any) -> Tensor:
    """Something else kills the process, once: the one that runs out of memory, say."""
    mark = Path(os.environ["FERRYMAN_TEST_NOTES"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _right(*args)


class _Late:
    """Right at first; dies in the trials."""

    calls = 0

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        return _crash() if self.calls > 12 else _right(*args)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "slow": _slow,
    "wrong": lambda *args: _right(*args) * 1.1,
    "crash": _crash,
    "hang": _hang,
    "raises": _raise,
    "late": _Late(),
    "forms": _forms,
    "noted": _noted,
    "killed": _killed,
}


def plant(put: Callable[[Any, str, Any], None]) -> None:
    """Put the candidates on the menu, with ``put(object, name, value)``, and make a trial short."""
    one = registry.implementation
    lines.planted(put, {line: KERNELS[name] for name, line in LINES.items()})
    put(registry, "implementation", lambda op, name: LINES[name] if name in LINES else one(op, name))
    backends, probe = registry.backends(), registry.probe
    put(registry, "backends", lambda: {**backends, **dict.fromkeys(NAMES, backends["torch"])})
    put(registry, "probe", lambda name, vendor: () if name in NAMES else probe(name, vendor))
    put(grid, "cases", cases)
    put(right, "standard_case", lambda op: cases_of(op)[0])
    put(clock, "CPU_SECONDS", 1e-3)
    # trials so short on a machine that other tests load are noisy: how much noise is written is another test's
    trials = contender.trials
    put(contender, "trials", lambda *given: None if (noise := trials(*given)) is None else min(noise, MOST_NOISE))


def cases(op: Primitive, size: str, device: torch.device) -> list[Case]:
    return [case for case in registry.evidence(op).cases() if case.tier == "small"][:2]


if __name__ == "__main__":
    from ferryman.porting.tune import worker

    sys.path.append(str(Path(__file__).parents[2]))  # where `tests` is, which "forms" names
    plant(setattr)
    raise SystemExit(worker.main())

"""Errors planted in the compiled assembly of real kernels: what runs them and how they count as found.

A `Subject` is an implementation on one case; a `Plant` is a text edit of one of its kernels. The edited kernel runs on
the simulator; it is found by the sanitizer,
    by an output beyond the bound that the parity check derives from the op's float64
oracle, or by the simulator refusing the launch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ferryman.backends.simulator import device
from ferryman.backends.simulator.findings import Finding
from ferryman.backends.simulator.numerics import Assumptions
from ferryman.backends.simulator.program import Program
from ferryman.device_profiles import Profile, profile
from ferryman.dispatch import registry
from ferryman.dispatch.select import target_of
from ferryman.errors import SimulationError
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging import gates, hygiene
from ferryman.porting.judging.prepared import Prepared, prepare
from ferryman.porting.running import simulated_route
from tests.lines import serving

CPU = torch.device("cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# what must find an error: the numbers, or a finding of the sanitizer
NUMBERS, RACE, WAIT, BOUNDS, UNSET = "numbers", ("race",), ("missing-wait",), ("out-of-bounds",), ("uninitialised",)
# lines of assembly that many kernels have
NOTHING = "s_nop 0"
SUM = r"v_add_f32_dpp"  # the first line of a sum over a wave
STEP = r"(v_add_f32_dpp v\d+, v\d+, v\d+) row_shr:{} (.*)"
#: an edited loop may not end: ten times what the longest of these kernels takes
BUDGET = 3_000_000


class PlantError(Exception):
    """An edit that does not fit the assembly: the compiler's text has changed."""


@dataclass(frozen=True)
class Subject:
    op: str
    backend: str
    dtype: torch.dtype
    case: str
    device: str = "mi300x"

    def __str__(self) -> str:
        return f"{self.device}-{self.op}-{self.backend}-{str(self.dtype).removeprefix('torch.')}-{self.case}"


@dataclass(frozen=True)
class Plant:
    """In the kernel whose name matches `kernel`, the `which`-th match of `old` (a regular expression on whole lines)
    becomes `new` (as in `re.sub`). `after`: only matches behind the first line that matches it. count: how many are
    replaced.

    shows: "numbers", or the sanitizer's kinds of which at least one must be reported.
    """

    subject: Subject
    name: str
    old: str
    new: str
    shows: str | tuple[str, ...]
    kernel: str = ""
    which: int = 0
    after: str = ""
    count: int = 1

    def __str__(self) -> str:
        return f"{self.subject}: {self.name}"

    def edit(self, text: str) -> str:
        """Raises PlantError where the text has no such line."""
        start = 0
        if self.after:
            anchor = re.search(rf"^\s*{self.after}.*$", text, re.MULTILINE)
            if anchor is None:
                raise PlantError(f"{self}: no line matches {self.after!r}")
            start = anchor.end()
        # The replaced text is one line, or several where the pattern spans them; a trailing comment goes with it.
        pattern = re.compile(rf"^[ \t]*{self.old}[ \t]*(?:;.*)?$", re.MULTILINE)
        matches = list(pattern.finditer(text, start))
        wanted = (
            matches[self.which : self.which + self.count] if self.which >= 0 else matches[self.which :][: self.count]
        )
        if len(wanted) < self.count:
            raise PlantError(f"{self}: {len(matches)} lines match {self.old!r}, number {self.which} is needed")
        for match in reversed(wanted):
            changed = "\t" + match.expand(self.new)
            if changed.strip() == match.group(0).strip():
                raise PlantError(f"{self}: the edit changes nothing in {match.group(0).strip()!r}")
            text = text[: match.start()] + changed + text[match.end() :]
        return text


@dataclass(frozen=True)
class Outcome:
    findings: tuple[Finding, ...]
    reason: str | None  # what the gates say of the numbers, None where they pass
    refused: str | None = None  # the simulator's own error

    @property
    def kinds(self) -> set[str]:
        return {f.kind for f in self.findings}


@functools.cache
def prepared_for(subject: Subject) -> Prepared:
    primitive = registry.primitive(subject.op)
    case = next(c for c in cases_of(primitive, "small") if c.name == subject.case)
    return prepare(primitive, case, subject.dtype, CPU)


@contextmanager
def edited(change: Callable[[str, str], str]) -> Iterator[None]:
    """Every kernel that is decoded passes through change(text, kernel's name)."""
    original = device._decoded

    def decoded(text: str, name: str, arch: str, assumptions: Assumptions) -> Program:
        return original(change(text, name), name, arch, assumptions)

    device._decoded = decoded  # type: ignore[assignment]
    try:
        yield
    finally:
        device._decoded = original


def run(subject: Subject, change: Callable[[str, str], str] = lambda text, name: text) -> Outcome:
    """One run of the implementation's own launcher with its kernels' assembly changed, judged as the parity check
    does it."""
    prepared = prepared_for(subject)
    implementation = serving(subject.op, subject.backend)
    known: Profile = profile(subject.device)
    with simulated_route.on(known) as simulator, edited(change):
        simulator.budget = BUDGET
        try:
            launcher = registry.launcher(implementation)
            runs = hygiene.run(prepared.primitive, launcher, prepared.args, target_of(known), CPU, times=1)
        except SimulationError as error:
            return Outcome(tuple(simulator.take()), None, str(error))
        findings = tuple(simulator.take())
    judged: dict[str, Any] = gates.judge(prepared, implementation, runs)
    return Outcome(findings, judged["reason"])


def run_planted(plant: Plant) -> Outcome:
    """Raises PlantError where no kernel has the text."""
    changed: list[str] = []

    def change(text: str, name: str) -> str:
        if not re.search(plant.kernel, name):
            return text
        changed.append(name)
        return plant.edit(text)

    outcome = run(plant.subject, change)
    if not changed:
        raise PlantError(f"{plant}: no kernel's name matches {plant.kernel!r}")
    return outcome

"""What the mutants of one kernel share: cells and draws, made ready once, and the right kernel's results on them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ferryman.dispatch import registry
from ferryman.dispatch.select import View, refusals, target_of
from ferryman.errors import UnknownName
from ferryman.ops.domain import Sizes
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import STORAGE_DTYPES, Case, TensorSpec
from ferryman.porting.bench.grid import on_meta
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.cases import Arguments, arguments, cases_of
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import Prepared, prepare
from ferryman.porting.mutate import sources, units
from ferryman.porting.selftest.judging import Outputs, Setting, aligned, call, look
from ferryman.porting.selftest.report import DRAWS

_TEMPLATES = 10  # on a GPU every shape may be a compilation
_DRAWN_BY = 7_310_000  # a seed that no check uses
_MOST_LINES = 3000  # of kernels, that a draw may execute in the interpreter: 200 us each, for every edit that survives
_SMALL = Sizes(  # of draws there
    rows=(0, 1, 2, 3, 5),
    width=(0, 1, 2, 3, 7, 16, 31, 64, 65, 127, 128),
    depth=(0, 1, 2, 5, 16, 37, 64),
    batch=(0, 1, 2),
    groups=(1, 2),
    per_group=(1, 2),
    queries=(0, 1, 2, 7, 16, 17),
    keys=(0, 1, 3, 16, 19),
    head_dim=(1, 2, 8, 16, 37, 64),
)
Lines = frozenset[tuple[str, int]] | units.Units | None  # (file inside the package, line), or what was launched


@dataclass
class Draw:
    """One point of an op's domain that the judge does not use: the arguments, and what the right kernel makes of
    them."""

    name: str
    args: Arguments
    right: Outputs
    lines: Lines


class Cells:
    """The cells of one op at one seed, each made ready once, and the right kernel's results on them.

    line: of those that it serves.
    """

    def __init__(self, op: str, setting: Setting, seed: int, backend: str, line: Implementation | None = None) -> None:
        self.line = line
        self.primitive, self.setting, self.seed, self.backend = registry.primitive(op), setting, seed, backend
        self.cases = cases_of(self.primitive)
        self.target = target_of(setting.simulate or setting.profile)
        self._ready: dict[tuple[str, torch.dtype], Prepared] = {}
        self._right: dict[tuple[str, torch.dtype, int], tuple[Outputs, Lines]] = {}
        self._judged = set[tuple[str, torch.dtype, int]]()
        self._draws: dict[int, list[Draw]] = {}
        self._seconds: dict[tuple[str, torch.dtype], float] = {}
        self.seconds = 0.0  # of the right kernel's runs
        self.budget = math.inf  # process seconds that the right kernel has left for what survivors need

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first, where most bugs show."""
        if (
            self.backend == "triton"
            and self.setting.simulate
            and sources.multiplies(self.primitive.name, self.line and self.line.name)
        ):
            return (torch.float16, torch.float32)
        return tuple(reversed(STORAGE_DTYPES))

    def prepared(self, case: Case, dtype: torch.dtype) -> Prepared:
        key = case.name, dtype
        if key not in self._ready:
            self._ready[key] = prepare(self.primitive, case, dtype, self.setting.device, self.seed)
        return self._ready[key]

    def order(self) -> list[tuple[Case, torch.dtype]]:
        """Every cell: an aligned case, then the others, small ones first, in the first dtype; then in the others. Where
        the right kernel has run on some, these come first, by their cost, then small ones of any dtype."""
        usual = [c for c in self.cases if aligned(self.primitive, c)][:1]
        rest = sorted((c for c in self.cases if c not in usual), key=elements)
        pairs = [(case, dtype) for dtype in self.dtypes for case in [*usual, *rest] if self._serves(case, dtype)]
        known = self._seconds
        if known:
            last = max(known.values())
            pairs.sort(key=lambda c: known.get((c[0].name, c[1]), last + 1 + elements(c[0])))
        return pairs

    def _serves(self, case: Case, dtype: torch.dtype) -> bool:
        if self.line is None:
            return True
        profile, given = self.setting.profile, on_meta(self.primitive, case, dtype)
        switches = {n: case.args[n] for n in self.primitive.names if n.startswith("need_") and n in case.args}
        args = tuple(switches.get(n, a) for n, a in zip(self.primitive.names, given, strict=True))
        return not refusals(self.line, View.of(self.primitive, args, profile), profile, absent=True)

    def unknown(self, case: Case, dtype: torch.dtype) -> bool:
        """Whether the budget did not reach this cell."""
        return self.budget <= 0 and (case.name, dtype) not in self._seconds

    def right(self, kernel: Callable[..., Any], case: Case, dtype: torch.dtype) -> tuple[Outputs, Lines]:
        """(the right kernel's outputs on a cell, the lines of source that it reaches; None where not known)."""
        key = case.name, dtype, id(kernel)
        if key not in self._right:
            args, began = self.prepared(case, dtype).args, time.process_time()
            self._right[key] = self._traced(kernel, args)
            self._spent(began)
            self._seconds.setdefault((case.name, dtype), time.process_time() - began)
        return self._right[key]

    def _spent(self, began: float) -> None:
        self.seconds += time.process_time() - began
        self.budget -= time.process_time() - began

    def _traced(self, kernel: Callable[..., Any], args: Arguments, most: float = math.inf) -> tuple[Outputs, Lines]:
        """A run's outputs, and the lines of watched kernels that it executes. Raises TooLong where those are over
        ``most``."""
        if self.backend == "hip":
            return units.launched(lambda: call(self.primitive, kernel, args, self.setting, self.target))
        seen = sources.Reached(most)
        sources.watch(seen)
        try:
            outputs = call(self.primitive, kernel, args, self.setting, self.target)
        finally:
            sources.watch(None)
        return outputs, frozenset(seen.lines) if self.backend == "triton" and self.setting.simulate else None

    def draws(self, kernel: Callable[..., Any], line: Implementation) -> list[Draw]:
        """DRAWS points of the op's domain that ``line`` serves, none of them too long for an interpreter; fewer where
        neither fuzzing nor a case of the op gives so many."""
        if id(kernel) not in self._draws:
            began, given = time.process_time(), self.budget
            draws: list[Draw] = []
            op, setting = self.primitive, self.setting
            for number, (case, dtype) in enumerate(self._drawn()):
                if time.process_time() - began > given or len(draws) == DRAWS:
                    break
                if dtype not in self.dtypes:
                    continue
                args = arguments(case, op, dtype, _DRAWN_BY + number, setting.device)
                if refusals(line, View.of(op, args.values, setting.profile), setting.profile, absent=True):
                    continue
                try:
                    outputs, lines = self._traced(kernel, args, _MOST_LINES)
                except sources.TooLong:
                    continue
                if outputs is not None:
                    draws.append(Draw(f"draw {number} {dtype_name(dtype)}", args, outputs, lines))
            self._draws[id(kernel)] = draws
            self._spent(began)
        return self._draws[id(kernel)]

    def _drawn(self) -> Iterator[tuple[Case, torch.dtype]]:
        """Points of the domain; then, for a line that serves few of them, the op's cases with other contents."""
        op, compiled = self.primitive, self.setting.device.type == "cuda"
        small = None if compiled else _SMALL
        # an op of another package may have nothing that is drawn
        with contextlib.suppress(UnknownName):
            if compiled or self.backend == "hip":
                yield from fuzz.variants(op, 2 * _TEMPLATES, DRAWS // _TEMPLATES, _DRAWN_BY, small)
            else:
                yield from fuzz.cases(op, 8 * DRAWS, _DRAWN_BY, small)
        own = sorted((cell for cell in self.order() if elements(cell[0])), key=lambda cell: elements(cell[0]))
        for number in range(2 * DRAWS if own else 0):
            case, dtype = own[number % len(own)]
            yield fuzz.refilled(op, case, dtype, f"own_{number}", _DRAWN_BY), dtype

    def warm(
        self, kernel: Callable[..., Any], line: Implementation, first: int | None, budget: float = math.inf
    ) -> None:
        """What several mutants of one kernel need: the first cells' results, or (None) every one's, and the draws, as
        far as ``budget`` process seconds go, half of them for either. Raises RuntimeError where the judge fails the
        kernel itself."""
        self.budget = budget / 2
        for case, dtype in self.order()[:first]:
            if self.budget <= 0:
                break
            outputs, _ = self.right(kernel, case, dtype)
            if outputs is not None:
                self._must_be_right(kernel, line, case, dtype)
            if first is not None:
                self.prepared(case, dtype).reference(frozenset(line.roundings))
        if first is None:
            self.budget = max(self.budget, 0.0) + budget / 2
            self.draws(kernel, line)

    def _must_be_right(self, kernel: Callable[..., Any], line: Implementation, case: Case, dtype: torch.dtype) -> None:
        """Raises RuntimeError where the judge fails the unmutated kernel on a cell: each mutant that comes to it would
        count as caught."""
        key = case.name, dtype, id(kernel)
        if key in self._judged:
            return
        seen = look(kernel, line, self.prepared(case, dtype), self.setting, ())
        if seen.flagged:
            where = f"{self.primitive.name}, {line.name}, {case.name} {dtype_name(dtype)}"
            raise RuntimeError(f"{where}: the judge fails the unmutated kernel, so no mutant: {seen.cell.reason}")
        self._judged.add(key)


def elements(case: Case) -> int:
    return sum(math.prod(a.shape) for a in case.args.values() if isinstance(a, TensorSpec))

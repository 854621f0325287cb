"""The mutants of every op, made by `porting/mutate`: edits of its Triton source, rules over its results and
arguments, and
its definition computed wrongly. Nothing here names an op."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive, TensorSpec
from ferryman.porting.inputs.cases import arguments, as_tuple, cases_of
from ferryman.porting.inputs.fills import DTYPES
from ferryman.porting.mutate import float32, rewrites, rules, sources, units
from ferryman.porting.mutate.edits import Edit, spread
from ferryman.porting.mutate.rule import Rule

Kernel = Callable[..., Any]
Backend = Literal["torch", "triton", "hip"]
AMD = "mi300x"  # the device that edits of C++ are compiled for, and simulated on
EDITS = 64  # of one op's source, unless every one is asked for
_CPU = torch.device("cpu")
_SAYS_WHERE = 24  # characters of an edit
_UNORDERED = "Triton's interpreter executes a statement for all lanes before the next: a barrier orders nothing there"


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    operator: the rule that made it. make: a kernel without memory of earlier runs. right: what it is a mutant of. line:
    the declarations that it is judged under. gpu: why it needs one, if so. edit: of the source, for backends "triton"
    and "hip".
    """

    op: str
    name: str
    operator: str
    note: str
    make: Callable[[], Kernel]
    right: Callable[[], Kernel]
    line: Implementation
    backend: str = "torch"
    gpu: str | None = None
    edit: Edit | None = None

    @property
    def key(self) -> str:
        return f"{self.op}.{self.backend}.{self.name}"

    @property
    def place(self) -> str | None:
        """The line of source that is edited, where a short edit may stand in several."""
        if self.edit is None or len(self.edit.old) >= _SAYS_WHERE:
            return None
        text = sources.text_of(self.edit.file) if self.edit.file.endswith(".py") else units.text_of(self.edit.file)
        return " ".join(text.splitlines()[self.edit.line - 1].split())


def torch_line(op: str) -> Implementation:
    """The op's line through PyTorch that serves every call; its definition where there is none."""
    lines = registry.implementations(op)
    return next((line for line in reversed(lines) if line.backend == "torch"), lines[-1])


def nothing_declared(op: str) -> Implementation:
    return Implementation(op=op, name="torch", where="selftest:float32")


def used(op: str) -> frozenset[str]:
    """The ATen operations that an op's definition calls, over a part of its cases."""
    return _seen(op)[0]


@functools.lru_cache(maxsize=None)
def _seen(op: str) -> tuple[frozenset[str], frozenset[str]]:
    """(`used`, the arguments and results that are floating tensors in some case)."""
    known = registry.primitive(op)
    mode, real = rewrites.Rewritten(), set[str]()
    cases = cases_of(known)
    for case in cases:
        specs = {n: a.dtype for n, a in case.args.items() if isinstance(a, TensorSpec)}
        real |= {n for n, dtype in specs.items() if dtype == "storage" or DTYPES[dtype].is_floating_point}
    for case in [*cases[:6], *cases[6::4]]:
        values = arguments(case, known, torch.float32, 0, _CPU).values
        with torch.no_grad(), mode:
            outputs = as_tuple(known.body(*values))
        tensors = itertools.chain(zip(known.names, values, strict=True), zip(known.outputs, outputs, strict=True))
        real |= {n for n, t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return frozenset(mode.used), frozenset(real)


def _of_rules(known: Primitive) -> list[Mutant]:
    op, line = known.name, torch_line(known.name)
    right = functools.partial(registry.launcher, line)
    mutants = []
    for one in rules.RULES:
        for suffix in [suffix for suffix, _ in one.make(known, lambda: None)]:
            if one.real and suffix not in _seen(op)[1]:
                continue

            def make(one: Rule = one, suffix: str = suffix) -> Kernel:
                return next(k for s, k in one.make(known, right()) if s == suffix)

            name = f"{one.name}.{suffix}" if suffix else one.name
            mutants.append(Mutant(op, name, one.operator, one.models, make, right, line, gpu=one.gpu))
    plain = functools.partial(float32.in_float32, known)
    for name, operator, note, _ in float32.definition_rules(known, set(used(op))):

        def bent(name: str = name) -> Kernel:
            return next(k for n, _, _, k in float32.definition_rules(known, set(used(op))) if n == name)

        mutants.append(Mutant(op, name, operator, note, bent, plain, nothing_declared(op)))
    return mutants


def _of_source(op: str, most: int | None, seed: int, implementation: str | None) -> list[Mutant]:
    """Edits of the op's Triton source."""
    edits = sources.candidates(op, implementation)
    chosen = _some(list(edits), op, most, seed)
    mutants: list[Mutant] = []
    for line in sources.lines_of(op, implementation):
        make, right = functools.partial(sources.kernel, line), functools.partial(registry.launcher, line)
        mutants += edits_of(op, line, [edit for edit in chosen if edits[edit] is line], make, right)
    return mutants


def _of_units(op: str, most: int | None, seed: int) -> list[Mutant]:
    """Edits of the op's C++."""
    line = units.line_of(op)
    if line is None:
        return []
    make, right = functools.partial(units.kernel, line), functools.partial(units.right, line, profile(AMD))
    return edits_of(op, line, _some(units.candidates(op), op, most, seed), make, right)


def _some(possible: Sequence[Edit], op: str, most: int | None, seed: int) -> Sequence[Edit]:
    return possible if most is None else spread(possible, most, f"{seed}/{op}")


def edits_of(
    op: str, line: Implementation, chosen: Sequence[Edit], make: Callable[[Edit], Kernel], right: Callable[[], Kernel]
) -> list[Mutant]:
    """Mutants of a line, each an edit that ``make`` makes a kernel of."""
    mutants: list[Mutant] = []
    names: dict[str, int] = {}
    for edit in chosen:
        stem = f"{edit.function}.{edit.operator.replace(' ', '_')}.{edit.tag}"
        names[stem] = names.get(stem, 0) + 1
        name = stem if names[stem] == 1 else f"{stem}.{names[stem]}"
        planted = functools.partial(make, edit)
        gpu = _UNORDERED if line.backend == "triton" and edit.operator == "wait removed" else None
        mutants.append(Mutant(op, name, edit.operator, edit.note, planted, right, line, line.backend, gpu, edit))
    return mutants


def catalogue(
    ops: Sequence[str],
    most: int | None = EDITS,
    seed: int = 0,
    backend: Backend | None = None,
    implementation: str | None = None,
) -> list[Mutant]:
    """The mutants of the ops: all of the rules, and ``most`` edits of each op's source, drawn by the seed (None: all).
    backend: of that one; None: of all but "hip", whose edits only who asks for them waits for. implementation: edits of
    that Triton line alone; None: of the one that serves every call, and its sisters in the same files."""
    mutants: list[Mutant] = []
    for op in ops:
        mutants += _of_rules(registry.primitive(op)) if backend in (None, "torch") else []
        mutants += _of_source(op, most, seed, implementation) if backend in (None, "triton") else []
        mutants += _of_units(op, most, seed) if backend == "hip" else []
    return mutants

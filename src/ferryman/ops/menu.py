"""The form of a menu line: an implementation as data. A menu imports no toolchain; kernels load at the first call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ferryman.ops.clauses import Clause


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    op, backend: names. where: "package.module:function". when: every clause must hold. accumulation: its declared
    class (docs/parity.md). roundings: the permitted rounding points that it uses. deterministic: bitwise equal runs;
    "asked": where torch.use_deterministic_algorithms asks for them (``reads`` names it then).
    traced: "package.module:function" for torch.compile to trace where this implementation would be chosen: the op's
    first output through differentiable ATen calls, or None where it has no such form for a call; called with the
    arguments and the device's features as one string. batch_invariant: a sample gives the same bits alone and in any
    batch (gate G6). replayable: what it launches follows from the call's facts alone (metadata, scalars, the target,
    alignment, and what ``reads`` names: tf32, deterministic), so dispatch may repeat the launches without the launcher.
    configurations: "package.module:function" that ranks the launcher's configurations for a call: it takes the
    launcher's arguments and gives their names (identifiers) with predicted times in any one unit, the least first,
    which is what the launcher takes by itself. It takes another where ``Target.configuration`` names one. None: it has
    one for every call.
    tf32: how float32 operands lose their last 13 bits where torch allows it: rounded ("tf32-rne") or cut ("tf32-rz").
    partial: made for a part of the op's calls, which its clauses name. Preferred, it is tried first; where its clauses
    refuse a call, what runs instead is no fallback, unless it was requested.
    """

    op: str
    backend: str
    where: str
    when: tuple[Clause, ...] = ()
    accumulation: str = "fp32"
    roundings: tuple[str, ...] = ()
    deterministic: bool | Literal["asked"] = True
    traced: str | None = None
    batch_invariant: bool = False
    replayable: bool = False
    reads: tuple[str, ...] = ()
    tf32: str = "tf32-rne"
    configurations: str | None = None
    partial: bool = False

    @property
    def name(self) -> str:
        return self.backend

    def load(self) -> Callable[..., Any]:
        """The kernel's launcher. Raises ImportError where its toolchain is missing."""
        return _function(self.where)

    def load_traced(self) -> Callable[..., Any] | None:
        """What torch.compile traces in the launcher's place, if there is such a form."""
        return None if self.traced is None else _function(self.traced)

    def ranked_configurations(self, args: Sequence[Any], target: Any) -> Mapping[str, float]:
        """Its configurations for a call, the most promising first; empty where there is nothing to choose."""
        return {} if self.configurations is None else _function(self.configurations)(*args, target)


def _function(where: str) -> Callable[..., Any]:
    module, _, function = where.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def menu(package: str, backend: str, ops: str, *, module: str | None = None, when: tuple[Clause, ...] = (),
         accumulation: str = "fp32", roundings: tuple[str, ...] = (), deterministic: bool | Literal["asked"] = True,
         traced: str | None = None, batch_invariant: bool = False, replayable: bool = False,
         reads: tuple[str, ...] = (), tf32: str = "tf32-rne",
         configurations: str | None = None, partial: bool = False) -> tuple[Implementation, ...]:  # fmt: skip
    """Menu lines for several ops of one family: ``ops`` are space-separated names, each a function of the module."""
    where = f"{package}.{module or backend + '_kernels'}"
    form = None if traced is None else f"{where}:{traced}"
    ranking = None if configurations is None else f"{where}:{configurations}"
    return tuple(
        Implementation(
            op, backend, f"{where}:{op}", when, accumulation, roundings, deterministic, form, batch_invariant,
            replayable, reads, tf32, ranking, partial,
        )
        for op in ops.split()
    )  # fmt: skip

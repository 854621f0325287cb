"""The form of a menu line: an implementation as data. A menu imports no toolchain; kernels load at the first call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferryman.ops.clauses import Clause


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    op, backend: names. where: "package.module:function". when: every clause must hold. accumulation: its declared
    class (docs/parity.md). roundings: the permitted rounding points that it uses. deterministic: bitwise equal runs.
    """

    op: str
    backend: str
    where: str
    when: tuple[Clause, ...] = ()
    accumulation: str = "fp32"
    roundings: tuple[str, ...] = ()
    deterministic: bool = True

    @property
    def name(self) -> str:
        return self.backend

    def load(self) -> Callable[..., Any]:
        """The kernel's launcher. Raises ImportError where its toolchain is missing."""
        module, _, function = self.where.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return loaded


def menu(package: str, backend: str, ops: str, *, module: str | None = None, when: tuple[Clause, ...] = (),
         accumulation: str = "fp32", roundings: tuple[str, ...] = (), deterministic: bool = True,
         ) -> tuple[Implementation, ...]:  # fmt: skip
    """Menu lines for several ops of one family: ``ops`` are space-separated names, each a function of the module."""
    where = f"{package}.{module or backend + '_kernels'}"
    return tuple(
        Implementation(op, backend, f"{where}:{op}", when, accumulation, roundings, deterministic) for op in ops.split()
    )

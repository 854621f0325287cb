"""The table of operations: mnemonic -> how its text becomes a step that the machine executes.

The groups are those of the ISA manual: scalar, vector, lanes, LDS, memory, matrix, control. An arch is a set of
mnemonics; what differs between arches stands in `arch.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferryman.backends.simulator.assembly import Instruction
from ferryman.backends.simulator.machine import Machine
from ferryman.backends.simulator.numerics import Assumptions, Mode
from ferryman.errors import UnimplementedInstruction

Step = Callable[[Machine], None]


@dataclass(frozen=True)
class Context:
    """What decoding may depend on besides the instruction."""

    arch: str
    mode: Mode
    assumptions: Assumptions
    symbols: dict[str, int]
    labels: dict[str, int]
    sanitize: bool = True


Decoder = Callable[[Instruction, Context], Step]


@dataclass(frozen=True)
class Operation:
    """``group``: its chapter of the ISA manual. ``ends``: whether it ends a straight run of instructions (branches,
    barriers); such a step returns where to go on."""

    name: str
    group: str
    decode: Decoder
    arches: frozenset[str] | None = None
    ends: bool = False


TABLE: dict[str, Operation] = {}


def register(
    names: str, group: str, *, arches: frozenset[str] | None = None, ends: bool = False
) -> Callable[[Any], Any]:
    """Enter a decoder under each of ``names``. arches: None is every one."""

    def enter(decode: Decoder) -> Decoder:
        for name in names.split():
            if name in TABLE:
                raise ValueError(f"{name} stands in the table already")
            TABLE[name] = Operation(name, group, decode, arches, ends)
        return decode

    return enter


def operation(instruction: Instruction, arch: str, kernel: str) -> Operation:
    """Raises UnimplementedInstruction."""
    entry = TABLE.get(instruction.name)
    if entry is None or (entry.arches is not None and arch not in entry.arches):
        raise UnimplementedInstruction(
            f"{instruction.name} is not implemented for {arch}: {instruction.text} (kernel {kernel}, line "
            f"{instruction.line}); docs/simulator.md lists what is"
        )
    return entry

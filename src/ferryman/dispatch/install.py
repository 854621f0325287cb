"""Makes a family's ops able to dispatch, when its definition has run: their resolvers, and what stands behind
`torch.ops.ferryman`."""

from __future__ import annotations

import sys
from typing import Any

from ferryman import ops
from ferryman.dispatch import plan, registry, state, torch_library
from ferryman.errors import FerrymanError
from ferryman.ops.primitive import Primitive
from ferryman.ops.table import SCHEMAS


def family(package: str) -> None:
    """Enter a family in the catalogue. Raises what is wrong with one of ours; another package's is left out."""
    ops._open()
    registry.enter(package, _install)
    ops._open()


def _install(primitives: tuple[Primitive, ...]) -> None:
    _as_listed(primitives)
    for op in primitives:
        overload = torch_library.overload(op)
        runner = plan._ops[op.name] = plan.Op(op, overload)
        torch_library.register(op, runner.undifferentiated, overload, runner.recipe)
        if registry.family_of(op).ours:
            _show(op)


def _as_listed(primitives: tuple[Primitive, ...]) -> None:
    """What the table says of a family of ours must be there. Raises FerrymanError."""
    known = {op.name for op in primitives}
    of = {registry.family_of(op).name for op in primitives if registry.family_of(op).ours}
    gone = [name for one in of for name in map(_name, SCHEMAS.get(one, ())) if name not in known]
    if gone:
        raise FerrymanError(f"the table of ops has {', '.join(gone)}, and no definition does; run: make docs")


def _name(schema: str) -> str:
    return schema.partition("(")[0]


def _show(op: Primitive) -> None:
    """The op itself in `ferryman.ops`, where importing its family has put a module of the same name."""
    face: Any = getattr(sys.modules[op.body.__module__], op.name, None)
    if getattr(face, "primitive", None) is op and type(vars(ops).get(op.name)) in (type(None), type(sys)):
        setattr(ops, op.name, face)


state.count_settings()

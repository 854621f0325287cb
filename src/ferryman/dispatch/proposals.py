"""What ops may stand for in a model: the answers of every family's ``recognise.py`` (`ferryman.ops.recognition`).

Our families are asked first, then other packages'. One of another package that breaks is left out from then on, and
`ferryman doctor` names it; what the others propose stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

from ferryman.dispatch import foreign, registry
from ferryman.dispatch.registry import Family
from ferryman.errors import STOPS
from ferryman.ops import recognition
from ferryman.ops.recognition import Candidate, Cut, Folding, Gate, Helper, Layer, Recurrence, Routine, Served, Traced

_ANSWERS: dict[str, Any] = {
    "modules": Candidate,
    "blocks": Layer,
    "helpers": Helper,
    "routines": Routine,
    "recurrences": Recurrence,
    "cuts": Cut,
    "functions": Served,
    "followed": FunctionType,
    "methods": Served,
    "gates": Gate,
    "traced": Traced,
    "foldings": Folding,
}


def proposals(question: str, *given: Any) -> list[Any]:
    """What the families' functions of that name answer, one list of all; of mappings the pairs."""
    answers: list[Any] = []
    for family, module in list(_recognisers().items()):
        if not hasattr(module, question):
            continue
        if family.ours:
            answers += _listed(getattr(module, question)(*given))
            continue
        try:
            own = _listed(getattr(module, question)(*given))
            _require(question, own, answers)
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - another package may raise anything
            foreign.leave_out("recognise", family.name, error)
            del _recognisers()[family]
        else:
            answers += own
    return answers


def ask() -> None:
    """Ask all that takes no arguments, so that `registry.broken` has the packages that break there."""
    for question in (
        "functions",
        "followed",
        "methods",
        "helpers",
        "recurrences",
        "gates",
        "parts",
        "traced",
        "foldings",
        "rules",
    ):
        proposals(question)


def _listed(answer: Any) -> list[Any]:
    return list(answer.items() if isinstance(answer, Mapping) else answer)


def _require(question: str, own: list[Any], before: list[Any]) -> None:
    """Raises what is wrong with another package's answers: their type, an unknown op, an expression that is none, a
    function that is taken."""
    kind = _ANSWERS.get(question)
    for answer in own:
        key, value = answer if isinstance(answer, tuple) else (None, answer)
        if key is not None and any(key == taken for taken, _ in before):
            name = getattr(key, "__name__", key)
            raise ValueError(f"{question}() has {name}, which another op stands for; required: a new one")
        if kind is None:
            continue
        if not isinstance(value, kind):
            raise TypeError(f"{question}() gives {type(value).__name__}; required: {kind.__name__}")
        registry.primitive(value.op)
        one, more = getattr(value, "expression", ""), getattr(value, "expressions", ())
        for expression in (one, getattr(value, "added", ""), *more):
            if expression:
                compile(expression, f"<{question} of {value.op}>", "eval")


@lru_cache(maxsize=1)
def _recognisers() -> dict[Family, ModuleType]:
    """The ``recognise`` modules of all families that have ops and such a file."""
    able = {registry.family_of(op) for op in registry.primitives().values()}
    modules = {}
    for family in registry.families():
        where = f"{family.package}.recognise"
        try:
            if family in able and find_spec(where) is not None:
                if not family.ours:
                    _name_ops(family)
                modules[family] = import_module(where)
        except BaseException as error:
            if family.ours or isinstance(error, STOPS):
                raise
            foreign.leave_out("recognise", family.name, error)
    return modules


def _name_ops(family: Family) -> None:
    """Let expressions name another package's ops."""
    for op in registry.primitives().values():
        if registry.family_of(op) == family:
            recognition.name_op(op.name, getattr(import_module(op.body.__module__), op.name))

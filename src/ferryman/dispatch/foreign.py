"""What other packages break: why each part was left out, whose function raised, and what an op's record must hold.

Another package may raise anything, `SystemExit` and pytest's ``Skipped`` too. Only `errors.STOPS` always goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ferryman.backends.base import Artefact, Backend
from ferryman.errors import STOPS, ArgumentError, CompileError, EvidenceError, FerrymanError, PackageError
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive

if TYPE_CHECKING:
    from ferryman.ops.evidence import Evidence

_broken: dict[str, str] = {}


def broken() -> dict[str, str]:
    """What was left out so far, with the reason. The mapping itself, which grows."""
    return _broken


def leave_out(kind: str, name: str, error: BaseException) -> None:
    """Name what broke of another package: `broken` lists it."""
    _broken[f"{kind} {name}"] = reason_of(error)


def reason_of(error: BaseException) -> str:
    """An error in one line: its type, and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


@contextmanager
def blamed(op: str, package: str | None) -> Iterator[None]:
    """Raise PackageError for what another package's code raises in this block, with the function that raised.

    The errors of Ferryman go on as they are. package: None for an op of ours, whose errors all go on.
    """
    try:
        yield
    except BaseException as error:
        if package is None or isinstance(error, (FerrymanError, *STOPS)):
            raise
        where = _function_of(error.__traceback__, package)
        raise PackageError(op, where or f"a function that {package} gave to Ferryman", reason_of(error)) from error


def _function_of(trace: TracebackType | None, package: str) -> str:
    """The innermost function of a package in a traceback, as module:function; "" where none is there."""
    where = ""
    while trace is not None:
        module, code = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_frame.f_code
        if module == package or module.startswith(f"{package}."):
            where = f"{module}:{getattr(code, 'co_qualname', code.co_name)}, line {trace.tb_lineno},"
        trace = trace.tb_next
    return where


def guarded(evidence: Evidence, package: str) -> Evidence:
    """Another package's evidence. Where its ``cases`` raises or gives no cases, the op has none and is named."""
    given = evidence.cases

    def cases() -> Sequence[Case]:
        try:
            with blamed(evidence.op, package):
                own = tuple(given())
                _require_cases(evidence.op, own)
        except FerrymanError as error:
            leave_out("evidence", evidence.op, error)
            return ()
        return own

    return dataclasses.replace(evidence, cases=cases)


def _require_cases(op: str, given: Sequence[Any]) -> None:
    for one in given:
        if not isinstance(one, Case):
            raise EvidenceError(f"{op}: its cases() gives {type(one).__name__}; required: Case")


class Backends(dict[str, Backend]):
    """Backends by name. A menu line may name one that is not there: then it serves no device, and the others go on."""

    def __missing__(self, name: str) -> Backend:
        return NoBackend(name)


@dataclasses.dataclass
class NoBackend:
    """Stands for a backend that no package has, or that was left out."""

    name: str
    vendors: frozenset[str] = frozenset()

    def probe(self, vendor: str) -> tuple[str, ...]:
        return (f"no installed package has a backend {self.name!r}; ferryman doctor says what was left out",)

    def compile(self, source: Any, options: Any, arch: str) -> Artefact:
        raise CompileError(self.name, "a kernel", arch, "; ".join(self.probe("")))


def backend(given: Any) -> Backend:
    """What the class of a backend gave. Raises TypeError where it is none."""
    if not isinstance(given, Backend):
        raise TypeError(f"it gives {type(given).__name__}; required: an object with name, vendors, probe and compile")
    return given


def require_arguments(package: str, op: Primitive, lines: Iterable[Implementation]) -> None:
    """Raises ArgumentError for a line with a clause that reads an argument which the op lacks."""
    for line in lines:
        for clause in (*line.when, *line.leads, *line.differentiable_when):
            for name in clause.args:
                if name not in op.names:
                    what = f"an argument that its line {line.name} reads (clause: {clause})"
                    raise ArgumentError(f"{package}, op {op.name}", what, name, f"one of {', '.join(op.names)}")

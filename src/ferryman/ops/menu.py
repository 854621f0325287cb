"""The form of a menu line: an implementation as data. A menu imports no toolchain; kernels load at the first call."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ferryman.ops.clauses import Clause

# A backend (or the package that provides it), and after a dot what tells a line from its sisters: "triton.hopper".
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}(\.[a-z0-9][a-z0-9_]{0,63})?")


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an op.

    op: its name. name: unique within the op; a request, a profile's preference and a lockfile name a line by it.
    backend: what compiles and launches it; by default the name's part before the dot. A request by backend takes any
    line of that backend, in the menu's order. where: "package.module:function"; `menu` completes what a line of a
    package leaves out of ``op`` and ``where``. when: every clause must hold.
    accumulation: its declared class (docs/parity.md). roundings: the permitted rounding points that it uses.
    deterministic: bitwise equal runs; "asked": where torch.use_deterministic_algorithms asks for them (``reads`` names
    it then). batch_invariant: a sample gives the same bits alone and in any batch (gate G6). replayable: what it
    launches follows from the call's facts alone (metadata, scalars, the target, alignment, and what ``reads`` names:
    tf32, deterministic), so dispatch may repeat the launches without the launcher.
    traced, configurations: a function of the same module, or "package.module:function". ``traced`` is what
    torch.compile traces: the op's first output through differentiable ATen calls, or None for a call that is not its
    own; called with the arguments and the device's features as one string. Lines are tried in the profile's order, to
    the first without such a form that serves every call.
    differentiable: such a function, too, on an accelerator: PyTorch's own call with the op's results, which autograd
    knows. It runs in the place of the launcher where no gradient is needed, and of the launcher and a Function around
    it where a line of the same name would be chosen for the backward; it takes the launcher's arguments. Where a
    gradient is asked for and the call's tensors are small (the profile's thresholds.autograd.bytes) the line goes
    before all others, whatever would be chosen for the backward. Of an op whose first output may be asked for alone
    it gives that one, in a tuple, and serves no other calls. differentiable_when: calls for which PyTorch's own
    gradient, too, rounds as the op's does, or which need none; all must hold.
    ``configurations`` ranks the launcher's configurations for a call: it takes the launcher's arguments and gives their
    names (identifiers) with predicted times in any one unit, the least first, which is what the launcher takes by
    itself. It takes another where ``Target.configuration`` names one. None: it has one for every call.
    prepare: such a function, with the launcher's arguments: it compiles what calls like this need, and says whether it
    had to. The line has the clause `prepared` and serves nothing before; no call compiles.
    tf32: how float32 operands lose their last 13 bits where torch allows it: rounded ("tf32-rne") or cut ("tf32-rz").
    partial: made for a part of the op's calls, which its clauses name. Preferred, it is tried first; where its clauses
    refuse a call, what runs instead is no fallback, unless it was requested.
    leads: it goes before the profile's order for calls where all of these hold, such as sizes from which a library's
    tiles pass ours. Times that were measured for a call, or are modelled, go before it.
    kin: lines of one backend that name the same move the same bytes, each in a part of the calls. Where no region near
    was measured with one, the time of another stands for it.
    composed: writes intermediate results of the size of its work to memory. Whatever else can serve a call goes before.
    """

    op: str
    name: str
    where: str = ""
    backend: str = ""
    when: tuple[Clause, ...] = ()
    accumulation: str = "fp32"
    roundings: tuple[str, ...] = ()
    deterministic: bool | Literal["asked"] = True
    traced: str | None = None
    differentiable: str | None = None
    differentiable_when: tuple[Clause, ...] = ()
    prepare: str | None = None
    batch_invariant: bool = False
    replayable: bool = False
    reads: tuple[str, ...] = ()
    tf32: str = "tf32-rne"
    configurations: str | None = None
    partial: bool = False
    leads: tuple[Clause, ...] = ()
    kin: str = ""
    composed: bool = False

    def __post_init__(self) -> None:
        if not self.backend:
            object.__setattr__(self, "backend", self.name.partition(".")[0])

    def answers(self, request: str) -> bool:
        """Whether a request names this line, or its backend."""
        return request in (self.name, self.backend)

    def load(self) -> Callable[..., Any]:
        """The kernel's launcher. Raises ImportError where its toolchain is missing, AttributeError where it is not
        there."""
        return _function(self.where)

    def load_traced(self) -> Callable[..., Any] | None:
        """What torch.compile traces in the launcher's place, if there is such a form."""
        return None if self.traced is None else self._beside(self.traced)

    def load_differentiable(self) -> Callable[..., Any] | None:
        """PyTorch's own differentiable call for it, if there is one."""
        return None if self.differentiable is None else self._beside(self.differentiable)

    def load_prepare(self) -> Callable[..., Any]:
        """What compiles it for a call, where it has that."""
        assert self.prepare is not None, f"{self.op} ({self.name}) names no prepare"
        return self._beside(self.prepare)

    def ranked_configurations(self, args: Sequence[Any], target: Any) -> Mapping[str, float]:
        """Its configurations for a call, the most promising first; empty where there is nothing to choose."""
        return {} if self.configurations is None else self._beside(self.configurations)(*args, target)

    def _beside(self, function: str) -> Callable[..., Any]:
        return _function(function if ":" in function else f"{self.where.partition(':')[0]}:{function}")


def _function(where: str) -> Callable[..., Any]:
    module, _, function = where.partition(":")
    kernels = importlib.import_module(module)
    if not hasattr(kernels, function):
        raise AttributeError(f"{kernels.__file__ or module} has no function {function}, which the menu names")
    loaded: Callable[..., Any] = getattr(kernels, function)
    return loaded


def menu(package: str, *lines: Implementation) -> tuple[Implementation, ...]:
    """The lines of a family, whose package is named once.

    A line may name several ops, separated by spaces: it is one line for each of them. Of ``where`` it may give the
    package's own module ("hopper_kernels", by default "BACKEND_kernels"), the function (":recurrent", by default the
    op's name), or both ("hopper_kernels:forward").
    """
    return tuple(
        dataclasses.replace(line, op=op, where=_complete(package, line, op)) for line in lines for op in line.op.split()
    )


def _complete(package: str, line: Implementation, op: str) -> str:
    module, _, function = line.where.partition(":")
    return f"{package}.{module or line.backend + '_kernels'}:{function or op}"


def named(lines: Sequence[Implementation], names: Sequence[str]) -> list[Implementation]:
    """The lines that names ask for, in their order: a full name is one line, a backend's is all of its lines.

    A line that is composed comes after the others of its backend.
    """
    chosen: dict[str, Implementation] = {}
    for name in names:
        for line in sorted((line for line in lines if line.answers(name)), key=lambda line: line.composed):
            chosen.setdefault(line.name, line)
    return list(chosen.values())

"""A function that is not ours, as a kernel under test: how it is found, how it is called, what it may return."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
from torch import Tensor

from ferryman import ops
from ferryman.backends import triton_bfloat16
from ferryman.backends.triton import interpreting
from ferryman.device_profiles import profile
from ferryman.device_profiles.schema import ACCUMULATION
from ferryman.errors import ArgumentError, BackendUnavailable, KernelError, UnknownName
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.judging import parity
from ferryman.porting.judging.results import Cell, Gate, GateName
from ferryman.porting.running.process import Numerics
from ferryman.porting.running.workers import SIMULATED

_FORM = re.compile(r"(?P<where>.+):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_NO_DRIVER = "0 active drivers"  # what Triton says of a machine without one
_FORMS = "module:function, as in my_kernels:rms_norm, or path/file.py:function"


@dataclass(frozen=True)
class Reference:
    """Where a function is: a module's name or a Python file, and the name in it."""

    where: str
    name: str

    @property
    def file(self) -> Path | None:
        return Path(self.where) if self.where.endswith(".py") or os.sep in self.where else None

    def __str__(self) -> str:
        return f"{self.where}:{self.name}"


def parse(text: str) -> Reference:
    """``module:function`` or ``path/file.py:function``. Raises ArgumentError, or KernelError for a file not there."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ArgumentError("check", "--kernel", repr(text), _FORMS)
    reference = Reference(match["where"], match["name"])
    if reference.file is not None:
        if not reference.file.is_file():
            raise KernelError(f"--kernel {text}: {reference.file} is no file here ({Path.cwd()})")
    elif not _MODULE.fullmatch(reference.where):
        raise ArgumentError("check", "--kernel", repr(text), _FORMS)
    return reference


def load_apart(reference: Reference) -> tuple[Callable[..., Any], Numerics]:
    """`load`, and what the module has set for the whole process, which is undone here."""
    ours = Numerics.now()
    try:
        return load(reference), Numerics.now()
    finally:
        ours.put()


def load(reference: Reference) -> Callable[..., Any]:
    """The function. Runs the user's module: only in a process that may die. Raises KernelError, UnknownName."""
    try:
        module = _module(reference)
    except (Exception, SystemExit) as error:
        raise KernelError(
            f"{reference.where} cannot be imported: {type(error).__name__}: {_line(error)}. Run from the folder that "
            "it is importable from, or give a path: ./file.py:function"
        ) from error
    target: Any = module
    for part in reference.name.split("."):
        if not hasattr(target, part):
            known = [n for n in dir(target) if not n.startswith("_") and callable(getattr(target, n, None))]
            raise UnknownName(f"function of {reference.where}", part, known)
        target = getattr(target, part)
    if not callable(target):
        raise KernelError(f"{reference} is {_article(target)}; required: a function, or another callable")
    kernel: Callable[..., Any] = target
    return kernel


def _module(reference: Reference) -> ModuleType:
    file = reference.file
    if file is None:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
        return importlib.import_module(reference.where)
    sys.path.insert(0, str(file.resolve().parent))  # as `python file.py` has it
    name = file.stem if file.stem not in sys.modules else f"_ferryman_kernel_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and Triton look their module up
    spec.loader.exec_module(module)
    return module


def implementation_name(function: str) -> str:
    """The name that results carry: ``user:`` and the function's, with what the schema does not allow replaced."""
    return "user:" + re.sub(r"[^A-Za-z0-9_.:+-]", "_", function)[:100]


def declared(
    op: Primitive, name: str, accumulation: str = "fp32", roundings: Sequence[str] = (), deterministic: bool = True
) -> Implementation:
    """What a user's kernel declares, as a menu line. Raises UnknownName for a class or a rounding that is none."""
    if accumulation not in ACCUMULATION:
        raise UnknownName("accumulation class", accumulation, ACCUMULATION)
    permitted = [r.name for r in op.limits.roundings]
    for rounding in roundings:
        if rounding not in permitted:
            raise UnknownName(f"rounding that {op.name} permits", rounding, permitted)
    return Implementation(
        op=op.name,
        name=implementation_name(name),
        where="",
        accumulation=accumulation,
        roundings=tuple(roundings),
        deterministic=deterministic,
    )


class _WrongStructure(Exception):
    """What a kernel returned is not what the op returns."""


class Adapter:
    """Calls a function as the op is called, with the arguments that a launcher gets: schema order, then the target.

    Positional parameters take the op's arguments in its order, keyword-only ones by name. A function with fewer
    parameters is tried where the argument it lacks has the op's default, and refuses the other cases. A last parameter
    ``target`` gets the device's facts. Raises ArgumentError where the signature cannot be the op's.
    """

    def __init__(
        self, function: Callable[..., Any], op: Primitive, name: str, numerics: Numerics | None = None
    ) -> None:
        self._function, self._op, self._name = function, op, name
        self._numerics = numerics  # what the kernel's own module, and each call, leaves for the next one
        self._positional: list[str] = []
        self._keywords: dict[str, str] = {}
        self._always: dict[str, bool] = {}
        self._target: str | None = None
        self._defaults, extra = face(op)
        self._plan(extra)
        self.refused: str | None = None
        self.wrong: str | None = None
        self.raised: str | None = None

    def _plan(self, extra: Sequence[str]) -> None:
        names = self._op.names
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError):  # built in: it says nothing about its parameters
            self._positional = list(names)
            return
        ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        # cross_entropy has a target of its own: there, only a parameter beyond the op's is the device
        for group in (ordered, named):
            last = group[-1] if group else None
            if last is not None and last.name == "target" and ("target" not in names or len(ordered) > len(names)):
                self._target = "positional" if group is ordered else "keyword"
                group.pop()
        for i, p in enumerate(ordered):
            if p.name in extra:
                self._always[p.name] = True
            elif p.name in names and (i >= len(names) or names[i] != p.name):
                required = f"parameter {names.index(p.name) + 1}, as in {_call(self._op)}"
                raise ArgumentError(self._name, p.name, f"parameter {i + 1}", required)
            elif i < len(names):
                self._positional.append(names[i])
            elif p.default is p.empty:
                raise ArgumentError(self._name, p.name, "an argument that the op has not", _call(self._op))
        for p in named:
            if p.name in names:
                self._keywords[p.name] = p.name
            elif p.name in extra:
                self._always[p.name] = True
            elif p.default is p.empty:
                raise ArgumentError(self._name, p.name, "an argument that the op has not", _call(self._op))
        kinds = {p.kind for p in parameters}
        rest = [n for n in names if n not in self._positional and n not in self._keywords]
        if inspect.Parameter.VAR_POSITIONAL in kinds and not named:
            self._positional = list(names)
        elif inspect.Parameter.VAR_KEYWORD in kinds:
            self._keywords |= {n: n for n in rest}
        else:
            for name in rest:
                if name not in self._defaults:
                    raise ArgumentError(self._name, name, "no parameter", f"{_call(self._op)}: it has no default")

    def reset(self) -> None:
        self.refused = self.wrong = self.raised = None

    def __call__(self, *args: Any) -> Any:
        *values, target = args
        given = dict(zip(self._op.names, values, strict=True))
        for name, default in self._defaults.items():
            if name not in self._positional and name not in self._keywords and not _same(given[name], default):
                self.refused = f"{self._name} takes no {name}; required here: {_show(given[name])}"
                raise NotImplementedError(self.refused)
        positional = [given[n] for n in self._positional]
        keywords = {n: given[n] for n in self._keywords} | self._always
        if self._target == "positional":
            positional.append(target)
        elif self._target == "keyword":
            keywords["target"] = target
        ours = Numerics.now()
        (self._numerics or ours).put()
        try:
            result = self._function(*positional, **keywords)
        except NotImplementedError as error:
            self.refused = f"{self._name} refuses: {_line(error)}"
            raise
        except SystemExit as error:
            self.raised = f"called sys.exit({error.code!r})"
            raise RuntimeError(self.raised) from error
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.raised = f"raised {type(error).__name__}: {_line(error)}"
            raise
        finally:  # its next call finds what it left, and the oracle what it had
            self._numerics = Numerics.now()
            ours.put()
        return self._structured(self._whole(values, result), next(a.device for a in values if isinstance(a, Tensor)))

    def _whole(self, values: list[Any], result: Any) -> Any:
        """A function that writes over its arguments may leave them out of what it returns, as the op's schema does."""
        op = self._op
        own = len(op.outputs) - len(op.mutates)
        fitting = result is None if own == 0 else isinstance(result, tuple if own > 1 else Tensor)
        if not op.mutates or not fitting or (isinstance(result, tuple) and len(result) != own):
            return result
        if len(op.outputs) == 1 and result is not None:
            return result
        outputs = op.whole(values, result)
        return outputs if len(outputs) > 1 else outputs[0]

    def _structured(self, result: Any, device: torch.device) -> Any:
        """The result if it has the op's form; what the tensors themselves are, the engine judges."""
        outputs = self._op.outputs
        if len(outputs) == 1:
            required, right = f"a tensor ({outputs[0]})", isinstance(result, Tensor)
        else:
            required = f"a tuple of {len(outputs)} tensors ({', '.join(outputs)})"
            right = isinstance(result, tuple) and len(result) == len(outputs)
        if not right:
            actual = "None" if result is None else _article(result)
            if isinstance(result, (tuple, list)):
                actual += f" of {len(result)}"
            self.wrong = f"returned {actual}; required: {required}"
        for name, tensor in zip(outputs, result if isinstance(result, tuple) else (result,), strict=False):
            if not right or not isinstance(tensor, Tensor):
                continue
            if tensor.layout != torch.strided:
                self.wrong = f"{name} is a {tensor.layout} tensor; required: a strided one"
            elif tensor.device != device:
                self.wrong = f"{name}.device is {tensor.device}; required: {device}"
        if self.wrong is not None:
            raise _WrongStructure(self.wrong)
        return result

    def explain(self, cell: Cell) -> Cell:
        """The cell with what only the call could tell: a refusal, a wrong structure, an import that failed late."""
        if cell.verdict in ("PASS", "SIMULATED"):
            return cell
        update: dict[str, Any] = {}
        if self.refused is not None:
            update = {"verdict": "UNIMPLEMENTED", "reason": self.refused, "refusals": [self.refused], "gates": {}}
        elif self.wrong is not None:
            gates: dict[GateName, Gate] = {
                n: Gate(outcome="n/a", reason="the structure differs") for n in get_args(GateName)
            }
            gates["G0"] = Gate(outcome="fail", reason=self.wrong)
            update = {"verdict": "FAIL", "reason": f"G0: {self.wrong}", "gates": gates}
        elif self.raised is not None:
            update = {"verdict": "FAIL", "reason": self.raised}
        return cell.model_copy(update=update)


def check(adapter: Adapter, line: Implementation, prepared: parity.Prepared) -> Cell:
    """One cell of a user's kernel; whatever it does short of ending the process is a verdict."""
    adapter.reset()
    p = prepared
    # what Triton interprets is no evidence about a device, and a CPU has no tiles of its own
    interpreted = p.device.type == "cpu" and interpreting() and "triton" in sys.modules
    simulate = profile(SIMULATED) if interpreted else None
    if interpreted:
        try:
            triton_bfloat16.mend()
        except BackendUnavailable as error:
            if p.dtype == torch.bfloat16:
                return lost(line, p.case.name, p.dtype, p.device, "NOT_RUN", str(error))
    try:
        cell = parity.check_cell(
            p.primitive, line, p.case, p.dtype, p.device, prepared=p, kernel=adapter, simulate=simulate
        )
    except Exception as error:  # noqa: BLE001 - what it returned broke the judgement itself: its fault, and its verdict
        why = f"what it returned cannot be judged: {type(error).__name__}: {_line(error)}"
        cell = lost(line, p.case.name, p.dtype, p.device, "FAIL", why)
    if simulate is not None and cell.verdict == "PASS":
        why = f"interpreted, with the tiles of {simulate.name}"
        cell = cell.model_copy(update={"verdict": "SIMULATED", "seconds": None, "reason": why})
    if cell.verdict == "FAIL" and _NO_DRIVER in (cell.reason or ""):
        why = f"Triton has no driver for {p.device} here; set TRITON_INTERPRET=1 to have it interpreted"
        return lost(line, p.case.name, p.dtype, p.device, "NOT_RUN", why)
    return adapter.explain(cell)


def lost(
    line: Implementation, case: str, dtype: torch.dtype, device: torch.device | str, verdict: Any, reason: str
) -> Cell:
    """A cell with a verdict and a reason alone."""
    return Cell(
        op=line.op,
        implementation=line.name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        case=case,
        verdict=verdict,
        reason=reason,
        accumulation=line.accumulation,
        roundings=sorted(line.roundings),
    )


def face(op: Primitive) -> tuple[dict[str, Any], list[str]]:
    """(defaults by argument, switches of the public call that ask for every output)."""
    known = list(op.parameters)
    face = getattr(ops, op.name, None)
    if face is not None and getattr(face, "primitive", None) is op:
        known += inspect.signature(face).parameters.values()
    defaults = {p.name: p.default for p in known if p.default is not p.empty and p.name in op.names}
    defaults |= {n: None for n in op.names if op.types[n] == "Tensor?" and n not in defaults}
    return defaults, [p.name for p in known if p.name not in op.names and p.name.startswith("return_")]


def _call(op: Primitive) -> str:
    return f"{op.name}({', '.join(op.names)})"


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, Tensor) or value is None or default is None:
        return value is default
    return bool(value == default)


def _show(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _article(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"

"""Other libraries' kernels, behind adapters: small files in a folder, `benchmarks/peers` of this project's checkout.

An adapter names itself (``NAME``), says why it cannot run here (``available()``: a reason, or None), gives its
library's version (``version()``), and maps ops to functions (``OPS``). Such a function takes the op's arguments in
schema order (of those that the op got later, as many as it names; the others are off then), and returns a call
without arguments whose result are the op's outputs, or the first of them. What a
user's forward would have kept for a backward, the function works out before; the call alone is timed. A call that
writes over what it was given owns that, and has a method ``restore``. ``STEPS``, which may be absent, maps ops to
functions of the same arguments that autograd differentiates, whose forward and backward are timed together.
``prepare_share(k, n)``, which may be absent too, leaves every n-th configuration from the k-th on to a library's
autotuners, so that n processes compile them all. ``SLOW_START`` (False) says that a call compiles or tunes for seconds
before its first result. Raising `NotServed` says that the library has no form for these arguments.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, FerrymanError, UnknownName
from ferryman.ops.primitive import Primitive
from ferryman.porting.bench.document import Peer
from ferryman.porting.inputs.cases import as_tuple, double
from ferryman.porting.judging.results import NAME

DEFAULT = Path("benchmarks/peers")
# Root mean square of the error over that of the exact result, in units of the dtype's eps. One rounding is 0.2; a
# library may round two or three times (a normalised row, probabilities). A wrong scale, mask or epsilon is far beyond.
_UNITS = 1.0
AGREEING = 4 * _UNITS  # between two results that are both rounded, one of them perhaps from rounded partial sums


class NotServed(Exception):
    """This library has no kernel for these arguments, or says that it has none."""


@dataclass(frozen=True)
class Adapter:
    name: str
    module: ModuleType

    @property
    def ops(self) -> dict[str, Callable[..., Callable[[], Any]]]:
        served: dict[str, Callable[..., Callable[[], Any]]] = self.module.OPS
        return served

    @property
    def steps(self) -> dict[str, Callable[..., Any]]:
        served: dict[str, Callable[..., Any]] = getattr(self.module, "STEPS", {})
        return served

    @property
    def slow_start(self) -> bool:
        return bool(getattr(self.module, "SLOW_START", False))

    def call_of(self, op: str, args: tuple[Any, ...]) -> Callable[[], Any]:
        known, function = registry.primitive(op), self.ops[op]
        given = list(zip(known.names, args, strict=True))
        while given and given[-1][0] in known.added and not _takes(function, len(given)):
            name, value = given.pop()
            if not known.left_out(name, value):
                raise NotServed(f"no {name}")
        return function(*(value for _, value in given))

    def peer(self) -> Peer:
        try:
            reason = self.module.available()
            return Peer(name=self.name, version=None if reason else str(self.module.version()), reason=reason)
        except Exception as error:  # whatever a file of the user's does when it is asked
            message = f"{type(error).__name__}: {error}"
            raise FerrymanError(f"the adapter {self.module.__file__} cannot say what it is: {message}") from error


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function has so many positional parameters by name: of ``*rest`` it is not known what it reads."""
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    return (
        sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
        >= count
    )


def adapters(folder: Path, wanted: Sequence[str] | None) -> list[Adapter]:
    """The adapters of a folder by name; ``wanted`` None is all. Raises ArgumentError, UnknownName, FerrymanError."""
    files = sorted(p for p in folder.glob("*.py") if not p.name.startswith("_")) if folder.is_dir() else []
    if not files:
        raise ArgumentError(
            "bench",
            "--peers-from",
            str(folder),
            "a folder of adapters; the installed package holds none: "
            "they are benchmarks/peers of its source (a checkout, or the sdist)",
        )
    by_name: dict[str, Adapter] = {}
    for adapter in map(_adapter, files):
        if adapter.name in by_name:
            raise FerrymanError(f"two adapters of {folder} have the NAME {adapter.name!r}; required: one each")
        by_name[adapter.name] = adapter
    for name in wanted or ():
        if name not in by_name:
            raise UnknownName("peer", name, by_name)
    return [a for name, a in by_name.items() if wanted is None or name in wanted]


def _adapter(path: Path) -> Adapter:
    name = f"ferryman_peers.{path.stem}"
    _package(path.parent)
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise FerrymanError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a file of the user's does when it is imported
        raise FerrymanError(f"the adapter {path} cannot be imported: {type(error).__name__}: {error}") from error
    missing = [n for n in ("NAME", "available", "version", "OPS") if not hasattr(module, n)]
    if missing:
        raise FerrymanError(f"the adapter {path} lacks {', '.join(missing)}; see ferryman.porting.bench.peers")
    ours = {line.name for op in registry.primitives() for line in registry.implementations(op)} | {"copy"}
    if not isinstance(module.NAME, str) or not NAME.fullmatch(module.NAME) or module.NAME in ours:
        required = f"at most 128 letters, digits, '.', '_', ':', '+' and '-', and none of {', '.join(sorted(ours))}"
        raise FerrymanError(f"the adapter {path} has the NAME {module.NAME!r}; required: {required}")
    if not isinstance(module.OPS, dict):
        raise FerrymanError(f"the adapter {path} has OPS of {type(module.OPS).__name__}; required: a dict of functions")
    return Adapter(module.NAME, module)


def _package(folder: Path) -> None:
    """The folder as a package, so that adapters can share a module (``from ferryman_peers import _common``)."""
    package = sys.modules.get("ferryman_peers")
    if package is None:
        package = sys.modules["ferryman_peers"] = ModuleType("ferryman_peers")
    package.__path__ = [str(folder)]


def wrong(
    op: Primitive, args: tuple[Any, ...], result: Any, exact: tuple[Tensor, ...] | None = None, units: float = _UNITS
) -> str | None:
    """How far a result is from the float64 meaning of the op (or from ``exact``), in words; None where it is near.

    A peer may return the first outputs only. Where it returns None in an output's place, that one is not judged.
    """
    if exact is None:
        with torch.no_grad():
            exact = as_tuple(op.body(*double(args)))
    given = result if isinstance(result, (tuple, list)) else (result,)
    return apart(op.outputs, given, exact, units)


def apart(names: Sequence[str], given: Sequence[Any], exact: Sequence[Tensor], units: float = AGREEING) -> str | None:
    """How far results are from ``exact``, in words; None where each is near. What is None is not judged."""
    judged = 0
    for name, got, want in zip(names, given, exact, strict=False):
        if got is None:
            continue
        judged += 1
        if not isinstance(got, Tensor) or got.numel() != want.numel():
            shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            return f"{name} is {shape}; the op gives {tuple(want.shape)}"
        if want.numel() == 0:  # a gradient of no bias
            continue
        near, right = got.double().reshape(want.shape), want.double()
        same = (near == right) | (near.isnan() & right.isnan())  # what is not finite in both has no distance
        off = torch.where(same, 0.0, near - right)
        size = torch.where(right.isfinite(), right, 0.0).square().mean().sqrt()
        distance = float(off.square().mean().sqrt() / size) if float(size) > 0 else float(off.abs().max())
        info = torch.finfo(got.dtype) if got.is_floating_point() else None
        least = info.tiny * info.eps / float(size) if info and float(size) > 0 else 0.0  # float16's gradients come near
        if not distance <= units * max(info.eps if info else 0.0, 1e-5) + least:
            return f"{name} is {distance:.2g} away, relative root mean square"
    return None if judged else "it returns nothing that could be judged"

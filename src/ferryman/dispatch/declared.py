"""`torch.ops.ferryman.*` from the import on, without the Python of any op.

Every schema of `ferryman.ops.table` is defined with kernels that load the op's family when they are first called: by a
caller, `torch.compile`, a saved program. `install` then puts the op's own functions behind them. The fake
implementation is registered when Python first names the op in `torch.ops`: until then nothing can ask for it, and
`torch.library.register_fake` takes longer than all of the rest.

Other packages' ops, and those that the table does not have yet, are defined when a name that is not there is asked for
in `torch.ops.ferryman`, or their package is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ferryman.dispatch import arrivals, flops
from ferryman.ops.table import SCHEMAS

ENTRY_POINTS = "ferryman.ops"
AUTOCAST = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_OURS = "ferryman.ops"
_DEFINITION = ".definition"
_MANY_TENSORS = 32
_DEFAULTS = {"None": None, "False": False, "True": True}  # those that a schema may have, as it writes them, and floats
_library = torch.library.Library("ferryman", "DEF")
_OpNamespace = getattr(torch._ops, "_OpNamespace", None)  # private to PyTorch: without it every op is named at once
_lock = threading.RLock()
_thread = threading.local()
ops: dict[str, Declared] = {}
# Tensors that stand for absent ones in a guard, which takes each once. Made here, and not when an op is first called:
# a mode or a transform may be in force there, and would own them.
_absent = [torch.empty(0, device="cpu") for _ in range(_MANY_TENSORS)]


class Above(NamedTuple):
    """The modules that stand on this one, and that it needs once an op is asked for: each is loaded when called."""

    registry: Callable[[], Any]
    install: Callable[[], Any]


_above: Above  # `every` sets it, at the import of ferryman.dispatch


class Declared:
    """An op of the library. Its four functions load the op at their first call, and are its own afterwards."""

    def __init__(self, schema: str) -> None:
        self.schema, self.name = schema, schema.partition("(")[0]
        given = schema.partition(") -> ")[0].split(", ")
        self.takes = len(given)
        self.defaults = tuple(_default(one.partition("=")[2]) for one in given if "=" in one)
        self.named = self.counted = False
        self.kernel: Callable[..., Any] = self._later("kernel")
        self.fake: Callable[..., Any] = self._later("fake")
        self.autograd: Callable[..., Any] = self._later("autograd")
        self.autocast: Callable[..., Any] = self._later("autocast")

    def rest(self, given: int) -> tuple[Any, ...]:
        """The last arguments, which PyTorch leaves out of a call where they are the schema's defaults."""
        return self.defaults[given - self.takes :] if given < self.takes else ()

    def _later(self, function: str) -> Callable[..., Any]:
        def load(*args: Any) -> Any:
            registry = _above.registry()
            registry.primitive(self.name)
            if getattr(self, function) is load:
                registry.explain_absence(self.name)
            return getattr(self, function)(*args)

        return load


def _default(text: str) -> Any:
    return _DEFAULTS[text] if text in _DEFAULTS else float(text)


def absent(count: int) -> list[torch.Tensor]:
    """That many stand-ins for tensors that a call does not have."""
    while len(_absent) < count:
        _absent.append(torch.empty(0, device="cpu"))
    return _absent[:count]


def define(schema: str) -> Declared:
    """Define an op with kernels that find theirs at their first call."""
    one = Declared(schema)
    name = one.name
    with _no_search():  # PyTorch asks its namespace whether the name is there already
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    if one.defaults:
        _library.impl(name, lambda *args: one.kernel(*args, *one.rest(len(args))), "CompositeExplicitAutograd")
        _library.impl(
            name, lambda keys, *args: one.autograd(keys, *args, *one.rest(len(args))), "Autograd", with_keyset=True
        )
    else:
        _library.impl(name, lambda *args: one.kernel(*args), "CompositeExplicitAutograd")
        _library.impl(name, lambda *args: one.autograd(*args), "Autograd", with_keyset=True)
    for device, key in AUTOCAST.items():
        _library.impl(name, partial(_cast, one, device), key)
    ops[name] = one
    if _OpNamespace is None:
        _name(one)
    if flops.arrived():
        _count(one)
    return one


def _cast(one: Declared, device: str, *args: Any) -> Any:
    return one.autocast(device, *args, *one.rest(len(args)))


def _name(one: Declared) -> None:
    """Register what is asked for once Python names an op."""
    with _lock:
        if not one.named:
            one.named = True
            torch.library.register_fake(
                f"ferryman::{one.name}", lambda *args: one.fake(*args, *one.rest(len(args))), lib=_library
            )


def _count(one: Declared) -> None:
    """Register what PyTorch's counter of FLOPs asks for. That names the op, before there is a `Namespace`, too."""
    _name(one)
    with _lock:
        if not one.counted:
            one.counted = True
            flops.register(getattr(torch.ops.ferryman, one.name), lambda: _above.registry().primitive(one.name))


def _count_all(counter: ModuleType) -> None:
    """Other packages' ops too."""
    if packages():
        _above.registry().others()
    for one in list(ops.values()):
        _count(one)


def _namespace(base: Any) -> Any:
    class Namespace(base):  # type: ignore[misc]
        """`torch.ops.ferryman`: a name that is not there yet may be another package's."""

        __module__ = base.__module__

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattr__(name)
            if name not in ops:
                _search()
            if name in ops:
                _name(ops[name])
            return super().__getattr__(name)

    return Namespace


@contextmanager
def _no_search() -> Iterator[None]:
    before = getattr(_thread, "searching", False)
    _thread.searching = True
    try:
        yield
    finally:
        _thread.searching = before


def _search() -> None:
    """Load every family: the table is older than the folders, or the op is another package's."""
    if not getattr(_thread, "searching", False):
        with _no_search():
            _above.registry().primitives()


@cache
def packages() -> tuple[tuple[str, str], ...]:
    """Entry points of other packages with ops: (name, package)."""
    return tuple((entry.name, entry.value) for entry in entry_points(group=ENTRY_POINTS))


def _is_definition(name: str) -> bool:
    if not name.endswith(_DEFINITION):
        return False
    package = name.removesuffix(_DEFINITION)
    return package.rpartition(".")[0] == _OURS or any(package == other for _, other in packages())


def arrive(module: ModuleType) -> None:
    """The ops of a definition that has run become able to dispatch."""
    _above.install().family(module.__name__.removesuffix(_DEFINITION))


def every(above: Above) -> None:
    """Define the table's ops, and watch for definitions and for PyTorch's counter of FLOPs."""
    global _above
    _above = above
    for schemas in SCHEMAS.values():
        for schema in schemas:
            define(schema)
    arrivals.after_import(_is_definition, arrive)
    if _OpNamespace is None:
        _above.registry().primitives()
    else:
        torch.ops.ferryman.__class__ = _namespace(_OpNamespace)
    flops.watch(_count_all)

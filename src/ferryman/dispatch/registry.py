"""The catalogue: primitives, their implementations, and backends; ours, and other packages' through entry points."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ferryman.backends import redirect
from ferryman.backends.base import Backend
from ferryman.errors import UnknownName
from ferryman.ops.menu import NAME, Implementation
from ferryman.ops.primitive import Primitive

FAMILIES = ("norm", "activation", "softmax", "rope", "matmul", "attention")
_BACKENDS = {
    "torch": "ferryman.backends.torch:TorchBackend",
    "triton": "ferryman.backends.triton:TritonBackend",
    "cuda": "ferryman.backends.cuda:CudaBackend",
    "hip": "ferryman.backends.hip:HipBackend",
    "definition": "ferryman.backends.torch:DefinitionBackend",
}


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _modules(part: str) -> list[Any]:
    ours = [importlib.import_module(f"ferryman.ops.{family}.{part}") for family in FAMILIES]
    return ours + [importlib.import_module(f"{e.value}.{part}") for e in entry_points(group="ferryman.ops")]


@lru_cache(maxsize=1)
def primitives() -> Mapping[str, Primitive]:
    """Every op by name, forward and backward. An entry point of ``ferryman.ops`` names a family package like ours."""
    found: dict[str, Primitive] = {}
    for module in _modules("definition"):
        for value in vars(module).values():
            known = getattr(value, "primitive", None)
            if isinstance(known, Primitive) and found.setdefault(known.name, known) is not known:
                raise ValueError(f"two primitives are called {known.name!r}; the second is in {module.__name__}")
    return MappingProxyType(found)


@lru_cache(maxsize=1)
def _menu() -> Mapping[str, tuple[Implementation, ...]]:
    found: dict[str, list[Implementation]] = {name: [] for name in primitives()}
    for module in _modules("implementations"):
        for line in module.IMPLEMENTATIONS:
            found[line.op].append(line)
    for name, known in primitives().items():
        found[name].append(Implementation(op=name, name="definition", where=f"{known.body.__module__}:{name}"))
    for name, lines in found.items():
        for line in lines:
            if not NAME.fullmatch(line.name):
                raise ValueError(f"implementation {line.name!r} of {name}; required: a name like triton.hopper")
            if sum(line.name == other.name for other in lines) > 1:
                raise ValueError(f"two implementations of {name} are called {line.name!r}; required: one of each name")
    return MappingProxyType({name: tuple(lines) for name, lines in found.items()})


def primitive(op: str | Callable[..., Any]) -> Primitive:
    """An op by name, or by the function that model code calls. Raises UnknownName with the nearest names."""
    known = getattr(op, "primitive", None)
    if isinstance(known, Primitive):
        return known
    if op not in primitives():
        raise UnknownName("op", str(op), primitives())
    return primitives()[str(op)]


def implementations(op: str) -> tuple[Implementation, ...]:
    """An op's menu, the definition last."""
    return _menu()[op]


def asked(op: str, names: Iterable[str] | None) -> tuple[Implementation, ...]:
    """The lines of an op's menu that names of backends or implementations ask for, in its order; all of it for None."""
    wanted = None if names is None else tuple(names)
    return tuple(x for x in implementations(op) if wanted is None or any(map(x.answers, wanted)))


def implementation(op: str, name: str) -> Implementation:
    """One line of an op's menu. Raises UnknownName."""
    for line in implementations(op):
        if line.name == name:
            return line
    raise UnknownName(f"implementation of {op}", name, [line.name for line in implementations(op)])


@lru_cache(maxsize=1)
def backends() -> Mapping[str, Backend]:
    """Backends by name; importing one imports no toolchain."""
    found = {name: _load(where)() for name, where in _BACKENDS.items()}
    for entry in entry_points(group="ferryman.backends"):
        found[entry.name] = entry.load()()
    return MappingProxyType(found)


@lru_cache(maxsize=1)
def _every_name() -> frozenset[str]:
    return frozenset(backends()) | {line.name for lines in _menu().values() for line in lines}


def check_requested(name: str, op: str | None = None) -> None:
    """Whether a request can name a backend or an implementation like this, of one op or of any. Raises UnknownName."""
    known = set(backends()) | {x.name for x in implementations(op)} if op is not None else _every_name()
    if name not in known:
        raise UnknownName("backend or implementation" if op is None else f"implementation of {op}", name, sorted(known))


def probe(backend: str, vendor: str) -> tuple[str, ...]:
    """Why a backend cannot run for a vendor here; empty when it can. Kept until `forget`."""
    route = redirect.current()
    reasons = None if route is None else route.probe(backend, vendor)
    return _probed(backend, vendor) if reasons is None else reasons


@lru_cache(maxsize=None)
def _probed(backend: str, vendor: str) -> tuple[str, ...]:
    return backends()[backend].probe(vendor)


def launcher(line: Implementation) -> Callable[..., Any]:
    """The function that computes an implementation: (arguments in schema order, target)."""
    found = _loaded(line)
    route = redirect.current()
    if route is None or line.backend == "definition":
        return found
    return route.wrap(found, frozenset(place for place, _ in primitives()[line.op].overwritten))


@lru_cache(maxsize=None)
def _loaded(line: Implementation) -> Callable[..., Any]:
    if line.backend != "definition":
        return line.load()
    op = primitives()[line.op]
    body, meta = op.body, op.meta
    if op.mutates:
        return lambda *args: _written(op, args[:-1], body(*args[:-1]), meta(*args[:-1]))

    def definition(*args: Any) -> Any:
        """The body's result in the declared strides: elementwise PyTorch keeps those of a permuted input."""
        result, wanted = body(*args[:-1]), meta(*args[:-1])
        if isinstance(result, Tensor):
            return _laid(result, wanted)
        return tuple(_laid(made, want) for made, want in zip(result, wanted, strict=True))

    return definition


def _written(op: Primitive, args: tuple[Any, ...], result: Any, wanted: Any) -> Any:
    """The body's result, as a mutating op leaves it."""
    single = isinstance(result, Tensor)
    made, want = ((result,), (wanted,)) if single else (result, wanted)
    into = {o: args[a] for a, o in op.overwritten}
    outputs = tuple(
        into[i].copy_(m) if i in into else _laid(m, w) for i, (m, w) in enumerate(zip(made, want, strict=True))
    )
    return outputs[0] if single else outputs


def _laid(made: Tensor, want: Tensor) -> Tensor:
    return made if made.stride() == want.stride() else want.copy_(made)


def forget() -> None:
    """Probe backends afresh at the next use."""
    _probed.cache_clear()

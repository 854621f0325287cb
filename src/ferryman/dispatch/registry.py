"""The catalogue: primitives, their implementations, and backends; ours, and other packages' through entry points."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from ferryman import settings
from ferryman.backends import redirect
from ferryman.backends.base import Backend
from ferryman.dispatch import declared, foreign
from ferryman.dispatch.foreign import leave_out
from ferryman.errors import STOPS, CompileError, FerrymanError, UnknownName
from ferryman.ops.menu import NAME, Implementation
from ferryman.ops.primitive import Primitive
from ferryman.ops.table import SCHEMAS

if TYPE_CHECKING:
    from ferryman.ops.evidence import Evidence

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


@dataclass(frozen=True)
class Family:
    """A package with ``definition``, ``implementations`` and ``evidence``: a folder of ours, or another package's."""

    name: str
    package: str
    ours: bool = True


def broken() -> Mapping[str, str]:
    """Other packages' entry points that were left out, with the reason; what they would add is not there."""
    primitives()
    return MappingProxyType(_broken)


def blamed(op: Primitive) -> AbstractContextManager[None]:
    """Raise PackageError where the code of another package, whose op this is, raises in this block."""
    family = family_of(op)
    return foreign.blamed(op.name, None if family.ours else family.package)


def unjudged(op: str) -> str | None:
    """Why an op of another package has no cases, where they could not be made."""
    judged = evidence(primitive(op))
    judged.cases()
    return _broken.get(f"evidence {judged.op}")


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Every folder of `ferryman.ops`, by name, and what entry points of ``ferryman.ops`` name."""
    package = importlib.import_module("ferryman.ops")
    ours = [m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg]
    own_families = [Family(name, f"ferryman.ops.{name}") for name in ours]
    return (*own_families, *(Family(name, where, ours=False) for name, where in declared.packages()))


def _ops_of(module: Any) -> Iterator[Primitive]:
    for value in vars(module).values():
        known = getattr(value, "primitive", None)
        if isinstance(known, Primitive) and known.body.__module__ == module.__name__:
            yield known


@dataclass
class _Catalogue:
    """What is loaded. ``done``: packages that are in it, or were left out. ``entering``: package -> thread."""

    primitives: dict[str, Primitive]
    menu: dict[str, tuple[Implementation, ...]]
    family: dict[str, Family]
    done: set[str]
    entering: dict[str, int]


_broken = foreign.broken()
_catalogue = _Catalogue({}, {}, {}, set(), {})
_LISTED = {schema.partition("(")[0]: name for name, schemas in SCHEMAS.items() for schema in schemas}
_LONGEST_WAIT = 60.0  # seconds, for another thread that enters a family whose definition was there before us


def load(family: Family) -> None:
    """Have a family in the catalogue and able to run. One of another package that breaks is left out, and no other
    with it."""
    package = family.package
    if package in _catalogue.done or _catalogue.entering.get(package) == get_ident():
        return
    try:
        # its arrival installs it, and other threads wait for that
        module = importlib.import_module(f"{package}.definition")
    except BaseException as error:
        if family.ours or isinstance(error, STOPS):
            raise
        leave_out("ops", family.name, error)
        _catalogue.done.add(package)
        return
    running = getattr(module.__spec__, "_initializing", False)  # it is what asks for an op
    if package not in _catalogue.done and not running:
        declared.arrive(module)  # it was imported before us


def enter(package: str, install: Callable[[tuple[Primitive, ...]], None]) -> None:
    """Put a family, whose definition has run, into the catalogue, and ``install`` its ops.

    Where one of our ops cannot be, its error rises and the next import tries again; another package's is left out.
    """
    family = next((known for known in families() if known.package == package), None)
    if family is None or package in _catalogue.done:
        return
    if _catalogue.entering.setdefault(package, get_ident()) != get_ident():
        _wait_for(package)
        return
    try:
        install(_add(family))
    except BaseException as error:
        _remove(family)
        if family.ours or isinstance(error, STOPS):
            raise
        leave_out("ops", family.name, error)
        _catalogue.done.add(package)
    else:
        _catalogue.done.add(package)
    finally:
        del _catalogue.entering[package]


def _wait_for(package: str) -> None:
    begun = time.monotonic()
    while package in _catalogue.entering:
        if time.monotonic() - begun > _LONGEST_WAIT:
            raise FerrymanError(f"another thread has been loading {package} for {_LONGEST_WAIT:.0f} s")
        time.sleep(0.001)


def _add(family: Family) -> tuple[Primitive, ...]:
    own: dict[str, Primitive] = {}
    for known in _ops_of(importlib.import_module(f"{family.package}.definition")):
        listed = _LISTED.get(known.name)
        taken = known.name in _catalogue.primitives or (listed is not None and not _is_listed(family, listed))
        if own.setdefault(known.name, known) is not known or taken:
            raise ValueError(f"two primitives are called {known.name!r}; the second is in {family.package}")
    menu: dict[str, list[Implementation]] = {name: [] for name in own}
    for line in importlib.import_module(f"{family.package}.implementations").IMPLEMENTATIONS:
        if line.op not in menu:
            raise UnknownName(f"op of {family.package} on its menu", line.op, menu)
        menu[line.op].append(line)
    for name, known in own.items():
        menu[name].append(Implementation(op=name, name="definition", where=f"{known.body.__module__}:{name}"))
        for line in menu[name]:
            if not NAME.fullmatch(line.name):
                raise ValueError(f"implementation {line.name!r} of {name}; required: a name like triton.hopper")
            if sum(line.name == other.name for other in menu[name]) > 1:
                raise ValueError(f"two implementations of {name} are called {line.name!r}; required: one of each name")
        foreign.require_arguments(family.package, known, menu[name])
    _catalogue.menu.update({name: tuple(lines) for name, lines in menu.items()})
    _catalogue.family.update(dict.fromkeys(own, family))
    _catalogue.primitives.update(own)
    return tuple(own.values())


def _is_listed(family: Family, listed: str) -> bool:
    return family.ours and family.name == listed


def _remove(family: Family) -> None:
    for name in [n for n, of in _catalogue.family.items() if of == family]:
        _catalogue.primitives.pop(name, None)
        del _catalogue.menu[name], _catalogue.family[name]


def others() -> None:
    """Load what other packages add."""
    for family in families():
        if not family.ours:
            load(family)


@lru_cache(maxsize=1)
def primitives() -> Mapping[str, Primitive]:
    """Every op by name, forward and backward. An entry point of ``ferryman.ops`` names a family package like ours."""
    for family in families():
        load(family)
    order = {family: i for i, family in enumerate(families())}
    ordered = sorted(_catalogue.primitives.items(), key=lambda item: order[_catalogue.family[item[0]]])
    return MappingProxyType(dict(ordered))  # in the order of families, whichever came first


def _find(name: str) -> Primitive | None:
    """An op by name. Its family alone is loaded where the table has it."""
    listed = _LISTED.get(name)
    if listed is not None:
        load(Family(listed, f"ferryman.ops.{listed}"))
    elif name not in _catalogue.primitives:
        primitives()
    else:
        load(_catalogue.family[name])
    return _catalogue.primitives.get(name)


def explain_absence(name: str) -> NoReturn:
    """Raise what is known of an op that the library has and that cannot run."""
    known = "; ".join(f"{entry}: {reason}" for entry, reason in _broken.items()) or "nothing was left out"
    raise FerrymanError(f"{name} is defined in torch.ops.ferryman and cannot run. Left out: {known}")


def family_of(op: Primitive) -> Family:
    """The folder or package that an op belongs to."""
    return _catalogue.family[op.name]


@lru_cache(maxsize=1)
def evidences() -> Mapping[str, Evidence]:
    """What each forward op is judged on. Loaded when first asked for: a call of an op needs none."""
    by_op: dict[str, Evidence] = {}
    for family in families():
        where = f"{family.package}.evidence"
        if f"ops {family.name}" in broken():
            continue
        try:
            if not family.ours and find_spec(where) is None:
                _broken[f"evidence {family.name}"] = f"{family.package} has no evidence.py: nothing judges its ops"
                continue
            own = [one for one in importlib.import_module(where).EVIDENCE if one.op in primitives()]
            by_op |= {one.op: one if family.ours else foreign.guarded(one, family.package) for one in own}
        except BaseException as error:
            if family.ours or isinstance(error, STOPS):
                raise
            leave_out("evidence", family.name, error)
    return MappingProxyType(by_op)


def forward_of(op: Primitive) -> Primitive | None:
    """The op whose gradient this is; None for a forward op."""
    return next((other for other in primitives().values() if other.gradient.backward == op.name), None)


def evidence(op: Primitive) -> Evidence:
    """What an op is judged on; a backward's is its forward's. An op without evidence has no cases."""
    from ferryman.ops.evidence import Evidence

    forward = forward_of(op) or op
    return evidences().get(forward.name) or Evidence(forward.name, cases=tuple)


def primitive(op: str | Callable[..., Any]) -> Primitive:
    """An op by name, or by the function that model code calls. Raises UnknownName with the nearest names."""
    known = getattr(op, "primitive", None)
    if isinstance(known, Primitive):
        return known
    registered = _find(op) if isinstance(op, str) else None
    if registered is None:
        raise UnknownName("op", str(op), primitives(), [f"{entry}: {reason}" for entry, reason in broken().items()])
    return registered


def implementations(op: str) -> tuple[Implementation, ...]:
    """An op's menu, the definition last."""
    return _catalogue.menu[primitive(op).name]


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
    """Backends by name; importing one imports no toolchain. One that no package has serves no device."""
    by_name = foreign.Backends({name: _load(where)() for name, where in _BACKENDS.items()})
    for entry in entry_points(group="ferryman.backends"):
        try:
            if entry.name in by_name:
                raise ValueError(f"a backend of ours is called {entry.name!r}")
            by_name[entry.name] = foreign.backend(entry.load()())
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - it may exit, too
            leave_out("backend", entry.name, error)
    return MappingProxyType(by_name)


def check_requested(name: str, op: str | None = None) -> None:
    """Whether a request can name a backend or an implementation like this, of one op or of any. Raises UnknownName."""
    if name in backends():
        return
    ops = primitives() if op is None else (op,)
    known = {line.name for each in ops for line in implementations(each)}
    if name not in known:
        kind = "backend or implementation" if op is None else f"implementation of {op}"
        raise UnknownName(kind, name, sorted({*known, *backends()}))


def probe(backend: str, vendor: str) -> tuple[str, ...]:
    """Why a backend cannot run for a vendor here; empty when it can. Kept until `forget`."""
    route = redirect.current()
    reasons = None if route is None else route.probe(backend, vendor)
    return _probed(backend, vendor) if reasons is None else reasons


@settings.Remembered
def _probed(backend: str, vendor: str) -> tuple[str, ...]:
    try:
        return backends()[backend].probe(vendor)
    except STOPS:
        raise
    except BaseException as error:  # noqa: BLE001 - a backend of another package may break its promise not to raise
        return (f"{backend} cannot be asked: {type(error).__name__}: {error}",)


def launcher(line: Implementation) -> Callable[..., Any]:
    """The function that computes an implementation: (arguments in schema order, target)."""
    function = _loaded(line)
    route = redirect.current()
    if route is None or line.backend == "definition":
        return function
    return route.wrap(function, frozenset(place for place, _ in primitive(line.op).overwritten))


@lru_cache(maxsize=None)
def _loaded(line: Implementation) -> Callable[..., Any]:
    if line.backend != "definition":
        try:
            return line.load()
        except STOPS:
            raise
        except BaseException as error:  # a toolchain's parts may be missing, or raise anything
            log = f"its kernels cannot be imported: {type(error).__name__}: {error}"
            raise CompileError(line.backend, f"{line.op} ({line.name})", "this process", log) from error
    op = primitive(line.op)
    body, meta = op.body, op.meta
    if op.mutates:
        return lambda *args: _written(op, args[:-1], body(*args[:-1]), meta(*args[:-1]))

    def definition(*args: Any) -> Any:
        """The body's result in the declared strides: elementwise PyTorch keeps those of a permuted input."""
        result, wanted = body(*args[:-1]), meta(*args[:-1])
        if isinstance(result, Tensor):
            return _laid(result, wanted)
        return tuple(_laid(output, want) for output, want in zip(result, wanted, strict=True))

    return definition


def _written(op: Primitive, args: tuple[Any, ...], result: Any, wanted: Any) -> Any:
    """The body's result, as a mutating op leaves it."""
    single = isinstance(result, Tensor)
    results, want = ((result,), (wanted,)) if single else (result, wanted)
    into = {o: args[a] for a, o in op.overwritten}
    outputs = tuple(
        into[i].copy_(m) if i in into else _laid(m, w) for i, (m, w) in enumerate(zip(results, want, strict=True))
    )
    return outputs[0] if single else outputs


def _laid(output: Tensor, want: Tensor) -> Tensor:
    return output if output.stride() == want.stride() else want.copy_(output)


def forget() -> None:
    """Probe backends afresh at the next use."""
    _probed.forget()

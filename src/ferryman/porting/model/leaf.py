"""How a module without children looks from outside: its tensors, its numbers, what its forward takes."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import itertools
import math
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.ops.recognition import Leaf
from ferryman.porting.model import scalars, source
from ferryman.porting.model.trace import Unproven, lasting, trusted

NARROW = 512  # a matrix with a longer side is proven on a twin with shorter sides


def leaf_of(module: nn.Module, fixed: Mapping[str, float] | None = None) -> Leaf | None:
    """How a module without children looks from outside; None for any other. fixed: tensors that are numbers."""
    if next(module.children(), None) is not None:
        return None
    weights = {n: p for n, p in [*module._parameters.items(), *module._buffers.items()] if p is not None}
    weights = {n: p for n, p in weights.items() if n not in (fixed or {})}
    rows = {n: (p.dim() - 1, p.shape[-1]) for n, p in weights.items() if p.dim() > 1 and p.numel() == p.shape[-1] > 1}
    lines = {n: p for n, p in weights.items() if p.dim() > 1 and p.numel() == max(p.shape) > 1}
    columns = {n: tuple(p.shape) for n, p in lines.items() if n not in rows}
    others = {n: p for n, p in weights.items() if n not in lines or p.dim() == 2}
    if any(p.dim() > 2 for p in others.values()) or not all(p.is_floating_point() for p in weights.values()):
        return None
    numbers = {
        n: float(v)
        for n, v in vars(module).items()
        if isinstance(v, float) and not isinstance(v, bool) and n.isidentifier()
    }
    reached = names_reached(type(module))
    for name, value in vars(module).items():
        inside = value if type(value) is dict else settings_of(value, reached) if name not in _OWN else None
        for n, v in (inside or {}).items() if name in reached and name.isidentifier() else ():
            if isinstance(v, float) and isinstance(n, str):
                numbers[f"{name}[{n!r}]" if inside is value else f"{name}.{n}"] = v
    constants: list[float] = [*(fixed or {}).values()]
    whole: list[int] = []
    for function in source.methods(type(module)).values():
        inner = source.innermost(function)
        constants += [c for c in inner.__code__.co_consts if isinstance(c, float)]
        whole += [c for c in inner.__code__.co_consts if type(c) is int and c > 1]
        constants += [d for d in inner.__defaults__ or () if isinstance(d, float)]
        constants += [v for v in source.names_of(inner).values() if isinstance(v, float)]
    constants += [v for v in source.members(type(module)).values() if isinstance(v, float)]
    own = [v for n, v in vars(module).items() if n in reached and isinstance(v, types.FunctionType)]
    for function in (*own, *functions_reached(type(module))):
        constants += [c for code in _codes(function) for c in code.co_consts if isinstance(c, float)]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        constants += [d for d in defaults if isinstance(d, float)]
    return Leaf(
        {n: p.shape[0] for n, p in weights.items() if p.dim() == 1},
        {n: (p.shape[0], p.shape[1]) for n, p in weights.items() if p.dim() == 2},
        numbers,
        tuple(dict.fromkeys(constants)),
        tuple(v[0] for v in vars(module).values() if isinstance(v, tuple) and len(v) == 1 and isinstance(v[0], int)),
        tuple(n for n, p in weights.items() if p.dim() == 0),
        {n: v for n, v in vars(module).items() if isinstance(v, int) and not isinstance(v, bool) and n.isidentifier()},
        max(1, len(pair_of(type(module)))),
        rows,
        columns,
        tuple(dict.fromkeys(whole)),
    )


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """What a leaf's forward may depend on beside its tensors' elements; lengths of long sides are abstracted."""
    weights = dict([*module._parameters.items(), *module._buffers.items()])
    sides: dict[int, str] = {}
    for name, p in weights.items():
        if p is not None and p.dim() == 2:
            for axis, size in enumerate(p.shape):
                sides.setdefault(int(size), f"{name}.{axis}")

    def plain(value: Any) -> Any:
        if isinstance(value, bool | float | str | None | torch.dtype):
            return value
        if isinstance(value, int):
            return sides.get(value, value) if value > NARROW else value
        if isinstance(value, tuple) and all(isinstance(v, int | float | str) for v in value):
            return value
        return f"{type(value).__qualname__} at {id(value)}"

    own = [(n, plain(v)) for n, v in _settings(module)]
    tensors = [
        (n, None if p is None else tuple(plain(int(s)) for s in p.shape), n in module._buffers)
        for n, p in weights.items()
    ]
    return (type(module), tuple(own), tuple(tensors), source.code_of(type(module)))


_OWN = frozenset(vars(nn.Module()))


def is_setting(kind: Any, name: str) -> bool:
    """Whether what a class computes may depend on an attribute of this name: any but nn.Module's own, and private ones
    that no code of the class reads, which libraries put on modules."""
    return name not in _OWN and (not name.startswith("_") or name in names_read(kind))


def names_read(kind: Any) -> frozenset[str]:
    """Names in the code of a class down to nn.Module: of its functions, properties and what is defined inside them."""
    return _names_read(kind, source.code_of(kind))


@functools.cache
def _names_read(kind: Any, code: Any) -> frozenset[str]:
    names: set[str] = set()
    for base in itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__):
        for value in vars(base).values():
            for function in _with_enclosed(_function_of(value)):
                for code in _codes(function):
                    names.update(code.co_names)
    return frozenset(names)


def names_reached(kind: Any) -> frozenset[str]:
    """Those of `names_read` that a forward may come to, by the methods, properties and functions of libraries that are
    named on its way; and texts in that code, which `getattr` may take for names."""
    return _reached(kind, source.code_of(kind))[0]


def functions_reached(kind: Any) -> tuple[types.FunctionType, ...]:
    """The functions of `names_reached`."""
    return _reached(kind, source.code_of(kind))[1]


@functools.cache
def _reached(kind: Any, code: Any) -> tuple[frozenset[str], tuple[types.FunctionType, ...]]:
    members, names = source.members(kind), {"forward"}
    pending, visited = [_function_of(members.get("forward"))], dict[types.FunctionType, None]()
    while pending:
        function = pending.pop()
        if function is None or function in visited:
            continue
        visited[function] = None
        pending += _with_enclosed(function)
        for part in _codes(function):
            texts = {c for c in part.co_consts if isinstance(c, str) and c.isidentifier()}
            bases = itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__)
            above = [vars(base) for base in bases] if "super" in part.co_names else []
            for name in {*part.co_names, *texts}:
                pending += [_function_of(base[name]) for base in above if name in base and not trusted(base[name])]
                if name not in names:
                    names.add(name)
                    value = members.get(name, function.__globals__.get(name))
                    pending.append(None if trusted(value) else _function_of(value))
    return frozenset(names), tuple(visited)


def _function_of(value: Any) -> types.FunctionType | None:
    part = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    inner = inspect.unwrap(part) if callable(part) else None
    return inner if isinstance(inner, types.FunctionType) else None


def _with_enclosed(function: types.FunctionType | None) -> list[types.FunctionType]:
    """A function, and those that it closes over, as a decorator's does without `functools.wraps`."""
    functions = [] if function is None else [function]
    for one in functions:
        for cell in one.__closure__ or ():
            try:
                enclosed = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            inner = None if trusted(enclosed) else _function_of(enclosed)
            if inner is not None and inner not in functions:
                functions.append(inner)
    return functions


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield code
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]


def class_code(kind: Any) -> tuple[str, ...]:
    """The attributes of a class that its forward comes to: another library may put others there."""
    return tuple(n for n, _ in source.code_of(kind) if n in names_reached(kind))


def contents_tests(module: nn.Module) -> tuple[str, ...]:
    """Tests that the lists, dictionaries and sets that a module's forward reads, and plain settings of its children,
    are as they are now. Raises Unproven where it reads what may change in place, and no cheap test shows that."""
    kind = type(module)
    reached, tests = names_reached(kind), []
    values = {n: v for n, v in source.members(kind).items() if not n.startswith("__")} | vars(module)
    for name, value in values.items():
        if name in _OWN or (name not in reached and "getattr" not in reached):
            continue
        if isinstance(value, functools.partial) and value.keywords and name.isidentifier() and lasting(value):
            if not _literal(value.keywords) or len(repr(value.keywords)) > _LONGEST:
                raise Unproven(f"its forward reads the keywords of its {name}, which may change in place")
            tests.append(f"ferryman_same(self.{name}.keywords, {value.keywords!r})")
            continue
        if lasting(value):
            continue
        settled = settings_of(value, reached) if name.isidentifier() else None
        if settled is not None:
            tests += [f"ferryman_same(self.{name}.{n}, {v!r})" for n, v in settled.items()]
            continue
        number = scalars.small(value) if name.isidentifier() else None
        if number is not None:
            tests.append(scalars.test_of(name, value, number))
            continue
        if not name.isidentifier() or not _literal(value) or len(repr(value)) > _LONGEST:
            kept = f"{type(value).__name__} {name}"
            raise Unproven(f"its forward reads its {kept}, which may change in place, and no cheap test shows that")
        tests.append(f"ferryman_same(self.{name}, {value!r})")
    for path, child in module._modules.items():
        if child is not None and path in reached and path.isidentifier():
            read = names_reached(type(child))
            settings = [(n, v) for n, v in _settings(child) if n in read and n.isidentifier() and _literal(v)]
            tests += [f"ferryman_same(self.{path}.{n}, {v!r})" for n, v in settings]
    return tuple(tests)


_LONGEST = 200  # characters of contents that a call compares
PLAIN = bool | int | float | str | None | torch.dtype


_ASKS = {"getattr", "hasattr", "vars", "dir", "setattr", "delattr", "__dict__", "str", "repr"}


def settings_of(value: Any, reached: Collection[str]) -> dict[str, Any] | None:
    """What code that reads the names ``reached`` may read of an object that only holds settings, such as a config.

    None for any other object: one whose class has code of such a name, or code that runs when an attribute is read;
    one of which such an attribute is no plain value; and where the code may ask for attributes by name.
    """
    kind = type(value)
    own = getattr(value, "__dict__", None)
    if own is None or isinstance(value, nn.Module | Tensor | types.ModuleType) or set(reached) & _ASKS:
        return None
    bases = [b for b in kind.__mro__ if b not in (object, types.SimpleNamespace)]
    if any(n in vars(base) for base in bases for n in _ACTS):
        return None
    if any(hasattr(type(v), "__get__") for base in bases for n, v in vars(base).items() if n in reached):
        return None  # a method, a property
    read = {n: getattr(value, n) for n in reached if n in own or any(n in vars(base) for base in bases)}
    plain = all(n.isidentifier() and not n.startswith("__") and _literal(v) for n, v in read.items())
    return dict(sorted(read.items())) if read and plain else None


# What runs when an object is read, called, compared, gone over or computed with
_ACTS = {
    *(
        "__getattr__",
        "__call__",
        "__len__",
        "__iter__",
        "__bool__",
        "__getitem__",
        "__contains__",
        "__torch_function__",
    ),
    *("__float__", "__int__", "__index__", "__add__", "__radd__", "__mul__", "__rmul__", "__sub__", "__rsub__"),
}


def _literal(value: Any) -> bool:
    """Whether a value is what its text says, such as a list of numbers."""
    if type(value) in (list, tuple, set):
        return bool(value or type(value) is not set) and all(map(_literal, value))
    if type(value) is dict:
        return all(_literal(k) and _literal(v) for k, v in value.items())
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, PLAIN) and not isinstance(value, enum.Enum) and finite and "self." not in str(value)


def class_settings(kind: Any) -> frozenset[str]:
    """Plain attributes of a class that its code reads: an instance may set its own over them."""
    plain = bool | int | float | str | tuple | None | torch.dtype
    return frozenset(n for n in names_read(kind) if is_setting(kind, n) and isinstance(getattr(kind, n, ...), plain))


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    return [(n, v) for n, v in vars(module).items() if is_setting(type(module), n)]


_kept: list[Any] = []


def keep_state(module: nn.Module) -> None:
    """What `state_of` names by its id must not be freed: another object could get the number. Its tensors are not."""
    plain = bool | int | float | str | None | torch.dtype
    _kept.extend(value for _, value in _settings(module) if not isinstance(value, plain))


def digest_of(kind: type) -> str:
    """Of the code that was proven."""
    digest = hashlib.sha256()
    for name, function in sorted(source.methods(kind).items()):
        digest.update(name.encode() + source.innermost(function).__code__.co_code)
    return digest.hexdigest()[:16]


def inputs_of(kind: Any) -> tuple[str, ...]:
    """The names of what a forward requires; empty where one stands behind another argument or goes by keyword only."""
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if required != parameters[: len(required)] or any(p.kind is p.KEYWORD_ONLY for p in required):
        return ()
    return tuple(p.name for p in required)


def pair_of(kind: Any) -> tuple[str, ...]:
    """The names of two tensors that a forward takes, the second perhaps None without being given; else nothing."""
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if not plain or len(parameters) != 2 or any(p.default not in (p.empty, None) for p in parameters):
        return ()
    return tuple(p.name for p in parameters) if parameters[0].default is inspect.Parameter.empty else ()


def input_of(kind: Any) -> str | None:
    """The name of the one tensor that a forward requires; None if it requires more or fewer."""
    names = inputs_of(kind)
    return names[0] if len(names) == 1 else None

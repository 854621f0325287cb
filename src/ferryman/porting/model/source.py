"""Functions as trees: read, resolved, changed, and compiled again with the original's globals and cells.

A changed copy reaches what is new through closure cells of its own. Its ``__globals__`` are the module's, so nothing of
the module is rebound, and what others rebind there later still holds.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dis
import functools
import inspect
import math
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _modules

from ferryman.porting.model import lambdas
from ferryman.porting.model.scalars import holds

MISSING = object()
_CODE = (types.FunctionType, property, staticmethod, classmethod)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_FUTURES = 0x1000000  # `from __future__ import annotations`; no other one changes code that is written today
_FILLERS = {"CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG"}
_PRIVATE = re.compile(r"__[A-Za-z]\w*?(?<!__)")
_parsed: dict[types.CodeType, ast.FunctionDef | None] = {}


def innermost(function: Any) -> Any:
    """What a chain of functools.wraps decorators wraps."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def unscripted(function: Any) -> Any:
    """What TorchScript compiled a function of; None where that asks which of the two it is."""
    own = getattr(function, "_torchdynamo_inline", None)
    plain = isinstance(own, types.FunctionType) and all("is_scripting" not in c.co_names for c in codes_of(own))
    return own if plain else None


def mangled(tree: ast.AST, function: types.FunctionType) -> str:
    """The text of an expression of a class's function, with its private names as instances have them."""
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2].lstrip("_")
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr) and owner:
            node.attr = f"_{owner}{node.attr}"
    return ast.unparse(tree)


def parsed(function: Any) -> ast.FunctionDef | None:
    """The tree of a plain function; None without a source, or where the source is not what its code came from."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or not isinstance(function, types.FunctionType):
        return None
    if code not in _parsed:
        _parsed[code] = _parse(function)
    return _parsed[code]


def know(function: types.FunctionType, tree: ast.FunctionDef) -> None:
    """The tree of a function that was made of one."""
    _parsed[function.__code__] = tree


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    try:
        # of its own code: inspect follows what a decorator says that it wraps
        lines, first = inspect.getsourcelines(function.__code__ if hasattr(function, "__wrapped__") else function)
        indented = lines[0][:1] in " \t"  # kept so, since a docstring's own indentation is part of the code
        tree = ast.parse("if 1:\n" + "".join(lines) if indented else "".join(lines))
    except SyntaxError:  # a lambda in the midst of lines
        return lambdas.of_file(function.__code__, functools.partial(_is_source, function))
    except (OSError, TypeError, IndexError):
        return None
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        return lambdas.of_lines(body, first - 1 - indented, functools.partial(_is_source, function))
    definition = body[0]
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    ast.increment_lineno(definition, first - 1 - indented)
    comes_from = functools.partial(_is_source, function)
    return definition if comes_from(definition) else lambdas.of_file(function.__code__, comes_from)


def _is_source(function: types.FunctionType, tree: ast.FunctionDef) -> bool:
    """Whether a function's code came from a tree."""
    # a call of many arguments compiles to other instructions where its file imports what it is a method of
    many = any(isinstance(n, ast.Call) and len(n.args) + len(n.keywords) > _MANY for n in ast.walk(tree))
    modules = [n for n, v in function.__globals__.items() if isinstance(v, types.ModuleType)] if many else []
    try:
        return any(
            _alike(_code_of(function, tree, (), names), function.__code__) for names in ([], modules)[: 1 + many]
        )
    except (SyntaxError, ValueError):
        return False


_MANY = 9  # arguments of a call that Python 3.11 and on compile in one of two ways


def _alike(a: types.CodeType, b: types.CodeType) -> bool:
    """The same instructions on the same names; a stale file is not the source of what runs."""
    inner = [[c for c in code.co_consts if isinstance(c, types.CodeType)] for code in (a, b)]
    same = (a.co_varnames, a.co_freevars) == (b.co_varnames, b.co_freevars) and _steps(a) == _steps(b)
    return same and len(inner[0]) == len(inner[1]) and all(map(_alike, *inner))


def _steps(code: types.CodeType) -> list[tuple[str, str]]:
    """Instructions and what they name. A method is loaded in one of two ways, by what the module imports."""
    steps = []
    for step in dis.get_instructions(code):
        if step.opname in _FILLERS:
            continue
        name = step.opname.replace("LOAD_METHOD", "LOAD_ATTR")
        jumps = "JUMP" in name or name in ("FOR_ITER", "SEND")
        inner = isinstance(step.argval, types.CodeType | frozenset) or jumps
        steps.append((name, "" if inner else str(step.argval).removeprefix("NULL + ")))
    return steps


def _code_of(
    function: types.FunctionType, tree: ast.FunctionDef, names: tuple[str, ...], imported: Sequence[str] = ()
) -> types.CodeType:
    """The function's code, compiled inside a maker whose parameters are its free variables. The maker never runs.
    imported: names that its file imports."""
    free = [*function.__code__.co_freevars, *names]
    body: list[ast.stmt] = [tree]
    private = any(_PRIVATE.fullmatch(n) for n in _identifiers(tree))
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    if private and owner.isidentifier():
        body = [ast.ClassDef(name=owner, bases=[], keywords=[], body=body, decorator_list=[])]
    # a function that names itself reads its file's name, as it does there
    named: list[ast.stmt] = [ast.Global([tree.name])] if tree.name.isidentifier() and tree.name not in free else []
    maker = ast.FunctionDef(
        name="_maker",
        body=[*named, *body],
        decorator_list=[],
        returns=None,
        type_comment=None,
        args=ast.arguments(
            posonlyargs=[],
            args=[ast.arg(arg=n) for n in free],
            vararg=None,
            kwonlyargs=[],
            kw_defaults=[],
            kwarg=None,
            defaults=[],
        ),
    )
    for node in (maker, *body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.__dict__.setdefault("type_params", [])  # Python 3.12 and on require it
    imports: list[ast.stmt] = [ast.Import([ast.alias(n)]) for n in imported if n.isidentifier()]
    module = ast.fix_missing_locations(ast.Module(body=[*imports, maker], type_ignores=[]))
    flags = function.__code__.co_flags & _FUTURES
    whole = compile(module, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    for code in _codes(whole):
        if code.co_name == tree.name and code.co_firstlineno == tree.lineno:
            return code
    raise ValueError(f"{tree.name} is not in what was compiled")


def codes_of(function: types.FunctionType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside."""
    yield function.__code__
    yield from _codes(function.__code__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        if isinstance(name, str):
            yield name


def rebuilt(function: types.FunctionType, tree: ast.FunctionDef, new: Mapping[str, Any]) -> types.FunctionType:
    """The function with another body; ``new`` are the names that it reads beside the original's."""
    code = _code_of(function, tree, tuple(new))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in new.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__, copy.__doc__ = function.__annotations__, function.__doc__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})
    return copy


def rewrapped(function: Any, inner: Any) -> Any:
    """The chain of decorators around another innermost function; None where a decorator does not keep it in a cell."""
    if not hasattr(function, "__wrapped__"):
        return inner
    own = function.__wrapped__
    wrapped = rewrapped(own, inner)
    if wrapped is None or not isinstance(function, types.FunctionType):
        return None
    cells = list(function.__closure__ or ())
    places = [i for i, cell in enumerate(cells) if content(cell) is own]
    if not places:
        return None
    for i in places:
        cells[i] = types.CellType(wrapped)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__wrapped__ = wrapped  # type: ignore[attr-defined]
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    copy.__annotations__ = function.__annotations__
    return copy


def content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def locals_of(function: types.FunctionType) -> set[str]:
    code = function.__code__
    return set(code.co_varnames) | set(code.co_cellvars)


def resolve(node: ast.AST, function: types.FunctionType) -> Any:
    """What a name, or an attribute of a module, means to a function; MISSING for a local, or anything else."""
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, function)
        return (
            getattr(base, node.attr, MISSING) if isinstance(base, types.ModuleType) or base is torch.Tensor else MISSING
        )
    if not isinstance(node, ast.Name) or node.id in locals_of(function):
        return MISSING
    if node.id in function.__code__.co_freevars:
        return content((function.__closure__ or ())[function.__code__.co_freevars.index(node.id)])
    return function.__globals__.get(node.id, getattr(builtins, node.id, MISSING))


def own_forward(module: nn.Module) -> bool:
    """Whether the forward on an instance is its class's own, bound to it."""
    forward = module.__dict__.get("forward")
    mine = isinstance(forward, types.MethodType) and forward.__self__ is module
    return mine and forward.__func__ is type(module).forward  # type: ignore[union-attr]


def watching(hook: Any) -> Any:
    """A hook of all modules that is ours and changes nothing: no fusion is left out for it."""
    hook.ferryman_watches = True
    return hook


def hooked_globally() -> bool:
    """Whether a hook that is not ours hears of all modules."""
    if not _modules._has_any_global_hook():
        return False
    hooks = (
        _modules._global_forward_hooks,
        _modules._global_forward_pre_hooks,
        _modules._global_backward_hooks,
        _modules._global_backward_pre_hooks,
    )
    return any(not hasattr(hook, "ferryman_watches") for some in hooks for hook in some.values())


def untouched(module: nn.Module) -> bool:
    """Whether a call of a module runs its class's forward, and nothing around it, of its own or of all modules."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooked or hooked_globally():
        return False
    return "forward" not in module.__dict__ or own_forward(module)


def names_read(function: Any, texts: Sequence[str]) -> dict[str, Any]:
    """What expressions over a function's parameters read of its globals.

    Not all of these: by the name of the file that they hold, `torch.compile` would look for ours there.
    """
    known = innermost(function).__globals__
    return {n: known[n] for text in texts for n in compile(text, "<guard>", "eval").co_names if n in known}


def names_of(function: types.FunctionType) -> dict[str, Any]:
    """What a function's code reads of its file, and closes over."""
    names = {n: function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return names | {n: content(cell) for n, cell in cells}


def members(kind: type) -> dict[str, Any]:
    """What a module class adds to nn.Module's attributes, by name, as its instances find them."""
    by_name: dict[str, Any] = {}
    for base in kind.__mro__:
        if base is nn.Module or base is object:
            break
        for name, value in vars(base).items():
            by_name.setdefault(name, value)
    return by_name


def code_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """What a module class says now of what its instances compute: its functions, properties and plain attributes."""

    def counts(value: Any) -> bool:
        parts = value if isinstance(value, tuple) else (value,)
        return isinstance(value, _CODE) or all(isinstance(p, _PLAIN) for p in parts)

    return tuple((n, v) for n, v in members(kind).items() if counts(v) and not (n.startswith("__") and n != "__call__"))


def current(kind: Any, names: Sequence[str], more: Sequence[str] = ()) -> Callable[..., bool]:
    """Whether a class's attributes are those that they were when this was called, and tests of an instance hold."""
    tests, meaning = still(kind, names)
    text = f"lambda self=None: {' and '.join([*tests, *more]) or True}"
    known = {**meaning, "ferryman_same": same, "ferryman_holds": holds, "torch": torch}
    function: Callable[..., bool] = eval(text, known)  # noqa: S307
    return function


def same(value: Any, before: Any) -> bool:
    """Whether a plain value, or a list, tuple, set or dict of such, is another in nothing: types, signs, order."""
    if type(value) is not type(before):
        return False
    if isinstance(before, dict):
        return same([*value.items()], [*before.items()])
    if isinstance(before, list | tuple):
        return len(value) == len(before) and all(map(same, value, before))
    if isinstance(before, float):
        return bool(value == before) and math.copysign(1.0, value) == math.copysign(1.0, before)
    return bool(value == before)


def still(kind: Any, names: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(tests that a class's attributes are those that they are now, what the names in these mean)."""
    meaning = {f"ferryman_code_{name}": getattr(kind, name) for name in names}
    # a class method is bound anew each time
    tests = [
        f"ferryman_kind.{name} {'==' if isinstance(value, types.MethodType) else 'is'} ferryman_code_{name}"
        for name, value in zip(names, meaning.values(), strict=True)
    ]
    return tests, {"ferryman_kind": _seen(kind), **meaning}


def _seen(kind: Any) -> Any:
    """The class, or, where Dynamo is told not to look into it (`torch._dynamo.allow_in_graph`),
    one that has what the class has then."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return type(kind.__name__, (kind,), {}) if rules is not None and rules.is_callable_allowed(kind) else kind


def methods(kind: type) -> dict[str, Any]:
    """The functions that a module class adds to nn.Module's, by name, as its instances find them.

    Static, class methods and properties are not among them.
    """
    own = {n: v for n, v in members(kind).items() if isinstance(v, types.FunctionType)}
    return {n: v for n, v in own.items() if not (n.startswith("__") and n != "__call__") and n != "extra_repr"}


def inner_functions(tree: ast.FunctionDef, others: Collection[str]) -> dict[str, ast.FunctionDef | ast.Lambda]:
    """Functions that a function's own block defines, each by the one name that only it has."""
    known: dict[str, ast.FunctionDef | ast.Lambda] = {}
    stores = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    defined = Counter(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and defined[statement.name] == 1 and statement.name not in others:
            known[statement.name] = statement
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            once = isinstance(target, ast.Name) and stores[target.id] == 1 and not defined[target.id]
            if isinstance(target, ast.Name) and isinstance(value, ast.Lambda) and once:
                known[target.id] = value
    return known

"""The code that an op's kernels are made of: what their launchers reach, and a digest of it.

Followed are the names that a function uses, through the files of kernels and the few files that families share. Other
functions of these files do not count, so that a further op in a family leaves its siblings' digests as they are. Nor
does what a compiler does not see: layout, comments, docstrings, where a function stands, the names of local variables,
each of which is a number in order of first appearance. The digest does not depend on Python's release.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ferryman.dispatch import local_names, registry

_ROOT = Path(__file__).parents[1]
# What families share: modules of Python that are followed, and C++ that stands before a kernel's own.
_SHARED = ("ferryman.backends.triton_lang", "ferryman.backends.triton_rows", "ferryman.backends.simt.rows")
_SHARED_CPP = tuple(_ROOT / "backends/simt" / f"{name}.cuh" for name in ("portable", "rows", "cluster", "whole"))
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_VARIABLE = ("id", "name", "rest")  # the fields that hold a variable's name
_UNSEEN = ("ctx", "kind", "type_comment", "type_params")  # a tree's fields without a meaning here


@dataclass(frozen=True)
class _Source:
    """A file's top-level statements by the names that they bind, and where imported names come from."""

    folder: Path
    definitions: Mapping[str, list[ast.stmt]]
    imports: Mapping[str, tuple[str, str | None]]  # name -> (module, name there; None: the module itself)


@lru_cache(maxsize=None)
def digest(op: str, lines: frozenset[str] | None = None, *, by_name: bool = False) -> str:
    """SHA-256 of the code that an op's implementations reach, or those of these names.

    ``by_name``: with the names of local variables, as lockfiles of versions 6 and 7 have it.
    """
    text = hashlib.sha256()
    for name, code in sorted(parts(op, lines, by_name=by_name).items()):
        text.update(f"{name}\0{code}\0".encode())
    return text.hexdigest()


def parts(op: str, lines: frozenset[str] | None = None, *, by_name: bool = False) -> dict[str, str]:
    """The code of each definition that an op's launchers reach, or these lines', and of each C++ file, by name.

    ``by_name``: as in `digest`.
    """
    code: dict[str, str] = {}
    files: set[Path] = set()
    seen: set[tuple[str, str]] = set()
    left = [
        (module, function)
        for line in registry.implementations(op)
        for module, _, function in (line.where.partition(":"),)
        if not module.endswith(".definition") and (lines is None or line.name in lines)
    ]
    while left:
        module, name = place = left.pop()
        source = None if place in seen else _source(module)
        seen.add(place)
        if source is None:
            continue
        nodes = source.definitions.get(name, [])
        if not nodes and name in source.imports:
            left += _followed(module, *source.imports[name], ())
        for node in nodes:
            label = f"{module.rpartition('.')[2]}.{name}"
            variables = {} if by_name else local_names.variables(node, {*source.definitions, *source.imports})
            code[label] = code.get(label, "") + _code(node, variables, {})
            files |= {source.folder / file for file in _cpp(node)}
            left += _used(node, module, source, variables)
    for file in sorted({*files, *_SHARED_CPP}) if files else ():
        code[file.name] = " ".join(_COMMENT.sub(" ", file.read_text(encoding="utf-8")).split())
    return code


@lru_cache(maxsize=None)
def _source(module: str) -> _Source | None:
    """None for a module that is not there, or no Python."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, tuple[str, str | None]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {a.asname or a.name.partition(".")[0]: (a.name, None) for a in node.names}
        else:
            for name in _bound(node):
                definitions.setdefault(name, []).append(node)
    return _Source(file.parent, definitions, imports)


def _bound(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _used(
    node: ast.stmt, module: str, source: _Source, variables: Mapping[ast.AST, local_names.Variable]
) -> Iterator[tuple[str, str]]:
    """What a definition uses beside its local variables: (module, name) of each."""
    attributes: dict[str, set[str]] = {}
    names = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value not in variables:
            attributes.setdefault(n.value.id, set()).add(n.attr)
        elif isinstance(n, ast.Name) and n not in variables:
            names.add(n.id)
    for name in names:
        if name in source.definitions:
            yield module, name
        elif name in source.imports:
            yield from _followed(module, *source.imports[name], sorted(attributes.get(name, ())))


def _followed(
    module: str, target: str, name: str | None, attributes: tuple[str, ...] | list[str]
) -> Iterator[tuple[str, str]]:
    """Where an imported name leads: to a definition, or to those of a module that are used. Ours and of an op's own
    package alone: what launches kernels, and PyTorch, are no kernel's code."""
    inside = f"{target}.{name}"
    if name is None or (_is_kernels(module, inside) and _source(inside) is not None):
        at = target if name is None else inside
        if _is_kernels(module, at):
            yield from ((at, attribute) for attribute in attributes)
    elif _is_kernels(module, target):
        yield target, name


def _is_kernels(module: str, target: str) -> bool:
    package = module.partition(".")[0]
    return target in _SHARED or target.startswith("ferryman.ops." if package == "ferryman" else f"{package}.")


def _cpp(node: ast.stmt) -> Iterator[str]:
    for n in ast.walk(node):
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and re.fullmatch(r"\w+\.cuh", n.value):
            yield n.value


def _code(
    node: object, variables: Mapping[ast.AST, local_names.Variable], numbers: dict[local_names.Variable, int]
) -> str:
    """A tree as text, without docstrings and empty fields, of which later releases of Python have more.

    ``numbers``: those of the local variables that were written; a further one gets the next.
    """
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list) and value and _is_docstring(value[0]):
                value = value[1:]
            if name in _VARIABLE and node in variables:
                value = numbers.setdefault(variables[node], len(numbers))
            if name not in _UNSEEN and value is not None and value != []:
                fields.append(f"{name}={_code(value, variables, numbers)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_code(n, variables, numbers) for n in node)}]"
    return repr(node)


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

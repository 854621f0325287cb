"""The edits of an op's own Triton kernels, and the module that an edited text becomes."""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ferryman import files
from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.porting.mutate import python
from ferryman.porting.mutate.edits import Edit, EditError

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "ferryman."


def text_of(file: str) -> str:
    return _read(str(ROOT / file))


@functools.lru_cache(maxsize=None)
def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=None)
def _tree(file: str) -> ast.Module:
    return ast.parse(text_of(file))


def file_of(line: Implementation) -> tuple[str, str]:
    """(the file inside the package, the launcher's name) of a menu line; ("", "") for another package's."""
    module, _, function = line.where.partition(":")
    if not module.startswith(_PACKAGE):
        return "", ""
    return module.removeprefix(_PACKAGE).replace(".", "/") + ".py", function


def _imports(file: str, names: set[str]) -> dict[str, set[str]]:
    """Files of the package that a file imports some of ``names`` from -> those names as they are called there."""
    imported: dict[str, set[str]] = {}
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_PACKAGE):
            path = node.module.removeprefix(_PACKAGE).replace(".", "/") + ".py"
            wanted = {a.name for a in node.names if (a.asname or a.name) in names}
            if wanted and (ROOT / path).is_file():
                imported.setdefault(path, set()).update(wanted)
    return imported


def _closure(file: str, start: set[str]) -> dict[str, set[str]]:
    """Files -> the names in them that are used, from some names of one file on."""
    used: dict[str, set[str]] = {}
    left = [(file, start)]
    while left:
        at, names = left.pop()
        more = python.reachable(_tree(at), names) - used.get(at, set())
        if more:
            used.setdefault(at, set()).update(more)
            left += list(_imports(at, more).items())
    return used


@functools.lru_cache(maxsize=None)
def interpretable(op: str) -> tuple[Implementation, ...]:
    """The op's last Triton line that is not for a part of the calls, whose kernels Triton's interpreter can run (Gluon
    it cannot); then its sisters in the files that it uses."""
    able = [line for line in reversed(registry.implementations(op)) if _runs(line)]
    if not able:
        return ()
    general = next((line for line in able if not line.partial), able[0])
    file, function = file_of(general)
    files = _closure(file, {function})
    return (general, *(line for line in able if line is not general and file_of(line)[0] in files))


def _runs(line: Implementation) -> bool:
    file, function = file_of(line)
    if line.backend != "triton" or not file or any(map(_is_gluon, _closure(file, {function}))):
        return False
    names = python.reachable(_tree(file), {function})
    return bool(names & python.jitted(_tree(file))) or any("jit" in text_of(f) for f in _imports(file, names))


def _is_gluon(file: str) -> bool:
    return "from triton.experimental import gluon" in text_of(file)


def lines_of(op: str, implementation: str | None) -> tuple[Implementation, ...]:
    """The lines whose sources are edited: `interpretable`, or the one of that name, if the interpreter can run it."""
    if implementation is None:
        return interpretable(op)
    return tuple(line for line in registry.implementations(op) if line.name == implementation and _runs(line))


@functools.lru_cache(maxsize=None)
def multiplies(op: str, implementation: str | None = None) -> bool:
    """Whether its kernels multiply tiles: of bfloat16, Triton's interpreter then multiplies raw integers."""
    places = [file_of(line) for line in (*interpretable(op), *lines_of(op, implementation))]
    return any("tl.dot(" in text_of(f) for file, function in places for f in _closure(file, {function}))


def candidates(op: str, implementation: str | None = None) -> dict[Edit, Implementation]:
    """Every edit of the jitted functions that the launchers of `lines_of` reach, helpers' in other files among them.

    With each the first line that reaches it.
    """
    edits: dict[Edit, Implementation] = {}
    for line in lines_of(op, implementation):
        file, function = file_of(line)
        for path, names in sorted(_closure(file, {function}).items()):
            for edit in python.edits(text_of(path), path, names):
                edits.setdefault(edit, line)
    return edits


@functools.lru_cache(maxsize=1)
def _folder() -> files.OwnFolder:
    """Edited Triton modules must be files: Triton reads its kernels' source from there. Removed at exit."""
    return files.OwnFolder("ferryman-mutants-")


def load(name: str, text: str) -> ModuleType:
    """A module made from a text. What the text raises at import rises."""
    path = _folder().path / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EditError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def kernel(line: Implementation, edit: Edit) -> Callable[..., Any]:
    """The line's launcher after an edit of its file, or of one that it imports (then both are loaded anew)."""
    # equal edits at two places of a function have one tag
    return _launcher(line, {edit.file: edit.apply(text_of(edit.file))}, f"{edit.tag}_{edit.start}")


def _launcher(line: Implementation, texts: Mapping[str, str], tag: str) -> Callable[..., Any]:
    """The line's launcher where some files have other texts. What imports them is loaded anew, too."""
    file, function = file_of(line)
    names: dict[str, str] = {}

    def module(path: str) -> str | None:
        """The new module's name; None where the path does not lead to a new text."""
        if path in names:
            return names[path]
        text = texts.get(path, text_of(path))
        changed = path in texts
        for imported in _imports(path, _all(path)):
            inner = module(imported) if imported != path else None
            if inner is not None:
                dotted = _PACKAGE + imported.removesuffix(".py").replace("/", ".")
                text, changed = text.replace(f"from {dotted} import", f"from {inner} import"), True
        if not changed:
            return None
        names[path] = f"ferryman_mutant_{tag}_{path.removesuffix('.py').replace('/', '_')}"
        if names[path] not in sys.modules:
            load(names[path], text)
        return names[path]

    name = module(file)
    if name is None:
        raise EditError(f"{', '.join(texts)} is no part of {file}")
    launcher: Callable[..., Any] = getattr(sys.modules[name], function)
    return launcher


class TooLong(BaseException):
    """A run executes too many statements. Not an Exception: no launcher may take it for a failure of its own."""


@dataclass
class Reached:
    """The lines of kernels that a run executed, as (file inside the package, line), and how many statements."""

    most: float = math.inf
    lines: set[tuple[str, int]] = field(default_factory=set)
    statements: int = 0

    def add(self, file: str, first: int, last: int) -> None:
        self.lines.update((file, n) for n in range(first, last + 1))
        self.statements += 1
        if self.statements > self.most:
            raise TooLong


_reached: Reached | None = None


def reached(file: str, first: int, last: int) -> None:
    """A statement of a watched kernel calls this before it runs."""
    if _reached is not None:
        _reached.add(file, first, last)


def watch(into: Reached | None) -> None:
    """Where watched kernels' statements are noted from now on."""
    global _reached
    _reached = into


def watched(line: Implementation) -> Callable[..., Any]:
    """The line's launcher, whose interpreted kernels tell `reached` each statement: the same computation, at a
    fifth of what Python's own tracing costs."""
    file, function = file_of(line)
    texts = {path: _telling(path) for path in _closure(file, {function}) if python.jitted(_tree(path))}
    return _launcher(line, texts, "watched")


def _telling(path: str) -> str:
    """A file's text, in which every statement of a jitted function is preceded by a call of `reached`."""
    tree, kernels = ast.parse(text_of(path)), python.jitted(_tree(path))

    def marked(body: list[ast.stmt]) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        for node in body:
            blocks = [b for b in ("body", "orelse") if getattr(node, b, None)]
            last = node.body[0].lineno - 1 if isinstance(node, (ast.If, ast.For, ast.While)) else node.end_lineno
            statements.append(
                ast.parse(f"ferryman_reached({path!r}, {node.lineno}, {max(last or 0, node.lineno)})").body[0]
            )
            for block in blocks:
                setattr(node, block, marked(getattr(node, block)))
            statements.append(node)
        return statements

    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in kernels:
            node.body = marked(node.body)
    first = next(i for i, n in enumerate(tree.body) if not _leads(n))
    importing = f"from {__name__} import reached as ferryman_reached"
    tree.body.insert(first, ast.parse(importing).body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _leads(node: ast.stmt) -> bool:
    """What must stand first in a module."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _all(path: str) -> set[str]:
    return {a.asname or a.name for n in _tree(path).body if isinstance(n, ast.ImportFrom) for a in n.names}

"""What a user names on the command line of `ferryman mutate`: a kernel's file and function, and the tests' command."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ferryman.errors import ArgumentError, UnknownName
from ferryman.porting.mutate import indexes, python
from ferryman.porting.mutate.edits import Edit, Operator

_NAMED = "file.py:kernel or module:kernel"


@dataclass(frozen=True)
class Target:
    """The kernel's file, its module's name where it was given as one, and the function."""

    file: Path
    module: str
    function: str


def target_of(text: str) -> Target:
    """``path/file.py:kernel`` or ``module:kernel``. Raises ArgumentError."""
    where, _, function = text.rpartition(":")
    if not where or not function.isidentifier():
        raise ArgumentError("mutate", "kernel", repr(text), _NAMED)
    if where.endswith(".py"):
        file, module = Path(where), Path(where).stem
    else:
        file, module = _file_of(where), where
    if file.is_dir():
        raise ArgumentError("mutate", "kernel", f"{where}, which is a folder", _NAMED)
    if not file.is_file():
        raise ArgumentError("mutate", "kernel", f"{where}, which is no Python file here", _NAMED)
    return Target(Path(os.path.realpath(file)), module, function)


def _file_of(module: str) -> Path:
    """The file of a module that can be imported from here; else the name itself, as a path."""
    if not all(part.isidentifier() for part in module.split(".")):
        return Path(module)
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # there is none, or it has no file
        spec = None
    except Exception as error:  # the packages around it are imported, and may raise anything
        actual = f"{module}, whose import raised {type(error).__name__}: {error}"
        raise ArgumentError("mutate", "kernel", actual, "a module that can be imported, or file.py:kernel") from error
    finally:
        sys.path.remove(os.getcwd())
    return Path(spec.origin) if spec is not None and spec.origin is not None else Path(module)


def command_of(text: str) -> list[str]:
    """The words of the tests' command. Raises ArgumentError."""
    required = "a command, as in 'pytest tests/test_mine.py'"
    try:
        words = shlex.split(text)
    except ValueError as error:
        reason = f"{text!r}, which a shell could not read ({error})"
        raise ArgumentError("mutate", "--test", reason, f"{required}, with every quotation closed") from error
    if not words or not words[0]:
        raise ArgumentError("mutate", "--test", repr(text), required)
    return words


def text_of(file: Path) -> str:
    """The text of a Python file. Raises ArgumentError where it is not UTF-8, or no Python."""
    required = "a file that Python can read"
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        actual = f"{file}, which is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        raise ArgumentError("mutate", "kernel", actual, f"{required}, encoded as UTF-8") from error
    try:
        ast.parse(text)
    except SyntaxError as error:
        actual = f"{file}, which has a syntax error in line {error.lineno}: {error.msg}"
        raise ArgumentError("mutate", "kernel", actual, required) from error
    except ValueError as error:  # null bytes
        raise ArgumentError("mutate", "kernel", f"{file}, which is no Python: {error}", required) from error
    return text


def edits_of(target: Target) -> tuple[list[Edit], list[str]]:
    """(edits of the jitted functions that the kernel reaches in its file, those functions' names).

    Where an ``if`` or a ``try`` defines a name on two sides, both are edited. Raises ArgumentError, UnknownName.
    """
    text = text_of(target.file)
    tree = ast.parse(text)
    functions = {n.name for n in python.statements(tree) if isinstance(n, ast.FunctionDef)}
    if target.function not in functions:
        raise UnknownName(f"function of {target.file.name}", target.function, functions)
    kernels = python.reachable(tree, [target.function]) & python.jitted(tree)
    if not kernels:
        raise ArgumentError(
            "mutate",
            "kernel",
            f"{target.function}, which is not jitted and names nothing that is",
            "a @triton.jit function, or a launcher of one in the same file",
        )
    return python.edits(text, target.file.name, kernels, _operators(tree)), sorted(kernels)


def _operators(tree: ast.Module) -> list[Operator]:
    """Those of the self-test, but for a rounding of what is an offset: it cannot run."""
    places = indexes.places(tree)

    def elsewhere(one: Operator) -> Operator:
        def make(node: ast.AST, scope: python.Scope) -> Iterator[tuple[object, str]]:
            if indexes.place(node) not in places:
                yield from one.make(node, scope)

        return replace(one, make=make)

    return [elsewhere(one) if one.name in python.ROUNDINGS else one for one in python.OPERATORS]

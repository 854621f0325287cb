"""The edits of an op's own C++ kernels, compiled for an AMD device that is not here and executed by the simulator."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ferryman.backends import redirect, simt, simt_offline
from ferryman.backends.simt import Unit
from ferryman.dispatch import kernel_code, registry
from ferryman.dispatch.select import View, refusals
from ferryman.errors import Unsupported
from ferryman.ops.menu import Implementation
from ferryman.porting.mutate import cpp
from ferryman.porting.mutate.edits import Edit, EditError
from ferryman.porting.mutate.sources import ROOT

_WORD = re.compile(r"[A-Za-z_]\w*")
_LOCATED = re.compile(r"^\s+\.loc\s+(\d+)\s", re.MULTILINE)
_FILE = re.compile(r'^\s+\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', re.MULTILINE)
_LAYOUT = re.compile(r"^\s*(?:\.loc|\.file|\.Ltmp\d+:|\.Lfunc_\w+:|;).*\n|\s*;.*", re.MULTILINE)
Units = frozenset[Unit]


def line_of(op: str) -> Implementation | None:
    """The op's last line in HIP, which serves most calls."""
    return next((line for line in reversed(registry.implementations(op)) if line.backend == "hip"), None)


@functools.lru_cache(maxsize=None)
def _paths() -> dict[str, Path]:
    return {path.name: path for path in sorted(ROOT.rglob("*.cuh"))}


@functools.lru_cache(maxsize=None)
def text_of(file: str) -> str:
    return _paths()[file].read_text("utf-8")


def _files(op: str) -> list[str]:
    """The C++ that the op's units are made of on AMD: what families share, and its own."""
    own = [name for name in kernel_code.parts(op) if name in _paths() and _paths()[name].parent != simt.HERE]
    shared = [f.name for name in own for f in simt.family_files(_paths()[name], rows=True)]
    return list(dict.fromkeys([*own, *shared]))


def candidates(op: str) -> list[Edit]:
    """Every edit of the op's own C++, and of the shared functions that it names."""
    if line_of(op) is None:
        return []
    files = _files(op)
    named = {word for name in files if name != "portable.cuh" for word in _WORD.findall(text_of(name))}
    return [e for name in files for e in _edits(name) if name != "portable.cuh" or e.function in named]


@functools.lru_cache(maxsize=None)
def _edits(file: str) -> list[Edit]:
    return cpp.edits(text_of(file), file)


def edited(unit: Unit, edit: Edit) -> Unit:
    """The unit with its file's text edited; the same unit where it holds no such file."""
    text = text_of(edit.file)
    if unit.source.count(text) != 1:
        return unit
    narrow = cpp.NARROW.replace("static inline", "static inline __attribute__((device))")
    source = (narrow if "ferryman_narrow" in edit.new else "") + unit.source.replace(text, edit.apply(text))
    return unit._replace(source=source)


def _route() -> Any:
    route = redirect.current()
    if route is None:
        raise EditError("an edit of C++ runs in the simulator, and this thread's launches go to none")
    return route


def right(line: Implementation, profile: Any) -> Callable[..., Any]:
    """The line's launcher, which refuses what its clauses do. Raises Unsupported there."""
    launcher, op = registry.launcher(line), registry.primitive(line.op)

    def run(*args: Any) -> Any:
        refused = refusals(line, View.of(op, args[:-1], profile), profile, absent=True)
        if refused:
            raise Unsupported(f"{line.op} ({line.name}): {'; '.join(refused)}")
        return launcher(*args)

    return run


def kernel(line: Implementation, edit: Edit) -> Callable[..., Any]:
    """The line's launcher, whose units are edited."""
    launcher = registry.launcher(line)

    def run(*args: Any) -> Any:
        route = _route()
        before, route.change = route.change, lambda unit: edited(unit, edit)
        try:
            return launcher(*args)
        finally:
            route.change = before

    return run


def launched(run: Callable[[], Any]) -> tuple[Any, Units]:
    """(what ``run`` gives, the units that it launched)."""
    units: set[Unit] = set()
    route = _route()

    def seen(unit: Unit) -> Unit:
        units.add(unit)
        return unit

    before, route.change = route.change, seen
    try:
        return run(), frozenset(units)
    finally:
        route.change = before


@functools.lru_cache(maxsize=None)
def _with_code(unit: Unit, arch: str) -> frozenset[str]:
    """The files that an instruction of the unit's code comes from, inlined functions' too."""
    text = simt_offline.assembly(unit, arch)
    names = {number: Path(name).name for number, name in _FILE.findall(text)}
    return frozenset(names.get(number, "") for number in _LOCATED.findall(text))


def _code(text: str) -> str:
    """Assembly without comments, positions and tables for debuggers."""
    return _LAYOUT.sub("", text.partition(".section\t.debug")[0])


@functools.lru_cache(maxsize=None)
def changes(unit: Unit, edit: Edit, arch: str) -> bool:
    """Whether the edit changes the unit's machine code. Raises CompileError where it does not compile."""
    if edit.file not in _with_code(unit, arch):
        return False
    mutant = edited(unit, edit)
    return mutant != unit and _code(simt_offline.assembly(mutant, arch, keep=False)) != _code(
        simt_offline.assembly(unit, arch)
    )

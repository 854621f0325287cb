"""Parts of a forward that are an op: expressions, through locals, of a few values, proven as a module of their own.

A part is cut out of what flows in a block (`flow`): a result and the values that it is computed of. It becomes the
forward of a small module with what it reads of ours, however that is kept, and is proven like any other leaf module, or
like a helper; so it is what a part computes that decides, not how it is spelled. What it computes between must have no
other reader. Nothing is known of the values that go in: the code that stands there asks what the proof needs, and runs
the part itself where that does not hold.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ferryman import ops
from ferryman.errors import ArgumentError
from ferryman.porting.model import child_calls, laid, scalars, serving, source, steady
from ferryman.porting.model.trace import Read, meaning, meant
from ferryman.porting.model.trees import copied
from ferryman.porting.model.written import Function

PREFIX = "ferryman_part_"
_MEANT = "ferryman_meant({0}) == ferryman_was_{0}"


Relied = tuple[tuple[str, Any], ...]  # (a path, what a call of that comes to)


@dataclass(frozen=True, eq=False)
class Part:
    """One proven part. tree: it as a function of ``self`` and its values; forms: (tests, expression) over them,
    ``names`` for values and ``own`` (name, expression over self) for what it reads, of which those in ``fixed`` are
    what they were; code: of the class, reads: of files. children: whose call is in it. numbers:
    how many of the last values are numbers. remark: what a user should know of it. masks: functions that the forms
    call."""

    op: str
    tree: ast.FunctionDef
    values: int
    names: tuple[str, ...]
    own: tuple[tuple[str, str], ...]
    forms: tuple[tuple[tuple[str, ...], str], ...]
    gradient: bool
    fixed: tuple[tuple[str, Any], ...]
    code: tuple[str, ...]
    reads: tuple[Read, ...]
    children: tuple[str, ...] = ()
    numbers: int = 0
    remark: str = ""
    masks: tuple[tuple[str, ast.FunctionDef], ...] = ()

    def function(self, home: types.FunctionType, kind: Any) -> types.FunctionType:
        """What stands for it: (self, values) to its result."""
        original = plain_function(home, self.tree)
        given = [f"ferryman_a{i}" for i in range(self.values)]
        tests, current = source.still(kind, self.code) if self.code else ([], {})
        tests += [read.test(i) for i, read in enumerate(self.reads)]
        alone = {name for name, value in self.fixed if meant(value) is value}
        tests += [f"{n} is ferryman_was_{n}" if n in alone else _MEANT.format(n) for n, _ in self.fixed]
        tests += [f"type({n}) in ferryman_plain" for n in self.names[: len(self.names) - self.numbers]]
        lines = [f"def part(self, {', '.join(given)}):"]
        if left := serving.left([self.op], kind, self.code):
            lines += [f"    if {left}:", f"        return ferryman_original(self, {', '.join(given)})"]
        lines += [f"    {', '.join(self.names)} = {', '.join(given)}"]
        for name, path in sorted(self.own, key=lambda own: own[1].partition("(")[0] not in child_calls.TESTS):
            lines += [f"    {name} = {path}"]
            if path.partition("(")[0] in child_calls.TESTS:  # another child may have nothing that is read
                lines += [f"    if not {name}:", f"        return ferryman_original(self, {', '.join(given)})"]
        lines += [f"    if {' and '.join(tests)}:"]
        for asked, expression in self.forms:
            lines += [f"        if {' and '.join(asked) or True}:"]
            lines += [f"        {line}" for line in serving.attempt(expression)]
        lines += [f"    return ferryman_original(self, {', '.join(given)})"]
        known = source.names_read(home, [path for _, path in self.own]) | meaning(self.reads) | current
        known |= {f"ferryman_was_{name}": meant(value) for name, value in self.fixed} | {"ferryman_meant": meant}
        known |= {**child_calls.TESTS, **serving.LEFT_MEANING}
        known |= {"ops": ops, "torch": torch, "nn": nn, "ferryman_plain": serving.PLAIN, "ferryman_same": source.same}
        known |= {"ferryman_like": serving.like}
        known |= {"ferryman_holds": scalars.holds, "ferryman_file": home.__globals__}
        known |= {laid.NAME: laid.laid, laid.APART: laid.apart}
        known |= {name: plain_function(home, tree) for name, tree in self.masks}
        known |= {"ferryman_within": steady.within, "ferryman_readable": steady.readable}
        known |= {"ferryman_refused": ArgumentError, "ferryman_original": original}
        exec(compile("\n".join(lines) + "\n", "<ferryman part>", "exec"), known)  # noqa: S102 - our own text
        part: types.FunctionType = known["part"]
        return part


@dataclass(frozen=True)
class Parted:
    """Functions of a class with parts: (name, the tree that calls them, they, the tree before). Equal by ``key``.
    relied: of a function, what it calls that has no effects, past which a part may have gone; written: what is written
    out in its tree. turned: those whose order changed."""

    key: str
    inner: bool = field(default=False, compare=False)  # functions that it calls may have parts, too
    attributes: tuple[tuple[str, Any], ...] = field(default=(), compare=False)  # attributes that are served functions
    functions: tuple[tuple[str, ast.FunctionDef, tuple[Part, ...], str], ...] = field(
        default=(), compare=False, repr=False
    )
    relied: Mapping[str, Relied] = field(default_factory=dict, compare=False, repr=False)
    written: Mapping[str, Sequence[Function]] = field(default_factory=dict, compare=False, repr=False)
    turned: Collection[str] = field(default=(), compare=False, repr=False)

    def of(self, name: str, before: ast.FunctionDef) -> tuple[ast.FunctionDef, tuple[Part, ...]] | None:
        """The tree of a function, if it was made of that one."""
        for known, tree, parts, text in self.functions:
            if known == name and text == ast.dump(before):
                return copied(tree), parts
        return None

    def __deepcopy__(self, memo: Any) -> Parted:
        return self


NONE, INNER = Parted(""), Parted("inner", True)


def plain_function(home: types.FunctionType, tree: ast.FunctionDef) -> types.FunctionType:
    """A tree as a function of another's file, without defaults."""
    function = source.rebuilt(home, tree, {})
    function.__defaults__ = function.__kwdefaults__ = None
    function.__annotations__ = {}
    source.know(function, tree)
    return function

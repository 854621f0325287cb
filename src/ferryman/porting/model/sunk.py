"""What stands around an ``if`` that asks whether an argument, or a local, is None, written into both of its sides, so
that each is a block in which values flow to the result. An ``if`` that asks for the truth of an argument is settled for
calls that leave that out (`flags`). Of a local that is a setting of the module's, the side that is not taken today
stays as it is."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ferryman.porting.model import flags
from ferryman.porting.model.statements import FRAMES, bound, read, stored
from ferryman.porting.model.trees import copied

_MOST_SIDES, _MOST_STATEMENTS = 4, 300
_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
_SIDE = re.compile(r"(_ferryman\d+)+$")  # what a local has in a side of its own
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


def sunk(
    tree: ast.FunctionDef,
    write: Callable[[ast.FunctionDef], Any] | None = None,
    settings: Mapping[str, bool] | None = None,
) -> ast.FunctionDef | None:
    """A copy of a function's tree with its ``if`` so; None where it has no such, or too many. write: writes functions
    out in a tree, and says which; settings: locals that are settings, and whether these are None today, which it may
    add to."""
    arguments = {a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)}
    own = {
        a.arg
        for n in ast.walk(tree)
        if isinstance(n, _SCOPES) and n is not tree
        for a in ast.walk(n)
        if isinstance(a, ast.arg)
    }
    inner = any(
        isinstance(n, ast.FunctionDef | ast.ClassDef | ast.Nonlocal | ast.Global)
        for n in ast.walk(tree)
        if n is not tree
    )
    asks = not FRAMES.isdisjoint(read(tree))
    if inner or asks or own & {n for s in tree.body for n in stored(s)} or any(bound(s) for s in tree.body):
        return None
    known = {name: value for name, value in flags.settled(tree).items() if name not in own}
    whole = flags.folded(tree, known) if known else copied(tree)
    written = bool(write is not None and write(whole))
    names = Counter(n for s in whole.body for n in stored(s))
    first = next(iter((*tree.args.posonlyargs, *tree.args.args)), ast.arg("")).arg
    once = {n for n, count in names.items() if count == 1}
    maker = _Sinking(first, arguments, once, settings or {})
    whole.body = maker.block(whole.body, {}, arguments)
    if known:  # calls that leave out what is asked for its truth, and others
        rest = maker.renamed(tree.body, arguments)
        whole.body = [ast.copy_location(ast.If(flags.test_of(known), whole.body, rest), tree)]
    few = maker.sides <= _MOST_SIDES and (maker.sides > 1 or bool(known) or written)
    if not few or sum(isinstance(n, ast.stmt) for n in ast.walk(whole)) > _MOST_STATEMENTS:
        return None
    return ast.fix_missing_locations(whole)


class _Sinking:
    """own: the name of the module; once: locals that one statement alone puts a value in. sides: how many blocks there
    are, but for those of training, and of settings that are other ones today."""

    def __init__(self, own: str, arguments: set[str], once: set[str], settings: Mapping[str, bool]) -> None:
        self.own, self.arguments, self.once, self.sides, self.count = own, arguments, once - arguments, 1, 0
        self.settings = settings

    def renamed(self, body: list[ast.stmt], kept: set[str]) -> list[ast.stmt]:
        """A copy with locals of its own, but for those that hold what stands before."""
        self.count += 1
        other = copied(ast.Module(body, []))
        _Renaming(kept, self.count).visit(other)
        return other.body

    def block(self, body: list[ast.stmt], known: dict[str, bool], kept: set[str]) -> list[ast.stmt]:
        """known: whether a name is None, in this side. kept: names that hold what stands before it."""
        body = [_as_if(s) if self._asks(_asked(_as_if(s))[0]) else s for s in body]
        for i, statement in enumerate(body):
            drawn = _as_if(statement)
            if isinstance(drawn, ast.If) and statement is not drawn and _is_number_unless_training(drawn, self.own):
                there = kept | {n for s in body[:i] for n in stored(s)}
                rest = self.renamed([*drawn.body, *body[i + 1 :]], there)
                number = drawn.orelse[0].targets[0].id, drawn.orelse[0].value  # type: ignore[attr-defined]
                other = _then(drawn.orelse, body[i + 1 :])
                other = [_Number(*number).visit(s) for s in other] if number[0] in self.once else other
                other = self.block(other, known, there)
                return [*body[:i], ast.copy_location(ast.If(drawn.test, rest, other), statement)]
        last: dict[str, int] = {}
        for i, statement in enumerate(body):
            name, is_none = _asked(statement)
            at = last.get(name, -1) + 1
            again = name in self.arguments and at > 0 and self.sides < _MOST_SIDES
            whole = at == 0 or isinstance(body[at - 1], ast.Assign)
            setting = self.settings.get(_SIDE.sub("", name)) if name else None
            if setting is not None and whole and name not in known:
                return self._of_setting(body, i, at, setting == is_none, known, kept)
            if again or (name in self.arguments and at == 0) or (name in self.once and whole):
                assert isinstance(statement, ast.If)
                sides = statement.body, statement.orelse
                before, head, tail = body[:at], body[at:i], body[i + 1 :]
                if name in known and at == 0:  # nothing else was put there
                    taken = sides[0] if known[name] == is_none else sides[1]
                    return self.block([*before, *head, *_then(taken, tail)], known, kept)
                if self.sides >= _MOST_SIDES:
                    self.sides += 1
                    return body
                self.sides += 1
                there = {n for s in before for n in stored(s)}
                known, kept = {n: truth for n, truth in known.items() if n not in there}, kept | there
                second = self.renamed([*head, *_then(sides[1], tail)], kept)
                first = [*self._again(before), *head, *_then(sides[0], tail)]
                first = self.block(first, known | {name: is_none}, kept)
                second = self.block(second, known | {name: not is_none}, kept)
                return [*before, ast.copy_location(ast.If(statement.test, first, second or [ast.Pass()]), statement)]
            last |= dict.fromkeys(stored(statement), i)
        return body

    def _again(self, before: list[ast.stmt]) -> list[ast.stmt]:
        """The statements that put settings in locals, once more where they are read: nothing else is put there."""
        puts: dict[str, ast.stmt | None] = {}
        for statement in before:
            one = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Attribute)
            mine = {n for n in stored(statement) if _SIDE.sub("", n) in self.settings}
            puts |= dict.fromkeys(mine, copied(statement) if one and len(stored(statement)) == 1 else None)
        return [s for s in puts.values() if s is not None]

    def _asks(self, name: str) -> bool:
        return name in self.arguments or name in self.once or _SIDE.sub("", name) in self.settings

    def _of_setting(
        self, body: list[ast.stmt], i: int, at: int, taken: bool, known: dict[str, bool], kept: set[str]
    ) -> list[ast.stmt]:
        """taken: whether the first side of the ``if`` at ``i`` is the one of today."""
        statement = body[i]
        assert isinstance(statement, ast.If)
        before, head, tail = body[:at], body[at:i], body[i + 1 :]
        there = {n for s in before for n in stored(s)}
        known, kept = {n: truth for n, truth in known.items() if n not in there}, kept | there
        rest = self.renamed([*head, *_then(statement.orelse if taken else statement.body, tail)], kept)
        today = [*self._again(before), *head, *_then(statement.body if taken else statement.orelse, tail)]
        today = self.block(today, known, kept)
        sides = [today or [ast.Pass()], rest] if taken else [rest or [ast.Pass()], today]
        return [*before, ast.copy_location(ast.If(statement.test, *sides), statement)]


def _as_if(statement: ast.stmt) -> ast.stmt:
    """A choice between two values, as a choice between two statements."""
    value = statement.value if isinstance(statement, ast.Assign | ast.Return) else None
    if not isinstance(value, ast.IfExp):
        return statement
    one, other = copied(statement), copied(statement)
    one.value, other.value = copied(value.body), copied(value.orelse)  # type: ignore[attr-defined]
    return ast.copy_location(ast.If(value.test, [one], [other]), statement)


def _is_number_unless_training(statement: ast.If, own: str) -> bool:
    """Whether a value is a number but in training, as of a dropout that is drawn there alone."""
    test, other = statement.test, statement.orelse[0]
    asks = isinstance(test, ast.Attribute) and test.attr == "training"
    asks = asks and isinstance(test.value, ast.Name) and test.value.id == own  # type: ignore[attr-defined]
    put = isinstance(other, ast.Assign) and isinstance(other.targets[0], ast.Name)
    return asks and put and isinstance(other.value, ast.Constant)  # type: ignore[attr-defined]


class _Number(ast.NodeTransformer):
    """A number where a local that has it is read."""

    def __init__(self, name: str, number: ast.expr) -> None:
        self.name, self.number = name, number

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copied(self.number) if node.id == self.name and isinstance(node.ctx, ast.Load) else node


def _then(side: list[ast.stmt], tail: list[ast.stmt]) -> list[ast.stmt]:
    return [*side] if side and isinstance(side[-1], _LEAVES) else [*side, *copied(ast.Module(tail, [])).body]


def _asked(statement: ast.stmt) -> tuple[str, bool]:
    """The name that an ``if`` asks for, and whether its first side has it as None."""
    test = statement.test if isinstance(statement, ast.If) else None
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name) or len(test.ops) != 1:
        return "", False
    nothing = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
    asks = isinstance(test.ops[0], ast.Is | ast.IsNot)
    return (test.left.id, isinstance(test.ops[0], ast.Is)) if nothing and asks else ("", False)


class _Renaming(ast.NodeTransformer):
    """The locals of a side under names of their own, which no other side reads. kept: what others have put there."""

    def __init__(self, kept: set[str], count: int) -> None:
        self.kept, self.count, self.names = kept, count, set[str]()

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.names = {n for s in node.body for n in stored(s)} - self.kept
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = f"{node.id}_ferryman{self.count}" if node.id in self.names else node.id
        return node

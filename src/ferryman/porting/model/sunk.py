"""What stands around an ``if`` that asks whether an argument is None, written into both of its sides, so that each is a
block in which values flow from the arguments to the result."""

from __future__ import annotations

import ast

from ferryman.porting.model.trees import copied

_MOST_SIDES, _MOST_STATEMENTS = 4, 160
_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


def sunk(tree: ast.FunctionDef) -> ast.FunctionDef | None:
    """A copy of a function's tree with its ``if`` so; None where it has no such, or too many."""
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
    stored = {n for s in tree.body for n in _stored(s)}
    if inner or own & stored or any(isinstance(n, ast.Name) and n.id == "locals" for n in ast.walk(tree)):
        return None
    whole = copied(tree)
    maker = _Sinking(arguments)
    whole.body = maker.block(whole.body, {})
    if not 1 < maker.sides <= _MOST_SIDES or sum(isinstance(n, ast.stmt) for n in ast.walk(whole)) > _MOST_STATEMENTS:
        return None
    return ast.fix_missing_locations(whole)


class _Sinking:
    def __init__(self, arguments: set[str]) -> None:
        self.arguments, self.sides = arguments, 1

    def block(self, body: list[ast.stmt], known: dict[str, bool]) -> list[ast.stmt]:
        """known: whether an argument is None, in this side."""
        stored: set[str] = set()
        for i, statement in enumerate(body):
            name, is_none = _asked(statement)
            if name in self.arguments and name not in stored:
                assert isinstance(statement, ast.If)
                sides = statement.body, statement.orelse
                head, tail = body[:i], body[i + 1 :]
                if name in known:
                    taken = sides[0] if known[name] == is_none else sides[1]
                    return self.block([*head, *_then(taken, tail)], known)
                if self.sides >= _MOST_SIDES:
                    self.sides += 1
                    return body
                self.sides += 1
                count = self.sides
                first = self.block([*head, *_then(sides[0], tail)], known | {name: is_none})
                other = copied(ast.Module([*head, *_then(sides[1], tail)], []))
                _Renaming(self.arguments, count).visit(other)
                second = self.block(other.body, known | {name: not is_none})
                return [ast.copy_location(ast.If(statement.test, first, second or [ast.Pass()]), statement)]
            stored |= _stored(statement)
        return body


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


def _stored(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


class _Renaming(ast.NodeTransformer):
    """The locals of a side under names of their own, which no other side reads."""

    def __init__(self, arguments: set[str], count: int) -> None:
        self.arguments, self.count, self.names = arguments, count, set[str]()

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.names = {n for s in node.body for n in _stored(s)} - self.arguments
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = f"{node.id}_ferryman{self.count}" if node.id in self.names else node.id
        return node

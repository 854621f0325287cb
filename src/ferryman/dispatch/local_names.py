"""Which names of a definition are local variables, each with the scope that binds it.

A local variable's name says nothing to a compiler. That of a parameter does, which callers may give by keyword, and so
do those of globals and attributes. The rules are Python's: a comprehension is a scope of its own but for ``:=``, and a
nested function reads the variables of those around it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Variable = tuple[int, str]  # the scope's number, and the name
_BY_NAME = {"dir", "eval", "exec", "locals", "vars"}  # what may read a variable by its name
# Triton's own, which it reads, as it does a global, until a variable of that name is assigned.
_BUILTINS = {"float", "getattr", "hasattr", "int", "isinstance", "len", "list", "max", "min", "print", "range"}


@dataclass(eq=False)
class _Scope:
    """``bound``: local variables. ``kept``: what else is bound: parameters, nested functions, imports."""

    number: int
    outer: _Scope | None
    comprehension: bool = False
    bound: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)


def variables(definition: ast.stmt, module: Collection[str] = ()) -> Mapping[ast.AST, Variable]:
    """The nodes of a top-level statement that name a local variable, with it; none where a program may see the names.

    Nodes: Name by ``id``, ExceptHandler, MatchAs and MatchStar by ``name``, MatchMapping by ``rest``. ``module``: names
    that its file binds. No variable with such a name, or a builtin's of Triton, counts: Triton reads the global until
    the variable is assigned.
    """
    reader = _Reader(module)
    reader.visit(definition)
    if reader.seen:
        return {}
    bindings = ((node, _binding(name, scope)) for node, name, scope in reader.uses if name not in reader.declared)
    return {node: binding for node, binding in bindings if binding is not None}


def _binding(name: str, scope: _Scope | None) -> Variable | None:
    """The local variable that a name is in a scope; None for a name that is kept, or of no scope: a global."""
    while scope is not None:
        if name in scope.kept:
            return None
        if name in scope.bound:
            return scope.number, name
        scope = scope.outer
    return None


class _Reader(ast.NodeVisitor):
    """``uses``: each name with its scope. ``declared``: the module's names, builtins, and those of ``global`` and
    ``nonlocal``, which are kept wherever they stand. ``seen``: a class in a function, type parameters, or a call that
    reads variables by name."""

    def __init__(self, module: Collection[str]) -> None:
        self.uses: list[tuple[ast.AST, str, _Scope | None]] = []
        self.declared = {*module, *_BUILTINS}
        self.seen = False
        self._scope: _Scope | None = None
        self._scopes = 0

    def visit(self, node: ast.AST) -> None:
        self.seen |= bool(getattr(node, "type_params", ()))
        match node:
            case ast.Name(ctx=ast.Load()):
                self.uses.append((node, node.id, self._scope))
                self.seen |= node.id in _BY_NAME
            case ast.Name():
                self._bind(node, node.id, self._scope)
            case ast.NamedExpr():
                self._bind(node.target, node.target.id, self._of_function())
                self.visit(node.value)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._keep(node.name)
                for part in (*node.decorator_list, node.args, *filter(None, (node.returns,))):
                    self.visit(part)
                self._within(node.body, kept=_parameters(node.args))
            case ast.Lambda():
                self.visit(node.args)
                self._within((node.body,), kept=_parameters(node.args))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                self._comprehension(node.generators, (node.elt,))
            case ast.DictComp():
                self._comprehension(node.generators, (node.key, node.value))
            case _:
                self._others(node)

    def _others(self, node: ast.AST) -> None:
        match node:
            case ast.ClassDef():
                self.seen |= self._scope is not None
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar():
                self._bind(node, node.name, self._scope)
            case ast.MatchMapping():
                self._bind(node, node.rest, self._scope)
            case ast.alias():
                self._keep(node.asname or node.name.partition(".")[0])
            case ast.Global() | ast.Nonlocal():
                self.declared.update(node.names)
        self.generic_visit(node)

    def _comprehension(self, generators: Sequence[ast.comprehension], elements: Iterable[ast.expr]) -> None:
        first, *others = generators
        self.visit(first.iter)
        self._within((first.target, *first.ifs, *others, *elements), comprehension=True)

    def _within(self, nodes: Iterable[ast.AST], comprehension: bool = False, kept: Iterable[str] = ()) -> None:
        """Visit nodes in a scope of their own."""
        around = self._scope
        self._scope = _Scope(self._scopes, around, comprehension, kept=set(kept))
        self._scopes += 1
        for node in nodes:
            self.visit(node)
        self._scope = around

    def _of_function(self) -> _Scope | None:
        """The scope that ``:=`` binds in."""
        scope = self._scope
        while scope is not None and scope.comprehension:
            scope = scope.outer
        return scope

    def _bind(self, node: ast.AST, name: str | None, scope: _Scope | None) -> None:
        if name is not None:
            self.uses.append((node, name, scope))
            if scope is not None:
                scope.bound.add(name)

    def _keep(self, name: str) -> None:
        if self._scope is not None:
            self._scope.kept.add(name)


def _parameters(args: ast.arguments) -> list[str]:
    several = (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg)))
    return [arg.arg for arg in several]

"""Values that flow in a block of statements, and the statements that compute them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class Node:
    """``kind``: "op" over ``children``; "leaf", of which nothing is known; "self", what ``path`` gives of the module,
    with ``value`` now; "constant". Of an argument with a number as its default, ``value`` is that. ``label``: the
    functions that it applies itself."""

    kind: str
    tree: ast.expr
    children: tuple[Node, ...] = ()
    slots: tuple[ast.AST, ...] = ()  # the parts of ``tree`` that the children stand for
    label: str = ""
    value: Any = None
    whole: ast.expr | None = None  # the program's own spelling, where ``tree`` is what a child's class comes to
    write: ast.stmt | None = None  # a statement that writes into its first child, which is this then
    written: bool = False  # a tensor that is written into later, or was
    carried: tuple[str, ...] = ()  # names that a loop has values of from before it: those of its first children
    beside: bool = False  # a tensor of which only the kind is read, for what is made as it is
    number: bool = False  # a local that has a number that was computed of sizes, of which no more is known

    @functools.cached_property
    def wide(self) -> bool:
        """Whether its spelling asks for float64."""
        return self.label == "double" or "float64" in ast.unparse(self.tree)

    def inside(self, leaves: frozenset[Node]) -> list[Node]:
        """Itself and what it is computed of, down to leaves, each once and after its children."""
        order: list[Node] = []

        def walk(node: Node) -> None:
            if node in leaves or node in seen:
                return
            seen.add(node)
            for child in node.children:
                walk(child)
            order.append(node)

        seen: set[Node] = set()
        walk(self)
        return order

    def before(self, leaves: Iterable[Node]) -> set[Node]:
        """What statements before the one that reads it compute of it: itself, too, where they write into it."""
        return set(self.inside(frozenset(leaves))) - (set() if self.write is not None else {self})

    def counts(self) -> bool:
        """Whether it is a size of a tensor, a number that is computed of such, or a tuple of these."""
        if self.number:
            return True
        if self.kind in ("constant", "self"):
            return isinstance(getattr(self.tree, "value", None) if self.kind == "constant" else self.value, int)
        tree, sizes = self.tree, [child.counts() for child in self.children[:1]]
        if self.kind != "op" or self.write is not None:
            return False
        if isinstance(tree, ast.Attribute):
            return tree.attr in ("shape", "ndim")
        if isinstance(tree, ast.Call):
            bounded = self.label in ("max", "min") and all(child.counts() for child in self.children)
            return bounded or self.label in ("size", "dim", "len", "numel")
        if isinstance(tree, ast.BinOp | ast.UnaryOp):
            return all(sizes) and all(child.counts() for child in self.children)
        return isinstance(tree, ast.Subscript) and all(sizes)

    def one_number(self) -> bool:
        """Whether it is one size of a tensor, or one number that is computed of such."""
        tree = self.tree
        if self.kind != "op" or not self.counts():
            return self.number
        if isinstance(tree, ast.BinOp):
            return all(n.one_number() or n.kind == "constant" for n in self.children)
        if isinstance(tree, ast.Subscript):
            at = tree.slice.operand if isinstance(tree.slice, ast.UnaryOp) else tree.slice
            return isinstance(at, ast.Constant) and type(at.value) is int
        return self.label == "size" and len(self.children) == 2

    def of_ours(self) -> bool:
        """Whether it is computed of the module's tensors and settings alone, such as a weight that is scaled."""
        below = self.inside(frozenset())
        tensors = any(n.kind == "self" and isinstance(n.value, Tensor) for n in below)
        return self.kind == "op" and self.write is None and tensors and all(n.kind != "leaf" for n in below)

    def fact(self) -> bool:
        """Whether it says what a tensor is like: such a number, a dtype, a device; or is an argument with a default."""
        if self.kind == "leaf" and (self.beside or type(self.value) in (float, int)):
            return True
        named = isinstance(self.tree, ast.Attribute) and self.tree.attr in ("dtype", "device")
        return self.counts() or (self.kind == "op" and self.write is None and named)

    def asked_for(self) -> bool:
        """Whether it is a fact of which nothing but its own value says what it is."""
        return self.fact() and not self.beside and not self.number

    def said(self) -> str:
        """A fact that is no number of a tensor's, as an expression of ``ferryman_a0``."""
        if self.beside:
            return "ferryman_a0"
        return repr(self.value) if self.kind == "leaf" else f"ferryman_a0.{self.tree.attr}"  # type: ignore[attr-defined]

    def asked(self, fact: str, said: str) -> str:
        """Whether a fact is what is said of it, as code asks it."""
        if self.kind != "leaf":
            return f"{fact} == {said}"
        return f"ferryman_{'like' if self.beside else 'same'}({fact}, {said})"


@dataclass
class Statement:
    """A statement of a block that computes: every op in it with the node of its tree that it is, outermost first, and
    the locals that hold a node where it stands. ``binds``: what its target is then."""

    index: int
    ops: list[tuple[Node, ast.expr]]
    names: dict[Node, str]
    binds: dict[Node, str] = field(default_factory=dict)
    value: Node | None = None

    def alone(self, node: Node) -> Node:
        """A node that no equal expression shares, in the place of one that the statement binds."""
        other = replace(node, written=True)
        self.ops[:] = [(other if n is node else n, e) for n, e in self.ops]
        self.binds = {other if n is node else n: name for n, name in self.binds.items()}
        self.value = other
        return other

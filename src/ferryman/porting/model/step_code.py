"""The code that makes one value of the steps by which scores are masked (`score_steps`), by these, of zeros."""

from __future__ import annotations

import ast

import torch
from torch import Tensor

from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part_rules import value_text
from ferryman.porting.model.score_steps import MASK, Steps
from ferryman.porting.model.trace import Unproven
from ferryman.porting.model.trees import swap


class Spelling:
    """Expressions over names of values, and of what is read of the module."""

    def __init__(self, names: dict[Node, str]) -> None:
        self.names, self.own = names, dict[str, Node]()

    def __call__(self, node: Node) -> ast.expr:
        if node in self.names:
            return ast.Name(self.names[node], ast.Load())
        if node.kind == "self":
            known = next((a for a, n in self.own.items() if n is node), None)
            if known is None:
                known = f"ferryman_mine_{len(self.own)}"
                self.own[known] = node
            return ast.Name(known, ast.Load())
        if node.kind == "constant":
            return node.tree
        if node.kind != "op" or node.write is not None or node.carried or node.whole is not None:
            raise Unproven("a value that is not given")
        if node.label == "call":
            raise Unproven("a function of its own")
        inner = {id(slot): self(child) for slot, child in zip(node.slots, node.children, strict=True)}
        return swap(node.tree, inner)

    def text(self, node: Node) -> str:
        return ast.unparse(self(node))


def code_of(
    steps: Steps,
    names: dict[Node, str],
    sides: list[str],
    kind: str,
    query: tuple[str, tuple[int, ...]],
    numbers: list[tuple[float, ...]],
) -> tuple[str, dict[str, Node], list[str]] | None:
    """(a function that makes the queries and the one value, what it reads of the module, its arguments)."""
    spelling = Spelling({**dict.fromkeys(steps.path, "ferryman_like"), **names})
    name, turned = query
    shape = ", ".join(sides)
    lines = [
        f"ferryman_like = {name}.new_zeros(()).expand({shape})",
        f"ferryman_b = {name}.new_zeros({f'({shape},)' if steps.viewed else (1,) * len(sides)})",
        "ferryman_f = ferryman_b != 0",
        "ferryman_z = ferryman_f",
    ]
    for i, step in enumerate(steps.steps):
        if step.kind == "view":
            kept = ("ferryman_f", "ferryman_b", "ferryman_z")
            lines.append("ferryman_f = ferryman_f | ferryman_z")
            lines += [f"{value} = {_view(step.node, value, spelling)}" for value in kept]
            lines.append(f"ferryman_like_{i} = ferryman_b")
            spelling.names |= dict.fromkeys((s.node for s in steps.steps[i:]), f"ferryman_like_{i}")
            continue
        assert step.operand is not None
        operand = spelling.text(step.operand)
        if step.value is None:
            lines.append(f"ferryman_b = ferryman_b {'+' if step.kind == 'add' else '-'} ({operand})")
            continue
        of_where = ".logical_not()" if step.kind == "keep" else " != 0"  # which takes whole numbers, too
        lines.append(f"ferryman_c = ({operand}){of_where if step.by == 'where' else ''}")
        value, masked = spelling.text(step.value), step.by == "masked_fill"
        written = f"masked_fill(ferryman_c, {value})" if masked else f"where(~ferryman_c, {value})"
        lines += [f"ferryman_b = ferryman_b.{written}"] if kind == "add" else []
        lines.append("ferryman_f = ferryman_f | ferryman_c")
    result = "ferryman_b"
    if kind == "keep":
        result = "~ferryman_f"
    else:  # about half of what hides hides as well, in the same order, and is a number in a logarithm of another base
        lines.append("ferryman_b = ferryman_b.where(ferryman_b > -1e29, ferryman_b * 0.5 - 0.5e29)")
    if kind == "add" and any(n != -torch.inf for some in numbers for n in some):
        # a row in which all is hidden has the numbers that were written, of which no score is a part
        back = f".permute({turned})" if turned != tuple(range(len(sides))) else ""
        without = f"{name}.masked_fill(ferryman_f.all(-1, True){back}, 0.0)"
        lines.append(f"{name} = {without} if ferryman_f.dim() == {len(sides)} else {name}")
        if not any(s.kind in ("add", "take") for s in steps.steps):  # elsewhere they weigh nothing
            result = "ferryman_b.masked_fill(ferryman_f & ~ferryman_f.all(-1, True), -1e999)"
    lines = _used([*lines, f"return {name}, {result}"])
    body = "\n".join(f"    {line}" for line in lines)
    read = {name for line in lines for name in _read(line)}
    sized = {n for n in names.values() if n in read}
    own = spelling.own
    if any(value_text(n.value) is None and not isinstance(n.value, Tensor) for n in own.values()):
        return None
    given = [*sorted(sized), *(alias for alias in own if alias in read)]
    return f"def {MASK}({', '.join(given)}):\n{body}\n", own, given


def _read(line: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(line.removeprefix("return "))) if isinstance(n, ast.Name)}


def _used(lines: list[str]) -> list[str]:
    """Those of statements, each of which names what it puts somewhere first, whose values the last one comes to."""
    known, kept = {"return"}, list[str]()
    for line in reversed(lines):
        target, _, value = line.partition(" ")
        if target in known:
            known |= _read(value.removeprefix("= "))
            kept.insert(0, line)
    return kept


def _view(node: Node, value: str, spelling: Spelling) -> str:
    tree = node.tree
    assert isinstance(tree, ast.Call)
    inner = {id(s): spelling(c) for s, c in zip(node.slots[1:], node.children[1:], strict=True)}
    arguments = ", ".join(ast.unparse(swap(a, inner)) for a in tree.args[-len(inner) :] if inner)
    return f"{value}.{'reshape' if node.label == 'view' else node.label}({arguments})"

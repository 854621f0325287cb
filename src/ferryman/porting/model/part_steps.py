"""Parts of two products with several steps between that mask scores: what is added, and what a number hides.

The steps between the first product and what takes its scores are one value that is added, or one that hides. Which,
follows from the steps alone: each adds a value, or writes a number where another value says so, and reads of the scores
no more than their shape and dtype. The part with one value in the steps' place is proven as any other; the part itself,
run with drawn masks, must give what that gives. What stands for it makes the one value by the steps, of zeros.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.model import recognise, step_runs
from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part import Part, plain_function
from ferryman.porting.model.part_rules import value_text
from ferryman.porting.model.part_shape import closest, products
from ferryman.porting.model.score_steps import MASK, Steps, replaced, steps_of
from ferryman.porting.model.step_code import Spelling, code_of

_MOST_VALUES = 8
_OF_SCORES, _ALONE = -0.99e30, -0.99e9  # a number that hides is no greater: beside what is added, and without


def cut_of(root: Node, known: Callable[[Node], bool]) -> frozenset[Node] | None:
    """The values next to the products, and those that the steps are made of."""
    steps = steps_of(root)
    if steps is None:
        return None
    mask = Node("leaf", ast.Name(MASK, ast.Load()))
    whole, _ = replaced(root, steps, mask, "add")
    near = closest(whole, lambda n: n is mask or known(n))
    if near is None:
        return None
    cut = set(near) - {mask}
    for node in _operands(steps):
        ends = _ends(node, steps.path, frozenset(cut), known)
        if ends is None:
            return None
        cut |= ends
    if len(cut) > _MOST_VALUES or any(n.kind != "leaf" and not known(n) for n in cut):
        return None
    return frozenset(cut)


def _operands(steps: Steps) -> list[Node]:
    """What the steps take beside the scores."""
    return list(dict.fromkeys(c for s in steps.steps for c in s.node.children if c not in steps.path))


def _ends(node: Node, path: frozenset[Node], cut: frozenset[Node], known: Callable[[Node], bool]) -> set[Node] | None:
    """The values that an operand is computed of; None where one of them cannot be read."""
    if node in path or node in cut or node.kind in ("constant", "self"):
        return set()
    below = node.inside(frozenset())
    spelled = isinstance(node.tree, ast.Slice | ast.Tuple | ast.List | ast.Starred)
    flows = any(n.kind == "leaf" for n in below) or any(isinstance(n.value, Tensor) for n in below)
    computed = node.counts() and (isinstance(node.tree, ast.BinOp) or node.label in ("max", "min"))
    readable = known(node) or isinstance(node.tree, ast.Name)
    if not computed and not path & set(below) and not spelled and flows and readable:
        return {node}
    if node.kind == "leaf" or node.write is not None or node.carried:
        return None
    ends: set[Node] = set()
    for child in node.children:
        more = _ends(child, path, cut, known)
        if more is None:
            return None
        ends |= more
    return ends


# Proofs


def shown(proving: Any, root: Node, leaves: tuple[Node, ...]) -> Part | None:
    """A part of steps; None where they are none, or nothing is shown."""
    steps = steps_of(root) if products(root.inside(frozenset(leaves))) == 2 else None
    if steps is None or steps.before in leaves or steps.path & set(leaves):
        return None
    plain, _ = proving.function_of(root, leaves, False)
    key = f"steps\n{ast.unparse(plain)}"
    if key not in proving.tried:
        _, own = proving.function_of(root, leaves, True)
        proving.asked |= {ast.unparse(node.tree) for node in own.values()}
        proving.tried[key] = None
        for kind in ("keep", "add"):
            try:
                proving.tried[key] = proving.tried[key] or _shown(proving, root, leaves, steps, kind)
            except Exception:  # noqa: BLE001 - foreign code ran, on what it may not take
                continue
    part: Part | None = proving.tried[key]
    return part


def _shown(proving: Any, root: Node, leaves: tuple[Node, ...], steps: Steps, kind: str) -> Part | None:
    if kind == "keep" and any(s.kind in ("add", "take") for s in steps.steps):
        return None
    names = {leaf: f"ferryman_m{i}" for i, leaf in enumerate(leaves)}
    mask = Node("leaf", ast.Name(MASK, ast.Load()))
    whole, _ = replaced(root, steps, mask, kind)
    ends = frozenset((*leaves, mask))
    reached = {child for n in whole.inside(ends) for child in n.children}
    values = (*(n for n in leaves if n in reached and not n.fact()), mask)
    if len(values) != 4 or whole in ends:
        return None
    below = {child for n in steps.before.inside(frozenset(leaves)) for child in n.children}
    pair = [n for n in values if n in below]
    if len(pair) != 2:
        return None
    numbers = _numbers(proving, steps, pair)
    if not _hides(steps, numbers, kind):
        return None
    runs = step_runs.Runs(proving, root, leaves)
    scores = runs.scores(steps.before, pair)
    if scores is None:
        return None
    query, sides, turned = scores
    code = code_of(steps, names, sides, kind, (names[query], turned), numbers)
    if code is None:
        return None
    text, own, given = code
    one = (*values, *(n for n in leaves if n in reached and n.fact()))
    part: Part | None = proving.plainly(whole, one)
    if part is None:
        return None
    tree = ast.parse(text).body[0]
    assert isinstance(tree, ast.FunctionDef)
    function = plain_function(proving.function, tree)
    gradient = kind == "keep" or not any(s.value is not None for s in steps.steps)
    if not runs.agree(whole, one, function, given, own, mask, query, gradient):
        return None
    dims = {n: len(layout) for n, (layout, _) in runs.layouts.items()}
    half = kind == "keep" and all(n == -torch.inf for some in numbers for n in some)
    return _part(proving, root, leaves, part, one, (tree, given, own), query, mask, gradient, half, dims)


def _numbers(proving: Any, steps: Steps, pair: list[Node]) -> list[tuple[float, ...]]:
    """What each step writes, in several dtypes. pair: queries and keys, whose dtype is the scores'."""
    known = []
    for value in (s.value for s in steps.steps if s.value is not None):
        path = steps.path | {n for n in pair if _reads_dtype(value, n)}
        spelling = Spelling(dict.fromkeys(path, "ferryman_like"))
        spelled = spelling(value)
        known.append(step_runs.number_of(proving, value, path, spelled, spelling.own))
    return known


def _reads_dtype(value: Node, of: Node) -> bool:
    """Whether a value reads no more than the dtype of another."""
    readers = [n.tree for n in value.inside(frozenset((of,))) if of in n.children]
    return value is not of and all(isinstance(e, ast.Attribute) and e.attr == "dtype" for e in readers)


def _hides(steps: Steps, numbers: list[tuple[float, ...]], kind: str) -> bool:
    """Whether the numbers that are written are as small as must be, and one, where they stand for all."""
    if kind == "keep":
        return len({n for some in numbers for n in some[:1]}) == 1 and len(set(numbers)) == 1
    added = any(s.kind in ("add", "take") for s in steps.steps)
    return all(n <= (_OF_SCORES if added else _ALONE) for some in numbers for n in some)


def _part(
    proving: Any,
    root: Node,
    leaves: tuple[Node, ...],
    part: Part,
    one: tuple[Node, ...],
    code: tuple[ast.FunctionDef, list[str], dict[str, Node]],
    query: Node,
    mask: Node,
    gradient: bool,
    half: bool,
    dims: dict[Node, int],
) -> Part:
    """The part of all steps, whose forms are those of the part of one. half: in float16, too."""
    tree, given, own = code
    placed = dict(zip(one, part.names, strict=True))
    names = tuple(placed.get(leaf, f"ferryman_m{i}") for i, leaf in enumerate(leaves))
    own_name = placed[mask]
    passed = ", ".join(
        names[int(n.removeprefix("ferryman_m"))] if n.startswith("ferryman_m") and n not in own else n for n in given
    )
    plain, _ = proving.function_of(root, leaves, False)
    tests = [f"type({a}) in ferryman_plain" for a, n in own.items() if isinstance(n.value, Tensor)]
    tests += [f"ferryman_same({a}, {value_text(n.value)})" for a, n in own.items() if not isinstance(n.value, Tensor)]
    tests += [f"{placed[n]}.dim() == {count}" for n, count in dims.items()]
    if not gradient:
        tests.append(recognise.no_gradient([placed[n] for n in one if n is not mask and not n.fact()]))
    # scores are of another dtype under autocast; in float16 a number that hides, or a sum of two, may become -inf
    tests.append(f"not {placed[query]}.is_meta and not torch.is_autocast_enabled({placed[query]}.device.type)")
    tests += [] if half else [f"{placed[query]}.dtype is not torch.float16"]
    otherwise = f"ferryman_original(self, {', '.join(f'ferryman_a{i}' for i in range(len(leaves)))})"
    forms = []
    for asked, expression in part.forms:
        of_mask = [text for text in asked if _names(text, own_name)]
        before = [text for text in asked if not _names(text, own_name)]
        inner = f"({expression}) if {' and '.join(of_mask) or True} else {otherwise}"
        call = f"(lambda {placed[query]}, {own_name}: {inner})(*{MASK}({passed}))"
        forms.append(((*tests, *before), call))
    aliases = tuple((alias, proving.of_ours(node.tree)) for alias, node in own.items())
    return replace(
        part,
        tree=plain,
        values=len(leaves),
        names=names,
        own=(*part.own, *aliases),
        forms=tuple(forms),
        numbers=sum(n.fact() for n in leaves),
        masks=((MASK, tree),),
    )


def _names(text: str, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(ast.parse(text, mode="eval")))

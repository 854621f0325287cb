"""Parts of two products between which scores are masked in several steps: what is added, and what is hidden by a number.

The steps between the first product and what takes its scores are one value that is added, or one that hides. Which,
follows from the steps alone: each adds a value, or writes a number where another value says so, and reads of the scores
no more than their shape and dtype. The part with one value in the steps' place is proven as any other; the part itself,
run with drawn masks, must give what that gives. What stands for it makes the one value by the steps, of zeros.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.model import recognise, step_runs
from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part import Part, plain_function
from ferryman.porting.model.part_rules import is_plain
from ferryman.porting.model.part_shape import closest, products
from ferryman.porting.model.trace import Unproven
from ferryman.porting.model.trees import swap

MOST_VALUES = 8
_OF_SCORES, _ALONE = -0.99e30, -0.99e9  # a number that hides is no greater: beside what is added, and without
_LIKE = {f.__name__ for f in (torch.ones_like, torch.zeros_like, torch.full_like, torch.empty_like)}
_LIKE |= {"new_full", "new_zeros", "new_ones", "new_tensor", "new_empty"}
_AS = {"type_as", "to", "expand_as", "view_as"}  # of another tensor they take the shape, or the dtype
_VIEWS = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"}
MASK = "ferryman_mask"


@dataclass(frozen=True)
class Step:
    """``kind``: "add" or "take" an operand, "hide" where it is true, "keep" where it is, with ``value`` elsewhere; or
    "view". by: the function that it calls."""

    node: Node
    kind: str
    operand: Node | None = None
    value: Node | None = None
    by: str = ""


@dataclass(frozen=True)
class Steps:
    """before: the scores that the first step has; path: what is computed of the first product on the way to the last."""

    before: Node
    steps: tuple[Step, ...]
    path: frozenset[Node]

    @property
    def last(self) -> Node:
        return self.steps[-1].node

    @property
    def viewed(self) -> bool:
        return any(step.kind == "view" for step in self.steps)


def steps_of(root: Node) -> Steps | None:
    """The steps between two products, if there are any."""
    inside = root.inside(frozenset())
    first = next((n for n in inside if n.kind == "op" and products([n])), None)
    if first is None:
        return None
    users: dict[Node, list[Node]] = {}
    for node in inside:
        for i, child in enumerate(node.children):
            if not _reads_facts(node, i) and node not in users.setdefault(child, []):
                users[child].append(node)
    walked, steps, start = [first], list[Step](), first
    while len(after := users.get(walked[-1], [])) == 1:
        node, current = after[0], walked[-1]
        step = _step(node, current)
        if step is None and steps and any(s.kind != "view" for s in steps):
            break
        if step is None:
            steps = []
        elif not steps:
            start = current
        steps += [] if step is None else [step]
        walked.append(node)
    kinds = [s.kind for s in steps]
    if "view" in kinds and kinds.count("view") == 1:  # what is seen otherwise stays so
        at = kinds.index("view")
        kept = range(at + 1, len(kinds)) if at == 0 else range(at)
        start, steps = (steps[0].node if at == 0 else start), [steps[i] for i in kept]
    while steps and steps[0].kind == "view" and steps[-1].kind != "view":
        start, steps = steps[0].node, steps[1:]
    if not any(s.kind != "view" for s in steps):
        return None
    path = walked[: walked.index(steps[-1].node) + 1]
    return Steps(start, tuple(steps), frozenset(path))


def _reads_facts(node: Node, place: int) -> bool:
    """Whether a node takes of a child no more than its shape, dtype or device."""
    if node.fact() or (node.label in _LIKE and place == 0):
        return True
    return node.label in _AS and place > 0


def _step(node: Node, current: Node) -> Step | None:
    tree, children = node.tree, node.children
    if node.kind != "op" or node.whole is not None or children.count(current) != 1:
        return None
    at = children.index(current)
    binary = isinstance(tree, ast.BinOp) and len(children) == 2
    if binary and (node.write is None or isinstance(node.write, ast.AugAssign)):
        other = children[1 - at]
        if node.label == "Add" and not _number(other):
            return Step(node, "add", other)
        if node.label == "Sub" and at == 0 and not _number(other):
            return Step(node, "take", other)
        return None
    if node.write is not None or not isinstance(tree, ast.Call) or tree.keywords:
        return None
    if any(isinstance(a, ast.Starred) for a in tree.args):
        return None
    if node.label in _VIEWS and at == 0:
        return Step(node, "view")
    if len(children) == 3 and node.label == "masked_fill" and at == 0:
        return Step(node, "hide", children[1], children[2], node.label)
    if len(children) == 3 and node.label == "where":
        own = isinstance(tree.func, ast.Attribute) and tree.func.value is node.slots[0]  # a tensor's method
        condition, one, other = (children[1], children[0], children[2]) if own else children
        if current is one:
            return Step(node, "keep", condition, other, node.label)
        if current is other and not own:
            return Step(node, "hide", condition, one, node.label)
    return None


def _number(node: Node) -> bool:
    return node.kind == "constant" or (node.kind == "self" and not isinstance(node.value, Tensor))


# Cuts ----------------------------------------------------------------------------------------------------------------


def cut_of(root: Node, known: Callable[[Node], bool]) -> frozenset[Node] | None:
    """The values next to the products, and those that the steps are made of."""
    steps = steps_of(root)
    if steps is None:
        return None
    mask = Node("leaf", ast.Name(MASK, ast.Load()))
    whole, _ = _replaced(root, steps, mask, "add")
    near = closest(whole, lambda n: n is mask or known(n))
    if near is None:
        return None
    cut = set(near) - {mask}
    for node in _operands(steps):
        ends = _ends(node, steps.path, frozenset(cut), known)
        if ends is None:
            return None
        cut |= ends
    if len(cut) > MOST_VALUES or any(n.kind != "leaf" and not known(n) for n in cut):
        return None
    return frozenset(cut)


def _operands(steps: Steps) -> list[Node]:
    """What the steps take beside the scores."""
    return list(dict.fromkeys(c for s in steps.steps for c in s.node.children if c not in steps.path))


def _ends(
    node: Node, path: frozenset[Node], cut: frozenset[Node], known: Callable[[Node], bool]
) -> set[Node] | None:
    """The values that an operand is computed of; None where one of them cannot be read."""
    if node in path or node in cut or node.kind in ("constant", "self"):
        return set()
    below = node.inside(frozenset())
    spelled = isinstance(node.tree, ast.Slice | ast.Tuple | ast.List | ast.Starred)
    flows = any(n.kind == "leaf" for n in below) or any(isinstance(n.value, Tensor) for n in below)
    if not path & set(below) and not spelled and flows and (known(node) or isinstance(node.tree, ast.Name)):
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


# What stands in the steps' place -------------------------------------------------------------------------------------


def _replaced(root: Node, steps: Steps, mask: Node, kind: str) -> tuple[Node, Node]:
    """(the part with one step in the place of all, what that step is of): "add" it, or "keep" what it says."""
    place: dict[Node, Node] = {n: steps.before for n in steps.path if n is not steps.before}
    for node in steps.before.inside(frozenset()):
        place[node] = node
    before, given = ast.Name("ferryman_scores", ast.Load()), ast.Name(MASK, ast.Load())
    if kind == "add":
        one = Node("op", ast.BinOp(before, ast.Add(), given), (steps.before, mask), (before, given), "Add")
    else:
        written = [s for s in steps.steps if s.value is not None]
        by = "masked_fill" if any(s.by == "masked_fill" for s in written) else "where"
        value = _swapped(written[-1].value, place)  # type: ignore[arg-type]
        number = ast.Name("ferryman_value", ast.Load())
        condition = ast.Call(ast.Attribute(given, "logical_not", ast.Load()), [], []) if by == "masked_fill" else given
        call = ast.Call(ast.Attribute(before, by, ast.Load()), [condition, number], [])
        one = Node("op", call, (steps.before, mask, value), (before, given, number), by)
    return _swapped(root, {**place, steps.last: one}), one


def _swapped(node: Node, place: dict[Node, Node]) -> Node:
    if node not in place:
        children = tuple(_swapped(child, place) for child in node.children)
        same = all(a is b for a, b in zip(children, node.children, strict=True))
        place[node] = node if same else replace(node, children=children)
    return place[node]


class _Spelling:
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


def shown(proving: Any, root: Node, leaves: tuple[Node, ...]) -> Part | None:
    """A part of steps; None where they are none, or nothing is shown."""
    steps = steps_of(root) if products(root.inside(frozenset(leaves))) == 2 else None
    if steps is None or steps.before in leaves or steps.path & set(leaves):
        return None
    for kind in ("keep", "add"):
        try:
            part = _shown(proving, root, leaves, steps, kind)
        except Unproven:
            part = None
        if part is not None:
            return part
    return None


def _shown(proving: Any, root: Node, leaves: tuple[Node, ...], steps: Steps, kind: str) -> Part | None:
    if kind == "keep" and any(s.kind in ("add", "take") for s in steps.steps):
        return None
    names = {leaf: f"ferryman_m{i}" for i, leaf in enumerate(leaves)}
    mask = Node("leaf", ast.Name(MASK, ast.Load()))
    whole, _ = _replaced(root, steps, mask, kind)
    ends = frozenset((*leaves, mask))
    reached = {child for n in whole.inside(ends) for child in n.children}
    values = (*(n for n in leaves if n in reached and not n.fact()), mask)
    if len(values) != 4 or whole in ends:
        return None
    below = {child for n in steps.before.inside(frozenset(leaves)) for child in n.children}
    pair = [n for n in values if n in below]
    if len(pair) != 2:
        return None
    numbers = _numbers(proving, steps)
    if not _hides(steps, numbers, kind):
        return None
    runs = step_runs.Runs(proving, root, leaves)
    scores = runs.scores(steps.before, pair)
    if scores is None:
        return None
    query, sides, turned = scores
    code = _code(steps, names, sides, kind, (names[query], turned), numbers)
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
    return _part(proving, root, leaves, part, one, (tree, given, own), query, mask, gradient, numbers)


def _numbers(proving: Any, steps: Steps) -> list[tuple[float, ...]]:
    """What each step writes, in several dtypes."""
    known = []
    for value in (s.value for s in steps.steps if s.value is not None):
        spelling = _Spelling(dict.fromkeys(steps.path, "ferryman_like"))
        spelled = spelling(value)
        known.append(step_runs.number_of(proving, value, steps.path, spelled, spelling.own))
    return known


def _hides(steps: Steps, numbers: list[tuple[float, ...]], kind: str) -> bool:
    """Whether the numbers that are written are as small as must be, and one, where they stand for all."""
    if kind == "keep":
        return len({n for some in numbers for n in some[:1]}) == 1 and len(set(numbers)) == 1
    added = any(s.kind in ("add", "take") for s in steps.steps)
    return all(n <= (_OF_SCORES if added else _ALONE) for some in numbers for n in some)


def _code(
    steps: Steps,
    names: dict[Node, str],
    sides: list[str],
    kind: str,
    query: tuple[str, tuple[int, ...]],
    numbers: list[tuple[float, ...]],
) -> tuple[str, dict[str, Node], list[str]] | None:
    """(a function that makes the queries and the one value, what it reads of the module, its arguments)."""
    spelling = _Spelling({**dict.fromkeys(steps.path, "ferryman_like"), **names})
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
            held = ("ferryman_f", "ferryman_b", "ferryman_z")
            lines.append("ferryman_f = ferryman_f | ferryman_z")
            lines += [f"{name_} = {_view(step.node, name_, spelling)}" for name_ in held]
            lines.append(f"ferryman_like_{i} = ferryman_b")
            spelling.names |= dict.fromkeys((s.node for s in steps.steps[i:]), f"ferryman_like_{i}")
            continue
        assert step.operand is not None
        operand = spelling.text(step.operand)
        if step.value is None:
            lines.append(f"ferryman_b = ferryman_b {'+' if step.kind == 'add' else '-'} ({operand})")
            continue
        lines.append(f"ferryman_c = {'~' if step.kind == 'keep' else ''}({operand})")
        value, masked = spelling.text(step.value), step.by == "masked_fill"
        written = f"masked_fill(ferryman_c, {value})" if masked else f"where(~ferryman_c, {value})"
        lines += [f"ferryman_b = ferryman_b.{written}"] if kind == "add" else []
        lines.append("ferryman_f = ferryman_f | ferryman_c")
    result = "ferryman_b"
    if kind == "keep":
        result = "~ferryman_f"
    elif any(n != -torch.inf for some in numbers for n in some):
        # a row in which all is hidden has the numbers that were written, of which no score is a part
        nothing = f"ferryman_f.all(-1, True).expand({', '.join(sides[:-1])}, 1)"
        back = f".permute({turned})" if turned != tuple(range(len(sides))) else ""
        lines.append(f"{name} = {name}.masked_fill({nothing}{back}, 0.0)")
        if not any(s.kind in ("add", "take") for s in steps.steps):  # elsewhere they weigh nothing
            result = "ferryman_b.masked_fill(ferryman_f & ~ferryman_f.all(-1, True), -1e999)"
    lines = _used([*lines, f"return {name}, {result}"])
    body = "\n".join(f"    {line}" for line in lines)
    read = {n.id for line in lines for n in ast.walk(ast.parse(line.removeprefix("return "))) if isinstance(n, ast.Name)}
    sized = {n for n in names.values() if n in read}
    own = spelling.own
    if any(not is_plain(n.value) and not isinstance(n.value, Tensor) for n in own.values()):
        return None
    given = [*sorted(sized), *(alias for alias in own if alias in read)]
    return f"def {MASK}({', '.join(given)}):\n{body}\n", own, given


def _used(lines: list[str]) -> list[str]:
    """Those of statements, each of which names what it puts somewhere first, whose values the last one comes to."""
    known, kept = {"return"}, list[str]()
    for line in reversed(lines):
        target, _, value = line.partition(" ")
        if target in known:
            known |= {n.id for n in ast.walk(ast.parse(value.removeprefix("= "))) if isinstance(n, ast.Name)}
            kept.insert(0, line)
    return kept


def _view(node: Node, held: str, spelling: _Spelling) -> str:
    tree = node.tree
    assert isinstance(tree, ast.Call)
    inner = {id(s): spelling(c) for s, c in zip(node.slots[1:], node.children[1:], strict=True)}
    arguments = ", ".join(ast.unparse(swap(a, inner)) for a in tree.args[-len(inner) :] if inner)
    return f"{held}.{'reshape' if node.label == 'view' else node.label}({arguments})"


def _part(
    proving: Any,
    root: Node,
    leaves: tuple[Node, ...],
    part: Part,
    one: tuple[Node, ...],
    made: tuple[ast.FunctionDef, list[str], dict[str, Node]],
    query: Node,
    mask: Node,
    gradient: bool,
    numbers: list[tuple[float, ...]],
) -> Part:
    """The part of all steps, whose forms are those of the part of one."""
    tree, given, own = made
    placed = dict(zip(one, part.names, strict=True))
    names = tuple(placed.get(leaf, f"ferryman_m{i}") for i, leaf in enumerate(leaves))
    own_name = placed[mask]
    passed = ", ".join(
        names[int(n.removeprefix("ferryman_m"))] if n.startswith("ferryman_m") and n not in own else n for n in given
    )
    plain, _ = proving.function_of(root, leaves, False)
    tests = [f"type({a}) in ferryman_plain" for a, n in own.items() if isinstance(n.value, Tensor)]
    tests += [f"ferryman_same({a}, {n.value!r})" for a, n in own.items() if not isinstance(n.value, Tensor)]
    if not gradient:
        tests.append(recognise.no_gradient([placed[n] for n in one if n is not mask and not n.fact()]))
    added = not gradient and any(n != -torch.inf for some in numbers for n in some)
    tests += [f"{placed[query]}.dtype is not torch.float16"] if added else []
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

"""Loops over tokens that carry a state: ``for t in range(n)``, which renews locals made before it and puts a result
into a list, or a tensor that the block made, once each round. Such a loop is a value of what it reads, as a whole."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ferryman.porting.model import effects, source
from ferryman.porting.model.filling import CASTS, name_made
from ferryman.porting.model.nodes import Node, Statement
from ferryman.porting.model.statements import read, stored

LABEL = "recurrence"
MOST_VALUES = 6
_MOST_CUTS = 10
_REFUSED = (
    *(ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.comprehension, ast.Return, ast.Break, ast.Continue, ast.While),
    *(ast.With, ast.Try, ast.Raise, ast.Delete, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor),
    *(ast.Starred, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Assert),
)
_OF_LISTS = {"append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort", "item", "tolist"}
# what only moves or casts the results of a loop
_MOVES = {"stack", "transpose", "permute", "movedim", "to", "type_as", "float", "contiguous", "swapaxes"}


@dataclass(frozen=True)
class Carried:
    """The names that a loop has values of from before it: of its results first, then of its states."""

    names: tuple[str, ...]


def carrying(body: list[ast.stmt], tree: ast.AST, function: types.FunctionType) -> dict[int, Carried]:
    """The loops of a block that are such."""
    known = {}
    for i, statement in enumerate(body):
        names = _carried(statement, body[:i], tree, function) if isinstance(statement, ast.For) else None
        if names is not None:
            known[i] = Carried(names)
    return known


def _carried(
    loop: ast.For, before: list[ast.stmt], tree: ast.AST, function: types.FunctionType
) -> tuple[str, ...] | None:
    inside = [n for s in loop.body for n in ast.walk(s)]
    ranges = isinstance(loop.iter, ast.Call) and source.resolve(loop.iter.func, function) is range
    if (
        not ranges
        or loop.orelse
        or not isinstance(loop.target, ast.Name)
        or any(isinstance(n, ast.For) for n in inside)
    ):
        return None
    if any(isinstance(n, _REFUSED) for n in ast.walk(loop)):
        return None
    place = _result_of(loop)
    if place is None or not isinstance(place, ast.Name):
        return None
    loads, stores = _outside_of_comprehensions(tree)
    mine = {loop.target.id, *(n for s in loop.body for n in stored(s))}
    result = place.id
    if result in mine or loads.count(result) != 2 or stores.count(result) != 1:
        return None
    makers = {name: s for s in before if (name := _name_that_gets(s, function)) is not None}
    states = [n for n in dict.fromkeys(n for s in before for n in _outside_of_comprehensions(s)[1]) if n in mine]
    if result not in makers or any(n not in makers or n == loop.target.id for n in states):
        return None
    within = read(loop)
    if any(loads.count(n) != within.count(n) for n in mine):  # read before the loop, or after it
        return None
    if any(stores.count(n) != stored(loop).count(n) + (n in states) for n in mine):  # no comprehension is in the loop
        return None
    if any(n.arg in mine | {result} for n in ast.walk(tree) if isinstance(n, ast.arg)):
        return None
    augmented = {n.target.id for n in inside if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
    return (result, *states) if augmented <= {*states} else None


def _outside_of_comprehensions(tree: ast.AST) -> tuple[list[str], list[str]]:
    """(names that are read, names that get values), but for those that a comprehension has for itself."""
    loads: list[str] = []
    stores: list[str] = []

    def walk(node: ast.AST, hidden: frozenset[str]) -> None:
        if isinstance(node, ast.Name) and node.id not in hidden:
            (loads if isinstance(node.ctx, ast.Load) else stores).append(node.id)
        inner, first = hidden, None
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            first = node.generators[0]
            inner = hidden | {n for loop in node.generators for n in stored(loop.target)}
        for child in ast.iter_child_nodes(node):
            for part in ast.iter_child_nodes(child) if child is first else (child,):
                walk(part, hidden if first is not None and part is first.iter else inner)

    walk(tree, frozenset())
    return loads, stores


def _name_that_gets(statement: ast.stmt, function: types.FunctionType) -> str | None:
    """The name that a statement gives to a list, or to a tensor, that it makes."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    value = statement.value if isinstance(statement, ast.Assign) else None
    if isinstance(target, ast.Name) and isinstance(value, ast.List) and not value.elts:
        return target.id
    return name_made(statement, function)


def _result_of(loop: ast.For) -> ast.expr | None:
    """What the loop puts its results in; None where it puts them elsewhere, too, or writes over something."""
    places: list[ast.expr] = []
    known: set[int] = set()
    for statement in loop.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        func = call.func if isinstance(call, ast.Call) else None
        if isinstance(call, ast.Call) and isinstance(func, ast.Attribute) and func.attr == "append":
            if len(call.args) != 1 or call.keywords:
                return None
            places.append(func.value)
            known |= {id(func)}
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
            if len(statement.targets) != 1:
                return None
            places.append(statement.targets[0].value)
            known |= {id(statement.targets[0])}
    for node in (n for s in loop.body for n in ast.walk(s)):
        if (
            isinstance(node, ast.Subscript | ast.Attribute)
            and not isinstance(node.ctx, ast.Load)
            and id(node) not in known
        ):
            return None
        func = node.func if isinstance(node, ast.Call) else None
        name = getattr(func, "attr", getattr(func, "id", ""))
        if name.endswith("_") or (name in _OF_LISTS and id(func) not in known):
            return None
        if isinstance(node, ast.keyword) and node.arg in ("out", "inplace", None):
            return None
        if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name):
            return None
    return places[0] if len(places) == 1 else None


# As a value


def flowing(scan: Any, index: int, loop: ast.stmt, carried: Carried) -> Statement | None:
    """Such a loop, in what a `flow.Scan` reads; None where it may do more than compute."""
    assert isinstance(loop, ast.For)
    before = [scan.env.get(name) for name in carried.names]
    known = {id(node) for node in before if node is not None}
    if len(known) < len(before) or any(effects.of(scan, part) for part in computing(loop)):
        return None  # of equal expressions there is one node, and each makes a tensor of its own
    names = {node: name for name, node in scan.env.items()}
    scan.occurring = []
    own = {*carried.names, *stored(loop)}
    parts: list[tuple[ast.expr, Node]] = []
    pending: list[ast.AST] = [loop.iter, *loop.body]
    while pending:
        node = pending.pop(0)
        given = scan.path(node) if isinstance(node, ast.Attribute | ast.Subscript) else source.MISSING
        if given is not source.MISSING:
            parts.append((node, scan.own(node, given)))  # type: ignore[arg-type]
        elif isinstance(node, ast.expr) and _size(node) and not own & {*read(node)}:
            parts.append((node, scan.node(node)))
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and node.id in scan.locals and node.id not in own:
                parts.append((node, scan.node(node)))
        elif isinstance(node, ast.Call) and not _computes(scan, node, loop):
            return None
        else:
            pending += ast.iter_child_nodes(node)
    names |= {n: name for name, n in scan.env.items()}
    for state in before:
        _beside(state, [n for _, n in parts])
    slots = (*(ast.Name(name, ast.Load()) for name in carried.names), *(e for e, _ in parts))
    values = (*before, *(n for _, n in parts))
    tree = ast.copy_location(ast.Call(ast.Name("fill", ast.Load()), [*slots], []), loop)
    value = Node("op", tree, values, slots, LABEL, None, None, loop, True, carried.names)
    result = carried.names[0]
    scan.env[result] = value
    scan.occurring = []
    return Statement(index, [], names, {value: result}, value)


def _beside(state: Any, values: list[Node]) -> None:
    """Of ``x.new_zeros(..)``, where the loop reads no number of x, that is what the state is like, and no value."""
    empty = state.kind == "op" and state.label.startswith("new_") and state.children
    if empty and isinstance(state.slots[0], ast.Name) and state.children[0] not in values:
        first = state.children[0]
        state.children = (
            replace(first, kind="leaf", children=(), slots=(), tree=state.slots[0], beside=True),
            *state.children[1:],
        )


def computing(loop: ast.stmt) -> Iterator[ast.AST]:
    """What a loop computes, beside putting it where its results are."""
    assert isinstance(loop, ast.For)
    yield loop.iter
    for statement in loop.body:
        if isinstance(statement, ast.Assign):
            yield statement.value
            yield from (t.slice for t in statement.targets if isinstance(t, ast.Subscript))
        elif isinstance(statement, ast.AugAssign):
            yield statement.value
        elif (put := _put(statement)) is not None:
            yield from put.args
        else:
            yield statement


def _put(statement: ast.stmt) -> ast.Call | None:
    """The call of a statement that puts a value into a list, which is the one that has the loop's results."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    append = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append"
    return call if append and isinstance(call, ast.Call) else None


def _size(e: ast.expr) -> bool:
    """``x.shape[1]`` or ``x.size(1)``, of a local."""
    inner: Any = e
    if isinstance(e, ast.Subscript) and isinstance(e.slice, ast.Constant | ast.UnaryOp):
        inner = e.value
        return isinstance(inner, ast.Attribute) and inner.attr == "shape" and isinstance(inner.value, ast.Name)
    func = e.func if isinstance(e, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr in ("size", "dim") and isinstance(func.value, ast.Name)


def _computes(scan: Any, call: ast.Call, loop: ast.For) -> bool:
    puts = any(_put(s) is call for s in loop.body)
    return puts or scan.function_of(call.func) is not None


# As a part


def loop_of(root: Node) -> Node | None:
    """The loop whose results a node moves or casts at most; None of any other node."""
    node = root
    while node.kind == "op" and node.label in _MOVES and node.children:
        node = node.children[0] if node.children[0].kind == "op" else node.children[-1]
    return node if node.label == LABEL else None


def cuts(root: Node, loop: Node, known: Callable[[Node], bool]) -> list[tuple[Node, ...]]:
    """Sets of values that a loop is computed of: those that it reads first, then what some of them are computed of."""
    first: dict[Node, None] = {}
    for node in (*loop.children[: len(loop.carried)], *(n for n in root.inside(frozenset({loop})) if n is not loop)):
        for child in node.children:
            if child is not loop and loop not in child.inside(frozenset()):
                first |= _ends(child, known)
    for child in loop.children[len(loop.carried) :]:
        first |= _ends(child, known)
    shown = [first]
    for cut in shown:
        for node in cut if len(shown) < _MOST_CUTS else ():
            below = _below(node, known)
            rest = {n: None for n in cut if n is not node} | below
            if below and {*rest} not in [{*s} for s in shown]:
                shown.append(rest)
    chosen = []
    for cut in shown:
        values = frozenset(n for n in cut if not n.fact())
        ends = [n for n in cut if not n.fact() or any(m.kind == "leaf" for m in n.inside(values))]
        if 3 <= len(values) <= MOST_VALUES and not any(n.wide for n in root.inside(frozenset(ends))):
            chosen.append(tuple(sorted(ends, key=lambda n: n.fact())))
    return chosen


def _below(node: Node, known: Callable[[Node], bool]) -> dict[Node, None]:
    below: dict[Node, None] = {}
    if node.kind == "op" and not node.fact() and node.write is None:
        for child in node.children:
            below |= _ends(child, known)
    return below


def _ends(node: Node, known: Callable[[Node], bool]) -> dict[Node, None]:
    """The nearest values that can be read elsewhere, of what a node is computed of."""
    if node.kind == "constant" or (node.kind == "self" and not isinstance(node.value, Tensor)):
        return {}
    spelled = isinstance(node.tree, ast.Slice | ast.Tuple | ast.List | ast.Starred) or _of_facts(node)
    if node.kind != "op" or node.fact() or (known(node) and not spelled):
        return {node: None}
    ends: dict[Node, None] = {}
    for child in node.children:
        ends |= _ends(child, known)
    return ends


def _of_facts(node: Node) -> bool:
    """Whether it is a number that is computed of sizes, such as a scale."""
    if node.kind != "op" or node.fact():
        return node.kind != "leaf" and not isinstance(node.value, Tensor)
    plain = isinstance(node.tree, ast.BinOp | ast.UnaryOp) or node.label in ("sqrt", "float", "int")
    return plain and all(map(_of_facts, node.children))


def still_read(leaf: Node, tree: ast.AST) -> bool:
    """Whether a size, or a tensor of the module's, is the same wherever it is read: its names have one value each."""
    stores = stored(tree)
    given = {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    return all(stores.count(n) <= (n not in given) for n in read(leaf.tree))


def axis_of(loop: Node, value: Node) -> int | None:
    """The axis of a value that the loop goes along, as its spelling has it."""
    assert isinstance(loop.write, ast.For) and isinstance(loop.write.target, ast.Name)
    spelled = {
        slot.id for slot, n in zip(loop.slots, loop.children, strict=True) if n is value and isinstance(slot, ast.Name)
    }
    for node in ast.walk(loop.write):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in spelled:
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            items = [e for e in items if not (isinstance(e, ast.Constant) and e.value is None)]
            at = [i for i, e in enumerate(items) if isinstance(e, ast.Name) and e.id == loop.write.target.id]
            skipped = any(isinstance(e, ast.Constant) and e.value is Ellipsis for e in items[: (at or [0])[0]])
            if at:
                return at[0] - len(items) if skipped else at[0]
    return None


def readings(root: Node, leaves: tuple[Node, ...]) -> list[dict[Node, str]] | None:
    """Ways of a part that is such a loop to say facts; None of any other part."""
    loop = loop_of(root)
    return None if loop is None else [*_readings(loop, leaves)]


def _readings(loop: Node, leaves: tuple[Node, ...]) -> Iterator[dict[Node, str]]:
    """Ways to say the facts among leaves: dtypes are the first value's, the number of rounds is the length of what the
    loop goes along, and any other number is another of that one's first sizes."""
    assert isinstance(loop.write, ast.For)
    values = [n for n in leaves if not n.fact()]
    axes = {i: axis for i, v in enumerate(values) if (axis := axis_of(loop, v)) is not None}
    same = {n: n.said() for n in leaves if n.fact() and not n.counts()}
    numbers = [n for n in leaves if n.counts()]
    if not axes and numbers:
        return
    along = {id(n) for n in ast.walk(loop.write.iter)}
    rounds = {n for slot, n in zip(loop.slots, loop.children, strict=True) if id(slot) in along}
    place, axis = next(iter(axes.items()), (0, 0))
    others = [a for a in (0, 1, 2) if a != axis]
    free = [n for n in numbers if n not in rounds]
    rounds_of = {n: f"ferryman_a{place}.shape[{axis}]" for n in numbers if n in rounds}
    if not free:
        yield same | rounds_of
    elif len(free) == 1:
        for other in others:
            yield same | rounds_of | {free[0]: f"ferryman_a{place}.shape[{other}]"}
    elif len(free) == 2:
        for order in (others, others[::-1]):
            sizes = (f"ferryman_a{place}.shape[{a}]" for a in order)
            yield same | rounds_of | dict(zip(free, sizes, strict=False))


def fixed_sizes(loop: Node, function: types.FunctionType) -> list[list[int | None]]:
    """Of each state, the sizes that the code says it has, in order; None for those of other tensors."""
    known = []
    for state in loop.children[1 : len(loop.carried)]:
        sides: list[int | None] = []
        while state.kind == "op" and state.label in CASTS:
            state = state.children[0]
        given = state.children[1:] if state.label.startswith("new_") else state.children
        for slot, child in zip(state.slots[len(state.slots) - len(given) :], given, strict=True):
            if child.kind == "op" and isinstance(slot, ast.Tuple | ast.List):
                sides += [_number(c, function) for c in child.children]
            elif child.kind != "op" or child.counts():
                sides.append(_number(child, function))
        known.append(sides)
    return known


def _number(node: Node, function: types.FunctionType) -> int | None:
    value = node.value if node.kind == "self" else None
    if node.kind == "constant":
        value = node.tree.value if isinstance(node.tree, ast.Constant) else source.resolve(node.tree, function)
    return value if type(value) is int else None

"""Proofs of parts: a part as a small module of its own, with what it reads of the module that it stands in."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import types
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ferryman.porting.model import (
    blocks,
    flow,
    helpers,
    part_losses,
    part_sizes,
    part_steps,
    part_weights,
    recognise,
    recurrent,
    recurrent_proof,
    source,
)
from ferryman.porting.model.branches import follow_module
from ferryman.porting.model.child_calls import TESTS
from ferryman.porting.model.leaf import class_code, names_reached
from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part import Part, plain_function
from ferryman.porting.model.part_rules import child, is_plain, named, reads_methods, tensors, value_text
from ferryman.porting.model.part_shape import PRODUCTS, TURNS, of_products, of_several, own_logits, products, stacks
from ferryman.porting.model.recognise import Role
from ferryman.porting.model.trace import Read, Trace, Unproven, numbers_in
from ferryman.porting.model.trees import copied, swap

_MOST_TRIALS = 96
_CALLABLES = flow.FUNCTIONS | functools.partial | types.MethodType
OF_SEVERAL = frozenset(part_losses.LOSSES | TURNS | PRODUCTS)  # what a part of several values has one of


@dataclass
class Proving:
    """Proves parts of one function, and keeps what it tried."""

    function: types.FunctionType
    self_name: str | None
    module: nn.Module | None
    tried: dict[str, Part | None] = field(default_factory=dict)
    trials: int = 0
    asked: set[str] = field(default_factory=set)  # paths of the module whose values were in a part
    methods: bool = False  # a part called methods, which may read any of the module's values
    stepped: set[frozenset[Node]] = field(default_factory=set)  # cuts whose scores are masked in steps

    def asks(self, path: str) -> bool:
        """Whether what was tried may depend on the value that the module gives there."""
        return self.methods or path in self.asked or path.partition("(")[0] in TESTS

    def shown(self, root: Node, leaves: tuple[Node, ...]) -> Part | None:
        part = self.plainly(root, leaves)
        if part is None and frozenset(leaves) in self.stepped:
            return part_steps.shown(self, root, leaves)
        return part

    def plainly(self, root: Node, leaves: tuple[Node, ...]) -> Part | None:
        """A part as it is; None where it is none."""
        several = recurrent.loop_of(root) is not None or of_several(root, leaves)
        if sum(not (n.fact() or n.of_ours()) for n in leaves) > 2 and not several:
            return None
        if any(n.fact() for n in leaves):
            return self._of_sizes(root, leaves)
        tree, own = self.function_of(root, leaves, True)
        self.asked |= {ast.unparse(node.tree) for node in own.values()}
        plain, _ = self.function_of(root, leaves, False)
        # what it reads of the module has the same names in every part: which it is, its own spelling says
        key = f"{ast.unparse(tree)}\n{ast.unparse(plain)}"
        if key not in self.tried:
            if self.trials >= _MOST_TRIALS:
                return None
            self.trials += 1
            try:
                self.tried[key] = self._proven(root, leaves, tree, plain, own)
            except Exception:  # noqa: BLE001 - foreign code ran, on what it may not take
                self.tried[key] = None
        return self.tried[key]

    def _of_sizes(self, root: Node, leaves: tuple[Node, ...]) -> Part | None:
        """A part with facts of other tensors, such as sizes: it is proven with its own values' in their place, and asks
        whether they are the same."""
        values = tuple(n for n in leaves if not n.fact())
        # another value of an argument leaves all of a part to the code: what is served without it would be lost
        below = root.inside(frozenset(leaves))
        if any(n.kind == "leaf" and n.asked_for() for n in leaves) and not part_losses.is_any(below):
            return None
        turns = recurrent.readings(root, leaves)
        twice = products(below) == 2 and turns is None
        places = of_products(root, leaves) if twice else tuple(reversed(range(len(values))))
        plain, _ = self.function_of(root, leaves, False)
        key = ast.unparse(plain)
        if key in self.tried or places is None or not values:
            return self.tried.get(key)
        self.tried[key] = None
        for reading in part_sizes.readings(root, leaves, places[: 1 if twice else None]) if turns is None else turns:
            if self.trials >= _MOST_TRIALS:
                return None
            self.trials += 1
            self.asked |= {
                ast.unparse(n.tree) for f in reading for n in f.inside(frozenset(leaves)) if n.kind == "self"
            }
            sizes = {node: ast.parse(text, mode="eval").body for node, text in reading.items()}
            tree, own = self.function_of(root, leaves, True, sizes)
            self.asked |= {ast.unparse(node.tree) for node in own.values()}
            try:
                part = self._proven(root, values, tree, plain, own, frozenset(leaves) | frozenset(reading))
            except Exception:  # noqa: BLE001 - foreign code ran, on what it may not take
                part = None
            if part is not None:
                numbers = len(leaves) - len(values)
                names = (*part.names, *(f"ferryman_n{i}" for i in range(numbers)))
                placed = {f"ferryman_a{i}": name for i, name in enumerate(part.names)}
                said = [(n, self._of_leaves(n, leaves, names), named(text, placed)) for n, text in reading.items()]
                asked = tuple(n.asked(a, b) for n, a, b in said)
                forms = tuple(((*asked, *tests), expression) for tests, expression in part.forms)
                self.tried[key] = replace(part, values=len(leaves), names=names, forms=forms, numbers=numbers)
                break
        return self.tried[key]

    def _of_leaves(self, node: Node, leaves: tuple[Node, ...], names: tuple[str, ...]) -> str:
        """An expression over the names of leaves and ``self``."""
        if node in leaves:
            return names[leaves.index(node)]
        if node.kind == "self":
            return self.of_ours(node.tree)
        if node.kind == "constant":
            return ast.unparse(node.tree)
        inner = {
            id(slot): ast.parse(self._of_leaves(child, leaves, names), mode="eval").body
            for slot, child in zip(node.slots, node.children, strict=True)
        }
        return f"({ast.unparse(swap(node.tree, inner))})"

    def _proven(
        self,
        root: Node,
        leaves: tuple[Node, ...],
        tree: ast.FunctionDef,
        plain: ast.FunctionDef,
        own: dict[str, Node],
        ends: frozenset[Node] = frozenset(),
    ) -> Part | None:
        """``ends``: where the part ends beside."""
        count, self.root = len(leaves), root
        ordered = (*leaves, *(n for n in ends if n not in leaves and n.fact()))
        inside = root.inside(frozenset(ordered))
        if count == 2 and part_losses.joins(inside):
            return self._joined(tree, plain, own)
        if (loop := recurrent.loop_of(root)) is not None:
            return recurrent_proof.of_loop(self, loop, leaves, tree, plain, own)
        for order in itertools.permutations(range(count)) if count == 2 else [tuple(range(count))]:
            if count > 2:
                break
            module = self.module_of(tree, own, order)
            role = None if module is None else recognise.role_of(module)
            if module is not None and count == 1 and not isinstance(role, Role):
                role = blocks.role_of(module)
            if module is not None and isinstance(role, Role):
                return self._part(role, module, plain, own, order)
        mine = tuple(n for n in leaves if n.of_ours())
        if (
            mine
            and count - len(mine) == 1
            and (part := part_weights.of_weights(self, root, leaves, mine, plain)) is not None
        ):
            return part
        labels = {n.label for n in inside}
        if count == 2 and part_losses.is_loss(inside) and part_losses.only_numbers(own) and part_losses.unasked(tree):
            for order in ((0, 1), (1, 0)):
                module = self.module_of(tree, own, order)
                if module is not None:
                    setattr(type(module), blocks.PART, True)
                role = None if module is None else blocks.role_of(module)
                if module is not None and isinstance(role, Role):
                    return self._part(role, module, plain, own, order)
        if count in (3, 4) and products(inside) == 2 and (not tensors(own) or own_logits(own.values())):
            firsts = of_products(root, ordered)
            order = firsts or tuple(range(count))
            module = self.module_of(tree, own, order)
            if module is not None:
                setattr(type(module), blocks.PART, blocks.ORDERED if firsts else True)
            role = None if module is None else blocks.role_of(module)
            if module is not None and isinstance(role, Role):
                return self._part(role, module, plain, own, order)
        if count == 3 and stacks(own.values()) == 2:
            for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
                module = self.module_of(tree, own, order)
                role = None if module is None else blocks.role_of(module)
                if module is not None and isinstance(role, Role):
                    return self._part(role, module, plain, own, order)
        if count < 2 or not labels & TURNS or tensors(own):
            return None
        for first in range(count) if count < 4 else (0,):
            order = (first, *(i for i in range(count) if i != first))
            module = self.module_of(tree, own, order)
            if module is None:
                return None
            wanted = helpers.able(count, labels, names_reached(type(module)))
            if not wanted:
                return None
            trace, call = self.followed(module, own)
            forms = helpers.forms_of_call(call, trace, wanted)
            if forms:
                names = [""] * count
                for j, i in enumerate(order):
                    names[i] = f"a{j}"
                same = self.same(module, own)
                shown = [((*same, form.guard), form.helper.expression) for form in forms]
                return self.part_of(forms[0].helper.op, plain, own, names, shown, True, module, forms[0].reads)
        return None

    def _joined(self, tree: ast.FunctionDef, plain: ast.FunctionDef, own: dict[str, Node]) -> Part | None:
        """A part that is a product with a matrix of the module's and what takes all that this gives."""
        ignored, called = part_losses.ignored(tree, own), part_losses.called(tree, self.function)
        for order in ((0, 1), (1, 0)) if ignored is not None and called is not None else ():
            module = self.module_of(tree, own, order)
            if module is None:
                continue
            module.__dict__ |= {f"ferryman_row_{i}": n for i, n in enumerate(ignored or ())}
            role = blocks.role_of(module)
            if isinstance(role, Role):
                return self._part(role, module, plain, own | (called or {}), order)
        return None

    def followed(self, module: nn.Module, own: dict[str, Node]) -> tuple[Trace, Any]:
        """(what running a part's code shows of it, the code)."""
        trace = Trace()
        for node in own.values():
            trace.numbers |= numbers_in(node.value)
        followed = follow_module(module, trace)
        return trace, functools.partial(recognise.original, followed, dict(module.__dict__), (), False)

    def _part(
        self, role: Role, module: nn.Module, plain: ast.FunctionDef, own: dict[str, Node], order: tuple[int, ...]
    ) -> Part | None:
        names = [""] * len(order)
        for j, i in enumerate(order):
            names[i] = role.inputs[j]
        guards = tuple(f"bool({text}) is {outcome}" for text, outcome in role.guards)
        for parameter, name in zip(role.parameters, role.inputs, strict=False):
            guards = tuple(re.sub(rf"\b{parameter}\b", name, text) for text in guards)
        tests = (*self.same(module, own), *role.tests, *guards)
        part = self.part_of(role.op, plain, own, names, [(tests, role.expression)], role.gradient, module, role.reads)
        return None if part is None else replace(part, remark=role.remark)

    def part_of(
        self,
        op: str,
        plain: ast.FunctionDef,
        own: dict[str, Node],
        names: list[str],
        forms: list[tuple[tuple[str, ...], str]],
        gradient: bool,
        module: nn.Module,
        reads: tuple[Read, ...],
        passed: frozenset[str] = frozenset(),
    ) -> Part | None:
        """With what is read of ours under names of its own. passed: of these, what comes as a value."""
        paths = {alias: self.of_ours(node.tree) for alias, node in own.items()}
        texts = [text for tests, expression in forms for text in (*tests, expression)]
        attributes = dict.fromkeys(n for text in texts for n in re.findall(r"\bself\.(\w+)", text))
        local = {n: n if n in paths else f"ferryman_own_{n}" for n in attributes}
        tensors = [n for n in attributes if n in module._parameters]

        def read(text: str) -> str:
            return re.sub(r"\bself\.(\w+)", lambda m: local[m[1]], text)

        reading = [(local[n], paths.get(n, f"self.{n}")) for n in attributes if n not in passed]
        functions = [(a, n.value) for a, n in own.items() if isinstance(n.value, _CALLABLES)]
        reading += [(a, paths[a]) for a, _ in functions if a not in attributes]
        plainly = [f"type({local[n]}) in ferryman_plain" for n in tensors]
        code = tuple(n for n in class_code(type(module)) if n != "forward")
        return Part(
            op,
            plain,
            len(names),
            tuple(names),
            tuple(reading),
            tuple(((*plainly, *map(read, tests)), read(expression)) for tests, expression in forms),
            gradient,
            tuple(functions),
            code,
            reads,
            tuple(child(n.whole) for n in self.root.inside(frozenset()) if n.whole is not None),
        )

    def same(self, module: nn.Module, own: dict[str, Node]) -> tuple[str, ...]:
        """Tests that what the proof had of the module is what it has."""
        plain = {a: n.value for a, n in own.items() if is_plain(n.value)}
        reached = names_reached(type(module))
        for name, value in vars(module).items():
            if name in reached and name not in own and name in vars(self.module or module) and is_plain(value):
                plain |= {} if name.startswith("_") else {name: value}
        texts = [(name, value_text(value)) for name, value in plain.items()]
        tests = ["False" if text is None else f"ferryman_same(self.{name}, {text})" for name, text in texts]
        forward, home = type(module).forward, self.function.__globals__
        named = {n: home.get(n) for code in source.codes_of(forward) for n in code.co_names}  # type: ignore[arg-type]
        tests += [
            f"ferryman_same(ferryman_file.get({n!r}), {v!r})" for n, v in named.items() if type(v) in (int, bool, str)
        ]
        return tuple(tests)

    def of_ours(self, e: ast.expr) -> str:
        """An expression over ``self``."""
        tree = copied(e)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == self.self_name:
                node.id = flow.SELF
        return ast.unparse(tree)

    # A module of the part

    def function_of(
        self, root: Node, leaves: tuple[Node, ...], aliased: bool, sizes: dict[Node, ast.expr] | None = None
    ) -> tuple[ast.FunctionDef, dict[str, Node]]:
        """(the part as a function, what it reads of the module by the name that it has there). sizes: what stands
        in the place of numbers, which are no arguments then."""
        place: dict[Node, ast.expr] = {n: ast.Name(f"ferryman_a{i}", ast.Load()) for i, n in enumerate(leaves)}
        place |= sizes or {}
        own: dict[str, Node] = {}
        body: list[ast.stmt] = []
        me = self.self_name or "ferryman_self"
        for node in root.inside(frozenset(place)):
            if node.carried:
                pairs = [(slot, place[child]) for slot, child in zip(node.slots, node.children, strict=True)]
                for name, (_, value) in zip(node.carried, pairs, strict=False):
                    body.append(ast.Assign([ast.Name(name, ast.Store())], value))
                body.append(swap(node.write, {id(slot): value for slot, value in pairs}))
                place[node] = ast.Name(node.carried[0], ast.Load())
            elif node.write is not None:
                name = f"ferryman_v{len(body)}"
                own_places = {id(slot): place[child] for slot, child in zip(node.slots, node.children, strict=True)}
                own_places[id(node.slots[0])] = ast.Name(name, ast.Load())
                body.append(ast.Assign([ast.Name(name, ast.Store())], place[node.children[0]]))
                written = isinstance(node.write, ast.AugAssign)
                target: dict[int, ast.expr] = {id(node.slots[0]): ast.Name(name, ast.Store())} if written else {}
                body.append(swap(node.write, own_places | target))
                place[node] = own_places[id(node.slots[0])]
            elif node.kind == "op":
                tree_of = node.whole if node.whole is not None and not aliased else node.tree
                parts = zip(node.slots, node.children, strict=True)
                e = swap(tree_of, {id(slot): place[child] for slot, child in parts})
                if isinstance(e, ast.Slice | ast.Tuple | ast.List | ast.Attribute):
                    place[node] = e
                    continue
                name = f"ferryman_v{len(body)}"
                body.append(ast.Assign([ast.Name(name, ast.Store())], e))
                place[node] = ast.Name(name, ast.Load())
            elif node.kind == "self" and aliased:
                alias = f"ferryman_own_{len(own)}"
                own[alias] = node
                place[node] = ast.Attribute(ast.Name(me, ast.Load()), alias, ast.Load())
            else:
                place[node] = node.tree
        body.append(ast.Return(place[root]))
        count = sum(sizes is None or not n.fact() for n in leaves)
        arguments = [ast.arg(me), *(ast.arg(f"ferryman_a{i}") for i in range(count))]
        given = ast.arguments([], arguments, None, [], [], None, [])
        tree = ast.FunctionDef(
            name="forward", args=given, body=body, decorator_list=[], returns=None, type_comment=None
        )
        tree.__dict__.setdefault("type_params", [])
        return ast.fix_missing_locations(copied(tree)), own

    def module_of(self, tree: ast.FunctionDef, own: dict[str, Node], order: tuple[int, ...]) -> nn.Module | None:
        tree = copied(tree)
        tree.args.args = [tree.args.args[0], *(tree.args.args[1 + i] for i in order)]
        forward = plain_function(self.function, tree)
        methods = self.module is not None and reads_methods(tree, self.self_name, own)
        self.methods |= methods
        base: Any = type(self.module) if methods else nn.Module
        try:
            kind: Any = type("Part", (base,), {"forward": forward, "__module__": self.function.__module__})
            module: nn.Module = kind.__new__(kind)
            nn.Module.__init__(module)
        except Exception as error:  # a class of the model's may refuse a subclass with whatever it likes
            raise Unproven(f"{type(error).__name__}: {error}") from error
        if methods and self.module is not None:
            reached = names_reached(kind)
            ours = vars(nn.Module())
            module.__dict__.update({n: v for n, v in vars(self.module).items() if n not in ours and n in reached})
            for name, p in [*self.module._parameters.items(), *self.module._buffers.items()]:
                if name in reached:
                    module._parameters[name] = p  # type: ignore[assignment]
        for alias, node in own.items():
            if isinstance(node.value, Tensor):
                module._parameters[alias] = node.value  # type: ignore[assignment]
            else:
                module.__dict__[alias] = node.value
        return module.eval()

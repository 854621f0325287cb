"""The syntax tree of one function, with calls that our ops serve in place of those that they stand for."""

from __future__ import annotations

import ast
import copy
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ferryman.porting.model import above, adding, comparing, cuts, gating, handing, learning, source, spelling
from ferryman.porting.model.cut_rules import place_of
from ferryman.porting.model.part import PREFIX, Part
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.trees import KEPT, attribute_of, mark_kept
from ferryman.porting.model.uses import Conditions, Use, called, more, registries, served, served_methods, standing

if TYPE_CHECKING:
    from ferryman.ops.recognition import Served
    from ferryman.porting.model.rewrite import ServedClass


class Serve(ast.NodeTransformer):
    def __init__(
        self,
        owner: ServedClass,
        function: types.FunctionType,
        tree: ast.FunctionDef,
        method: bool,
        depth: int,
        conditions: Conditions,
        own_parts: tuple[Part, ...] = (),
    ) -> None:
        mark_kept(tree)
        self.conditions, self.gated = conditions, set[Any]()  # places of products that are served
        self.turned, self.pending = False, dict[str, ast.Call]()  # turned: one of these changes the order
        self.parts = {f"{PREFIX}{i}": part for i, part in enumerate(own_parts)}
        self.owner, self.own, self.depth = owner, function, depth
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        self.self_name = arguments[0] if method and arguments else None
        self.new: dict[str, Any] = {}
        self.methods: dict[str, Conditions] = {}  # methods that it reads, and what the first reading stands under
        loads = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        stores = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        products = {
            side.id
            for n in ast.walk(tree)
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
            for side in (n.left, n.right)
            if isinstance(side, ast.Name)
        }
        # locals that hold an activation's result for one product alone, and that product stands in the same block
        self.single = {name for name in products if loads[name] == 1 and stores[name] == 1 and name not in arguments}
        self.called: dict[int, ast.Call] = {}  # by the node that stands where a call's function does
        self.own_methods = source.methods(owner.kind).keys()
        self.learnt = learning.learnt(tree, self.self_name, self.own_methods, owner.entries[0] != "forward")

    def learns(self, value: ast.expr) -> bool:
        """Whether an argument's value may need a gradient."""
        return learning.learns(value, self.learnt, self.self_name, self.own_methods)

    def _put(self, value: Any, node: ast.AST) -> ast.expr:
        name = next((n for n, known in self.new.items() if known is value), f"ferryman_{len(self.new)}")
        self.new[name] = value
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    # Names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id in self.pending:  # of two that wait, what the other is times
            self.turned, waited = True, self.pending.pop(node.id)
            return self.visit(ast.copy_location(ast.Call(waited.func, [node], waited.keywords), node))
        return self._name(node) if isinstance(node.ctx, ast.Load) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            self.methods.setdefault(node.attr, self.conditions)
            bound = None if hasattr(node, KEPT) else dict(self.owner.parted.attributes).get(node.attr)
            if bound is not None:
                entry = served()[bound]
                self._use(entry.op, node, entry.fixed)
                return self._while(node, bound, self._put(entry.replacement, node))
            declared = source.members(self.owner.kind).get(node.attr)
            if isinstance(declared, staticmethod) and isinstance(declared.__func__, types.FunctionType):
                return self._helper(node, declared.__func__)
            return node
        if isinstance(node.ctx, ast.Load) and source.resolve(node, self.own) is not MISSING:
            return self._name(node)
        self.generic_visit(node)
        return node

    def _name(self, node: ast.expr) -> ast.expr:
        value = source.resolve(node, self.own)
        if value is MISSING or hasattr(node, KEPT):
            return node
        if id(value) in registries:
            self.owner.interfaces.add(id(value))
            return node
        try:
            entry = served().get(value) or more.get(value)
        except TypeError:  # not hashable, so no function
            return node
        if entry is not None:
            self._use(entry.op, node, entry.fixed)
            return self._while(node, value, self._put(entry.replacement, node))
        return self._helper(node, value)

    def _helper(self, node: ast.expr, value: Any) -> ast.expr:
        """A name of a function that may be served, or whose own code may have calls that are."""
        handed = handing.handed_on(value)
        value_of = source.unscripted(value) if isinstance(value, torch.jit.ScriptFunction) else value
        function = value_of if handed is None else handed
        if isinstance(function, types.FunctionType) and handing.readable(function):
            under = self.conditions if id(node) in self.called else None
            before = len(self.owner.uses)
            helper, op, graded = self.owner.helper(function, self.own, self.depth, under)
            if op and graded is not None:
                self.owner.uses.append(Use(op, "", None, graded))  # its arguments decide
            elif op:
                self._use(op, node)
            if handed is not None:
                self.owner.uses[before:] = [replace(use, through=value) for use in self.owner.uses[before:]]
            if helper is not None:
                if handed is not None:
                    helper = self.owner.standing.setdefault(value, standing(value, helper))
                return self._while(node, value, self._put(helper, node))
        return node

    def _while(self, node: ast.expr, value: Any, served: ast.expr) -> ast.expr:
        """What is served while a name means what it means now; after that, what it means then."""
        test = ast.Compare(copy.deepcopy(node), [ast.Is()], [self._put(value, node)])
        return ast.copy_location(ast.IfExp(test, served, node), node)

    def _use(self, op: str, node: ast.AST, fixed: tuple[str, int] | None = None) -> None:
        """A function that is passed on, not called, may be called or not; what learns at ``fixed`` is another's."""
        call = self.called.get(id(node))
        if call is not None and fixed is not None:
            at = {k.arg: k.value for k in call.keywords}.get(fixed[0])
            at = call.args[fixed[1]] if at is None and len(call.args) > fixed[1] else at
            call = None if at is not None and self.learns(at) else call
        self.owner.uses.append(Use(op, "", None if call is None else self.conditions))

    def _narrowed(self, node: ast.Call) -> ast.AST | None:
        """``f(..).to(x.dtype)`` of a served function that knows what that is."""
        target, inner = node.args[0] if node.args else None, getattr(node.func, "value", None)
        cast = isinstance(node.func, ast.Attribute) and node.func.attr == "to" and len(node.args) == 1
        if not cast or node.keywords or not isinstance(inner, ast.Call):
            return None
        if not (isinstance(target, ast.Attribute) and target.attr == "dtype"):
            return None
        value = source.resolve(inner.func, self.own)
        entry = served().get(value) if isinstance(value, types.FunctionType | types.BuiltinFunctionType) else None
        if entry is None or entry.narrowed is None:
            return None
        self.called[id(inner.func)] = inner
        self._use(entry.op, inner.func)
        arguments = [self.visit(target), *(self.visit(a) for a in inner.args)]
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in inner.keywords]
        return ast.copy_location(ast.Call(self._put(entry.narrowed, node), arguments, keywords), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        narrowed = self._narrowed(node)
        if narrowed is not None:
            return narrowed
        times = isinstance(node.func, ast.Attribute) and node.func.attr in ("mul", "multiply") and not node.keywords
        if times and len(node.args) == 1 and self._activation(node.func.value) is not None:  # type: ignore[attr-defined]
            return self.visit(ast.copy_location(ast.BinOp(node.func.value, ast.Mult(), node.args[0]), node))  # type: ignore[attr-defined]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "mul_" and len(node.args) == 1:
            activation = node.func.value
            if self._activation(activation) is not None and not node.keywords and not activation.keywords:  # type: ignore[attr-defined]
                return self._gate_in_place(node, activation, node.args[0])  # type: ignore[arg-type]
        part = self.parts.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if part is not None:
            self.owner.uses.append(Use(part.op, "", None, part.gradient))  # its arguments decide
            self.owner.cut |= set(part.children)
            node.func = self._put(part.function(self.own, self.owner.kind), node)
            node.args = [self.visit(a) for a in node.args]
            return node
        self.called[id(node.func)] = node
        method = None if above.put(self, node) else self._method(node)
        if method is not None:
            self._use(method.op, node.func)
            node.args.insert(0, node.func.value)  # type: ignore[attr-defined]
            node.func = self._put(method.replacement, node.func)
        self.generic_visit(node)
        kind = self.owner.callables.get(attribute_of(node.func, self.self_name) or "")
        uses = () if kind is None else self.owner.uses_of_callable(kind)
        if uses:  # what its own tests read is not the module's
            self.owner.uses += [
                Use(u.op, "", self.conditions if u.conditions == () else None, u.gradient) for u in uses
            ]
            callee, node.func = node.func, self._put(called, node.func)
            node.args.insert(0, callee)
        if isinstance(node.func, ast.Name) and node.func.id in (adding.CALL, adding.CALL_IN_LIST):
            node.func = self._put(adding.added if node.func.id == adding.CALL else adding.added_in_a_list, node.func)
            depth, conditions = adding.outer(node), self.conditions
            if depth is not None:
                under = conditions[: len(conditions) - depth] if conditions is not None else None
                self.owner.uses.append(Use("", "", under, added=adding.norm_of(node)))
        return node

    def _method(self, node: ast.Call) -> Served | None:
        """A method of tensors that is served, of what may be one: no module, class or attribute of the module."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in served_methods():
            return None
        owner = node.func.value
        parent = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
        known = isinstance(owner, ast.Name | ast.Attribute) and (
            source.resolve(owner, self.own) is not MISSING or attribute_of(node.func, self.self_name) is not None
        )
        of_class = isinstance(owner, ast.Attribute) and source.resolve(owner.value, self.own) is not MISSING
        return None if parent or known or of_class else served_methods()[node.func.attr]

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """``self.child(x)[..., :n]`` of a child whose cut result is known."""
        call, upper = node.value, spelling.upper(node.slice)
        if isinstance(call, ast.Call) and upper is not None and isinstance(node.ctx, ast.Load):
            name = attribute_of(call.func, self.self_name) or ""
            shown = self.owner.cuts.get(name)
            if shown is not None and len(call.args) == 1 and not call.keywords:
                self.owner.cut.add(name)
                self.owner.uses.append(Use(shown.op, "", None))  # lengths decide
                x, n = self.visit(call.args[0]), self.visit(upper)
                target = self._put(cuts.replacement(shown), node)
                return ast.copy_location(ast.Call(target, [call.func, x, n], []), node)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = self._block(node.body)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        text, before = ast.unparse(node.test), self.conditions
        node.test = self.visit(node.test)
        sides = []
        for outcome, body in ((True, node.body), (False, node.orelse)):
            if before is not None:
                self.conditions = (*before, (text, outcome, self.self_name)) if self.self_name else None
            sides.append(self._block(body))
            self.conditions = before
        node.body, node.orelse = sides
        return node

    def _uncertain(self, node: ast.AST) -> ast.AST:
        before, self.conditions = self.conditions, None
        self.generic_visit(node)
        self.conditions = before
        return node

    visit_Compare = comparing.put  # noqa: N815
    visit_For = visit_While = visit_Try = visit_IfExp = visit_BoolOp = _uncertain  # noqa: N815
    visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_SetComp = visit_Lambda = _uncertain  # noqa: N815

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """A statement list: an activation's result that one product of the same list alone reads waits for it."""
        read = {
            n.id: i
            for i, s in enumerate(body)
            if not isinstance(s, ast.If | ast.For | ast.While | ast.Try | ast.With)
            for n in ast.walk(s)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        statements: list[ast.stmt] = []
        for i, statement in enumerate(body):
            target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
            waits = isinstance(target, ast.Name) and (
                target.id in self.single or (target.id not in self.pending and spelling.ends(target.id, body[i + 1 :]))
            )
            if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and waits:
                activation = self._activation(statement.value)
                last = read.get(target.id, -1)
                if target.id not in self.single:
                    last = i + 1 + spelling.first_named(target.id, body[i + 1 :])
                if activation is not None and last > i and self._waits(statement.value, body[i + 1 : last]):
                    assert isinstance(statement.value, ast.Call)
                    waited, statement.value = statement.value, self.visit(statement.value.args[0])
                    self.pending[target.id] = waited
                    statements.append(statement)
                    continue
            statements.append(self.visit(statement))
        return statements

    def _waits(self, call: ast.expr, between: list[ast.stmt]) -> bool:
        """Whether an activation may run after these statements: none changes in place what it is of, by any name."""
        assert isinstance(call, ast.Call)
        child = isinstance(call.args[0], ast.Call) and attribute_of(call.args[0].func, self.self_name) is not None
        own = {n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)} - {self.self_name}
        nodes = [n for s in between if not spelling.computes(s, self.own) for n in ast.walk(s)]
        return child or not any((isinstance(n, ast.Name) and n.id in own) or spelling.in_place(n) for n in nodes)

    # Gates

    def _activation(self, node: ast.expr) -> ast.expr | None:
        """The function of a call with one argument, if it is a known activation."""
        if not (isinstance(node, ast.Call) and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)):
            return None
        dotted = attribute_of(node.func, self.self_name)
        if dotted is not None:
            if dotted not in self.owner.gates:
                self.owner.products.add(dotted)
                return None
            return node.func if not node.keywords else None
        return node.func if gating.of_call(node, self.own) is not None else None

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        waiting = isinstance(node.target, ast.Name) and isinstance(node.op, ast.Mult) and node.target.id in self.pending
        call = node.value if getattr(node, gating.FRESH, False) else None
        if isinstance(call, ast.Call) and not call.keywords and self._activation(call) is not None:
            assert isinstance(node.target, ast.Name)
            u = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
            return ast.copy_location(ast.Assign([node.target], self._gate_in_place(node, call, u, True)), node)
        if not waiting:
            self.generic_visit(node)
            return node
        assert isinstance(node.target, ast.Name)
        activation = self.pending.pop(node.target.id)
        whole = ast.Call(activation.func, [ast.Name(node.target.id, ast.Load())], [])
        value = self._gate_in_place(node, ast.fix_missing_locations(ast.copy_location(whole, node)), node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def _gate_in_place(self, node: ast.AST, call: ast.Call, other: ast.expr, into: bool = False) -> ast.expr:
        """A product in place with what an activation gave, which nothing else has; or into such a thing with that."""
        self._note(node)
        dotted, known = attribute_of(call.func, self.self_name), None
        if dotted is None:
            known = gating.of_call(call, self.own)
            assert known is not None
            gating.functions.setdefault(known[1], gating.call_of(known[0]))
        self.owner.uses.append(Use("" if known is None else known[0].op, dotted or "", self.conditions))
        arguments = [call.func, self.visit(call.args[0]), self.visit(other)]
        target = gating.gated_into if into else gating.gated_in_place
        arguments = [arguments[2], *arguments[:2]] if into else arguments
        return ast.copy_location(ast.Call(self._put(target, node), arguments, []), node)

    def _note(self, node: ast.AST, stands: bool = False) -> None:
        place, self.turned = place_of(node), self.turned or not stands
        self.gated.add(place)
        self.owner.gated.add((self.own.__name__, place))

    def _product(self, node: ast.BinOp) -> ast.AST | None:
        """A product whose factors of one local alone are an activation of it."""
        for name, own, rest in spelling.shares(node, self.own):
            gate, call = gating.gate_of_expression(name, ast.unparse(own), self.own)
            if gate is not None:
                self._note(node)
                self.owner.uses.append(Use(gate.op, "", self.conditions))
                arguments = [ast.Name(name, ast.Load()), self.visit(rest)]
                target = self._put(gating.of_function(gate, call)[0], node)
                return ast.fix_missing_locations(ast.copy_location(ast.Call(target, arguments, []), node))
        return None

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Mult):
            product = self._product(node)
            if product is not None:
                return product
            for first, side, other in ((True, node.left, node.right), (False, node.right, node.left)):
                waiting = isinstance(side, ast.Name) and side.id in self.pending
                if waiting:
                    assert isinstance(side, ast.Name)
                    activation = self.pending.pop(side.id)
                    call = ast.copy_location(ast.Call(activation.func, [side], activation.keywords), side)
                elif any(spelling.in_place(n) for n in ast.walk(other)):
                    continue  # perhaps what the activation is of
                elif isinstance(side, ast.Call) and self._activation(side) is not None:
                    call = side
                else:
                    continue
                return self._gate(node, call, other, first, waiting)
        self.generic_visit(node)
        return node

    def _gate(self, node: ast.BinOp, call: ast.Call, other: ast.expr, first: bool, waited: bool) -> ast.AST:
        self._note(node, not waited and (not first or isinstance(other, ast.Name | ast.Constant)))  # nothing between
        dotted = attribute_of(call.func, self.self_name)
        inner, rest = self.visit(call.args[0]), self.visit(other)
        if dotted is not None:
            self.owner.uses.append(Use("", dotted, self.conditions))
            target: Callable[..., Any] = gating.gated if first else gating.gated_last
            arguments = [call.func, inner, rest] if first else [rest, call.func, inner]
        else:
            function_gate = gating.of_call(call, self.own)
            if function_gate is None:
                raise AssertionError(f"{ast.unparse(call)} was a known activation a moment ago")
            self.owner.uses.append(Use(function_gate[0].op, "", self.conditions))
            target = gating.of_function(function_gate[0], function_gate[1])[0 if first else 1]
            arguments = [inner, rest] if first else [rest, inner]
            served = ast.copy_location(ast.Call(self._put(target, node), arguments, []), node)
            whole = ast.Call(call.func, [copy.deepcopy(inner)], call.keywords)
            sides = (whole, copy.deepcopy(rest)) if first else (copy.deepcopy(rest), whole)
            now = self._while(call.func, spelling.taken(call.func, self.own), served)
            assert isinstance(now, ast.IfExp)
            now.orelse = ast.copy_location(ast.BinOp(sides[0], ast.Mult(), sides[1]), node)
            return now
        return ast.copy_location(ast.Call(self._put(target, node), arguments, []), node)

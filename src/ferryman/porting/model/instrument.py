"""The instrumented copy of one function: each of its tests reports, and what no proof follows is refused."""

from __future__ import annotations

import ast
import enum
import functools
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ferryman.porting.model import device_tests, loops, own_calls, skips, source
from ferryman.porting.model.reports import Reports
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.trace import Test, Unproven, modes, trusted

if TYPE_CHECKING:
    from ferryman.porting.model.branches import Follower

_BUILTINS = {
    *("len", "int", "float", "bool", "tuple", "list", "isinstance", "min", "max", "abs", "slice", "type", "sum"),
    *("round", "getattr", "hasattr", "callable", "super", "range", "print"),
}


# What says how a tensor lies in memory, where, or what it came from: no drawn input has it on both sides
_LAYOUT = {
    *("is_contiguous", "stride", "data_ptr", "storage_offset", "is_leaf", "_version", "grad_fn", "untyped_storage"),
    *("is_cuda", "is_cpu", "is_meta", "is_inference", "is_pinned", "is_shared", "_is_view", "is_sparse", "layout"),
    *("get_device", "is_quantized", "retains_grad", "output_nr", "_base", "names", "has_names", "is_conj", "is_neg"),
    *("type", "index"),  # of a device
}
# Methods of lists, dictionaries and sets that tensors do not have
_CHANGES = {
    *("append", "extend", "insert", "pop", "popitem", "remove", "discard", "clear", "update", "setdefault"),
    *("appendleft", "popleft"),
}
_OF_TENSORS = (torch.is_tensor, torch.is_floating_point, torch.is_complex)


class Instrument(Reports, ast.NodeTransformer):
    def __init__(
        self, follower: Follower, function: types.FunctionType, tree: ast.FunctionDef, role: str, depth: int
    ) -> None:
        self.role, self.depth = role, depth
        self.entered = False
        self.harmless = set[int]()  # attributes that say how a tensor lies, and decide nothing
        self.skipping = set[int]()  # tests that leave out turns which add nothing
        trace = follower.trace
        reports = {"seen": trace.seen, "same": trace.same, "each": trace.each, "maybe": trace.maybe}
        super().__init__(follower, function, {f"ferryman_{name}": report for name, report in reports.items()})
        self.testing = self.inside = 0
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        self.self_name = arguments[0] if arguments and follower.kind is not None and role != "helper" else None
        self.parameters = set(arguments)
        self.code = skips.code_of(follower, function, tree, self.self_name)
        stores = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.first_store: dict[str, int] = {}
        for node in stores:
            self.first_store[node.id] = min(node.lineno, self.first_store.get(node.id, node.lineno))
        self.nested = source.inner_functions(tree, self.parameters | self.first_store.keys())

    # Tests

    def _test(self, node: ast.expr) -> ast.expr:
        index = len(self.follower.trace.tests)
        text = source.mangled(node, self.own)
        guards: list[str | None] = [text] if self._guardable(node) else []
        if not (guards or self.inside):
            guards += device_tests.guards(node, self.follower.module, self.parameters, self.first_store)
        self.follower.trace.tests += [Test(text[:80], node.lineno, guard) for guard in guards or [None]]
        against = self._against(node)
        self.follower.trace.tests[index].against = against
        self.testing += 1
        inner: Any = self.generic_visit(node) if isinstance(node, ast.Compare) else self.visit(node)
        self.testing -= 1
        called, given = ("ferryman_same", [inner.left, *inner.comparators]) if against else ("ferryman_seen", [inner])
        for at in (index, *range(index + 1, index + len(guards))):
            given = [ast.copy_location(ast.Call(ast.Name(called, ast.Load()), [ast.Constant(at), *given], []), node)]
        return given[0]

    def _guardable(self, node: ast.expr) -> bool:
        """It reads only the module's state, and the forward's parameters as they came in."""
        if self.inside:  # its names may be another function's
            return False
        asked = {id(p.func) for p in ast.walk(node) if isinstance(p, ast.Call) and self._mode(p)}
        for part in ast.walk(node):
            if id(part) in asked or (isinstance(part, ast.Call) and id(part.func) in asked):
                continue
            if isinstance(part, ast.Call) and not (
                (isinstance(part.func, ast.Name) and part.func.id in ("len", "isinstance"))
                or (isinstance(part.func, ast.Attribute) and part.func.attr in ("dim", "size", "is_floating_point"))
            ):
                return False
            if isinstance(part, ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.NamedExpr | ast.Await):
                return False
            if isinstance(part, ast.Name) and part.id not in ("len", "isinstance"):
                mine = part.id == self.self_name
                came = self.role == "forward" and part.id in self.parameters
                if not mine and not came and not isinstance(source.resolve(part, self.own), types.ModuleType):
                    return False
                if part.id in self.first_store and self.first_store[part.id] <= node.lineno:
                    return False
        return self.self_name is not None or self.role == "forward"

    def _mode(self, node: ast.Call) -> bool:
        value = source.resolve(node.func, self.own) if isinstance(node.func, ast.Name) else None
        return isinstance(value, types.FunctionType) and value in modes and not node.args and not node.keywords

    def visit_If(self, node: ast.If) -> ast.AST:
        refuses = not node.orelse and all(isinstance(s, ast.Raise) for s in node.body)
        if refuses or id(node) in self.skipping:  # what is refused is no result, and what adds nothing changes none
            return node
        node.test = self._test(node.test)
        node.body = [self.visit(s) for s in node.body]
        node.orelse = [self.visit(s) for s in node.orelse]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self._test(node.test)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        node.values = [self._test(v) for v in node.values]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """A comparison that is no test may be a number, or choose one."""
        index = len(self.follower.trace.tests)
        text = source.mangled(node, self.own)
        self.follower.trace.tests.append(Test(text[:80], node.lineno, text if self._guardable(node) else None))
        self.generic_visit(node)
        call = ast.Call(ast.Name("ferryman_maybe", ast.Load()), [ast.Constant(index), node], [])
        return ast.copy_location(call, node)

    def visit_Assert(self, node: ast.Assert | ast.Raise) -> ast.AST:
        return node

    visit_Raise = visit_Assert  # noqa: N815

    # What is not followed

    def _refuse(self, node: ast.AST) -> ast.AST:
        what = type(node).__name__.lower()
        raise Unproven(
            f"{self.own.__qualname__}: a proof does not follow a {what} (line {getattr(node, 'lineno', '?')})"
        )

    def visit_For(self, node: ast.For) -> ast.AST:
        self.skipping |= {id(test) for test in skips.of_nothing(node, self.code)}
        if loops.fixed(node.iter, self.own):
            node.target = self.visit(node.target)
            node.body, node.orelse = [self.visit(s) for s in node.body], [self.visit(s) for s in node.orelse]
            return node
        index = len(self.follower.trace.tests)
        text = f"for .. in {ast.unparse(node.iter)[:70]}"
        self.follower.trace.tests.append(Test(text, node.lineno, self._some(node.iter), loop=True))
        node.target = self.visit(node.target)
        items = self.visit(node.iter)
        node.iter = ast.copy_location(
            ast.Call(ast.Name("ferryman_each", ast.Load()), [ast.Constant(index), items], []), node
        )
        node.body, node.orelse = [self.visit(s) for s in node.body], [self.visit(s) for s in node.orelse]
        return node

    def _some(self, items: ast.expr) -> str | None:
        """A guard that a range which the module's state gives has items."""
        plain = isinstance(items, ast.Call) and source.resolve(items.func, self.own) is range and not items.keywords
        if not plain or not all(isinstance(a, ast.Constant) or self._guardable(a) for a in items.args):  # type: ignore[attr-defined]
            return None
        return source.mangled(items, self.own)

    visit_While = visit_Try = visit_Match = visit_Global = visit_Nonlocal = _refuse  # noqa: N815

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> ast.AST:
        """Over values that are written down, or a range that the module's state gives, each by a name that nothing else
        has: no test, and no other number."""
        first = node.generators[0]
        fixed = isinstance(first.iter, ast.Tuple | ast.List) and not any(
            isinstance(e, ast.Starred) for e in first.iter.elts
        )
        fixed = fixed or (
            isinstance(first.iter, ast.Call)
            and source.resolve(first.iter.func, self.own) is range
            and all(isinstance(a, ast.Constant) for a in first.iter.args)
        )
        some = None if fixed else self._some(first.iter)
        fixed = fixed or some is not None
        inside = [n for n in ast.walk(node.elt) if isinstance(n, ast.IfExp | ast.BoolOp | ast.Call)]
        name = first.target.id if isinstance(first.target, ast.Name) else None
        if len(node.generators) > 1 or first.ifs or not fixed or name is None or name in self.own.__code__.co_names:
            return self._refuse(node)
        if any(not isinstance(n, ast.Call) or (isinstance(n.func, ast.Name) and n.func.id == name) for n in inside):
            return self._refuse(node)
        text = f"for .. in {ast.unparse(first.iter)[:70]}"
        self.generic_visit(node)
        if some is not None:
            index = ast.Constant(len(self.follower.trace.tests))
            self.follower.trace.tests.append(Test(text, node.lineno, some, loop=True))
            each = ast.Call(ast.Name("ferryman_each", ast.Load()), [index, first.iter], [])
            first.iter = ast.fix_missing_locations(ast.copy_location(each, node))
        return node

    visit_ClassDef = visit_Yield = visit_YieldFrom = visit_Await = _refuse  # noqa: N815
    visit_SetComp = visit_DictComp = visit_NamedExpr = visit_JoinedStr = _refuse  # noqa: N815
    visit_GeneratorExp = visit_ListComp  # noqa: N815
    visit_TryStar = visit_AsyncFor = visit_AsyncWith = visit_Import = visit_ImportFrom = visit_Delete = _refuse  # noqa: N815

    def visit_With(self, node: ast.With) -> ast.AST:
        for item in node.items:
            call = item.context_expr
            manager = source.resolve(call.func, self.own) if isinstance(call, ast.Call) else MISSING
            if manager is MISSING or not trusted(manager):
                return self._refuse(node)
            if manager is torch.autocast and isinstance(call, ast.Call):
                self._switched_off(call)
        self.generic_visit(node)
        return node

    def _switched_off(self, call: ast.Call) -> None:
        """``torch.autocast(x.device.type, enabled=False)`` does on each device what it does on another."""
        given = {k.arg: k.value for k in call.keywords}
        off, kind = given.get("enabled"), given.get("device_type", call.args[0] if call.args else None)
        if isinstance(off, ast.Constant) and off.value is False and isinstance(kind, ast.Attribute):
            device = kind.value
            if kind.attr == "type" and isinstance(device, ast.Attribute) and device.attr == "device":
                self.harmless.add(id(kind))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.entered:
            known = node.name in self.nested and not (node.decorator_list or self.inside)
            return self._nested(node) if known else self._refuse(node)
        self.entered = True
        node.body = [self.visit(s) for s in node.body]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        places = [(n.lineno, n.col_offset) for n in self.nested.values()]
        return self._nested(node) if (node.lineno, node.col_offset) in places else self._refuse(node)

    def _nested(self, node: ast.FunctionDef | ast.Lambda) -> ast.AST:
        """A function inside that is called by a name of its own. Its locals hide no name of the file."""
        given = node.args
        names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        hidden = [n for n in names if source.resolve(ast.Name(n, ast.Load()), self.own) is not MISSING]
        more = given.vararg or given.kwarg or given.defaults or any(given.kw_defaults)
        if more or hidden or names & {self.self_name, *self.nested}:
            return self._refuse(node)
        self.inside += 1
        body = node.body if isinstance(node.body, list) else [node.body]
        changed = [self.visit(s) for s in body]
        node.body = changed if isinstance(node.body, list) else changed[0]
        self.inside -= 1
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        dunder = node.attr.startswith("__") and node.attr.endswith("__") and node.attr != "__class__"
        if isinstance(node.ctx, ast.Store) or dunder:
            raise Unproven(f"{self.own.__qualname__}: it changes its state, or reads {node.attr} (line {node.lineno})")
        if node.attr in _LAYOUT and id(node) not in self.harmless and not self.testing and not self._of_self(node):
            raise Unproven(f"{self.own.__qualname__}: it reads {ast.unparse(node)[:60]}, which says how a tensor lies")
        if isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            self.follower.property(node.attr, self.depth + 1)
        base = source.resolve(node.value, self.own)
        if base is not MISSING and not isinstance(base, types.ModuleType | enum.EnumMeta) and not trusted(base):
            raise Unproven(f"{self.own.__qualname__}: it reads {ast.unparse(node)[:60]}, which may change")
        self._global(node)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load):
            self._global(node)
        return node

    def _global(self, node: ast.expr, table: bool = False) -> None:
        """Note a name of a file that is read: of its own, or of another library's module."""
        names, name = self.own.__globals__, node.id if isinstance(node, ast.Name) else ""
        if isinstance(node, ast.Attribute):
            module, name = source.resolve(node.value, self.own), node.attr
            if not isinstance(module, types.ModuleType):
                return
            if trusted(types.SimpleNamespace(__module__=module.__name__)):
                self.switch(module, name)
                return
            names = vars(module)
        elif name in source.locals_of(self.own) or name in self.own.__code__.co_freevars:
            return
        if name in names and not isinstance(names[name], types.ModuleType):
            self.follower.trace.read(names, name, table)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if any(isinstance(n, ast.Attribute) and n.attr == "device" for n in ast.walk(node.slice)):
            raise Unproven(f"{self.own.__qualname__}: {ast.unparse(node)[:60]} depends on the device")
        if isinstance(node.ctx, ast.Store) and self._reads_self(node.value):
            raise Unproven(f"{self.own.__qualname__}: it changes its state (line {node.lineno})")
        if self.holds(source.resolve(node.value, self.own)):
            return self.entry(node)
        self.generic_visit(node)
        return node

    def _reads_self(self, node: ast.AST) -> bool:
        return any(isinstance(n, ast.Name) and n.id == self.self_name for n in ast.walk(node))

    # Calls

    def visit_Call(self, node: ast.Call) -> ast.AST:
        target = node.func
        if (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == self.self_name
        ):
            followed = own_calls.of_self(self.follower, self.own.__qualname__, target.attr, self.depth)
            if followed is not None:
                node.func = self._new(followed, target)
        elif isinstance(target, ast.Attribute) and _is_super(target.value):
            followed = own_calls.of_super(self.follower, self.own, target.attr, self.depth)
            if followed is not None:
                node.func = self._new(followed, target)
                node.args.insert(0, ast.copy_location(ast.Name(self.self_name or "self", ast.Load()), target))
        elif isinstance(target, ast.Name) and target.id in self.nested:
            pass  # its body reports
        elif isinstance(target, ast.Name) or source.resolve(target, self.own) is not MISSING:
            replaced = self._known(source.resolve(target, self.own), ast.unparse(target), node)
            self._global(target)
            if replaced is not None:
                node.func = ast.copy_location(ast.Name(replaced, ast.Load()), target)
        elif isinstance(target, ast.Attribute):
            base = source.resolve(target.value, self.own)
            if base is not MISSING and not trusted(base):
                raise Unproven(f"{self.own.__qualname__}: calls {ast.unparse(target)}, which no proof follows")
            if target.attr in _CHANGES and not self._own_list(target.value):
                raise Unproven(f"{self.own.__qualname__}: {ast.unparse(target)[:60]} may change its state")
            if target.attr == "get" and ".device" in ast.unparse(node):
                raise Unproven(f"{self.own.__qualname__}: {ast.unparse(node)[:60]} depends on the device")
            if target.attr in ("type", "index") and node.args:  # a cast, or of a list
                target.value = self.visit(target.value)
            else:
                node.func = self.visit(target)
        elif isinstance(target, ast.Subscript) and isinstance(source.resolve(target.value, self.own), Mapping):
            self.new["ferryman_taken"] = self.follower.taken
            taken = ast.Call(ast.Name("ferryman_taken", ast.Load()), [self.visit(target)], [])
            node.func = ast.copy_location(taken, target)
        else:
            raise Unproven(f"{self.own.__qualname__}: calls {ast.unparse(target)[:60]}, which no proof follows")
        asked = node.args[1] if isinstance(target, ast.Name) and target.id == "getattr" and len(node.args) > 1 else None
        if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
            self.follower.property(asked.value, self.depth + 1)
        numeric = self.of_numbers(target)
        node.args = [self.visit(a) for a in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return self.reporting(node, False) if numeric else node

    def _known(self, value: Any, text: str, node: ast.Call) -> str | None:
        """A name for the instrumented copy of what is called; None where the call may stay."""
        bare = not (node.args or node.keywords or isinstance(value, type))
        if value in (getattr, hasattr) and not self.may_ask(node):
            raise Unproven(f"{self.own.__qualname__}: {ast.unparse(node)[:60]}, of what may have any attribute")
        if value is MISSING:
            raise Unproven(f"{self.own.__qualname__}: calls {text}, a local, which no proof follows")
        if isinstance(value, torch.jit.ScriptFunction):  # TorchScript compiled it of this function
            value = source.unscripted(value)
        if getattr(value, "__module__", None) == "builtins" and not isinstance(value, types.FunctionType):
            if getattr(value, "__name__", "") in _BUILTINS:
                return None
            raise Unproven(f"{self.own.__qualname__}: calls {text}")
        if trusted(value) or (isinstance(value, functools.partial) and trusted(value.func)):
            asks = getattr(value, "__name__", "").lstrip("_").startswith(("is_", "get_", "are_")) or bare
            if asks and not self.testing and value not in _OF_TENSORS:
                raise Unproven(f"{self.own.__qualname__}: asks {text}, which is another's to say")
            return None
        if isinstance(value, types.FunctionType) and value in modes:
            return None
        if not isinstance(value, types.FunctionType):
            raise Unproven(f"{self.own.__qualname__}: calls {text}, which no proof follows")
        return self._named(self.follower.helper(value, self.depth + 1))

    def _named(self, followed: Any) -> str:
        name = f"ferryman_followed_{len(self.new)}"
        self.new[name] = followed
        return name

    def _new(self, followed: Any, node: ast.AST) -> ast.Name:
        return ast.copy_location(ast.Name(self._named(followed), ast.Load()), node)

    def _own_list(self, node: ast.expr) -> bool:
        """A local, made here."""
        return isinstance(node, ast.Name) and node.id in self.first_store and node.id not in self.parameters


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args

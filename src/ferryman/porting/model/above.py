"""What a class above defines, as ``super().name(..)`` in a class's code calls it: a served copy of that."""

from __future__ import annotations

import ast
import types
from typing import TYPE_CHECKING, Any

from ferryman.porting.model import handing, objects, source, spelling
from ferryman.porting.model.trace import trusted

if TYPE_CHECKING:
    from ferryman.porting.model.serve import Serve


def put(serve: Serve, node: ast.Call) -> bool:
    """Whether a served copy stands in the place of such a call now. One level deep, and not where it asks another
    library's registry, of which its reader's keywords are known alone."""
    owner = serve.owner
    above = _called(node.func, serve.own, owner.kind) if serve.self_name and not serve.depth else None
    tree = None if above is None else source.parsed(above[2])
    if above is None or tree is None:
        return False
    if trusted(above[0]) and not any(handing.follows(source.resolve(n, above[2])) for n in ast.walk(tree)):
        return False  # a module of PyTorch's is an op as a whole, or none
    uses, read = len(owner.uses), {*owner.interfaces}
    inner = type(serve)(owner, above[2], tree, True, serve.depth + 1, serve.conditions)
    changed = inner.visit(spelling.operators(tree, above[2]))
    if not inner.new or owner.interfaces != read:
        del owner.uses[uses:]
        owner.interfaces.intersection_update(read)
        return False
    serve.methods = {**inner.methods, **serve.methods}
    plainly = objects.asked(above[2], owner.kind) if inner.turned else {}
    served = objects.where_plain(source.rebuilt(above[2], changed, inner.new), above[2], plainly)
    node.func = serve._put(_while_current(*above, served), node.func)
    node.args.insert(0, ast.copy_location(ast.Name(str(serve.self_name), ast.Load()), node))
    return True


def _called(func: ast.expr, function: types.FunctionType, kind: type) -> tuple[type, str, types.FunctionType] | None:
    """(the class that has it, its name, the function) of ``super().name`` in a function of a class or one above it."""
    parent = func.value if isinstance(func, ast.Attribute) else None
    plain = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "super"
    if not isinstance(func, ast.Attribute) or not isinstance(parent, ast.Call) or not plain or parent.args:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    here = source.content(cells["__class__"]) if "__class__" in cells else None
    order = kind.__mro__
    for base in order[order.index(here) + 1 :] if here in order else ():
        if func.attr in vars(base):
            value = vars(base)[func.attr]
            known = isinstance(value, types.FunctionType) and not hasattr(value, "__wrapped__")
            return (base, func.attr, value) if known else None
    return None


def _while_current(base: type, name: str, function: types.FunctionType, served: Any) -> Any:
    """The served copy of such a function while the class has that, and what it has after that."""

    def call(me: Any, *given: Any, **options: Any) -> Any:
        own = vars(base)[name]
        return (served if own is function else own)(me, *given, **options)

    return call

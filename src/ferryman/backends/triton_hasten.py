"""Triton's interpreter, made cheap: what it works out again at each operation is worked out once.

Most of an interpreted kernel's time is not NumPy's. Triton 3.6 builds the type of every result anew, looks through
every name of its language whenever one function calls another, and computes whether integers overflowed for an
assertion that it then leaves out. None of this changes a value; `tests/unit/hasten_worker.py` holds it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
from typing import Any

from ferryman.backends.triton_operators import hasten_operators, operator_of


@functools.cache
def hasten() -> None:
    """Change the interpreter of this process, once. `triton_bfloat16.mend` has made sure of Triton's release."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    _nested_calls(interpreter, language)
    _builtins(interpreter, language.core)
    _types(interpreter, language.core)
    _promotions(interpreter, language.core)
    _overflows(interpreter)
    hasten_operators(interpreter, language.core)


def _nested_calls(interpreter: Any, language: Any) -> None:
    """Nothing changes in the language within a launch: once for each set of modules that functions know is enough."""
    prepared, known = set[frozenset[int]](), dict[Any, frozenset[int]]()
    launch, prepare = interpreter.GridExecutor.__call__, interpreter._patch_lang

    @functools.wraps(launch)
    def launched(self: Any, *args: Any, **more: Any) -> Any:
        prepared.clear()  # a launch puts back what it has changed
        return launch(self, *args, **more)

    @functools.wraps(interpreter.InterpretedFunction.__call__)
    def called(self: Any, *args: Any, **more: Any) -> Any:
        modules = known.get(self)
        if modules is None:
            both = (language, language.core)
            seen = (value for value in self.fn.__globals__.values() if inspect.ismodule(value))
            modules = known[self] = frozenset(id(value) for value in seen if value in both)
        if modules not in prepared:
            prepare(self.fn)
            prepared.add(modules)
        try:
            return self.rewrite()(*args, **more)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called


def _builtins(interpreter: Any, core: Any) -> None:
    """A builtin of the language gets its semantics in place, not in a copy of its keywords. The builtins of a module or
    a class are listed once, not at each launch."""
    listed = dict[Any, list[tuple[str, Any, Any]]]()
    semantics = dict[Any, Any]()

    def replaced(target: Any, name: str, member: Any, semantic: Any) -> Any:
        # what a builtin is wrapped in asks only whether the semantics are given
        body = getattr(member, "__wrapped__", member)

        def run(*args: Any, **more: Any) -> Any:
            more["_semantic"] = semantic
            return body(*args, **more)

        return (operator_of(name, member, semantic, core) if target is core.tensor else None) or run

    def patch(target: Any, builder: Any, scope: Any) -> None:
        if target not in listed:
            semantic = semantics.setdefault(builder, interpreter.TritonSemantic(builder))
            members = ((n, m) for n, m in inspect.getmembers(target) if core.is_builtin(m))
            listed[target] = [(n, m, replaced(target, n, m, semantic)) for n, m in members]
        for name, member, own in listed[target]:
            if getattr(target, name) is member:  # a function that another one calls is patched again
                scope.set_attr(target, name, own)

    interpreter._patch_builtin = patch


def _types(interpreter: Any, core: Any) -> None:
    """Shapes are made once, so that equal ones are one object, and NumPy's dtype once for each of Triton's."""
    blocks = dict[tuple[int, ...], tuple[Any, int, str]]()
    tensors = dict[tuple[int, ...], tuple[Any, Any]]()
    dtypes = dict[str, Any]()
    block, numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    broadcast, same = interpreter.TritonSemantic.broadcast_impl_value, core.constexpr(True)

    @functools.wraps(block)
    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([s if type(s) is int else core._unwrap_if_constexpr(s) for s in shape])
        cached = blocks.get(key)
        if cached is None:
            block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, f"<{self.shape}, "
            self.shape.ferryman_kinds, self.shape.ferryman_spread = {}, {}
            return
        self.element_ty = element_ty
        self.shape, self.numel, head = cached
        self.name = f"{head}{element_ty}>"

    @functools.wraps(core.tensor.__init__)
    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        parts = type.__dict__.get("ferryman_parts")
        if parts is None:
            key = tuple(type.shape.values) if type.is_block() else ()
            cached = tensors.get(key)
            if cached is None:
                cached = tensors[key] = core.tuple([core.constexpr(s) for s in key]), core.constexpr(math.prod(key))
            parts = type.ferryman_parts = (*cached, type.scalar)
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = parts

    def numpy_of(dtype: Any) -> Any:
        if isinstance(dtype, core.pointer_type):
            return numpy_dtype(dtype)
        name = dtype.name
        cached = dtypes.get(name)
        if cached is None:
            cached = dtypes[name] = numpy_dtype(dtype)
        return cached

    def by_identity(equal: Any, yes: Any) -> Any:
        """Comparing in full only what is not one object."""

        @functools.wraps(equal)
        def equals(self: Any, other: Any) -> Any:
            return yes if other is self else equal(self, other)

        return equals

    @functools.wraps(broadcast)
    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(self, lhs, rhs)
        if lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        left, right = lhs.type.shape.values, rhs.type.shape.values
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return broadcast(self, lhs, rhs)  # axes to add, or an error
        shape = [b if a == 1 else a for a, b in zip(left, right, strict=True)]
        return to_shape(self, lhs, shape), to_shape(self, rhs, shape)

    def to_shape(self: Any, value: Any, shape: list[int]) -> Any:
        if value.type.shape.values == shape:
            return value
        handle = self.builder.create_broadcast(value.handle, shape)
        return self.tensor(handle, core.block_type(value.type.scalar, shape))

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    core.tuple.__eq__ = by_identity(core.tuple.__eq__, same)
    core.dtype.__eq__ = by_identity(core.dtype.__eq__, True)
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_values
    interpreter._get_np_dtype = numpy_of


def _promotions(interpreter: Any, core: Any) -> None:
    """What most calls are asked about, a tensor or a plain number, is answered first; a pair of types once."""
    semantic, kept = interpreter.TritonSemantic, dict[tuple[Any, ...], Any]()
    to_tensor, promote, unwrap = semantic.to_tensor, semantic.computation_type_impl, core._unwrap_if_constexpr
    plain = frozenset((core.tensor, core.dtype, int, float, bool, str, type(None)))
    numbers = dict[tuple[type, int | float], Any]()

    @functools.wraps(to_tensor)
    def of_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        if type(x) is core.tensor:
            return x
        if type(x) not in (int, float) or x != x:  # NaN is no key
            return to_tensor(self, x, check_type)
        one = numbers.get((type(x), x))
        if one is None:
            one = numbers[type(x), x] = to_tensor(self, x, check_type)
        return one

    @functools.wraps(promote)
    def promoted(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        common = kept.get(key)
        if common is None:
            common = kept[key] = promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return common

    @functools.wraps(unwrap)
    def unwrapped(o: Any) -> Any:
        return o if type(o) in plain else unwrap(o)

    semantic.to_tensor, semantic.computation_type_impl = of_tensor, promoted
    core._unwrap_if_constexpr = unwrapped


def _overflows(interpreter: Any) -> None:
    """Whether integers overflow is asserted where Triton debugs alone; the interpreter computes it, and leaves it."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)

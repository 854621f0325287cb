"""The operators of Triton's interpreter, in one step where nothing is to be cast.

An addition takes fifteen calls in Triton 3.6: types are compared, promoted and cast, shapes are spread out, and only
then NumPy adds. Where both operands are of one type, NumPy is called at once, and spreads shapes itself. All else goes
Triton's way. `tests/unit/hasten_worker.py` holds that every bit stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_FLOATS = ("fp16", "fp32", "fp64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NUMBERS = frozenset(_FLOATS + _INTEGERS)
_BITS = frozenset((*_INTEGERS, "int1"))
# A method of the semantics: NumPy's function, the types that it is called with, whether the result is a truth value.
_DIRECT: dict[str, tuple[str, frozenset[str], bool]] = {
    "add": ("add", _NUMBERS, False),
    "sub": ("subtract", _NUMBERS, False),
    "mul": ("multiply", _NUMBERS, False),
    "truediv": ("divide", frozenset(("fp32", "fp64")), False),
    "and_": ("bitwise_and", _BITS, False),
    "or_": ("bitwise_or", _BITS, False),
    "xor_": ("bitwise_xor", _BITS, False),
    "less_than": ("less", _NUMBERS, True),
    "less_equal": ("less_equal", _NUMBERS, True),
    "greater_than": ("greater", _NUMBERS, True),
    "greater_equal": ("greater_equal", _NUMBERS, True),
    "equal": ("equal", _NUMBERS, True),
    "not_equal": ("not_equal", _NUMBERS, True),
}
_RANKS = {name: rank for rank, name in enumerate(("int8", "int16", "int32", "int64"))}
_MIXED = frozenset(n for n, (_, types, truth) in _DIRECT.items() if truth or n in ("add", "sub", "mul"))
_OVERFLOWING = frozenset(("add", "sub", "mul"))  # those that are also asked whether integers overflow
# An operator of tensors: the semantics' method, and whether the tensor is its right operand.
_OPERATORS: dict[str, tuple[str, bool]] = {
    "__add__": ("add", False),
    "__radd__": ("add", True),
    "__sub__": ("sub", False),
    "__rsub__": ("sub", True),
    "__mul__": ("mul", False),
    "__rmul__": ("mul", True),
    "__truediv__": ("truediv", False),
    "__rtruediv__": ("truediv", True),
    "__and__": ("and_", False),
    "__or__": ("or_", False),
    "__xor__": ("xor_", False),
    "__lt__": ("less_than", False),
    "__le__": ("less_equal", False),
    "__gt__": ("greater_than", False),
    "__ge__": ("greater_equal", False),
    "__eq__": ("equal", False),
    "__ne__": ("not_equal", False),
}


def hasten_operators(interpreter: Any, core: Any) -> None:
    """Put the short ways before Triton's own. Equal shapes are one object (`triton_hasten`)."""
    _handles(interpreter, core)
    _operands(interpreter, core)
    _pointers(interpreter, core)
    constant = _constants(interpreter)
    for name in _DIRECT:
        _operator(interpreter, core, name, constant)
    _casts(interpreter, core, constant)
    _loads(interpreter, core)
    _splats(interpreter, core)


def operator_of(name: str, member: Any, semantic: Any, core: Any) -> Callable[..., Any] | None:
    """What an operator of tensors does, without the calls that only hand it on; None for another name."""
    if name == "__getitem__":
        return _axes(member.__wrapped__, semantic, core)
    if name not in _OPERATORS:
        return None
    method, right = _OPERATORS[name]
    direct, unwrap, to_tensor = getattr(semantic, method), core._unwrap_if_constexpr, semantic.to_tensor
    more = (True,) if method in _OVERFLOWING else ()

    def run(self: Any, other: Any, **_: Any) -> Any:
        return direct(self, unwrap(other), *more)

    def run_from_right(self: Any, other: Any, **_: Any) -> Any:
        return direct(unwrap(other), self, *more)

    def compare(self: Any, other: Any, **_: Any) -> Any:
        other = unwrap(other)
        if type(other) is int and self.dtype is core.int32 and -(2**31) <= other < 2**31:
            return direct(self, other)  # of the type that Triton gives the number
        if type(other) is int and self.dtype is core.float32 and abs(other) <= 2**24:
            return direct(self, other)  # which float32 has exactly
        return direct(self, to_tensor(other))

    return compare if _DIRECT[method][2] else run_from_right if right else run


def _axes(usual: Callable[..., Any], semantic: Any, core: Any) -> Callable[..., Any]:
    """``x[:, None]``: a block with more axes of one element."""
    tensor, block, whole = core.tensor, core.block_type, slice(None)

    def item(self: Any, slices: Any, **_: Any) -> Any:
        kinds = self.type.shape.__dict__.get("ferryman_kinds") if self.type.is_block() else None
        if kinds is None or type(slices) is not tuple or not all(s is None or s == whole for s in slices):
            return usual(self, slices, _semantic=semantic)
        handle, key = self.handle, (self.dtype.name, *(s is None for s in slices))
        kind = kinds.get(key)
        if kind is None or kind.element_ty is not self.dtype:  # a pointer's type is made anew at each launch
            shape = list(self.type.shape.values)
            for axis, one in enumerate(slices):
                if one is None:
                    shape.insert(axis, 1)
            kind = kinds[key] = block(self.dtype, shape)
        return tensor(type(handle)(handle.data.reshape(kind.shape.values), handle.dtype.scalar), kind)

    return item


def _handles(interpreter: Any, core: Any) -> None:
    """A handle is checked without a look through the classes of its type."""
    pointer = core.pointer_type

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        # Triton's smallest type has 1 bit, and NumPy's 8
        if data.itemsize > 1 and type(dtype) is not pointer and data.itemsize * 8 > dtype.primitive_bitwidth:
            self.__post_init__()

    interpreter.TensorHandle.__init__ = init


def _operands(interpreter: Any, core: Any) -> None:
    """Two tensors of one type and shape are ready as they are."""
    semantic, tensor, plain = interpreter.TritonSemantic, core.tensor, core.dtype
    checked, known = semantic.binary_op_type_checking_impl, _NUMBERS | {"bf16", "int1"}

    @functools.wraps(checked)
    def ready(self: Any, lhs: Any, rhs: Any, *more: Any, **named: Any) -> Any:
        if type(lhs) is tensor and type(rhs) is tensor and lhs.shape is rhs.shape and len(more) < 4 and not named:
            kind = lhs.dtype
            if kind is rhs.dtype and type(kind) is plain and kind.name in known:
                return lhs, rhs
        return checked(self, lhs, rhs, *more, **named)

    semantic.binary_op_type_checking_impl = ready


def _constants(interpreter: Any) -> Callable[..., Any]:
    """A number beside a tensor: NumPy's array of one; None where the tensor is cast, or Triton refuses the number."""
    kept = dict[tuple[type, Any, str], Any]()

    def constant(semantic: Any, number: Any, dtype: Any) -> Any:
        key = type(number), number, dtype.name
        if key in kept:
            return kept[key]
        common = semantic.computation_type_impl(dtype, False, semantic.to_tensor(number).dtype, True, False)
        fits = dtype.name in _FLOATS or dtype.get_int_min_value() <= number <= dtype.get_int_max_value()
        array = semantic.scalar_constant(number, dtype).handle.data if fits and common == dtype else None
        if number == number:  # NaN is no key
            kept[key] = array
        return array

    return constant


def _beside(one: Any, block: Any) -> bool:
    """Whether NumPy spreads an array of one over a block as Triton does: the result then lies in the same order, on
    which the order of a later sum depends."""
    return bool(one.ndim == 1 and one.size == 1 and block.flags.c_contiguous and block.ndim)


def _spread(left: Any, right: Any) -> Any:
    """The shape over which two blocks of one rank are spread: one of the two, or a new list; None for another."""
    if left is right:
        return left
    kept = left.__dict__.get("ferryman_spread")
    if kept is None:  # a shape that is not one object with its equals
        return None
    if id(right) not in kept:
        if "ferryman_spread" not in right.__dict__:
            return None
        a, b = left.values, right.values
        shape: Any = None
        if len(a) == len(b) and all(m == n or 1 in (m, n) for m, n in zip(a, b, strict=True)):
            shape = [n if m == 1 else m for m, n in zip(a, b, strict=True)]
            shape = left if shape == a else right if shape == b else shape
        kept[id(right)] = shape
    return kept[id(right)]


def _over(block: Any, left: Any, right: Any, element: Any) -> Any:
    """The type of the result of two tensors, of these elements; None where Triton must spread them itself."""
    a, b = left.type, right.type
    if not a.is_block():
        return (
            (b.with_element_ty(element) if _beside(left.handle.data, right.handle.data) else None)
            if b.is_block()
            else element
        )
    if not b.is_block():
        return a.with_element_ty(element) if _beside(right.handle.data, left.handle.data) else None
    shape = _spread(a.shape, b.shape)
    if shape is None:
        return None
    if shape is a.shape:
        return a.with_element_ty(element)
    return b.with_element_ty(element) if shape is b.shape else block(element, shape)


def _operator(interpreter: Any, core: Any, name: str, constant: Callable[..., Any]) -> None:
    function, types, truth = _DIRECT[name]
    semantic, tensor, handle, block = interpreter.TritonSemantic, core.tensor, interpreter.TensorHandle, core.block_type
    usual, ufunc, builder = getattr(semantic, name), getattr(interpreter.np, function), interpreter.interpreter_builder
    boolean, numbers, mixed = core.int1, (int, float), name in _MIXED

    def wider(left: Any, right: Any) -> Any:
        """Of two signed integers the type that Triton casts both to, as NumPy does; None for other types."""
        one, two = left.dtype, right.dtype
        if one.name in _RANKS and two.name in _RANKS:
            return one if _RANKS[one.name] > _RANKS[two.name] else two
        return None

    @functools.wraps(usual)
    def run(self: Any, input: Any, other: Any, *more: Any, **named: Any) -> Any:
        if named or (more and builder.options.sanitize_overflow):
            return usual(self, input, other, *more, **named)
        if type(other) is tensor:
            dtype = other.dtype
            if dtype.name not in types:
                return usual(self, input, other, *more)
            right = other.handle.data
            if type(input) is tensor:
                left = input.handle.data
                if input.dtype is dtype and left.dtype is right.dtype:
                    element = boolean if truth else dtype
                    kind = _over(block, input, other, element)
                    if kind is not None:
                        return tensor(handle(ufunc(left, right), input.handle.dtype.scalar), kind)
                elif mixed and input.dtype is not dtype:
                    wide = wider(input, other)
                    kind = None if wide is None else _over(block, input, other, boolean if truth else wide)
                    if kind is not None:
                        return tensor(handle(ufunc(left, right), boolean if truth else wide), kind)
            elif type(input) in numbers:
                one = constant(self, input, dtype)
                if one is not None and one.dtype is right.dtype and _beside(one, right):
                    kind = other.type.with_element_ty(boolean) if truth else other.type
                    return tensor(handle(ufunc(one, right), dtype), kind)
        elif type(input) is tensor and type(other) in numbers and input.dtype.name in types:
            left, one = input.handle.data, constant(self, other, input.dtype)
            if one is not None and one.dtype is left.dtype and _beside(one, left):
                kind = input.type.with_element_ty(boolean) if truth else input.type
                return tensor(handle(ufunc(left, one), input.handle.dtype.scalar), kind)
        return usual(self, input, other, *more)

    setattr(semantic, name, run)


def _pointers(interpreter: Any, core: Any) -> None:
    """The places of a block: pointers and signed offsets."""
    semantic, tensor, pointer, block = interpreter.TritonSemantic, core.tensor, core.pointer_type, core.block_type
    usual, handle, unsigned = semantic.add, interpreter.TensorHandle, interpreter.np.uint64
    offsets = frozenset(("int8", "int16", "int32", "int64", "uint64"))

    @functools.wraps(usual)
    def add(self: Any, input: Any, other: Any, *more: Any, **named: Any) -> Any:
        if type(input) is tensor and type(input.dtype) is pointer:
            if type(other) is int:
                other = self.to_tensor(other)
            if type(other) is tensor and other.dtype.name in offsets:
                kind = _over(block, input, other, input.dtype)
                if kind is not None:
                    place = input.handle
                    width = max(1, place.get_element_ty().primitive_bitwidth // 8)
                    return tensor(handle(place.data + width * other.handle.data.astype(unsigned), place.dtype), kind)
        return usual(self, input, other, *more, **named)

    semantic.add = add


def _casts(interpreter: Any, core: Any, constant: Callable[..., Any]) -> None:
    """A number of one width as another, where Triton has one way, and a choice between tensors that are ready, or
    between one and a number."""
    semantic, tensor, handle = interpreter.TritonSemantic, core.tensor, interpreter.TensorHandle
    usual, choose, builder, boolean = semantic.cast, semantic.where, interpreter.InterpreterBuilder, core.int1
    single = {(a, b) for a in ("bf16", "fp16", *_INTEGERS) for b in ("fp32",)}
    single |= {("fp32", b) for b in ("bf16", "fp16", *_INTEGERS)} | {(a, b) for a in _INTEGERS for b in _INTEGERS}

    @functools.wraps(usual)
    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, to = input.dtype, dst_ty.scalar
        if source is to:
            return input
        if fp_downcast_rounding is None and (source.name, to.name) in single and source.name != to.name:
            return tensor(builder.cast_impl(self.builder, input.handle, to), input.type.with_element_ty(to))
        return usual(self, input, dst_ty, fp_downcast_rounding)

    @functools.wraps(choose)
    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        if type(x) is tensor and type(y) is tensor and x.dtype is y.dtype and condition.dtype is boolean:
            left, right, chosen = x.handle, y.handle, condition.handle.data
            if (
                x.shape is y.shape is condition.shape
                and x.dtype.name in _NUMBERS
                and left.data.dtype is right.data.dtype
            ):
                return tensor(handle(interpreter.np.where(chosen, left.data, right.data), right.dtype.scalar), x.type)
        elif type(x) is tensor and type(y) in (int, float):
            one = beside(self, condition, x, y)
            if one is not None:
                picked = interpreter.np.where(condition.handle.data, x.handle.data, one)
                return tensor(handle(picked, x.handle.dtype.scalar), x.type)
        elif type(y) is tensor and type(x) in (int, float):
            one = beside(self, condition, y, x)
            if one is not None:
                picked = interpreter.np.where(condition.handle.data, one, y.handle.data)
                return tensor(handle(picked, y.handle.dtype.scalar), y.type)
        return choose(self, condition, x, y)

    def beside(self: Any, condition: Any, given: Any, number: Any) -> Any:
        """The number as an array of one, where NumPy chooses between it and a block as Triton does."""
        if condition.shape is not given.shape or condition.dtype is not boolean or given.dtype.name not in _NUMBERS:
            return None
        data, one = given.handle.data, constant(self, number, given.dtype)
        if one is None or one.dtype is not data.dtype or not condition.handle.data.flags.c_contiguous:
            return None
        return one if _beside(one, data) else None

    semantic.cast, semantic.where = cast, where


def _loads(interpreter: Any, core: Any) -> None:
    """A block of pointers with a mask of its shape, and a number or nothing where the mask is false."""
    semantic, tensor, handle, pointer = (
        interpreter.TritonSemantic,
        core.tensor,
        interpreter.TensorHandle,
        core.pointer_type,
    )
    usual, plain, boolean, numpy = semantic.load, core.dtype, core.int1, interpreter.np
    hints = {(cache, kept) for cache in ("", ".ca", ".cg", ".cv") for kept in ("", "evict_first", "evict_last")}

    @functools.wraps(usual)
    def load(self: Any, ptr: Any, mask: Any, other: Any, boundary: Any, padding: Any, cache: Any, *more: Any) -> Any:
        kind = ptr.dtype
        ready = type(kind) is pointer and type(mask) is tensor and mask.shape is ptr.shape and ptr.type.is_block()
        if not ready or mask.dtype is not boolean or boundary or padding or (cache, more[0]) not in hints:
            return usual(self, ptr, mask, other, boundary, padding, cache, *more)
        element, filled = kind.element_ty, None
        if type(element) is not plain or element is boolean or (other is not None and other.type.is_block()):
            return usual(self, ptr, mask, other, boundary, padding, cache, *more)
        if other is not None and other.handle.data.all():  # of 0 Triton makes the zeros itself
            one = self.cast(other, element).handle
            filled = handle(numpy.full(ptr.handle.data.shape, one.data[0], one.data.dtype), one.dtype)
        values = self.builder.create_masked_load(ptr.handle, mask.handle, filled, None, None, False)
        return tensor(values, ptr.type.with_element_ty(element))

    semantic.load = load


def _splats(interpreter: Any, core: Any) -> None:
    """One number over a block, and the types of blocks of plain elements, once each."""
    block, plain, usual = core.block_type, core.dtype, core.block_type.with_element_ty
    handle, numpy = interpreter.TensorHandle, interpreter.np

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        spread = numpy.empty(ret_ty.shape.values, dtype=interpreter._get_np_dtype(arg.dtype))
        spread[...] = arg.data[0] if isinstance(arg.dtype, block) else arg.data
        return handle(spread, arg.dtype.scalar)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        kinds = self.shape.__dict__.get("ferryman_kinds")
        if kinds is None or type(scalar_ty) is not plain:
            return usual(self, scalar_ty)
        kind = kinds.get(scalar_ty.name)
        if kind is None:
            kind = kinds[scalar_ty.name] = usual(self, scalar_ty)
        return kind

    interpreter.InterpreterBuilder.create_splat = create_splat
    block.with_element_ty = with_element_ty

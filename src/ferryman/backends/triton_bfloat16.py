"""bfloat16 in Triton's interpreter, mended: Triton 3.6 keeps it as raw uint16.

It truncates float32 where hardware rounds to nearest even, loses subnormals, and adds, multiplies, compares and sums
(`tl.dot` too) the raw integers. Here each operation on bfloat16 is done in float32 and rounded once.
It also reads NaN of e4m3 as 480, and NaN and Inf of e5m2 as numbers, loses the carry of a number that it rounds up to 8
bits, and refuses AMD's formats (fnuz): floats of 8 bits are read and rounded as PyTorch does, and what is too large
becomes the largest number, as NVIDIA's conversion (`cvt.rn.satfinite`) has it. AMD's conversion was not examined.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

from ferryman.backends.triton_hasten import hasten
from ferryman.backends.triton_runtime import release
from ferryman.errors import BackendUnavailable

RELEASE = (3, 6)  # the interpreter that this mends; its insides are no interface
_BINARY_AND_MORE = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt", "create_dot")


@functools.cache
def mend() -> None:
    """Mend the interpreter of this process, once. Raises BackendUnavailable on another release of Triton."""
    import triton

    if release(triton.__version__) != RELEASE:
        required = ".".join(map(str, RELEASE))
        raise BackendUnavailable(
            f"triton {triton.__version__}: its interpreter's bfloat16 was not examined; install triton {required}, "
            "or check float32 and float16 alone"
        )
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    for name in _BINARY_AND_MORE:
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.create_dot = _of_wide(builder.create_dot)
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _between_floats(builder.create_fp_to_fp)
    interpreter._patch_lang_core = _with_formats_of_amd(interpreter._patch_lang_core)
    builder.get_bf16 = lambda self, value: narrow(
        interpreter.TensorHandle(_numpy().array([value], "float32"), _tl().float32)
    )
    for name in ("sum", "min_max"):
        setattr(interpreter.ReduceOps, name, _reduced(getattr(interpreter.ReduceOps, name)))
    for name in ("cumsum", "cumprod"):
        setattr(interpreter.ScanOps, name, _reduced(getattr(interpreter.ScanOps, name)))
    hasten()


def mend_if_known() -> None:
    """`mend`, and on another release nothing: our own kernels round and widen bfloat16 by hand there."""
    with contextlib.suppress(BackendUnavailable):
        mend()


def _numpy() -> Any:
    return importlib.import_module("numpy")


def _tl() -> Any:
    return importlib.import_module("triton.language")


def is_bfloat16(handle: Any) -> bool:
    """Whether a handle holds bfloat16 (its comparisons, of the same type by name, hold bool)."""
    data = getattr(handle, "data", None)
    if getattr(getattr(data, "dtype", None), "char", None) != "H":  # NumPy's uint16: most handles end here
        return False
    kind = getattr(getattr(handle, "dtype", None), "scalar", None)
    return kind is not None and kind == _tl().bfloat16


def widen(handle: Any) -> Any:
    """bfloat16 as float32, exactly; any other handle as it is."""
    if not is_bfloat16(handle):
        return handle
    data = (handle.data.astype("uint32") << 16).view("float32")
    return type(handle)(data, _tl().float32)


def narrow(handle: Any, towards_zero: bool = False) -> Any:
    """A float handle as bfloat16, rounded to nearest even (or towards zero). NaN stays NaN."""
    numpy = _numpy()
    given = numpy.asarray(handle.data)
    value = numpy.ascontiguousarray(given, dtype="float32").reshape(given.shape)
    if given.dtype == "float64":  # through float32 rounded to odd, so that the second rounding does not see the first
        over = numpy.abs(value.astype("float64")) > numpy.abs(given)
        value = numpy.where(over, numpy.nextafter(value, numpy.float32(0)), value)
        value = (value.view("uint32") | (value.astype("float64") != given)).view("float32")
    bits = value.view("uint32")
    rounded = bits if towards_zero else bits + (0x7FFF + ((bits >> 16) & 1)).astype("uint32")
    narrowed = numpy.where(numpy.isnan(value), (bits >> 16) | 0x40, rounded >> 16).astype("uint16")
    return type(handle)(narrowed, _tl().bfloat16)


def _in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **more: Any) -> Any:
        if not any(map(is_bfloat16, args)):
            return original(self, *args, **more)
        result = original(self, *map(widen, args), **more)
        if result.data.dtype == bool:
            return type(result)(result.data, _tl().int1)
        # the accumulator of a dot, and what a select gives, say the type of the result
        wide = original.__name__ == "create_dot" and not is_bfloat16(args[2])
        return result if wide or result.dtype.scalar != _tl().float32 else narrow(result)

    return run


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, src: Any, dst_type: Any) -> Any:
        to, tl = dst_type.scalar, _tl()
        if to == tl.bfloat16:
            if is_bfloat16(src):
                return src
            exact = src.data.dtype in ("float16", "float32", "float64")
            return narrow(src if exact else type(src)(src.data.astype("float32"), tl.float32))
        src = widen(src)
        return src if src.dtype.scalar == to == tl.float32 else original(self, src, dst_type)

    return run


@functools.cache
def _format_of(name: str) -> Any:
    """PyTorch's dtype of a format of 8 bits, by Triton's name; None for another type."""
    import torch

    of_amd = {"fp8e4b8": torch.float8_e4m3fnuz, "fp8e5b16": torch.float8_e5m2fnuz}
    return (of_amd | {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}).get(name)


@functools.cache
def _modes() -> Any:
    return importlib.import_module("triton._C.libtriton").ir.ROUNDING_MODE


@functools.cache
def _of_8_bits(name: str) -> Any:
    """The 256 numbers of a format of 8 bits, by Triton's name; None for one that is left to Triton."""
    import torch

    kind = _format_of(name)
    return None if kind is None else torch.arange(256, dtype=torch.uint8).view(kind).float().numpy()


def _of_wide(dot: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dot)
    def run(self: Any, a: Any, b: Any, *more: Any) -> Any:
        tables = [_of_8_bits(x.dtype.scalar.name) for x in (a, b)]
        wide = [x if t is None else type(x)(t[x.data], _tl().float32) for x, t in zip((a, b), tables, strict=True)]
        return dot(self, *wide, *more)

    return run


def _in_8_bits(values: Any, kind: Any) -> Any:
    """Numbers of float32 in a format of 8 bits, to nearest even."""
    import torch

    most = torch.finfo(kind).max
    return torch.from_numpy(values).clamp(-most, most).to(kind).view(torch.uint8).numpy()


def _with_formats_of_amd(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(lang: Any, scope: Any) -> Any:
        original(lang, scope)
        usual = lang.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            of_amd = self.name in ("fp8e4b8", "fp8e5b16")
            return getattr(builder, f"get_{self.name}_ty")() if of_amd else usual(self, builder)

        scope.set_attr(lang.dtype, "to_ir", to_ir)

    return run


def _between_floats(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        to, tl = dst_type.scalar, _tl()
        src = widen(src)
        if to in (tl.float32, tl.float16, tl.bfloat16) and (values := _of_8_bits(src.dtype.scalar.name)) is not None:
            src = type(src)(values[src.data], tl.float32)
            if to == tl.float16:
                with _numpy().errstate(over="ignore"):
                    return type(src)(src.data.astype("float16"), to)
        kind = _format_of(to.name)
        if kind is not None and rounding_mode != _modes().RTZ:
            if src.dtype.scalar.primitive_bitwidth == 8:
                src = run(self, src, tl.float32, None)
            return type(src)(_in_8_bits(src.data.astype("float32"), kind), to)
        if to == tl.bfloat16:
            if src.data.dtype == "uint8":  # another float8, exactly
                src = original(self, src, tl.float32, rounding_mode)
            return narrow(src, towards_zero=rounding_mode == _modes().RTZ)
        return src if src.dtype.scalar == to == tl.float32 else original(self, src, dst_type, rounding_mode)

    return run


def _reduced(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or scan of Triton's tensors, in float32 where it is of bfloat16."""

    @functools.wraps(original)
    def run(self: Any, tensor: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(tensor, tuple) and is_bfloat16(tensor.handle):
            tl = _tl()
            result = original(self, self.to_tensor(widen(tensor.handle).data, tl.float32), *args, **more)
            several = isinstance(result, (tuple, list))
            narrowed = [_narrowed(one) for one in (result if several else [result])]
            return type(result)(narrowed) if several else narrowed[0]
        return original(self, tensor, *args, **more)

    return run


def _narrowed(tensor: Any) -> Any:
    tl = _tl()
    if tensor.handle.dtype.scalar != tl.float32:  # the indices of a maximum
        return tensor
    shape = list(tensor.shape)
    return tl.core.tensor(narrow(tensor.handle), tl.block_type(tl.bfloat16, shape) if shape else tl.bfloat16)

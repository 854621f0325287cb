"""What no edit of a source expresses, as rules over any op: aliasing, stale memory, kept results, changed inputs,
streams.

A rule turns a right kernel into a wrong one without knowing the op. It is skipped where the op has nothing that it
could
bend: no optional argument, no number, no two inputs of one shape.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.primitive import Primitive
from ferryman.porting.mutate import rewrites

Kernel = Callable[..., Any]
Named = Iterator[tuple[str, Kernel]]


@dataclass(frozen=True)
class Rule:
    """models: the mistake. make: (op, right kernel) -> (suffix of the name, wrong kernel). gpu: why it needs a GPU.
    real: the suffix names the tensor that it bends, and only a floating one can be bent so."""

    name: str
    operator: str
    models: str
    make: Callable[[Primitive, Kernel], Named]
    gpu: str | None = None
    real: bool = False


RULES: list[Rule] = []


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _like(outputs: tuple[Any, ...], result: Any) -> Any:
    return outputs if isinstance(result, tuple) else outputs[0]


def rule(operator: str, gpu: str | None = None) -> Callable[[Callable[[Primitive, Kernel], Named]], None]:
    """The generator's name and documentation are the rule's."""

    def register(make: Callable[[Primitive, Kernel], Named]) -> None:
        RULES.append(Rule(make.__name__, operator, str(make.__doc__).split(".")[0], make, gpu))

    return register


def written(operator: str) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """A change of one output's values, made in place: the memory, dtype and strides stay the right kernel's."""

    def register(change: Callable[[Tensor], Tensor]) -> None:
        def make(op: Primitive, right: Kernel) -> Named:
            for i, name in enumerate(op.outputs):

                def kernel(*args: Any, i: int = i) -> Any:
                    result = right(*args)
                    y = _tuple(result)[i]
                    if y.numel() and y.is_floating_point():
                        changed = change(y.clone())
                        same = (changed == y) | (changed.isnan() & y.isnan())
                        y.copy_(torch.where(same, y, changed))
                    return result

                yield name, kernel

        RULES.append(Rule(change.__name__, operator, str(change.__doc__).split(".")[0], make, real=True))

    return register


def returned(operator: str) -> Callable[[Callable[[Tensor], Any]], None]:
    """Something else in an output's place."""

    def register(change: Callable[[Tensor], Any]) -> None:
        def make(op: Primitive, right: Kernel) -> Named:
            def kernel(*args: Any) -> Any:
                result = right(*args)
                first, *rest = _tuple(result)
                return _like((change(first), *rest), result)

            yield "", kernel

        RULES.append(Rule(change.__name__, operator, str(change.__doc__).split(".")[0], make))

    return register


def given(operator: str) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """The right kernel on a changed floating input, for each such input."""

    def register(change: Callable[[Tensor], Tensor]) -> None:
        def make(op: Primitive, right: Kernel) -> Named:
            over = {place for place, _ in op.overwritten}
            for i, name in enumerate(op.names):
                if not op.types[name].startswith("Tensor") or i in over:
                    continue

                def kernel(*args: Any, i: int = i) -> Any:
                    a = args[i]
                    if not isinstance(a, Tensor) or not a.numel() or not a.is_floating_point():
                        return right(*args)
                    return right(*args[:i], change(a), *args[i + 1 :])

                yield name, kernel

        RULES.append(Rule(change.__name__, operator, str(change.__doc__).split(".")[0], make, real=True))

    return register


# ---------------------------------------------------------------------------------------------------- values written


@written("scale")
def a_thousandth_more(y: Tensor) -> Tensor:
    """Every result times 1.001."""
    return (y.float() * 1.001).to(y.dtype)


@written("scale")
def a_hundredth_more(y: Tensor) -> Tensor:
    """Every result times 1.01."""
    return (y.float() * 1.01).to(y.dtype)


@written("scale")
def two_hundredths_more(y: Tensor) -> Tensor:
    """Every result times 1.02."""
    return (y.float() * 1.02).to(y.dtype)


@written("scale")
def twice(y: Tensor) -> Tensor:
    """Every result doubled: fn read as fnuz."""
    return y * 2


@written("scale")
def other_largest(y: Tensor) -> Tensor:
    """Every result times 448 / 240: the scale of the other 8-bit format."""
    return (y.float() * (448 / 240)).to(y.dtype)


@written("rounding undeclared")
def through_8_bits(y: Tensor) -> Tensor:
    """Results kept in e4m3 on the way."""
    return y.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(y.dtype)


@written("saturation")
def saturated_at_448(y: Tensor) -> Tensor:
    """Results beyond 448 become 448."""
    return y.clamp(-448, 448)


@written("special values")
def nan_becomes_zero(y: Tensor) -> Tensor:
    """NaN is hidden."""
    return torch.where(y.isnan(), 0.0, y).to(y.dtype)


@written("special values")
def nan_injected(y: Tensor) -> Tensor:
    """One NaN."""
    flat = y.reshape(-1).clone()
    flat[flat.numel() // 2] = torch.nan
    return flat.reshape(y.shape)


@written("special values")
def infinity_clamped(y: Tensor) -> Tensor:
    """Infinities become the largest number."""
    most = torch.finfo(y.dtype).max
    return torch.where(y.isinf(), y.sign() * most, y).to(y.dtype)


@written("special values")
def nan_for_a_negative_zero(y: Tensor) -> Tensor:
    """Code 0x80, -0 in e4m3fn, is left for fnuz, where it is NaN: a negative number that rounds to 0 there."""
    small = (y.float().clamp(-448, 448).to(torch.float8_e4m3fn).float() == 0) & torch.signbit(y)
    return torch.where(small, torch.nan, y).to(y.dtype)


@written("elements")
def zero_row(y: Tensor) -> Tensor:
    """One row is zero."""
    rows = y.reshape(-1, y.shape[-1]) if y.dim() else y.reshape(1, 1)
    rows[rows.shape[0] // 2] = 0
    return rows.reshape(y.shape)


@written("elements")
def last_rows_swapped(y: Tensor) -> Tensor:
    """Two rows are swapped where their number is no multiple of 16."""
    rows = y.reshape(-1, y.shape[-1]).clone() if y.dim() else y.reshape(1, 1)
    if rows.shape[0] % 16 and rows.shape[0] > 1:
        rows[-2:] = rows[-2:].flip(0)
    return rows.reshape(y.shape)


@written("elements")
def columns_rotated(y: Tensor) -> Tensor:
    """Every column is its neighbour's."""
    return y.roll(1, -1) if y.dim() else y


@written("stale output")
def last_column_stale(y: Tensor) -> Tensor:
    """The last column holds what memory held."""
    if y.dim():
        y[..., -1] = torch.empty_like(y[..., -1]).fill_(_old(y))
    return y


@written("stale output")
def last_element_stale(y: Tensor) -> Tensor:
    """The last element holds what memory held."""
    flat = y.reshape(-1).clone()
    flat[-1] = _old(y)
    return flat.reshape(y.shape)


@written("stale output")
def first_row_stale(y: Tensor) -> Tensor:
    """The first row holds what memory held."""
    rows = y.reshape(-1, y.shape[-1]).clone() if y.dim() else y.reshape(1, 1).clone()
    rows[0] = _old(y)
    return rows.reshape(y.shape)


def _old(y: Tensor) -> float:
    return float(torch.empty(1, dtype=y.dtype).fill_(7.5))


# ----------------------------------------------------------------------------------------------- structure, memory


@returned("structure")
def other_dtype(y: Tensor) -> Tensor:
    """A result in another dtype."""
    return y.to(torch.float64 if y.dtype == torch.float32 else torch.float32)


@returned("structure")
def another_dimension(y: Tensor) -> Tensor:
    """A result with one dimension more."""
    return y.unsqueeze(0)


@returned("structure")
def other_strides(y: Tensor) -> Tensor:
    """The right values in another order in memory."""
    back = list(reversed(range(y.dim())))
    return y.permute(back).contiguous().permute(back)


@rule("output aliases input")
def computed_in_place(op: Primitive, right: Kernel) -> Named:
    """The result is written over an input, and returned there."""
    over = {place for place, _ in op.overwritten}
    for i, name in enumerate(op.names):
        if op.types[name] == "Tensor" and i not in over:

            def kernel(*args: Any, i: int = i) -> Any:
                result = right(*args)
                first, *rest = _tuple(result)
                a = args[i]
                if (a.shape, a.dtype, a.stride()) != (first.shape, first.dtype, first.stride()):
                    return result
                a.copy_(first)
                return _like((a, *rest), result)

            yield name, kernel


@rule("input modified")
def one_input_element_changed(op: Primitive, right: Kernel) -> Named:
    """An input's last element is other afterwards."""
    over = {place for place, _ in op.overwritten}
    for i, name in enumerate(op.names):
        if op.types[name].startswith("Tensor") and i not in over:

            def kernel(*args: Any, i: int = i) -> Any:
                result = right(*args)
                a = args[i]
                if isinstance(a, Tensor) and a.numel():
                    a[(-1,) * a.dim()] = a[(-1,) * a.dim()] + 1 if a.dtype != torch.bool else ~a[(-1,) * a.dim()]
                return result

            yield name, kernel


@rule("out of bounds")
def written_past_the_end(op: Primitive, right: Kernel) -> Named:
    """256 bytes behind an input are written: a buffer too small by as many."""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        a = next(v for v in args if isinstance(v, Tensor))
        whole = torch.empty(0, dtype=torch.uint8, device=a.device).set_(a.untyped_storage())
        end = a.storage_offset() + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)) + 1
        whole[end * a.element_size() :][:256] = 0
        return result

    yield "", kernel


@rule("kept result")
def kept_by_pointer(op: Primitive, right: Kernel) -> Named:
    """A result is kept by the address of the first input."""
    memory: dict[Any, Any] = {}

    def kernel(*args: Any) -> Any:
        first = next(v for v in args if isinstance(v, Tensor))
        key = first.data_ptr(), tuple(first.shape), first.dtype
        return memory.setdefault(key, right(*args))

    yield "", kernel


@rule("kept result")
def one_buffer_for_all(op: Primitive, right: Kernel) -> Named:
    """Every call's result lies in one buffer."""
    memory: dict[Any, Tensor] = {}

    def kernel(*args: Any) -> Any:
        result = right(*args)
        first, *rest = _tuple(result)
        key = tuple(first.shape), first.dtype, first.stride()
        return _like((memory.setdefault(key, torch.empty_like(first)).copy_(first), *rest), result)

    yield "", kernel


@rule("nondeterminism")
def last_bit_at_random(op: Primitive, right: Kernel) -> Named:
    """A result's last bit differs from call to call: sums in any order, a race, a missing barrier."""
    calls = [0]

    def kernel(*args: Any) -> Any:
        result = right(*args)
        y = _tuple(result)[0]
        calls[0] += 1
        if y.numel() and y.is_floating_point() and calls[0] % 2 == 0:
            y.copy_(torch.nextafter(y.float(), torch.full_like(y.float(), 2.0)).to(y.dtype) * (1 + 2**-7))
        return result

    yield "", kernel


@rule("batch")
def first_sample_serves_all(op: Primitive, right: Kernel) -> Named:
    """Every sample's result is the first one's."""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        y = _tuple(result)[0]
        if y.dim() and y.shape[0] > 1:
            y.copy_(y[:1].clone().expand(y.shape))
        return result

    yield "", kernel


# ------------------------------------------------------------------------------------------------------- arguments


@given("cast early")
def input_in_bfloat16(a: Tensor) -> Tensor:
    """An input through bfloat16."""
    return a.to(torch.bfloat16).to(a.dtype)


@given("8 bits undeclared")
def input_in_e4m3(a: Tensor) -> Tensor:
    """An input through e4m3."""
    return a.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(a.dtype)


@given("strides ignored")
def read_as_if_contiguous(a: Tensor) -> Tensor:
    """An input's strides are taken for contiguous ones."""
    if a.is_contiguous() or a.storage_offset() + a.numel() > a.untyped_storage().nbytes() // a.element_size():
        return a
    return a.as_strided(a.shape, torch.empty(a.shape, device="meta").stride())


@given("strides ignored")
def offset_ignored(a: Tensor) -> Tensor:
    """An input is read from the memory's beginning: its offset is forgotten."""
    return a.as_strided(a.shape, a.stride(), 0)


@given("elements")
def negated(a: Tensor) -> Tensor:
    """An input's sign is lost."""
    return -a


@given("elements")
def reversed_rows(a: Tensor) -> Tensor:
    """An input is read from its end."""
    return a.flip(-1) if a.dim() else a


@rule("argument ignored")
def argument_left_out(op: Primitive, right: Kernel) -> Named:
    """An optional argument is taken for absent, a number for its default or 0, a switch for its other side."""
    for i, (name, parameter) in enumerate(zip(op.names, op.parameters, strict=True)):
        kind = op.types[name]
        if kind.startswith("Tensor") and not kind.endswith("?"):
            continue
        default = parameter.default

        def kernel(*args: Any, i: int = i, kind: str = kind, default: Any = default) -> Any:
            value: Any = None
            if kind == "bool":
                value = not args[i]
            elif not kind.endswith("?"):
                value = default if default not in (inspect.Parameter.empty, args[i]) else type(args[i])()
            return right(*args[:i], value, *args[i + 1 :])

        yield name, kernel


@rule("argument wrong")
def argument_off(op: Primitive, right: Kernel) -> Named:
    """A whole number one off, another ten times as large: 1e-5 for 1e-6."""
    for i, name in enumerate(op.names):
        if not op.types[name].startswith(("int", "float")):
            continue
        for more in (1, -1) if op.types[name].startswith("int") else (10,):

            def kernel(*args: Any, i: int = i, more: int = more) -> Any:
                a = args[i]
                value = a if a is None else a * more if isinstance(a, float) else a + more
                return right(*args[:i], value, *args[i + 1 :])

            yield f"{name}_{'less' if more < 0 else 'more'}", kernel


@rule("arguments swapped")
def inputs_swapped(op: Primitive, right: Kernel) -> Named:
    """Two inputs of one shape are taken for each other."""
    over = {place for place, _ in op.overwritten}
    places = [i for i, n in enumerate(op.names) if op.types[n] == "Tensor" and i not in over]
    for i, j in itertools.pairwise(places):

        def kernel(*args: Any, i: int = i, j: int = j) -> Any:
            a, b = args[i], args[j]
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return right(*args)
            mixed = list(args)
            mixed[i], mixed[j] = b, a
            return right(*mixed)

        yield f"{op.names[i]}_{op.names[j]}", kernel


# ---------------------------------------------------------------------------------- the definition in float32, bent


def finish(op: Primitive, outputs: tuple[Tensor, ...], args: tuple[Any, ...]) -> Any:
    """Values rounded once to the dtypes, and laid out in the strides, that an op declares for these arguments."""
    places = list(_tuple(op.meta(*args)))
    for argument, output in op.overwritten:
        places[output] = args[argument]
    for place, value in zip(places, outputs, strict=True):
        place.copy_(value)
    return places[0] if len(places) == 1 else tuple(places)


def in_float32(
    op: Primitive,
    change: Callable[[Tensor, Tensor], Tensor] | None = None,
    mode: Callable[[tuple[Any, ...]], Any] | None = None,
) -> Kernel:
    """The definition in float32. ``change(value, place)``: of what is rounded. ``mode(args)``: a context to run it
    in."""

    def kernel(*args: Any) -> Any:
        wide = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args[:-1]]
        with mode(args) if mode else contextlib.nullcontext():
            outputs = _tuple(op.body(*wide))
        if change is not None:
            outputs = tuple(change(y, place) for y, place in zip(outputs, _tuple(op.meta(*args[:-1])), strict=True))
        return finish(op, outputs, args[:-1])

    return kernel


def _truncated(y: Tensor, place: Tensor) -> Tensor:
    """Rounded toward zero, as dropping low bits does."""
    if place.dtype == torch.bfloat16:
        return (y.float().contiguous().view(torch.int32) & -65536).view(torch.float32)
    if place.dtype != torch.float16:
        return y
    rounded = y.to(torch.float16)
    away = (rounded.float().abs() > y.abs()) & y.isfinite()
    return (rounded.contiguous().view(torch.int16) - away.short()).view(torch.float16)


def _replacing(one: rewrites.Rewrite) -> Callable[[tuple[Any, ...]], Any]:
    return lambda _: rewrites.Rewritten(one.replaces)


def definition_rules(op: Primitive, used: set[str]) -> Iterator[tuple[str, str, str, Kernel]]:
    """(name, operator, note, kernel) of every wrong way to compute the definition in float32."""
    yield "truncated", "rounding direction", "results are truncated, not rounded", in_float32(op, _truncated)
    for one in rewrites.WRONG:
        if one.applies(used):
            yield (
                one.name,
                one.operator,
                one.note,
                in_float32(op, None, _replacing(one)),
            )

    def storage(args: tuple[Any, ...]) -> Any:
        dtype = next(a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
        return rewrites.Rewritten(rewrites.storage_arithmetic(dtype))

    note = "another implementation runs in silence: arithmetic in the storage dtype"
    yield "in_storage_precision", "fallback", note, in_float32(op, None, storage)


# ---------------------------------------------------------------------------------------------- devices, streams

NO_STREAMS = "a CPU has no streams"


@rule("side stream", NO_STREAMS)
def written_on_a_side_stream(op: Primitive, right: Kernel) -> Named:
    """The work is left on a stream that nobody waits for."""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            for y in _tuple(result):
                y.add_(1)
        return result

    yield "", kernel


@rule("stale graph replay", NO_STREAMS)
def graph_replayed_on_old_inputs(op: Primitive, right: Kernel) -> Named:
    """A graph of an earlier call is replayed, with that call's inputs."""
    graphs: dict[Any, Any] = {}

    def kernel(*args: Any) -> Any:
        key = tuple((tuple(a.shape), a.dtype, a.stride()) if isinstance(a, Tensor) else a for a in args[:-1])
        if key not in graphs:
            kept = [a.clone() if isinstance(a, Tensor) else a for a in args]
            right(*kept)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = right(*kept)
            graphs[key] = graph, result
        graph, result = graphs[key]
        graph.replay()
        return result

    yield "", kernel


@rule("wrong device", "a CPU is the host")
def result_on_the_host(op: Primitive, right: Kernel) -> Named:
    """The result comes back on the host."""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        first, *rest = _tuple(result)
        return _like((first.cpu(), *rest), result)

    yield "", kernel

"""Inputs that a module is proven with, and what these leave out: numbers that its code names, lengths, dimensions,
what is not finite, float32, autocast. Thresholds there show in no drawn input of ordinary size.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ferryman import ops
from ferryman.ops.recognition import Candidate, compiled
from ferryman.porting.model import casting
from ferryman.porting.model.distance import LIMIT, Disagreement, distance, flat
from ferryman.porting.model.exact import Widened
from ferryman.porting.model.proof import drawn, plain_kernels, prove
from ferryman.porting.model.trace import Trace
from ferryman.porting.model.unread import unread

_MOST = 1 << 24  # elements of the longest input
_USUAL = 1 << 22  # of one that has rows as wide as the module's, where shorter rows show the same
SHORT = 16  # such rows
_LONG = (1025, 8193)  # rows, whatever the code names
_ROUNDS = 4  # of numbers that code computes of those that it came to last
_CLOSE = 2.0**-12  # float32: sums of thousands of terms differ by less in any order, 16 bits in between by more
# A module that rounds where the op does not is apart by few units of its dtype; another eps or scale is by more.
_APART = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}
# Roundings go up and down and leave the sum as it is; another factor does not.
_LEANING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_NARROW = 2.0**-4  # of small numbers in float16, whose squares are subnormal
Run = Callable[..., Any]


def ids(rows: int, known: Sequence[int]) -> Iterator[Tensor]:
    """Numbers of rows: every one of a short table, those that a module's state names, repeated ones, some from
    the end, some beyond, none."""
    generator = torch.Generator().manual_seed(5)
    edges = [0, rows - 1, *(v for v in known if 0 <= v < rows)]
    every = torch.cat([torch.tensor(edges * 2), torch.randperm(rows, generator=generator)[:64]])
    yield every.unsqueeze(0)
    yield torch.randint(rows, (2, 7), generator=generator, dtype=torch.int32)
    yield torch.randint(rows, (2, 3, 2), generator=generator)
    yield every[:1]
    yield torch.tensor([[-1, 0], [-rows, rows - 1]])
    yield torch.tensor([[-rows - 1, rows]])  # of no row: refused by most
    yield torch.tensor(rows - 1)
    yield torch.empty(2, 0, dtype=torch.int64)


def laid(x: Tensor, candidate: Candidate) -> Tensor:
    """x with its last dimension where a candidate has its width."""
    return x if candidate.axis == -1 else x.movedim(-1, candidate.axis).contiguous()


def taken(numbers: Iterator[Tensor], original: Run, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[str]]:
    """(those that a module does not refuse for their dtype or dimensions, or because they are none; tests for what it
    refuses)."""
    kept, tests, read = [], dict[str, None](), unread(original)  # one number alone may be read as an index
    for ids in numbers:
        other = ids.dtype is not torch.int64 or not ids.numel() or ids.dim() != 2
        given = [t.detach().requires_grad_() for t in tensors]
        try:
            torch.autograd.grad([(y * y).sum() for y in flat(read(ids, *given))], given, allow_unused=True)
        except Exception:  # noqa: BLE001 - foreign code refuses with whatever it likes
            if other:
                dtype = "x.dtype is torch.int64" if ids.dim() == 2 else f"x.dim() != {ids.dim()}"
                tests["x.numel() > 0" if not ids.numel() else dtype] = None
            if other or bool((ids < 0).any()):  # numbers below zero are refused: no result
                continue
        kept.append(ids)
    return kept, [*tests]


def inputs_of(width: int, axis: int = -1) -> Iterator[Tensor]:
    """The width stands last; `laid` moves it. A single channel of a single sample and place has no variance, which
    PyTorch refuses: with an axis there are two places."""
    for shape, seed in (((4, width), 0), ((2, 3, width), 1)):
        for name, x in drawn(*shape, seed=seed):
            if seed == 0 or name == "normal":
                yield x
    generator = torch.Generator().manual_seed(3)
    single = (1, width) if axis == -1 else (1, 2, width)
    yield torch.randn(single, generator=generator, dtype=torch.float64)
    # one magnitude a row, from 2^-30 to 2^30: a clamp, or an eps in another place, shows somewhere
    sweep = torch.exp2(torch.arange(-30.0, 31.0, 4.0, dtype=torch.float64)).unsqueeze(-1)
    yield torch.randn(len(sweep), width, generator=generator, dtype=torch.float64) * sweep
    # where activations bend; each row has all of the range
    yield torch.linspace(-30, 30, 6 * width, dtype=torch.float64).reshape(width, 6).t().contiguous()
    yield torch.linspace(-4, 4, 2 * width, dtype=torch.float64).reshape(width, 2, 1).permute(2, 1, 0).contiguous()


def gating(x: Tensor, index: int) -> tuple[Tensor]:
    """What may gate x: plain, all of an activation's range, or small."""
    generator = torch.Generator().manual_seed(11 + index)
    gate = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return (gate * (2.0, 12.0, 0.1)[index % 3],)


@dataclass(frozen=True)
class Beyond:
    """Both sides of a proof, as functions of (x, .., tensors); ``given(x)``: these for an x. named: numbers in the
    code, and that it reads; ``trace`` has those that it computes. shorter: the same with rows of `SHORT`, if any."""

    original: Run
    expression: Any
    candidate: Candidate
    state: dict[str, Any]
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    width: int
    named: frozenset[float]
    trace: Trace = field(default_factory=Trace)
    shorter: Beyond | None = None

    @property
    def numbers(self) -> set[float]:
        return set(self.named) | self.trace.computed()

    def wanted(self, *given: Any) -> list[Tensor]:
        with Widened(torch.float64):
            return flat(self.original(*given))

    def actual(self, *given: Any) -> list[Tensor]:
        return flat(self.of(self.expression, *given))

    def of(self, expression: Any, *given: Any) -> Any:
        count = len(given) - len(self.names)
        own = types.SimpleNamespace(**(self.state | dict(zip(self.names, given[count:], strict=True))))
        return expression(own, *given[:count])

    def given(self, x: Tensor, tensors: Sequence[Tensor] | None = None) -> tuple[Any, ...]:
        more = gating(x, 0) if self.candidate.gate else ()
        return (x, *(g.to(x.dtype) for g in more), *(self.tensors if tensors is None else tensors))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Of a shape whose last size is the width."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)
        return laid(x, self.candidate)

    def apart(self, what: str, actual: Sequence[Tensor], wanted: Sequence[Tensor], limit: float) -> None:
        """`distance`, in units of what stands along the width."""
        ours, theirs = ([y.movedim(self.candidate.axis, -1) for y in side] for side in (actual, wanted))
        distance(what, ours, theirs, limit)


@torch.no_grad()
def shown(beyond: Beyond, dims: Sequence[int]) -> list[str]:
    """Tests that a call must pass beside. Raises Disagreement where the two sides differ in what was left out."""
    with plain_kernels():
        _sizes(beyond, dims)
        tests = _lengths(beyond, dims)
        _narrow(beyond, dims)
        return [*tests, *_autocast(beyond, dims), *_default(beyond, dims)]


def dimensions(
    original: Run, given: Callable[[Tensor], tuple[Any, ...]], width: int, candidate: Candidate
) -> list[int]:
    """How many dimensions an input may have for a module to give a result of as many; channels have places, too."""
    taken = []
    for count in range(1 if candidate.axis == -1 else candidate.axis + 1, 6):
        x = laid(torch.randn((*(2, 3, 2, 2)[: count - 1], width), dtype=torch.float64), candidate)
        try:
            with Widened(torch.float64), torch.no_grad(), plain_kernels():
                outputs = flat(original(*given(x)))
        except Exception:  # noqa: BLE001 - foreign code refuses what it likes
            continue
        if all(y.dim() == count for y in outputs):
            taken.append(count)
    return taken


def agreeing(beyond: Beyond, dims: Sequence[int]) -> list[int]:
    """Those numbers of dimensions in which the two sides agree: code that counts dimensions from the first one computes
    another thing of more. All of them where none does."""
    kept = []
    for count in dims:
        with contextlib.suppress(Disagreement), plain_kernels():
            x = beyond.normal(*(2, 3, 2, 2)[: count - 1], beyond.width)
            _compare(beyond, beyond.given(x), f"{count} dimensions")
            kept.append(count)
    return kept or [*dims]


def _compare(beyond: Beyond, given: tuple[Any, ...], what: str) -> None:
    beyond.apart(f"of {what}: result", beyond.actual(*given), beyond.wanted(*given), LIMIT)


def _leading(dims: Sequence[int], *sizes: int) -> tuple[int, ...]:
    """Sizes before the last, for as many dimensions as a module takes, three if it does."""
    count = 3 if 3 in dims else max(d for d in dims)
    return sizes[:1] * (count == 2) or ((*(1,) * (count - 3), *sizes) if count > 2 else ())


def _sizes(beyond: Beyond, dims: Sequence[int]) -> None:
    """Inputs and tensors as large as the numbers that are named, rows that are not finite."""
    x = beyond.normal(*_leading(dims, 3, 4), beyond.width)
    for number in sorted({abs(n) for n in beyond.numbers} - {0.0}):
        _compare(beyond, beyond.given(x * number), f"{number:g}")
        _compare(beyond, beyond.given(x, [t * number for t in beyond.tensors]), f"tensors of {number:g}")
    for power in (-40, 40):
        _compare(beyond, beyond.given(x, [t * 2.0**power for t in beyond.tensors]), f"tensors of 2^{power}")
    for size in (0.0, 2.0**-100):  # a row of zeros, or nearly
        small = x.clone()
        small.movedim(beyond.candidate.axis, -1)[(0,) * (x.dim() - 2) + (-1,)] *= size
        _compare(beyond, beyond.given(small), f"a row times {size:g}")
    first = (*(0,) * (x.dim() - 1), 1)
    for value in (float("nan"), float("inf"), -float("inf")):
        odd = x.clone()
        odd.movedim(beyond.candidate.axis, -1)[first] = value
        _compare(beyond, beyond.given(odd), f"{value}")


def _lengths(beyond: Beyond, dims: Sequence[int]) -> list[str]:
    """As many rows as the numbers that are named or computed, and one more; what is too long to be tried is guarded,
    and so are more rows than were tried where the code computes anything else of sizes."""
    tests = []
    if set(dims) != set(range(1, 6)):
        tests.append(f"x.dim() in {tuple(sorted(dims))}")
    for count in dims:
        x = beyond.normal(*(2, 3, 2, 2)[: count - 1], beyond.width)
        _compare(beyond, beyond.given(x), f"{count} dimensions")
    wide = max(dims) > 1
    short = beyond.shorter if wide and beyond.shorter is not None and _stands_for(beyond.shorter, dims) else None
    tried: set[int] = set()
    most, long = 0, None
    for _ in range(_ROUNDS):
        # a bound may lie between two whole numbers
        bounds = {int(abs(n)) for n in beyond.numbers if abs(n) >= 2}
        lengths = {n + more for n in bounds for more in (0, 1)} | set(_LONG)
        if not wide or lengths <= tried:
            break
        for length in sorted(lengths - tried):
            side = _side(beyond, short, length, _USUAL if length in _LONG else _MOST)
            if side is None:
                continue
            most = max(most, length)
            _rows(side, dims, length)
        tried |= lengths
    known = {int(abs(n)) for n in beyond.numbers if abs(n) >= 2}
    long = [n for n in sorted(known) if n + 1 not in tried or _side(beyond, short, n + 1, _MOST) is None]
    # fewer elements than were tried are bounded by no number that shows nothing there; rows, by it, may be
    elements = most * beyond.width
    for n in [n for n in long if n < elements][:1]:
        tests.append(f"x.numel() <= {n} * x.shape[{beyond.candidate.axis}]")
    for n in [n for n in long if n >= elements][:1]:
        tests.append(f"x.numel() < {n}")
    if beyond.trace.sized(plain=bool(long)):
        tests.append(f"x.numel() <= {most} * x.shape[{beyond.candidate.axis}]")
    return tests


def _side(beyond: Beyond, short: Beyond | None, length: int, most: int) -> Beyond | None:
    """On which of two so many rows are tried; None where they are too many."""
    if length * beyond.width <= (most if short is None else _USUAL):
        return beyond
    return short if short is not None and length * short.width <= _MOST else None


def _rows(beyond: Beyond, dims: Sequence[int], length: int) -> None:
    low = [t.float() for t in beyond.tensors]
    for shape in {_leading(dims, length, 1), _leading(dims, 1, length)}:
        given = beyond.given(beyond.normal(*shape, beyond.width, dtype=torch.float32), low)
        with beyond.trace.aside() if beyond.width == SHORT else contextlib.nullcontext():
            wanted = flat(beyond.original(*given))
        beyond.apart(f"of {length} rows: result", beyond.actual(*given), wanted, _CLOSE)


def _stands_for(shorter: Beyond, dims: Sequence[int]) -> bool:
    """Whether few rows that are shorter agree: its code does not say how wide they are."""
    try:
        _rows(shorter, dims, 5)
    except Exception:  # noqa: BLE001 - foreign code refuses what it likes
        return False
    return True


def _narrow(beyond: Beyond, dims: Sequence[int]) -> None:
    """What rounds, and where, was compared; here by how much: a branch on a dtype may have another eps, or factor."""
    x = beyond.normal(*_leading(dims, 3, 4), beyond.width)
    for dtype, limit in ((torch.float32, _CLOSE), *(() if "ferryman_wide" in beyond.state else _APART.items())):
        for size in (1.0, 2.0**-10):
            low = [t.to(dtype) for t in beyond.tensors]
            given = beyond.given((x * size).to(dtype), low)
            allowed = _NARROW if dtype is torch.float16 and size < 1 else limit
            actual, wanted = beyond.actual(*given), flat(beyond.original(*given))
            beyond.apart(f"in {dtype}: result", actual, wanted, allowed)
            if size == 1.0 and dtype in _LEANING:
                _leaning(dtype, actual, wanted)


def _leaning(dtype: torch.dtype, actual: list[Tensor], wanted: list[Tensor]) -> None:
    """Raises Disagreement where one side is the other times a factor, though each element is near."""
    for a, w in zip((t.double() for t in actual), (t.double() for t in wanted), strict=True):
        square = float((w * w).sum())
        lean = abs(float((a * w).sum()) / square - 1.0) if square else 0.0
        if not lean <= _LEANING[dtype]:
            raise Disagreement(f"in {dtype}: the op's result is off by a factor of 1 +- {lean:.3g} as a whole", lean)


@torch.no_grad()
def everywhere(original: Run, function: Run, named: set[float], trace: Trace) -> bool:
    """Whether an activation of code that names or computes numbers is one for values and sizes as large as these."""
    numbers: set[float] = set()
    x = torch.randn(3, 4, SHORT, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    while new := {abs(n) for n in named | trace.computed()} - numbers:
        numbers |= new
        inputs = [(x * n,) for n in sorted(new)]
        lengths = [int(n) + 1 for n in sorted(new) if n >= 2] + [_LONG[-1]]
        if max(lengths) * SHORT > _MOST:
            return False
        for n in lengths:
            # each row from end to end: what is nearly zero is judged beside numbers that are not
            rows = torch.linspace(-9, 9, n * SHORT, dtype=torch.float64).reshape(1, SHORT, n).transpose(1, 2)
            inputs += [(rows,), (rows.transpose(0, 1),)]
        if not prove(original, function, inputs, storage=(), gradients=False).ok:
            return False
    return not trace.sized(plain=False)


def _autocast(beyond: Beyond, dims: Sequence[int]) -> list[str]:
    """What a call under autocast must be for both to give the same."""
    real = compiled(beyond.candidate.expression, ("self", "x", "gate")[: 2 + beyond.candidate.gate], ops=ops)
    given = beyond.given(beyond.normal(*_leading(dims, 3, 4), beyond.width))
    served = functools.partial(beyond.of, real)
    return casting.tests(beyond.candidate.op, beyond.original, served, given, "x", beyond.apart)


def _default(beyond: Beyond, dims: Sequence[int]) -> list[str]:
    """Nothing where PyTorch's default dtype changes nothing; else that a call has the one that the proof had."""
    given = beyond.given(
        beyond.normal(*_leading(dims, 3, 4), beyond.width).float(), [t.float() for t in beyond.tensors]
    )
    before = flat(beyond.original(*given))
    torch.set_default_dtype(torch.float64)
    try:
        distance("with another default dtype: result", flat(beyond.original(*given)), before, _CLOSE)
    except (Disagreement, RuntimeError, TypeError):
        return ["torch.get_default_dtype() is torch.float32"]
    finally:
        torch.set_default_dtype(torch.float32)
    return []

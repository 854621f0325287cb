"""Cases that nobody thought of: any op's arguments drawn from small data about them, judged like the op's own cases.

`case` takes its decisions from ``choose``, one option out of several, so that the same data serves a counter
(`cases`, for a device) and Hypothesis, which shrinks what fails (tests/parity/test_fuzz.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ferryman.dispatch import registry
from ferryman.errors import UnknownName
from ferryman.ops.primitive import STORAGE_DTYPES, Case, Primitive, TensorSpec
from ferryman.porting.cases import forward_of, output_gradients
from ferryman.porting.fills import strided

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]

_VALUES = ("normal", "nonfinite", "tiny", "integer", "uniform", "zeros", "constant", "offset", "large")
_PROBABLE = ("normal", "nonfinite", "tiny", "integer", "uniform", "zeros", "constant", "offset", "moderate")
_SCORES = ("normal", "nonfinite", "integer", "uniform", "zeros", "constant", "offset", "large_logits")
_PRODUCT = ("normal", "nonfinite", "tiny", "integer", "uniform", "zeros", "constant", "offset")
_LOGITS = ("normal", "nonfinite", "tiny", "integer", "uniform", "zeros", "constant", "offset", "moderate")
_ROWS = (*_VALUES, "masked")
_SELDOM = (*(False,) * 5, True)
_WEIGHTS = ("weight", "normal", "integer", "zeros", "tiny")


@dataclass(frozen=True)
class Tensor:
    """One tensor: its dimensions by symbol, what may fill it, whether it may be absent or of another dtype.

    Symbols stand for one size throughout a case; ``...`` for some leading dimensions; a name in ``SIZES`` says which
    sizes are tried. Tensors of one ``group`` have one fill. ``high`` bounds integers: a symbol. ``over``: the op writes
    over it, so that its elements share no memory.
    """

    dims: str
    fills: tuple[str, ...] = _VALUES
    optional: bool = False
    mixed: bool = False
    group: str = ""
    high: str = ""
    over: bool = False


@dataclass(frozen=True)
class Sizes:
    """Sizes that are tried: zero, one, primes, powers of two and their neighbours."""

    rows: tuple[int, ...] = (0, 1, 2, 3, 5, 7, 16, 17)
    width: tuple[int, ...] = (0, 1, 2, 3, 7, 16, 31, 64, 65, 127, 128, 251, 384)
    depth: tuple[int, ...] = (0, 1, 2, 5, 16, 37, 64, 67, 96)
    batch: tuple[int, ...] = (0, 1, 2, 3)
    groups: tuple[int, ...] = (1, 2, 3)
    per_group: tuple[int, ...] = (1, 2, 3)
    queries: tuple[int, ...] = (0, 1, 2, 7, 16, 17, 33)
    keys: tuple[int, ...] = (0, 1, 3, 16, 19, 37)
    head_dim: tuple[int, ...] = (1, 2, 8, 16, 37, 64, 80, 96, 128)
    padding: tuple[int, ...] = (0, 1, 7, 8)
    offset: tuple[int, ...] = (0, 1, 3, 8)
    windows: tuple[int | None, ...] = (None, 1, 5, 64)


# What each op's arguments are; a backward has its forward's.
_X = "... N"
_NORM = {"weight": Tensor("N", _WEIGHTS, True, True), "eps": (1e-6, 1e-5, 0.5)}
OPS: Mapping[str, Mapping[str, Any]] = {
    "rms_norm": {"x": Tensor(_X), **_NORM, "cast_before_weight": (False, True)},
    "add_rms_norm": {
        "x": Tensor(_X, group="x"), "residual": Tensor(_X, group="x"), **_NORM, "cast_before_weight": (False, True),
    },
    "layer_norm": {"x": Tensor(_X), **_NORM, "bias": Tensor("N", ("normal", "zeros", "integer"), True, True)},
    "silu_mul": {"gate": Tensor("...", _PROBABLE, group="x"), "up": Tensor("...", _PROBABLE, group="x")},
    "gelu_mul": {
        "gate": Tensor("...", _PROBABLE, group="x"), "up": Tensor("...", _PROBABLE, group="x"),
        "approximate": ("tanh", "none"),
    },
    "softmax": {"x": Tensor(_X, _ROWS)},
    "cross_entropy": {
        "logits": Tensor("... V", _LOGITS), "target": Tensor("...", ("integer",), high="V"), "ignore_index": (-100, -1),
        "label_smoothing": (0.0, 0.1, 1.0),
    },
    "rope": {
        "q": Tensor("B H S D", _VALUES, group="q"), "k": Tensor("B G S D", _VALUES, group="q"),
        "cos": Tensor("b S R", ("unit",), mixed=True, group="cos"),
        "sin": Tensor("b S R", ("unit",), mixed=True, group="cos"), "interleaved": (False, True),
    },
    "rope_": {
        "q": Tensor("B H S D", _VALUES, group="q", over=True), "k": Tensor("B G S D", _VALUES, group="q", over=True),
        "cos": Tensor("b S R", ("unit",), mixed=True, group="cos"),
        "sin": Tensor("b S R", ("unit",), mixed=True, group="cos"), "interleaved": (False, True),
    },
    "cross_entropy_inplace_grad": {
        "logits": Tensor("... V", _LOGITS, over=True), "target": Tensor("...", ("integer",), high="V"),
        "ignore_index": (-100, -1), "label_smoothing": (0.0, 0.1, 1.0),
    },
    "linear": {
        "x": Tensor("... K", _PRODUCT, group="x"), "weight": Tensor("F K", _PRODUCT, group="x"),
        "bias": Tensor("F", ("normal", "integer", "zeros"), True),
    },
    "attention": {
        "q": Tensor("B H S D", _SCORES, group="q"), "k": Tensor("B G T D", _SCORES, group="q"),
        "v": Tensor("B G T D", _SCORES, group="q"), "causal": (False, True), "scale": (None, 0.3), "window": "windows",
        "softcap": (0.0, 20.0), "mask": Tensor("mB mH mS T", ("bias", "mask"), True, True),
    },
}  # fmt: skip


def case(op: Primitive, choose: Choose, sizes: Sizes | None = None, name: str = "fuzz") -> tuple[Case, torch.dtype]:
    """A case of an op and the storage dtype to run it in. Raises UnknownName for an op without data."""
    forward = forward_of(op) or op
    if forward.name not in OPS:
        raise UnknownName("op that fuzzing knows", forward.name, OPS)
    symbols = _Symbols(choose, sizes or Sizes(), forward.name)
    args: dict[str, Any] = {}
    fills: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for parameter, form in OPS[forward.name].items():
        if isinstance(form, str):
            args[parameter] = choose(getattr(symbols.sizes, form))
        elif isinstance(form, tuple):
            args[parameter] = choose(form)
        elif form.optional and choose((False, True)):
            args[parameter] = None
        else:
            key = form.group or parameter
            fills.setdefault(key, choose(form.fills))
            if form.mixed:
                dtypes.setdefault(key, choose(("storage", "float32", "bfloat16", "float16")))
            args[parameter] = _spec(form, symbols, fills[key], dtypes.get(key, "storage"), choose)
    _defined(forward.name, args)
    if "target" in args:
        low = choose((0, args["ignore_index"])) if args["ignore_index"] == -1 else 0
        args["target"] = _integers(args["target"], low, symbols["V"])
    if forward is not op:
        args |= {n: choose((True, False)) for n in op.names if n.startswith("need_")}
        absent = [n for n in output_gradients(op, forward) if op.types[n] == "Tensor?"]
        args |= {n: choose((True, False)) for n in absent}
    return Case(name, args), choose(STORAGE_DTYPES)


def cases(
    op: Primitive, count: int, seed: int = 0, sizes: Sizes | None = None, first: int = 0
) -> Iterator[tuple[Case, torch.dtype]]:
    """``count`` cases from a counter: the same on every machine, whatever part of them is asked for."""
    for i in range(first, first + count):
        draw = random.Random(f"{seed}/{op.name}/{i}")
        yield case(op, draw.choice, sizes, f"fuzz_{i}")


def variants(
    op: Primitive, templates: int, each: int, seed: int = 0, sizes: Sizes | None = None
) -> Iterator[tuple[Case, torch.dtype]]:
    """``templates`` cases, each with ``each`` different contents: few shapes, strides and dtypes, so that a compiler of
    specialised kernels is called as often as there are templates."""
    for t, (template, dtype) in enumerate(cases(op, templates, seed, sizes)):
        forms = OPS[(forward_of(op) or op).name]
        for i in range(each):
            draw = random.Random(f"{seed}/{op.name}/{t}/{i}")
            fills: dict[str, str] = {}
            args: dict[str, Any] = {}
            for name, value in template.args.items():
                args[name] = value
                if isinstance(value, TensorSpec) and value.dtype not in ("int64", "bool"):
                    form: Tensor = forms[name]
                    options = [f for f in form.fills if f != "mask"]
                    found = fills.setdefault(form.group or name, draw.choice(options))
                    args[name] = TensorSpec(value.shape, value.dtype, found, value.layout)
            _defined((forward_of(op) or op).name, args)
            yield Case(f"fuzz_{t}_{i}", args), dtype


def _defined(op: str, args: dict[str, Any]) -> None:
    """Leaves out what an op gives no meaning to: NaN and Inf in a value that a query may not see. Its weight is 0, and
    0 * NaN is NaN; a kernel that skips the block gives the sum of the others. Both are common, and both are right."""
    hidden = op == "attention" and (args["causal"] or args["window"] is not None or args["mask"] is not None)
    if hidden and args["v"].fill == "nonfinite":
        args["v"] = replace(args["v"], fill="normal")


def described(found: Case, dtype: torch.dtype) -> str:
    """A case as Python that makes it again."""
    return f"({found!r}, {dtype})"


class _Symbols:
    """Sizes by symbol, each drawn when it is first read."""

    def __init__(self, choose: Choose, sizes: Sizes, op: str) -> None:
        self.sizes, self._choose, self._op = sizes, choose, op
        self._empty = choose(_SELDOM)  # else a third of all cases, and half of attention's, would have no element
        self._found: dict[str, int] = {}
        self._leading: tuple[int, ...] | None = None

    def leading(self) -> tuple[int, ...]:
        if self._leading is None:
            # an activation's whole shape is leading dimensions
            last = self.sizes.width if self._op in ("silu_mul", "gelu_mul") else self.sizes.rows
            count = self._choose((1, 0, 2, 3))
            pools = [*[self.sizes.batch] * (count - 1), last] if count else []
            self._leading = tuple(self._size(pool) for pool in pools)
        return self._leading

    def _size(self, pool: Sequence[int]) -> int:
        return int(self._choose([n for n in pool if n or self._empty]))

    def __getitem__(self, symbol: str) -> int:
        if symbol not in self._found:
            self._found[symbol] = self._draw(symbol)
        return self._found[symbol]

    def _draw(self, symbol: str) -> int:
        s, choose = self.sizes, self._choose
        if symbol.startswith("m"):  # a mask's dimension broadcasts or not
            return int(choose((1, self[symbol[1:]])))
        if symbol == "b":
            return int(choose((1, self["B"])))
        if symbol == "H":
            return self["G"] * int(choose(s.per_group))
        if symbol == "D":
            return int(choose([d for d in s.head_dim if not self._op.startswith("rope") or d > 1]))
        if symbol == "R":
            even = [r for r in (self["D"] // 2 * 2, 2, self["D"] // 4 * 2) if r]
            return int(choose(even))
        if symbol == "V":
            return int(choose([w for w in s.width if w]))
        pools = {
            "N": s.width, "K": s.depth, "F": s.depth, "B": s.batch, "G": s.groups, "S": s.queries, "T": s.keys,
        }  # fmt: skip
        return self._size(pools[symbol])


def _spec(form: Tensor, symbols: _Symbols, fill: str, dtype: str, choose: Choose) -> TensorSpec:
    shape: tuple[int, ...] = ()
    for symbol in form.dims.split():
        shape += symbols.leading() if symbol == "..." else (symbols[symbol],)
    if fill == "mask":
        dtype = "bool"
    return TensorSpec(shape, dtype, fill, _layout(shape, choose, symbols.sizes, not form.over))


def _integers(spec: TensorSpec, low: int, high: int) -> TensorSpec:
    return TensorSpec(spec.shape, "int64", None, spec.layout, low, high)


def _layout(shape: tuple[int, ...], choose: Choose, sizes: Sizes, sharing: bool = True) -> str:
    """Contiguous as often as not; else any order of the dimensions, padding, misalignment and, where elements may share
    memory, repetition and overlap."""
    kinds = ("contiguous", "permuted", "padded", "offset")
    kind = choose(("contiguous", "permuted", "padded", "expanded", "overlapping", "offset") if sharing else kinds)
    if kind == "contiguous":
        return "contiguous"
    order = list(range(len(shape)))
    if kind == "permuted" and len(shape) > 1:
        first = choose(order)
        order = [first, *(i for i in order if i != first)]
    strides = [0] * len(shape)
    span = choose((1, 2)) if kind == "padded" else 1
    for i in reversed(order):
        strides[i] = span
        span = span * max(shape[i], 1) + (choose(sizes.padding) if kind == "padded" else 0)
    if kind == "expanded" and shape:
        strides[choose(order)] = 0
    if kind == "overlapping" and len(shape) > 1:
        i = choose(order[:-1])
        strides[i] = max(strides[i] // 2, 1)
    return strided(tuple(strides), choose(sizes.offset))


def known() -> tuple[str, ...]:
    """The ops that can be fuzzed: those in `OPS`, and their backwards."""
    return tuple(p.name for p in registry.primitives().values() if (forward_of(p) or p).name in OPS)

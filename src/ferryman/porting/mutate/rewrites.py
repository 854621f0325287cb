"""A definition's own ATen operations, replaced while it runs: wrongly, for mutants, or in another right way.

A definition is evaluated in float32 under a dispatch mode that hands chosen operations to a replacement. So any op's
sums, products, maxima and comparisons can be bent, or done in another order, without a word about the op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Replace = Callable[..., Any]
_REDUCING = ("sum.default", "sum.dim_IntList", "mean.default", "mean.dim")
_MEANS = ("mean.default", "mean.dim")
_PRODUCTS = ("mm.default", "bmm.default")
_LOG_SUMS = ("logsumexp.default", "_softmax.default", "_log_softmax.default")


class Rewritten(TorchDispatchMode):
    """Replaces operations by name ("sum.dim_IntList"). A replacement gets the original first, then its arguments.

    ``used``: the names that were met, replaced or not.
    """

    def __init__(self, replacements: Mapping[str, Replace] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replacements, self.used = dict(replacements or {}), set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.used |= {name} | ({f"{name}, whole"} if _whole(args) else set())
        replacement = self.replacements.get(name)
        if replacement is None or not _real(args):
            return func(*args, **(kwargs or {}))
        return replacement(func, *args, **(kwargs or {}))


def _whole(args: Any) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and not args[0].is_floating_point()


def _real(args: Any) -> bool:
    tensors = [a for a in args if isinstance(a, Tensor)]
    return bool(tensors) and all(t.numel() for t in tensors)


@dataclass(frozen=True)
class Rewrite:
    """replaces: what it replaces, by ATen name. note: what that amounts to. whole: of whole numbers only."""

    name: str
    operator: str
    note: str
    replaces: Mapping[str, Replace]
    whole: bool = False

    def applies(self, used: set[str]) -> bool:
        names = {f"{n}, whole" for n in self.replaces} if self.whole else set(self.replaces)
        return names <= used if self.operator == "cancellation" else bool(used & names)


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _summing(
    total: Callable[[Tensor], Tensor], count: int = 0, names: tuple[str, ...] = _REDUCING
) -> dict[str, Replace]:
    """Sums and means by ``total`` over the last dimension; a mean divides by ``count`` more elements."""

    def replaced(func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        if not x.is_floating_point() or x.dim() == 0:
            return func(x) if dim is None else func(x, dim, keepdim)
        dims = _dims(x, dim)
        kept = [d for d in range(x.dim()) if d not in dims]
        flat = x.permute(*kept, *dims).reshape(*[x.shape[d] for d in kept], -1)
        summed = total(flat)
        if "mean" in str(func):
            summed = summed / (flat.shape[-1] + count)
        if keepdim:
            for d in sorted(dims):
                summed = summed.unsqueeze(d)
        return summed

    return dict.fromkeys(names, replaced)


def _multiplying(product: Callable[[Any, Tensor, Tensor], Tensor]) -> dict[str, Replace]:
    return dict.fromkeys(_PRODUCTS, lambda func, a, b: product(func, a, b))


def _weighing(largest: Callable[[Tensor], Tensor], total: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Replace]:
    """Softmax and log-sum-exp from their formula: ``largest(x)`` is subtracted, ``total(e, m)`` sums exp(x - m)."""

    def softmax(func: Any, x: Tensor, dim: int, half: bool) -> Tensor:
        m = largest(x)
        e = torch.exp(x - m)
        return e / total(e, m)

    def log_softmax(func: Any, x: Tensor, dim: int, half: bool) -> Tensor:
        m = largest(x)
        return x - m - torch.log(total(torch.exp(x - m), m))

    def logsumexp(func: Any, x: Tensor, dim: Any, keepdim: bool = False) -> Any:
        m = torch.where(largest(x).isinf(), 0.0, largest(x))
        log_total = m + torch.log(total(torch.exp(x - m), m))
        return log_total if keepdim else log_total.squeeze(-1)

    return dict(zip(_LOG_SUMS, (logsumexp, softmax, log_softmax), strict=True))


def _amax(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True)


def _plain(e: Tensor, m: Tensor) -> Tensor:
    return e.sum(-1, keepdim=True)


def _rounding(dtype: torch.dtype, chunk: int = 16) -> Callable[[Tensor], Tensor]:
    def total(x: Tensor) -> Tensor:
        acc = torch.zeros(x.shape[:-1], dtype=x.dtype)
        for part in x.split(chunk, -1):
            acc = (acc + part.sum(-1)).to(dtype).to(x.dtype)
        return acc

    return total


def _splits(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def total(x: Tensor) -> Tensor:
        size = max(-(-x.shape[-1] // 4), 1)
        return torch.stack([p.sum(-1).to(dtype).to(x.dtype) for p in x.split(size, -1)]).sum(0)

    return total


def over(total: Callable[[Tensor], Tensor]) -> dict[str, Replace]:
    """A way of summing, for sums, products of matrices and the sums inside softmax alike."""

    def product(func: Any, a: Tensor, b: Tensor) -> Tensor:
        if a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.dim() == 3 else 1) > 2**22:
            return _by_blocks(func, a, b, total)
        return total(a.unsqueeze(-2) * b.transpose(-1, -2).unsqueeze(-3))

    return _summing(total) | _multiplying(product) | _weighing(_amax, lambda e, m: total(e).unsqueeze(-1))


def _by_blocks(func: Any, a: Tensor, b: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """As many terms as ``total`` keeps apart are too many to hold: blocks of 16 terms by a product, then ``total``."""
    parts = [func(x, y) for x, y in zip(a.split(16, -1), b.split(16, -2), strict=True)]
    return total(torch.stack(parts, -1))


def _without(first: int, last: int) -> Callable[[Tensor], Tensor]:
    """The sum without the first and the last elements of a row."""
    return lambda x: x[..., first : max(x.shape[-1] - last, first)].sum(-1)


def _tail(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 16 * 16].sum(-1)


def _twice(x: Tensor) -> Tensor:
    return x.sum(-1) + x[..., :16].sum(-1)


def _half_lanes(x: Tensor) -> Tensor:
    """Lanes 32 to 63 of every 64 are lost."""
    return x[..., torch.arange(x.shape[-1]) % 64 < 32].sum(-1)


def _turned(shift: int) -> dict[str, Replace]:
    """Comparisons of whole numbers: places, lengths. One of real numbers chooses between two formulas that agree
    there, and moved by one they still do."""

    def replaced(func: Any, a: Any, b: Any) -> Any:
        return func(a, b + shift) if _whole((a,)) else func(a, b)

    return dict.fromkeys([f"{n}.{k}" for n in ("le", "lt", "ge", "gt") for k in ("Tensor", "Scalar")], replaced)


def _through(dtype: torch.dtype, *names: str) -> dict[str, Replace]:
    def replaced(func: Any, *args: Any, **more: Any) -> Any:
        result = func(*args, **more)
        return (
            result.to(dtype).to(result.dtype) if isinstance(result, Tensor) and result.is_floating_point() else result
        )

    return dict.fromkeys(names, replaced)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _swapped(func: Any, a: Any, b: Any, **more: Any) -> Any:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.is_floating_point():
        return func(a, b, **more)
    return func(b, a, **more)


def _cancelling() -> dict[str, Replace]:
    """mean((x - m)^2) by mean(x^2) - m^2: what cancels where the mean is large."""
    differences: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def sub(func: Any, a: Any, b: Any, **more: Any) -> Any:
        difference = func(a, b, **more)
        if isinstance(b, Tensor) and b.dim() and b.shape[-1] == 1 and a.shape[-1] > 1:
            differences[id(difference)] = difference, a, b
        return difference

    def power(func: Any, x: Tensor, exponent: Any) -> Any:
        raised = func(x, exponent)
        if id(x) in differences and differences[id(x)][0] is x:
            differences[id(raised)] = raised, *differences[id(x)][1:]
        return raised

    def mean(func: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
        kept, a, b = differences.get(id(x), (None, x, x))
        if kept is not x:
            return func(x, *rest, **more)
        differences.clear()
        return func(a * a, *rest, **more) - b * b

    return {"sub.Tensor": sub, "pow.Tensor_Scalar": power, "mean.dim": mean}


_FUNCTIONS = (
    "exp.default",
    "rsqrt.default",
    "sigmoid.default",
    "tanh.default",
    "erf.default",
    "log.default",
    "silu.default",
    "gelu.default",
    "_softmax.default",
    "logsumexp.default",
    "erfc.default",
)
_SUBTRACTIONS = ("sub.Tensor", "div.Tensor")
_REAL_PRODUCTS = ("mul.Tensor", "mul.Scalar")


def _factor(side: int) -> Replace:
    def replaced(func: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor) or not a.is_floating_point():
            return func(a, b)
        kept = a if side == 0 or not isinstance(b, Tensor) else b
        shape = torch.broadcast_shapes(a.shape, b.shape) if isinstance(b, Tensor) else a.shape
        return kept.expand(shape).clone()

    return replaced


def _eps(func: Any, a: Any, b: Any, **more: Any) -> Any:
    """x + number without the number."""
    return a.clone() if isinstance(a, Tensor) and a.is_floating_point() else func(a, b, **more)


def _plus(func: Any, a: Any, b: Any, **more: Any) -> Any:
    return torch.sub(a, b) if isinstance(a, Tensor) and a.is_floating_point() else func(a, b, **more)


def _first_columns(x: Tensor) -> Tensor:
    return x[..., :128].amax(-1, keepdim=True)


def _padded(e: Tensor, m: Tensor) -> Tensor:
    """Columns of padding hold 0, and are counted."""
    return e.sum(-1, keepdim=True) + (-e.shape[-1] % 16) * torch.exp(-m)


_BF16, _F16 = torch.bfloat16, torch.float16
WRONG = (
    Rewrite("sums_in_bfloat16", "accumulator narrowed", "partial sums are kept in bfloat16", over(_rounding(_BF16))),
    Rewrite("sums_in_float16", "accumulator narrowed", "partial sums are kept in float16", over(_rounding(_F16))),
    Rewrite("splits_in_bfloat16", "split-k undeclared", "four partial sums, rounded to bfloat16", over(_splits(_BF16))),
    Rewrite("first_term", "reduction in part", "a sum leaves its first term out", over(_without(1, 0))),
    Rewrite("last_term", "reduction in part", "a sum leaves its last term out: k, key, column", over(_without(0, 1))),
    Rewrite("tail", "reduction in part", "a sum leaves out what is left after blocks of 16", over(_tail)),
    Rewrite("half_a_wave", "reduction in part", "lanes 32 to 63 of a wave of 64 are lost in a sum", over(_half_lanes)),
    Rewrite("tile_twice", "reduction in part", "the first 16 terms are added twice", over(_twice)),
    Rewrite("mean_over_one_less", "count of terms", "a mean over N - 1", _summing(lambda x: x.sum(-1), -1, _MEANS)),
    Rewrite("squares_not_centred", "cancellation", "a variance by E[x^2] - E[x]^2, in float32", _cancelling()),
    Rewrite(
        "no_maximum",
        "maximum left out",
        "softmax without its maximum",
        _weighing(lambda x: torch.zeros_like(x[..., :1]), _plain),
    ),
    Rewrite(
        "maximum_of_128", "maximum left out", "the maximum of the first 128 columns", _weighing(_first_columns, _plain)
    ),
    Rewrite(
        "denominator_in_bfloat16",
        "cast early",
        "softmax's denominator is rounded to bfloat16",
        _weighing(_amax, lambda e, m: _plain(e, m).to(_BF16).to(e.dtype)),
    ),
    Rewrite(
        "padding_counted",
        "count of terms",
        "columns of padding are counted in the denominator",
        _weighing(_amax, _padded),
    ),
    Rewrite("one_more_seen", "comparison turned", "a bound one too far: the next token is seen", _turned(1), True),
    Rewrite("one_less_seen", "comparison turned", "a bound one too near: the own token is not seen", _turned(-1), True),
    Rewrite(
        "operands_in_fp8",
        "8 bits undeclared",
        "both operands of a product through e4m3",
        _multiplying(lambda f, a, b: f(_e4m3(a), _e4m3(b))),
    ),
    Rewrite(
        "left_operand_in_fp8",
        "8 bits undeclared",
        "the left operand of a product through e4m3: P in fp8",
        _multiplying(lambda f, a, b: f(_e4m3(a), b)),
    ),
    Rewrite(
        "operands_in_bfloat16",
        "cast early",
        "both operands of a product through bfloat16",
        _multiplying(lambda f, a, b: f(a.to(_BF16).to(a.dtype), b.to(_BF16).to(b.dtype))),
    ),
    Rewrite(
        "products_in_float16",
        "overflow inside",
        "products and squares in float16",
        _through(_F16, *_REAL_PRODUCTS, "pow.Tensor_Scalar", "square.default"),
    ),
    Rewrite(
        "functions_in_bfloat16",
        "cast early",
        "exp, roots, sigmoid, tanh rounded to bfloat16",
        _through(_BF16, *_FUNCTIONS),
    ),
    Rewrite(
        "swapped", "operands swapped", "a - b and a / b the wrong way round", dict.fromkeys(_SUBTRACTIONS, _swapped)
    ),
    Rewrite("left_factor_alone", "factor left out", "a * b becomes a", dict.fromkeys(_REAL_PRODUCTS, _factor(0))),
    Rewrite("right_factor_alone", "factor left out", "a * b becomes b", dict.fromkeys(_REAL_PRODUCTS, _factor(1))),
    Rewrite("term_left_out", "term left out", "a + b becomes a: eps, a bias", {"add.Tensor": _eps, "add.Scalar": _eps}),
    Rewrite("sign", "sign", "a + b becomes a - b", {"add.Tensor": _plus, "add.Scalar": _plus}),
    Rewrite(
        "branches_swapped",
        "operands swapped",
        "the branches of a choice the wrong way round",
        {"where.self": lambda f, c, a, b: f(c, b, a)},
    ),
)


def storage_arithmetic(dtype: torch.dtype) -> dict[str, Replace]:
    """Every operation's result rounded to a dtype."""
    names = (*_FUNCTIONS, *_REAL_PRODUCTS, *_SUBTRACTIONS, *_REDUCING, *_PRODUCTS, "add.Tensor", "pow.Tensor_Scalar")
    return _through(dtype, *names)

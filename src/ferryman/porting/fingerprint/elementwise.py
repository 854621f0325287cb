"""What elementwise arithmetic does: largest errors of functions, subnormals, contraction, conversions.

A route is ``Apply``: an op by name on three CPU tensors of one dtype, and the dtype of the result, which comes back on
the CPU. References are float64 on the host: their own error is below 2^-28 ulp of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ferryman.device_profiles.schema import FUNCTIONS
from ferryman.porting.fingerprint.matrix import Answer
from ferryman.porting.fingerprint.rounding import STEPS, rules_of_sum

Apply = Callable[[str, Tensor, Tensor, Tensor, torch.dtype], Tensor]
_POINTS = 2**16
_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_REFERENCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp": lambda x, y: torch.exp(x),
    "exp2": lambda x, y: torch.exp2(x),
    "log": lambda x, y: torch.log(x),
    "rsqrt": lambda x, y: torch.rsqrt(x),
    "sqrt": lambda x, y: torch.sqrt(x),
    "div": lambda x, y: x / y,
    "tanh": lambda x, y: torch.tanh(x),
}


def torch_apply(device: torch.device) -> Apply:
    """PyTorch's own functions. There is no plain fused multiply-add; ``contraction`` is addcmul, z + x * y."""

    def unary(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda x, y, z: function(x)

    ops: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        **{name: unary(getattr(torch, name)) for name in FUNCTIONS if name != "div"},
        "div": lambda x, y, z: x / y,
        "add": lambda x, y, z: x + y,
        "mul": lambda x, y, z: x * y,
        "contraction": lambda x, y, z: torch.addcmul(z, x, y),
        "cast": lambda x, y, z: x,
    }

    def apply(op: str, x: Tensor, y: Tensor, z: Tensor, result: torch.dtype) -> Tensor:
        sides = [t.to(device) for t in (x, y, z)]
        return ops[op](*sides).to(result).cpu()

    return apply


def _even(low: float, high: float) -> Tensor:
    """Evenly spaced float32 numbers; made of integers and float64, so that every machine makes the same."""
    steps = torch.arange(_POINTS, dtype=torch.float64) * ((high - low) / (_POINTS - 1))
    return (low + steps).float()


def _geometric(low: float, high: float) -> Tensor:
    """Float32 numbers that are evenly spaced as bit patterns, between two positive ones."""
    ends = torch.tensor([low, high], dtype=torch.float32).view(torch.int32).tolist()
    width = (ends[1] - ends[0]) // (_POINTS - 1)
    return (ends[0] + torch.arange(_POINTS, dtype=torch.int32) * width).view(torch.float32)


@lru_cache(maxsize=None)
def sample(function: str) -> tuple[Tensor, Tensor]:
    """(x, y) at which a function is measured: its whole range, and densely where it is hardest. Normal results only."""
    both = torch.cat
    tiny, huge = 2.0**-126, 2.0**127
    if function == "exp":
        small = _geometric(2.0**-30, 1.0)
        x = both([_even(-87.0, 88.5), small, -small])
    elif function == "exp2":
        small = _geometric(2.0**-30, 1.0)
        x = both([_even(-125.75, 127.75), small, -small])
    elif function == "log":
        x = both([_geometric(tiny, huge), _even(0.5, 2.0), _even(0.99, 1.01)])
        x = x[x != 1]
    elif function in ("rsqrt", "sqrt"):
        x = both([_geometric(tiny, huge), _even(1.0, 4.0)])
    elif function == "tanh":
        near = both([_even(2.0**-12, 1.0), _geometric(2.0**-100, 10.0)])
        x = both([near, -near])
    else:
        x, y = _even(1.0, 2.0), _even(1.0, 2.0)
        # a fixed permutation: an odd multiplier runs through all residues of a power of two
        y = y[(torch.arange(_POINTS) * 40503 + 12345) % _POINTS]
        scale = torch.ldexp(torch.ones(_POINTS), torch.arange(_POINTS, dtype=torch.int32) % 120 - 60)
        return both([x, x * scale]), both([y, y])
    return x, torch.ones_like(x)


@lru_cache(maxsize=None)
def _expected(function: str) -> tuple[Tensor, Tensor]:
    """(the float64 result, one unit in the last place of it in float32)."""
    x, y = sample(function)
    exact = _REFERENCE[function](x.double(), y.double())
    ulp = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 24)
    return exact, ulp


def probe_ulp(apply: Apply, function: str) -> Answer:
    """The largest error over the sample, in units in the last place of the exact result."""
    x, y = sample(function)
    exact, ulp = _expected(function)
    got = apply(function, x, y, x, torch.float32).double()
    error = (got - exact).abs() / ulp
    error = torch.where(got.isfinite(), error, math.inf)
    worst = int(error.argmax())
    detail: dict[str, object] = {"at": x[worst].item(), "points": x.numel()}
    if function == "div":
        detail["by"] = y[worst].item()
    if not error[worst].isfinite():
        return Answer(function, "not finite", None, detail)
    return Answer(function, round(error[worst].item(), 4), None, detail)


def probe_contraction(apply: Apply) -> Answer:
    """a * b + c in one rounding or in two: (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 fused, and 0 where the product is
    rounded first (a tie, to even)."""
    a = torch.full((4,), 1 + 2.0**-12)
    c = torch.full((4,), -(1 + 2.0**-11))
    got = set(apply("contraction", a, a, c, torch.float32).tolist())
    if got == {2.0**-24}:
        return Answer("contraction", "fused")
    if got == {0.0}:
        return Answer("contraction", "separate")
    return Answer("contraction", None, f"neither 2^-24 (fused) nor 0 (separate): {sorted(got)}")


def probe_subnormals(apply: Apply, dtype: torch.dtype, ops: tuple[str, ...]) -> Iterator[Answer]:
    """For each op: subnormal operands that give a normal or subnormal result, and normal ones that give a subnormal."""
    normal = torch.finfo(dtype).tiny
    low = normal / 8  # exact, three bits down
    cases = {
        "add": [(low, low, 0.0, low * 2), (1.5 * normal, -normal, 0.0, normal / 2)],
        "mul": [(low, 16.0, 0.0, low * 16), (normal, 0.25, 0.0, normal / 4)],
        "fma": [(low, 16.0, normal, low * 16 + normal), (normal, 0.25, 0.0, normal / 4)],
    }
    for op in ops:
        x, y, z, wanted = (torch.tensor(side, dtype=torch.float64).to(dtype) for side in zip(*cases[op], strict=True))
        got = apply(op, x, y, z, dtype)
        kept = (got == wanted).tolist()
        lost = (got == torch.where(z != 0, z, torch.zeros_like(z))).tolist()
        if all(kept):
            yield Answer(op, "kept")
        elif all(lost):
            yield Answer(op, "flushed")
        else:
            yield Answer(op, None, f"{got.tolist()} for {wanted.tolist()}")


def probe_overflow(apply: Apply, dtype: torch.dtype) -> Answer:
    """What a conversion from float32 makes of numbers beyond the largest, of infinities and of NaN."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, largest * 1.25, -largest * 1.25, 1e30, math.inf, -math.inf, math.nan])
    got = apply("cast", x, x, x, dtype).float()
    beyond, infinite = got[1:4], got[4:6]
    detail: dict[str, object] = {"of": [str(v) for v in x.tolist()], "gives": [str(v) for v in got.tolist()]}
    name = str(dtype).removeprefix("torch.float8_")
    if got[0].item() != largest:
        return Answer(name, None, f"the largest number {largest} became {got[0].item()}", detail)
    if beyond.isnan().all():
        value = "nan"
    elif beyond.isinf().all():
        value = "inf"
    elif bool((beyond.abs() == largest).all()):
        value = "saturate"
    else:
        return Answer(name, None, f"numbers beyond {largest} become {beyond.tolist()}", detail)
    detail["infinity"] = "nan" if infinite.isnan().all() else "inf" if infinite.isinf().all() else "saturate"
    detail["nan"] = "nan" if got[6].isnan() else "a number"
    return Answer(name, value, None, detail)


def probe_cast_rounding(apply: Apply, dtype: torch.dtype, bits: int) -> Answer:
    """How a conversion from float32 rounds, from quarter steps beside 1.5 and -1.5."""
    last = 2.0 ** (1 - bits)
    keys = [(step, negative) for negative in (False, True) for step in STEPS]
    base = [-1.5 if negative else 1.5 for _, negative in keys]
    x = torch.tensor([b + step * last for b, (step, _) in zip(base, keys, strict=True)])
    got = apply("cast", x, x, x, dtype).double().tolist()
    table = {key: (v - b) / last for key, v, b in zip(keys, got, base, strict=True)}
    rules = rules_of_sum(table)
    name = str(dtype).removeprefix("torch.")
    if len(rules) == 1:
        return Answer(name, rules[0])
    return Answer(name, None, f"no one rule gives these remainders: {list(table.values())}")

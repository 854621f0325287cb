"""What tests/unit/test_triton_rowops.py runs in the session's process that interprets Triton.

The oracle is the definition in float64 on the same quantised inputs, the tolerance the definition's own bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.device_profiles import detect
from ferryman.dispatch import registry, select
from ferryman.errors import Unsupported
from ferryman.porting.inputs import fills
from ferryman.porting.judging import metrics
from ferryman.porting.judging.hygiene import bitwise_equal
from tests import families
from tests.unit.triton_rowops_inputs import Inputs

FAMILIES = families.modules("rowops")
# A block of 256 threads holds rows of 4096 (float32) or 8192 elements, so that a small test reaches the longer ones.
CPU = Target("cpu", "cpu", 1, 1 << 20, 256, 4, 1 << 20)
LARGE = dataclasses.replace(CPU, max_threads=1024)
UNIT = {**metrics.UNIT, torch.float64: 0.0}  # a result in float64 is judged by its sums alone
SUBNORMAL = {**fills.SUBNORMAL, torch.float64: 0.0}


REPEATED = ("(7, 257)", "many rows", "split sums", "4 64 64", "(37, 71)")


# --------------------------------------------------------------------------------------------- judging, in the worker


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def worst_ratio(
    outputs: tuple[Tensor, ...], args: tuple[Any, ...], primitive: Any, storage: torch.dtype
) -> float | str:
    """Largest error as a share of the bound; inf where structure, NaN or infinities differ; "n/a" for empty results."""
    exact_args = tuple(widened(a) for a in args)
    exact = as_tuple(primitive.body(*exact_args))
    expected = as_tuple(primitive.body(*args))  # dtypes and shapes
    terms = primitive.limits.bound(exact_args, exact)
    worst: float | str = "n/a"
    for y, reference, shape, term in zip(outputs, exact, expected, terms, strict=True):
        if (y.shape, y.dtype, y.is_contiguous()) != (shape.shape, shape.dtype, True):
            return float("inf")
        if y.numel() == 0:
            continue
        rounded = reference.to(y.dtype)
        ordinary = torch.isfinite(rounded)
        if not torch.equal(y[~ordinary].nan_to_num(7.0), rounded[~ordinary].nan_to_num(7.0)):
            return float("inf")  # NaN became 7, infinities the largest numbers
        bound = UNIT[y.dtype] * reference.abs() + SUBNORMAL[y.dtype]
        bound = bound + term.get("accumulate", 0.0) * UNIT[torch.float32] + term.get("absolute", 0.0)
        bound = bound + term.get("storage", 0.0) * UNIT[storage]
        ratio = ((y.double() - reference).abs() / bound)[ordinary].nan_to_num(torch.inf)
        if ratio.numel():
            worst = max(float(ratio.max()), worst if isinstance(worst, float) else 0.0)
    return worst


def launchers(family: str, op: str, args: tuple[Any, ...]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """By name, every line of Triton's that serves a call; the one of a backend with one line has no name."""
    known, here = registry.primitive(op), detect("cpu")
    lines, view = registry.asked(op, ("triton",)), select.View.of(known, args, here)
    for line in lines:
        if any(clause.reason(view) for clause in line.when):
            continue
        launch = registry.launcher(line)
        yield "" if len(lines) == 1 else f", {line.name}", launch
        for name in list(line.ranked_configurations(args, CPU))[1:] if args[0].shape == (7, 257) else ():
            tile = dataclasses.replace(CPU, configuration=name)
            yield f", {line.name} {name}", lambda *given, launch=launch, tile=tile: launch(*given[:-1], tile)


def work(family: str, name_of_dtype: str) -> dict[str, Any]:
    dtype = getattr(torch, name_of_dtype)
    report: dict[str, Any] = {"errors": {}, "repeated": 0, "unequal_runs": [], "changed_inputs": [], "aliases": []}
    calls = FAMILIES[family].calls(Inputs(dtype))
    for op, case, args, (line, launch) in ((o, c, a, one) for o, c, a in calls for one in launchers(family, o, a)):
        name = f"{case}{line}"
        before = [a.clone() if isinstance(a, Tensor) else a for a in args]
        target = LARGE if case == "split sums" else CPU
        first = as_tuple(launch(*args, target))
        label = f"{op} {name}"
        report["errors"][label] = worst_ratio(first, args, registry.primitive(op), dtype)
        if any(case.startswith(part) for part in REPEATED):
            report["repeated"] += 1
            again = [as_tuple(launch(*args, target)) for _ in range(2)]
            if not all(bitwise_equal(a, b) for run in again for a, b in zip(first, run, strict=True)):
                report["unequal_runs"].append(label)
        tensors = [(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, Tensor)]
        if not all(bitwise_equal(a, b) for a, b in tensors):
            report["changed_inputs"].append(label)
        owners = {a.untyped_storage().data_ptr() for a, _ in tensors if a.numel()}
        if any(y.numel() and y.untyped_storage().data_ptr() in owners for y in first):
            report["aliases"].append(label)
    return report


def lang() -> dict[str, float]:
    import triton
    import triton.language as tl

    from ferryman.backends import triton_lang

    globals().update(triton_lang=triton_lang, tl=tl)  # a kernel sees module globals only

    @triton.jit
    def probe(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=0.0)
        small, rest = triton_lang.sigmoid(x)
        cumulative, density = triton_lang.normal(x)
        tl.store(out_ptr + i, triton_lang.exp(x), mask=i < n)
        tl.store(out_ptr + n + i, small, mask=i < n)
        tl.store(out_ptr + 2 * n + i, rest, mask=i < n)
        tl.store(out_ptr + 3 * n + i, triton_lang.tanh(x), mask=i < n)
        tl.store(out_ptr + 4 * n + i, cumulative, mask=i < n)
        tl.store(out_ptr + 5 * n + i, density, mask=i < n)

    # up to 10: beyond, the normal's tail needs a true fma, which the interpreter lacks
    x = torch.cat([torch.linspace(-10, 10, 60_001), torch.logspace(-30, 0, 2000), -torch.logspace(-30, 0, 2000)])
    out = torch.empty(6, len(x))
    probe[(1,)](x, out, len(x), BLOCK=triton.next_power_of_2(len(x)))
    d = x.double()
    exact = {
        "exp": d.exp(),
        "sigmoid": torch.sigmoid(d),
        "one_minus_sigmoid": torch.sigmoid(-d),
        "tanh": torch.tanh(d),
        "cumulative": 0.5 * torch.special.erfc(-d / 2**0.5),
        "density": torch.exp(-d * d / 2) / (2 * torch.pi) ** 0.5,
    }
    hostile = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0])
    ends = torch.empty(6, len(hostile))
    probe[(1,)](hostile, ends, len(hostile), BLOCK=8)
    nan, inf = float("nan"), float("inf")
    limits = torch.tensor(
        [
            [nan, inf, 0, inf, 0, 1],
            [nan, 1, 0, 1, 0, 0.5],
            [nan, 0, 1, 0, 1, 0.5],
            [nan, 1, -1, 1, -1, 0],
            [nan, 1, 0, 1, 0, 0.5],
        ]
    )
    assert bitwise_equal(ends[:5], limits), f"exp, sigmoid, 1 - sigmoid, tanh, cumulative at {hostile}: {ends[:5]}"
    sizes = [e.float().abs() for e in exact.values()]
    spacing = [torch.nextafter(s, torch.tensor(inf)).double() - s.double() for s in sizes]
    return {
        name: float(((got.double() - e).abs() / step).max())
        for (name, e), got, step in zip(exact.items(), out, spacing, strict=True)
    }


def refusal(family: str, name_of_dtype: str) -> dict[str, str]:
    """What is said by a line that the interpreter cannot run in a dtype."""
    op, _, args = next(iter(FAMILIES[family].calls(Inputs(getattr(torch, name_of_dtype)))))
    (line,) = registry.asked(op, ("triton",))
    try:
        registry.launcher(line)(*args, CPU)
    except Unsupported as error:
        return {"refused": str(error)}
    return {"refused": "not refused"}

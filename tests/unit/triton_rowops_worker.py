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
from ferryman.porting.inputs import fills
from ferryman.porting.judging import metrics
from ferryman.porting.judging.hygiene import bitwise_equal

FAMILIES = {
    "norm": (
        "rms_norm",
        "rms_norm_backward",
        "add_rms_norm",
        "add_rms_norm_backward",
        "layer_norm",
        "layer_norm_backward",
    ),
    "activation": ("silu_mul", "silu_mul_backward", "gelu_mul", "gelu_mul_backward"),
    "softmax": ("softmax", "softmax_backward", "cross_entropy", "cross_entropy_backward"),
    "rope": ("rope", "rope_backward"),
    "matmul": ("linear", "linear_backward"),
}
# A block of 256 threads holds rows of 4096 (float32) or 8192 elements, so that a small test reaches the longer ones.
CPU = Target("cpu", "cpu", 1, 1 << 20, 256, 4, 1 << 20)
LARGE = dataclasses.replace(CPU, max_threads=1024)
UNIT = {**metrics.UNIT, torch.float64: 0.0}  # a result in float64 is judged by its sums alone
SUBNORMAL = {**fills.SUBNORMAL, torch.float64: 0.0}


def fill(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    if kind == "offset":
        return x + 1000.0
    if kind == "large":
        return x * 100.0
    if kind == "tiny":
        return x * 1e-6
    if kind == "constant":
        return torch.full(shape, 0.75)
    if kind == "zeros":
        return torch.zeros(shape)
    if kind == "masked":
        x = torch.where(torch.rand(shape, generator=generator) < 0.5, x, -torch.inf)
        x.view(-1, shape[-1])[0] = -torch.inf
        return x
    if kind == "nonfinite":
        flat = x.view(-1)
        for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            flat[(i + 1) * flat.numel() // 4] = value
    return x


def lay(x: Tensor, layout: str) -> Tensor:
    if layout == "rows":
        return torch.cat([x, torch.zeros_like(x)], -1)[..., : x.shape[-1]]
    if layout == "last":
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x


class Inputs:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # how rows lie in memory does not interact with their dtype: one dtype goes through all of it
        self.layouts = LAYOUTS if dtype == torch.float16 else ["offset"]
        self.generator = torch.Generator().manual_seed(20)

    def __call__(self, *shape: int, kind: str = "normal", layout: str = "", dtype: torch.dtype | None = None) -> Tensor:
        return lay(fill(shape, kind, self.generator).to(dtype or self.dtype), layout)

    def labels(self, *shape: int, classes: int) -> Tensor:
        return torch.randint(0, classes, shape, generator=self.generator)


SHAPES = [(1, 64), (7, 257), (3, 1), (2, 3, 130), (0, 64), (5, 0), (96,), (2, 4099), (50, 33)]
LONG = (2, 9001)  # rows too long for registers in every dtype
LAYOUTS = ["rows", "last", "offset", "transposed", "expanded"]
FILLS = ["offset", "large", "tiny", "constant", "nonfinite", "zeros"]
Calls = Iterator[tuple[str, str, tuple[Any, ...]]]


def norm_calls(inputs: Inputs) -> Calls:
    def both(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6) -> Calls:
        g = inputs(*x.shape)
        yield "rms_norm", name, (x, weight, eps, False)
        yield "rms_norm_backward", name, (g, x, weight, eps)
        yield "add_rms_norm", name, (x, g, weight, eps, True)
        yield "add_rms_norm_backward", name, (g, g, x, weight, eps)
        yield "layer_norm", name, (x, weight, bias, eps)
        yield "layer_norm_backward", name, (g, x, weight, bias, eps)

    for shape in (s for s in SHAPES if s[-1]):
        yield from both(f"{shape}", inputs(*shape), inputs(shape[-1]), inputs(shape[-1]))
    for layout in inputs.layouts:
        yield from both(layout, inputs(6, 5, 40, layout=layout), inputs(40), inputs(40))
    for kind in FILLS:
        yield from both(kind, inputs(5, 384, kind=kind), inputs(384), inputs(384))
    for other in (torch.float32, torch.float16, torch.bfloat16):
        yield from both(f"weight {other}", inputs(5, 96), inputs(96, dtype=other), inputs(96, dtype=other))
    yield from both("no weight", inputs(5, 96), None, None)
    yield "layer_norm", "bias alone", (inputs(5, 96), None, inputs(96), 1e-5)
    yield "layer_norm_backward", "bias alone", (inputs(5, 96), inputs(5, 96), None, inputs(96), 1e-5)
    yield "layer_norm_backward", "weight alone", (inputs(5, 96), inputs(5, 96), inputs(96), None, 1e-5)
    if inputs.dtype == torch.bfloat16:  # what the storage dtype does not interact with, and takes longest interpreted
        yield from both("many rows", inputs(1100, 40), inputs(40), inputs(40))
        x, g = inputs(10, 8300), inputs(10, 8300)  # fits LARGE, but not with sums of the weight's gradient beside it
        yield "layer_norm_backward", "split sums", (g, x, inputs(8300), inputs(8300), 1e-5)
    x, weight = inputs(*LONG, kind="offset"), inputs(LONG[-1])
    yield "add_rms_norm", "long", (x, inputs(*LONG), weight, 1e-6, True)
    yield "layer_norm", "long", (x, weight, weight, 1e-5)
    x, g, weight = inputs(*LONG, kind="offset"), inputs(*LONG), inputs(LONG[-1])
    yield "layer_norm_backward", "long", (g, x, weight, weight, 1e-5)
    yield "add_rms_norm_backward", "long", (g, g, x, None, 1e-6)
    yield "rms_norm", "cast", (inputs(5, 160), inputs(160), 1e-6, True)
    yield "rms_norm", "strided weight", (inputs(5, 160), inputs(320)[::2], 1e-6, True)


def activation_calls(inputs: Inputs) -> Calls:
    def both(name: str, gate: Tensor, up: Tensor) -> Calls:
        g = inputs(*gate.shape)
        yield "silu_mul", name, (gate, up)
        yield "silu_mul_backward", name, (g, gate, up)
        for approximate in ("tanh", "none"):
            yield "gelu_mul", f"{name} {approximate}", (gate, up, approximate)
            yield "gelu_mul_backward", f"{name} {approximate}", (g, gate, up, approximate)

    for shape in [*SHAPES[:-1], (), (50, 1033)]:
        yield from both(f"{shape}", inputs(*shape), inputs(*shape))
    for layout in inputs.layouts:
        yield from both(layout, inputs(6, 5, 40, layout=layout), inputs(6, 5, 40))
    for kind in ("offset", "tiny", "constant", "nonfinite", "zeros"):
        yield from both(kind, inputs(5, 384, kind=kind), inputs(5, 384, kind=kind))
    sweep = torch.linspace(-100.0, 100.0, 4001).to(inputs.dtype)
    yield from both("sweep", sweep, torch.ones_like(sweep))


def softmax_calls(inputs: Inputs) -> Calls:
    def both(name: str, x: Tensor) -> Calls:
        y = torch.softmax(x.double(), -1).to(x.dtype)
        yield "softmax", name, (x,)
        yield "softmax_backward", name, (inputs(*x.shape), y)

    def loss(name: str, x: Tensor, target: Tensor, smoothing: float = 0.0, ignore: int = -100) -> Calls:
        lse = torch.logsumexp(x.double(), -1).float()
        yield "cross_entropy", name, (x, target, ignore, smoothing)
        yield "cross_entropy_backward", name, (torch.tensor(1.5), x, target, lse, ignore, smoothing)

    for shape in SHAPES:
        yield from both(f"{shape}", inputs(*shape))
        if shape[-1]:
            yield from loss(f"{shape}", inputs(*shape), inputs.labels(*shape[:-1], classes=shape[-1]))
    for layout in inputs.layouts:
        yield from both(layout, inputs(6, 5, 40, layout=layout))
        yield from loss(layout, inputs(6, 5, 40, layout=layout), inputs.labels(6, 5, classes=40))
    for kind in [*FILLS, "masked"]:
        yield from both(kind, inputs(5, 384, kind=kind))
    for kind in ("normal", "nonfinite", "masked"):
        yield from both(f"long {kind}", inputs(3, LONG[-1], kind=kind))
    for kind in ("offset", "constant", "nonfinite", "zeros", "masked"):
        for width in (384, 4099):
            yield from loss(f"{kind} {width}", inputs(5, width, kind=kind), inputs.labels(5, classes=width))
    some = inputs.labels(60, classes=9) - 1
    yield from loss("ignored", inputs(60, 9), some, ignore=-1)
    yield from loss("smoothing, ignored", inputs(60, 9), some, 0.3, -1)
    yield from loss("smoothing, long", inputs(5, 4099), inputs.labels(5, classes=4099), 0.1)
    yield from loss("smoothing 1", inputs(5, 99), inputs.labels(5, classes=99), 1)
    yield from loss("all ignored", inputs(6, 9), torch.full((6,), -100))
    outside = torch.tensor([3, 9, -7, 2**40, 0, -100])
    yield from loss("out of range", inputs(6, 9), outside)
    yield from loss("out of range, long", inputs(6, 4099), torch.tensor([3, 4099, -7, 2**40, 0, -100]))


def rope_calls(inputs: Inputs) -> Calls:
    def both(
        name: str, q: Tensor, k: Tensor, rotary: int, batch: int = 1, angles: torch.dtype = torch.float32
    ) -> Calls:
        cos, sin = (inputs(batch, q.shape[2], rotary, dtype=angles) for _ in range(2))
        for interleaved in (False, True):
            yield "rope", f"{name} {interleaved}", (q, k, cos, sin, interleaved)
            yield "rope_backward", f"{name} {interleaved}", (q, k, cos, sin, interleaved)

    for heads, k_heads, dim, rotary in ((4, 2, 64, 64), (3, 1, 80, 32), (40, 8, 16, 12), (1, 1, 2, 2), (2, 2, 10, 6)):
        yield from both(f"{heads} {dim} {rotary}", inputs(2, heads, 3, dim), inputs(2, k_heads, 3, dim), rotary, 2)
    for tokens in (3, 37):  # heads of one token at a time, and tokens of one head
        strided = (inputs(2, tokens, n, 32).transpose(1, 2) for n in (4, 2))
        yield from both(f"heads {tokens}", *strided, 32, 2)
    yield from both("many heads", inputs(1, 19, 11, 80).transpose(1, 2), inputs(1, 9, 19, 80), 20)
    fused = inputs(2, 13, 6, 32)
    yield from both("fused", fused[:, :, :4].transpose(1, 2), fused[:, :, 4:].transpose(1, 2), 32)
    yield from both("expanded", inputs(1, 1, 3, 32).expand(2, 4, 3, 32), inputs(2, 2, 3, 32), 32, 2)
    yield from both("last", inputs(2, 2, 3, 32, layout="last"), inputs(2, 2, 3, 32, layout="last"), 16)
    yield from both("own dtype", inputs(2, 2, 3, 32), inputs(2, 2, 3, 32), 32, angles=inputs.dtype)
    yield from both("nonfinite", inputs(2, 2, 9, 32, kind="nonfinite"), inputs(2, 2, 9, 32), 32)
    yield from both("offset", inputs(2, 2, 3, 32, layout="offset"), inputs(2, 2, 3, 32), 32)
    yield from both("empty", inputs(2, 2, 0, 32), inputs(2, 2, 0, 32), 32)
    yield from both("no k", inputs(2, 2, 3, 32), inputs(2, 0, 3, 32), 32)


def matmul_calls(inputs: Inputs) -> Calls:
    def both(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Calls:
        g = inputs(*x.shape[:-1], weight.shape[0])
        yield "linear", name, (x, weight, bias)
        yield "linear_backward", name, (g, x, weight, bias, True, True)

    sizes = [
        ((64, 64), 64),
        ((37, 71), 101),
        ((1, 128), 96),
        ((33, 65), 1),
        ((9, 1), 17),
        ((5, 0), 8),
        ((0, 32), 16),
        ((2, 5, 48), 40),
        ((64,), 24),
        ((7, 32), 0),
        ((130, 257), 259),
    ]
    for shape, n in sizes:
        yield from both(f"{shape} {n}", inputs(*shape), inputs(n, shape[-1]), inputs(n) if n % 2 else None)
    for layout in inputs.layouts:
        yield from both(layout, inputs(6, 5, 40, layout=layout), inputs(24, 40), inputs(24))
        yield from both(f"weight {layout}", inputs(9, 40), inputs(24, 40, layout=layout), inputs(24))
    yield from both("nonfinite", inputs(9, 40, kind="nonfinite"), inputs(24, 40), inputs(24))
    yield "linear_backward", "x alone", (inputs(5, 6), inputs(5, 7), inputs(6, 7), None, True, False)
    yield "linear_backward", "weight alone", (inputs(5, 6), inputs(5, 7), inputs(6, 7), inputs(6), False, True)


REPEATED = ("(7, 257)", "many rows", "split sums", "4 64 64", "(37, 71)")

CALLS: dict[str, Callable[[Inputs], Calls]] = {
    "norm": norm_calls,
    "activation": activation_calls,
    "softmax": softmax_calls,
    "rope": rope_calls,
    "matmul": matmul_calls,
}


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
    calls = CALLS[family](Inputs(dtype))
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


def refusal() -> dict[str, str]:
    from ferryman.errors import Unsupported
    from ferryman.ops.matmul import triton_kernels

    x = torch.ones(16, 16, dtype=torch.bfloat16)
    try:
        triton_kernels.linear(x, x, None, CPU)
    except Unsupported as error:
        return {"refused": str(error)}
    return {"refused": "not refused"}

"""Calls of these SIMT launchers, every kind of plan, dtype, layout and special value: tests/unit/test_simt_kernels.py
judges each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ferryman.ops.activation import simt_kernels as activation
from tests.unit.simt_cases import (
    BF16,
    F16,
    F32,
    Case,
    Inputs,
    Launch,
    layouts,
    misaligned,
    planted,
    random,
    short_and_long,
)


def _activation_cases() -> Iterator[Case]:
    shapes = {
        "one": (1,),
        "scalar": (),
        "seven": (7,),
        "odd": (7, 257),
        "chunk": (4096,),
        "many": (3, 4099),
        "three": (2, 3, 130),
    }
    for name, shape in shapes.items():
        for dtype in (F32, F16, BF16):
            pair = lambda s=shape, d=dtype: (random(*s, dtype=d, scale=4.0), random(*s, dtype=d, shift=0.5))  # noqa: E731
            label = f"{name}_{dtype}".replace("torch.", "")
            yield Case(f"silu_{label}", activation.silu_mul, pair)
            for how in ("tanh", "none"):
                yield Case(f"gelu_{how}_{label}", activation.gelu_mul, lambda p=pair, h=how: (*p(), h))
    # one unit's share of each form: whole tiles, and an end within a tile and within a vector
    forms = {
        "silu_few_tiles": ((4, 1024), "_bf16_4_128_1_true"),
        "silu_few": ((3, 1021), "_bf16_4_128_1_false"),
        "silu_some_tiles": ((4, 4096), "_bf16_8_128_1_true"),
        "silu_some": ((3, 4099), "_bf16_8_128_1_false"),
        "silu_many_tiles": ((6, 4096), "_bf16_8_256_2_true"),
        "silu_many": ((5, 4099), "_bf16_8_256_2_false"),
    }
    for name, (shape, form) in forms.items():
        pair = lambda s=shape: (random(*s, dtype=BF16, scale=4.0), random(*s, dtype=BF16, shift=0.5))  # noqa: E731
        yield Case(name, activation.silu_mul, pair, form)
    for n in (8, 40, 200, 520, 1032, 8200, 9):
        fused = lambda n=n: random(9, 2 * n, dtype=BF16, scale=3.0).split(n, -1)  # noqa: E731
        yield Case(f"silu_fused_{n}", activation.silu_mul, fused, "_8_" if n % 8 == 0 else "_1_")
    yield Case(
        "silu_float_misaligned",
        activation.silu_mul,
        lambda: (misaligned(random(5, 64, dtype=F32)), random(5, 64, dtype=F32)),
        "_1_",
    )
    yield Case(
        "silu_extremes",
        activation.silu_mul,
        lambda: (torch.linspace(-110, 110, 4001), torch.ones(4001)),
    )
    for how in ("tanh", "none"):
        yield Case(
            f"gelu_extremes_{how}",
            activation.gelu_mul,
            lambda h=how: (torch.linspace(-14, 14, 4001), torch.ones(4001), h),
        )


def _activation_backward_cases() -> Iterator[Case]:
    def gelu(name: str, inputs: Callable[[], Inputs], fit: str = "") -> Iterator[Case]:
        for how in ("tanh", "none"):
            case = lambda m=inputs, h=how: (*m(), h)  # noqa: E731
            yield Case(f"gelu_backward_{how}_{name}", activation.gelu_mul_backward, case, fit)

    def silu(name: str, inputs: Callable[[], Inputs], fit: str = "") -> Iterator[Case]:
        yield Case(f"silu_backward_{name}", activation.silu_mul_backward, inputs, fit)

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Inputs:
        gate, up = random(*shape, dtype=dtype, scale=4.0), random(*shape, dtype=dtype, shift=0.5)
        return random(*shape, dtype=dtype), gate, up

    for shape in ((), (1,), (7, 257), (2, 3, 130)):
        for dtype in (F32, F16, BF16):
            label = "_".join((*map(str, shape), str(dtype).removeprefix("torch.")))
            for build in (silu, gelu):
                yield from build(label, lambda s=shape, d=dtype: make(s, d))
    # one unit's share of each form: whole tiles, and an end within a tile and within a vector
    for shape, form in (
        ((4, 1024), "_bf16_4_128_1_true"),
        ((3, 1021), "_bf16_4_128_1_false"),
        ((6, 4096), "_bf16_8_128_1_true"),
        ((5, 4099), "_bf16_8_128_1_false"),
    ):
        yield from silu(f"form{form}", lambda s=shape: make(s, BF16), form)
    for n in (8, 40, 520, 8200, 9):
        halves = lambda n=n: (random(9, n, dtype=BF16), *random(9, 2 * n, dtype=BF16, scale=3.0).split(n, -1))  # noqa: E731
        yield from silu(f"fused_{n}", halves, "_8_" if n % 8 == 0 else "_1_")
    strided = lambda: (random(9, 1040, dtype=BF16)[:, 520:], *make((9, 520), BF16)[:2])  # noqa: E731
    yield from gelu("grad_strided", strided, "_8_")
    wild = lambda: (random(520, dtype=F16).expand(9, 520), random(9, 1040, dtype=F16)[:, ::2], make((9, 520), F16)[0])  # noqa: E731
    yield from silu("broadcast_and_strided_last", wild, "_8_")
    odd = lambda: (misaligned(random(5, 64, dtype=F32)), *make((5, 64), F32)[:2])  # noqa: E731
    yield from gelu("misaligned", odd, "_1_")
    for build, far in ((silu, 110.0), (gelu, 14.0)):
        yield from build("extremes", lambda f=far: (torch.ones(4001), torch.linspace(-f, f, 4001), torch.ones(4001)))
    for value in (float("nan"), float("inf"), float("-inf"), 1e30, -1e30):
        for build in (silu, gelu):

            def planted(v: float = value) -> Inputs:
                g = random(4, 520, dtype=BF16)
                g[1, 17] = g[3, 519] = v
                return random(4, 520, dtype=BF16), g, random(4, 520, dtype=BF16)

            yield from build(f"planted_{value}", planted)


def _shared_cases() -> Iterator[Case]:
    for name, (make, _) in layouts().items():
        yield Case(f"silu_{name}", activation.silu_mul, lambda m=make: (m(), m().flip(-1)))
    for label, rows in planted().items():
        yield Case(f"silu_{label}", activation.silu_mul, lambda m=rows: (m(), m().flip(0)))
        yield Case(f"gelu_{label}", activation.gelu_mul, lambda m=rows: (m(), m().flip(0), "tanh"))
        yield Case(f"gelu_erf_{label}", activation.gelu_mul, lambda m=rows: (m(), m().flip(0), "none"))


CASES = [*_activation_cases(), *_activation_backward_cases(), *_shared_cases()]


def launches(dtype: torch.dtype) -> Iterator[Launch]:
    for x, _ in short_and_long(dtype):
        yield activation.silu_mul, (x, x)
        yield activation.gelu_mul, (x, x, "tanh")
        yield activation.silu_mul_backward, (x, x, x)


def compiled(x: str) -> Iterator[str]:
    """How names of kernels for a dtype begin."""
    for way in ("", "_flat", "_backward", "_backward_flat"):
        yield from (f"{op}_{x}_" for op in (f"silu_mul{way}_Silu", f"gelu_mul{way}_GeluTanh", f"gelu_mul{way}_GeluErf"))


# On a device, of rows x, others and a weight: how many tensors are moved, the kernel, and its arguments.
MOVED = {"silu_mul": (3, activation.silu_mul, lambda x, other, w: (x, other))}

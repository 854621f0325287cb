"""Calls of the SIMT launchers: every kind of plan, dtype, layout and special value."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.activation import simt_kernels as activation
from ferryman.ops.norm import simt_kernels as norm
from ferryman.ops.rope import simt_kernels as rope
from ferryman.ops.softmax import simt_kernels as softmax
from ferryman.ops.softmax.simt_softmax_backward_kernels import softmax_backward

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Callable[..., Any]
    make: Callable[[], Inputs]
    fit: str = ""  # what the plan must be: part of the kernel's name
    shared: int = 65_536
    features: frozenset[str] = frozenset()
    units: int = 1
    exact: bool = False  # every partial result is representable: bit for bit


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    seed = zlib.crc32(repr((shape, dtype, scale, shift)).encode())
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + shift).to(dtype)


def _misaligned(x: Tensor) -> Tensor:
    """The same values, one element after a 16-byte boundary."""
    base = torch.empty(x.numel() + 1, dtype=x.dtype)
    base[1:] = x.flatten()
    return base[1:].view(x.shape)


def _norm_inputs(shape: tuple[int, ...], dtype: torch.dtype, w: torch.dtype | None, *rest: Any) -> Inputs:
    weight = None if w is None else _random(shape[-1], dtype=w, scale=0.2, shift=1.0)
    return (_random(*shape, dtype=dtype), weight, *rest)


def _row_cases() -> Iterator[Case]:
    # (rows, columns, what the kernel's name must contain for 16-bit types). With one unit a LONG row, and one that
    # takes more than 16 words a thread, is persistent: one or two blocks load ahead and turn their slots over.
    shapes = [
        (3, 1, "EXACT"),
        (65, 8, "EXACT"),
        (7, 64, "EXACT"),
        (9, 96, "RAGGED"),
        (3, 127, "_1_"),
        (9, 1024, "EXACT"),
        (2, 1021, "_1_"),
        (3, 4096, "EXACT"),
        (2, 4104, "RAGGED"),
        (7, 16_384, "EXACT"),
        (3, 20_008, "RAGGED"),
        (3, 65_536, "_8_"),
        (3, 80_000, "LONG"),
        (3, 131_080, "LONG"),
        (3, 20_011, "LONG"),
        (3, 50_257, "LONG"),
    ]
    for rows, n, fit in shapes:
        shape = (rows, n)
        yield Case(
            f"rms_{n}",
            norm.rms_norm,
            lambda s=shape: _norm_inputs(s, BF16, BF16, 1e-6, False),
            fit,
        )
        yield Case(
            f"softmax_{n}",
            softmax.softmax,
            lambda s=shape: (_random(*s, dtype=BF16, scale=3.0),),
            fit,
        )
        yield Case(
            f"layer_{n}",
            norm.layer_norm,
            lambda s=shape, n=n: (*_norm_inputs(s, F16, F16), _random(n, dtype=F16), 1e-5),
            fit,
        )
    for rows, n, fit in (
        (65, 8, ""),
        (9, 512, "EXACT"),
        (3, 1000, "RAGGED"),
        (3, 8192, "EXACT"),
        (5, 32_768, "_8_"),
        (5, 40_008, "LONG"),
        (3, 1021, "_1_"),
        (3, 9001, "LONG"),
    ):
        yield Case(
            f"add_rms_{n}",
            norm.add_rms_norm,
            lambda s=(rows, n): (_random(*s, dtype=BF16), *_norm_inputs(s, BF16, BF16, 1e-6, True)),
            fit,
        )
    for x, w, cast in itertools.product((F32, F16, BF16), (F32, F16, BF16, None), (False, True)):
        name = f"{x}_{w}_{cast}".replace("torch.", "")
        yield Case(
            f"rms_{name}",
            norm.rms_norm,
            lambda x=x, w=w, c=cast: _norm_inputs((3, 1000), x, w, 1e-6, c),
        )
        yield Case(
            f"add_rms_{name}",
            norm.add_rms_norm,
            lambda x=x, w=w, c=cast: (_random(3, 520, dtype=x, scale=2.0), *_norm_inputs((3, 520), x, w, 1e-6, c)),
        )
    for x, w, b in (
        (F32, None, None),
        (F32, BF16, F16),
        (BF16, F32, None),
        (BF16, None, F32),
        (F16, BF16, F32),
        (F32, F32, F32),
    ):
        yield Case(
            f"layer_{x}_{w}_{b}".replace("torch.", ""),
            norm.layer_norm,
            lambda x=x, w=w, b=b: (*_norm_inputs((3, 1000), x, w), None if b is None else _random(1000, dtype=b), 1e-5),
        )
    for dtype in (F32, F16):
        yield Case(
            f"softmax_{dtype}".replace("torch.", ""),
            softmax.softmax,
            lambda d=dtype: (_random(3, 1000, dtype=d, scale=9.0),),
        )
    for n in (16_384, 50_000):  # float rows: four elements a pack
        yield Case(
            f"softmax_float32_{n}",
            softmax.softmax,
            lambda n=n: (_random(3, n, dtype=F32, scale=9.0),),
        )
    yield Case(
        "layer_offset",
        norm.layer_norm,
        lambda: (_random(3, 4096, dtype=F32, shift=1000.0), None, None, 1e-5),
    )
    # no shared memory to spare: everything beyond the registers goes through L2
    for name, n in (("vector", 80_000), ("scalar", 9001)):
        yield Case(
            f"stream_rms_{name}",
            norm.rms_norm,
            lambda n=n: _norm_inputs((5, n), BF16, BF16, 1e-6, False),
            "LONG",
            2048,
        )
        yield Case(
            f"stream_layer_{name}",
            norm.layer_norm,
            lambda n=n: (*_norm_inputs((3, n), F16, F16), None, 1e-6),
            "LONG",
            2048,
        )
        yield Case(
            f"stream_softmax_{name}",
            softmax.softmax,
            lambda n=n: (_random(3, n, dtype=BF16),),
            "LONG",
            2048,
        )


def _cluster_cases() -> Iterator[Case]:
    """What a device with clusters is given: one unit, so that few rows do not take another form, and odd numbers of
    rows where a block takes two. Widths: whole and ragged, and such that the last block of a cluster has less than the
    others."""
    softmax_of = lambda s: (_random(*s, dtype=BF16, scale=3.0),)  # noqa: E731
    ops: dict[str, tuple[Callable[..., Any], Callable[[tuple[int, int]], Inputs]]] = {
        "rms": (norm.rms_norm, lambda s: _norm_inputs(s, BF16, BF16, 1e-6, False)),
        "add_rms": (
            norm.add_rms_norm,
            lambda s: (_random(*s, dtype=BF16), *_norm_inputs(s, BF16, F32, 1e-6, True)),
        ),
        "layer": (
            norm.layer_norm,
            lambda s: (*_norm_inputs(s, F16, F16), _random(s[-1], dtype=F16), 1e-5),
        ),
        "softmax": (softmax.softmax, softmax_of),
        "softmax_float32": (softmax.softmax, lambda s: (_random(*s, dtype=F32, scale=9.0),)),
    }
    forms = {
        "rms": [
            (3, 16_384, "512_1_4_EXACT_2_1"),
            (3, 11_008, "352_1_4_RAGGED_2_1"),
            (3, 20_008, "160_1_4_WHOLE_6_4"),
            (5, 50_264, "WHOLE_4_8"),
            (4, 65_536, "256_1_4_WHOLE_4_8"),
            (3, 81_928, "192_1_8_WHOLE_5_8"),
        ],
        "add_rms": [(3, 16_384, "512_1_2_WHOLE_2_2"), (2, 20_008, "WHOLE_3_4"), (3, 66_056, "288_1_4_WHOLE_3_8")],
        "layer": [
            (3, 20_008, "96_1_4_WHOLE_8_8"),
            (2, 65_536, "256_1_4_WHOLE_4_8"),
            (3, 66_056, "160_1_8_WHOLE_3_8"),
            (3, 140_008, "288_1_8_WHOLE_1_8"),
        ],
        "softmax": [(7, 8264, "160_1_4_WHOLE_6_2"), (5, 20_008, "WHOLE_6_4"), (3, 66_056, "160_1_8_WHOLE_6_8")],
        "softmax_float32": [(5, 16_388, "160_1_8_WHOLE_3_4")],
    }
    for op, shapes in forms.items():
        kernel, make = ops[op]
        for rows, n, fit in shapes:
            yield Case(f"cluster_{op}_{n}", kernel, lambda m=make, s=(rows, n): m(s), fit, 232_448, _CLUSTERS)
    # few rows: all of 16 units for them
    for op, rows, n, fit in (
        ("rms", 1, 9000, "160_1_1_RAGGED_1_8"),
        ("layer", 2, 20_008, "160_1_2_RAGGED_1_8"),
        ("softmax", 1, 65_536, "256_1_4_EXACT_1_8"),
        ("add_rms", 2, 11_008, "192_1_1_RAGGED_1_8"),
        ("rms", 3, 8200, "544_1_2_RAGGED_1_1"),
        ("softmax", 16, 8192, "1024_1_1_EXACT_1_1"),
    ):
        kernel, make = ops[op]
        yield Case(f"few_{op}_{n}", kernel, lambda m=make, s=(rows, n): m(s), fit, 232_448, _CLUSTERS, 16)

    def hostile() -> Inputs:
        x = _random(6, 65_544, dtype=BF16)
        x[0, 65_543], x[1, 9], x[2], x[3, 1:] = math.nan, math.inf, -math.inf, -math.inf
        return (x,)

    # float rows: weights of half the size may be no whole words of 16 bytes
    for w in (F32, BF16):
        yield Case(
            f"cluster_layer_float32_{w}".replace("torch.", ""),
            norm.layer_norm,
            lambda w=w: (*_norm_inputs((3, 8196), F32, w), _random(8196, dtype=F32), 1e-5),
            "WHOLE",
            232_448,
            _CLUSTERS,
        )

    def means(dtype: torch.dtype, *deviations: float) -> Inputs:  # two rows share a block, and the last is alone
        x = _random(len(deviations), 20_008, dtype=F32) + torch.tensor(deviations)[:, None]
        return (x.to(dtype), None, None, 1e-5)

    # a row whose mean takes a second exchange, with one whose does not, and with another
    for dtype in (F32, F16):
        offset = lambda d=dtype: means(d, 0.0, 1000.0, 2.1, 1.9, 3.0, -50.0, 9.0)  # noqa: E731
        name = f"cluster_layer_offset_{dtype}".replace("torch.", "")
        yield Case(name, norm.layer_norm, offset, "WHOLE", 232_448, _CLUSTERS)

    def outliers() -> Inputs:
        x = _random(3, 20_008, dtype=F32)
        x[:, ::8] = 1e4
        return (x, None, None, 1e-5)

    def lost() -> Inputs:  # the other row of a pair is as it would be alone
        x = _random(5, 20_008, dtype=BF16)
        x[0, 20_007], x[3, 9], x[4] = math.nan, math.inf, 3.0
        return (x, None, None, 1e-5)

    yield Case("cluster_layer_outliers", norm.layer_norm, outliers, "WHOLE", 232_448, _CLUSTERS)
    yield Case("cluster_layer_hostile", norm.layer_norm, lost, "WHOLE", 232_448, _CLUSTERS)
    yield Case("cluster_softmax_hostile", softmax.softmax, hostile, "WHOLE", 232_448, _CLUSTERS)


_CLUSTERS = frozenset({"clusters"})


def _layout_cases() -> Iterator[Case]:
    """Views: a row stride, an odd row stride, leading dimensions that do and do not collapse, broadcasts, offsets."""
    base = _random(6, 4, 520, dtype=BF16)
    layouts: dict[str, tuple[Callable[[], Tensor], str]] = {
        "row_stride": (lambda: _random(6, 1040, dtype=BF16)[:, 520:], "_8_"),
        "odd_stride": (lambda: _random(6, 521, dtype=BF16)[:, :520], "_1_"),
        "misaligned": (lambda: _misaligned(_random(5, 520, dtype=BF16)), "_1_"),
        "collapsible": (lambda: base[:, :, :], "_8_"),
        "transposed": (lambda: base.transpose(0, 1), "_8_"),
        "every_other": (lambda: base[:, ::2], "_8_"),
        "broadcast": (lambda: _random(520, dtype=BF16).expand(5, 520), "_8_"),
        "vector": (lambda: _random(520, dtype=BF16), "_8_"),
        "strided_last": (lambda: _random(5, 1040, dtype=BF16)[:, ::2], "_8_"),
    }
    for name, (make, fit) in layouts.items():
        yield Case(
            f"rms_{name}",
            norm.rms_norm,
            lambda m=make: (m(), _random(520, dtype=BF16), 1e-6, False),
            fit,
        )
        yield Case(f"softmax_{name}", softmax.softmax, lambda m=make: (m(),), fit)
        yield Case(
            f"add_{name}",
            norm.add_rms_norm,
            lambda m=make: (m(), m() * 0.5, None, 1e-6, False),
            fit,
        )
        yield Case(f"silu_{name}", activation.silu_mul, lambda m=make: (m(), m().flip(-1)))
    yield Case(
        "rms_weight_misaligned",
        norm.rms_norm,
        lambda: (_random(3, 512, dtype=BF16), _misaligned(_random(512, dtype=BF16)), 1e-6, False),
        "_1_",
    )
    yield Case(
        "rms_weight_strided",
        norm.rms_norm,
        lambda: (_random(3, 512, dtype=BF16), _random(1024, dtype=F32)[::2], 1e-6, False),
        "_8_",
    )


def _softmax_backward_cases() -> Iterator[Case]:
    """Rows of part of a wave, of a block, beyond one (LONG), of a cluster; views; values that are not finite."""

    def make(rows: int, n: int, dtype: torch.dtype) -> Inputs:
        return _random(rows, n, dtype=dtype), _random(rows, n, dtype=dtype, scale=3.0).float().softmax(-1).to(dtype)

    def case(name: str, inputs: Callable[[], Inputs], fit: str, *where: Any) -> Case:
        return Case(f"softmax_backward_{name}", softmax_backward, inputs, fit, *where)

    for rows, n, fit in (
        (3, 1, "EXACT"),
        (65, 8, "EXACT"),
        (9, 96, "RAGGED"),
        (3, 127, "_1_"),
        (9, 1024, "EXACT"),
        (2, 1021, "_1_"),
        (3, 4096, "EXACT"),
        (2, 4104, "RAGGED"),
        (3, 16_384, "EXACT"),
        (2, 20_008, "RAGGED"),
        (3, 65_536, "LONG"),
        (2, 80_008, "LONG"),
        (2, 20_011, "LONG"),
    ):
        yield case(f"{n}", lambda r=rows, n=n: make(r, n, BF16), fit)
    for dtype in (F32, F16):
        yield case(f"{dtype}".removeprefix("torch."), lambda d=dtype: make(3, 1000, d), "RAGGED")
    clusters = (232_448, _CLUSTERS)
    for rows, n, fit in (
        (5, 1000, "_128_1_1_RAGGED_12_1"),
        (5, 4096, "_512_1_1_EXACT_3_1"),
        (5, 8192, "_512_1_2_EXACT_3_1"),
        (5, 8200, "_288_1_2_RAGGED_5_2"),
        (5, 16_384, "_512_1_2_RAGGED_3_2"),
        (5, 20_008, "_320_1_2_RAGGED_4_4"),
        (9, 32_768, "_512_1_2_RAGGED_3_4"),
        (3, 50_264, "_416_1_4_RAGGED_2_4"),
        (5, 65_536, "_512_1_4_RAGGED_2_4"),
        (3, 66_056, "_288_1_4_RAGGED_3_8"),
        (2, 131_064, "_512_1_4_RAGGED_2_8"),
        (2, 262_152, "LONG"),
    ):
        yield case(f"cluster_{n}", lambda r=rows, n=n: make(r, n, BF16), fit, *clusters)
    yield case("cluster_float32", lambda: make(5, 16_388, F32), "_288_1_4_RAGGED_3_4", *clusters)
    for rows, n, fit in (
        (2, 4096, "_512_1_1_EXACT_3_1"),
        (1, 9000, "_160_1_1_RAGGED_6_8"),
        (3, 20_008, "_160_1_2_RAGGED_6_8"),
        (20, 32_768, "_512_1_2_RAGGED_3_4"),
        (1, 66_056, "_288_1_4_RAGGED_3_8"),
    ):
        yield case(f"few_{n}", lambda r=rows, n=n: make(r, n, BF16), fit, *clusters, 16)
    base = _random(6, 4, 520, dtype=BF16)
    layouts: dict[str, tuple[Callable[[], Tensor], str]] = {
        "row_stride": (lambda: _random(6, 1040, dtype=BF16)[:, 520:], "_8_"),
        "odd_stride": (lambda: _random(6, 521, dtype=BF16)[:, :520], "_1_"),
        "misaligned": (lambda: _misaligned(_random(6, 520, dtype=BF16)), "_1_"),
        "transposed": (lambda: base.transpose(0, 1)[:2, :3].reshape(6, 520), "_8_"),
        "broadcast": (lambda: _random(520, dtype=BF16).expand(6, 520), "_8_"),
        "strided_last": (lambda: _random(6, 1040, dtype=BF16)[:, ::2], "_8_"),
    }
    for name, (view, fit) in layouts.items():
        yield case(name, lambda v=view: (v(), make(6, 520, BF16)[1]), fit)
        yield case(f"{name}_of_y", lambda v=view: (make(6, 520, BF16)[0], v()), fit)

    def hostile(n: int) -> Inputs:
        grad, y = make(6, n, BF16)
        grad[0, n - 1], grad[1, 9], grad[2, 0], y[3, 5], y[4] = math.nan, math.inf, -math.inf, math.nan, 0.0
        return grad, y

    yield case("hostile", lambda: hostile(1000), "RAGGED")
    yield case("hostile_long", lambda: hostile(65_544), "LONG")
    yield case("hostile_cluster", lambda: hostile(65_544), "RAGGED", *clusters)


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
            pair = lambda s=shape, d=dtype: (_random(*s, dtype=d, scale=4.0), _random(*s, dtype=d, shift=0.5))  # noqa: E731
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
        pair = lambda s=shape: (_random(*s, dtype=BF16, scale=4.0), _random(*s, dtype=BF16, shift=0.5))  # noqa: E731
        yield Case(name, activation.silu_mul, pair, form)
    for n in (8, 40, 200, 520, 1032, 8200, 9):
        fused = lambda n=n: _random(9, 2 * n, dtype=BF16, scale=3.0).split(n, -1)  # noqa: E731
        yield Case(f"silu_fused_{n}", activation.silu_mul, fused, "_8_" if n % 8 == 0 else "_1_")
    yield Case(
        "silu_float_misaligned",
        activation.silu_mul,
        lambda: (_misaligned(_random(5, 64, dtype=F32)), _random(5, 64, dtype=F32)),
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
        gate, up = _random(*shape, dtype=dtype, scale=4.0), _random(*shape, dtype=dtype, shift=0.5)
        return _random(*shape, dtype=dtype), gate, up

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
        halves = lambda n=n: (_random(9, n, dtype=BF16), *_random(9, 2 * n, dtype=BF16, scale=3.0).split(n, -1))  # noqa: E731
        yield from silu(f"fused_{n}", halves, "_8_" if n % 8 == 0 else "_1_")
    strided = lambda: (_random(9, 1040, dtype=BF16)[:, 520:], *make((9, 520), BF16)[:2])  # noqa: E731
    yield from gelu("grad_strided", strided, "_8_")
    wild = lambda: (_random(520, dtype=F16).expand(9, 520), _random(9, 1040, dtype=F16)[:, ::2], make((9, 520), F16)[0])  # noqa: E731
    yield from silu("broadcast_and_strided_last", wild, "_8_")
    odd = lambda: (_misaligned(_random(5, 64, dtype=F32)), *make((5, 64), F32)[:2])  # noqa: E731
    yield from gelu("misaligned", odd, "_1_")
    for build, far in ((silu, 110.0), (gelu, 14.0)):
        yield from build("extremes", lambda f=far: (torch.ones(4001), torch.linspace(-f, f, 4001), torch.ones(4001)))
    for value in (float("nan"), float("inf"), float("-inf"), 1e30, -1e30):
        for build in (silu, gelu):

            def planted(v: float = value) -> Inputs:
                g = _random(4, 520, dtype=BF16)
                g[1, 17] = g[3, 519] = v
                return _random(4, 520, dtype=BF16), g, _random(4, 520, dtype=BF16)

            yield from build(f"planted_{value}", planted)


def _rope_cases() -> Iterator[Case]:
    def make(
        b: int,
        hq: int,
        hk: int,
        s: int,
        d: int,
        r: int,
        x: torch.dtype,
        c: torch.dtype,
        tables: int,
        interleaved: bool,
        layout: str,
    ) -> Inputs:
        q, k = _random(b, s, hq, d, dtype=x), _random(b, s, hk, d, dtype=x, scale=2.0)
        if layout == "heads_inside":  # transformers: (B, S, H, D) storage, (B, H, S, D) view
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        elif layout == "fused":
            q, k = torch.cat((q, k), 2).transpose(1, 2).split((hq, hk), 1)
        elif layout == "misaligned":
            q, k = _misaligned(q.transpose(1, 2).contiguous()), k.transpose(1, 2).contiguous()
        else:
            q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        return q, k, _random(tables, s, r, dtype=c), _random(tables, s, r, dtype=c, scale=0.7), interleaved

    for interleaved in (False, True):
        for x, c in itertools.product((F32, F16, BF16), (F32, F16, BF16)):
            args = (2, 4, 2, 3, 64, 64, x, c, 1, interleaved, "heads_inside")
            yield Case(
                f"rope_{x}_{c}_{interleaved}".replace("torch.", ""),
                rope.rope,
                lambda a=args: make(*a),
                "_4_" if x == F32 else "_8_",
            )
        shapes = {
            "decode": (1, 32, 8, 1, 128, 128, 1),
            "d80": (2, 3, 1, 5, 80, 80, 2),
            "partial": (1, 2, 2, 7, 96, 32, 1),
            "odd_rest": (1, 2, 1, 3, 67, 32, 1),
            "tiny": (1, 1, 1, 40, 2, 2, 1),
            "d600": (1, 2, 1, 2, 1200, 1200, 1),
            "half_off": (1, 2, 1, 3, 64, 20, 1),
            "partial_packs": (2, 9, 2, 19, 128, 64, 1),
        }
        for name, (b, hq, hk, s, d, r, tables) in shapes.items():
            for layout in ("contiguous", "heads_inside", "fused", "misaligned"):
                args = (b, hq, hk, s, d, r, BF16, F32, tables, interleaved, layout)
                yield Case(
                    f"rope_{name}_{layout}_{interleaved}",
                    rope.rope,
                    lambda a=args: make(*a),
                    "_1_" if layout == "misaligned" else "",
                )
                yield Case(
                    f"rope_backward_{name}_{layout}_{interleaved}",
                    rope.rope_backward,
                    lambda a=args: make(*a),
                    "_1_" if layout == "misaligned" else "",
                )
        # heads and tokens that no block of them divides: 9 are 5 and 4, 37 tokens two blocks of 16 and one of 5
        for kernel in (rope.rope, rope.rope_backward):
            for x in (F32, BF16):
                args = (2, 9, 3, 37, 128, 128, x, x, 2, interleaved, "heads_inside")
                yield Case(
                    f"{kernel.__name__}_shares_{x}_{interleaved}".replace("torch.", ""),
                    kernel,
                    lambda a=args: make(*a),
                    "packs",
                )


def _special_cases() -> Iterator[Case]:
    nan, inf = math.nan, math.inf
    planted = {"nan": nan, "inf": inf, "minus_inf": -inf}
    for name, value in planted.items():
        for dtype in (F32, F16, BF16):

            def rows(v: float = value, d: torch.dtype = dtype) -> Tensor:
                x = _random(4, 520, dtype=d)
                x[1, 17] = x[3, 519] = v
                return x

            label = f"{name}_{dtype}".replace("torch.", "")
            yield Case(f"rms_{label}", norm.rms_norm, lambda m=rows: (m(), None, 1e-6, False))
            yield Case(f"layer_{label}", norm.layer_norm, lambda m=rows: (m(), None, None, 1e-6))
            yield Case(f"softmax_{label}", softmax.softmax, lambda m=rows: (m(),))
            yield Case(f"silu_{label}", activation.silu_mul, lambda m=rows: (m(), m().flip(0)))
            yield Case(f"gelu_{label}", activation.gelu_mul, lambda m=rows: (m(), m().flip(0), "tanh"))
            yield Case(f"gelu_erf_{label}", activation.gelu_mul, lambda m=rows: (m(), m().flip(0), "none"))
    full_nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(F32)  # all ones: a rounding carry must not eat it
    yield Case("rms_full_nan", norm.rms_norm, lambda: (_random(3, 64, dtype=BF16), full_nan, 1e-6, False))
    yield Case("softmax_no_key", softmax.softmax, lambda: (torch.full((2, 40), -inf, dtype=BF16),))
    yield Case(
        "softmax_no_key_long",
        softmax.softmax,
        lambda: (torch.full((2, 9001), -inf, dtype=BF16),),
        "LONG",
        2048,
    )

    def masked() -> Inputs:
        x = _random(3, 80_000, dtype=BF16)
        x[0, :79_999], x[1, 1:], x[2, 40_000:] = -inf, -inf, -inf
        return (x,)

    yield Case("softmax_masked", softmax.softmax, masked, "LONG", 2048)
    yield Case("softmax_huge", softmax.softmax, lambda: (_random(3, 200, dtype=BF16, scale=1e38),))
    yield Case(
        "softmax_equal",
        softmax.softmax,
        lambda: (torch.full((3, 1024), 77.7),),
        exact=True,
    )
    # mean of squares 4^k: the scale is a power of two, and every result exact
    yield Case(
        "rms_power_of_four",
        norm.rms_norm,
        lambda: (torch.full((3, 1000), 8.0), None, 0.0, False),
        exact=True,
    )
    yield Case(
        "rms_subnormal",
        norm.rms_norm,
        lambda: (_random(3, 256, dtype=F32, scale=1e-40), None, 1e-6, False),
    )
    yield Case("rms_zero", norm.rms_norm, lambda: (torch.zeros(3, 256), None, 1e-6, False))


CASES = [*_row_cases(), *_cluster_cases(), *_layout_cases(), *_activation_cases(), *_rope_cases(), *_special_cases()]
CASES += _softmax_backward_cases()
CASES += _activation_backward_cases()

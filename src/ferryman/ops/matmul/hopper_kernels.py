"""Linear layers on Hopper in CUDA C++ (`hopper.cuh`, `wide.cuh`), and which form serves which shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, as_rows, pointer, type_name
from ferryman.backends.simt_runtime import runtime

_HERE = Path(__file__).parent
_DEPTH = 64  # elements of k in a box
_MAP_BYTES = 128
_SHARED_PER_BLOCK = 232_448


class Wide(NamedTuple):
    """The template arguments of `Wide` in wide.cuh: a tile of ``m`` x ``n``, blocks of a cluster that share columns
    (``cluster``) or divide k (``split``), stages that are filled before there are tensor maps (``head``), and how many
    ``boxes`` of 64 elements of k a stage has."""

    m: int
    n: int
    stages: int
    cluster: int = 1
    split: int = 1
    head: int = 0
    boxes: int = 1

    @property
    def name(self) -> str:
        return f"wide_{'_'.join(map(str, self))}"

    @property
    def threads(self) -> int:
        return (self.m // 64 + 1) * 128

    @property
    def shared(self) -> int:
        if self.split > 1:
            result = self.m * self.n * 4 // self.split * (self.split - 1)
        else:
            result = 2 * (self.m // 64) * 64 * 128 if self.m > 64 else 0
        barriers = 16 * (self.stages + 1) + 8 * self.head
        return self.stages * self.boxes * (self.m + self.n) * _DEPTH * 2 + result + 3 * _MAP_BYTES + barriers + 1024

    def grid(self, m: int, n: int, units: int) -> int:
        tiles = -(-m // (self.m * self.cluster)) * -(-n // self.n)
        return tiles * self.split if self.split > 1 else min(tiles, units // self.cluster) * self.cluster


def _wgmma(n: int) -> str:
    """m64nNk16 with a sum in registers: PTX names each of them, so the text is made for each n."""
    count = n // 2
    places = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    return f"""
namespace ferryman {{
// sum = a b^T (+ sum if add), both operands dense along k in shared memory.
FERRYMAN_DEVICE void wgmma(float (&sum)[{count}], u64 a, u64 b, int add) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32." FERRYMAN_MMA_TYPE "." FERRYMAN_MMA_TYPE
                 " {{{places}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
                 : {sums} : "l"(a), "l"(b), "r"(add));
}}
}}
"""


@functools.lru_cache(maxsize=None)
def _text(name: str) -> str:
    return f'#line 1 "{name}"\n{(_HERE / name).read_text(encoding="utf-8")}'


@functools.lru_cache(maxsize=None)
def _unit(form: Wide, kind: str) -> Unit:
    arguments = [str(argument) for argument in form]
    name = "_".join(["linear_wide", kind, *arguments])
    line = f"FERRYMAN_WIDE({name}, {', '.join(arguments)})\n"
    text = f"{_text('hopper.cuh')}{_wgmma(form.n)}{_text('wide.cuh')}{line}"
    return Unit(name, text, (f"FERRYMAN_BF16={int(kind == 'bf16')}",), suffix="a", overlapping=True)


# By times of one H200 (benchmarks/results/h200/linear.md):
# - up to 64 rows the weights' bytes are what counts, and that all SMs have as many of them to read: LLM weights are
#   multiples of 1024, so tiles are as wide as gives 128 blocks (5120 = 64 x 80, k in two parts; 17408 = 128 x 136).
# - starting early gains where a product is short; with blocks for 80 of the 132 SMs it costs, presumably since the next
#   launch's blocks then take SMs that share their way to memory.
# - 32 clusters of 4 at one block an SM do not all fit, as a GPC's SMs are no multiple of 4. Hence _CROWDED.
# - beyond, the time of a tile's step of 64 in k relative to 128 x 256, and that of adding parts through the cluster.
_STEP = {(256, 2): 1.0, (256, 1): 1.03, (192, 1): 0.78, (128, 2): 0.5, (128, 1): 0.55, (64, 1): 0.33}
# In such steps: beginning and ending a tile; adding parts (10 and not 5: over 22 other shapes of 77 to 7,927 rows the
# forms chosen are 3.0% behind the best on average, before 6.4%; over the 22 of the first fit 0.2% with either).
_TILE, _SPLIT = 2.0, 10.0
_TALL = (
    Wide(128, 256, 4, 2),
    Wide(128, 256, 4),
    Wide(128, 192, 4),
    Wide(128, 128, 6, 2),
    Wide(128, 128, 6),
    Wide(128, 64, 8),
    Wide(128, 128, 6, split=2),
    Wide(128, 64, 8, split=2),
    Wide(128, 64, 8, split=4),
)
_CROWDED = 0.85  # of the SMs: what clusters of 4 can fill


def _low(n: int, split: int) -> Wide:
    """For 64 rows or fewer, with as many stages as fit."""
    candidates = (Wide(64, n, stages, split=split, head=2, boxes=2) for stages in range(8, 2, -1))
    return next(form for form in candidates if form.shared <= _SHARED_PER_BLOCK)


_LOW = (
    *(_low(n, 1) for n in (64, 80, 96, 112, 128, 136)),
    *(_low(n, 2) for n in (32, 48, 64, 80, 96)),
    *(_low(n, 4) for n in (32, 64)),
)
# Rows of tiles whose blocks run together, for L2. Warm, at the power cap: 8 is ahead of 16 by 0-1.5%, of 32 by -1 to 5%
# (five products of 2048 x 14336 x 4096 to 8192 x 28672 x 8192); the result's hint gives 0.3-1% more.
_ROWS_TOGETHER = 8


def forms() -> list[Wide]:
    """Every form that `choose` can return."""
    return [*_TALL, *_LOW]


_NAMED = {form.name: form for form in forms()}


def _waves(form: Wide, m: int, n: int, k: int, units: int) -> float:
    """How long a product takes with a tall form, in steps of a tile of 128 x 256."""
    tiles = -(-m // (form.m * form.cluster)) * form.cluster * -(-n // form.n) * form.split
    steps = -(-k // (_DEPTH * form.split)) * _STEP[form.n, form.cluster]
    return -(-tiles // units) * (steps + _TILE) + _SPLIT * (form.split > 1)


def _streaming(form: Wide, m: int, n: int, k: int, units: int) -> float:
    """Microseconds of a low form on an H200: a launch among its like, the weight's bytes, and what the busiest SM reads
    one after another (its tiles' weights, x, a stage's turn). Fitted to 486 times of 148 cells, of forms within 30% of
    the best; error 6%, root mean square."""
    tiles = -(-n // form.n) * form.split
    each = -(-tiles // int(units * (_CROWDED if form.split == 4 else 1))) * k / form.split  # elements of k
    return 3.0 + 0.17e-6 * (2 * n * k) + each * (7.4e-6 * 2 * form.n + 2.75e-6 * 2 * m + 0.036 / (form.boxes * _DEPTH))


@functools.lru_cache(maxsize=4096)
def ranked(m: int, n: int, k: int, units: int) -> Mapping[Wide, float]:
    """The forms that can serve x (m, k) and weight (n, k) on a device of ``units`` SMs, the fastest first, and the time
    that each is expected to take: by `_streaming` up to 64 rows, by `_waves` beyond."""
    low = m <= 64
    depth = 256 if low else 512  # of k that a part should have
    usable = [f for f in (_LOW if low else _TALL) if f.split == 1 or k >= depth * f.split]
    times = {f: _streaming(f, m, n, k, units) if low else _waves(f, m, n, k, units) for f in usable}
    return {f: times[f] for f in sorted(usable, key=times.__getitem__)}


def choose(m: int, n: int, k: int, units: int) -> Wide:
    """The form for x (m, k) and weight (n, k) on a device of ``units`` SMs."""
    return next(iter(ranked(m, n, k, units)))


def _operand(x: Tensor) -> tuple[Tensor, int, int]:
    """(x, rows, elements from row to row) with rows that 16-byte copies can read; a copy of x where they cannot."""
    x, rows, stride = as_rows(x)
    if stride * x.element_size() % VECTOR_BYTES:
        return x.contiguous(), rows, x.shape[-1]
    if x.data_ptr() % VECTOR_BYTES:
        return x.clone(memory_format=torch.contiguous_format), rows, x.shape[-1]
    return x, rows, stride


def product(form: Wide, x: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
    """`linear` by one form. Not empty; K and N multiples of 8; a stage of K at least for each block that divides it."""
    n, k = weight.shape
    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    x, m, x_stride = _operand(x)
    weight, _, w_stride = _operand(weight)
    if bias is not None:
        bias, _, _ = _operand(bias)
    grid = form.grid(m, n, target.units)
    # tensor maps are made in the kernel, by every block for itself: a launch is its addresses and nothing else
    maps = torch.empty(grid * 3 * _MAP_BYTES, dtype=torch.uint8, device=x.device)
    given = (
        x.data_ptr(),
        x_stride,
        weight.data_ptr(),
        w_stride,
        pointer(bias),
        y.data_ptr(),
        m,
        n,
        k,
        maps.data_ptr(),
        _ROWS_TOGETHER,
    )
    runtime(target).launch(_unit(form, type_name(x.dtype)), y.device, grid, form.threads, form.shared, given)
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
    n, k = weight.shape
    if x.numel() == 0 or weight.numel() == 0:
        y = torch.zeros((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
        return y if bias is None else y.copy_(bias.expand(y.shape))
    m = math.prod(x.shape[:-1])
    form = _NAMED[target.configuration] if target.configuration else choose(m, n, k, target.units)
    return product(form, x, weight, bias, target)


def configurations(x: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> dict[str, float]:
    """`ranked` by name, for the menu."""
    if x.numel() == 0 or weight.numel() == 0:
        return {}
    n, k = weight.shape
    return {f.name: time for f, time in ranked(math.prod(x.shape[:-1]), n, k, target.units).items()}


def units(target: Target) -> list[Unit]:
    """Every kernel that a shape can lead to; none but for Hopper, whose instructions they are."""
    if target.arch != "sm_90":
        return []
    return [_unit(form, kind) for kind in ("bf16", "f16") for form in forms()]

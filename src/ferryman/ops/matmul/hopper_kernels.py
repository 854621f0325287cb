"""Linear layers on Hopper in CUDA C++ (`hopper.cuh`, `wide.cuh`, `skinny.cuh`), and which form serves which shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, as_rows, pointer, runtime, type_name

_HERE = Path(__file__).parent
_DEPTH = 64  # elements of k in a stage of `Wide`
_MAP_BYTES = 128
_SHARED_PER_UNIT, _SHARED_PER_BLOCK, _RESERVED = 233_472, 232_448, 1024  # of an SM, of a block, the driver's


class Wide(NamedTuple):
    """The template arguments of `Wide` in wide.cuh: a tile of ``m`` x ``n``, blocks of a cluster that share columns
    (``cluster``) or divide k (``split``), and stages that are filled before there are tensor maps (``head``)."""

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
        if self.split > 1:
            return tiles * self.split
        resident = 2 if self.m == 64 and self.n <= 128 and 2 * (self.shared + _RESERVED) <= _SHARED_PER_UNIT else 1
        return min(tiles, resident * units // self.cluster) * self.cluster


class Skinny(NamedTuple):
    """The template arguments of `Skinny` in skinny.cuh: ``m`` rows of x (padded), ``n`` of the weight a block."""

    m: int
    n: int
    warps: int
    depth: int
    stages: int
    split: int = 1

    @property
    def name(self) -> str:
        return f"skinny_{'_'.join(map(str, self))}"

    @property
    def threads(self) -> int:
        return self.warps * 32 + 128

    @property
    def shared(self) -> int:
        ring = self.stages * (self.n + self.m) * (self.depth * 2 + 16)
        return ring + self.n * self.m * 4 // self.split * (self.split - 1) + 16 * self.stages + 16

    def grid(self, n: int, units: int) -> int:
        tiles = -(-n // self.n)
        if self.split > 1:
            return tiles * self.split
        return min(tiles, units * max(1, _SHARED_PER_UNIT // (self.shared + _RESERVED)))


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
def _unit(form: Wide | Skinny, kind: str) -> Unit:
    stem = "wide" if isinstance(form, Wide) else "skinny"
    name = "_".join(["linear", stem, kind, *map(str, form)])
    product = _wgmma(form.n) if isinstance(form, Wide) else ""
    line = f"FERRYMAN_{stem.upper()}({name}, {', '.join(map(str, form))})\n"
    text = f"{_text('hopper.cuh')}{product}{_text(stem + '.cuh')}{line}"
    return Unit(name, text, (f"FERRYMAN_BF16={int(kind == 'bf16')}",), suffix="a", overlapping=True)


# Measured on one H200, bf16, against cuBLAS in the same process by graph replay over rotated weights of 250 MB
# (benchmarks/results/h200/linear.md):
# - up to 64 rows the weights' bytes are what counts. `Skinny` has no tensor maps to publish, but streams long weights
#   at 0.9 of `Wide`'s rate: ahead for one row of 1024 x 4096 (1.34 of cuBLAS's rate against 1.13) to 6144 x 4096 (0.96
#   against 0.94), for 8 rows of 1024 x 4096 (1.27 against 1.13) and 2048 x 2048 (0.90 against 0.85).
# - tiles of 64 columns as long as one wave of them covers the weight, else of 128; of 256 where a few tiles of 128
#   would be left for a last wave (17408 columns: the fastest of those tried).
# - 32 clusters of 4 at one block an SM took twice as long as at two (2048 x 2048: 0.60 of cuBLAS's rate against 0.82):
#   presumably they do not all fit, as a GPC's SMs are no multiple of 4. Hence _CROWDED.
# - beyond, the time of a tile's step of 64 in k relative to 128 x 256, and that of adding parts through the cluster.
_STEP = {(256, 2): 1.0, (256, 1): 1.03, (192, 1): 0.78, (128, 2): 0.5, (128, 1): 0.55, (64, 1): 0.33}
# In such steps: beginning and ending a tile; adding parts (10 and not 5: over 22 other shapes of 77 to 7,927 rows the
# forms chosen are 3.0% behind the best on average, before 6.4%; over the 22 of the first fit 0.2% with either).
_TILE, _SPLIT = 2.0, 10.0
_TALL = (
    Wide(128, 256, 4, 2), Wide(128, 256, 4), Wide(128, 192, 4), Wide(128, 128, 6, 2), Wide(128, 128, 6),
    Wide(128, 64, 8), Wide(128, 128, 6, split=2), Wide(128, 64, 8, split=2), Wide(128, 64, 8, split=4),
)  # fmt: skip
_LOW = {split: Wide(64, 64, 10, split=split) for split in (1, 2, 4)}
_LOW_PAIRED, _LOW_DEEP = Wide(64, 64, 5, split=4), Wide(64, 128, 8, split=4)  # the first: two blocks an SM
_LOW_LONG, _LOW_LONGER = Wide(64, 128, 8), Wide(64, 256, 5)
_CROWDED = 0.85  # of the SMs: what clusters of 4 can fill
_FEW = {split: Skinny(8, 64, 4, 256, 3, split) for split in (1, 2, 4)}
_ROWS_TOGETHER = 16  # rows of tiles whose blocks run together, for L2: 16 was ahead of 8 and 4 by 1-2% at 8192^3


def forms() -> list[Wide | Skinny]:
    """Every form that `choose` can return."""
    return [*_TALL, *_LOW.values(), _LOW_PAIRED, _LOW_DEEP, _LOW_LONG, _LOW_LONGER, *_FEW.values()]


_NAMED = {form.name: form for form in forms()}


def _split(tiles: int, k: int, depth: int, units: int) -> int:
    """Blocks to divide k among: 4, 2 or 1, as long as one wave holds them and each has ``depth`` elements of k."""
    return max(s for s in (1, 2, 4) if s == 1 or (tiles * s <= units and k >= depth * s))


def _waves(form: Wide, m: int, n: int, k: int, units: int) -> float:
    """How long a product takes with a tall form, in steps of a tile of 128 x 256."""
    tiles = -(-m // (form.m * form.cluster)) * form.cluster * -(-n // form.n) * form.split
    steps = -(-k // (_DEPTH * form.split)) * _STEP[form.n, form.cluster]
    return -(-tiles // units) * (steps + _TILE) + _SPLIT * (form.split > 1)


def _low(n: int, k: int, units: int) -> Wide:
    """For 64 rows or fewer, by how many tiles of the weight there are."""
    tiles = -(-n // 64)
    if k >= 2048 and 4 * tiles <= _CROWDED * units:
        return _LOW[4]
    if k >= 2048 and 4 * tiles <= 2 * _CROWDED * units:
        return _LOW_DEEP if k >= 8192 and 4 * -(-n // 128) <= _CROWDED * units else _LOW_PAIRED
    if tiles <= units:
        return _LOW[2 if k >= 1024 and 2 * tiles <= units else 1]
    left = -(-n // 128) % units
    return _LOW_LONGER if n > 128 * units and 0 < left < units // 3 else _LOW_LONG


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, units: int) -> Wide | Skinny:
    """The form for x (m, k) and weight (n, k) on a device of ``units`` SMs."""
    if k % 16 == 0 and m <= 8 and k <= 4096 and n * k <= (2**25 if m == 1 else 2**22):
        return _FEW[_split(-(-n // 64), k, 1024, units)]
    if m <= 64:
        return _low(n, k, units)
    usable = [f for f in _TALL if k >= 512 * f.split or f.split == 1]
    return min(usable, key=lambda form: _waves(form, m, n, k, units))


def _streaming(form: Wide | Skinny, n: int, k: int, units: int) -> float:
    """Microseconds of a form for 64 rows or fewer on an H200: a launch, the weight's bytes, those that an SM reads one
    wave after another, and the adding of parts. Fitted to 366 times of 100 shapes; error 10%, root mean square."""
    resident = max(1, _SHARED_PER_UNIT // (form.shared + _RESERVED))
    waves = -(-(-(-n // form.n) * form.split) // (units * resident))
    own = waves * resident * form.n * k * 2 / form.split
    parts = 0.4 * (form.split > 1) + 0.7 * (form.split > 2)
    return 4.7 + n * k * 2 / 4.2e6 * (1.07 if isinstance(form, Skinny) else 1.0) + own / 0.62e6 + parts


@functools.lru_cache(maxsize=4096)
def ranked(m: int, n: int, k: int, units: int) -> Mapping[Wide | Skinny, float]:
    """The forms that can serve a shape, with the time that each is expected to take, in one unit: first what `choose`
    takes, whose rules were measured, then the others by `_waves` or, up to 64 rows, by `_streaming`."""
    own = choose(m, n, k, units)
    if m > 64:
        times: dict[Wide | Skinny, float] = {
            f: _waves(f, m, n, k, units) for f in _TALL if k >= 512 * f.split or f.split == 1
        }
    else:
        low: list[Wide | Skinny] = [*_LOW.values(), _LOW_PAIRED, _LOW_DEEP, _LOW_LONG, _LOW_LONGER]
        low += _FEW.values() if m <= 8 and k % 16 == 0 else ()
        times = {f: _streaming(f, n, k, units) for f in low if k >= 512 * f.split or f in (own, _LOW[1], _FEW[1])}
    others = sorted((f for f in times if f != own), key=times.__getitem__)
    return {own: times[own], **{f: max(times[f], times[own]) for f in others}}


def _operand(x: Tensor) -> tuple[Tensor, int, int]:
    """(x, rows, elements from row to row) with rows that 16-byte copies can read; a copy of x where they cannot."""
    x, rows, stride = as_rows(x)
    if stride * x.element_size() % VECTOR_BYTES:
        return x.contiguous(), rows, x.shape[-1]
    if x.data_ptr() % VECTOR_BYTES:
        return x.clone(memory_format=torch.contiguous_format), rows, x.shape[-1]
    return x, rows, stride


def product(form: Wide | Skinny, x: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
    """`linear` by one form. Not empty; K and N multiples of 8, and for `Skinny` K one of 16 and at most its m rows."""
    n, k = weight.shape
    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    x, m, x_stride = _operand(x)
    weight, _, w_stride = _operand(weight)
    if bias is not None:
        bias, _, _ = _operand(bias)
    given: tuple[int, ...] = (x.data_ptr(), x_stride, weight.data_ptr(), w_stride, pointer(bias), y.data_ptr(), m, n, k)
    if isinstance(form, Wide):
        grid = form.grid(m, n, target.units)
        # tensor maps are made in the kernel, by every block for itself: a launch is its addresses and nothing else
        maps = torch.empty(grid * 3 * _MAP_BYTES, dtype=torch.uint8, device=x.device)
        given = (*given, maps.data_ptr(), _ROWS_TOGETHER)
    else:
        grid = form.grid(n, target.units)
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

"""Linear layers on Hopper in CUDA C++ (`hopper.cuh`, `wide.cuh`, `skinny.cuh`), and which form serves which shape."""

from __future__ import annotations

import functools
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
    """The template arguments of `Wide` in wide.cuh: a tile of ``m`` x ``n``, and blocks of a cluster that share columns
    (``cluster``) or divide k (``split``)."""

    m: int
    n: int
    stages: int
    cluster: int = 1
    split: int = 1

    @property
    def threads(self) -> int:
        return (self.m // 64 + 1) * 128

    @property
    def shared(self) -> int:
        staging = 2 * (self.m // 64) * 64 * 128
        return self.stages * (self.m + self.n) * _DEPTH * 2 + staging + 3 * _MAP_BYTES + 16 * (self.stages + 1) + 1024

    def grid(self, m: int, n: int, units: int) -> int:
        tiles = -(-m // (self.m * self.cluster)) * -(-n // self.n)
        if self.split > 1:
            return tiles * self.split
        resident = 2 if self.m == 64 and 2 * (self.shared + _RESERVED) <= _SHARED_PER_UNIT else 1
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
    def threads(self) -> int:
        return self.warps * 32 + 128

    @property
    def shared(self) -> int:
        ring = self.stages * (self.n + self.m) * (self.depth * 2 + 16)
        return max(ring, self.n * (self.m + 1) * 4 + 15) // 16 * 16 + 16 * self.stages

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
    return Unit(name, text, (f"FERRYMAN_BF16={int(kind == 'bf16')}",), suffix="a")

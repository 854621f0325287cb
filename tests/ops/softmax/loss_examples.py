"""Logits of every layout and value, with labels and what cross entropy gives of them in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ferryman.ops.softmax import definition
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import U32

IGNORED = -100


class Example:
    """``rows`` of ``n`` logits, ``pad`` elements apart, ``offset`` elements after the beginning of ``memory``.

    ``hostile``: NaN, infinities and labels out of range (7 rows at least). ``shift``: the logits' mean. ``peaks``: each
    row has one of 128, elsewhere than the row before: its log-sum-exp is 128 in any precision. ``gradients``: for a
    gradient of the loss of 1 and of ``scale``.
    """

    def __init__(
        self,
        rows: int,
        n: int,
        dtype: torch.dtype,
        offset: int = 0,
        pad: int = 0,
        smoothing: float = 0.0,
        hostile: bool = False,
        shift: float = 0.0,
        peaks: bool = False,
        device: str = "cpu",
    ) -> None:
        drawn = torch.Generator().manual_seed(rows * n + offset + pad)
        self.memory = torch.randn(rows * (n + pad) + offset, generator=drawn) * 3 + shift
        self.rows, self.n, self.offset, self.pad, self.smoothing = rows, n, offset, pad, smoothing
        if peaks:
            places = [row * (n // rows) + row % 8 for row in range(rows)]
            self.view(self.memory)[range(rows), places] = 128.0
        self.memory = self.memory.to(dtype)
        x = self.view(self.memory)
        self.labels = torch.randint(0, n, (rows,), generator=drawn)
        self.labels[-1] = n - 1
        if rows > 2:
            self.labels[1] = IGNORED
        if hostile:
            x[0, n // 2] = x[1, 0] = math.nan
            x[2], x[3, n - 1], x[5, : n - 1] = -math.inf, math.inf, -math.inf
            self.labels[4], self.labels[5], self.labels[6] = n, n - 1, -7
        self.memory, self.labels, self.scale = (t.to(device) for t in (self.memory, self.labels, torch.tensor(0.7)))
        wide = self.view(self.memory).double()
        self.loss, self.lse = definition._mean_loss(wide, self.labels, IGNORED, smoothing)
        self.gradients = [
            definition._loss_gradient(s, wide, self.labels, self.lse, IGNORED, smoothing)
            for s in (torch.ones_like(self.loss), self.scale.double())
        ]

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.offset :].view(self.rows, self.n + self.pad)[:, : self.n]

    def outside(self, memory: Tensor) -> Tensor:
        kept = torch.ones_like(memory, dtype=torch.bool)
        self.view(kept).fill_(False)
        return memory[kept].view(torch.uint8)


def close(got: Tensor, expected: Tensor, slack: float) -> bool:
    unit = 2.0**-20 if got.dtype == torch.float32 else UNIT[got.dtype]
    least = 2.0**-24 if got.dtype == torch.float16 else 0.0
    near = (got.double() - expected).abs() <= unit * expected.abs() + least + slack
    return bool((near | (got.isnan() & expected.isnan())).all())


def verify(e: Example, loss: Tensor, lse: Tensor) -> None:
    exact = (e.loss, e.lse)
    op = definition.cross_entropy_with_lse.primitive  # type: ignore[attr-defined]
    terms = op.limits.bound((e.view(e.memory).double(), e.labels, IGNORED, e.smoothing), exact)
    for got, wanted, allowed in zip((loss.double(), lse.double()), exact, terms, strict=True):
        room = U32 * (allowed["accumulate"] + wanted.abs()) + allowed.get("absolute", 0.0)
        near = ((got - wanted).abs() <= room) | (got == wanted) | (got.isnan() & wanted.isnan())
        assert bool(near.all()), (got, wanted)


EXAMPLES: dict[str, Callable[..., Example]] = {
    "odd": lambda d, where="cpu": Example(4, 257, d, device=where),
    "line": lambda d, where="cpu": Example(4, 4096, d, device=where),
    "offset": lambda d, where="cpu": Example(3, 4099, d, offset=3, device=where),
    "padded": lambda d, where="cpu": Example(3, 1000, d, pad=1, smoothing=0.1, device=where),
    "hostile": lambda d, where="cpu": Example(7, 5003, d, pad=5, smoothing=0.1, hostile=True, device=where),
    "peaks": lambda d, where="cpu": Example(16, 4100, d, shift=-20.0, peaks=True, device=where),
    "mean": lambda d, where="cpu": Example(3, 2000, d, shift=2.0, smoothing=0.1, device=where),
    "many": lambda d, where="cpu": Example(150, 3, d, device=where),
    "few": lambda d, where="cpu": Example(2, 5, d, offset=1, device=where),
    "single": lambda d, where="cpu": Example(9, 1, d, device=where),
    "hostile_few": lambda d, where="cpu": Example(7, 40, d, offset=1, hostile=True, device=where),
}

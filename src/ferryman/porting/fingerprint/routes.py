"""The vendor's matrix library, through PyTorch, as routes that the probes can ask; and the flags that they need.

A route multiplies (P, K) factors pairwise: row p of the left operand meets column p of the right one in a product of
128 x K x 128, whose diagonal is read. Shapes stay the same from call to call, so that the library keeps to one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.errors import CompileError
from ferryman.porting.fingerprint.formats import FORMATS, Format

TILE = 128
Product = Callable[[Tensor, Tensor], Tensor]
"""(TILE, K) and (TILE, K), in the format's dtype and on the device, to (TILE, TILE): the first times the second's
transpose."""


class Refused(Exception):
    """A route does not work on this device; the message says why."""


@contextmanager
def refusable(device: torch.device) -> Iterator[None]:
    """Turns a library's or a toolchain's refusal of a call into Refused. Running out of memory and losing the device
    are raised as they are."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, CompileError) as error:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a lost device raises here, whatever the first error said
        text = error.log if isinstance(error, CompileError) else str(error)
        lines = text.strip().splitlines() or [type(error).__name__]
        raise Refused(f"the route does not work here: {lines[0][:200]}") from error


@dataclass(frozen=True)
class Route:
    """One way to a matrix unit. ``precision`` is the float32 matmul precision to set meanwhile ("highest", "high")."""

    name: str
    form: Format
    result: torch.dtype
    device: torch.device
    product: Product
    precision: str = "highest"

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Sums of products of (P, K) float64 factors, each exact in the format."""
        rows = len(left)
        padded = -(-rows // TILE) * TILE
        sides = []
        for side, dtype in ((left, self.form.dtype), (right, self.form.right.dtype)):
            whole = functional.pad(side, (0, 0, 0, padded - rows))
            sides.append(whole.to(dtype).to(self.device))
        sums = []
        with matmul_precision(self.precision):
            for start in range(0, padded, TILE):
                with refusable(self.device):
                    tile = self.product(sides[0][start : start + TILE], sides[1][start : start + TILE])
                sums.append(tile.diagonal().clone())
        return torch.cat(sums)[:rows].double().cpu()


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """The float32 matmul precision inside the block, and no 16-bit partial sums; everything as before afterwards.

    torch keeps a legacy setting and one for each backend, and refuses to read the former when they disagree: all of
    them are put back, whatever the block does.
    """
    matmul = torch.backends.cuda.matmul
    mkldnn = getattr(torch.backends.mkldnn, "matmul", None)
    newer: list[Any] = [m for m in (matmul, mkldnn) if hasattr(m, "fp32_precision")]
    precisions = [m.fp32_precision for m in newer]
    try:
        legacy: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user mixed both ways of setting it
        legacy = None
    reduced = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    partial = {flag: _reduction(matmul, flag) for flag in reduced}
    try:
        torch.set_float32_matmul_precision(precision)
        for flag in reduced:
            setattr(matmul, flag, False)
        yield
    finally:
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for m, value in zip(newer, precisions, strict=True):
            m.fp32_precision = value
        for flag, value in partial.items():
            setattr(matmul, flag, value)


def _reduction(matmul: object, flag: str) -> object:
    """The flag as it must be set again: newer versions keep (allowed, split-K allowed), and give only the first."""
    both = getattr(torch._C, f"_get_cublas_{flag}", None)
    value = both() if both is not None else getattr(matmul, flag)
    return tuple(value) if isinstance(value, (tuple, list)) else value


def _plain(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right.t())


def _scaled(fast: bool) -> Product:
    def product(left: Tensor, right: Tensor) -> Tensor:
        one = torch.ones((), dtype=torch.float32, device=left.device)
        return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)

    return product


def torch_routes(device: torch.device) -> list[Route]:
    """Every floating-point route through torch that may exist; whether one works here, only a call tells."""
    routes = [
        Route("torch", FORMATS["float32"], torch.float32, device, _plain),
        Route("torch", FORMATS["tf32"], torch.float32, device, _plain, "high"),
        Route("torch", FORMATS["float16"], torch.float16, device, _plain),
        Route("torch", FORMATS["bfloat16"], torch.bfloat16, device, _plain),
    ]
    ways = (True, False) if device.type == "cuda" else (False,)  # a flag of cuBLASLt's: nothing else reads it
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        for fast in ways:
            label = f"torch{' fast' if fast else ''}"
            routes.append(Route(label, FORMATS[name], torch.float32, device, _scaled(fast)))
    return routes


def torch_integer(device: torch.device) -> Product:
    """int8 products through torch._int_mm."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        with refusable(device):
            return torch._int_mm(left.to(device), right.to(device).t())

    return product

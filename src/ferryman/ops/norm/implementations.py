"""Which implementations of the norms exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import (
    Clause,
    View,
    at_least,
    dtypes,
    feature,
    multiple_of,
    same_dtype,
    shared_memory,
    unit_stride,
)
from ferryman.ops.menu import Implementation, menu

_FORWARD = "rms_norm add_rms_norm layer_norm"
_ALL = f"{_FORWARD} rms_norm_backward add_rms_norm_backward layer_norm_backward"
WIDE_BYTES = 2**18  # of a row, at most: what `simt_backward_kernels` can hold
WIDE_SHARED_MEMORY = 232_448  # of a block, at least
_SIMT = tuple(
    line
    for backend in ("cuda", "hip")
    for line in (
        Implementation(
            op="rms_norm layer_norm", name=backend, where="simt_kernels", when=(unit_stride("x"),), replayable=True
        ),
        Implementation(
            op="add_rms_norm",
            name=backend,
            where="simt_kernels",
            when=(unit_stride("x"), unit_stride("residual")),
            replayable=True,
        ),
    )
)


def _row_bytes_at_most(arg: str, limit: int) -> Clause:
    def measure(view: View) -> int:
        x = view.args[arg]
        return int(x.shape[-1]) * int(x.element_size())

    return Clause(
        f"rows of {arg} of at most {limit} bytes",
        (f"{arg}.shape[-1]", f"{arg}.dtype"),
        measure,
        lambda size: size <= limit,
    )


def _wide_backward(op: str, x: str, *others: str) -> Implementation:
    """Up to 8192 columns Triton's kernel keeps the sums over rows in registers, too, and reads memory once."""
    width = f"{x}.shape[-1]"
    when = (
        feature("clusters"),
        shared_memory(WIDE_SHARED_MEMORY),
        dtypes(x, torch.float32, torch.float16, torch.bfloat16),
        at_least(width, 8193),
        multiple_of(width, 8),
        _row_bytes_at_most(x, WIDE_BYTES),
        unit_stride(x),
        *(clause for other in others for clause in (same_dtype(other, x), unit_stride(other))),
    )
    return Implementation(op=op, name="cuda", where="simt_backward_kernels", when=when, replayable=True, partial=True)


_BACKWARD = (
    _wide_backward("rms_norm_backward", "x", "grad"),
    _wide_backward("add_rms_norm_backward", "out_residual", "grad_y", "grad_residual"),
    _wide_backward("layer_norm_backward", "x", "grad"),
)

# Their residual forms have no C++ yet: Triton's kernels serve both vendors.
_PLAIN = f"{_ALL} add_layer_norm add_layer_norm_backward"

IMPLEMENTATIONS = menu(
    "ferryman.ops.norm",
    Implementation(op=_PLAIN, name="torch"),
    Implementation(op=_PLAIN, name="triton", replayable=True),
    *_SIMT,
    *_BACKWARD,
)

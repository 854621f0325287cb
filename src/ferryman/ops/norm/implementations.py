"""Which implementations of the norms exist, and under which conditions."""

from __future__ import annotations

from typing import Any

import torch

from ferryman.ops.clauses import (
    Clause,
    View,
    at_least,
    dtypes,
    feature,
    multiple_of,
    not_empty,
    row_in_registers,
    same_dtype,
    shared_memory,
    unit_stride,
)
from ferryman.ops.menu import Implementation, menu

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

# Wider rows leave no registers for the sums over rows: 16 elements a thread of five arrays.
_MOST_COLUMNS = 8192


def most_columns(op: str, itemsize: int) -> int:
    """Columns up to which a backward keeps the sums over rows beside its rows.

    A layer norm's with a sum keeps one array more: half as many in float32.
    """
    return _MOST_COLUMNS // 2 if op == "add_layer_norm_backward" and itemsize == 4 else _MOST_COLUMNS


def _sums_fit(op: str, x: str) -> Clause:
    """There is nothing to sum over rows, or registers hold it beside the rows."""
    weights = ("weight", "bias") if "layer" in op else ("weight",)

    def measure(view: View) -> tuple[int, int] | None:
        rows = view.args[x]
        if op == "add_layer_norm_backward" and view.args["grad_residual"] is None:
            limit = _MOST_COLUMNS
        else:
            limit = most_columns(op, rows.element_size())
        return None if all(view.args[w] is None for w in weights) else (int(rows.shape[-1]), limit)

    facts = (f"{x}.shape[-1]", f"{x}.dtype", *weights, *(("grad_residual",) if op == "add_layer_norm_backward" else ()))
    return Clause(
        "no weight or bias, or columns whose sums over rows fit registers beside a row (columns, the most)",
        facts,
        measure,
        lambda columns: columns is None or columns[0] <= columns[1],
    )


def _summed(op: str) -> Clause:
    weights = ("weight", "bias") if "layer" in op else ("weight",)
    return Clause(
        f"a gradient of {' or '.join(weights)}",
        weights,
        lambda view: any(view.args[w] is not None for w in weights),
        lambda wanted: wanted,
    )


def _triton(op: str, x: str, arrays: int) -> tuple[Implementation, ...]:
    """A forward's lines: rows that registers hold, and rows of any length in parts. A backward's also differ in where
    the gradients of weight and bias are summed: beside the rows, or in a pass over columns."""
    fits = row_in_registers(x, arrays)
    alike: dict[str, Any] = {"op": op, "replayable": True, "kin": "rows"}
    long = Implementation(name="triton.long", where="long_kernels", **alike)
    if not op.endswith("_backward"):
        tiles = "configurations_added" if arrays == 2 else "configurations"
        return (Implementation(name="triton.rows", when=(fits,), partial=True, configurations=tiles, **alike), long)
    when = (fits, _sums_fit(op, x))
    return (
        Implementation(name="triton.rows", where="backward_kernels", when=when, partial=True, **alike),
        Implementation(name="triton.columns", where="columns_kernels", when=(fits, _summed(op)), partial=True, **alike),
        long,
    )


_TRITON = (
    *_triton("rms_norm", "x", 1),
    *_triton("rms_norm_backward", "x", 2),
    *_triton("add_rms_norm", "x", 2),
    *_triton("add_rms_norm_backward", "out_residual", 2),
    *_triton("layer_norm", "x", 1),
    *_triton("layer_norm_backward", "x", 2),
    *_triton("add_layer_norm", "x", 2),
    *_triton("add_layer_norm_backward", "out_residual", 2),
)

# Their residual forms have no C++ yet: Triton's kernels serve both vendors.
_OTHERS = (
    "add_rms_norm rms_norm_backward add_rms_norm_backward layer_norm_backward add_layer_norm add_layer_norm_backward"
)
# PyTorch's gradient of a value that is rounded before the weight is rounded there, too.
_ONE_ROUNDING = Clause(
    "no weight, or not cast_before_weight",
    ("weight", "cast_before_weight"),
    lambda view: view.args["weight"] is not None and view.args["cast_before_weight"],
    lambda cast: not cast,
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.norm",
    Implementation(
        op="layer_norm", name="torch", differentiable="layer_norm_with_gradient", differentiable_when=(not_empty("x"),)
    ),
    Implementation(
        op="rms_norm", name="torch", differentiable="rms_norm", differentiable_when=(not_empty("x"), _ONE_ROUNDING)
    ),
    Implementation(op=_OTHERS, name="torch"),
    *_TRITON,
    *_SIMT,
    *_BACKWARD,
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "rms_norm": (
        "329136d982a7fe0133fcaa8f03443e23075e42c84e7afd1f1192d7be86b875af",
        ("ba3030ed30644fcc4839310b38e49d78df0036a2e0a47e8a8fea70d05ea030ee",),
    ),
    "rms_norm_backward": (
        "807a6b3ac4cd7692f3415022130e26133216b65c0fc68d02d366b110a07d0d10",
        (
            "47e006f313650d12e98c5cbd4061c8a27edb0001bfee476ef6dcb9f1080897d9",
            "1ec944948dbdace9b8252b44fbf6679de62db39a060206b0949b574c4ccf537c",
        ),
    ),
    "add_rms_norm": (
        "c747ee69008470a3b480cb57a93aebdf8721b1dbd68bcdc87086ff44c8e57a39",
        ("1b33be1181ee3f512aff843dc1ceed735650e267a060b69d75e71d6aee0895ef",),
    ),
    "add_rms_norm_backward": (
        "ea8a0566341564b9f2b8b27774364e19829a82d4e4823c8414f04700b24234f0",
        (
            "249a85f4056343e0640b87696e321e42364fae185b7308a1f5f786528bd6a347",
            "341c0d8e6f4de7a8eb41e8cce128c60ae67235d5612e0d008de17059c1a02fc3",
        ),
    ),
    "layer_norm": (
        "c446332c351b42daf2c5d0cb6b1a1589fe5f737d6888c849b6348cc3692369d2",
        ("58863171241a8383139ba1c083d61085734fe29b3881ba5703dcce07902e02b2",),
    ),
    "add_layer_norm": (
        "e64451747c70ed797dc33ea4b113b90b167b1bf863c28da7b00cc000f6ff24e8",
        ("9056688c5527199bfbc2d9223c0a7b84ff37e9e4bfba0df22c63c7ce4deee429",),
    ),
    "add_layer_norm_backward": (
        "36ac1f21ed5d0f2befa62b7d1114ef1829fe01c8b4f21abe9315f3b553a391b1",
        ("1b87d3f41818896ae272970383fd3123059e707172b00309f82ad79aff4f12a2",),
    ),
    "layer_norm_backward": (
        "c940df3f0f0b4f7734e76e20dd9f6df4b025992afe2de353e0bcd6ad0ad69133",
        (
            "d701d39596572c5a8665c47d4c36411e3901001e6bbc834d7dfb93bfd52d0257",
            "1b81854f06417c670c3205a43515308f0760637ddd13504f61fd4d6853dab071",
        ),
    ),
}

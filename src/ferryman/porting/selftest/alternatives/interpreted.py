"""The Triton kernels with other tiles: those of other devices, and edits that change no result."""

from __future__ import annotations

from typing import Any

from ferryman.porting.selftest.alternatives.common import Rights
from ferryman.porting.selftest.edits import Edit
from ferryman.porting.selftest.mutants.triton_attention import SPLIT_EARLY
from ferryman.porting.selftest.mutants.triton_pointwise import ACTIVATION, ROPE
from ferryman.porting.selftest.mutants.triton_softmax import NARROW_LOSS, SMALL_BLOCK

RIGHT = Rights()

# What a launcher reads of a device (units, shared memory, threads, the vendor's tables), without its name.
_DEVICES: dict[str, dict[str, Any]] = {
    "small_ampere": {"arch": "sm_86", "vendor": "nvidia", "wave": 32, "shared_memory": 101_376, "units": 16},
    "several_rows": {"vendor": "cpu", "units": 1},
    "few_threads": {"max_threads": 256, "units": 8},
}
_ROWS = "rms_norm rms_norm_backward add_rms_norm add_rms_norm_backward layer_norm layer_norm_backward softmax " \
        "softmax_backward cross_entropy cross_entropy_backward cross_entropy_inplace_grad " \
        "cross_entropy_inplace_grad_backward"  # fmt: skip
_TILES = "linear linear_backward attention attention_backward rope rope_ rope_backward silu_mul gelu_mul"
for _op in f"{_ROWS} {_TILES}".split():
    RIGHT.tiles(_op, "shipped", "the Triton implementation")
    RIGHT.tiles(_op, "small_ampere", "tiles for an sm_86 with 16 units", target=_DEVICES["small_ampere"])
for _op in _ROWS.split():
    RIGHT.tiles(_op, "several_rows", "several rows a program", target=_DEVICES["several_rows"])
    RIGHT.tiles(_op, "few_threads", "blocks of 256 threads: longer rows in chunks", target=_DEVICES["few_threads"])
for _op in ("softmax", "cross_entropy"):
    RIGHT.tiles(_op, "blocks_of_1024", "long rows 1024 elements at a time", (SMALL_BLOCK,), _DEVICES["few_threads"])
RIGHT.tiles("cross_entropy_backward", "tiles_of_64", "64 classes a tile", (NARROW_LOSS,))
RIGHT.tiles("cross_entropy_inplace_grad", "two_programs", "programs that take several long rows",
            target={"vendor": "nvidia", "max_threads": 256, "units": 1, "l2_bytes": 1 << 20})  # fmt: skip
RIGHT.tiles("attention", "splits_of_16_keys", "decoding splits from 16 keys on", (SPLIT_EARLY,))
for _op in ("silu_mul", "gelu_mul", "silu_mul_backward", "gelu_mul_backward"):
    RIGHT.tiles(_op, "tiles_of_256", "256 elements a program",
                (Edit(ACTIVATION, "TILE, WARPS = 1024, 4", "TILE, WARPS = 256, 4"),))  # fmt: skip
for _op in ("rope", "rope_", "rope_backward"):
    RIGHT.tiles(
        _op, "four_heads_a_program", "four heads a program", (Edit(ROPE, "        heads = 8\n", "        heads = 4\n"),)
    )

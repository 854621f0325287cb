"""Tile sizes and compiler options of attention's Triton kernels, by target, dtype and head_dim."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ferryman.backends.base import Target


@dataclass(frozen=True)
class Config:
    """Tile sizes and compiler options of one kernel on one target. ``options`` are AMD's own (waves_per_eu, ..)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    options: dict[str, Any] = field(default_factory=dict)


def _block_d(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _family(target: Target) -> str:
    """Which table of tiles serves ``target``: by vendor first, then by what one block may hold in shared memory."""
    if target.vendor == "amd":
        if target.wave == 32:
            return "rdna"
        return "cdna-160k" if target.shared_memory >= 160 * 1024 else "cdna-64k"
    if target.vendor == "nvidia":
        if target.arch in ("sm_100", "sm_103"):
            return "nvidia-tmem"
        if target.shared_memory >= 227 * 1024:
            return "nvidia-227k"
        return "nvidia-160k" if target.shared_memory >= 160 * 1024 else "nvidia-99k"
    return "cpu"


# Two waves per SIMD halves the registers a wave may take (512 to 256): forward still fits, and latency is hidden.
_TWO_WAVES = {"waves_per_eu": 2}
# The 16x16 matrix instruction keeps fewer accumulators alive than 32x32: dK/dV at D128 took 284 instead of 354 VGPRs.
_SMALL_MFMA = {"matrix_instr_nonkdim": 16}
_SMALL_TWO_WAVES = {**_SMALL_MFMA, **_TWO_WAVES}

# (forward, dq, dkv, then the same for masks and softcap) by family and padded head_dim, 16-bit inputs. Each is the
# largest tile that compiled without spills, or with the fewest (tests/ops/attention/test_triton_attention.py).
_Tiles = tuple[tuple[Any, ...], ...]
_AMPERE: dict[int, _Tiles] = {
    64: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
    128: ((128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 1), (32, 128, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    256: ((64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 1), (64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 1)),
}
# One stage loads through registers, without cp.async: only where two spill. dK/dV takes few queries at a time: 64 hold
# lse and delta in 32 registers instead of 16.
_HOPPER: dict[int, _Tiles] = {
    64: ((128, 128, 8, 3), (128, 64, 8, 2), (32, 128, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
    128: ((128, 128, 8, 3), (128, 64, 8, 2), (32, 64, 8, 1), (32, 128, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
    256: ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1), (64, 32, 8, 2), (128, 16, 8, 2), (16, 32, 8, 1)),
}
# Accumulators in tensor memory, whose 512 columns Triton 3.6 does not check when compiling: beyond, the image is a trap
# (dK/dV causal D256 at 32x64: 544). 32 keys are below the least that tcgen05 takes, and use mma.sync.
_BLACKWELL: dict[int, _Tiles] = {
    64: ((128, 128, 8, 3), (128, 64, 8, 2), (32, 64, 8, 1), (128, 64, 8, 3), (128, 32, 8, 2), (32, 32, 8, 2)),
    128: ((128, 128, 8, 2), (128, 64, 8, 2), (32, 64, 8, 1), (128, 64, 8, 2), (128, 32, 8, 2), (32, 32, 8, 2)),
    256: ((128, 64, 8, 2), (64, 32, 8, 2), (16, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (16, 32, 8, 2)),
}
_CDNA: dict[int, _Tiles] = {
    64: (
        (128, 64, 4, 1, _TWO_WAVES),
        (128, 64, 4, 1),
        (64, 64, 4, 1, _SMALL_MFMA),
        (128, 32, 8, 1, _SMALL_TWO_WAVES),
        (128, 32, 8, 1, _SMALL_TWO_WAVES),
        (32, 64, 8, 1, _SMALL_MFMA),
    ),
    128: (
        (128, 64, 8, 1, _SMALL_MFMA),
        (64, 64, 4, 1),
        (32, 64, 4, 1, _SMALL_MFMA),
        (128, 32, 8, 1, _SMALL_TWO_WAVES),
        (64, 32, 8, 1, _SMALL_MFMA),
        (32, 64, 8, 1, _SMALL_MFMA),
    ),
    256: (
        (128, 32, 8, 1),
        (32, 32, 4, 1),
        (16, 64, 8, 1),
        (64, 32, 8, 1, _SMALL_MFMA),
        (64, 16, 8, 1, _SMALL_TWO_WAVES),
        (16, 64, 4, 1, _SMALL_MFMA),
    ),
}
_HALF: dict[str, dict[int, _Tiles]] = {
    "nvidia-227k": _HOPPER,
    "nvidia-tmem": _BLACKWELL,
    "nvidia-160k": _AMPERE,
    "nvidia-99k": {**_AMPERE, 128: ((128, 64, 8, 2), *_AMPERE[128][1:])},
    "cdna-160k": _CDNA,
    "cdna-64k": _CDNA,
    # RDNA3's matrix instruction wants both operands twice in registers: the backward spills at any tile from D128 on
    "rdna": {
        64: ((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
        128: ((64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1)),
        256: ((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1)),
    },
    "cpu": dict.fromkeys((64, 128, 256), ((32, 32, 4, 1),) * 3),
}
# float32: NVIDIA multiplies exactly ("ieee") on the FMA units, from registers; AMD has fp32 matrix units.
_FLOAT: dict[str, dict[int, _Tiles]] = {
    "nvidia": {
        64: ((64, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
        128: ((64, 16, 16, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
        256: ((32, 16, 8, 1), (16, 16, 16, 2), (16, 16, 8, 1)),
    },
    "nvidia-227k": {
        64: ((64, 32, 8, 1), (32, 32, 8, 1), (16, 64, 8, 1)),
        128: ((64, 16, 16, 2), (32, 16, 16, 3), (16, 16, 8, 1)),
        256: ((32, 16, 8, 1), (16, 16, 16, 2), (16, 16, 8, 1)),
    },
    "cdna": {
        64: ((64, 32, 4, 1, _SMALL_MFMA), (64, 32, 4, 1, _SMALL_MFMA), (32, 32, 4, 1, _SMALL_MFMA)),
        128: ((64, 32, 4, 1, _SMALL_MFMA), (64, 16, 4, 1, _SMALL_MFMA), (32, 32, 4, 1, _SMALL_MFMA)),
        256: ((32, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
    # dQ at D256: only two waves of it spill in none of their forms on gfx950
    "cdna-160k": {
        64: ((64, 32, 4, 1, _SMALL_MFMA), (64, 32, 4, 1, _SMALL_MFMA), (32, 32, 4, 1, _SMALL_MFMA)),
        128: ((64, 32, 4, 1, _SMALL_MFMA), (64, 16, 4, 1, _SMALL_MFMA), (32, 32, 4, 1, _SMALL_MFMA)),
        256: ((32, 16, 4, 1), (32, 16, 2, 1, _SMALL_MFMA), (16, 16, 4, 1)),
    },
    "rdna": {
        64: ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
        128: ((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        256: ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    },
    "cpu": _HALF["cpu"],
}


# What these configurations spill at most (`ferryman compile` fails more): bytes a thread on NVIDIA, registers on AMD;
# of forward, dQ, dK/dV, in 16 bits and in float32. sm_80, gfx942 and gfx950 spill nothing.
_SPILLS_ALLOWED: dict[str, dict[str, tuple[int, int, int]]] = {
    "nvidia-tmem": {"half": (1080, 16, 32), "float": (32, 16, 40)},
    "nvidia-99k": {"half": (0, 0, 0), "float": (24, 16, 40)},
    "sm_87": {"half": (0, 0, 0), "float": (24, 16, 40)},
    "sm_90": {"half": (0, 0, 0), "float": (0, 24, 0)},  # of 256 columns
    "gfx90a": {"half": (2, 2, 1), "float": (0, 5, 5)},  # of dQ, and of dK/dV with dropout, scalar ones
    "rdna": {"half": (295, 469, 420), "float": (626, 967, 872)},  # no smaller tiles were looked for
}


def _spills_allowed(target: Target, dtype: torch.dtype, kernel: str) -> int:
    by_kind = _SPILLS_ALLOWED.get(target.arch) or _SPILLS_ALLOWED.get(_family(target))
    if by_kind is None:
        return 0
    allowed = by_kind["float" if dtype == torch.float32 else "half"]
    kernels = ("attention_forward", "attention_backward_dq", "attention_backward_dkv")
    return dict(zip(kernels, allowed, strict=True)).get(kernel, 0)


@functools.cache
def _config(target: Target, dtype: torch.dtype, head_dim: int, kernel: str, rich: bool) -> Config:
    """``kernel`` is "forward", "dq" or "dkv". ``rich``: `_is_rich`.

    So does a head_dim below its tile (80, 96): there the loads carry masks.
    """
    family = _family(target)
    by_dim = _HALF[family] if dtype != torch.float32 else _FLOAT.get(family) or _FLOAT[family.split("-")[0]]
    padded = max(64, _block_d(head_dim))
    which = ("forward", "dq", "dkv").index(kernel) + (3 if rich or head_dim < padded else 0)
    tiles = by_dim[padded]
    return Config(*tiles[which % len(tiles)])


# dK/dV with dropout, whose words take registers, where the tiles above spill: by arch and padded head_dim, in 16 bits
# (NVIDIA's below) and in float32.
_DROPOUT_HALF: dict[str, dict[int, tuple[Any, ...]]] = {
    "gfx90a": {64: (32, 32, 8, 1, _SMALL_MFMA), 128: (32, 32, 8, 1, _SMALL_MFMA)},
    "gfx950": {256: (16, 32, 4, 1, _SMALL_MFMA)},
}
_DROPOUT_FLOAT: dict[str, dict[int, tuple[Any, ...]]] = {
    "sm_80": {128: (16, 16, 8, 2)},
    "sm_87": {64: (16, 32, 4, 1)},
    "sm_89": {64: (16, 32, 4, 1)},
    "sm_90": {64: (16, 32, 8, 1), 256: (16, 16, 16, 1)},
    "gfx90a": {128: (16, 32, 4, 1, _SMALL_MFMA)},
}


def _with_dropout(config: Config, target: Target, dtype: torch.dtype, head_dim: int) -> Config:
    """The configuration of dK/dV with dropout, from that without."""
    tables = _DROPOUT_FLOAT if dtype == torch.float32 else _DROPOUT_HALF
    tiles = tables.get(target.arch, {}).get(max(64, _block_d(head_dim)))
    if tiles is not None:
        return Config(*tiles)
    few = dtype != torch.float32 and _family(target) in ("nvidia-160k", "nvidia-99k", "nvidia-tmem")
    return replace(config, block_m=min(config.block_m, 32)) if few else config


@functools.cache
def _decode_config(target: Target, dtype: torch.dtype, head_dim: int) -> Config:
    """Few query rows: a 16-row tile (the least that a matrix unit takes), bound by the reading of K and V."""
    family, block_d = _family(target), max(64, _block_d(head_dim))
    if family == "cpu":
        return Config(16, 32, 4, 1)
    if dtype == torch.float32 and target.vendor == "nvidia":
        return Config(16, 32, 8, 1) if block_d <= 128 else Config(16, 16, 8, 3 if family == "nvidia-227k" else 1)
    if dtype == torch.float32:
        return Config(16, 32 if block_d <= 128 else 16, 4, 1)
    n = 64 if block_d <= 128 else 32
    if family == "rdna":
        n //= 2  # 64 keys at D128: 540 bytes of scratch
    if target.vendor == "amd":
        return Config(16, n, 4, 1, {} if family == "rdna" else _SMALL_TWO_WAVES)
    return Config(16, n, 4, 3 if family != "nvidia-99k" or block_d <= 64 else 2)

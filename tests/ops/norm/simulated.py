"""Calls on simulated AMD devices which no case of the parity check makes: tests/parity/test_simulated.py runs them."""

from __future__ import annotations

_LONG = [(line, n) for n in (40_000, 70_001) for line in ("triton.long", "hip")]
TILES = {
    "rms_norm": [(line, "bfloat16", [[3, n], [n]], [1e-6, False], None) for line, n in _LONG],
    "layer_norm": [(line, "bfloat16", [[3, n], [n], [n]], [1e-5], None) for line, n in _LONG],
}
SMALL = {"rms_norm": ("triton.rows", [[7, 333], [333]], [1e-6, False])}  # its line, beside HIP's
RELEASES = {"rms_norm": ("triton.rows", "bfloat16", *SMALL["rms_norm"][1:])}

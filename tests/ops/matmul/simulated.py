"""Calls on simulated AMD devices which no case of the parity check makes: tests/parity/test_simulated.py runs them."""

from __future__ import annotations

# Small shapes take small tiles: fewer units make the launcher take the large ones, with ragged edges.
_SIZES = [
    (520, 300, 200, 1),
    (300, 200, 264, 2),
    (150, 140, 136, 4),
    (70, 90, 320, 4),
    (9, 70, 520, 4),
    (520, 300, 203, 1),
]
TILES = {
    "linear": [
        ("triton", dtype, [[m, k], [n, k], None], [], units)
        for dtype in ("bfloat16", "float16", "float32")
        for m, n, k, units in _SIZES
    ]
}
RELEASES = {"linear": ("triton", "bfloat16", [[70, 96], [50, 96], None], [])}

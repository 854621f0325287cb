"""Calls on simulated AMD devices which no case of the parity check makes: tests/parity/test_simulated.py runs them."""

from __future__ import annotations

_OPTIONS = [None, None, 0.0, None, None, None, None, 0.0, None]
TILES = {
    "attention": [
        ("triton.tiled", dtype, [[1, 4, s, h], [1, 2, s, h], [1, 2, s, h]], [causal, *_OPTIONS], None)
        for dtype, s, h, causal in (
            ("bfloat16", 300, 64, True),
            ("float16", 300, 128, True),
            ("bfloat16", 200, 256, False),
            ("float32", 260, 64, True),
        )
    ]
}
RELEASES = {"attention": ("triton.tiled", "float16", [[1, 2, 70, 64]] * 3, [True, *_OPTIONS])}

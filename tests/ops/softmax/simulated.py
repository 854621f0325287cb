"""Calls on simulated AMD devices which no case of the parity check makes: tests/parity/test_simulated.py runs them."""

from __future__ import annotations

_LONG = [(line, n) for n in (40_000, 70_001) for line in ("triton.long", "hip")]
TILES = {"softmax": [(line, "bfloat16", [[3, n]], [], None) for line, n in _LONG]}
SMALL: dict[str, tuple[str, list[list[int]], list[object]]] = {"softmax": ("triton.rows", [[7, 333]], [])}
RELEASES = {"softmax": ("triton.rows", "float32", *SMALL["softmax"][1:])}

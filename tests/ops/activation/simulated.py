"""Calls on simulated AMD devices which no case of the parity check makes: tests/parity/test_simulated.py runs them."""

from __future__ import annotations

SMALL: dict[str, tuple[str, list[list[int]], list[object]]] = {"silu_mul": ("triton", [[7, 333], [7, 333]], [])}

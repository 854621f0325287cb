"""Shapes that a user writes: "8,4096"."""

from __future__ import annotations

import math

from ferryman.errors import ArgumentError

MOST = 2**40  # elements of one tensor: more than any device holds, and PyTorch counts no more than 2**63 bytes


def shape_of(verb: str, argument: str, text: str, example: str) -> tuple[int, ...]:
    """A shape from "8,4096" or "8x4096". Raises ArgumentError."""
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ArgumentError(verb, argument, repr(text), f"sizes separated by commas, such as {example}") from None
    if any(n < 0 for n in shape):
        raise ArgumentError(verb, argument, repr(text), "sizes that are not negative")
    must_fit(verb, argument, shape)
    return shape


def must_fit(verb: str, argument: str, shape: tuple[int, ...]) -> None:
    """Raises ArgumentError for a shape with more elements than any tensor has, or a size that long."""
    if max((*shape, math.prod(shape))) > MOST:
        raise ArgumentError(verb, argument, shape, f"sizes of {MOST} at most, and as many elements in all")

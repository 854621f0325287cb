"""What a gated norm looks like in models: a leaf module with one vector that takes two tensors."""

from __future__ import annotations

from collections.abc import Iterator

from ferryman.ops.norm.recognise import eps_of
from ferryman.ops.recognition import Candidate, Leaf


def modules(leaf: Leaf) -> Iterator[Candidate]:
    """The gate before or after, of silu or sigmoid; over all columns or groups, whose size or number it holds."""
    if leaf.inputs != 2 or leaf.wholes or len(leaf.lines) != 1:
        return
    ((weight, (width, plain)),) = leaf.lines.items()
    for eps in eps_of(leaf):
        for size in _groups(leaf, plain, width):
            for activation in ("silu", "sigmoid"):
                for first in (False, True):
                    for cast in (True, False):
                        rest = f"{plain}, {eps}, {size}, {first}, {cast}, {activation!r}"
                        yield Candidate(
                            "gated_rms_norm", f"ops.gated_rms_norm(x, gate, {rest})", width, (weight,), gate=True
                        )


def _groups(leaf: Leaf, plain: str, width: int) -> Iterator[str]:
    yield "None"
    for name, value in leaf.integers.items():
        if 1 <= value <= width and width % value == 0:
            if value < width:
                yield f"self.{name}"
            if value > 1:
                yield f"{plain}.shape[0] // self.{name}"

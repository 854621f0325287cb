"""Calls that reach the configurations of an A100's kernels which no case of the parity check reaches: widths, tiles,
head dimensions. With them every tile that `ferryman compile --target a100` builds is executed (test_stand_in.py). Those
of a family stand in `tests/ops/FAMILY/tiles.py`.
"""

from __future__ import annotations

import dataclasses

from ferryman.dispatch import registry
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.inputs.cases import output_gradients
from tests import families


def case(*words: object, **args: object) -> Case:
    return Case(" ".join(map(str, words)), args, tier="standard")


def named(op: str, *names: str) -> tuple[Case, ...]:
    """As the op's own evidence makes cases of sizes."""
    sized = registry.evidence(registry.primitive(op)).named
    assert sized is not None
    return tuple(dataclasses.replace(sized(name), tier="standard") for name in names)


def of_backward(op: Primitive, given: Case) -> Case:
    """A forward's case for its backward: all gradients there are, of every output."""
    backward = registry.primitive(str(op.gradient.backward))
    needs = {n: given.args.get(n.removeprefix("need_")) is not None for n in backward.names if n.startswith("need_")}
    optional = [n for n in output_gradients(backward, op) if backward.types[n] == "Tensor?"]
    return dataclasses.replace(given, args={**given.args, **needs, **dict.fromkeys(optional, True)})


def tiles() -> dict[str, tuple[Case, ...]]:
    """By op, of all families."""
    return families.table("tiles", "TILES")

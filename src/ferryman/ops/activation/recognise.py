"""Gated activations in models: ``activation(gate) * up``; and what the activations are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from torch import fx
from torch.nn import functional

from ferryman.ops.recognition import Candidate, Gate, Leaf

_WIDTH = 104  # no number that code is likely to name


def gates() -> Iterator[Gate]:
    yield Gate("silu_mul", functional.silu)
    yield Gate("gelu_mul", functools.partial(functional.gelu, approximate="tanh"), ("tanh",))
    yield Gate("gelu_mul", functional.gelu, ("none",))


def modules(leaf: Leaf) -> Iterator[Candidate]:
    """What takes the gate and the other factor, in either order."""
    if leaf.inputs != 2 or leaf.lines or leaf.matrices or leaf.scalars:
        return
    for gate in gates():
        extra = "".join(f", {value!r}" for value in gate.extra)
        yield Candidate(gate.op, f"ops.{gate.op}(gate, x{extra})", _WIDTH, gate=True)
        yield Candidate(gate.op, f"ops.{gate.op}(x, gate{extra})", _WIDTH, gate=True)


def _silu_term(n: Any, node: fx.Node, x: Any, inplace: bool = False) -> Any:
    if inplace:
        return None
    g = n.of(x)
    return n.pool.product_of(1.0, [(g, Fraction(1)), (n.pool.call("sigmoid", (), g), Fraction(1))])


def _gelu_term(n: Any, node: fx.Node, x: Any, approximate: str = "none") -> Any:
    g, pool = n.of(x), n.pool
    if approximate == "none":
        inner = pool.call("erf", (), pool.scaled(0.5**0.5, g))
    else:
        cubed = pool.product_of(1.0, [(g, Fraction(3))])
        polynomial = pool.total(0.0, [(g, 1.0), (cubed, 0.044715)])
        inner = pool.call("tanh", (), pool.scaled(math.sqrt(2 / math.pi), polynomial))
    return pool.product_of(0.5, [(g, Fraction(1)), (pool.total(1.0, [(inner, 1.0)]), Fraction(1))])


def rules() -> Mapping[str, Callable[..., Any]]:
    return {"silu": _silu_term, "gelu": _gelu_term}

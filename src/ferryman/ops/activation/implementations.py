"""Which implementations of the gated activations exist, and under which conditions."""

from __future__ import annotations

from typing import Any

from ferryman.ops.clauses import Clause, View, unit_stride, unless
from ferryman.ops.menu import Implementation, menu

_FORWARD = "silu_mul gelu_mul"
_BACKWARD = "silu_mul_backward gelu_mul_backward"
# Of a gradient nothing is asked: autograd makes it (of a sum it is expanded), and the launcher copies it if need be.
_PLAIN = (unit_stride("gate"), unit_stride("up"))


def _flat(*tensors: str) -> Clause:
    """Their elements lie in one order without gaps, or there is one row, which the launcher copies if need be."""

    def measure(view: View) -> bool:
        given = [view.args[tensor] for tensor in tensors]
        one_row = given[0].dim() == 0 or given[0].numel() == given[0].shape[-1]
        return one_row or all(x.is_contiguous() for x in given)

    facts = (*(f"{tensor}.stride" for tensor in tensors), "gate.shape")
    return Clause(f"{', '.join(tensors)} without gaps, or one row", facts, measure, lambda flat: flat)


def _simt(op: str, backend: str, *tensors: str) -> tuple[Implementation, ...]:
    """Elements in one order need no rows: another kernel of the same source. The launcher goes by the same rule."""
    flat = _flat(*tensors)
    alike: dict[str, Any] = {"op": op, "where": "simt_kernels", "replayable": True}
    return (
        Implementation(name=f"{backend}.flat", when=(*_PLAIN, flat), partial=True, **alike),
        Implementation(name=f"{backend}.rows", when=(*_PLAIN, unless(flat)), **alike),
    )


IMPLEMENTATIONS = menu(
    "ferryman.ops.activation",
    Implementation(op=_FORWARD, name="torch", roundings=("activation",)),
    Implementation(op=_BACKWARD, name="torch"),
    Implementation(op=f"{_FORWARD} {_BACKWARD}", name="triton", batch_invariant=True, replayable=True),
    *_simt(_FORWARD, "cuda", "gate", "up"),
    *_simt(_BACKWARD, "cuda", "grad", "gate", "up"),
    *_simt(_FORWARD, "hip", "gate", "up"),
    *_simt(_BACKWARD, "hip", "grad", "gate", "up"),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "gelu_mul": (
        "e31ce76f15386a16e302c9fab210e7e00d3187c5c99edce877c5629591a89eaa",
        ("10532f4876d15b9bdbe2685b1298ff7a174e195417d598248a11a836a531e17c",),
    ),
    "gelu_mul_backward": (
        "85380a8d6a52d8697ead6534200cd724e8efa1d4a7b211be755b8dc503a7f55f",
        ("6def66af752a1ee45cb93157f4a2601e99f50b71c52b0ed387b2463e072d0dfb",),
    ),
    "silu_mul": (
        "6abbcbf67ed7ced50727280a4f7ee089abf373760e2b6d972df1a5b2d111bf0d",
        ("ede27850b29984faee1bd2124339a9989044b6f42ba96a35dbcb41d7efa81ad9",),
    ),
    "silu_mul_backward": (
        "5268dd5432ef83f68566411891d796f2d29a93094d3866b49d1bb532f332b738",
        ("28ca88248ed8fda1a6e92b0f9853fd3215e8675bc7c85341ae5242a4bcad4922",),
    ),
}

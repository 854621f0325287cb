"""What a module computes whose result its parent cuts to its input's length, such as a causal convolution.

The module itself gives more than is kept, so it has no role of its own: the parent's code, where it says
``self.child(x)[..., :n]``, gets the op instead, wherever n is the length of x.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ferryman import ops
from ferryman.dispatch.proposals import proposals
from ferryman.errors import ArgumentError
from ferryman.ops import recognition
from ferryman.ops.recognition import Definitions, compiled
from ferryman.porting.model import recognise, source
from ferryman.porting.model.branches import follow_module
from ferryman.porting.model.leaf import class_code, inputs_of, keep_state, state_of
from ferryman.porting.model.proof import Proof, drawn, prove
from ferryman.porting.model.trace import Trace, Unproven

_DEFINITIONS = Definitions()
_MOST = 1 << 20  # elements of the largest input that a proof draws


@dataclass(frozen=True)
class Shown:
    """A proven meaning of modules of class ``kind`` in the state of the one that was proven: its attributes (but for
    long sides, which its tensors have), the shapes of its parameters, None where one is absent, and what its class's
    forward comes to."""

    op: str
    expression: str
    guard: str
    kind: type
    proof: Proof
    state: tuple[tuple[str, Any], ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...] | None], ...] = ()
    code: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.expression, self.guard, self.kind))

    def still(self, module: Any) -> bool:
        """Whether a module is in that state, and a call of it would run its class's forward and nothing around it."""
        own, parameters = module.__dict__, module._parameters
        return (
            source.untouched(module)
            and type(module) is self.kind
            and all(own.get(name) == value for name, value in self.state)
            and all(_shape_of(parameters.get(name)) == shape for name, shape in self.shapes)
        )


def _shape_of(tensor: Any) -> Any:
    return None if tensor is None else tensor.shape


_shown: dict[tuple[Any, ...], Shown | None] = {}


def shown_of(module: nn.Module) -> Shown | None:
    """What a module's cut result is proven to be; None for most."""
    weights = {n: p for n, p in [*module._parameters.items(), *module._buffers.items()] if p is not None}
    if next(module.children(), None) is not None or not any(p.dim() == 3 for p in weights.values()):
        return None
    if "forward" in module.__dict__ or not all(p.is_floating_point() for p in weights.values()):
        return None
    key = state_of(module)
    if key not in _shown:
        _shown[key] = _shown_of(module, {n: tuple(p.shape) for n, p in weights.items()})
        keep_state(module)
    return _shown[key]


def _shown_of(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> Shown | None:
    candidates = proposals("cuts", shapes)
    if not candidates or len(inputs_of(type(module))) != 1:
        return None
    trace = Trace()
    try:
        followed = follow_module(module, trace)
    except Unproven:
        return None
    for cut in candidates:
        if max(b * c * n for b, c, n in cut.shapes) > _MOST:
            continue
        for test in trace.tests:
            test.seen.clear()
        proof = _prove(module, followed, shapes, cut)
        if not proof.ok:
            continue
        try:
            guards = trace.guards()
        except Unproven:
            continue
        # tests of the module's own state, which the key holds, and of what the guard says of x
        if all(not _reads(text, inputs_of(type(module))) for text, _ in guards):
            own = dict(state_of(module)[1])
            state = tuple((n, v) for n, v in own.items() if v is vars(module).get(n) or v == vars(module).get(n))
            sides = tuple((n, None if p is None else tuple(p.shape)) for n, p in module._parameters.items())
            code = class_code(type(module))
            return Shown(cut.op, cut.expression, cut.guard, type(module), proof, state, sides, code)
    return None


def _reads(text: str, names: tuple[str, ...]) -> bool:
    return bool(set(names) & set(compile(text, "<guard>", "eval").co_names))


def _prove(module: nn.Module, followed: Any, shapes: dict[str, tuple[int, ...]], cut: recognition.Cut) -> Proof:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes.values()]
    inputs = [(x, *tensors) for _, x in drawn(*cut.shapes[0])]
    inputs += [(torch.randn(s, generator=generator, dtype=torch.float64), *tensors) for s in cut.shapes[1:]]
    state = dict(module.__dict__)
    expression = compiled(cut.expression, ("self", "x"), ops=_DEFINITIONS)
    proof = Proof(False)
    for training in (False, True):
        proof = prove(
            functools.partial(_cut, followed, state, tuple(shapes), training),
            lambda x, *given: expression(types.SimpleNamespace(**dict(zip(shapes, given, strict=True))), x),
            inputs,
        )
        if not proof.ok:
            break
    return proof


def _cut(kind: Any, state: dict[str, Any], names: tuple[str, ...], training: bool, x: Tensor, *given: Tensor) -> Any:
    return recognise.original(kind, state, names, training, x, *given)[..., : x.shape[-1]]


@functools.cache
def replacement(shown: Shown) -> Callable[[Any, Any, Any], Any]:
    """``(module, x, n)`` to ``module(x)[..., :n]``."""
    expression = compiled(shown.expression, ("self", "x"), ops=ops)
    guard = compiled(shown.guard, ("self", "x"))
    current = source.current(shown.kind, shown.code)

    def cut(module: Any, x: Any, n: Any) -> Any:
        under = x.is_meta or torch.is_autocast_enabled(x.device.type)  # which convolves in another dtype
        if n == x.shape[-1] and not under and shown.still(module) and current() and guard(module, x):
            try:
                return expression(module, x)
            except ArgumentError:  # of a tensor that came later
                pass
        return module(x)[..., :n]

    return cut

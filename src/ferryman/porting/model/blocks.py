"""What a module with tensors that is no leaf of one result computes, such as experts or a router, shown by proof.

Two proofs in one. In float64 the code that its class writes down is followed, branch by branch. In storage dtypes the
module is run as a caller gets it: a decorator around that code may hand calls to another implementation of it, if it
reads a registry of such implementations that is known here.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ferryman import ops
from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Block, Definitions, Layer, compiled
from ferryman.porting.model import activations, casting, recognise, source, ties
from ferryman.porting.model.block_runs import Runs, shape_of, tried
from ferryman.porting.model.branches import follow_module
from ferryman.porting.model.distance import flat
from ferryman.porting.model.leaf import class_code, digest_of, inputs_of, keep_state, names_reached, state_of
from ferryman.porting.model.proof import STORAGE, Proof, prove
from ferryman.porting.model.recognise import Refusal, Role
from ferryman.porting.model.trace import Read, Trace, Unproven

registries: dict[int, Any] = {}  # id -> a library's registry of implementations of a decorated forward
# Float32 sums of at most 8192 products of rounded numbers differ by less; another computation by more.
_CLOSE = 2.0**-10
PART = "ferryman_part"  # of a part of several values, which may be a block without tensors
ORDERED = "ordered"  # of one whose values are in the order of its products
_NARROW_SEEDS = 3
_ROWS = 8192  # rows that a number in the code may mean, and are tried
_LONG = 513  # rows that are tried, whatever it names
_roles: dict[tuple[Any, ...], Role | Refusal | None] = {}


def role_of(module: nn.Module) -> Role | Refusal | None:
    """The proven role of a block; a Refusal if one was proposed and not shown; None if none was proposed."""
    weights = {n: p for n, p in [*module._parameters.items(), *module._buffers.items()] if p is not None}
    floating = all(p.is_floating_point() for p in weights.values())
    plain = floating and any(p.dim() in (2, 3) for p in weights.values())
    lines = floating and all(p.numel() == max(p.shape, default=0) for p in weights.values())
    pair = bool(weights) and not module._modules and len(inputs_of(type(module))) == 2
    chooses = len(weights) < 2 and not module._modules and bool(names_reached(type(module)) & ties.CHOOSES)
    if not plain and not (lines and (hasattr(type(module), PART) or pair or chooses)):
        return None
    children = {n: _activation(m) for n, m in module._modules.items() if m is not None}
    if not all(children.values()):
        return None
    tensors = {n: tuple(p.shape) for n, p in weights.items()}
    key = (
        state_of(module),
        tuple(tensors.items()),
        tuple(children.items()),
    )
    if key not in _roles:
        _roles[key] = None
        for parameters in _parameters(type(module)):
            block = _block(module, tensors, len(parameters))
            layers = proposals("blocks", block)
            if layers:
                _roles[key] = _role_of(module, block, parameters, layers, tuple(children))
                break
        keep_state(module)
    return _roles[key]


def _activation(child: nn.Module) -> tuple[str, Any] | None:
    """What a child without tensors is proven to compute of any input."""
    gate = activations.gate_of(child)
    if gate is not None:
        return gate.op, gate.extra
    if child._modules or child._parameters or child._buffers:
        return None
    role = recognise.role_of(child)
    if not isinstance(role, Role) or role.guards or role.reads or role.tests != (recognise.NARROW,):
        return None
    return (role.op, role.expression) if role.gradient and "self." not in role.expression else None


def _parameters(kind: Any) -> Iterator[tuple[str, ...]]:
    """The names of the inputs that a forward requires, and those with the ones that are None where left out."""
    required = inputs_of(kind)
    yield required
    rest = list(inspect.signature(kind.forward).parameters.values())[1 + len(required) :]
    if rest and all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is None for p in rest):
        yield (*required, *(p.name for p in rest))


def _block(module: nn.Module, tensors: dict[str, tuple[int, ...]], inputs: int) -> Block:
    own = {n: v for n, v in vars(module).items() if n.isidentifier() and not isinstance(v, bool)}
    return Block(
        tensors,
        inputs,
        {n: v for n, v in own.items() if isinstance(v, int)},
        {n: v for n, v in own.items() if isinstance(v, float)},
        functools.partial(tried, module, tuple(tensors)),
        functools.partial(shape_of, module, tuple(tensors)),
        getattr(type(module), PART, None) == ORDERED,
    )


def _role_of(
    module: nn.Module, block: Block, parameters: tuple[str, ...], layers: list[Layer], children: tuple[str, ...]
) -> Role | Refusal:
    forward = type(module).forward
    if forward is not source.innermost(forward) and not _reads_known(forward):
        return Refusal("a decorator stands around its forward")
    nearest: tuple[float, str] | None = None
    for layer in layers:
        trace = Trace()
        try:
            followed = follow_module(module, trace, children, undecorated=True)
        except Unproven as error:
            return Refusal(str(error))
        for kind in dict.fromkeys(type(module._modules[name]) for name in children):  # their code was proven elsewhere
            for name in class_code(kind):
                trace.note(kind, name, getattr(kind, name))
        runs = Runs(module, followed, tuple(block.tensors), layer, trace)
        proof, refusing = _prove(runs, block.inputs), []
        if not proof.ok and proof.distance is None and layer.fills:
            refusing = _refused(runs, block.inputs)
            proof = _prove(runs, block.inputs, refusing) if refusing else proof
        if not proof.ok and layer.single and proof.distance == 0.0:  # narrower numbers it rounds at other places
            refusing = [*STORAGE]
            proof = _prove(runs, block.inputs, refusing)
        if proof.ok:
            try:
                guards = tuple(trace.guards(never=runs.never))
            except Unproven as error:
                return Refusal(str(error))
            if len(inputs_of(type(module))) < block.inputs and not runs.refuses_less():
                return Refusal("its forward also does without an input that the op requires")
            longer, most = _longer(runs, block.inputs, trace.numbers | recognise.own_numbers(module))
            if not longer.ok:
                return Refusal(f"not {layer.op}, which is nearest: {longer.reason}")
            beyond = [f"a0.numel() < {most}"] if most else []
            if most and layer.width and _of_widths(runs, block.inputs, children):
                beyond = [f"{layer.width} in {layer.widths}"]
            beyond += [f"a0.dtype is not {dtype}" for dtype in refusing]
            tests = [layer.guard, *beyond, *_of_one_dtype(runs, block.inputs), *_under_autocast(runs, block.inputs)]
            layer = replace(layer, guard=" and ".join(tests))
            role = _role(block, parameters, layer, proof, guards, digest_of(type(module)), tuple(trace.reads))
            try:
                known = "; ".join(sorted(runs.remarks))
                return replace(role.on(module), remark=known) if isinstance(role, Role) else role
            except Unproven as error:
                return Refusal(str(error))
        if proof.distance is not None and (nearest is None or proof.distance < nearest[0]):
            nearest = (proof.distance, f"not {layer.op}, which is nearest: {proof.reason}")
    return Refusal(nearest[1] if nearest else "no op of the day computes it")


def _role(
    block: Block,
    parameters: tuple[str, ...],
    layer: Layer,
    proof: Proof,
    guards: tuple[tuple[str, bool], ...],
    digest: str,
    reads: tuple[Read, ...],
) -> Role | Refusal:
    inputs = tuple(f"a{i}" for i in range(block.inputs))
    if set(inputs) & set(parameters):
        return Refusal(f"its forward calls an argument {sorted(set(inputs) & set(parameters))[0]}")
    tests = [layer.guard]
    if not layer.gradient:
        tests.insert(0, recognise.no_gradient([*inputs, *(f"self.{n}" for n in block.tensors)]))
    return Role(
        layer.op,
        layer.expression,
        inputs,
        parameters,
        tuple(tests),
        guards,
        proof,
        digest,
        layer.gradient,
        beside=layer.beside,
        required=block.inputs,
        reads=reads,
    )


def _reads_known(function: Any) -> bool:
    """Whether each decorator keeps a known registry in a cell."""
    while hasattr(function, "__wrapped__"):
        cells = [source.content(cell) for cell in getattr(function, "__closure__", None) or ()]
        if not any(id(value) in registries for value in cells):
            return False
        function = function.__wrapped__
    return True


def _under_autocast(runs: Runs, count: int) -> list[str]:
    original, served = _sides(runs, False, count, ops)
    return casting.tests(runs.layer.op, original, served, (*runs.layer.draw(0), *runs.tensors), "a0")


@torch.no_grad()
def _of_one_dtype(runs: Runs, count: int) -> list[str]:
    """Tests that an input has the first one's dtype, where the block's result has another one beside a wider input."""
    original, candidate = _sides(runs, False, count)
    given = [*runs.layer.draw(0), *runs.tensors]
    tests = []
    for place in range(1, count):
        if _floating(given[place]):
            low = [x.bfloat16() if _floating(x) else x for x in given]
            low[place] = given[place].float()
            try:
                wanted, actual = flat(original(*low)), flat(candidate(*low))
            except Exception:  # noqa: BLE001 - foreign code, or the op, refuses such a call
                continue
            if [x.dtype for x in wanted] != [x.dtype for x in actual]:
                tests.append(f"a{place}.dtype is a0.dtype")
    return tests


def _sides(runs: Runs, training: bool, count: int, of: Any = None) -> tuple[Any, Any]:
    """(the block's code, with the layer's choice where it leaves that open; what the layer says)."""
    layer, candidate = runs.layer, _candidate(runs, count, of)
    original = functools.partial(runs, training, count)
    if layer.chosen is None:
        return original, candidate
    return ties.choosing(original, candidate, layer.chosen, bool(layer.level), runs.remarks.add), candidate


def _candidate(runs: Runs, count: int, of: Any) -> Any:
    layer, names, state = runs.layer, runs.names, runs.state
    expression = compiled(layer.expression, ("self", *(f"a{i}" for i in range(count))), ops=of or Definitions())

    def candidate(*given: Any) -> Any:
        known = dict(zip(names, given[count:], strict=True))
        return expression(types.SimpleNamespace(**(state | known)), *given[:count])

    return candidate


def _longer(runs: Runs, count: int, numbers: set[float]) -> tuple[Proof, int]:
    """As many rows as the numbers that the code names or computes, and one more: a slice, or a quotient, shows no
    earlier; and how many elements are too many to be tried, or 0."""
    numbers = {abs(n) for n in numbers - set(runs.layer.sizes)} | {abs(n) for n in runs.trace.computed()}
    whole = {int(n) + more for n in numbers if 2 <= n <= _ROWS for more in (0, 1)}
    large = [int(n) for n in numbers if n > _ROWS]
    if runs.trace.sized(plain=bool(large)):
        large.append(_LONG)
    inputs: list[tuple[Any, ...]] = []
    axis = runs.layer.axis
    least, most = runs.layer.across or (0, 0)
    for length in sorted(whole | {_LONG, most} - {0}):
        if runs.layer.longer is not None:
            inputs.append((*runs.layer.longer(length, runs.layer.widths[0]), *runs.tensors))
            continue
        given = runs.layer.draw(0)
        rows = given[0].shape[axis]
        inputs.append((*(_repeated(x, axis, rows, length) for x in given), *runs.tensors))
        if least <= length <= most:
            inputs.append((*(_each_largest(length) for _ in given), *runs.tensors))
    proof = prove(*_sides(runs, False, count), inputs, storage=(), gradients=False, values=True)
    return proof, min(large, default=0)


def _of_widths(runs: Runs, count: int, children: tuple[str, ...]) -> bool:
    """Whether what code computes of sizes follows from the width alone, and agrees for each of those that are tried."""
    layer, trace = runs.layer, Trace()
    assert layer.longer is not None
    followed = follow_module(runs.module, trace, children, undecorated=True)
    again = Runs(runs.module, followed, runs.names, layer, trace)
    original, candidate = _sides(again, False, count)

    def holds(inputs: Iterator[tuple[Tensor, ...]]) -> bool:
        given = [(*x, *again.tensors) for x in inputs]
        return prove(original, candidate, given, storage=(), gradients=False, values=True).ok

    of_lengths = holds(layer.longer(length, layer.widths[0]) for length in (1, 2, 3, 16, 100, _LONG))
    return of_lengths and not trace.sized(plain=False) and holds(layer.longer(5, width) for width in layer.widths)


def _each_largest(length: int) -> Tensor:
    """Rows of so many numbers, each of which is the largest of one row: code may mean other elements by large ids."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn((length, length), generator=generator, dtype=torch.float64) + 9.0 * torch.eye(length).double()


def _repeated(x: Tensor, axis: int, rows: int, length: int) -> Tensor:
    if x.dim() <= axis or x.shape[axis] != rows:
        return x
    return x.repeat(*(-(-length // rows) if i == axis else 1 for i in range(x.dim()))).narrow(axis, 0, length)


@torch.no_grad()
def _refused(runs: Runs, count: int) -> list[torch.dtype]:
    """Storage dtypes in which the block raises, such as one that has no -1e9; none, where it does in all."""
    refused = []
    for dtype in STORAGE:
        given = (*runs.layer.draw(0), *runs.tensors)
        try:
            runs(False, count, *(x.to(dtype) if _floating(x) else x for x in given))
        except Exception:  # noqa: BLE001 - foreign code refuses what it likes
            refused.append(dtype)
    return refused if len(refused) < len(STORAGE) else []


def _prove(runs: Runs, count: int, refusing: Sequence[torch.dtype] = ()) -> Proof:
    layer = runs.layer
    storage = [dtype for dtype in STORAGE if dtype not in refusing]
    inputs = runs.drawn(count)
    proof = Proof(False)
    for training in (False, True):
        original, candidate = _sides(runs, training, count)
        forms = (candidate, functools.partial(_once, candidate)) if layer.between else ()
        proof = prove(
            original,
            candidate,
            inputs,
            forms=forms,
            storage=storage,
            narrow=_NARROW_SEEDS,
            gradients=layer.gradient,
            values=True,
        )
        if not proof.ok:
            return proof
        even = [(*layer.draw(seed), *runs.tensors) for seed in range(layer.seeds, layer.seeds + layer.level)]
        reason = ties.level(original, candidate, even, (torch.float32, *storage), _CLOSE)
        if reason:
            return Proof(False, reason, distance=1.0)
    return _close(*_sides(runs, False, count), inputs, proof)


def _once(candidate: Any, *given: Any) -> Any:
    """Its result in the first input's dtype, without the roundings between its ops."""
    return candidate(*(x.double() if _floating(x) else x for x in given)).to(given[0].dtype)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


@torch.no_grad()
def _close(original: Any, candidate: Any, inputs: list[tuple[Any, ...]], proof: Proof) -> Proof:
    """The proof, unless what callers get in float32 is another computation than the one that was followed."""
    for given in inputs[:_NARROW_SEEDS]:
        low = [x.float() if _floating(x) else x for x in given]
        try:
            actual, wanted = candidate(*low), original(*low)
        except Exception as error:  # noqa: BLE001 - foreign code ran: what it raises is the reason
            return Proof(False, f"{type(error).__name__}: {error}".split("\n", 1)[0][:300])
        for f, w in zip(flat(actual), flat(wanted), strict=True):
            if f.shape != w.shape or f.dtype != w.dtype:
                return Proof(False, f"in float32 it gives {tuple(w.shape)} of {w.dtype}")
            size = w.abs().amax(-1, keepdim=True).clamp_min(1) if not w.is_floating_point() else _size(w)
            apart = float(((f - w).abs() / size).max())
            if not apart <= _CLOSE:
                reason = f"in float32 it differs by {apart:.3g} from the code that its class has"
                return Proof(False, reason, distance=apart)
    return proof


def _size(w: Tensor) -> Tensor:
    return w.abs().amax(-1, keepdim=True).clamp_min(1e-30)

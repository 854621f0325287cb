"""One module alone: what it was given in a pass of the model, and the same run again, in its own dtype or exactly."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.porting.model import exact, measure

Seen = Callable[[Any, str, Tensor], None]
Watch = Callable[[Seen], contextlib.AbstractContextManager[None]]  # what a porter offers to see inside its modules
Invoke = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def invoke(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


@contextlib.contextmanager
def unwatched(seen: Seen) -> Iterator[None]:
    yield


def twin(model: Any) -> Any:
    """The same model again: modules and config of its own, the very same parameters and buffers."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


@dataclass
class Call:
    """What a module was given in one pass of the model, detached, and the gradients that its outputs had."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs: frozenset[str]  # places of the inputs that asked for a gradient
    entered: int
    left: int = -1
    outputs: list[Tensor] = field(default_factory=list)
    cotangents: list[Tensor | None] = field(default_factory=list)


def units(model: Any, ported: set[str]) -> list[str]:
    """Paths of the modules that are compared: ported ones, decoder layers, and what the model calls beside them."""
    layers = set(measure.layers_of(model))
    outer = {m for m in model.base_model.children() if not isinstance(m, nn.ModuleList)}
    outer.add(model.get_output_embeddings())
    return [path for path, m in model.named_modules() if path in ported or m in layers or m in outer]


def record(model: Any, tokens: Tensor, paths: list[str], backward: bool) -> dict[str, Call]:
    """Run the model once and keep each module's first call; with ``backward``, the loss's gradient of its outputs."""
    calls: dict[str, Call] = {}
    clock = iter(range(1 << 30))

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path in calls:
                return
            asked: set[str] = set()

            def keep(tensor: Tensor, name: str) -> Tensor:
                if tensor.requires_grad:
                    asked.add(name)
                return tensor.detach()

            given = exact.mapped((args, kwargs), keep)
            calls[path] = Call(given[0], given[1], frozenset(asked), next(clock))

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if calls[path].left < 0:
                calls[path].left = next(clock)
                calls[path].outputs = exact.tensors_of(out)

        return hook

    with contextlib.ExitStack() as stack, torch.set_grad_enabled(backward):
        for path in paths:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(before(path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after(path)).remove)
        if backward:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        else:
            model(input_ids=tokens, use_cache=False)
    if backward:
        places = [(c, i) for c in calls.values() for i, out in enumerate(c.outputs) if out.requires_grad]
        scale = measure.HALF_SCALE if model.dtype == torch.float16 else 1.0
        gradients = torch.autograd.grad(loss * scale, [c.outputs[i] for c, i in places], allow_unused=True)
        for call in calls.values():
            call.cotangents = [None] * len(call.outputs)
        for (call, i), gradient in zip(places, gradients, strict=True):
            call.cotangents[i] = gradient
    for call in calls.values():
        call.outputs = [out.detach() for out in call.outputs]
    return calls


def fed(own: Call, reference: Call) -> Call:
    """A ported module's call with the reference's numbers: its own masks and flags, the reference's floats."""
    given: dict[str, Tensor] = {}

    def note(tensor: Tensor, name: str) -> Tensor:
        given[name] = tensor
        return tensor

    def replace(tensor: Tensor, name: str) -> Tensor:
        wanted = given.get(name)
        return tensor if wanted is None or wanted.shape != tensor.shape else wanted

    exact.mapped((reference.args, reference.kwargs), note)
    args, kwargs = exact.mapped((own.args, own.kwargs), replace)
    return Call(args, kwargs, reference.needs, own.entered, own.left, reference.outputs, reference.cotangents)


@dataclass
class RunTensors:
    """What one run of a module made, by the tensor's name; a gradient that is None was not given."""

    forward: dict[str, Tensor]
    backward: dict[str, Tensor | None]


def replay(
    run: Callable[..., Any],
    module: nn.Module,
    call: Call,
    weights: dict[str, Tensor],
    watch: Watch,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> RunTensors:
    """Run a module on a call, forward and, where the call has output gradients, backward.

    ``dtype`` widens what it is given; ``seed`` moves it by one ulp, inputs and output gradients.
    """
    backward = any(c is not None for c in call.cotangents)
    leaves: dict[str, Tensor] = {}
    generator = None

    def put(tensor: Tensor, name: str = "") -> Tensor:
        nonlocal generator
        if seed is not None:
            generator = generator or torch.Generator(device=tensor.device).manual_seed(seed)
            tensor = measure.one_ulp(tensor, generator)
        return tensor.to(dtype) if dtype is not None else tensor

    def leaf(tensor: Tensor, name: str) -> Tensor:
        given = put(tensor).detach()
        if backward and name in call.needs:
            leaves[name] = given.requires_grad_()
        return given

    inside: dict[str, Tensor] = {}

    def seen(who: Any, name: str, tensor: Tensor) -> None:
        if who is module:
            inside[name] = tensor.detach()

    args, kwargs = exact.mapped((call.args, call.kwargs), leaf)
    with torch.set_grad_enabled(backward), watch(seen):
        outputs = exact.tensors_of(run(args, kwargs))
    names = ["output"] if len(outputs) == 1 else [f"output {i}" for i in range(len(outputs))]
    forward = inside | {name: out.detach() for name, out in zip(names, outputs, strict=True)}
    if not backward:
        return RunTensors(forward, {})
    label = {name: f"gradient of {_label(name)}" if len(leaves) > 1 else "gradient of the input" for name in leaves}
    wanted = {label[name]: tensor for name, tensor in leaves.items()}
    wanted |= {f"gradient of {name}": w for name, w in weights.items() if w.requires_grad}
    pairs = [
        (out, put(c).to(out.dtype))
        for out, c in zip(outputs, call.cotangents, strict=False)
        if c is not None and out.requires_grad and out.shape == c.shape
    ]
    if not pairs or not wanted:
        return RunTensors(forward, dict.fromkeys(wanted))
    slopes = torch.autograd.grad(
        [out for out, _ in pairs], list(wanted.values()), [c for _, c in pairs], allow_unused=True
    )
    return RunTensors(forward, dict(zip(wanted, slopes, strict=True)))


def _label(name: str) -> str:
    """A keyword argument is "[1].hidden_states", a positional one "[0][2]"."""
    return name[4:] if name.startswith("[1].") else f"input {name[3:].strip('[]')}"


def replay_exact(module: nn.Module, call: Call, watch: Watch, wide: torch.dtype) -> RunTensors:
    """`replay` of an unported module in a wide dtype."""
    with exact.parameters(module, wide) as weights:

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with exact.Widened(wide):
                return torch.func.functional_call(module, weights, args, kwargs)

        named = {name: weights[name] for name, _ in module.named_parameters()}
        return replay(run, module, call, named, watch, dtype=wide)

"""The second way in: every op as ``torch.ops.ferryman.*``, for torch.compile, subclasses, dispatch modes, functorch.

Its kernel runs the same dispatch below autograd; fake, autograd, autocast and FLOP formula are registered from the
primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ferryman.dispatch import declared, state
from ferryman.dispatch.gradient import gradients, keep
from ferryman.dispatch.order import order_of, turned
from ferryman.dispatch.recipe import Plan, Recipe
from ferryman.errors import FerrymanError
from ferryman.ops.primitive import Primitive

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def overload(op: Primitive) -> Callable[..., Any]:
    """The library's op, which the eager path hands subclasses and modes to; defined now if it is not yet.

    Raises FerrymanError where the table that defined it says another schema.
    """
    known = declared.ops.get(op.name) or declared.define(op.schema)
    if known.schema != op.schema:
        raise FerrymanError(
            f"{op.name}: its definition says {op.schema!r}, and the table of ops {known.schema!r}; run: make docs"
        )
    default: Callable[..., Any] = getattr(torch.ops.ferryman, op.name).default
    return default


def register(op: Primitive, kernel: Callable[..., Any], overload: Callable[..., Any], recipe: Recipe) -> None:
    """Put an op's own functions behind what its schema was defined with."""
    if op.mutates:
        kernel = _without_arguments(op, kernel)

    def fake(*args: Any) -> Any:
        op.check(*args)
        order = order_of(op, args)
        return op.fresh(op.meta(*args)) if order is None else turned(op.meta, op, args, order)

    known = declared.ops[op.name]
    known.autocast = _autocast(op, overload)
    known.autograd = _autograd(overload, recipe, kernel)
    known.fake, known.kernel = fake, kernel


def _without_arguments(op: Primitive, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel returns the arguments that it wrote over, and a schema must not."""
    return lambda *args: op.fresh(kernel(*args))


class _Registered(torch.autograd.function._SingleLevelFunction):
    """Autograd at the dispatcher's Autograd key, where functorch has already picked its level.

    `torch.library.register_autograd` goes through `autograd.Function`, which functorch refuses there.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, args: tuple[Any, ...], *seen: Tensor | None) -> Any:
        output = plan.launch(*args)
        keep(ctx, plan, args, output if isinstance(output, tuple) else (output,))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gradients(ctx, grads, _below)


def _below(backward: Primitive) -> Callable[..., Any]:
    """What runs a backward here: its op, or its meaning where it writes over arguments, which a transform can trace."""
    return backward.body if backward.mutates else getattr(torch.ops.ferryman, backward.name).default


def _registered(recipe: Recipe, below: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    plan = Plan(recipe, below, None, state.effective())
    with enable_single_level_autograd_function():
        return _Registered.apply(plan, args, *[args[i] for i in recipe.seen])  # type: ignore[attr-defined]


def _leaves(args: Sequence[Any]) -> Iterator[Any]:
    """The arguments, those in lists one by one."""
    for value in args:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _is_dual(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _transformed() -> bool:
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.maybe_current_level() is not None


def plain(value: Any) -> bool:
    """Whether a kernel may read the tensor's memory as it is: no subclass's, negative or zero by a bit alone.

    PyTorch's dispatcher makes plain ones of the others.
    """
    return type(value) in PLAIN and not value.is_neg() and not value._is_zerotensor()


def _all_plain(args: tuple[Any, ...]) -> bool:
    return all(plain(a) for a in _leaves(args) if isinstance(a, Tensor))


def _autograd(overload: Any, recipe: Recipe, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any) -> Any:
        differentiated = torch.is_grad_enabled() and any(
            isinstance(a, Tensor) and a.requires_grad for a in _leaves(args)
        )
        if not differentiated and forward_ad._current_level < 0 and _all_plain(args) and not _transformed():
            return kernel(
                *args
            )  # a second trip through the dispatcher would change nothing; on a slow host it is 70 us

        def below(*inner: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & torch._C._after_autograd_keyset, *inner)

        if forward_ad._current_level >= 0 and any(_is_dual(a) for a in _leaves(args)):
            raise FerrymanError(
                f"{overload}: no forward-mode derivative; use reverse mode, or the definition's own body"
            )
        if differentiated and recipe.op.mutates:
            recipe.check_inputs(args)
            return _overwritten(recipe, below, args)
        if differentiated:
            recipe.check_inputs(args)
            return _registered(recipe, below, args)
        return below(*args)

    return run


def _overwritten(recipe: Recipe, below: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A mutating op under autograd and any transform: its results on copies, which PyTorch's own copy_ writes back.

    What tracing makes of it is a copy of what dies at once, which Inductor leaves out.
    """
    op = recipe.op

    def on_copies(*inner: Any) -> tuple[Any, ...]:
        given = list(inner)
        for place, _ in op.overwritten:
            given[place] = inner[place].clone()
        return op.whole(given, below(*given))

    outputs = _registered(recipe, on_copies, args)
    for place, output in op.overwritten:
        args[place].copy_(outputs[output])
    return op.fresh(outputs)


def _autocast(op: Primitive, overload: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's lists, which differ by device and version (CUDA's has rms_norm since a release after 2.11).

    "fp32" ops compute and return float32, "low" ops take the autocast dtype, others stay.
    """
    kind, like = op.autocast or (None, "")
    keys = {
        device: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for device, key in declared.AUTOCAST.items()
    }
    listed = {
        device
        for device, key in declared.AUTOCAST.items()
        if kind is not None and torch._C._dispatch_has_kernel_for_dispatch_key(like, key)
    }

    def cast(value: Any, device: str) -> Any:
        if isinstance(value, list | tuple):
            return [cast(one, device) for one in value]
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return value
        return value.to(torch.float32 if kind == "fp32" else torch.get_autocast_dtype(device))

    def run(device: str, *args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys[device]):
            return overload(*([cast(value, device) for value in args] if device in listed else args))

    return run

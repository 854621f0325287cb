"""From a call to a launch: one dictionary look-up when the call was seen before, selection when it was not.

The look-up is a function that is generated for each op (`resolver`). A plan that is used again and again on an
accelerator replaces the launcher by its replay (`backends.replay`), where the menu line says that it can.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ferryman.backends import redirect, replay
from ferryman.backends.precision import float32_precision
from ferryman.device_profiles import Profile
from ferryman.dispatch import (
    declared,
    lockfile,
    own_limit,
    registry,
    resolver,
    scalars,
    select,
    state,
    torch_library,
    traced,
)
from ferryman.dispatch.gradient import runner_under_autograd
from ferryman.dispatch.order import in_order, order_of, turned
from ferryman.dispatch.recipe import Plan, Recipe
from ferryman.errors import ArgumentError, CompileError, QuarantineWarning, StrictModeError, Unsupported
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive

REPLAYED = "cuda"  # the type of the devices whose launchers are replayed: HIP's too
# Recording takes 0.4 to 0.8 ms, a replay saves 10 to 30 us. More than most models have layers: each calls an op with a
# length that the next token changes.
REPLAY_AFTER = 64
MOST_PLANS = 4096  # per op; then they are dropped and made again
MOST_REBUILDS = 32  # of one brief key's guard; a call site that alternates further goes by the full key
_GUARDS = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards = getattr(_GUARDS, "TensorGuards", None)  # private to PyTorch: without it every call goes by the full key
_Plan = tuple[Callable[..., Any], Any, Implementation]  # what runs, its last argument, and the menu line that it is
# How a call comes in: with all outputs, below autograd, or for the first output alone (its tuple is the result)
Way = Literal["whole", "plain", "first"]
WAYS: dict[str, Way] = {"": "whole", "_plain": "plain", "_first": "first"}
_all_plans: list[dict[Any, Any]] = []
_lock = threading.Lock()
generation = 0  # raised whenever plans are dropped: a choice that began before is not kept


@dataclasses.dataclass(eq=False)
class Young:
    """A plan that was not tried for a replay yet."""

    plans: dict[Any, _Plan]
    key: Any
    launch: Callable[..., Any]
    extra: Any
    line: Implementation
    device: torch.device
    calls: int = 1


class Op:
    """One primitive, able to run."""

    def __init__(self, op: Primitive, library: Callable[..., Any]) -> None:
        self.op = op
        self.plans: dict[Any, _Plan] = {}
        self.below: dict[Any, _Plan] = {}  # of calls that come through the library, of subclasses too
        # two calls of one brief key in turns, such as with a residual that is expanded and with one that is not
        self.hot: dict[Any, tuple[Callable[..., bool], Callable[..., Any], Any, Implementation]] = {}
        self.second: dict[Any, tuple[Callable[..., bool], Callable[..., Any], Any, Implementation]] = {}
        self.rebuilds: dict[Any, int] = {}
        _all_plans.extend((self.plans, self.below, self.hot, self.second, self.rebuilds))
        self.recipe = Recipe.of(op)
        self.guarded = resolver.guarded(op)
        self.has_first = resolver.FIRST in op.namespace
        self.again = self._again  # one object, which plans are compared with
        # In the namespace of the op's own function, whose code is then replaced: one Python frame less (50 ns).
        if op.mutates:
            library = traced.whole(op, library)
        namespace = op.namespace
        namespace |= {
            "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
            "dispatch_modes": torch._C._len_torch_dispatch_stack,
            "functorch_level": torch._C._functorch.maybe_current_level,
            "autocast": torch._C._is_any_autocast_enabled,
            "grad_enabled": torch.is_grad_enabled,
            "float32_precision": float32_precision,
            "deterministic": torch._C._get_deterministic_algorithms,
            "bump": torch.autograd.graph.increment_version,
            "forward_ad": forward_ad,
            "current": state.current,
            "plans": self.plans,
            "below": self.below,
            "library": library,
            "keys_of": torch._C._dispatch_keys,
            "hot": self.hot,
            "second": self.second,
            "warm": self.warm,
            **dict(zip((f"no_{name}" for name in op.tensors), declared.absent(len(op.tensors)), strict=True)),
            "compiled": traced.compiled(op, library),
            "CompileError": CompileError,
            "KEY_ERRORS": (KeyError, TypeError, AttributeError),
            **{f"slow{of}": self._slow_way(way) for of, way in WAYS.items()},
            **{f"recover{of}": self._recovery(way) for of, way in WAYS.items()},
        }
        entry = namespace[op.name]
        exec(compile(resolver.source_of(op), f"<ferryman dispatch {op.name}>", "exec"), namespace)  # noqa: S102
        self.resolve: Callable[..., Any] = namespace["resolve"]
        self.undifferentiated: Callable[..., Any] = namespace["undifferentiated"]
        entry.__code__ = self.resolve.__code__
        namespace["_resolve"] = self.resolve
        if self.has_first:
            namespace["compiled_first"] = traced.first(op, self.resolve)
            namespace[resolver.FIRST] = namespace["resolve_first"]
            namespace["first"].__code__ = namespace["resolve_first"].__code__
        self._key: Callable[..., Any] = resolver.key_function(op, namespace)
        self._library = library

    @functools.cached_property
    def _brief(self) -> Callable[..., Any]:
        return resolver.brief_function(self.op, self.op.namespace)

    @functools.cached_property
    def under_autograd(self) -> Callable[..., Any]:
        return runner_under_autograd(self.op)

    def _slow_way(self, way: Way) -> Callable[..., Any]:
        return lambda *args: self.slow(args, way)

    def _recovery(self, way: Way) -> Callable[..., Any]:
        return lambda error, line, *args: self.recover(error, line, args, way)

    def warm(self, key: Any, plan: _Plan, brief: Any, *tensors: Tensor) -> None:
        """Put a guard that knows these tensors in front of the full key."""
        rebuilt = self.rebuilds.get(brief, 0)
        if _TensorGuards is None or rebuilt >= MOST_REBUILDS:
            return
        check = guard_of(tensors)
        with _lock:
            if self.plans.get(key) is not plan:
                return  # dropped, or replaced, meanwhile
            if len(self.hot) >= MOST_PLANS:
                self.hot.clear()
                self.second.clear()
                self.rebuilds.clear()
            self.rebuilds[brief] = rebuilt + 1
            place = self.second if rebuilt % 2 and brief in self.hot else self.hot
            place[brief] = (check, *plan)

    def slow(self, args: tuple[Any, ...], way: Way) -> Any:
        """Check, choose, remember, run."""
        op, began, differentiate = self.op, generation, way != "plain"
        tensors = self._tensors(args)
        if differentiate and not all(map(torch_library.plain, tensors.values())):
            return self._library(*args)
        if not tensors:
            raise ArgumentError(op.name, "arguments", "no tensor", "at least one")
        exact = scalars.exact(op, args)
        if exact is not args:  # NumPy's numbers, and integers for floats: plans know Python's own types only
            if way == "first":
                return (op.namespace[resolver.FIRST](*exact),)
            return (self.resolve if differentiate else self.undifferentiated)(*exact)
        op.check(*args)
        replay.must_hold(op.name, list(tensors), list(tensors.values()))
        if op.mutates:
            torch.autograd.graph.increment_version([tensors[name] for name in op.mutates])
        asked = state.effective()
        device = next(iter(tensors.values())).device
        profile = select.profile_for(device)
        grads = differentiate and torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
        whole = self.has_first and way != "first"
        order = order_of(op, args)
        given = args if order is None else in_order(op, args, order)
        decision = select.select(op, given, profile, asked, differentiated=grads and not whole)
        if device.type == REPLAYED and redirect.current() is None:
            lockfile.tell_untuned(profile)
        line = decision.implementation
        try:
            launch = registry.launcher(line)
        except CompileError as error:
            return self.recover(error, line, args, way)
        target = select.target_of(profile, decision.configuration)
        if grads:
            self.recipe.check_inputs(args)
        extra: Any = target
        leads = decision.source == select.AUTOGRAD
        may = order is None and (leads or (device.type == REPLAYED and not whole))
        own = self._own(line, args, profile, asked, grads, leads) if may else None
        if order is not None:  # the call of views that are in order has a plan of its own
            run = self.resolve if differentiate else self.undifferentiated
            launch, extra = lambda *given: turned(run, op, given[:-1], order), None
        elif own is not None:
            launch = own
        elif grads:
            back = asked
            if leads and self.recipe.backward is not None:  # who traces counts what PyTorch's own call would be
                behind = {back.name for back in registry.implementations(self.recipe.backward.name)}
                named = line.name if line.name in behind else line.backend
                back = state.narrowed(asked, self.recipe.backward.name, named)
            launch, extra = self.under_autograd, self.recipe.plan(launch, target, back)
        if asked.tracer is not None:
            if order is None:
                asked.tracer.record(op.name, line.name, decision.fallback, decision.source)
        else:
            plans, key = self.plans if differentiate else self.below, self._key(*args, grads)
            key = (*key, way) if way == "first" else key
            plan: _Plan = (launch, extra, line)
            if own is None and order is None and line.replayable and device.type == REPLAYED and self.guarded:
                plan = (self.again, Young(plans, key, launch, extra, line, device), line)
            with _lock:
                if began == generation:
                    if len(plans) >= MOST_PLANS:
                        plans.clear()
                    plans[key] = plan
        try:
            return launch(*args, extra)
        except CompileError as error:
            return self.recover(error, line, args, way)

    def plan_of(self, args: tuple[Any, ...], needed: bool) -> _Plan | None:
        """The plan of a call that came straight from Python, where there is one; ``needed``: a gradient is."""
        return self.plans.get(self._key(*args, needed))

    def settled(self, args: tuple[Any, ...]) -> tuple[Callable[..., bool], Callable[..., Any], Any] | None:
        """The guard of a call that just ran, what runs, and its last argument, if they stay until plans are dropped."""
        brief, guarded = self._brief(*args)
        for kept in (self.hot, self.second):
            call = kept.get(brief)
            if call is not None and call[1] is not self.again and call[0](*guarded):
                return call[:3]
        return None

    def _own(
        self,
        line: Implementation,
        args: tuple[Any, ...],
        profile: Profile,
        asked: state.State,
        grads: bool,
        leads: bool,
    ) -> Callable[..., Any] | None:
        """PyTorch's own differentiable call, where it leads, or is what would be chosen for both passes, or no gradient
        is needed: nothing of ours stands around it. Who traces counts the backward's calls, which PyTorch's own are
        not."""
        if self.recipe.backward is None or asked.tracer is not None:
            return None
        if not select.differentiates(line, select.View.of(self.op, args, profile)):
            return None
        if leads or not grads:
            return line.load_differentiable()
        try:
            back = select.select(self.recipe.backward, self.recipe.backward_of(args), profile, asked).implementation
        except (Unsupported, StrictModeError):
            return None  # it is told when the backward runs
        return line.load_differentiable() if back.name == line.name else None

    def _again(self, *args: Any) -> Any:
        """Run a young plan; at its time put the launcher's replay, or the launcher for good, in its place."""
        given, young = args[:-1], args[-1]
        young.calls += 1
        run, extra = young.launch, young.extra
        op, names = self.op.name, self.op.names
        replay.must_hold(op, names, given)
        if young.calls < REPLAY_AFTER:
            return run(*given, extra)
        if isinstance(extra, Plan):
            frozen = replay.freeze(extra.launch, names, given, extra.target, young.device, op)
            extra = dataclasses.replace(extra, launch=frozen or replay.careful(extra.launch, names, op))
        else:
            run = replay.freeze(run, names, given, extra, young.device, op) or replay.careful(run, names, op)
        with _lock:
            plan = young.plans.get(young.key)
            if plan is not None and plan[1] is young:  # not dropped meanwhile
                young.plans[young.key] = (run, extra, young.line)
            for kept in (self.hot, self.second):
                for brief in [brief for brief, hot in kept.items() if hot[2] is young]:
                    del kept[brief]  # the next call puts what is in the plan now in front
        return run(*given, extra)

    def recover(self, error: CompileError, line: Implementation, args: tuple[Any, ...], way: Way) -> Any:
        """A toolchain refused the kernel of ``line``: leave it out here, say so once, and choose again.

        Other threads may have found the same meanwhile, so that another choice would not come to ``line`` any more.
        """
        op = self.op
        if line.backend != error.backend:
            raise error  # a backward inside, or a nested op: not ours to judge
        profile = select.profile_for(next(iter(self._tensors(args).values())).device)
        if select.quarantine(op, args, line, profile, str(error)):
            warnings.warn(
                f"{op.name}: {line.name} is left out for these shapes on {profile.name}: {error}",
                QuarantineWarning,
                stacklevel=4,
            )
        drop_plans()
        if op.mutates:  # a kernel before the one that was refused may have written over the arguments
            raise error
        return self.slow(args, way)

    def _tensors(self, args: tuple[Any, ...]) -> dict[str, Tensor]:
        """The tensors that are there, by name; wrong types of any argument raise ArgumentError."""
        tensors: dict[str, Tensor] = {}
        for name, value in zip(self.op.names, args, strict=True):
            kind = self.op.types[name]
            if value is None and kind.endswith("?"):
                continue
            if kind.removesuffix("?").endswith("[]"):
                tensors |= self._listed(name, kind.removesuffix("?").removesuffix("[]"), value)
            elif kind.startswith("Tensor"):
                tensors[name] = self._tensor(name, value)
        return tensors

    def _listed(self, name: str, kind: str, value: Any) -> dict[str, Tensor]:
        """The tensors of a list, by place. Gradients do not go through a list."""
        if not isinstance(value, list | tuple):
            raise ArgumentError(self.op.name, name, f"{value!r} ({type(value).__name__})", "a list")
        if kind != "Tensor":
            return {}
        tensors = {f"{name}[{i}]": self._tensor(f"{name}[{i}]", one) for i, one in enumerate(value)}
        for place, one in tensors.items():
            if one.requires_grad and torch.is_grad_enabled():
                raise ArgumentError(self.op.name, f"{place}.requires_grad", True, "False: detach it")
        return tensors

    def _tensor(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise ArgumentError(self.op.name, name, type(value).__name__, "a torch.Tensor")
        if value.layout is not torch.strided:
            raise ArgumentError(self.op.name, f"{name}.layout", value.layout, "torch.strided")
        return value


def guard_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors, each of them another, have the metadata of these. Of a PyTorch that has such guards."""
    if _TensorGuards is None:
        return lambda *given: False
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def drop_plans() -> None:
    """Forget every choice: settings, quarantine, lockfile or registry changed."""
    global generation
    with _lock:
        generation += 1
        for plans in _all_plans:
            plans.clear()
    own_limit.remembered.forget()


_ops: dict[str, Op] = {}


def runner_of(op: Primitive) -> Op:
    """What runs an op, with the plans that it keeps."""
    return _ops[registry.primitive(op.name).name]

"""What a model does, and how much of it our ops serve: FLOPs, bytes, launches and predicted time, by op.

A forward is run on fake tensors, which have shapes and no data, so that real widths cost no memory; each op that
reaches the dispatcher is counted. A served op counts as its definition's cost says, anything else as PyTorch's FLOP
formulas and the bytes of its arguments and results say. A model that asks its data a question (is all of this mask
true, is all finite) is answered yes. Time is the larger of FLOPs over the peak and bytes
over the bandwidth.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ferryman import ops
from ferryman.device_profiles import Profile, resolve
from ferryman.device_profiles.roofline import floor_seconds
from ferryman.dispatch import explain
from ferryman.errors import ArgumentError
from ferryman.porting.model import source, values
from ferryman.porting.model.port import port, unport
from ferryman.porting.model.survey import STATE

# Ops that move no data: they make a view, or ask for something. Anything that returns an alias of its argument is one.
_FREE = {
    "aten::detach",
    "aten::lift_fresh",
    "aten::alias",
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    "aten::expand",
    "aten::sym_size",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::item",
    "aten::_local_scalar_dense",
}
_GATHERS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}
_NO_WORK = {"prim", "profiler", "c10d", "_c10d_functional"}  # spaces of ops that compute nothing here


@dataclass
class Work:
    """Sums over calls. ``seconds`` is predicted, not measured."""

    calls: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, flops: float, moved: float, seconds: float) -> None:
        self.calls += 1
        self.flops += flops
        self.bytes += moved
        self.seconds += seconds

    def __iadd__(self, other: Work) -> Work:
        self.calls += other.calls
        self.flops += other.flops
        self.bytes += other.bytes
        self.seconds += other.seconds
        return self


@dataclass
class Count:
    """What one forward does: by served op, and by op of PyTorch for the rest; where the rest was called."""

    served: dict[str, Work] = field(default_factory=dict)
    left: dict[str, Work] = field(default_factory=dict)
    places: dict[str, Work] = field(default_factory=dict)  # kind of the module -> unserved work in it
    shapes: Counter[tuple[str, tuple[Any, ...]]] = field(default_factory=Counter)  # distinct served calls

    def total(self) -> Work:
        total = Work()
        for work in (*self.served.values(), *self.left.values()):
            total += work
        return total

    def calls(self) -> dict[str, int]:
        return {op: work.calls for op, work in sorted(self.served.items())}


class _Counter(TorchDispatchMode):
    def __init__(self, profile: Profile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.profile = Count(), profile
        self.stack: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense" and args[0].dtype is torch.bool and _unknown(args[0]):
            return True  # a question to data that are not there: no padding, all finite
        out = func(*args, **kwargs)
        space, _, op = name.partition("::")
        if space == "ferryman":
            known = getattr(ops, op).primitive
            args = known.bind(args, kwargs)  # PyTorch leaves out the last ones where they are the schema's defaults
            cost = known.cost(*args)
            self._note(self.count.served, op, float(cost.flops), float(cost.bytes), args)
            self.count.shapes[op, _described(args)] += 1
            return out
        if space in _NO_WORK or name in _FREE or _views(func):
            return out
        leaves = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        if name in _GATHERS:  # what is read of the table is what is written
            leaves = [*leaves[1:], out]
        moved = float(sum(t.numel() * t.element_size() for t in leaves))
        if moved:
            work = self._note(self.count.left, name, _flops(func, args, kwargs, out), moved, args)
            self.count.places.setdefault(self.stack[-1] if self.stack else "", Work()).add(*work)
        return out

    def _note(self, into: dict[str, Work], name: str, flops: float, moved: float, args: Any) -> tuple[float, ...]:
        like = next((t for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_floating_point()), None)
        dtype = torch.float32 if like is None else like.dtype
        floor = floor_seconds(self.profile, flops, moved, dtype)
        seconds = floor.peak_seconds if floor.peak_seconds is not None else floor.seconds
        if seconds is None:
            raise ArgumentError("account", "device", self.profile.name, f"a profile with rates; {floor.source}")
        into.setdefault(name, Work()).add(flops, moved, seconds)
        return flops, moved, seconds


def _unknown(t: Tensor) -> bool:
    """Whether a tensor has no data, not even a number that its fake keeps."""
    from torch._subclasses.fake_tensor import FakeTensor

    return values.lost(t) or (isinstance(t, FakeTensor) and t.constant is None)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    name = func._schema.name
    if "grouped_mm" in name and "backward" not in name:
        return _grouped(args[0], args[1])
    if "scaled_dot_product" in name and "backward" not in name:
        q, k, v = args[:3]
        return 2.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
    return float(max((t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)), default=0))


def _grouped(x: Tensor, weight: Tensor) -> float:
    """FLOPs of a product in groups: rows (M, K) by (E, K, N), each row in one group; (M, K) by (K, N) cut along K;
    (E, M, K) by (K, N) cut along N; (E, M, K) by (E, K, N). Each element of an operand without a group dimension
    meets one group, so the groups' lengths do not matter."""
    groups = x.shape[0] if x.dim() == 3 and weight.dim() == 3 else 1
    return 2.0 * groups * x.shape[-2] * x.shape[-1] * weight.shape[-1]


def _views(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _described(args: Any) -> tuple[Any, ...]:
    return tuple((tuple(a.shape), tuple(a.stride()), a.dtype) if isinstance(a, Tensor) else a for a in args)


def count(
    model: nn.Module, run: Callable[[nn.Module], Any], device: str | Profile = "h100", data: bool = False
) -> Count:
    """What ``run(model)`` does, on fake tensors: what it makes with `torch.randn` and the like has no data either.

    A model that needs more of its input's numbers than that runs again with those that `values.KeepValues` keeps.
    data: run it as it is instead, with its data, on the device where it lies.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    if data:
        return _counted(model, run, device, ())
    fake_mode = getattr(next(model.parameters(), None), "fake_mode", None)
    fake = fake_mode or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        return _counted(model, run, device, (fake,))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return _counted(model, run, device, (fake, values.KEEP_VALUES))


def _counted(
    model: nn.Module, run: Callable[[nn.Module], Any], device: str | Profile, modes: tuple[TorchDispatchMode, ...]
) -> Count:
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    counter = _Counter(resolve(device) if isinstance(device, str) else device)

    def enter(module: nn.Module, args: Any) -> None:
        counter.stack.append(getattr(type(module), "ferryman_original", type(module)).__name__)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        counter.stack.pop()

    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        stack.callback(register_module_forward_pre_hook(source.watching(enter)).remove)
        stack.callback(register_module_forward_hook(source.watching(leave), always_call=True).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(counter)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(0)  # where values decide sizes, the ported model has the unported one's
        run(model)
    return counter.count


@dataclass(frozen=True)
class Account:
    """A model's work before and after porting. Shares are of what the unported model does, and predicted."""

    device: str
    unported: Count
    ported: Count
    implementations: Mapping[str, str]  # op -> what would serve its calls, "a (3), b (1)" where they differ

    def shares(self) -> dict[str, float]:
        """Share of FLOPs, bytes, launches and time of the unported model that no op of PyTorch does any more."""
        before, left = self.unported.total(), Work()
        for work in self.ported.left.values():
            left += work
        pairs = {
            "flops": (left.flops, before.flops),
            "bytes": (left.bytes, before.bytes),
            "launches": (left.calls, before.calls),
            "time": (left.seconds, before.seconds),
        }
        return {name: max(0.0, 1.0 - after / whole) if whole else 0.0 for name, (after, whole) in pairs.items()}

    def rows(self) -> Iterator[tuple[str, str, str, Work]]:
        """(served or left, op, implementation, work), the most time first."""
        rows = [("served", op, self.implementations.get(op, ""), w) for op, w in self.ported.served.items()]
        rows += [("left", op.removeprefix("aten::"), "", w) for op, w in self.ported.left.items()]
        yield from sorted(rows, key=lambda row: -row[3].seconds)

    def text(self) -> str:
        shares = self.shares()
        said = ", ".join(f"{100 * share:.0f}% of {name}" for name, share in shares.items())
        lines = [f"served on {self.device}, predicted: {said}"]
        whole = self.ported.total().seconds or 1.0
        for what, op, implementation, work in list(self.rows())[:16]:
            name = f"{op} ({implementation})" if implementation else op
            lines.append(f"{what:6} {100 * work.seconds / whole:5.1f}% of time {work.calls:6} calls  {name}")
        return "\n".join(lines)


def account(
    model: nn.Module, run: Callable[[nn.Module], Any], device: str | Profile = "h100", data: bool = False
) -> Account:
    """Account for a model, ported or not, which is left as it was. ``run(model)`` makes inputs and calls it once.

    data: see `count`; for a model whose sizes follow from what it computes.
    Raises ArgumentError for a profile without rates, and what the model raises on tensors without data.
    """
    was = STATE in model.__dict__
    unport(model)
    before = count(model, run, device, data)
    port(model)
    try:
        after = count(model, run, device, data)
    finally:
        if not was:
            unport(model)
    profile = resolve(device) if isinstance(device, str) else device
    return Account(profile.name, before, after, serving(after, profile))


def serving(counts: Count, profile: Profile) -> dict[str, str]:
    """Which implementation would serve each op's calls on a device that need not be here."""
    chosen: dict[str, Counter[str]] = {}
    for (op, described), calls in counts.shapes.items():
        names = getattr(ops, op).primitive.names
        args = {name: _on_meta(a) for name, a in zip(names, described, strict=True)}
        said = explain(op, device=profile, **args).chosen or "none"
        chosen.setdefault(op, Counter())[said] += calls
    return {
        op: ", ".join(f"{name} ({n})" if len(names) > 1 else name for name, n in names.most_common())
        for op, names in chosen.items()
    }


def _on_meta(described: Any) -> Any:
    if isinstance(described, tuple) and len(described) == 3 and isinstance(described[2], torch.dtype):
        shape, stride, dtype = described
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return described

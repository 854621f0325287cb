"""How a bug is planted: decorators that turn a short function into a mutant of an op's implementation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.porting.cases import as_tuple
from ferryman.porting.selftest.edits import Edit, simt_kernel, triton_kernel

Kernel = Callable[..., Any]
Outputs = tuple[Tensor, ...]
NOTHING: Mapping[str, Any] = {}
NEEDS_COMPILER = "SIMT kernels run on a GPU (NVRTC, hipRTC)"
# What the right implementations round beside their result. PyTorch's CPU kernels keep float32 sums; on a GPU the
# menu's own declarations hold (cuBLAS may split K, the fused attentions round P).
_ROUNDS: Mapping[str, tuple[str, ...]] = {"silu_mul": ("activation",), "gelu_mul": ("activation",)}


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    kind: the class of bug. make: a kernel without memory of earlier runs. right: what it is a mutant of. declares: the
    fields of `Implementation` under which it is judged; None takes those of the implementation that it was made from.
    backend: "torch" (a Python function), "triton" or "simt" (an edit of the source). gpu: why it needs one, if so.
    first: cases that are tried first, where a run is dear. harmless: why it may turn out to change nothing.
    """

    op: str
    name: str
    kind: str
    note: str
    make: Callable[[], Kernel]
    right: Callable[[], Kernel]
    backend: str = "torch"
    declares: Mapping[str, Any] | None = None
    gpu: str | None = None
    edits: tuple[Edit, ...] = ()
    first: tuple[str, ...] = ()
    harmless: str | None = None

    @property
    def key(self) -> str:
        return f"{self.op}.{self.backend}.{self.name}"

    def line(self, device: torch.device) -> Implementation:
        """The declarations that it is judged under."""
        if self.declares is not None:
            return Implementation(op=self.op, name="torch", where="selftest:mutant", **self.declares)
        return right_line(self.op, self.backend, device)


def right_line(op: str, backend: str, device: torch.device) -> Implementation:
    """What the unmutated implementation declares, on this device."""
    if backend == "torch" and device.type == "cpu":
        return Implementation(op=op, name="torch", where="selftest:right", roundings=_ROUNDS.get(op, ()))
    return registry.asked(op, ("cuda" if backend == "simt" else backend,))[-1]  # which serves every call


def torch_kernel(op: str) -> Kernel:
    return registry.launcher(registry.asked(op, ("torch",))[-1])


def finish(op: str, outputs: Outputs, args: tuple[Any, ...]) -> Any:
    """Rounded once to the dtype, and laid out in the strides, that the op declares."""
    known = registry.primitive(op)
    places = list(as_tuple(known.meta(*args)))
    for argument, output in known.overwritten:
        places[output] = args[argument]
    for place, value in zip(places, outputs, strict=True):
        place.copy_(value)
    return places[0] if len(places) == 1 else tuple(places)


def widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def in_float32(op: str, args: tuple[Any, ...]) -> Outputs:
    """The op in float32, not yet rounded."""
    return as_tuple(registry.primitive(op).body(*widened(args)))


def _float32(op: str) -> Kernel:
    def kernel(*args: Any) -> Any:
        return finish(op, in_float32(op, args[:-1]), args[:-1])

    return kernel


@dataclass
class Bugs:
    """The mutants of one file."""

    found: list[Mutant] = field(default_factory=list)

    def _add(self, kind: str, ops: tuple[str, ...], change: Callable[..., Any], wrap: Callable[[str], Kernel],
             **more: Any) -> None:  # fmt: skip
        note = (change.__doc__ or change.__name__.replace("_", " ")).strip().rstrip(".")
        for op in ops:
            given = {"right": functools.partial(torch_kernel, op), **more}
            self.found.append(Mutant(op, change.__name__.strip("_"), kind, note, functools.partial(wrap, op), **given))

    def kernel(self, kind: str, *ops: str, gpu: str | None = None, **declares: Any) -> Callable[[Kernel], Kernel]:
        """A whole kernel: arguments in schema order, then the target. It declares nothing but ``declares``."""

        def register(change: Kernel) -> Kernel:
            self._add(kind, ops, change, lambda op: change, declares=declares, gpu=gpu)
            return change

        return register

    def output(self, kind: str, *ops: str, gpu: str | None = None) -> Callable[[Kernel], Kernel]:
        """The right kernel's outputs, changed: ``change(*outputs)`` returns them, or None after changing in place."""

        def register(change: Kernel) -> Kernel:
            def wrap(op: str) -> Kernel:
                def kernel(*args: Any) -> Any:
                    outputs = as_tuple(torch_kernel(op)(*args))
                    changed = change(*outputs)
                    kept = outputs if changed is None else changed
                    return kept[0] if isinstance(kept, tuple) and len(kept) == 1 else kept

                return kernel

            self._add(kind, ops, change, wrap, gpu=gpu)
            return change

        return register

    def given(self, kind: str, *ops: str, gpu: str | None = None) -> Callable[[Kernel], Kernel]:
        """The right kernel on changed arguments: ``change(a)`` edits the dictionary of arguments."""

        def register(change: Kernel) -> Kernel:
            def wrap(op: str) -> Kernel:
                names = registry.primitive(op).names

                def kernel(*args: Any) -> Any:
                    named = dict(zip(names, args[:-1], strict=True))
                    change(named)
                    return torch_kernel(op)(*named.values(), args[-1])

                return kernel

            self._add(kind, ops, change, wrap, gpu=gpu)
            return change

        return register

    def unrounded(self, kind: str, *ops: str) -> Callable[[Kernel], Kernel]:
        """The op in float32, changed before its one rounding: ``change(outputs, args)`` gives what is rounded."""

        def register(change: Kernel) -> Kernel:
            def wrap(op: str) -> Kernel:
                def kernel(*args: Any) -> Any:
                    outputs = change(in_float32(op, args[:-1]), args[:-1])
                    return finish(op, outputs, args[:-1])

                return kernel

            for op in ops:
                self._add(kind, (op,), change, wrap, right=functools.partial(_float32, op), declares={})
            return change

        return register

    def around(self, kind: str, *ops: str, gpu: str | None = None) -> Callable[[Kernel], Kernel]:
        """A kernel with memory: ``change(op, right)`` makes one that knows nothing yet."""

        def register(change: Kernel) -> Kernel:
            self._add(kind, ops, change, lambda op: change(op, torch_kernel(op)), gpu=gpu)
            return change

        return register

    def edit(self, backend: str, kind: str, ops: str, name: str, file: str, old: str, new: str, *,
             under: tuple[Edit, ...] = (), first: str = "", target: Mapping[str, Any] = NOTHING,
             harmless: str | None = None) -> None:  # fmt: skip
        """An edit of the real source, for each of the (space-separated) ops.

        under: edits that change no result (smaller tiles, so that small cases take several), which the right kernel has
        too. first: the cases where it bites. target: what the launcher is told of the device (fewer threads make rows
        long ones, vendor "cpu" puts several rows into a tile). harmless: why it may change nothing.
        """
        for op in ops.split():
            note = f"{_first_line(old)}  ->  {_first_line(new)}"
            edits = (*under, Edit(file, old, new))
            self.found.append(Mutant(
                op, name, kind, note, functools.partial(edited, backend, op, edits, target),
                functools.partial(edited, backend, op, under, target), backend, edits=edits, first=tuple(first.split()),
                harmless=harmless, gpu=NEEDS_COMPILER if backend == "simt" else None,
            ))  # fmt: skip


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].strip()


def edited(backend: str, op: str, edits: tuple[Edit, ...], target: Mapping[str, Any] = NOTHING) -> Kernel:
    """An op's kernel from its source after some edits (none: the package's own). ``target``: facts that are changed."""
    line = registry.implementation(op, "cuda" if backend == "simt" else backend)
    module, _, function = line.where.partition(":")
    file = module.removeprefix("ferryman.").replace(".", "/") + ".py"
    load = simt_kernel if backend == "simt" else triton_kernel
    launcher = load(edits, file, function) if edits else registry.launcher(line)
    if not target:
        return launcher

    def told(*args: Any) -> Any:
        return launcher(*args[:-1], dataclasses.replace(args[-1], **target))

    return told


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    return next(a for a in args if isinstance(a, Tensor))


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded toward zero, as dropping low bits does."""
    if dtype == torch.bfloat16:
        return (x.contiguous().view(torch.int32) & -65536).view(torch.float32).to(dtype)
    rounded = x.to(dtype)
    if dtype != torch.float16:
        return rounded
    away = (rounded.float().abs() > x.abs()) & x.isfinite()
    return (rounded.contiguous().view(torch.int16) - away.short()).view(torch.float16)  # sign and magnitude


def through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype`` and back to float32."""
    return x.to(dtype).float()

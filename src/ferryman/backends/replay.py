"""A launcher's work for one call, kept as a function that allocates, packs pointers and launches, and does no more.

From the facts of a call (shapes, strides, dtypes, scalars, the device) a launcher works out tiles, grids and strides,
and picks a compiled kernel. A repeated call shares all of them but the addresses. `freeze` runs the launcher once on
meta tensors, notes what it allocates and launches, and generates a function of the same parameters that repeats it.

That is right as long as the launches depend on nothing but those facts, which a menu line declares (``replayable``),
and on the tensors' 16-byte alignment, which the generated function tests: it leaves unaligned tensors, another current
device and launch hooks that were set meanwhile to the launcher itself, and refuses freed storages. Whatever else a
launcher does to a tensor than allocating, viewing and copying makes it unfit for this, and `freeze` returns None;
`attempt` raises with the reason.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ferryman.backends.replay_record import STREAM, Memory, NotReplayable, Pointer, Recording, Step
from ferryman.errors import ArgumentError, FerrymanError

ALIGNMENT = 16  # bytes: what Triton specialises pointers on, and the width of a vector load
_GUARDS = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# A storage that was freed has the address 0, and a view into it that of its offset, which may be gigabytes.
_PERHAPS_FREED = 1 << 40
_READS = frozenset(
    [torch.device]
    + [
        getattr(Tensor, name)
        for name in (
            "size",
            "stride",
            "numel",
            "nelement",
            "dim",
            "element_size",
            "is_contiguous",
            "storage_offset",
            "is_floating_point",
            "untyped_storage",
            "__len__",
        )
    ]
    + [
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "ndim",
            "layout",
            "itemsize",
            "requires_grad",
        )
    ]
)
_ALLOCATIONS = {
    torch.empty: "empty",
    torch.empty_like: "empty",
    torch.empty_strided: "empty",
    Tensor.new_empty: "empty",
    torch.zeros: "zeros",
}
# what a launcher sees of the device: the call's, not that of the stand-ins
_PLACES: dict[Any, Callable[[torch.device], Any]] = {
    getattr(Tensor, name).__get__: answer
    for name, answer in {
        "device": lambda device: device,
        "is_cuda": lambda device: device.type == "cuda",
        "is_cpu": lambda device: device.type == "cpu",
        "is_meta": lambda device: False,
    }.items()
}
_VIEWS = frozenset(
    [
        torch.as_strided,
        *[
            getattr(Tensor, name)
            for name in (
                "contiguous",
                "reshape",
                "view",
                "as_strided",
                "transpose",
                "t",
                "permute",
                "unsqueeze",
                "squeeze",
                "expand",
                "flatten",
                "unflatten",
                "select",
                "narrow",
                "__getitem__",
                "detach",
            )
        ],
    ]
)


class _Watch(TorchFunctionMode):
    """Sees every PyTorch function that the launcher calls, attributes of tensors included."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            return func(*args, **kwargs)
        if func == Tensor.data_ptr:
            return self.recording.pointer(args[0])
        if func in _PLACES:
            return _PLACES[func](self.recording.device)
        if func in _ALLOCATIONS:
            # On the call's own device, which a new tensor like another one is on without being told.
            like = isinstance(args[0], Tensor) if args else False
            place = kwargs.get("device", self.recording.device if like else None)
            if place != self.recording.device:
                raise NotReplayable(f"an allocation on {place}")
            tensor = func(*args, **{**kwargs, "device": "meta"})
            if tensor.requires_grad:
                raise NotReplayable("an allocation that requires a gradient")
            self.recording.note(_ALLOCATIONS[func], tensor, f"new{len(self.recording.memory)}")
            return tensor
        if func in _VIEWS:
            return self._view(args[0], func(*args, **kwargs))
        raise NotReplayable(f"a call of {getattr(func, '__qualname__', func)}")

    def _view(self, source: Tensor, result: Tensor) -> Tensor:
        if result is source:
            return result
        base = self.recording.of(source)
        if result.untyped_storage()._cdata == source.untyped_storage()._cdata:
            self.recording.note("view", result, "", base)
        elif base.kind != "argument":
            raise NotReplayable("a copy of something that is no argument")
        else:
            self.recording.note("copy", result, f"new{len(self.recording.memory)}", base)
        return result


class _Active(threading.local):
    recording: Recording | None = None


_active = _Active()


def recording() -> Recording | None:
    """The recording that this thread's launches belong to: they are to be added to it, and nothing launched."""
    return _active.recording


def must_hold(op: str, names: Sequence[str], values: Sequence[Any]) -> None:
    """Raise ArgumentError where a tensor's storage was freed (``resize_(0)``, as FSDP does between uses): a kernel that
    got its address would end the device's context. A view's address in such a storage is not 0 but its offset."""
    for name, x in zip(names, values, strict=True):
        if isinstance(x, Tensor) and x.numel() and x.untyped_storage().nbytes() == 0:
            raise ArgumentError(
                op, f"{name}.untyped_storage().nbytes()", 0, "the tensor's elements in memory: gather them first"
            )


def careful(launcher: Callable[..., Any], names: Sequence[str], op: str) -> Callable[..., Any]:
    """The launcher, after `must_hold`."""

    def launch(*args: Any) -> Any:
        must_hold(op, names, args[:-1])
        return launcher(*args)

    return launch


def freeze(
    launcher: Callable[..., Any],
    names: Sequence[str],
    args: Sequence[Any],
    extra: Any,
    device: torch.device,
    op: str = "",
) -> Callable[..., Any] | None:
    """`attempt`, or None where the launcher cannot be repeated."""
    try:
        return attempt(launcher, names, args, extra, device, op)
    except NotReplayable:
        return None


def attempt(
    launcher: Callable[..., Any],
    names: Sequence[str],
    args: Sequence[Any],
    extra: Any,
    device: torch.device,
    op: str = "",
) -> Callable[..., Any]:
    """``launcher(*args, extra)`` as a function of the same parameters for calls that differ in addresses alone.

    Raises NotReplayable where it cannot be repeated: tensors that are not aligned now, or a launcher that is not
    `replayable`. ``op`` is named by the ArgumentError that the function raises for a tensor whose storage was freed.
    """
    for name, value in zip(names, args, strict=True):
        if isinstance(value, Tensor) and value.data_ptr() % ALIGNMENT:
            raise NotReplayable(f"{name} does not lie at a multiple of {ALIGNMENT} bytes")
    record = Recording(device)
    stand_ins: list[Any] = []
    for name, value in zip(names, args, strict=True):
        if isinstance(value, Tensor):
            # One for each argument, even where two are the same tensor now: they need not be at the next call.
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            record.note("argument", value, name)
        stand_ins.append(value)
    _active.recording = record
    try:
        with torch.no_grad(), _Watch(record):
            try:
                result = launcher(*stand_ins, extra)
            except (
                NotReplayable,
                FerrymanError,
            ):  # the latter: a kernel that is not compiled here for these very facts
                raise
            except Exception as error:  # it serves real tensors, as it just did; stand-ins are not its duty
                raise NotReplayable(f"on tensors without data it raises {type(error).__name__}: {error}") from error
        source, namespace = _generate(record, names, result, launcher, op)
    except FerrymanError as error:
        raise NotReplayable(str(error)) from error
    finally:
        _active.recording = None
    exec(compile(source, f"{_FILE} {launcher.__module__}.{launcher.__name__}>", "exec"), namespace)  # noqa: S102
    frozen: Callable[..., Any] = namespace["frozen"]
    return frozen


_FILE = "<ferryman replay of"


def is_replay(run: Callable[..., Any]) -> bool:
    """Whether `attempt` generated this function."""
    code = getattr(run, "__code__", None)
    return code is not None and code.co_filename.startswith(_FILE)


class _Writer:
    """The generated function: its constants by name, its lines."""

    def __init__(self, recording: Recording, shapes: dict[Memory, Tensor]) -> None:
        self.recording, self.shapes = recording, shapes
        self.namespace: dict[str, Any] = {}
        self.addresses: dict[str, None] = {}  # arguments whose address is needed, in order
        self.lines: list[str] = []

    def constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        name = f"k{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def address(self, memory: Memory) -> str:
        root, offset = memory.root, memory.offset
        if root.kind == "argument":
            self.addresses[root.name] = None
        where = f"p_{root.name}" if root.kind == "argument" else f"{root.name}.data_ptr()"
        return f"{where} + {offset}" if offset else where

    def argument(self, value: Any) -> str:
        if value is STREAM:
            return "stream"
        if isinstance(value, Tensor):
            value = self.recording.pointer(value)
        return self.address(value.memory) if isinstance(value, Pointer) else self.constant(value)

    def event(self, event: Memory | Step) -> None:
        if isinstance(event, Step):
            given = ", ".join(self.argument(a) for a in event.arguments)
            self.lines.append(f"{self.constant(event.function)}({given})")
            return
        if event.kind == "copy":
            assert event.base is not None
            self.lines.append(f"{event.name} = {event.base.name}.contiguous()")
            return
        shape = self.shapes.get(event, event.tensor)
        size, stride, dtype = (self.constant(v) for v in (tuple(shape.shape), shape.stride(), shape.dtype))
        device = self.recording.device
        direct = getattr(_GUARDS, f"_empty_strided_{device.type}", None)  # Inductor's: 0.3 us against 0.6 of empty_like
        if event.kind == "zeros":
            call = f"{self.constant(torch.zeros)}({size}, dtype={dtype}, device={self.constant(device)})"
        elif direct is not None:
            call = f"{self.constant(direct)}({size}, {stride}, {dtype})"
        else:
            where = self.constant(device)
            call = f"{self.constant(torch.empty_strided)}({size}, {stride}, dtype={dtype}, device={where})"
        self.lines.append(f"{event.name} = {call}")

    def result(self, value: Any) -> str:
        if isinstance(value, (tuple, list)):
            items = ", ".join(self.result(v) for v in value)
            return f"({items},)" if isinstance(value, tuple) else f"[{items}]"
        if not isinstance(value, Tensor):
            return self.constant(value)
        memory = self.recording.of(value)
        root = memory.root
        if (memory is root and root.kind != "copy") or self.shapes.get(root) is value:
            return root.name
        if root.kind not in ("empty", "zeros") or value.dtype != root.tensor.dtype or root in self.shapes:
            raise NotReplayable("a result that is a view of an argument, or of another result")
        size, stride = self.constant(tuple(value.shape)), self.constant(value.stride())
        return f"{root.name}.as_strided({size}, {stride}, {value.storage_offset()})"


def _generate(
    recording: Recording, names: Sequence[str], result: Any, launcher: Callable[..., Any], op: str
) -> tuple[str, dict[str, Any]]:
    write = _Writer(recording, _direct_shapes(recording, result))
    for event in recording.events:
        write.event(event)
    returned = write.result(result)
    steps = [e for e in recording.events if isinstance(e, Step)]
    idle = {id(hooks): hooks for step in steps for hooks in step.idle}
    same = {(id(item[0]), item[1]): item for step in steps for item in step.same}
    unless = [write.constant(hooks) for hooks in idle.values()]
    unless += [f"{write.constant(o)}.{name} is not {write.constant(value)}" for o, name, value in same.values()]
    namespace, parameters = write.namespace, f"{', '.join(names)}, extra"
    head, device = [], recording.device
    if device.type == "cuda":
        namespace["current"] = torch._C._cuda_getDevice
        unless.insert(0, f"current() != {device.index}")
    namespace["launcher"] = launcher
    if unless:
        head += [f"if {' or '.join(unless)}:", f"    return launcher({parameters})"]
    head += [f"p_{name} = {name}.data_ptr()" for name in write.addresses]
    read_addresses = [f"p_{m.name}" if m.name in write.addresses else f"{m.name}.data_ptr()" for m in _read(recording)]
    if read_addresses:
        namespace |= {"must_hold": must_hold, "names": tuple(names)}
        low = " or ".join(f"{address} < {_PERHAPS_FREED}" for address in read_addresses)
        head += [f"if {low}:", f"    must_hold({op!r}, names, ({', '.join(names)},))"]
    if write.addresses:
        joined = " | ".join(f"p_{name}" for name in write.addresses)
        head += [f"if ({joined}) & {ALIGNMENT - 1}:", f"    return launcher({parameters})"]
    if steps and device.type == "cuda":
        namespace["stream_of"] = torch._C._cuda_getCurrentRawStream
        head.append(f"stream = stream_of({device.index})")
    elif steps:
        head.append("stream = 0")
    body = "".join(f"    {line}\n" for line in (*head, *write.lines, f"return {returned}"))
    return f"def frozen({parameters}):\n{body}", namespace


def _read(recording: Recording) -> list[Memory]:
    """The arguments that have elements, and are launched with or copied."""
    steps = [e for e in recording.events if isinstance(e, Step)]
    given = [a for step in steps for a in step.arguments]
    memory = [recording.of(a) if isinstance(a, Tensor) else a.memory for a in given if isinstance(a, (Tensor, Pointer))]
    memory += [e.base for e in recording.events if isinstance(e, Memory) and e.kind == "copy" and e.base is not None]
    return list({id(m.root): m.root for m in memory if m.root.kind == "argument" and m.root.tensor.numel()}.values())


def _direct_shapes(recording: Recording, result: Any) -> dict[Memory, Tensor]:
    """Allocations that are returned as one view of all their elements, and are allocated as that view at once."""
    returned = [r for r in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(r, Tensor)]
    views: dict[Memory, Tensor] = {}
    for value in returned:
        memory = recording.of(value)
        root = memory.root
        alone = sum(recording.of(r).root is root for r in returned) == 1
        if memory is root or not alone or root.kind != "empty" or value.dtype != root.tensor.dtype:
            continue
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        if memory.offset == 0 and value.numel() == root.tensor.numel() == span:
            views[root] = value
    return views

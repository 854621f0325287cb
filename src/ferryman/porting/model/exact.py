"""The exact twin: a model's or a module's own code, evaluated in float64 (float32 where memory forbids).

No second implementation is written. The unported code runs on widened inputs and parameters, and each request for a
narrower dtype inside it (`.float()` in a norm, `dtype=torch.float32` in a softmax) is answered in the wide one. Modules
are widened one at a time, so the twin needs one module's memory, not a model's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ferryman.porting.model import config

NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = {Tensor.float: None, Tensor.half: None, Tensor.bfloat16: None}
SHARE = 0.8  # of the free memory that the twin of one module may take


_TYPES = {"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"}
_GROUPED = getattr(torch, "_grouped_mm", None)


def _grouped(x: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Rows up to each end by the weights of their group; those past the last are 0."""
    ends = offs.tolist()
    products = [x[first:end] @ w for first, end, w in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*products, x.new_zeros(x.shape[0] - ends[-1], weights.shape[-1])])


def _misfits(x: Tensor, dim: Any = None, sizes: Any = None) -> bool:
    """Whether `unflatten` would raise for its sizes. PyTorch takes milliseconds to say so, and a search asks often."""
    if not (isinstance(dim, int) and isinstance(sizes, tuple | list) and all(isinstance(n, int) for n in sizes)):
        return False
    if not -x.dim() <= dim < x.dim() or list(sizes).count(-1) > 1 or any(n < -1 or n == 0 for n in sizes):
        return False
    product, size = math.prod(n for n in sizes if n != -1), x.shape[dim]
    return size % product != 0 if -1 in sizes else size != product


class Widened(TorchFunctionMode):
    """Within it, every cast to a floating dtype goes to ``dtype``. A product of rows in groups, which PyTorch does not
    have in float64, is made group by group."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].to(self.dtype)
        if func is Tensor.unflatten and _misfits(*args, **(kwargs or {})):
            raise RuntimeError("sizes do not multiply up to the dimension's")
        wide = self.dtype
        if func is Tensor.type and len(args) == 2 and isinstance(args[1], torch.dtype | str):
            narrow = args[1] in NARROW or args[1] in _TYPES  # it is C's, and no argument of it may be swapped
            return args[0].to(wide) if narrow else func(*args, **(kwargs or {}))

        def swap(leaf: Any) -> Any:
            return wide if isinstance(leaf, torch.dtype) and leaf in NARROW else leaf

        named = kwargs or {}
        given: tuple[Any, ...] = tuple(map(swap, args)) if torch.dtype in map(type, args) else args
        if torch.dtype in map(type, named.values()):
            named = {k: swap(v) for k, v in named.items()}
        if _GROUPED is not None and func is _GROUPED and given[0].dtype == torch.float64 and len(given) == 2:
            plain = named.get("bias") is None and named.get("out_dtype") in (None, torch.float64)
            if plain and given[0].dim() == 2 and given[1].dim() == 3:
                return _grouped(*given, named["offs"])
        return func(*given, **named)


def dtype_for(device: torch.device, bytes_needed: int) -> torch.dtype:
    """float64 where a twin of that size (in float64) fits beside what is there, else float32."""
    if device.type not in ("cpu", "cuda"):  # MPS has no float64
        return torch.float32
    free = config.free_bytes(device)
    return torch.float64 if free is None or bytes_needed <= SHARE * free else torch.float32


def mapped(tree: Any, change: Callable[[Tensor, str], Any], name: str = "") -> Any:
    """The tree of tuples, lists and dicts with each floating tensor changed; ``change`` is told where it stands."""
    if isinstance(tree, Tensor):
        return change(tree, name) if tree.is_floating_point() else tree
    if isinstance(tree, tuple | list):
        parts = [mapped(item, change, f"{name}[{i}]") for i, item in enumerate(tree)]
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, dict):
        return {key: mapped(item, change, f"{name}.{key}" if name else str(key)) for key, item in tree.items()}
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """The floating tensors of a tree, in order."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor, name: str) -> Tensor:
        tensors.append(tensor)
        return tensor

    mapped(tree, keep)
    return tensors


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> tuple[Tensor, torch.dtype]:
    """The unported model's exact logits: one leaf module is widened at a time, while it runs."""
    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    most = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in leaves)
    wide = dtype_for(tokens.device, 8 * (most + 4 * tokens.numel() * int(model.config.vocab_size)))
    stored: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def before(module: nn.Module, args: Any) -> None:
        mine = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        pairs = [(t, t.data) for t in mine if t.is_floating_point()]
        stored[id(module)] = pairs
        for tensor, data in pairs:
            tensor.data = data.to(wide)

    def after(module: nn.Module, args: Any, out: Any) -> None:
        for tensor, data in stored.pop(id(module), ()):
            tensor.data = data

    with contextlib.ExitStack() as stack:
        for leaf in leaves:
            stack.callback(leaf.register_forward_pre_hook(before).remove)
            stack.callback(leaf.register_forward_hook(after, always_call=True).remove)
        with Widened(wide):
            exact_logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return exact_logits, wide


@contextlib.contextmanager
def parameters(module: nn.Module, wide: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Widened parameters and buffers of a module by name, for `torch.func.functional_call`; parameters are leaves."""
    tensors = {n: p.detach().to(wide).requires_grad_(p.requires_grad) for n, p in module.named_parameters()}
    tensors |= {n: b.to(wide) if b.is_floating_point() else b for n, b in module.named_buffers()}
    yield tensors
    tensors.clear()

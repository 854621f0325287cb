"""What is timed: for each op, shapes of real models, larger than the last cache and smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ferryman.errors import UnknownName
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.cases import as_tuple, forward_of, materialise
from ferryman.porting.fills import DTYPES, Buffer
from ferryman.porting.timing import standard_case

Grid = Literal["small", "full"]
LARGE_BYTES = 64 << 20
_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_SHORT = ((1, 4096), (16, 4096), (128, 4096), (256, 8192))  # decoding, and what fits in a cache
_WEIGHTS = ((4096, 4096), (14_336, 4096), (4096, 14_336), (28_672, 8192))  # of projections: outputs, inputs
_DENSE = {"causal": True, "scale": None, "window": None, "softcap": 0.0, "mask": None}


def grid_of(name: str) -> Grid:
    """A grid by name. Raises UnknownName."""
    for known in get_args(Grid):
        if name == known:
            return known
    raise UnknownName("grid", name, get_args(Grid))


def cases(op: Primitive, grid: Grid, device: torch.device) -> list[Case]:
    """The cases that an op is timed on; a backward has its forward's. On a CPU the op's first standard case alone."""
    forward = forward_of(op) or op
    if device.type == "cpu":
        case = standard_case(forward)
        return [] if case is None else [case]
    made = list(_made(forward.name, grid))
    if not made:  # another package's op
        case = standard_case(forward)
        return [] if case is None else [case]
    return made


def _rows(grid: Grid, itemsize: int = 2) -> list[tuple[int, int]]:
    if grid == "small":
        return [(16, 4096), (8192, 8192)]
    return [*_SHORT, *((max(1, 2 * LARGE_BYTES // (w * itemsize)), w) for w in _WIDTHS)]


def _made(op: str, grid: Grid) -> Iterator[Case]:
    if op in ("rms_norm", "add_rms_norm", "layer_norm", "softmax", "silu_mul", "gelu_mul"):
        for rows, width in _rows(grid):
            x, line = TensorSpec((rows, width)), TensorSpec((width,), fill="weight")
            arguments: dict[str, dict[str, Any]] = {
                "rms_norm": {"x": x, "weight": line, "eps": 1e-6, "cast_before_weight": False},
                "add_rms_norm": {"x": x, "residual": x, "weight": line, "eps": 1e-6, "cast_before_weight": False},
                "layer_norm": {"x": x, "weight": line, "bias": TensorSpec((width,)), "eps": 1e-5},
                "softmax": {"x": x}, "silu_mul": {"gate": x, "up": x},
                "gelu_mul": {"gate": x, "up": x, "approximate": "tanh"},
            }  # fmt: skip
            yield Case(f"{rows}x{width}", arguments[op])
    elif op in ("cross_entropy", "cross_entropy_inplace_grad"):
        shapes = (
            [(4096, 128_256)] if grid == "small" else [(512, 32_000), (4096, 50_257), (4096, 128_256), (8192, 152_064)]
        )
        for rows, width in shapes:
            labels = TensorSpec((rows,), dtype="int64", low=0, high=width)
            yield Case(f"{rows}x{width}", {"logits": TensorSpec((rows, width)), "target": labels,
                                           "ignore_index": -100, "label_smoothing": 0.0})  # fmt: skip
    elif op in ("rope", "rope_"):
        shapes4 = [(4, 4096, 32, 8, 128)] if grid == "small" else [
            (32, 1, 32, 8, 128), (1, 512, 32, 8, 128), (4, 4096, 32, 8, 128), (4, 4096, 16, 16, 64),
        ]  # fmt: skip
        for b, s, h, kv, d in shapes4:
            angle = TensorSpec((1, s, d), fill="angles")  # Liger's reads one half only
            q, k = TensorSpec((b, h, s, d), layout="heads"), TensorSpec((b, kv, s, d), layout="heads")
            yield Case(f"B{b} H{h}/{kv} S{s} D{d}", {"q": q, "k": k, "cos": angle, "sin": angle, "interleaved": False})
    elif op == "linear":
        shapes3 = [(8192, 8192, 8192), (16, 14_336, 4096)] if grid == "small" else [
            (8192, 8192, 8192), (4096, 14_336, 4096), *((m, *weight) for m in (1, 16, 64) for weight in _WEIGHTS),
        ]  # fmt: skip
        for m, n, depth in shapes3:
            yield Case(
                f"{m}x{n}x{depth}", {"x": TensorSpec((m, depth)), "weight": TensorSpec((n, depth)), "bias": None}
            )
    elif op == "attention":
        shapes5 = [(2, 32, 8, 8192, 8192, 128), (32, 32, 8, 1, 4096, 128)]
        if grid == "full":
            shapes5 += [(2, 32, 32, 8192, 8192, 128), (4, 32, 32, 4096, 4096, 64), (8, 32, 8, 2048, 2048, 128),
                        (1, 32, 8, 1, 32_768, 128)]  # fmt: skip
        for b, h, kv, queries, keys, d in shapes5:
            q, k = TensorSpec((b, h, queries, d), layout="heads"), TensorSpec((b, kv, keys, d), layout="heads")
            name = f"B{b} H{h}/{kv} Q{queries} K{keys} D{d} causal"
            yield Case(name, {"q": q, "k": k, "v": k, **_DENSE})


def inputs(op: Primitive, case: Case, dtype: torch.dtype, seed: int, device: torch.device) -> tuple[Any, ...]:
    """Random arguments in schema order; a backward's from one forward by whatever implementation dispatch chooses."""
    forward = forward_of(op)
    if forward is None:
        return materialise(case, op, dtype, seed, device)
    values = materialise(case, forward, dtype, seed, device)
    with torch.no_grad():
        outputs = as_tuple(forward.namespace["_resolve"](*values))
    generator = torch.Generator(device).manual_seed(seed)

    def gradient(like: Tensor) -> Tensor:
        made = torch.randn(like.shape, generator=generator, device=device, dtype=torch.float32).to(like.dtype)
        return torch.empty_like(like).copy_(made)

    return _backwards(op, forward, values, outputs, gradient)


def on_meta(op: Primitive, case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    """The shapes, dtypes and strides that `inputs` gives, on the meta device."""
    forward = forward_of(op) or op
    values = []
    for parameter in forward.parameters:
        value = case.args.get(parameter.name, parameter.default)
        if isinstance(value, TensorSpec):
            own = dtype if value.dtype == "storage" else DTYPES[value.dtype]
            value = Buffer.around(torch.empty(value.shape, device="meta"), own, value.layout).tensor
        values.append(value)
    if forward is op:
        return tuple(values)
    return _backwards(op, forward, values, as_tuple(forward.meta(*values)), torch.empty_like)


def _backwards(
    op: Primitive, forward: Primitive, values: Sequence[Any], outputs: Sequence[Tensor],
    gradient: Callable[[Tensor], Tensor],
) -> tuple[Any, ...]:  # fmt: skip
    """A backward's arguments from its forward's and what that gave; gradients that are optional are absent."""
    given = dict(zip(forward.names, values, strict=True))
    for name, tensor in zip(forward.outputs, outputs, strict=True):
        given[f"out_{name}"] = tensor
        given.setdefault(name, tensor)
    for name, index in forward.gradient_names().items():
        made = gradient(outputs[index])  # drawn though it may be left out: the others' values stay
        given[name] = None if op.types.get(name) == "Tensor?" else made
    given |= {name: True for name in op.names if name.startswith("need_")}
    return tuple(given[name] for name in op.names)

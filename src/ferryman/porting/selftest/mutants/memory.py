"""Memory: results never written, inputs written, buffers shared or kept, work that is not waited for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.porting.cases import as_tuple
from ferryman.porting.selftest.planting import Bugs, Kernel, Outputs, first_tensor, torch_kernel

BUGS = Bugs()
NEEDS_STREAMS = "a CPU has no streams"


# ------------------------------------------------------------------------------------------------------- stale output


@BUGS.output(
    "stale output", "silu_mul", "rms_norm", "softmax", "linear", "layer_norm_backward", "cross_entropy_backward"
)
def last_column_never_written(y: Tensor, *rest: Tensor) -> Outputs:
    """The last column keeps what memory held"""
    if y.dim() == 0 or y.shape[-1] < 2:
        return (y, *rest)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    out[..., :-1] = y[..., :-1]
    return (out, *rest)


@BUGS.kernel("stale output", "rope", "rope_backward")
def rest_of_the_head_never_written(q: Tensor, k: Tensor, cos: Tensor, *rest: Any) -> Any:
    """Beyond rotary_dim nothing is written"""
    found = []
    for x, y in zip((q, k), torch_kernel("rope")(q, k, cos, *rest), strict=True):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out[..., : cos.shape[-1]] = y[..., : cos.shape[-1]]
        found.append(out)
    return tuple(found)


@BUGS.kernel("stale output", "cross_entropy_backward")
def ignored_rows_never_written(
    grad: Tensor, x: Tensor, labels: Tensor, lse: Tensor, ignore: int, smoothing: float, target: Any
) -> Tensor:
    """Rows that do not count keep what memory held"""
    y = torch_kernel("cross_entropy_backward")(grad, x, labels, lse, ignore, smoothing, target)
    fresh = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    return torch.where((labels != ignore).unsqueeze(-1), y, fresh)


@BUGS.kernel("stale output", "attention")
def rows_that_see_nothing_never_written(*args: Any) -> Any:
    """A row that sees no key keeps what memory held"""
    out, lse = torch_kernel("attention")(*args)
    b, h, s, d = out.shape
    fresh = torch.empty((b, s, h, d), dtype=out.dtype, device=out.device).transpose(1, 2)
    fresh.copy_(torch.where(lse.isneginf().unsqueeze(-1), fresh, out))
    return fresh, lse


@BUGS.output("stale output", "linear", "rms_norm_backward")
def accumulated_into_unzeroed_memory(*outputs: Tensor) -> Outputs:
    """The last result is added, as split-k with atomics does, into memory that nobody set to zero"""
    last = outputs[-1]
    return (*outputs[:-1], torch.empty(last.shape, dtype=last.dtype, device=last.device).add_(last))


# ------------------------------------------------------------------------------------------------------ inputs written


@BUGS.around("input modified", "rms_norm", "linear", "softmax", "gelu_mul", "attention", "rms_norm_backward")
def one_input_element_changed(op: str, right: Kernel) -> Kernel:
    """The result is right, but one element of the first input has moved"""

    def kernel(*args: Any) -> Any:
        outputs = right(*args)
        x = first_tensor(args)
        if x.numel():
            x[(0,) * x.dim()] += 1
        return outputs

    return kernel


@BUGS.around("input modified", "attention_backward", "softmax_backward", "silu_mul_backward")
def gradient_scaled_in_place(op: str, right: Kernel) -> Kernel:
    """The incoming gradient is scaled in its own memory"""

    def kernel(*args: Any) -> Any:
        outputs = right(*args)
        args[0].mul_(0.5)
        return outputs

    return kernel


@BUGS.around("input modified", "cross_entropy", "cross_entropy_backward")
def logits_shifted_in_place(op: str, right: Kernel) -> Kernel:
    """The logits' maximum is subtracted in their own memory: the result does not change"""

    def kernel(*args: Any) -> Any:
        outputs = right(*args)
        logits = args[1] if op.endswith("backward") else args[0]
        if logits.numel():
            logits.sub_(logits.amax(-1, keepdim=True))
        return outputs

    return kernel


# ------------------------------------------------------------------------------------------------------------ aliasing


@BUGS.around("output aliases input", "rms_norm", "softmax", "silu_mul", "layer_norm")
def computed_in_place(op: str, right: Kernel) -> Kernel:
    """The first input is overwritten and returned, where it is contiguous"""

    def kernel(*args: Any) -> Any:
        y = right(*args)
        return args[0].copy_(y) if args[0].is_contiguous() else y

    return kernel


@BUGS.kernel("output aliases input", "add_rms_norm")
def residual_updated_in_place(x: Tensor, residual: Tensor, *rest: Any) -> Any:
    """The sum is written into the residual, as fused serving kernels do, and returned"""
    y, s = torch_kernel("add_rms_norm")(x, residual, *rest)
    return (y, residual.copy_(s)) if residual.is_contiguous() else (y, s)


@BUGS.kernel("output aliases input", "cross_entropy_backward")
def gradient_written_over_the_logits(grad: Tensor, x: Tensor, *rest: Any) -> Any:
    """The gradient overwrites the logits, as Liger's kernel does"""
    y = torch_kernel("cross_entropy_backward")(grad, x, *rest)
    return x.copy_(y) if x.is_contiguous() else y


@BUGS.kernel("output aliases input", "add_rms_norm_backward")
def residual_gradient_passed_on(grad_y: Tensor, grad_residual: Tensor, *rest: Any) -> Any:
    """The sum's gradient is accumulated into the incoming one"""
    gs, gw = torch_kernel("add_rms_norm_backward")(grad_y, grad_residual, *rest)
    return (grad_residual.copy_(gs), gw) if grad_residual.is_contiguous() else (gs, gw)


@BUGS.output("outputs share memory", "rope", "layer_norm_backward")
def two_outputs_in_one_buffer(first: Tensor, *rest: Tensor) -> Outputs:
    """The last two outputs are one buffer, where their shapes agree"""
    if not rest:
        return (first,)
    before, last = (first, *rest)[-2:]
    same = before.shape == last.shape and before.dtype == last.dtype
    return (first, *rest)[:-1] + ((before,) if same else (last,))


@BUGS.around("outputs share memory", "softmax", "silu_mul", "linear")
def static_output_buffer(op: str, right: Kernel) -> Kernel:
    """One output buffer for each shape, written again by every call"""
    buffers: dict[tuple[Any, ...], Tensor] = {}

    def kernel(*args: Any) -> Any:
        y = right(*args)
        kept = buffers.setdefault((tuple(y.shape), y.dtype), y)
        return kept if kept is y else kept.copy_(y)

    return kernel


# --------------------------------------------------------------------------------------------------------- kept results


@BUGS.around("result kept", "rms_norm", "attention", "gelu_mul")
def result_kept_by_pointer(op: str, right: Kernel) -> Kernel:
    """The result of the same pointers and shapes is returned again"""
    kept: dict[tuple[Any, ...], Any] = {}

    def kernel(*args: Any) -> Any:
        key = tuple((a.data_ptr(), tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args)
        if key not in kept:
            kept.clear()
            kept[key] = right(*args)
        return kept[key]

    return kernel


@BUGS.around("result kept", "linear", "softmax", "layer_norm_backward")
def copy_of_a_result_kept_by_shape(op: str, right: Kernel) -> Kernel:
    """A copy of the first result of this shape is returned, whatever the inputs hold"""
    kept: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}

    def kernel(*args: Any) -> Any:
        key = tuple((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args[:-1])
        if key not in kept:
            kept[key] = tuple(t.clone() for t in as_tuple(right(*args)))
        copies = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
                       for t in kept[key])  # fmt: skip
        return copies[0] if len(copies) == 1 else copies

    return kernel


@BUGS.around("result kept", "linear", "linear_backward")
def packed_weight_kept_by_shape(op: str, right: Kernel) -> Kernel:
    """The packed weight of an earlier call serves every weight of that shape"""
    packed: dict[tuple[Any, ...], Tensor] = {}
    at = 1 if op == "linear" else 2

    def kernel(*args: Any) -> Any:
        weight = args[at]
        kept = packed.setdefault((tuple(weight.shape), weight.dtype), weight.contiguous().clone())
        return right(*args[:at], kept, *args[at + 1 :])

    return kernel


# ------------------------------------------------------------------------------------------------------- out of bounds


@BUGS.around("write out of bounds", "rms_norm", "silu_mul", "cross_entropy")
def one_element_past_the_end(op: str, right: Kernel) -> Kernel:
    """One element behind the first input is set to zero"""

    def kernel(*args: Any) -> Any:
        x = args[0]
        if x.is_contiguous() and x.numel():
            x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
        return right(*args)

    return kernel


@BUGS.around("write out of bounds", "softmax", "linear")
def overflow_by_128_bytes(op: str, right: Kernel) -> Kernel:
    """128 bytes before the first input are set to zero"""

    def kernel(*args: Any) -> Any:
        x = args[0]
        n = 128 // x.element_size()
        if x.is_contiguous() and x.storage_offset() >= n:
            x.as_strided((n,), (1,), x.storage_offset() - n).zero_()
        return right(*args)

    return kernel


@BUGS.kernel("read out of bounds", "rms_norm")
def row_read_one_too_far(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """The sum of squares runs one element past every row; the element is scaled by zero"""
    y = torch_kernel("rms_norm")(x, weight, eps, cast, target)
    if x.dim() != 2 or x.stride(-1) != 1 or x.numel() == 0:
        return y
    over = x.as_strided((x.shape[0], x.shape[1] + 1), (x.stride(0), 1), x.storage_offset())
    return y + (over[:, -1:].float() * 0).to(y.dtype)


@BUGS.kernel("read out of bounds", "linear")
def padded_tile_not_masked(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    """The K loop reads up to the next multiple of 16 of a dense weight, and trusts x's zeros beyond"""
    k = x.shape[-1]
    pad = -k % 16
    if not pad or not weight.is_contiguous() or weight.numel() == 0 or x.numel() == 0:
        return torch_kernel("linear")(x, weight, bias, target)
    wide = weight.as_strided((weight.shape[0], k + pad), (k, 1), weight.storage_offset())
    zeros = torch.cat((x, x.new_zeros(*x.shape[:-1], pad)), -1)
    return torch_kernel("linear")(zeros, wide, bias, target)


# ------------------------------------------------------------------------------------------------------ nondeterminism


@BUGS.output("nondeterministic", "rms_norm", "linear", "softmax")
def one_element_in_the_last_bit(y: Tensor) -> None:
    """Chance decides the last bit of the first element"""
    if y.numel():
        noise = 1 + (torch.rand(()) - 0.5) * torch.finfo(y.dtype).eps * 4
        first = (0,) * y.dim()
        y[first] = (y[first].float() * noise).to(y.dtype)


@BUGS.kernel("nondeterministic", "linear")
def chunks_added_in_any_order(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    """Partial sums of 8 are added in the order in which they arrive"""
    total = torch.zeros(*x.shape[:-1], weight.shape[0], device=x.device)
    parts = [a.float() @ b.float().T for a, b in zip(x.split(8, -1), weight.split(8, -1), strict=True)]
    for i in torch.randperm(len(parts)).tolist():
        total = total + parts[i]
    return (total if bias is None else total + bias.float()).to(x.dtype)


@BUGS.kernel("nondeterministic", "rms_norm_backward")
def atomic_weight_gradient(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Any) -> Any:
    """Rows are added into the weight's gradient by float32 atomics, in any order"""
    order = torch.randperm(x.shape[0]) if x.dim() > 1 else None
    gx, gw = torch_kernel("rms_norm_backward")(grad, x, weight, eps, target)
    if weight is None or order is None or x.numel() == 0:
        return gx, gw
    h = x.float()
    products = (grad.float() * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps))[order.to(x.device)]
    total = torch.zeros(x.shape[-1], device=x.device)
    for row in products.reshape(-1, x.shape[-1]):
        total = total + row
    return gx, total.to(weight.dtype)


# --------------------------------------------------------------------------------------------------------- GPU streams


def _late(y: Tensor, stream: Any) -> Tensor:
    """``y`` as a buffer that a side stream fills after some milliseconds."""
    late = torch.zeros_like(y)
    late.record_stream(stream)
    y.record_stream(stream)
    stream.wait_stream(torch.cuda.current_stream(y.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(y)
    return late


@BUGS.around("side stream", "rms_norm", "linear", "softmax", "attention", "silu_mul", gpu=NEEDS_STREAMS)
def written_on_a_side_stream(op: str, right: Kernel) -> Kernel:
    """The result is written on another stream, and nobody waits for it"""
    streams: list[Any] = []

    def kernel(*args: Any) -> Any:
        outputs = as_tuple(right(*args))
        if not streams:
            streams.append(torch.cuda.Stream(outputs[0].device))
        late = (_late(outputs[0], streams[0]), *outputs[1:])
        return late[0] if len(late) == 1 else late

    return kernel


@BUGS.around("stale graph replay", "rms_norm", "linear", gpu="a CPU has no CUDA graphs")
def graph_replayed_on_old_inputs(op: str, right: Kernel) -> Kernel:
    """A graph captured with the first inputs of a shape is replayed for later ones, which are never copied in"""
    graphs: dict[tuple[Any, ...], tuple[Any, Tensor, list[Any]]] = {}

    def kernel(*args: Any) -> Any:
        key = tuple((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in args[:-1])
        if not first_tensor(args).numel():
            return right(*args)
        if key not in graphs:
            held = [a.clone() if isinstance(a, Tensor) else a for a in args]
            right(*held)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = right(*held)
            graphs[key] = (graph, y, held)
        graph, y, _ = graphs[key]
        graph.replay()
        return y

    return kernel

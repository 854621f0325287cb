"""Eager and `torch.ops.ferryman.*` are one meaning: bitwise equal, gradients included; transforms and modes work."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, FerrymanError
from ferryman.ops.primitive import Primitive, TensorSpec
from ferryman.porting.bench.rotation import spared
from ferryman.porting.inputs.cases import arguments, as_tuple, cases_of
from ferryman.porting.mutate.rule import mapped
from tests import pairs

CPU = torch.device("cpu")
ALL = list(registry.primitives().values())
DTYPES = [torch.float32, torch.bfloat16]


def overload(op: Primitive) -> Any:
    return getattr(torch.ops.ferryman, op.name).default


def first_cases(op: Primitive, count: int) -> list[Any]:
    return [c for c in cases_of(op) if "nonfinite" not in c.name][:count]


def differentiable_outputs(op: Primitive, *args: Any) -> tuple[Tensor, ...]:
    outputs = as_tuple(op.body(*args))
    return tuple(o for n, o in zip(op.outputs, outputs, strict=True) if n not in op.gradient.nondifferentiable)


def with_gradients(op: Primitive, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """(arguments, leaves): where the op writes over an argument, the leaf's copy is given, in its strides."""
    wanted = {n for shared in op.gradient.owners for n in shared}
    given = tuple(
        v.detach().requires_grad_() if n in wanted and isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in zip(op.names, values, strict=True)
    )
    leaves = [v for v in given if isinstance(v, Tensor) and v.requires_grad]
    return spared(op, given), leaves


def whole(op: Primitive, args: tuple[Any, ...], result: Any) -> tuple[Tensor, ...]:
    """All outputs of the library's op, which returns none that is an argument."""
    return op.whole(args, result) if op.mutates else as_tuple(result)


@pytest.mark.daily(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_both_ways_are_bitwise_equal(op: Primitive, dtype: torch.dtype) -> None:
    for case in cases_of(op):
        values = arguments(case, op, dtype, 0, CPU).values
        results = []
        for way in (op.namespace["_resolve"], overload(op)):
            args, leaves = with_gradients(op, values)
            result = way(*args)
            outputs = as_tuple(result) if way is op.namespace["_resolve"] else whole(op, args, result)
            grads: tuple[Tensor, ...] = ()
            if op.gradient.backward is not None and leaves:
                kept = [o for n, o in zip(op.outputs, outputs, strict=True) if n not in op.gradient.nondifferentiable]
                cotangents = [torch.ones_like(o) for o in kept]
                grads = torch.autograd.grad(kept, leaves, cotangents)
            results.append([t.detach() for t in (*outputs, *grads)])
        for eager, library in zip(*results, strict=True):
            # a mutating op's gradient lies where its value did, or in the clone that the library's way has made
            assert eager.dtype == library.dtype and (op.mutates or eager.stride() == library.stride()), case.name
            assert torch.equal(torch.nan_to_num(eager, nan=7.5), torch.nan_to_num(library, nan=7.5)), case.name


EVERY = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
COMPARABLE = EVERY[1:3]  # the others compare tensors with allclose, which PyTorch lacks for floats of 8 bits


def in_8_bits(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.is_floating_point() and a.itemsize == 1 for a in args)


@pytest.mark.daily(7)
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_opcheck_with_inputs_that_require_grad(op: Primitive) -> None:
    """Of both dtypes, and two cases: of all cases `test_fake_outputs_are_the_real_ones` and both ways stand."""
    for case, dtype in zip(itertools.cycle(first_cases(op, 2)), (torch.float32, torch.bfloat16), strict=False):
        args, leaves = with_gradients(op, arguments(case, op, dtype, 0, CPU).values)
        assert leaves or op.gradient.backward is None
        with torch.no_grad() if op.mutates else contextlib.nullcontext():  # opcheck makes leaves of its copies
            given = tuple(a.detach() if op.mutates and isinstance(a, Tensor) else a for a in args)
            opcheck(overload(op), given, test_utils=COMPARABLE if in_8_bits(given) else EVERY)


@pytest.mark.daily(7)
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_fake_outputs_are_the_real_ones(op: Primitive) -> None:
    for case in cases_of(op):
        values = arguments(case, op, torch.bfloat16, 0, CPU).values
        given = spared(op, values)
        real = whole(op, given, overload(op)(*given))
        with FakeTensorMode() as mode:
            given = tuple(mapped(mode.from_tensor, v) for v in values)
            fake = whole(op, given, overload(op)(*given))
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), case.name
            if a.numel():  # a dimension of one element has no stride worth the name
                assert all(m == n for m, n, k in zip(a.stride(), b.stride(), a.shape, strict=True) if k > 1), case.name


def test_the_fake_implementation_checks_arguments() -> None:
    with FakeTensorMode(), pytest.raises(ArgumentError, match="weight.shape"):
        ops.rms_norm(torch.empty(3, 8), torch.empty(7))


@pytest.mark.parametrize("op", pairs.differentiable(), ids=lambda op: op.name)
def test_results_may_be_written_to_in_place(op: Primitive) -> None:
    """By what follows in a model, as a functional's may be; the gradient goes through what was done."""
    read = {name.removeprefix("out_") for name in registry.primitive(str(op.gradient.backward)).names}
    for case in first_cases(op, 6):
        values = arguments(case, op, torch.float32, 0, CPU).values
        for i, name in enumerate(op.outputs):
            if name in op.gradient.nondifferentiable or name.removeprefix("out_") in op.mutates:
                continue
            slopes = []
            for in_place in (False, True):
                args, leaves = with_gradients(op, values)
                out = as_tuple(op.namespace[op.name](*args))[i]
                if name in read:
                    out = out.clone()  # what a backward reads may not change, of a functional either
                doubled = out.mul_(2.0) if in_place else out * 2.0
                slopes.append(torch.autograd.grad(doubled.float().sum(), leaves, allow_unused=True))
            for plain, written in zip(*slopes, strict=True):
                assert (plain is None) is (written is None) and (plain is None or torch.equal(plain, written))


def test_a_product_of_three_dimensions_may_be_written_to() -> None:
    draw = torch.Generator().manual_seed(0)  # whole numbers: every sum is exact, in any order
    shapes = ((2, 3, 16), (8, 16), (8,))
    leaves = [torch.randint(-3, 4, s, generator=draw).float().requires_grad_() for s in shapes]
    product, wanted = ops.linear(*leaves), torch.nn.functional.linear(*leaves)
    slopes = []
    for out in (product, wanted):
        out += 1.0
        slopes.append(torch.autograd.grad(out.square().sum(), leaves))
    assert torch.equal(product, wanted) and all(map(torch.equal, *slopes))


@pytest.mark.parametrize("op", pairs.differentiable(), ids=lambda op: op.name)
def test_compiled_in_one_graph_forward_and_backward(op: Primitive) -> None:
    """A request keeps the op opaque, so the compiled call must be bitwise the eager one, and be served as asked."""
    torch._dynamo.reset()
    case = first_cases(op, 2)[1]
    values = arguments(case, op, torch.bfloat16, 0, CPU).values
    function = torch.compile(op.namespace[op.name], fullgraph=True, backend="aot_eager")
    results = []
    for call in (op.namespace[op.name], function):
        args, leaves = with_gradients(op, values)
        with ferryman.use("definition"), ferryman.trace() as seen:
            outputs = as_tuple(call(*args))
            backward = registry.primitive(str(op.gradient.backward))
            kept = [o for n, o in zip(op.outputs, outputs, strict=True) if n not in op.gradient.nondifferentiable]
            grads = torch.autograd.grad([o.float().sum() for o in kept], leaves)
        fused = call is function and bool(backward.mutates)  # traced as its meaning
        assert seen.calls == {(op.name, "definition"): 1} | ({} if fused else {(op.gradient.backward, "definition"): 1})
        results.append([t.detach() for t in (*outputs, *grads)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


LOWERED = [op for op in ALL if op.lower is not None]


@pytest.mark.parametrize("op", LOWERED, ids=lambda op: op.name)
def test_pointwise_ops_lower_to_their_definition_unless_requested(op: Primitive) -> None:
    torch._dynamo.reset()
    case = first_cases(op, 2)[1]
    args = arguments(case, op, torch.float32, 0, CPU).values
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    function = torch.compile(op.namespace[op.name], fullgraph=True, backend=record)
    lowered = as_tuple(function(*spared(op, args)))
    assert names, dict(torch._dynamo.utils.counters)
    assert not any("ferryman" in name for name in names)
    names.clear()
    with ferryman.use("torch"):
        opaque = as_tuple(function(*spared(op, args)))
    assert names == [f"ferryman.{op.name}.default"] or f"ferryman.{op.name}" in names[0]
    for a, b in zip(lowered, opaque, strict=True):
        assert (a.double() - b.double()).abs().max() <= 1e-4 * (1 + b.abs().max())


def test_attention_is_traced_as_the_vendors_call_where_torch_would_serve_it() -> None:
    """Plain calls become one ATen call, forward and backward; others, and any request, keep the op opaque."""
    torch._dynamo.reset()
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if "attention" in str(node.target))
        return graph.forward

    def attend(q: Tensor, k: Tensor, **options: Any) -> Any:
        return ops.attention(q, k, k, **options)

    function = torch.compile(attend, fullgraph=True, backend=record)
    q, k = torch.randn(2, 4, 33, 64, requires_grad=True), torch.randn(2, 2, 33, 64, requires_grad=True)
    vendors, opaque = "aten._scaled_dot_product_flash_attention_for_cpu", "ferryman.attention.default"
    results = []
    for call in (attend, function):
        out = call(q, k, causal=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k))])
    assert names == [vendors] and results[0][0].stride() == results[1][0].stride()
    for eager, compiled in zip(*results, strict=True):
        assert (eager - compiled).abs().max() <= 1e-4 * (1 + eager.abs().max())
    for options in ({"window": 5, "causal": True}, {"softcap": 9.0}, {"return_lse": True}):
        names.clear()
        function(q, k, **options)
        assert names == [opaque], options
    names.clear()
    function(q[:, :, :7], k, causal=True)  # bottom-right, which the ATen call's mask is not
    assert names == [opaque]
    names.clear()
    with ferryman.use("definition"), ferryman.trace() as seen:
        function(q, k, causal=True)
    assert names == [opaque] and seen.calls == {("attention", "definition"): 1}


def test_inductor_compiles_a_block_and_dynamic_lengths_do_not_recompile() -> None:
    torch._dynamo.reset()
    weight = torch.nn.Parameter(torch.randn(64))

    def block(x: Tensor) -> Tensor:
        h = ops.rms_norm(x, weight)
        q = h.view(1, -1, 2, 32).transpose(1, 2)
        out = ops.attention(q, q, q, causal=True)
        return ops.silu_mul(out.transpose(1, 2).reshape(x.shape), h)

    from torch._dynamo.testing import CompileCounterWithBackend  # torch does not import it by itself

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for length in (7, 8, 9, 23, 40):
        x = torch.randn(length, 64)
        got, expected = compiled(x), block(x)
        assert (got - expected).abs().max() <= 1e-4 * (1 + expected.abs().max())
    assert counter.frame_count <= 2  # the first length, then any length


def test_functorch_grad_and_vmap() -> None:
    x, w = torch.randn(3, 5, 16), torch.randn(16)
    gradient = torch.func.grad(lambda v: ops.rms_norm(x, v).sum())(w)
    exact = torch.func.grad(lambda v: ops.rms_norm.primitive.body(x.double(), v).sum())(w.double())
    assert (gradient.double() - exact).abs().max() <= 1e-5 * exact.abs().max()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its loop for an op without a batching rule
        mapped = torch.vmap(lambda v: ops.rms_norm(v, w))(x)
    assert torch.equal(mapped, torch.stack([ops.rms_norm(v, w) for v in x]))


def test_flop_counter_sees_eager_calls() -> None:
    with FlopCounterMode(display=False) as counter:
        ops.linear(torch.randn(3, 4), torch.randn(5, 4))
        ops.attention(*[torch.randn(1, 2, 8, 16)] * 3)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5 + 4 * 2 * 8 * 8 * 16


def test_autocast_follows_torchs_lists() -> None:
    x, w = torch.randn(3, 16), torch.randn(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.linear(x, w).dtype == torch.bfloat16
        low = x.bfloat16()
        assert ops.rms_norm(low).dtype == torch.nn.functional.rms_norm(low, (16,)).dtype
        assert ops.softmax(low).dtype == torch.softmax(low, -1).dtype
        assert ops.layer_norm(low).dtype == torch.nn.functional.layer_norm(low, (16,)).dtype
        assert ops.silu_mul(x.bfloat16(), x.bfloat16()).dtype == torch.bfloat16
        q = torch.randn(1, 2, 4, 16, requires_grad=True)
        out = ops.attention(q, q, q)
        assert out.dtype == torch.bfloat16
        linear = torch.compile(lambda a: ops.linear(a, w), fullgraph=True, backend="aot_eager")
        assert linear(x).dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32
    assert ops.linear(x, w).dtype == torch.float32


def test_a_second_derivative_is_refused_not_silently_wrong() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    (g,) = torch.autograd.grad(ops.rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, FerrymanError)):
        g.sum().backward()


def test_gradients_only_where_needed_and_shared_residuals() -> None:
    x, w = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    ops.rms_norm(x, w).sum().backward()
    assert x.grad is None and w.grad is not None
    a, b = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    y, s = ops.add_rms_norm(a, b)
    (y.sum() + 2 * s.sum()).backward()
    assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    s_only = ops.add_rms_norm(a.detach().requires_grad_(), b)[1]  # y's gradient is undefined here
    s_only.sum().backward()


def test_grad_mode_off_and_inference_mode_leave_no_graph() -> None:
    w = torch.nn.Parameter(torch.randn(8))
    with torch.no_grad():
        assert not ops.rms_norm(torch.randn(2, 8), w).requires_grad
    with torch.inference_mode():
        assert ops.rms_norm(torch.randn(2, 8), w).is_inference()
    assert ops.rms_norm(torch.randn(2, 8), w).requires_grad


ON_A_KINK = ("integer", "tiny", "zeros")  # of relu and its kin


@pytest.mark.parametrize("op", [op for op in ALL if op.gradient.backward], ids=lambda op: op.name)
def test_gradcheck_of_the_definition(op: Primitive) -> None:
    """The oracle of every gradient is float64 autograd of the definition: that autograd against finite differences."""
    checked = 0
    kinks = {*ON_A_KINK, *(fill.name for fill in registry.evidence(op).fills if not fill.smooth)}
    for case in first_cases(op, 40):
        values = arguments(case, op, torch.float32, 0, CPU).values
        exact = tuple(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values)
        args, leaves = with_gradients(op, exact)
        if "fill" in case.name or not 0 < sum(leaf.numel() for leaf in leaves) <= 6000:
            continue
        if any(isinstance(a, TensorSpec) and a.fill in kinks for a in case.args.values()):
            continue
        if not all(bool(o.isfinite().all()) for o in differentiable_outputs(op, *args)):
            continue
        assert torch.autograd.gradcheck(functools.partial(differentiable_outputs, op), args, fast_mode=True)
        checked += 1
    assert checked >= 3

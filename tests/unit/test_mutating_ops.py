"""Ops that write over arguments: what they declare, what autograd and torch.compile make of it, what they refuse."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, CompileError, FerrymanError, QuarantineWarning
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.bench import rotation
from ferryman.porting.inputs.cases import arguments, cases_of
from ferryman.porting.judging.parity import check_cell, prepare
from tests import pairs

CPU = torch.device("cpu")
MUTATING = [op for op in registry.primitives().values() if op.mutates]
FAMILIES = {registry.family_of(op).name for op in MUTATING}
BESIDE = [n for n, op in registry.primitives().items() if not op.mutates and registry.family_of(op).name in FAMILIES]
COS, SIN = torch.rand(1, 7, 64), torch.rand(1, 7, 64)
LOSS = Case(
    "three dimensions",
    {
        "logits": TensorSpec((2, 3, 100)),
        "target": TensorSpec((2, 3), dtype="int64", high=100),
        "ignore_index": 7,
        "label_smoothing": 0.1,
    },
)


def fused(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A projection's result and its queries and keys, views of one buffer."""
    whole = (weight * 2).view(2, 7, 6, 64).transpose(1, 2)
    return whole, whole[:, :4], whole[:, 4:]


def copied(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """`rope_` as PyTorch's own in-place operation has it."""
    turned = ops.rope(q, k, COS, SIN)
    return q.copy_(turned[0]), k.copy_(turned[1])


def test_only_those_ops_declare_it_and_their_schemas_say_so() -> None:
    assert len(MUTATING) >= 4
    for op in registry.primitives().values():
        schema = getattr(torch.ops.ferryman, op.name).default._schema
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert written == set(op.mutates), op.name
        assert len(schema.returns) == len(op.outputs) - len(op.mutates)
        assert all(r.alias_info is None for r in schema.returns)


@pytest.mark.parametrize("name", BESIDE)
def test_the_plain_ops_never_write_to_an_argument(name: str) -> None:
    op = registry.primitive(name)
    for line in registry.implementations(name):
        if line.name not in ("torch", "definition"):
            continue
        for case in cases_of(op):
            given = arguments(case, op, torch.float32, 0, CPU)
            versions = [v._version for v in given.values if isinstance(v, Tensor)]
            with ferryman.use(line.name):
                op.namespace["_resolve"](*given.values)
            assert not given.untouched(), f"{line.name} {case.name}"
            assert [v._version for v in given.values if isinstance(v, Tensor)] == versions


def test_rope_writes_over_its_arguments_and_returns_them() -> None:
    q, k = torch.randn(2, 4, 7, 64), torch.randn(2, 2, 7, 64)
    expected = ops.rope(q, k, COS, SIN)
    before = q._version, k._version
    rotated = ops.rope_(q, k, COS, SIN)
    assert rotated[0] is q and rotated[1] is k and (q._version, k._version) > before
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    part = torch.randn(2, 4, 7, 96)
    beyond = part[..., 64:].clone()
    ops.rope_(part, part[:, :0], COS, SIN)
    assert torch.equal(part[..., 64:], beyond)


@pytest.mark.parametrize("asked", ["q", "k", "whole"])
def test_rope_of_views_of_one_buffer_has_the_gradient_of_copy(asked: str) -> None:
    weight = torch.randn(2, 7, 6 * 64, requires_grad=True)
    outcomes = []
    for rotate in (copied, lambda q, k: ops.rope_(q, k, COS, SIN)):
        whole, q, k = fused(weight)
        rotate(q, k)
        loss = {"q": q, "k": k, "whole": whole}[asked].pow(3).sum()
        outcomes.append((loss.detach(), *torch.autograd.grad(loss, weight)))
    for by_copy, ours in zip(*outcomes, strict=True):
        assert torch.equal(by_copy, ours) and bool(ours.any())


@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_inplace_grad"])
def test_the_gradient_is_that_of_float64_for_logits_of_three_dimensions(name: str) -> None:
    op = registry.primitive(name)
    for forward, backward in pairs.pairs(op, CPU):
        ratio, where = pairs.worst_ratio(op, LOSS, torch.float32, CPU, forward, backward)
        assert ratio <= 1, (forward.name, backward.name, where)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_logits_that_are_a_view_have_the_same_gradient(scale: float) -> None:
    """An autograd function with two results may not modify one."""
    hidden, head = torch.randn(6, 32, requires_grad=True), torch.randn(32, 100, requires_grad=True)
    labels = torch.tensor([[3, 99, -100], [0, 5, 7]])
    outcomes = []
    for logits, target in (((hidden @ head).view(2, 3, 100), labels), (hidden @ head, labels.flatten())):
        loss = ops.cross_entropy_inplace_grad(logits, target, label_smoothing=0.1)
        outcomes.append((loss.detach(), *torch.autograd.grad(loss * scale, (hidden, head))))
    for view, own in zip(*outcomes, strict=True):
        assert torch.equal(view, own) and bool(own.any())


def test_logits_hold_the_gradient_afterwards_as_a_constant() -> None:
    hidden, labels = torch.randn(6, 32, requires_grad=True), torch.randint(0, 32, (6,))
    logits = hidden * 1.5
    expected = logits.detach().clone()
    ops.cross_entropy_inplace_grad(expected, labels)  # the gates judge it on the op's cases
    loss = ops.cross_entropy_inplace_grad(logits, labels)
    assert torch.equal(logits, expected) and bool(expected.any())
    (second,) = torch.autograd.grad((logits * 3).sum(), hidden, retain_graph=True, allow_unused=True)
    assert second is None or not bool(second.any())
    (first,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(first, expected * 1.5)


def test_what_autograd_kept_of_the_old_values_is_refused() -> None:
    hidden, labels = torch.randn(6, 32, requires_grad=True), torch.randint(0, 32, (6,))
    for overwrite in (
        lambda x: ops.cross_entropy_inplace_grad(x, labels),
        lambda x: ops.rope_(x.view(1, 1, 6, 32), torch.empty(1, 0, 6, 32), torch.rand(1, 6, 8), torch.rand(1, 6, 8)),
    ):
        values = hidden.exp()  # exp keeps its result
        overwrite(values)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            values.sum().backward()
        constant = torch.rand(6, 32)
        product = (hidden * constant).sum()
        overwrite(constant)  # needs no gradient itself, but the product kept it
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_misuse_is_refused_before_anything_is_written() -> None:
    labels = torch.randint(0, 32, (6,))
    leaf = torch.randn(6, 32, requires_grad=True)
    before = leaf.detach().clone()
    with pytest.raises(ArgumentError, match="computed from the leaf"):
        ops.cross_entropy_inplace_grad(leaf, labels)
    assert torch.equal(leaf, before)
    with torch.no_grad():
        ops.cross_entropy_inplace_grad(leaf, labels)  # as any in-place operation
    assert not torch.equal(leaf, before)
    with pytest.raises(ArgumentError, match="share no memory"):
        ops.cross_entropy_inplace_grad(torch.randn(32).expand(6, 32), labels)
    q = torch.randn(1, 2, 7, 64)
    with pytest.raises(ArgumentError, match="rotated twice"):
        ops.rope_(q, q, COS, SIN)
    with pytest.raises(ArgumentError, match="share no memory"):
        ops.rope_(q.expand(3, 2, 7, 64), torch.randn(3, 1, 7, 64), COS, SIN)


def test_a_gradient_is_handed_over_once_and_must_be_left_alone_until_then() -> None:
    hidden, labels = torch.randn(6, 32, requires_grad=True), torch.randint(0, 32, (6,))
    loss = ops.cross_entropy_inplace_grad(hidden * 2, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(FerrymanError, match="second backward"):
        loss.backward()
    logits = hidden * 2
    loss = ops.cross_entropy_inplace_grad(logits, labels)
    logits.detach().zero_()
    with pytest.raises(FerrymanError, match="written to before the backward"):
        loss.backward()


def test_autocast_leaves_the_logits_and_inference_mode_has_no_graph() -> None:
    logits, labels = torch.randn(6, 32, dtype=torch.bfloat16), torch.randint(0, 32, (6,))
    other = logits.clone()
    expected = ops.cross_entropy_inplace_grad(other, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        given = logits.clone()
        assert torch.equal(ops.cross_entropy_inplace_grad(given, labels), expected)
        assert torch.equal(given, other)


def turned(weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    whole, q, k = fused(weight)
    ops.rope_(q, k, cos, sin)
    return q.square().sum() + k.pow(3).sum(), whole * 1


def turned_exactly(weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """By the op's definition, which alone takes float64."""
    whole, q, k = fused(weight)
    for into, value in zip((q, k), ops.rope_.primitive.body(q, k, cos, sin, False), strict=True):
        into.copy_(value)
    return q.square().sum() + k.pow(3).sum(), whole * 1


COMPILED = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
REQUESTED = pytest.mark.parametrize("requested", [(), ("torch",)], ids=["plain", "requested"])


@COMPILED
@REQUESTED
def test_rope_of_views_compiled_is_exact_where_every_result_is_an_integer(
    backend: str, requested: tuple[str, ...]
) -> None:
    """Below 2^24 no order of additions rounds, so that any right way gives the same bits, and float64's."""
    torch._dynamo.reset()
    weight, cos, sin = (torch.randint(-2, 3, shape).float() for shape in ((2, 7, 6 * 64), (1, 7, 64), (1, 7, 64)))
    compiled = torch.compile(turned, fullgraph=True, backend=backend)
    results = []
    with ferryman.use(*requested) if requested else contextlib.nullcontext():
        for call, kind in ((turned_exactly, torch.float64), (turned, torch.float32), (compiled, torch.float32)):
            given = [x.to(kind) for x in (weight, cos, sin)]
            plain = call(*given)
            leaf = given[0].clone().requires_grad_()
            outputs = call(leaf, *given[1:])
            (gradient,) = torch.autograd.grad(outputs[0] * 1.5, leaf)
            results.append([t.detach().double() for t in (*plain, *outputs, gradient)])
    for exact, *others in zip(*results, strict=True):
        assert all(torch.equal(exact, one) for one in others) and bool(exact.any())


@COMPILED
@REQUESTED
def test_the_loss_compiled_is_that_of_float64_and_leaves_its_gradient(backend: str, requested: tuple[str, ...]) -> None:
    """Logits are a product's, here by 1: what is overwritten is the graph's own, and is read afterwards."""
    torch._dynamo.reset()
    op = registry.primitive("cross_entropy_inplace_grad")
    function = op.namespace[op.name]

    def trained(logits: Tensor, *others: Any) -> Any:
        return function(logits * 1, *others)

    compiled = torch.compile(trained, fullgraph=True, backend=backend)
    forward, backward = (registry.implementation(name, "torch") for name in (op.name, str(op.gradient.backward)))
    with ferryman.use(*requested) if requested else contextlib.nullcontext(), ferryman.trace() as seen:
        ratio, where = pairs.worst_ratio(op, LOSS, torch.float32, CPU, forward, backward, call=compiled)
    assert ratio <= 1, where
    assert {by for _, by in seen.calls} == {"torch"}


def test_another_length_is_no_recompilation_of_its_own() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, c, s: ops.rope_(q, k, c, s), fullgraph=True, backend=backend)
    for length in (7, 9, 12, 33):
        q, k = torch.randn(2, 4, length, 64), torch.randn(2, 2, length, 64)
        cos, sin = torch.rand(1, length, 64), torch.rand(1, length, 64)
        wanted = ops.rope(q, k, cos, sin)
        rotated = compiled(q, k, cos, sin)
        assert torch.equal(rotated[0], wanted[0]) and torch.equal(q, wanted[0]) and torch.equal(k, wanted[1])
    assert len(graphs) <= 2


@pytest.mark.parametrize("op", MUTATING, ids=lambda op: op.name)
def test_autocast_makes_no_copy(op: Primitive) -> None:
    case = next(c for c in cases_of(op) if "fill" not in c.name)
    given = arguments(case, op, torch.bfloat16, 0, CPU).values
    place, output = op.overwritten[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = op.namespace["_resolve"](*given)
    result = result if isinstance(result, tuple) else (result,)
    assert result[output] is given[place]


def test_two_views_of_one_place_are_refused() -> None:
    q = torch.randn(1, 2, 7, 64)
    with pytest.raises(ArgumentError, match="rotated twice"):
        ops.rope_(q, q.view_as(q), COS, SIN)


def test_a_kernel_that_cannot_be_compiled_after_another_wrote_is_no_wrong_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its arguments may hold something else by then: another implementation would start from that."""
    name = "cross_entropy_inplace_grad"
    torch_line = registry.implementation(name, "torch")
    assert torch_line is not None

    def broken(logits: Tensor, *rest: Any) -> Any:
        logits.zero_()
        raise CompileError("torch", name, "here", "planted")

    original = registry.launcher
    monkeypatch.setattr(registry, "launcher", lambda line: broken if line == torch_line else original(line))
    ferryman.reload()
    try:
        with pytest.warns(QuarantineWarning), pytest.raises(CompileError, match="planted"):
            ops.cross_entropy_inplace_grad(torch.randn(3, 7), torch.tensor([1, 2, 3]))
    finally:
        monkeypatch.undo()
        ferryman.reload()


def test_a_mutated_input_of_a_compiled_function_is_mutated() -> None:
    torch._dynamo.reset()
    logits, labels = torch.randn(6, 100), torch.randint(0, 100, (6,))
    other = logits.clone()
    compiled = torch.compile(ops.cross_entropy_inplace_grad, fullgraph=True)
    assert torch.equal(compiled(logits, labels), ops.cross_entropy_inplace_grad(other, labels))
    assert torch.equal(logits, other)


def test_inductor_keeps_one_matrix_of_logits_in_training() -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    labels = torch.randint(0, 1000, (64,))
    inputs = [torch.randn(64, 32, requires_grad=True), torch.randn(32, 1000, requires_grad=True)]
    compiled = torch.compile(lambda h, w: ops.cross_entropy_inplace_grad(h @ w, labels), fullgraph=True)
    _, codes = run_and_get_code(lambda: compiled(*inputs).backward())
    matrices = re.findall(r"empty_strided_cpu\(\(64, 1000\)", "".join(codes))
    assert len(codes) == 2 and len(matrices) == 1


def test_the_check_sees_a_kernel_that_returns_another_tensor_or_writes_beside() -> None:
    op = registry.primitive("rope_")
    line = registry.implementation("rope_", "torch")
    case = next(c for c in cases_of(op) if c.name == "d64")

    def elsewhere(*args: Any) -> Any:
        return op.body(*args[:-1])

    def beside(q: Tensor, *rest: Any) -> Any:
        result = line.load()(q, *rest)
        q.as_strided((1,), (1,), q.storage_offset() + q.numel()).fill_(7.0)
        return result

    for kernel, reason in ((elsewhere, "is not q, which it is to be written over"), (beside, "wrote outside q")):
        prepared = prepare(op, case, torch.float32, CPU)
        cell = check_cell(op, line, case, torch.float32, prepared=prepared, kernel=kernel)
        assert cell.verdict == "FAIL" and reason in str(cell.gates["G5"].reason)
        assert not prepared.args.untouched()


@pytest.mark.parametrize("op", MUTATING, ids=lambda op: op.name)
def test_a_benchmark_gives_the_inputs_back(op: Primitive) -> None:
    case = next(c for c in cases_of(op) if "nonfinite" not in c.name)
    sets = [arguments(case, op, torch.float32, 0, CPU).values for _ in range(3)]
    pristine = [x.clone() if isinstance(x, Tensor) else x for x in sets[0]]
    restore = rotation.restoring(op, sets)
    assert restore is not None and rotation.restoring(registry.primitive("rope"), sets) is None
    op.namespace["_resolve"](*sets[1])
    places = [place for place, _ in op.overwritten]
    assert not all(torch.equal(sets[1][p], pristine[p]) for p in places)
    restore()
    assert all(torch.equal(one[p], pristine[p]) for one in sets for p in places)
    spared = rotation.spared(op, sets[0])
    assert all(
        (spared[i] is sets[0][i]) == (i not in places) for i in range(len(spared)) if isinstance(spared[i], Tensor)
    )

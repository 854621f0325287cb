"""Rows sorted by expert and summed back, against loops; with `grouped_linear` between, a layer of experts."""

from __future__ import annotations

import pytest
import torch

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.porting.inputs.cases import cases_of, double, materialise
from tests.bounded import U32, U64, off
from tests.ops.moe_permute.independent import moe_combine as summed

PERMUTE, COMBINE = registry.primitive("moe_permute"), registry.primitive("moe_combine")


def values(op: str, case: str, dtype: torch.dtype = torch.float32) -> tuple:
    known = registry.primitive(op)
    return materialise(next(c for c in cases_of(known) if c.name == case), known, dtype)


@pytest.mark.parametrize("case", ["more_rows", "hostile", "hostile_few", "no_rows"])
def test_combine_is_a_loop_and_reads_no_weight_of_a_slot_without_a_row(case: str) -> None:
    y, source, weights = double(values("moe_combine", case))
    exact = summed(y, source, weights)
    (terms,) = COMBINE.limits.bound((y, source, weights), (exact,))
    room = U64 * (terms["accumulate"] + exact.abs()) + 2.0**-1000
    named = set(source.tolist())
    without = torch.tensor(
        [[t * weights.shape[1] + j not in named for j in range(weights.shape[1])] for t in range(len(weights))]
    )
    for given in (weights, weights.masked_fill(without, float("nan"))):
        assert ((COMBINE.body(y, source, given) - exact).abs() <= room).all()
    if len(y):
        assert not ((COMBINE.body(y.roll(1, 0), source, weights) - exact).abs() <= 100 * room).all()


def test_gradients_are_autograds_and_rows_that_do_not_count_have_none() -> None:
    y, source, weights = values("moe_combine", "hostile")
    wide = [y.double().requires_grad_(), weights.double().requires_grad_()]
    cotangent = torch.randn(len(weights), y.shape[1], generator=torch.Generator().manual_seed(1))
    exact = torch.autograd.grad(summed(wide[0], source, wide[1]), wide, cotangent.double())
    own = [y.requires_grad_(), weights.requires_grad_()]
    with ferryman.trace() as trace:
        got = torch.autograd.grad(ops.moe_combine(own[0], source, own[1]), own, cotangent)
    assert list(trace.calls) == [("moe_combine", "torch"), ("moe_combine_backward", "torch")]
    last = {s: row for row, s in enumerate(source.tolist()) if 0 <= s < weights.numel()}
    idle = torch.ones(len(y), dtype=torch.bool).index_fill(0, torch.tensor(sorted(last.values())), False)
    assert idle.any() and not got[0][idle].any() and got[0][~idle].any(1).all()
    args = (cotangent.double(), y.detach().double(), source, weights.detach().double(), True, True)
    backward = registry.primitive("moe_combine_backward")
    for mine, theirs, terms in zip(got, exact, backward.limits.bound(args, exact), strict=True):
        room = U32 * (terms["accumulate"] + theirs.abs()) + terms["absolute"]
        assert ((mine.double() - theirs).abs() <= room).all()


@pytest.mark.parametrize("hostile", [False, True])
def test_with_grouped_linear_they_are_a_layer_of_experts_and_its_gradients(hostile: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(19, 24, generator=draw, requires_grad=True)
    gate_up = (torch.randn(5, 32, 24, generator=draw) / 5).requires_grad_()
    down = (torch.randn(5, 24, 16, generator=draw) / 4).requires_grad_()
    ids = torch.randint(-1 if hostile else 0, 7 if hostile else 5, (19, 3), generator=draw, dtype=torch.int32)
    weights = torch.rand(19, 3, generator=draw, requires_grad=True)
    rows, offsets, source = ops.moe_permute(x, ids, 5)
    gate, up = ops.grouped_linear(rows, gate_up, offsets).chunk(2, -1)
    y = ops.grouped_linear(torch.nn.functional.silu(gate) * up, down, offsets)
    parts = ops.moe_combine(y, source, weights)
    whole = ops.moe_experts(x, gate_up, down, ids, weights)
    args = (x.detach(), gate_up.detach(), down.detach(), ids, weights.detach(), "silu", None)
    for output in (parts, whole):
        assert off(registry.primitive("moe_experts"), args, (output.detach(),), torch.float32) <= 1
    leaves = (x, gate_up, down, weights)
    cotangent = torch.randn(19, 24, generator=draw)
    backward = registry.primitive("moe_experts_backward")
    needs = dict.fromkeys(("need_x", "need_gate_up", "need_down", "need_topk_weights"), True) | {"need_bias": False}
    given = dict(zip(("x", "gate_up", "down", "topk_ids", "topk_weights", "activation", "bias"), args, strict=True))
    values = [(given | needs | {"grad": cotangent})[name] for name in backward.names]
    for output in (parts, whole):
        gradients = torch.autograd.grad(output, leaves, cotangent, retain_graph=True)
        assert off(backward, values, (*gradients, x.new_empty(0)), torch.float32) <= 1


def test_bad_arguments_are_refused() -> None:
    x, ids = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int32)
    source, weights = torch.zeros(8, dtype=torch.int32), torch.zeros(4, 2)
    for call in (
        lambda: ops.moe_permute(x, ids[:3], 4),
        lambda: ops.moe_permute(x, ids.float(), 4),
        lambda: ops.moe_permute(x, ids, 0),
        lambda: ops.moe_permute(x, ids, 1024),
        lambda: ops.moe_permute(x, ids[0], 4),
        lambda: ops.moe_combine(torch.zeros(8, 3), source.long(), weights),
        lambda: ops.moe_combine(torch.zeros(7, 3), source, weights),
        lambda: ops.moe_combine(torch.zeros(8, 3), source, weights[0]),
        lambda: ops.moe_combine(torch.zeros(8, 3).double(), source, weights),
    ):
        with pytest.raises(ArgumentError):
            call()


@pytest.mark.parametrize(("tokens", "chosen"), [(512, "triton.ranks"), (513, "triton.counted")])
def test_few_slots_take_one_kernel(tokens: int, chosen: str) -> None:
    x = torch.empty(tokens, 64, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, 8, dtype=torch.int64, device="meta")
    assert ferryman.explain("moe_permute", x, ids, 128, device="h100").chosen == chosen

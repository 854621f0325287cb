"""Sinks, key ranges, chunks, value widths and the gradient of a bias: their meaning, who serves them, who refuses."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import lockfile, lockfile_migrate, registry
from ferryman.ops.evidence import Sampler
from ferryman.porting.inputs.cases import cases_of, double, materialise
from tests.bounded import U32
from tests.interpreter import Interpreter
from tests.ops.attention import independent

OP = registry.primitive("attention")
BACKWARD = registry.primitive("attention_backward")
CASES = {case.name: case for case in cases_of(OP)}
CPU = torch.device("cpu")
SAME = 2.0**-40  # float64, sums of fewer than 2^10 numbers about 1 in another order


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_a_loop_over_the_keys_that_a_query_sees(name: str) -> None:
    values = double(materialise(CASES[name], OP, torch.float32, 0, CPU))
    for got, exact in zip(OP.body(*values), independent.attention(*values), strict=True):
        torch.testing.assert_close(got, exact, rtol=SAME, atol=SAME, equal_nan=True)


def test_a_range_is_the_sequence_alone() -> None:
    """A static cache that is filled to 40, and a left-padded batch: what lies outside changes no bit."""
    q, k, v = (torch.randn(2, 4, n, 32) for n in (5, 64, 64))
    ends = torch.tensor([[0, 40], [7, 64]], dtype=torch.int32)
    with ferryman.use("torch.composed"), ferryman.trace() as traced:
        whole = ops.attention(q, k, v, causal=True, key_range=ends)
        k2, v2 = k.clone(), v.clone()
        k2[0, :, 40:], v2[0, :, 40:], k2[1, :, :7], v2[1, :, :7] = 1e3, 1e3, -1e3, 1e3
        assert torch.equal(ops.attention(q, k2, v2, causal=True, key_range=ends), whole)
    assert set(traced.calls) == {("attention", "torch.composed")}
    for b, (first, end) in enumerate(ends.tolist()):
        own = (q[b : b + 1], k[b : b + 1, :, first:end], v[b : b + 1, :, first:end])
        alone = OP.body(*(x.double() for x in own), True, None, None, 0.0, None)
        worst = float((whole[b].double() - alone[0][0]).abs().max())
        assert worst <= U32 * 6 * (6 * math.sqrt(32) + 64), worst


def test_a_sink_learns_as_a_column_of_the_softmax_does() -> None:
    """Through dispatch and autograd, against float64 autograd of the softmax over keys and a column."""
    q, k, v = (torch.randn(2, n, 9, 16, requires_grad=True) for n in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    leaves = (q, k, v, sinks)
    with ferryman.trace() as traced:
        out = ops.attention(q, k, v, causal=True, sinks=sinks)
        weight = torch.randn_like(out)
        gradients = torch.autograd.grad(out, leaves, weight)
    assert {op for op, _ in traced.calls} == {"attention", "attention_backward"}
    wide = [x.detach().double().requires_grad_() for x in leaves]
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).mT / 4
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    full = torch.cat((scores, wide[3].view(1, 4, 1, 1).expand(2, 4, 9, 1)), -1)
    exact = torch.softmax(full, -1)[..., :-1] @ wide[2].repeat_interleave(2, 1)
    wanted = torch.autograd.grad(exact, wide, weight.double())
    given = (weight, None, q, k, v, out, ops.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)[1])
    args = double(tuple(x.detach() if isinstance(x, Tensor) else x for x in given))
    full_args = (*args, True, None, None, 0.0, None, sinks.detach().double(), None, None, False, 0.0, None)
    terms = BACKWARD.limits.bound(full_args, BACKWARD.body(*full_args))
    for got, want, term in zip(gradients, wanted, terms, strict=False):
        # the backward's own bound, and what the saved output's and log-sum-exp's float32 roundings move
        room = U32 * (2 * term["accumulate"] + want.abs() + 8 * term["storage"] if "storage" in term else 0.0)
        room = room if isinstance(room, Tensor) else U32 * (2 * term["accumulate"] + want.abs())
        assert bool(((got.double() - want).abs() <= room + 1e-12).all())


def test_a_bias_learns_by_the_composed_line_and_tritons_own() -> None:
    q = torch.randn(1, 2, 6, 16, requires_grad=True)
    bias = torch.randn(1, 2, 1, 6, requires_grad=True)
    with ferryman.trace() as traced:
        ops.attention(q, q, q, mask=bias).sum().backward()
    assert ("attention_backward", "torch.composed") in traced.calls and bias.grad is not None
    wide = [x.detach().double().requires_grad_() for x in (q, bias)]
    (torch.softmax(wide[0] @ wide[0].mT / 4 + wide[1], -1) @ wide[0]).sum().backward()
    assert float((bias.grad.double() - wide[1].grad).abs().max()) < U32 * 6 * 6 * 16  # type: ignore[operator]
    out, lse = ops.attention(q.detach(), q.detach(), q.detach(), mask=bias.detach(), return_lse=True)
    args = (torch.ones_like(out), None, *[q.detach()] * 3, out, lse, False, None, None, 0.0, bias.detach())
    rows = ferryman.explain("attention_backward", *args, need_mask=True, device="h200").rows
    refused = {r.implementation for r in rows if any("no gradient of a float mask" in why for why in r.reasons)}
    assert refused == {r.implementation for r in rows} - {"torch.composed", "triton.biased", "definition"}
    here = ferryman.explain("attention_backward", *args, need_mask=True, device="h200")
    assert here.chosen == "triton.biased"  # nothing composes scores where a fused way is


H200_REFUSES = {
    "key_range": ({"torch.flash"}, "no key_range"),
    "chunk": ({"torch.flash"}, "no chunk"),
    "values": ({"triton.hopper"}, "values no wider than keys"),
}


@pytest.mark.parametrize("what", H200_REFUSES)
def test_a_line_that_cannot_says_so(what: str) -> None:
    v = torch.empty(2, 8, 256, 128, dtype=torch.bfloat16, device="meta")
    q = v[..., :64] if what == "values" else v
    more: dict[str, Any] = {}
    if what == "key_range":
        more["key_range"] = torch.empty(2, 2, dtype=torch.int32, device="meta")
    if what == "chunk":
        more["chunk"] = 64
    lines, reason = H200_REFUSES[what]
    rows = ferryman.explain("attention", q, q, v, **more, device="h200").rows
    refused = {row.implementation for row in rows if any(reason in why for why in row.reasons)}
    assert refused >= lines and "triton.tiled" not in refused


def test_saved_calls_and_regions_of_before_hold() -> None:
    """The library's op without the added arguments is the op with their defaults, and so is a lockfile's region."""
    q = torch.randn(1, 2, 5, 16)
    old = torch.ops.ferryman.attention(q, q, q, True, None, None, 0.0, None)
    new = torch.ops.ferryman.attention(q, q, q, True, None, None, 0.0, None, None, None, None, 0.0, None)
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    sunk = torch.ops.ferryman.attention(q, q, q, True, None, None, 0.0, None, torch.zeros(2))
    assert not torch.equal(sunk[0], old[0])
    leaf = q.clone().requires_grad_()
    torch.ops.ferryman.attention(leaf, leaf, leaf, True, None, None, 0.0, None)[0].sum().backward()
    assert leaf.grad is not None
    defaults = (None, None, None, float("0"), None)  # a zero of its own
    region = lockfile.region(OP, (q, q, q, True, None, None, 0.0, None, *defaults))
    assert region.endswith("mask=None") and len(lockfile_migrate.representative(OP, region)) == len(OP.names)
    other = lockfile.region(OP, (q, q, q, True, None, None, 0.0, None, None, None, 64, 0.0, None))
    assert other.startswith(region) and lockfile_migrate.representative(OP, other)[-3:] == [64, 0.0, None]


def test_compiled_in_one_graph() -> None:
    q, sinks = torch.randn(1, 2, 8, 16), torch.randn(2)
    ends = torch.tensor([[1, 7]], dtype=torch.int32)

    def call(q: Tensor, sinks: Tensor, ends: Tensor) -> Tensor:
        out: Tensor = ops.attention(q, q, q[..., :5], causal=True, sinks=sinks, key_range=ends, chunk=3)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, sinks, ends), call(q, sinks, ends))


@pytest.mark.parametrize(("length", "traced"), [(48, True), (64, True), (65, False)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_window_and_chunks_of_all_keys_are_traced_as_none(length: int, traced: bool, dynamic: bool) -> None:
    torch._dynamo.reset()
    targets: list[str] = []

    def looking(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets[:] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return graph.forward

    def call(*given: torch.Tensor) -> torch.Tensor:
        return ops.attention(*given, causal=True, window=64, chunk=64)

    compiled = torch.compile(call, fullgraph=True, backend=looking, dynamic=dynamic)
    compiled(*(torch.randn(2, 4, 32, 32) for _ in range(3)))  # where lengths are dynamic, the window is a guard on them
    given = [torch.randn(2, 4, length, 32) for _ in range(3)]
    torch.testing.assert_close(compiled(*given), call(*given), rtol=2.0**-18, atol=2.0**-18)
    assert any("ferryman.attention" in name for name in targets) != traced
    assert any("flash_attention_for_cpu" in name for name in targets) == traced


def test_what_regret_draws_has_every_option() -> None:
    known, draw = registry.evidence(OP), random.Random(5)
    seen = set()
    for _ in range(400):
        assert known.sampled is not None and known.named is not None
        name = known.sampled(Sampler(draw, less=8))
        given = known.named(name).args
        assert all(values.shape[0] == given["q"].shape[0] for key, values in given.items() if key in ("k", "v")), name
        seen |= {key for key, value in given.items() if value not in (None, False, 0.0)}
    assert seen >= {*OP.names} - {"scale"}


INTERPRETED = """
import json
import torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
found = {}
for op, line, names in (
    ("attention", "triton.tiled", ("range_hostile", "all_options")),
    ("attention", "triton.packed", ("range_causal", "all_options")),
    ("attention", "triton.decode", ("sinks_decode", "chunk_decode")),
    ("attention_backward", "triton.tiled", ("sinks", "all_options_without_need_mask")),
):
    known, one = registry.primitive(op), registry.implementation(op, line)
    for case in cases_of(known):
        if case.name in names:
            cell = check_cell(known, one, case, torch.float16, simulate=profile("h200"), times=1)
            found[f"{op} {line} {case.name}"] = (cell.verdict, cell.reason)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_triton_kernels_serve_the_options_interpreted_with_a_hoppers_tiles(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 8 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts

"""Products by experts against transformers' modules and plain loops, with hostile offsets and ids; Triton's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.device_profiles import profile
from ferryman.dispatch import cost, rank, registry
from ferryman.errors import ArgumentError
from ferryman.porting.inputs.cases import cases_of, double, materialise
from tests.bounded import U32, U64, beyond
from tests.interpreter import Interpreter
from tests.lines import launched
from tests.ops.moe.independent import grouped_linear as plain

GROUPED = registry.primitive("grouped_linear")
LAYER = registry.primitive("moe_experts")


def cases(name: str) -> dict[str, Any]:
    return {case.name: case for case in cases_of(registry.primitive(name))}


def inside(got: Tensor, exact: Tensor, terms: dict[str, Tensor], unit: float) -> bool:
    return beyond(got, exact, terms, unit) <= 1


def test_offsets_mean_what_the_docstring_says() -> None:
    x, weight = torch.ones(6, 1), torch.arange(1.0, 5.0).reshape(4, 1, 1)
    for offsets, owners in (
        ([2, 1, 4, 6], [1, 1, 3, 3, 4, 4]),
        ([-5, 2**31 - 1, 3, 6], [2, 2, 2, 2, 2, 2]),
        ([0, 3, 3, 5], [2, 2, 2, 4, 4, 0]),
        ([-1, -1, -(2**31), 0], [0] * 6),
    ):
        y = ops.grouped_linear(x, weight, torch.tensor(offsets, dtype=torch.int32))
        assert y[:, 0].tolist() == owners


@pytest.mark.parametrize("which", ["mixtral", "qwen3_moe"])
def test_the_definition_is_transformers_experts(which: str) -> None:
    if which == "mixtral":
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig as Config
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts

        config = Config(hidden_size=24, intermediate_size=20, num_local_experts=5, num_experts_per_tok=2)
    else:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts

        config = Config(hidden_size=24, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = Experts(config).double()
    for p in module.parameters():
        torch.nn.init.normal_(p)
    x, ids = torch.randn(11, 24).double(), torch.rand(11, 5).topk(2).indices
    weights = torch.rand(11, 2).double()
    with torch.no_grad():
        exact = module(x, ids, weights)
        args = (x, module.gate_up_proj, module.down_proj, ids, weights, "silu", None)
        (terms,) = LAYER.limits.bound(args, (exact,))
        assert inside(LAYER.body(*args), exact, terms, U64)
        assert not inside(LAYER.body(*args[:5], "gelu", None), exact, terms, 100 * U64)
        halves = args[1].roll(20, 1)
        assert not inside(LAYER.body(x, halves, *args[2:]), exact, terms, 100 * U64)


@pytest.mark.parametrize("backend", [None, "torch"])
def test_gpt_oss_experts_are_an_activation_with_biases_and_its_gradients(backend: str | None) -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=24, intermediate_size=20, num_local_experts=5)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = GptOssExperts(config).double()
    for p in module.parameters():
        torch.nn.init.normal_(p)
    x, ids = torch.randn(11, 24).double().requires_grad_(), torch.rand(11, 5).topk(2).indices
    weights = torch.rand(11, 2).double().requires_grad_()
    exact = module(x, ids, weights)
    leaves = [x, weights, *module.parameters()]
    cotangent = torch.randn(11, 24).double()
    theirs = torch.autograd.grad(exact, leaves, cotangent)
    if backend is not None:  # float32, where the layer's own op is called
        cotangent, leaves = cotangent.float(), [leaf.detach().float().requires_grad_() for leaf in leaves]
    x, weights, gate_up, gate_up_bias, down, down_bias = leaves
    args = (x, gate_up.mT, down.mT, ids, weights, "swiglu_oai_interleaved", torch.cat([gate_up_bias, down_bias], 1))
    output = (LAYER.body if backend is None else ops.moe_experts)(*args)
    unit = U64 if backend is None else U32
    doubled = double(tuple(a.detach() if isinstance(a, Tensor) else a for a in args))
    (terms,) = LAYER.limits.bound(doubled, (exact.detach(),))
    assert inside(output.double(), exact, terms, unit)
    assert not inside(LAYER.body(*doubled[:5], "swiglu_oai", doubled[6]), exact, terms, 100 * unit)
    assert not inside(LAYER.body(*doubled[:5], "silu", doubled[6]), exact, terms, 100 * unit)
    gradients = [torch.autograd.grad(output, leaves, cotangent), theirs]
    mine, theirs = ((g[0], g[2].mT, g[4].mT, g[1], torch.cat([g[3], g[5]], 1)) for g in gradients)
    limits = registry.primitive("moe_experts_backward").limits.bound(
        (cotangent.double(), *doubled, *(True,) * 5), theirs
    )
    for one, other, terms in zip(mine, theirs, limits, strict=True):
        terms["accumulate"] = terms["accumulate"] + terms["split-k"]
        assert inside(one.double(), other, terms, unit)


def test_slots_of_no_expert_add_nothing_and_bias_is_added() -> None:
    args = double(materialise(cases("moe_experts")["hostile_ids"], LAYER, torch.float32))
    x, gate_up, down, ids, weights, _, bias = args
    assert bias is not None and bool(((ids < 0) | (ids >= len(down))).any())
    inner, exact = down.shape[2], torch.zeros_like(x)
    for token in range(len(x)):
        for e, w in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if 0 <= e < len(down):
                h = gate_up[e] @ x[token] + bias[e, : 2 * inner]
                a = h[:inner] / (1 + torch.exp(-h[:inner])) * h[inner:]
                exact[token] += w * (down[e] @ a + bias[e, 2 * inner :])
    (terms,) = LAYER.limits.bound(args, (exact,))
    assert inside(LAYER.body(*args), exact, terms, U64)
    poisoned = weights.masked_fill((ids < 0) | (ids >= len(down)), float("nan"))
    assert inside(LAYER.body(x, gate_up, down, ids, poisoned, "silu", bias), exact, terms, U64)


@pytest.mark.parametrize("op", ["grouped_linear", "moe_experts"])
def test_it_runs_through_dispatch_and_through_the_library(op: str) -> None:
    known = registry.primitive(op)
    values = materialise(cases(op)["ragged"], known, torch.float16)
    with ferryman.trace() as trace:
        y = getattr(ops, op)(*values)
    assert list(trace.calls) == [(op, "torch.loop")]
    assert torch.equal(getattr(torch.ops.ferryman, op).default(*values), y)


def test_gradients_are_autograds() -> None:
    x, weight, offsets = materialise(cases("grouped_linear")["hostile"], GROUPED, torch.float32)
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    cotangent = torch.randn(x.shape[0], weight.shape[1], generator=torch.Generator().manual_seed(1))
    exact = torch.autograd.grad(plain(leaves[0], leaves[1], offsets), leaves, cotangent.double())
    own = [x.requires_grad_(), weight.requires_grad_()]
    with ferryman.trace() as trace:
        got = torch.autograd.grad(ops.grouped_linear(own[0], own[1], offsets), own, cotangent)
    assert ("grouped_linear_backward", "torch.loop") in trace.calls
    backward = registry.primitive("grouped_linear_backward")
    args = (cotangent.double(), x.detach().double(), weight.detach().double(), offsets, True, True)
    for mine, theirs, terms in zip(got, exact, backward.limits.bound(args, exact), strict=True):
        assert inside(mine.double(), theirs, terms, U32)


def test_gradients_of_a_layer_are_autograds_and_idle_experts_have_none() -> None:
    case = cases("moe_experts")["hostile_ids"]
    x, gate_up, down, ids, weights, activation, bias = materialise(case, LAYER, torch.float32)
    ids = torch.where(ids == 2, 1, ids)  # nobody's
    wide = [t.double().requires_grad_() for t in (x, gate_up, down, weights, bias)]
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    y = LAYER.body(*wide[:3], ids, wide[3], activation, wide[4])
    exact = torch.autograd.grad(y, wide, cotangent.double())
    own = [t.clone().requires_grad_() for t in (x, gate_up, down, weights, bias)]
    with ferryman.trace() as trace:
        got = torch.autograd.grad(
            ops.moe_experts(own[0], own[1], own[2], ids, own[3], activation, own[4]), own, cotangent
        )
    assert ("moe_experts_backward", "torch.loop") in trace.calls
    leaves = [t.detach() for t in wide]
    args = (cotangent.double(), *leaves[:3], ids, leaves[3], activation, leaves[4], *(True,) * 5)
    backward = registry.primitive("moe_experts_backward")
    for mine, theirs, terms in zip(got, exact, backward.limits.bound(args, backward.body(*args)), strict=True):
        assert inside(mine.double(), theirs, terms, U32)
    assert not any(bool(t[2].any()) for t in (got[1], got[2], got[4]))
    outside = (ids < 0) | (ids >= len(down))
    assert bool(outside.any()) and not bool(got[3][outside].any())


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm")
def test_the_line_of_grouped_mm_has_the_same_gradients() -> None:
    """On the CPU its kernel is PyTorch's own; what is tried is what stands around it."""
    from ferryman.ops.moe.torch_kernels import moe_experts_backward, moe_experts_backward_grouped_mm

    x, gate_up, down, ids, weights, activation, _ = materialise(
        cases("moe_experts")["hostile_ids"], LAYER, torch.bfloat16
    )
    ids = torch.where(ids == 2, 1, ids)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    args: Any = (grad, x, gate_up, down, ids, weights, activation, None, True, True, True, True, True, None)
    for mine, theirs in zip(moe_experts_backward_grouped_mm(*args), moe_experts_backward(*args), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        if mine.numel():  # roundings of either may fall apart by a unit, and sums carry that on
            assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) <= 2.0**-6
    assert not bool(moe_experts_backward_grouped_mm(*args)[1][2].any())


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm")
@pytest.mark.parametrize("offsets", [(3, 5, 5, 9), (4, 2, 20, 6), (-1, 3, 2, 2)])
def test_gradients_of_products_by_grouped_mm_are_the_same(offsets: tuple[int, ...]) -> None:
    """On the CPU its kernel is PyTorch's own; what is tried is what stands around it. Whole numbers: no roundings."""
    from ferryman.ops.moe.torch_kernels import grouped_mm_backward

    generator = torch.Generator().manual_seed(1)
    grad, x, weight = (
        torch.randint(-3, 4, shape, generator=generator).bfloat16() for shape in ((9, 16), (9, 8), (4, 16, 8))
    )
    args: Any = (grad, x, weight, torch.tensor(offsets, dtype=torch.int32))
    exact = registry.primitive("grouped_linear_backward").body(*double(args), True, True)
    gradients = grouped_mm_backward(*args, True, True, None)  # type: ignore[arg-type]
    for got, want in zip(gradients, exact, strict=True):
        assert torch.equal(got.double(), want.bfloat16().double())
    assert [t.numel() > 0 for t in grouped_mm_backward(*args, False, True, None)] == [False, True]  # type: ignore[arg-type]


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _layer(tokens: int, experts: int, slots: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (
        _meta(tokens, width, dtype=dtype),
        _meta(experts, 2 * inner, width, dtype=dtype),
        _meta(experts, width, inner, dtype=dtype),
        _meta(tokens, slots, dtype=torch.int32),
        _meta(tokens, slots, dtype=torch.float32),
    )


MIXTRAL, DEEPSEEK, QWEN = (8, 2, 4096, 14_336), (256, 8, 7168, 2048), (128, 8, 2048, 768)


@pytest.mark.parametrize(
    ("device", "layer", "rows", "dtype", "first"),
    [
        ("h100", MIXTRAL, 512, torch.bfloat16, "torch.grouped_mm"),
        ("h100", MIXTRAL, 450, torch.bfloat16, "torch.grouped_mm"),
        ("h100", MIXTRAL, 1400, torch.bfloat16, "torch.grouped_mm"),
        ("h200", MIXTRAL, 4096, torch.bfloat16, "torch.grouped_mm"),
        ("h100", DEEPSEEK, 512, torch.bfloat16, "torch.grouped_mm"),
        ("h100", MIXTRAL, 128, torch.bfloat16, "triton"),
        ("h100", MIXTRAL, 1, torch.bfloat16, "triton"),
        ("h100", QWEN, 512, torch.bfloat16, "triton"),
        ("h100", MIXTRAL, 512, torch.float16, "triton"),
        ("a100", MIXTRAL, 512, torch.bfloat16, "triton"),
        ("mi300x", MIXTRAL, 512, torch.bfloat16, "triton"),
    ],
)
def test_many_rows_of_wide_experts_go_to_cutlass_on_hopper(
    device: str, layer: tuple[int, ...], rows: int, dtype: torch.dtype, first: str
) -> None:
    experts, slots = layer[:2]
    args = _layer(rows * experts // slots, *layer, dtype)
    explanation = ferryman.explain(ops.moe_experts, *args, device=device)
    ours = "triton.ranks" if args[3].numel() <= 4096 else "triton.counted"
    leads = rows >= 1400 and first != "triton"
    assert explanation.chosen == ("torch.grouped_mm" if leads else ours)
    assert explanation.source == ("menu" if leads else "profile")
    back = ferryman.explain("moe_experts_backward", args[0], *args, "silu", None, *[True] * 5, device=device)
    assert back.chosen == (ours if first == "triton" else first)
    x, weight, ends = _meta(rows * experts, 2048, dtype=dtype), _meta(experts, 512, 2048, dtype=dtype), experts
    # a product alone pays for no steps beside it: the widths of QWEN will do
    alone = "torch.grouped_mm" if (device, dtype, rows >= 450) == ("h100", torch.bfloat16, True) else first
    offsets = _meta(ends, dtype=torch.int32)
    assert ferryman.explain(ops.grouped_linear, x, weight, offsets, device=device).chosen == alone
    grad = _meta(len(x), 512, dtype=dtype)
    explanation = ferryman.explain("grouped_linear_backward", grad, x, weight, offsets, True, True, device=device)
    assert explanation.chosen == alone


def test_requests_and_measured_times_go_before_a_line_that_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _layer(8192, *MIXTRAL, torch.bfloat16)
    with ferryman.use("triton"):
        assert ferryman.explain(ops.moe_experts, *args, device="h100").chosen == "triton.counted"
    ranked = rank.rank("moe_experts", (*args, "silu", None), "h100")
    assert [r.implementation for r in ranked][:2] == ["torch.grouped_mm", "triton.counted"]
    times = {"triton.counted": (1e-3, 0.01), "torch.grouped_mm": (2e-3, 0.01)}
    monkeypatch.setattr(cost, "knows", lambda op, profile: True)
    monkeypatch.setattr(cost, "predictions", lambda op, work, profile: times)
    explanation = ferryman.explain(ops.moe_experts, *args, device="h100")
    assert (explanation.chosen, explanation.source) == ("triton.counted", "predicted by the cost model")
    monkeypatch.setattr(cost, "predictions", lambda op, work, profile: {})
    explanation = ferryman.explain(ops.moe_experts, *args, device="h100")
    assert (explanation.chosen, explanation.source) == (
        "torch.grouped_mm",
        "menu",
    ) and "which leads for such calls" in str(explanation)


@pytest.mark.parametrize(("tokens", "line"), [(512, "triton.ranks"), (513, "triton.counted")])
@pytest.mark.parametrize("device", ["h200", "mi300x"])
def test_few_slots_are_ranked_and_many_counted(tokens: int, line: str, device: str) -> None:
    pytest.importorskip("triton")
    args, known = _layer(tokens, *QWEN, torch.float16), profile(device)
    orders = {"triton.ranks": ["rows_by_rank"], "triton.counted": ["count_slots", "sum_counts", "place_slots"]}
    forward, (*order, first, second, last) = launched("moe_experts", (*args, "silu", None), known)
    assert (forward, order, {first, second}, last) == (line, orders[line], {"grouped_tile"}, "combine_rows")
    backward, kernels = launched("moe_experts_backward", (args[0], *args, "silu", None, *[True] * 5), known)
    assert (backward, kernels[: len(order) + 1]) == (line, [*order, "gated_gradient"])
    with ferryman.use("triton.ranks"):
        asked = ferryman.explain("moe_experts", *args, device=device)
    assert asked.chosen == ("triton.ranks" if tokens == 512 else None)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm")
def test_the_line_of_grouped_mm_means_the_same_on_hostile_offsets() -> None:
    """On the CPU its kernel is PyTorch's own; what is tried is what stands around it."""
    from ferryman.ops.moe.torch_kernels import grouped_mm

    x, weight = torch.ones(6, 8).bfloat16(), torch.arange(1, 4).repeat_interleave(64).reshape(3, 8, 8).bfloat16()
    for offsets, owners in (([4, 2, 6], [1, 1, 1, 1, 3, 3]), ([-1, 3, 2], [2, 2, 2, 0, 0, 0])):
        y = grouped_mm(x, weight, torch.tensor(offsets, dtype=torch.int32), None)  # type: ignore[arg-type]
        assert y[:, 0].tolist() == [8 * owner for owner in owners]


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("grouped_linear", {"offsets": torch.zeros(5, dtype=torch.int64)}, r"offsets\.dtype is torch\.int64"),
        ("grouped_linear", {"offsets": torch.zeros(4, dtype=torch.int32)}, r"offsets\.shape is \(4,\)"),
        ("grouped_linear", {"weight": torch.zeros(5, 37, 71)}, r"weight\.shape\[2\] is 71; required: 72"),
        ("moe_experts", {"gate_up": torch.zeros(5, 24, 40)}, r"gate_up\.shape is \(5, 24, 40\)"),
        ("moe_experts", {"bias": torch.zeros(5, 48)}, r"bias\.shape is \(5, 48\); required: \(5, 88\)"),
        ("moe_experts", {"activation": "relu"}, "activation is 'relu'"),
        ("moe_experts", {"topk_ids": torch.zeros(13, 2)}, r"topk_ids\.dtype is torch\.float32"),
        ("moe_experts", {"topk_weights": torch.zeros(13, 3)}, r"topk_weights\.shape"),
    ],
)
def test_arguments_that_do_not_fit_are_named(op: str, change: dict[str, Any], message: str) -> None:
    known = registry.primitive(op)
    values = dict(zip(known.names, materialise(cases(op)["ragged"], known, torch.float32), strict=True))
    with pytest.raises(ArgumentError, match=message):
        getattr(ops, op)(**{**values, **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
names = {"grouped_linear": ("ragged", "hostile_many", "exact_hostile"), "moe_experts": ("biased", "hostile_ids"),
         "moe_experts_backward": ("biased", "exact_hostile")}
cells = []
for name, wanted in names.items():
    op = registry.primitive(name)
    cells += [check_cell(op, line, case, torch.float16, simulate=profile("h200"))
              for line in registry.asked(name, ("triton",)) for case in cases_of(op) if case.name in wanted]
print(json.dumps({f"{cell.op} {cell.implementation} {cell.case}": (cell.verdict, cell.reason) for cell in cells}))
"""


def test_the_triton_kernels_are_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 11 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts

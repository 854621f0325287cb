"""Activations, tables of rows and layers of experts in models: which are served, by what, and what stays."""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import pickle
import textwrap
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model import blocks, bundled
from ferryman.porting.model.generic import compare
from ferryman.porting.model.port import port
from ferryman.porting.model.recognise import Refusal, Role, role_of

transformers = pytest.importorskip("transformers")
from transformers.activations import ACT2FN  # noqa: E402
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding  # noqa: E402

import ferryman.integrations.transformers  # noqa: E402 - it registers itself
from tests.unit.test_disguises import assert_as_right  # noqa: E402

STORAGE = (torch.bfloat16, torch.float16, torch.float32)


def made_by(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """(result, {"op implementation": calls})."""
    with ferryman.trace() as traced:
        output = call()
    calls: dict[str, int] = {}
    for (op, line), n in traced.calls.items():
        calls[f"{op} {line.split('.')[0]}"] = calls.get(f"{op} {line.split('.')[0]}", 0) + n
    return output, calls


def same(x: Tensor, actual: Tensor, wanted: Tensor, exact: Tensor) -> bool:
    """Both are the exact result, rounded: no farther apart than one unit and what the unported one is off by. Factors
    like 1 + tanh, in float32, are off by a few units of 1 where they are nearly 0."""
    unit = torch.finfo(wanted.dtype).eps * exact.abs() + torch.finfo(wanted.dtype).tiny
    unit = unit + 4 * torch.finfo(torch.float32).eps * x.double().abs()
    return bool(((actual.double() - exact).abs() <= unit + (wanted.double() - exact).abs()).all())


def near(actual: Tensor, wanted: Tensor) -> bool:
    """Float32 results of a norm, a product, or a product of two such, of 16 terms each, that add in another order: 16
    roundings of each sum and a few behind it."""
    return float((actual - wanted).abs().max()) <= 64 * 2.0**-24 * float(wanted.abs().max())


# Activations ------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "nn.GELU": nn.GELU,
    "nn.GELU tanh": lambda: nn.GELU("tanh"),
    "nn.SiLU": nn.SiLU,
    "nn.ReLU": nn.ReLU,
    "nn.LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "nn.ELU": lambda: nn.ELU(0.5),
    "nn.Tanh": nn.Tanh,
    "nn.Sigmoid": nn.Sigmoid,
    "nn.Hardswish": nn.Hardswish,
    **{
        name: functools.partial(ACT2FN.__getitem__, name)
        for name in (
            "gelu",
            "gelu_new",
            "gelu_pytorch_tanh",
            "gelu_accurate",
            "quick_gelu",
            "silu",
            "swish",
            "relu",
            "relu2",
            "leaky_relu",
            "tanh",
            "sigmoid",
            "hardswish",
        )
    },
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_served_in_every_dtype_and_learns_as_before(name: str) -> None:
    module = nn.Sequential(ACTIVATIONS[name]())
    given = torch.cat([torch.linspace(-9, 9, 33), torch.tensor([0.0, -1e-6, 60.0, -60.0])]).reshape(1, -1)
    for dtype in STORAGE:
        x = given.to(dtype).requires_grad_()
        exact = x.detach().double().requires_grad_()
        truth = module(exact)
        wanted = module(x)
        slopes = [torch.autograd.grad(y.sum(), leaf)[0] for y, leaf in ((truth, exact), (wanted, x))]
        report = ferryman.port(module)
        assert report.calls() == {"bias_act": 1} and not report.unsupported
        output, calls = made_by(lambda: module(x))  # noqa: B023 - called here
        assert calls == {"bias_act torch": 1}
        assert same(x.detach(), output.detach(), wanted.detach(), truth.detach())
        slope = torch.autograd.grad(output.sum(), x)[0]
        # the tanh gelu's gradient has x (1 - tanh^2) (1 + 0.13 x^2) 0.4, 14 units where 1 - tanh^2 is a unit off
        off = (slope.double() - slopes[0]).abs() - (slopes[1].double() - slopes[0]).abs()
        assert float(off.max()) <= 16 * torch.finfo(dtype).eps
        ferryman.unport(module)
        assert torch.equal(module(x), wanted)


class Scaled(nn.Module):
    """A sigmoid unit with a constant of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.scale * x)


class Biased(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.hardsigmoid(x + self.bias)


class Trained(nn.Module):
    """Another activation in training."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.training else torch.tanh(x).clamp(-0.999, 0.999)


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x).clamp(max=1e6)


class Written(nn.Module):
    """The tanh gelu with another constant."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.79788 * (x + 0.044715 * x**3)))


LOOKALIKES: dict[str, Callable[[], nn.Module]] = {
    "gelu_10": lambda: ACT2FN["gelu_10"],
    "gelu_fast": lambda: ACT2FN["gelu_fast"],
    "mish": lambda: ACT2FN["mish"],
    "laplace": lambda: ACT2FN["laplace"],
    "linear": lambda: ACT2FN["linear"],
    "prelu": lambda: ACT2FN["prelu"],
    "relu6": nn.ReLU6,
    "hardsigmoid": nn.Hardsigmoid,
    "softplus": nn.Softplus,
    "selu": nn.SELU,
    "in place": lambda: nn.ReLU(inplace=True),
    "1.7": lambda: Scaled(1.7),
    "1.7021": lambda: Scaled(1.7021),
    "biased": lambda: Biased(96),
    "trained": Trained,
    "cut": Cut,
    "constant": Written,
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_another_activation_is_none(name: str) -> None:
    module = LOOKALIKES[name]()
    assert isinstance(role_of(module), Refusal), role_of(module)
    x = torch.randn(3, 96)
    wanted = module(x.clone())
    try:
        ferryman.port(module)  # a functional inside may be served
    except PortError:
        return
    limit = 8 * torch.finfo(torch.float32).eps * float(wanted.abs().max())
    assert float((module(x.clone()) - wanted).abs().max()) <= limit


def test_the_right_constant_is_found_whatever_it_is_called() -> None:
    role = role_of(Scaled(1.702))
    assert isinstance(role, Role) and role.expression == "ops.bias_act(x, None, 'quick_gelu')"
    half = role_of(nn.LeakyReLU(0.5))
    assert isinstance(half, Role) and half.expression.endswith("self.negative_slope)")


class Called(nn.Module):
    """Functionals in a forward that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.lin(x), approximate="tanh") + functional.leaky_relu(x, 0.3)
        x = torch.tanh(x) + functional.relu(x.clone(), inplace=True) + functional.elu(x, 0.7)
        return functional.silu(x) + functional.gelu(x) + torch.sigmoid(x.double()).float()


def test_functionals_inside_a_forward_are_served_where_the_op_means_the_same() -> None:
    parity = compare(Called(), lambda m: m(torch.randn(3, 16)))
    assert parity.ok, parity.reasons
    assert parity.calls["bias_act"] == 6  # not the one in place, nor the one in float64
    assert parity.calls["bias_act_backward"] == 5  # leaky_relu's input needs none


def test_an_activation_of_a_gated_product_is_counted_there_alone() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.lin, self.other = nn.SiLU(), nn.Linear(8, 8), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.act(self.lin(x)) * x)

    module = Gated()
    report = ferryman.port(module)
    _, calls = made_by(lambda: module(torch.randn(2, 8)))
    assert calls == {"linear torch": 1, "silu_mul torch": 1, "bias_act torch": 1}
    assert report.calls() == {"linear": 1, "silu_mul": 1, "bias_act": 1}


# Tables -----------------------------------------------------------------------------------------------------


def test_a_plain_table_is_served_and_learns() -> None:
    table = nn.Embedding(40, 12)
    ids = torch.tensor([[3, 0, 39], [3, 3, 7]])
    wanted = table(ids)
    slope = torch.autograd.grad(wanted.square().sum(), table.weight)[0]
    report = ferryman.port(table)
    assert report.calls() == {"embedding": 1} and not report.maybe()
    assert torch.equal(table(ids), wanted) and torch.equal(table(ids.int()), wanted)
    again, calls = made_by(lambda: torch.autograd.grad(table(ids).square().sum(), table.weight)[0])
    assert calls == {"embedding torch": 1, "embedding_backward torch": 1}
    # at most 3 terms a row, in another order
    assert float((again - slope).abs().max()) <= 3 * torch.finfo(torch.float32).eps * float(slope.abs().max())
    ferryman.unport(table)
    assert torch.equal(table(ids), wanted)


KEPT: dict[str, Callable[[], nn.Embedding]] = {
    "padding": lambda: nn.Embedding(40, 12, padding_idx=3),
    "the last row of a long table": lambda: nn.Embedding(3000, 12, padding_idx=2999),
    "by frequency": lambda: nn.Embedding(40, 12, scale_grad_by_freq=True),
    "sparse": lambda: nn.Embedding(40, 12, sparse=True),
    "Gemma3's": lambda: Gemma3TextScaledWordEmbedding(40, 12, 0, embed_scale=3.46),
    "Bart's": lambda: BartScaledWordEmbedding(40, 12, 1, embed_scale=3.46),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_table_with_a_gradient_rule_is_served_where_no_gradient_is_needed(name: str) -> None:
    table = KEPT[name]()
    ids = torch.tensor([[3, 0, 1], [3, 39, 7]])
    for dtype in STORAGE:
        table.to(dtype)
        wanted = table(ids)
        before = torch.autograd.grad(wanted.float().square().sum(), table.weight)[0].to_dense()
        report = ferryman.port(table)
        assert report.calls() == {} and report.maybe() == {"embedding"} and not report.unsupported
        with torch.no_grad():
            output, calls = made_by(lambda: table(ids))
        assert calls == {"embedding torch": 1} and torch.equal(output, wanted)
        trained, calls = made_by(lambda: table(ids))
        assert calls == {}
        after = torch.autograd.grad(trained.float().square().sum(), table.weight)[0].to_dense()
        assert torch.equal(after, before)
        table.weight.requires_grad_(False)
        assert made_by(lambda: table(ids))[1] == {"embedding torch": 1}
        table.weight.requires_grad_()
        ferryman.unport(table)


def test_a_scaled_table_without_padding_learns() -> None:
    module = BartScaledWordEmbedding(40, 12, None, embed_scale=3.46)
    parity = compare(nn.Sequential(module, nn.Linear(12, 12), nn.Tanh()), lambda m: m(torch.tensor([[3, 0, 39, 3]])))
    assert parity.ok, parity.reasons
    assert parity.calls["embedding"] == parity.calls["embedding_backward"] == 1
    assert role_of(module).expression == "ops.embedding(x, self.weight, self.embed_scale)"  # type: ignore[union-attr]


class Shifted(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.5


class Next(nn.Embedding):
    """The row after."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward((input + 1).clamp(max=self.num_embeddings - 1))


class Blank(nn.Embedding):
    """A row of zeros that is not the one which learns nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).masked_fill((input == 2).unsqueeze(-1), 0.0)


class Rooted(nn.Embedding):
    """Scaled by a number that it computes of its rows' width."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


def test_a_table_that_is_scaled_by_its_width() -> None:
    assert role_of(Rooted(40, 12)).expression == "ops.embedding(x, self.weight, self.weight.shape[1] ** 0.5)"  # type: ignore[union-attr]


class Rows(nn.Embedding):
    """Scaled by a number of its rows."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.num_embeddings**0.25


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(40, 12, max_norm=1.0),
        lambda: nn.Embedding(40, 12, max_norm=1e30),
        lambda: nn.Embedding(40, 12, max_norm=3, norm_type=1.0),
        lambda: Shifted(40, 12),
        lambda: Next(40, 12),
        lambda: Blank(40, 12),
        lambda: Rows(40, 12),
        lambda: nn.EmbeddingBag(40, 12),
    ],
)
def test_another_table_stays(make: Callable[[], nn.Module]) -> None:
    table = make()
    refusal = role_of(table)
    assert isinstance(refusal, Refusal) and refusal.reason
    with pytest.raises(PortError, match="nothing in"):
        ferryman.port(table)


def test_a_table_that_is_called_as_a_function() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(9, 6))
            self.out = nn.Linear(6, 6)

        def forward(self, ids: Tensor) -> Tensor:
            padded = functional.embedding(ids, self.rows, padding_idx=2)
            return self.out(functional.embedding(ids, self.rows) + padded)

    parity = compare(Own(), lambda m: m(torch.tensor([[2, 3, 2, 8]])))
    assert parity.ok, parity.reasons
    assert parity.calls["embedding"] == 1  # the padded one learns by another rule
    assert compare(Own(), lambda m: m(torch.tensor([[2, 8]])), backward=False).calls["embedding"] == 2


# Norms whose input is wider than their weights --------------------------------------------------------------


class Norm(nn.Module):
    """An RMS norm that leaves a float32 input's result in float32, or rounds it to its weight's dtype."""

    def __init__(self, rounds: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 48))
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(self.weight.dtype if self.rounds else x.dtype)


class Residual(nn.Module):
    """What a block adds stays in float32 beside weights in 16 bits."""

    def __init__(self, rounds: bool) -> None:
        super().__init__()
        self.norm, self.last, self.mix = Norm(rounds), Norm(rounds), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        x = x + self.mix(self.norm(x).to(self.mix.weight.dtype))
        return self.last(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_of_a_float32_residual_is_served_beside_narrow_weights(dtype: torch.dtype) -> None:
    model = Residual(False).to(dtype)
    x = torch.randn(3, 5, 48, dtype=dtype)
    parity = compare(model, lambda m: m(x))
    assert parity.ok and not parity.miscounted, parity.reasons
    assert parity.calls["rms_norm"] == parity.calls["add_rms_norm"] == 1


def test_a_norm_that_rounds_to_its_weights_is_not_served_beside_them() -> None:
    model = Residual(True).bfloat16()
    x = torch.randn(3, 5, 48, dtype=torch.bfloat16)
    parity = compare(model, lambda m: m(x))
    assert parity.ok and not {"rms_norm", "add_rms_norm"} & set(parity.calls), parity.reasons
    assert compare(Residual(True), lambda m: m(x.float())).calls["rms_norm"] == 1


# Experts ----------------------------------------------------------------------------------------------------


def experts_of(home: str, kind: str, config: str, **more: Any) -> Any:
    import importlib

    module = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_local_experts": 6,
        "num_experts": 6,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
    }
    configuration = getattr(transformers, config)(**(sizes | more))
    configuration._experts_implementation = "grouped_mm"
    layer = getattr(module, kind)(configuration)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.2)
    return layer


def routed(tokens: int = 11, width: int = 24, experts: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    shares = torch.rand(tokens, 2, generator=generator)
    return torch.randn(tokens, width, generator=generator), ids, shares / shares.sum(-1, keepdim=True)


EXPERTS: dict[str, tuple[str, str, str]] = {
    "mixtral": ("mixtral", "MixtralExperts", "MixtralConfig"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig"),
    "olmoe": ("olmoe", "OlmoeExperts", "OlmoeConfig"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Experts", "DeepseekV3Config"),
    "glm4_moe": ("glm4_moe", "Glm4MoeExperts", "Glm4MoeConfig"),
}


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_experts_are_served_forward_and_backward(name: str, act: str) -> None:
    layer = experts_of(*EXPERTS[name], hidden_act=act)
    x, ids, shares = routed()
    x.requires_grad_()
    shares = shares.detach().requires_grad_()
    wanted = layer(x, ids, shares)
    before = torch.autograd.grad(wanted.square().sum(), [x, shares, *layer.parameters()])
    wanted = wanted.detach()
    report = ferryman.port(layer)
    assert report.calls() == {"moe_experts": 1} and not report.unsupported
    with torch.no_grad():
        output, calls = made_by(lambda: layer(x, ids, shares))
        by_name, _ = made_by(lambda: layer(top_k_weights=shares, hidden_states=x, top_k_index=ids))
        assert torch.equal(by_name, output)
        for implementation in ("eager", "batched_mm"):  # whatever the config says since
            layer.config._experts_implementation = implementation
            assert made_by(lambda: layer(x, ids, shares))[1] == {"moe_experts torch": 1}
        layer.config._experts_implementation = "grouped_mm"
    assert calls == {"moe_experts torch": 1}
    # sums of 24 and 16 products and of 2 experts
    assert float((output - wanted).abs().max()) <= 48 * torch.finfo(torch.float32).eps * float(wanted.abs().max())
    after, calls = made_by(
        lambda: torch.autograd.grad(layer(x, ids, shares).square().sum(), [x, shares, *layer.parameters()])
    )
    assert calls == {"moe_experts torch": 1, "moe_experts_backward torch": 1}
    # sums of 11 tokens behind those
    room = 512 * torch.finfo(torch.float32).eps
    assert all(float((a - b).abs().max()) <= room * float(b.abs().max()) for a, b in zip(after, before, strict=True))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    with torch.no_grad():
        assert torch.equal(twin(x, ids, shares), output)
    ferryman.unport(layer)
    assert torch.equal(layer(x, ids, shares), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*EXPERTS, "gpt_oss"])
def test_a_family_with_experts_trains_through_the_op(name: str, dtype: torch.dtype) -> None:
    model = bundled.build(name, True, dtype)
    parity = compare(model, bundled.inputs_of(name, True, model))
    assert parity.ok, parity.reasons
    assert parity.calls["moe_experts"] == parity.calls["moe_experts_backward"] >= 1
    assert {d.what for d in parity.distances} == {"output", "gradient"}


def test_experts_in_16_bits_are_nearer_to_the_exact_result_than_before() -> None:
    layer = experts_of(*EXPERTS["mixtral"]).bfloat16()
    x, ids, shares = routed(500)
    wide = copy.deepcopy(layer).double()
    wide.config._experts_implementation = "eager"
    with torch.no_grad():
        exact = wide(x.bfloat16().double(), ids, shares.double())
        wanted = layer(x.bfloat16(), ids, shares)
        ferryman.port(layer)
        output, calls = made_by(lambda: layer(x.bfloat16(), ids, shares))
    assert calls == {"moe_experts torch": 1} and output.dtype == wanted.dtype == torch.bfloat16
    assert (output.double() - exact).norm() <= (wanted.double() - exact).norm()


def _odd(name: str) -> Any:
    """Experts of Mixtral with one fault, written as its forward is."""
    base: Any = type(experts_of(*EXPERTS["mixtral"]))
    plain = experts_of(*EXPERTS["mixtral"])

    class Clipped(base):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            final = torch.zeros_like(hidden_states)
            for e in range(self.num_experts):
                token, slot = torch.where(top_k_index == e)
                gate, up = functional.linear(hidden_states[token], self.gate_up_proj[e]).chunk(2, dim=-1)
                h = self.act_fn(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)
                h = functional.linear(h, self.down_proj[e]) * top_k_weights[token, slot, None]
                final.index_add_(0, token, h)
            return final

    class Swapped(base):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            final = torch.zeros_like(hidden_states)
            hit = torch.unique(top_k_index)
            for e in hit:
                token, slot = torch.where(top_k_index == e)
                if e == self.num_experts:
                    continue
                up, gate = functional.linear(hidden_states[token], self.gate_up_proj[e]).chunk(2, dim=-1)
                h = functional.linear(self.act_fn(gate) * up, self.down_proj[e])
                final.index_add_(0, token, h * top_k_weights[token, slot, None])
            return final

    class Before(base):  # type: ignore[misc]
        """The share scales the input, not the result."""

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            final = torch.zeros_like(hidden_states)
            hit = torch.unique(top_k_index)
            for e in hit:
                token, slot = torch.where(top_k_index == e)
                if e == self.num_experts:
                    continue
                x = hidden_states[token] * top_k_weights[token, slot, None]
                gate, up = functional.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
                final.index_add_(0, token, functional.linear(self.act_fn(gate) * up, self.down_proj[e]))
            return final

    class Gate(base):  # type: ignore[misc]
        """What the registry's implementations call is another gate than the one in its forward."""

        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * (up + 1.0)

    if name == "bias":
        plain.gate_up_proj_bias = nn.Parameter(torch.randn(6, 32))
        return plain
    if name == "relu":
        plain.act_fn = nn.ReLU()
        return plain
    kinds: dict[str, Any] = {"clipped": Clipped, "swapped": Swapped, "before": Before, "gate": Gate}
    plain.__class__ = kinds[name]
    return plain


@pytest.mark.parametrize("name", ["clipped", "swapped", "before", "gate", "bias", "relu"])
def test_other_experts_stay(name: str) -> None:
    layer = _odd(name)
    refusal = blocks.role_of(layer)
    assert not isinstance(refusal, Role)
    assert refusal is None or refusal.reason
    x, ids, shares = routed()
    with torch.no_grad():
        wanted = layer(x * 9, ids, shares)
        try:
            ferryman.port(layer)
        except PortError:
            return
        after, calls = made_by(lambda: layer(x * 9, ids, shares))
    assert "moe_experts torch" not in calls
    assert float((after - wanted).abs().max()) <= 48 * torch.finfo(torch.float32).eps * float(wanted.abs().max())


def gpt_oss(**changes: Any) -> Any:
    """Clipped gates between the rows of up, biases, inputs that may be None, ids that are checked."""
    layer = experts_of("gpt_oss", "GptOssExperts", "GptOssConfig")
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


def test_clipped_interleaved_experts_with_biases_are_served() -> None:
    layer = gpt_oss()
    x, ids, shares = routed()
    x = (x * 9).requires_grad_()
    wanted = layer(x, ids, shares)
    before = torch.autograd.grad(wanted.square().sum(), [x, *layer.parameters()])
    report = ferryman.port(layer)
    assert report.calls() == {"moe_experts": 1} and not report.unsupported
    output, calls = made_by(lambda: layer(x, routing_weights=shares, router_indices=ids))
    assert calls == {"moe_experts torch": 1}
    after = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
    output, wanted = output.detach(), wanted.detach()
    # sums of 24 and 16 products and of 2 experts, and of 11 tokens behind those
    room = torch.finfo(torch.float32).eps
    assert float((output - wanted).abs().max()) <= 48 * room * float(wanted.abs().max())
    pairs = zip(after, before, strict=True)
    assert all(float((a - b).abs().max()) <= 512 * room * float(b.abs().max()) for a, b in pairs)
    with pytest.raises(AttributeError, match="NoneType"):  # as before: the model's own error
        layer(x)


def test_a_comparison_that_never_held_is_covered_only_where_it_cannot_hold() -> None:
    base: Any = type(gpt_oss())

    def role(old: str, new: str, **changes: Any) -> Any:
        layer = gpt_oss(**changes)
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(base.forward)))
        assert text.count(old) == 1
        name = f"<experts {len(linecache.cache)}>"
        lines = text.replace(old, new).splitlines(keepends=True)
        linecache.cache[name] = (len(text), None, lines, name)
        known: dict[str, Any] = {"torch": torch}
        exec(compile("".join(lines), name, "exec"), known)  # noqa: S102 - the library's own text
        layer.__class__ = type("Own", (base,), {"forward": known["forward"], "__module__": __name__})
        return blocks.role_of(layer)

    skip, one_hot = "expert_idx == self.num_experts", "router_indices, num_classes=self.num_experts"
    assert isinstance(role(skip, skip), Role)
    assert isinstance(role(one_hot, f"{one_hot} + 1"), Role)  # a number beyond is taken, and skipped
    for new in ("expert_idx == 5", "expert_idx == self.absent", "len(expert_hit) == self.num_experts + 1"):
        refusal = role(skip, new, absent=77)
        assert isinstance(refusal, Refusal) and "no input took both sides" in refusal.reason
    # it compares with the number of experts, but does not go over ids
    refusal = role(skip, "len(expert_hit) + 1 == self.num_experts")
    assert isinstance(refusal, Refusal)


@pytest.mark.parametrize("changes", [{"alpha": 1.7}, {"limit": 6.5}, {"down_proj_bias": None}])
def test_experts_clipped_otherwise_stay(changes: dict[str, Any]) -> None:
    assert not isinstance(blocks.role_of(gpt_oss(**changes)), Role)


def test_an_input_that_may_be_left_out_is_none_of_the_op() -> None:
    base: Any = type(gpt_oss())

    class Lenient(base):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, router_indices: Any = None, routing_weights: Any = None) -> Tensor:
            if routing_weights is None:
                return hidden_states
            total = torch.zeros_like(hidden_states)
            for e in router_indices.unique():
                token, slot = torch.where(router_indices == e)
                h = hidden_states[token] @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]
                h = self._apply_gate(h) @ self.down_proj[e] + self.down_proj_bias[e]
                total.index_add_(0, token, h * routing_weights[token, slot, None])
            return total

    layer = gpt_oss()
    layer.__class__ = Lenient
    refusal = blocks.role_of(layer)
    assert isinstance(refusal, Refusal) and "does without an input" in refusal.reason


def test_a_decorator_that_reads_no_known_registry_is_named() -> None:
    layer = experts_of(*EXPERTS["mixtral"])
    kind: Any = type(layer)

    @functools.wraps(kind.forward)
    def doubled(self: Any, *args: Any) -> Any:
        return 2 * kind.forward(self, *args)

    layer.__class__ = type("Doubled", (kind,), {"forward": doubled})
    refusal = blocks.role_of(layer)
    assert isinstance(refusal, Refusal) and "decorator" in refusal.reason


def test_a_loop_that_had_items_is_guarded_against_none() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.times = 1

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = torch.tanh(x)
            return x

    role = role_of(Loop())
    assert isinstance(role, Role) and ("range(self.times)", True) in role.guards and "times" in role.state
    model, x = nn.Sequential(Loop()), torch.randn(3, 8)
    port(model)
    for times in (1, 0, 2, 3):
        model[0].times = times  # type: ignore[assignment]
        assert torch.equal(model(x), [x, x.tanh(), x.tanh().tanh(), x.tanh().tanh().tanh()][times])


# What ends a role --------------------------------------------------------------------------------------------


def _set(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, value())


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None], bool]] = {
    # a module, what is done to it after porting, whether it stays one of ours
    "a bias that came": (
        lambda: nn.Linear(16, 16, bias=False),
        _set("bias", lambda: nn.Parameter(torch.full((16,), 5.0))),
        True,
    ),
    "a bias that was registered": (
        lambda: nn.Linear(16, 16, bias=False),
        lambda m: m.register_parameter("bias", nn.Parameter(torch.full((16,), 5.0))),
        True,
    ),
    "a bias that went": (lambda: nn.Linear(16, 16), _set("bias", lambda: None), True),
    "a norm's bias that came": (
        lambda: nn.LayerNorm(16, bias=False),
        _set("bias", lambda: nn.Parameter(torch.full((16,), 5.0))),
        True,
    ),
    "a norm's weight that went": (lambda: nn.LayerNorm(16), _set("weight", lambda: None), True),
    "an eps": (lambda: nn.LayerNorm(16), _set("eps", lambda: 1.0), True),
    "a shape": (lambda: nn.LayerNorm(16), _set("normalized_shape", lambda: [16]), False),
    "an eps of None": (lambda: nn.RMSNorm(16, eps=1e-6), _set("eps", lambda: None), False),
    "an option": (nn.GELU, _set("approximate", lambda: "tanh"), False),
    "the same option": (nn.GELU, _set("approximate", lambda: "none"), True),
    "a slope": (lambda: nn.LeakyReLU(0.1), _set("negative_slope", lambda: 0.5), True),
    "in training": (lambda: nn.Linear(16, 16), lambda m: m.train(), True),
}


class Factored(nn.Module):
    """Settings in a private attribute, behind a property, and of the class."""

    times = 1.0

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self._factor, self.shift = nn.Parameter(torch.rand(16) + 0.5), factor, 0.0

    @property
    def factor(self) -> float:
        return self._factor

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return h * self.weight * (self.factor * self.times) + self.shift


FACTORED: dict[str, Callable[[Any], None]] = {
    "private": lambda m: setattr(m, "_factor", 2.0),
    "over the class's": lambda m: setattr(m, "times", 3.0),
    "its own": lambda m: setattr(m, "shift", 1.0),
}


@pytest.mark.parametrize("change", FACTORED)
def test_settings_that_a_class_hides_end_a_role_too(change: str) -> None:
    model, x = nn.Sequential(Factored(1.0), nn.Linear(16, 16)), torch.randn(3, 16)
    plain = copy.deepcopy(model)
    ferryman.port(model)
    assert "rms_norm torch" in made_by(lambda: model(x))[1]
    for side in (model, plain):
        FACTORED[change](side[0])
    assert near(model(x), plain(x)) and type(model[0]) is Factored


def test_two_modules_that_differ_in_a_private_setting_have_two_proofs() -> None:
    model, x = nn.Sequential(Factored(1.0), Factored(2.0)), torch.randn(3, 16)
    wanted = model(x)
    ferryman.port(model)
    assert near(model(x), wanted)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_porting_is_computed_as_it_is(change: str) -> None:
    make, alter, stays = CHANGES[change]
    plain, x = make(), torch.randn(3, 4, 16)
    model = nn.Sequential(copy.deepcopy(plain), nn.Linear(16, 16))
    ferryman.port(model)
    assert near(model[0](x), plain(x))
    alter(plain), alter(model[0])
    assert hasattr(type(model[0]), "ferryman_original") is stays
    assert near(model[0](x), plain(x))
    ferryman.unport(model)
    assert type(model[0]) is type(plain) and torch.equal(model[0](x), plain(x))


class Changeable(nn.Module):
    """A norm whose code reads what may change in place, of itself and of its class, and calls a method."""

    factors: ClassVar[dict[str, float]] = {"a": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.sizes, self.table = nn.Parameter(torch.rand(16) + 0.5), [1.0], {"l": [2.0], "k": [1.0]}

    def last(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.last(h * self.weight) * self.sizes[-1] * self.factors["a"] * tuple(self.table.values())[-1][0]


def _seven(self: Any, x: Tensor) -> Tensor:
    return x * 7.0


def _turned(module: Any) -> None:
    module.table["l"] = module.table.pop("l")


IN_PLACE: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "a list": lambda m, patch: m.sizes.append(3.0),
    "a dictionary of the class": lambda m, patch: patch.setattr(Changeable, "factors", {"a": 4.0}),
    "a dictionary of the class in place": lambda m, patch: patch.setitem(Changeable.factors, "a", 5.0),
    "a dictionary": lambda m, patch: m.table.__setitem__("k", [3.0]),
    "inside a dictionary": lambda m, patch: m.table["k"].insert(0, 3.0),
    "a dictionary's order": lambda m, patch: _turned(m),
    "the class's forward": lambda m, patch: patch.setattr(Changeable, "forward", _seven),
    "a method of the class": lambda m, patch: patch.setattr(Changeable, "last", _seven),
    "a weight of one number": lambda m, patch: setattr(m, "weight", nn.Parameter(torch.full((1,), 3.0))),
    "a weight for each row": lambda m, patch: setattr(m, "weight", nn.Parameter(torch.rand(3, 1))),
    "a weight put past __setattr__": lambda m, patch: m._parameters.update(weight=nn.Parameter(torch.rand(1))),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", IN_PLACE)
def test_what_changes_in_place_or_on_the_class_is_computed_as_it_is(
    change: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(Changeable(), nn.Linear(16, 16)), torch.randn(3, 16)
    plain = copy.deepcopy(model[0])
    ferryman.port(model)
    assert "rms_norm torch" in made_by(lambda: model(x))[1]
    torch._dynamo.reset()
    call = torch.compile(model[0], backend="eager", fullgraph=True) if compiled else model[0]
    assert near(call(x), plain(x))
    before = plain(x)
    IN_PLACE[change](model[0], monkeypatch)
    if plain.__dict__["_parameters"]["weight"].shape != model[0].weight.shape:
        plain.weight = model[0].weight
    plain.sizes, plain.table = model[0].sizes, model[0].table
    assert near(call(x), plain(x)) and not near(plain(x), before)


@pytest.mark.parametrize(
    ("name", "value"), [("forward", _seven), ("factor", property(lambda self: 7.0)), ("times", 7.0)]
)
def test_what_a_class_has_since_is_what_another_port_proves(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, x = nn.Sequential(Factored(1.0), nn.Linear(16, 16)), torch.randn(3, 16)
    ferryman.port(first)
    monkeypatch.setattr(Factored, name, value)
    second = nn.Sequential(Factored(1.0), nn.Linear(16, 16))
    for model in (first, second):
        plain = copy.deepcopy(second)
        plain.load_state_dict(model.state_dict())
        wanted = plain(x)
        ferryman.port(model)
        output, calls = made_by(lambda model=model: model(x))
        assert calls == {"linear torch": 1} and near(output, wanted)


def test_a_replaced_forward_of_pytorchs_own_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(3, 16)
    ferryman.port(model)
    monkeypatch.setattr(nn.Linear, "forward", _seven)
    output, calls = made_by(lambda: model[0](x))
    assert not calls and torch.equal(output, x * 7.0)


def test_a_linear_takes_a_bias_of_one_number_as_before() -> None:
    plain, x = nn.Linear(16, 16), torch.randn(3, 16)
    model = nn.Sequential(copy.deepcopy(plain), nn.LayerNorm(16))
    ferryman.port(model)
    for module in (plain, model[0]):
        module.bias = nn.Parameter(torch.full((1,), 5.0))
    assert near(model[0](x), plain(x))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # PyTorch's own words
        model[0](x[:, :3])


def test_a_tensor_that_is_no_buffer_keeps_its_module_as_it_is() -> None:
    class Shifted(Changeable):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.tensor(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + self.shift

    model, x = nn.Sequential(Shifted(), nn.Linear(16, 16)), torch.randn(3, 16)
    report = ferryman.port(model)
    assert [item.reason for item in report.unsupported if "Tensor shift, which may change in place" in item.reason]
    plain = model[0](x)
    model[0].shift.add_(1.0)
    assert near(model[0](x), plain + 1.0)


class Bend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x)


class Product(nn.Module):
    """A gated product, and a method with a served call."""

    def __init__(self) -> None:
        super().__init__()
        self.bend, self.up, self.gate = Bend(), nn.Linear(16, 16), nn.Linear(16, 16)

    def shares(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.softmax(x, -1) * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.shares(self.bend(self.gate(x)) * self.up(x), scale=2.0)


def _tripled(self: Any, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * (3.0 * scale)


@pytest.mark.parametrize(
    ("kind", "name", "gone"), [(Bend, "forward", "silu_mul"), (Product, "shares", "softmax"), (Product, "forward", "")]
)
def test_served_calls_go_to_what_the_class_has_since(
    kind: type, name: str, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Product(), torch.randn(3, 16)
    plain = copy.deepcopy(model)
    ferryman.port(model)
    calls = made_by(lambda: model(x))[1]
    assert calls == {"linear torch": 2, "silu_mul torch": 1, "softmax torch": 1}
    monkeypatch.setattr(kind, name, _tripled)
    output, calls = made_by(lambda: model(x))
    assert near(output, plain(x))
    assert f"{gone} torch" not in calls and len(calls) == (2 if gone else 0)


def test_another_option_of_a_gated_activation_ends_its_part_of_the_op() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bend, self.up, self.gate = nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.bend(self.gate(x)) * self.up(x)

    model, x = Gated(), torch.randn(3, 16)
    ferryman.port(model)
    assert "gelu_mul torch" in made_by(lambda: model(x))[1]
    model.train().bend.approximate = "tanh"
    output, calls = made_by(lambda: model(x))
    ferryman.unport(model)
    assert calls == {"linear torch": 2} and near(output, model(x))


def test_another_activation_of_experts_ends_their_role() -> None:
    layer, given = experts_of(*EXPERTS["mixtral"]), routed()
    plain = copy.deepcopy(layer)
    ferryman.port(layer)
    assert "moe_experts torch" in made_by(lambda: layer(*given))[1]
    layer.act_fn, plain.act_fn = ACT2FN["gelu"], ACT2FN["gelu"]
    output, calls = made_by(lambda: layer(*given))
    assert not calls and type(layer) is type(plain) and torch.equal(output, plain(*given))


def test_another_option_of_the_activation_of_experts_is_computed() -> None:
    layer, given = experts_of(*EXPERTS["mixtral"]), routed()
    layer.act_fn = nn.GELU()
    plain = copy.deepcopy(layer)
    ferryman.port(layer)
    assert "moe_experts torch" in made_by(lambda: layer(*given))[1]
    layer.act_fn.approximate = plain.act_fn.approximate = "tanh"
    output, calls = made_by(lambda: layer(*given))
    assert not calls and torch.equal(output, plain(*given))


def test_a_number_as_large_as_the_width_bounds_rows_and_not_elements() -> None:
    """Code that counts groups of a row comes to its width, of which too many rows are no trial's."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.part = nn.Parameter(torch.rand(5120)), 640

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            x = x * nn.functional.silu(gate)
            *lead, width = x.shape
            parts = x.view(*lead, width // self.part, self.part)
            parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * parts.view(*lead, (width // self.part) * self.part)

    model, x, gate = nn.Sequential(Grouped()).eval(), *(torch.randn(2, 3, 5120) for _ in range(2))
    before = copy.deepcopy(model[0])
    ferryman.port(model)
    with ferryman.trace() as trace:
        after = model[0](x, gate)
    assert_as_right(after, lambda given: before(given, gate), x)
    assert [op for op, _ in trace.calls] == ["gated_rms_norm"]


class ReadsOne(nn.Module):
    """Of two numbers of one value its forward reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))
        self.first = self.second = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.second))


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_number_that_a_module_does_not_read_is_not_taken_for_the_one_that_it_reads(name: str) -> None:
    model = nn.Sequential(ReadsOne()).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    x = torch.randn(3, 32)
    for value in (None, 0.5):
        for m in (model, before) if value is not None else ():
            setattr(m[0], name, value)
        with torch.no_grad():
            output, calls = made_by(lambda: model(x))
            assert_as_right(output, before, x)
        assert bool(calls) == (value is None)

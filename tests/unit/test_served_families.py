"""transformers' attention beyond sdpa: a soft cap of scores, masks of both directions, heads of three dimensions."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers")
import ferryman
from ferryman.errors import PortError
from ferryman.integrations.transformers import port, unport
from ferryman.integrations.transformers_modules import attention_forward, attention_mask
from ferryman.ops.attention.recognise import scaled_dot_product_attention
from ferryman.porting.model import bundled, given, helpers
from ferryman.porting.model.generic import Distance
from ferryman.porting.model.generic import _measured as measured

CLOSE = 32 * torch.finfo(torch.float32).eps  # of sums of tens of products, in another order


def relative(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def test_a_soft_cap_is_served_where_the_models_own_function_is_the_op() -> None:
    import transformers.models.gemma2.modeling_gemma2 as own

    model = bundled.build("gemma2", True)
    tokens = torch.arange(3, 37).view(2, 17)
    padding = torch.ones_like(tokens)
    padding[1, :4] = 0
    with torch.no_grad():
        plain = model(input_ids=tokens, attention_mask=padding).logits
        report = port(model)
        assert model.config._attn_implementation == "ferryman"
        with ferryman.trace() as traced:
            output = model(input_ids=tokens, attention_mask=padding).logits
    count = sum(n for (op, _), n in traced.calls.items() if op == "attention")
    assert count == report.calls(1)["attention"] == model.config.num_hidden_layers
    seen = padding.bool()
    assert relative(output[seen], plain[seen]) < 2.0**-15
    unport(model)
    assert model.config._attn_implementation == "eager"

    right = own.eager_attention_forward
    planted: dict[str, Callable[..., Any]] = {
        "no cap": lambda *args, softcap, **kw: right(*args, **kw),
        "another cap": lambda *args, softcap, **kw: right(*args, softcap=softcap and 1.01 * softcap, **kw),
        "no mask": lambda m, q, k, v, mask, **kw: right(m, q, k, v, None, **kw),
    }
    for what, function in planted.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own, "eager_attention_forward", function)
            left = {item.module: item.reason for item in port(model).unsupported}
        assert "gives other results than ops.attention with a soft cap" in left["Gemma2Attention"], what
        unport(model)


@pytest.mark.parametrize("causal", [False, True])
def test_a_soft_cap_with_a_bias_that_learns_is_what_the_library_computes(causal: bool) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    q, k, v = (torch.randn(1, n, 5, 16) for n in (4, 2, 2))
    bias = torch.randn(1, 4, 5, 5, requires_grad=True)
    module: Any = types.SimpleNamespace(num_key_value_groups=2, training=False, head_dim=16, is_causal=causal)
    with ferryman.trace() as traced:
        output, _ = attention_forward(module, q, k, v, None, softcap=1.5, position_bias=bias)
    assert not traced.calls
    hidden = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1) if causal else torch.zeros(5, 5)
    wanted, _ = eager_attention_forward(module, q, k, v, bias + hidden, softcap=1.5)
    assert relative(output, wanted) < CLOSE
    slopes = [torch.autograd.grad(out.square().sum(), bias)[0] for out in (output, wanted)]
    assert relative(*slopes) < CLOSE
    with pytest.raises(PortError, match="paged cache"):
        attention_forward(module, q, k, v, None, softcap=1.5, position_bias=bias, cache=object())


def test_a_mask_of_both_directions_is_made_where_there_is_padding_only() -> None:
    from transformers.masking_utils import bidirectional_mask_function

    def mask_of(padding: Tensor | None, skip: bool = True) -> Tensor | None:
        return attention_mask(
            2,
            4,
            6,
            mask_function=bidirectional_mask_function,
            attention_mask=padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=skip,
        )

    padding = torch.ones(2, 6, dtype=torch.long)
    assert mask_of(None) is None and mask_of(padding) is None
    whole = mask_of(None, skip=False)
    assert whole is not None and bool(whole.all())
    padding[1, 4:] = 0
    mask = mask_of(padding)
    assert mask is not None and torch.equal(mask, padding.bool()[:, None, None].expand(2, 1, 4, 6))


def test_a_layer_that_passes_no_window_is_given_it_as_a_mask() -> None:
    """moshi's attention has a window in its masks alone; a cache that is filled shows whether it is kept."""
    model = bundled.build("moshi", True)
    draw = given.Draw(17, 2, torch.float32)
    torch.manual_seed(0)
    inputs = given.KINDS["dialogue"](draw, model.config)
    inputs = {k: v for k, v in inputs.items() if k.endswith("codes") or k == "input_ids"}

    def generated() -> Tensor:
        torch.manual_seed(0)
        options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
        sequences: Tensor = model.generate(**inputs, **options).sequences  # type: ignore[operator]
        return sequences

    plain = generated()
    port(model)
    assert torch.equal(generated(), plain)
    unport(model)


def test_attention_in_a_loop_is_counted_as_open() -> None:
    """qwen2_vl attends image by image: how often, the sizes say."""
    model = bundled.build("qwen2_vl", True)
    report = port(model)
    sites = {site.module: site for site in report.ported if "Attention" in site.module}
    assert "attention" in sites["VisionAttention"].maybe and "attention" not in sites["VisionAttention"].ops
    assert "attention" in sites["Qwen2VLAttention"].ops
    assert report.calls()["rope"] == 4
    unport(model)


def test_one_head_of_keys_is_broadcast() -> None:
    q, k, v = (torch.randn(2, n, 5, 16) for n in (3, 1, 1))
    with ferryman.trace() as traced:
        output = scaled_dot_product_attention(q, k, v, None, 0.0, True)
    assert relative(output, functional.scaled_dot_product_attention(q, k, v, is_causal=True)) < CLOSE
    assert sum(traced.calls.values()) == 1


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    half = q.shape[-1] // 2
    back = [torch.cat((-x[..., half:], x[..., :half]), -1) for x in (q, k)]
    return q * cos + back[0] * sin, k * cos + back[1] * sin


def test_heads_of_three_and_of_four_dimensions_are_turned_by_one_function() -> None:
    served = helpers.served_helper(turned, helpers.forms_of(turned))
    for batch in ((), (2,)):
        q, k = (torch.randn(*batch, 6, heads, 16) for heads in (4, 2))
        angles = [torch.randn(*batch, 6, 16) for _ in range(2)]
        with ferryman.trace() as traced:
            rotated = served(q, k, *angles)
        assert sum(traced.calls.values()) == 1
        assert all(relative(f, w) < CLOSE for f, w in zip(rotated, turned(q, k, *angles), strict=True))
    with ferryman.trace() as traced:
        served(torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(1, 6, 1), torch.randn(1, 6, 1))
    assert not traced.calls


class Reader(nn.Module):
    """It reads sizes of its input: how many elements of a mask are true, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Tensor, sizes: Tensor) -> Tensor:
        rows = int(sizes.prod(-1).sum())
        chosen = self.inner(x)[mask]
        return torch.cat((chosen, chosen.new_zeros(rows, 64)))


def test_what_a_model_reads_of_its_inputs_sizes_is_known_without_data() -> None:
    from ferryman.porting.model import account

    def run(model: nn.Module) -> Tensor:
        mask = torch.arange(4096).view(2, 2048) % 4 == 1
        out: Tensor = model(torch.randn(2, 2048, 64), mask, torch.tensor([[1, 4, 2], [1, 2, 2]]))
        assert out.shape == (1024 + 12, 64)
        return out

    coverage = account.account(Reader(), run)
    assert coverage.ported.calls() == {"linear": 1}
    again = account.account(Reader(), run, data=True)
    assert again.ported.served["linear"] == coverage.ported.served["linear"]


class Weighing(nn.Module):
    """Weights in float32, cast back; where ``other`` is wider, they stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        scores = x @ self.weight.to(x.dtype)
        return functional.softmax(scores, dim=-1, dtype=torch.float32).to(other.dtype)


def test_a_softmax_that_is_cast_back_to_its_inputs_dtype_is_served() -> None:
    model, x = Weighing(), torch.randn(3, 8).bfloat16()
    plain = {dtype: model(x, x.to(dtype)) for dtype in (torch.bfloat16, torch.float32)}
    port(model)
    for dtype, wanted in plain.items():
        with ferryman.trace() as traced:
            output = model(x, x.to(dtype))
        assert output.dtype is dtype and relative(output, wanted) <= torch.finfo(torch.bfloat16).eps / 2
        assert [op for op, _ in traced.calls] == (["softmax"] if dtype is torch.bfloat16 else [])
    unport(model)


class Scaled(nn.Module):
    """A scale of one number, or of as many as there are features."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(64, 64, bias=False), nn.Parameter(torch.full((elements,), 1.7))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.scale
        return out


@pytest.mark.parametrize(("elements", "more"), [(1, True), (64, False)])
def test_a_gradient_of_few_elements_beyond_its_limit_is_drawn_more_often(
    elements: int, more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ferryman.porting.model import generic
    from ferryman.porting.model.results import SEEDS

    drawn: list[int] = []
    moved = generic._moved

    def seen(model: nn.Module, run: Any, backward: bool, seed: int) -> Any:
        drawn.append(seed)
        return moved(model, run, backward, seed)

    monkeypatch.setattr(generic, "_moved", seen)
    monkeypatch.setattr(generic, "_measured", lambda *given: [far(d) for d in measured(*given)])
    generic.compare(Scaled(elements), lambda model: model(torch.randn(4, 64)))
    assert drawn == [*SEEDS, *(generic.MORE_SEEDS if more else ())]


def far(d: Distance) -> Distance:
    return dataclasses.replace(d, value=2.0, limit=1.0, exact=0.0 if d.where != "scale" else None)

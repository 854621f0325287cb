"""Callable objects that are no modules, such as attention processors: a ported module's call of one is served."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model.port import port, unport
from tests.graphs import far, normal

FAR = 2.0**-18  # float32, one attention: the same sums in another order


class Mixing:
    """Attends over the module's heads."""

    def __call__(self, module: Any, x: Tensor, causal: bool = False) -> Tensor:
        q, k, v = (t.unflatten(-1, (module.heads, -1)).transpose(1, 2) for t in module.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return module.o(mixed.transpose(1, 2).flatten(2))


class Heir(Mixing):
    pass


class Averaging:
    """Serves nothing: another meaning in the same place."""

    def __call__(self, module: Any, x: Tensor, causal: bool = False) -> Tensor:
        return module.o(x.mean(1, keepdim=True).expand_as(x))


class Attends(nn.Module):
    def __init__(self, processor: Any, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.processor = heads, processor
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.processor(self, x, **options)


def _attention_calls(run: Any) -> int:
    with ferryman.trace() as ran:
        run()
    return sum(n for (op, _), n in ran.calls.items() if op == "attention")


@pytest.mark.parametrize("kind", [Mixing, Heir])
def test_its_call_is_served_and_counted(kind: type) -> None:
    torch.manual_seed(0)
    model, x = Attends(kind()), normal(2, 9, 32)
    wanted, causal = model(x), model(x, causal=True)
    attributes = dict(vars(kind))
    report = port(model)
    assert report.calls()["attention"] == 1 and "attention" not in report.maybe()
    assert _attention_calls(lambda: model(x)) == 1
    assert far(model(x), wanted) < FAR and far(model(x, causal=True), causal) < FAR
    assert dict(vars(kind)) == attributes and type(model.processor) is kind  # nothing of the callable changed
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _attention_calls(lambda other=other: other(x)) == 1 and torch.equal(other(x), model(x))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert far(compiled(x), wanted) < FAR
    unport(model)
    assert _attention_calls(lambda: model(x)) == 0 and torch.equal(model(x), wanted)


def test_another_object_in_its_place_runs_its_own_code() -> None:
    model, x = Attends(Mixing()), normal(2, 9, 32)
    port(model)
    model.processor = Averaging()
    wanted = model.o(x.mean(1, keepdim=True).expand_as(x))
    assert _attention_calls(lambda: model(x)) == 0 and torch.equal(model(x), wanted)
    model.processor = lambda module, x: 2 * x
    assert torch.equal(model(x), 2 * x)


def test_one_that_serves_nothing_leaves_its_module_as_it_is() -> None:
    model = Attends(Averaging())
    report = port(model)
    assert {site.path for site in report.ported} == {"qkv", "o"}
    assert type(model) is Attends
    plain = Attends(Averaging())
    plain.qkv = plain.o = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(PortError):
        port(plain)


class Biased(nn.Module):
    """Scores with a bias beside them: one that is made of the input, or one that is given."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.learns, self.qkv, self.bias = learns, nn.Linear(32, 96), nn.Linear(32, 9)

    def score_bias(self, x: Tensor) -> Tensor:
        return self.bias(x).unsqueeze(1)


class MaskMaker(Biased):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        beside = self.score_bias(x)
        if mask is not None:
            beside = beside.masked_fill(mask, -1e9)
        return F.scaled_dot_product_attention(q, k, v, beside)


class Given(Biased):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if mask is not None:
            mask = mask[..., : k.shape[2]].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("kind", [MaskMaker, Given])
def test_attention_with_a_bias_that_learns_is_not_claimed(kind: type[Biased]) -> None:
    model, x = kind(True), torch.randn(2, 9, 32)
    report = port(model)
    attention_calls = _attention_calls(
        lambda: model(x, torch.zeros(2, 1, 9, 9, dtype=torch.bool) if kind is MaskMaker else None)
    )
    assert report.calls(1).get("attention", 0) == attention_calls == (kind is Given)
    with torch.no_grad():
        assert _attention_calls(lambda: model(x)) == 1 and ("attention" in report.maybe()) is (kind is MaskMaker)


@pytest.mark.parametrize("family", ["parakeet_ctc", "sam"])
def test_families_with_such_a_bias_count_exactly(family: str) -> None:
    pytest.importorskip("transformers")
    from ferryman.porting.model import bundled, generic

    model = bundled.build(family, True, torch.float32)
    ferryman._integrate()
    parity = generic.compare(model, bundled.inputs_of(family, True, model))
    assert parity.ok and not parity.miscounted

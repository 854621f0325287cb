"""Routers are recognised by what they compute: right ones of every kind are served, look-alikes stay and are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn import functional as F  # noqa: N812

import ferryman
from ferryman.dispatch import registry
from ferryman.errors import PortError
from ferryman.ops.gate_topk import bounds
from ferryman.porting.model.port import port, unport
from tests.bounded import judged


class Router(nn.Module):
    """Names say nothing: ``a`` is how many are chosen, ``b`` of how many groups ``c`` are, ``d`` the scale."""

    def __init__(self, experts: int = 16, width: int = 40) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = 4, 4, 2, 2.5, True
        self.table = nn.Parameter(torch.randn(experts, width) * width**-0.5)

    def forward(self, x: Tensor) -> Any:
        s = F.softmax(F.linear(x.reshape(-1, x.shape[-1]), self.table), -1, dtype=torch.float32)
        w, i = s.topk(self.a, -1)
        return w / w.sum(-1, keepdim=True), i


class Plain(Router):
    def forward(self, x: Tensor) -> Any:
        z = x.flatten(0, -2) @ self.table.t()
        w, i = torch.topk(torch.softmax(z.float(), -1), k=self.a)
        return i, w.to(z.dtype), z


class Inside(Router):
    """The experts' scores have a bias of the product, and softmax comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Any:
        z = F.linear(x, self.table, self.shift)
        w, i = z.topk(self.a, -1)
        return z, w.softmax(-1), i


class Grouped(Router):
    """DeepSeek-V3's, in float32 whatever comes, its experts in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(16) * 0.2)

    def groups(self, s: Tensor) -> Tensor:
        return s.unflatten(-1, (self.b, -1)).topk(2, -1)[0].sum(-1)

    def chosen(self, s: Tensor) -> Tensor:
        s = s + self.shift
        best = self.groups(s).topk(self.c, -1, sorted=False)[1]
        open_ = torch.zeros(len(s), self.b).scatter_(1, best, 1.0).repeat_interleave(s.shape[-1] // self.b, 1)
        return s.masked_fill(open_ == 0, -torch.inf).topk(self.a, -1, sorted=False)[1]

    def forward(self, x: Tensor) -> Any:
        z = F.linear(x.reshape(-1, x.shape[-1]).float(), self.table.float())
        s = z.sigmoid()
        i = self.chosen(s)
        w = s.gather(1, i)
        if self.e:
            w = w / (w.sum(-1, keepdim=True) + 1e-20)
        return z, w * self.d, i


class BestOne(Grouped):
    def groups(self, s: Tensor) -> Tensor:
        return s.unflatten(-1, (self.b, -1)).amax(-1)


class Weighted(Grouped):
    """The bias of the choice is in the weights, too."""

    def forward(self, x: Tensor) -> Any:
        s = F.linear(x.reshape(-1, x.shape[-1]), self.table).sigmoid() + self.shift
        w, i = s.topk(self.a, -1)
        return w / (w.sum(-1, keepdim=True) + 1e-20), i


class Backwards(Router):
    def forward(self, x: Tensor) -> Any:
        w, i = super().forward(x)
        return w.flip(-1), i.flip(-1)


class Cooled(Router):
    def forward(self, x: Tensor) -> Any:
        s = F.softmax(F.linear(x.reshape(-1, x.shape[-1]), self.table) / 1.5, -1, dtype=torch.float32)
        w, i = s.topk(self.a, -1)
        return w, i


class Least(Router):
    def forward(self, x: Tensor) -> Any:
        s = F.softmax(F.linear(x.reshape(-1, x.shape[-1]), self.table), -1)
        w, i = s.topk(self.a, -1, largest=False)
        return w, i


class OtherEps(Router):
    def forward(self, x: Tensor) -> Any:
        s = F.linear(x.reshape(-1, x.shape[-1]), self.table).sigmoid()
        w, i = s.topk(self.a, -1)
        return w / (w.sum(-1, keepdim=True) + 1e-6), i


class Jittered(Router):
    def forward(self, x: Tensor) -> Any:
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        return Router.forward(self, x)


def parts(outputs: Any) -> dict[str, Tensor]:
    """By kind, each token's experts by their numbers."""
    i = next(t for t in outputs if not t.is_floating_point())
    order = i.argsort(-1)
    by_kind = {str(n): t if t.shape != i.shape else t.gather(1, order) for n, t in enumerate(outputs)}
    return {n: t.float() for n, t in by_kind.items()}


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    with ferryman.trace() as traced:
        outputs = run()
    return outputs, {op: n for (op, _), n in traced.calls.items()}


LINEAR, LINEAR_BACKWARD = registry.primitive("linear"), registry.primitive("linear_backward")
GATE, GATE_BACKWARD = registry.primitive("gate_topk"), registry.primitive("gate_topk_backward")


def exactly(model: Router, x: Tensor, kind: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(logits, weights by experts' numbers, the table's slope of the sum of the weights' squares), without roundings;
    and how far each may be off: the bounds of the ops that serve the router, each passed on through what follows.

    kind: of the weights.
    """
    grouped, bias = isinstance(model, Grouped), model.shift if isinstance(model, Inside) else None
    storage = torch.float32 if grouped else x.dtype
    x, table = x.detach().to(storage), model.table.detach().to(storage)
    scoring, renormalise, scale = ("sigmoid", True, 2.5) if grouped else ("softmax", not isinstance(model, Plain), 1.0)
    (z,), (off_z,) = judged(LINEAR, (x, table, None if bias is None else bias.detach()), [storage], storage)
    choice = (model.shift, model.b, model.c) if grouped else (None, 1, 1)
    gate = (z, model.a, scoring, *choice, renormalise, scale, torch.int64)
    (w, ids), (own, _) = judged(GATE, gate, [torch.float32, torch.int64], torch.float32)
    # weights of logits that are off by d are off by no more than exp(2 d)
    off_w = own + w * torch.expm1(2 * off_z.amax(-1, keepdim=True)) + torch.finfo(kind).eps * w

    def upward(z: Tensor, grad: Tensor | None = None) -> Tensor:
        """The logits' gradient, of the weights' gradient where one is given."""
        grad = 2 * bounds.shares(z, ids, scoring, renormalise) * scale if grad is None else grad
        return GATE_BACKWARD.body(grad, z, ids, scoring, renormalise, scale)

    def passed(jacobian: Tensor, off: Tensor) -> Tensor:
        return jacobian.flatten(-off.dim()).abs() @ off.flatten()

    g, (off_g,) = upward(z), judged(GATE_BACKWARD, (2 * w, z, ids, scoring, renormalise, scale), [storage], storage)[1]
    off_g = off_g + passed(jacobian(upward, z), off_z)  # logits
    off_g = off_g + passed(jacobian(lambda grad: upward(z, grad), 2 * w), 2 * own + 4 * torch.finfo(kind).eps * w)
    slopes, off = judged(LINEAR_BACKWARD, (g, x, table, bias, False, True), [storage] * 3, storage)
    order = ids.argsort(-1)
    off_slope = off[1] + off_g.T @ x.double().abs()
    if storage != model.table.dtype:  # the slope is rounded to the table's dtype at last
        off_slope += torch.finfo(model.table.dtype).eps * slopes[1].abs()
    return (z, w.gather(1, order), slopes[1]), (off_z, off_w.gather(1, order), off_slope)


def within(actual: Tensor, exact: Tensor, off: Tensor) -> bool:
    return bool(((actual.double() - exact).abs() <= off).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Router, Plain, Inside, Grouped])
def test_routers_are_served_and_learn(kind: type[Router], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = kind().to(dtype), torch.randn(7, 40).to(dtype)
    wanted = model(x)
    report = port(model)
    outputs, calls = counted(lambda: model(x))
    assert calls == report.calls() == {"gate_topk": 1, "linear": 1}
    assert [t.dtype for t in outputs] == [t.dtype for t in wanted] and [t.shape for t in outputs] == [
        t.shape for t in wanted
    ]
    weights = next(t for t in outputs if t.is_floating_point() and t.shape[1] == 4)
    (z, w, slope), (off_z, off_w, off_slope) = exactly(model, x, weights.dtype)
    for name, t in parts(outputs).items():
        if not wanted[int(name)].is_floating_point():
            assert torch.equal(t, parts(wanted)[name])
        else:
            assert within(t, *((w, off_w) if t.shape == w.shape else (z, off_z)))
    weights.float().square().sum().backward()
    assert model.table.grad is not None and within(model.table.grad, slope, off_slope)
    unport(model)


def test_numbers_that_change_later_go_to_the_module() -> None:
    torch.manual_seed(0)
    for name, value in (("a", 3), ("b", 8), ("c", 3), ("d", 1.0), ("e", False)):
        model, x = Grouped(), torch.randn(7, 40)
        port(model)
        setattr(model, name, value)
        outputs, calls = counted(lambda m=model, x=x: m(x))
        unport(model)
        assert "gate_topk" not in calls and all(torch.equal(a, b) for a, b in zip(outputs, model(x), strict=True)), name


@pytest.mark.parametrize("kind", [BestOne, Weighted, Backwards, Cooled, Least, OtherEps, Jittered])
def test_look_alikes_stay(kind: type[Router]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Identity())
    try:
        report = port(model)
    except PortError as error:
        assert kind.__name__ in str(error)
        return
    assert "gate_topk" not in report.calls() and "gate_topk" not in report.maybe()


_OTHERS = ("qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "jamba")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", *(pytest.param(f, marks=pytest.mark.slow) for f in _OTHERS)])
def test_families_route_by_the_op(family: str) -> None:
    pytest.importorskip("transformers")
    from ferryman.porting.model import bundled

    model = bundled.build(family, True, torch.bfloat16)
    ferryman._integrate()  # transformers is loaded now
    run = bundled.inputs_of(family, True, model)
    report = port(model)
    routed = [site for site in report.ported if site.role == "gate_topk"]
    with ferryman.trace() as traced:
        output = run(model)
        output.logits.float().sum().backward()
    calls = {op: sum(n for (o, _), n in traced.calls.items() if o == op) for op, _ in traced.calls}
    assert len(routed) == report.calls()["gate_topk"] == calls["gate_topk"] == calls["gate_topk_backward"] > 0

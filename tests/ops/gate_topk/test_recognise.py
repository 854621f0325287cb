"""Routers are recognised by what they compute: right ones of every kind are served, look-alikes stay and are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model.port import port, unport


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


def parts(made: Any) -> dict[str, Tensor]:
    """By kind, each token's experts by their numbers."""
    i = next(t for t in made if not t.is_floating_point())
    order = i.argsort(-1)
    found = {str(n): t if t.shape != i.shape else t.gather(1, order) for n, t in enumerate(made)}
    return {n: t.float() for n, t in found.items()}


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    with ferryman.trace() as traced:
        made = run()
    return made, {op: n for (op, _), n in traced.calls.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Router, Plain, Inside, Grouped])
def test_routers_are_served_and_learn(kind: type[Router], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = kind().to(dtype), torch.randn(7, 40).to(dtype)
    wanted = model(x)
    report = port(model)
    found, calls = counted(lambda: model(x))
    assert calls == report.calls() == {"gate_topk": 1, "linear": 1}
    near = 8 * torch.finfo(torch.float32).eps if dtype == torch.float32 else torch.finfo(dtype).eps
    assert [t.dtype for t in found] == [t.dtype for t in wanted] and [t.shape for t in found] == [
        t.shape for t in wanted
    ]
    for name, t in parts(wanted).items():
        torch.testing.assert_close(parts(found)[name], t, rtol=near, atol=near)
    weights = next(t for t in found if t.is_floating_point() and t.shape[1] == 4)
    weights.float().square().sum().backward()
    slope, model.table.grad = model.table.grad, None
    unport(model)
    again = next(t for t in model(x) if t.is_floating_point() and t.shape[1] == 4)
    again.float().square().sum().backward()
    assert slope is not None and model.table.grad is not None
    torch.testing.assert_close(slope, model.table.grad, rtol=8 * near, atol=8 * near * float(slope.abs().max()))


def test_numbers_that_change_later_go_to_the_module() -> None:
    torch.manual_seed(0)
    for name, value in (("a", 3), ("b", 8), ("c", 3), ("d", 1.0), ("e", False)):
        model, x = Grouped(), torch.randn(7, 40)
        port(model)
        setattr(model, name, value)
        found, calls = counted(lambda m=model, x=x: m(x))
        unport(model)
        assert "gate_topk" not in calls and all(torch.equal(a, b) for a, b in zip(found, model(x), strict=True)), name


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
        made = run(model)
        made.logits.float().sum().backward()
    calls = {op: sum(n for (o, _), n in traced.calls.items() if o == op) for op, _ in traced.calls}
    assert len(routed) == report.calls()["gate_topk"] == calls["gate_topk"] == calls["gate_topk_backward"] > 0

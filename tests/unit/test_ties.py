# ruff: noqa: E501
"""Choices among equals: which ones a call may make, what is proven with them, and what keeps its documented order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model.distance import Disagreement
from ferryman.porting.model.ties import REMARK, Choosing, choosing, level
from tests.unit import choices
from tests.unit.situations import load

ROWS = torch.tensor([[1.0, 2.0, 2.0, 0.0], [3.0, 1.0, 1.0, 1.0], [float("nan"), 5.0, float("nan"), 4.0]])


def test_a_choice_that_a_call_may_make_is_made_in_each_row() -> None:
    for ids in ([[2, 1], [0, 3], [2, 0]], [[1, 2], [0, 2], [0, 2]]):
        with Choosing(torch.tensor(ids)):
            values, chosen = ROWS.topk(2, dim=-1)
            order = ROWS.sort(dim=-1, descending=True).indices
            again = torch.argsort(ROWS, dim=-1, descending=True)
        assert chosen.tolist() == order[:, :2].tolist() == again[:, :2].tolist() == ids
        assert torch.equal(values.nan_to_num(9.0), ROWS.topk(2).values.nan_to_num(9.0))
        assert order.sort(-1).values.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("ids", [[0, 1], [1, 1], [1, 7], [-1, 2], [1, 3]], ids=str)
def test_a_choice_that_it_may_not_make_is_not(ids: list[int]) -> None:
    """Where numbers differ, of one element twice, and of none."""
    row = ROWS[:1]
    with Choosing(torch.tensor([ids])):
        assert torch.equal(row.topk(2).indices, _plain(row, 2))
        assert row.sort(descending=True).indices[0, :2].sort().values.tolist() == [1, 2]


def _plain(row: Tensor, k: int) -> Tensor:
    return row.topk(k).indices


def test_an_order_that_was_asked_for_is_kept() -> None:
    row = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    with Choosing(torch.tensor([[2, 1]])):
        assert row.topk(2).indices.tolist() == [[1, 2]]
        assert row.topk(2, sorted=False).indices.tolist() == [[2, 1]]


def test_what_documents_an_order_keeps_it() -> None:
    row = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    with Choosing(torch.tensor([[2, 1]])) as mode:
        assert row.sort(dim=-1, descending=True, stable=True).indices[0, 0] == 1
        assert row.argmax(-1).item() == 1 and row.max(-1).indices.item() == 1
        assert not mode.asked
        row.topk(2)
        assert mode.asked


def test_gradients_go_to_what_was_chosen() -> None:
    row = torch.tensor([[1.0, 2.0, 2.0, 2.0]], requires_grad=True)
    with Choosing(torch.tensor([[3, 1]])):
        (row.topk(2).values * torch.tensor([5.0, 7.0])).sum().backward()
    assert row.grad is not None and row.grad.tolist() == [[0.0, 7.0, 0.0, 5.0]]


def _top(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(x, 2)


def _last_first(x: Tensor) -> tuple[Tensor, Tensor]:
    ids = x.flip(-1).sort(dim=-1, stable=True, descending=True).indices[:, :2]
    return x.gather(-1, x.shape[-1] - 1 - ids), x.shape[-1] - 1 - ids


def test_what_chooses_others_where_scores_differ_is_no_choice() -> None:
    heard: list[str] = []
    call = choosing(_top, _last_first, lambda r: r[1], True, heard.append)
    even = [torch.zeros(3, 8), torch.ones(2, 5), torch.tensor([[1.0, 2.0, 2.0]])]
    assert [call(x)[1].tolist() for x in even] == [_last_first(x)[1].tolist() for x in even] and REMARK in heard
    assert level(call, _last_first, [(x.double(),) for x in even], (torch.float32, torch.bfloat16), 2.0**-10) == ""
    less = choosing(_top, lambda x: _last_first(-x), lambda r: r[1], True, heard.append)
    with pytest.raises(Disagreement, match="others where scores differ"):
        less(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert "others" in level(less, lambda x: _last_first(-x), [(torch.arange(8.0).double()[None],)], (), 2.0**-10)


HEAD = "import torch, torch.nn.functional as F\nfrom torch import nn\n"
OPEN = {
    "shares of all": "p = x.softmax(-1)\n        w, i = torch.topk(p, 2, dim=-1)\n        return w / w.sum(-1, keepdim=True), i",
    "of the best": "v, i = torch.topk(x, 2, dim=-1)\n        return v.softmax(-1), i",
    "sorted": "v, i = x.sort(dim=-1, descending=True)\n        return v[..., :2].softmax(-1), i[..., :2]",
}
ORDERED = {
    "argmax of logits": "i = x.argmax(-1, keepdim=True)\n        return x.softmax(-1).gather(-1, i), i",
    "stable": "v, i = torch.sort(x, dim=-1, descending=True, stable=True)\n        return v[..., :2].softmax(-1), i[..., :2]",
}
STAYS = {
    "argmax of shares": "p = x.softmax(-1)\n        i = p.argmax(-1, keepdim=True)\n        return p.gather(-1, i), i",
    "stable, of shares": "p = x.softmax(-1)\n        w, i = p.sort(dim=-1, descending=True, stable=True)\n        return w[..., :2], i[..., :2]",
    "smallest": "v, i = torch.topk(x, 2, largest=False)\n        return v.softmax(-1), i",
    "rising": "v, i = x.softmax(-1).sort(dim=-1)\n        return v[..., -2:], i[..., -2:]",
    "of eight": "w, i = x[..., :8].softmax(-1).topk(2)\n        return w, i",
    "of sixty": "v, i = x[..., :60].topk(2, -1)\n        return v.softmax(-1), i",
    "shares of sixty": "w, i = x.softmax(-1)[..., :60].topk(2)\n        return w, i",
    "none past sixty": "w, i = x.sigmoid().topk(2)\n        return w * (i < 60), i",
    "other names past sixty": "w, i = x.softmax(-1).topk(2)\n        return w, torch.where(i < 60, i, i - 60)",
    "names of 32": "w, i = x.softmax(-1).topk(2)\n        return w, i % 32",
    "names of 8 bits": "w, i = x.softmax(-1).topk(2)\n        return w, i.to(torch.uint8).long()",
    "at most 200": "w, i = x.softmax(-1).topk(2)\n        return w, i.clamp(max=200)",
    "hidden past sixty": "x = x.masked_fill(torch.arange(x.shape[-1]) >= 60, float('-inf'))\n        v, i = x.topk(2)\n        return v.softmax(-1), i",
    "no sum": "w, i = x.sigmoid().topk(2)\n        return w / w.sum(-1, keepdim=True), i",
}


def _module(body: str, folder: Path, name: str) -> nn.Module:
    code = f"{HEAD}class M(nn.Module):\n    def forward(self, x):\n        {body}\n"
    module: nn.Module = load(code, f"ferryman_ties_{name}_{abs(hash((body, str(folder))))}", folder).M()
    return nn.Sequential(module).eval()


def _served(model: nn.Module) -> Any:
    try:
        return ferryman.port(model).ported
    except PortError:
        return ()


@pytest.mark.parametrize("what", [*OPEN, *ORDERED])
def test_a_router_of_logits_is_served_and_says_whether_it_leaves_a_choice_open(what: str, tmp_path: Path) -> None:
    model = _module((OPEN | ORDERED)[what], tmp_path, "served")
    twin = _module((OPEN | ORDERED)[what], tmp_path, "twin")
    (site,) = _served(model)
    assert site.ops and site.remark == (REMARK if what in OPEN else "")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(50, 16, generator=generator), torch.zeros(3, 16), torch.randn(9, 12, generator=generator) * 1e3]
    rows += [torch.randn(40, 16, generator=generator).round(), torch.full((2, 5), float("-inf"))]
    for x in rows:
        with choices.seen() as chosen, ferryman.trace() as trace:
            actual = model(x)
        assert trace.calls
        for a, w in zip(actual, choices.like(twin, chosen)(x), strict=True):
            torch.testing.assert_close(a, w, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert a.is_floating_point() or torch.equal(a, w)


@pytest.mark.parametrize("what", STAYS)
def test_what_chooses_otherwise_stays(what: str, tmp_path: Path) -> None:
    assert not any(site.module == "M" and site.role for site in _served(_module(STAYS[what], tmp_path, "stays")))


@pytest.mark.parametrize(
    "body",
    [
        "r = torch.topk(self.g(x).softmax(-1), 2)\n        w = r[0]\n        w /= w.sum(-1, keepdim=True)\n        return w, r[1], r.values * 2.0",
        "r = torch.topk(self.g(x).softmax(-1), 2)\n        return r.values * 2.0, r.indices",
        "w, i = self.g(x).softmax(-1).topk(2)\n        v = w.view(-1)\n        w /= w.sum(-1, keepdim=True)\n        return w, i, v * 2.0",
        "p = self.g(x).softmax(-1)\n        w, i = p.topk(2)\n        w /= w.sum(-1, keepdim=True)\n        u, j = p.topk(2)\n        return w, i, u",
        "w, i = self.g(x).softmax(-1).topk(2)\n        s = w.sum(-1, keepdim=True)\n        w = (w / s).to(x.dtype)\n        return w, F.one_hot(i, 8).sum(1)",
    ],
)
def test_what_is_written_over_has_one_name(body: str, tmp_path: Path) -> None:
    """The values of a choice may be written over, as code does to make them one, and be read by another name."""
    code = f"{HEAD}class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.g = nn.Linear(16, 8)\n"
    code += f"    def forward(self, x):\n        {body}\n"
    home = load(code, f"ferryman_ties_over_{abs(hash((body, str(tmp_path))))}", tmp_path)
    torch.manual_seed(0)
    model, twin = home.M().eval(), home.M().eval()
    twin.load_state_dict(model.state_dict())
    ferryman.port(model)
    x = torch.randn(7, 16)
    with torch.no_grad():
        for a, w in zip(model(x), twin(x), strict=True):
            torch.testing.assert_close(a, w, rtol=1e-5, atol=1e-6)


def test_a_score_with_a_bias_is_the_modules_own_in_16_bits() -> None:
    """Two roundings may turn two scores, which the op compares unrounded."""
    torch.manual_seed(0)
    model, twin = _Biased(), _Biased()
    assert _served(nn.Sequential(model))
    assert model(torch.randn(4, 8))[1].shape == (4, 2)
    x = torch.randn(4000, 8, dtype=torch.bfloat16)
    with torch.no_grad(), ferryman.trace() as trace:
        actual = model.bfloat16()(x)
        wanted = twin.bfloat16()(x)
    assert not any(op == "gate_topk" for op, _ in trace.calls)
    assert all(torch.equal(a, w) for a, w in zip(actual, wanted, strict=True))


class _Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-0.3, 0.3, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.sigmoid()
        ids = (scores + self.bias).topk(2, -1)[1]
        return scores.gather(-1, ids), ids

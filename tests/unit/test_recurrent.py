"""Loops over tokens that carry a state: what else they do is done, and what leaves them lies as it did. And the ways in
which an object comes to a forward whose order changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ferryman
from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Definitions
from ferryman.porting.model import recurrent_proof, steady
from tests.unit.situations import load
from tests.unit.test_disguises import assert_as_right

CODE = '''
import torch
from torch import nn, Tensor


class Record:
    def __init__(self): self.notes = 0

    def note(self, *values): self.notes += 1


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.record, self.a = Record(), nn.Parameter(-torch.rand(8, 4) - 0.1)

    def forward(self, x):
        dt, b, c = x.sigmoid(), x[:, :4], x[:, 4:]
        state, kept = x.new_zeros(x.shape[0], 8, 4), []
        for t in range(x.shape[2]):
            DO
            decay = torch.exp(dt[:, :, t, None] * self.a)
            state = decay * state + (dt[:, :, t] * x[:, :, t])[..., None] * b[:, None, :, t]
            kept.append((state * c[:, None, :, t]).sum(-1))
        return torch.stack(kept, AT)


class Box:
    def __init__(self): self.calls = 0

    def square(self):
        self.calls += 1
        return torch.full((2, 5, 48), float(self.calls))


class Sub(Tensor):
    """A tensor whose square is its own."""

    calls = 0

    def square(self):
        Sub.calls += 1
        return torch.full((2, 5, 48), float(Sub.calls))


BOX = Box()


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(48))

    def forward(self, x, TAKES):
        box = FROM
        first = box.square()
        second = box.square()
        return first * torch.rsqrt(second.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w
'''


def _file(folder: Path, name: str, **words: str) -> Any:
    code = CODE
    for word, text in {"DO": "pass", "AT": "2", "TAKES": "box", "FROM": "box", **words}.items():
        code = code.replace(word, text)
    return load(code, f"ferryman_recurrent_{name}", folder)


class _Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.beside = inner, nn.Linear(4, 4)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.inner(*given, **named)


@pytest.mark.parametrize(("at", "axes"), [("2", "BDL"), ("0", "LBD"), ("1", "BLD")])
def test_a_loop_is_served_and_its_result_lies_as_before(at: str, axes: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _Net(_file(tmp_path, f"lies_{axes}", AT=at).Plain()).eval(), torch.randn(2, 8, 7)
    before = copy.deepcopy(model)
    ferryman.port(model)
    with ferryman.trace() as trace, torch.no_grad():
        actual = model(x)
    assert ("selective_scan", "torch") in trace.calls
    assert_as_right(actual, before, x)
    assert actual.stride() == before(x).stride()


@pytest.mark.parametrize("what", ["self.record.note(state)", "print(t)", "self.record.notes += 1"])
def test_what_a_loop_does_besides_is_done_as_often(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model, x = _Net(_file(tmp_path, f"does_{abs(hash(what))}", DO=what).Plain()).eval(), torch.randn(2, 8, 7)
    ferryman.port(model)
    capsys.readouterr()
    model.inner.record.notes = 0
    model(x)
    assert model.inner.record.notes == (0 if "print" in what else 7)
    assert capsys.readouterr().out.count("\n") == (7 if "print" in what else 0)


@pytest.mark.parametrize("reaching", [False, True])
def test_what_is_not_finite_may_not_reach_the_tokens_before(reaching: bool) -> None:
    """A served call that adds up a chunk of tokens gives NaN for all of it, where the loop gives it from there on."""
    (one,) = [r for r in proposals("recurrences") if r.op == "selective_scan"]
    reading = recurrent_proof._Reading(one, one.expressions[0], (0, 1, 2, 3, 4), one.axes, one.result, {}, True)

    def loop(*given: Tensor) -> Tensor:
        result: Tensor = Definitions().selective_scan(*given)[0]
        return result

    def chunked(*given: Tensor) -> Tensor:
        spread = 0.0 * sum(x.sum(1, keepdim=True).sum(-1, keepdim=True) for x in given[:2])
        return loop(*given) + spread

    reason = recurrent_proof._reaching(loop, chunked if reaching else loop, reading)
    assert (reason is not None) is reaching


WAYS = {
    "a default": ("box=BOX", "box", lambda home: ((), {})),
    "a default by name": ("*, box=BOX", "box", lambda home: ((), {})),
    "the rest": ("*boxes", "boxes[0]", lambda home: ((home.Box(),), {})),
    "the rest by name": ("**boxes", 'boxes["box"]', lambda home: ((), {"box": home.Box()})),
    "from a dictionary": ("boxes", 'boxes.get("box")', lambda home: (({"box": home.Box()},), {})),
    "an iterator's": ("boxes", "next(iter(boxes))", lambda home: (([home.Box()],), {})),
    "the largest": ("box", "max([box], key=id)", lambda home: ((home.Box(),), {})),
    "a tensor of another kind": ("box", "box", lambda home: ((torch.ones(2, 5, 48).as_subclass(home.Sub),), {})),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_object_keeps_its_order_however_it_comes(way: str, tmp_path: Path) -> None:
    takes, source, make = WAYS[way]
    home = _file(tmp_path, f"way_{abs(hash(way))}", TAKES=takes, FROM=source)
    torch.manual_seed(0)
    model, x = _Net(home.Norm()).eval(), torch.randn(2, 5, 48)
    before = copy.deepcopy(model)
    ferryman.port(model)
    results = []
    for one in (before, model):
        home.BOX.calls = home.Sub.calls = 0
        given, named = make(home)
        with torch.no_grad():
            results.append(one(x, *given, **named))
    assert torch.equal(*results), [float(result.sum()) for result in results]


def test_a_hook_on_every_gradient_ends_what_a_made_module_is_known_for(tmp_path: Path) -> None:
    code = "import torch\nfrom torch import nn\nclass M(nn.Module):\n    def forward(self, x):\n"
    home = load(code + "        return nn.Softmax(-1)(x * 2.0)\n", "ferryman_recurrent_hook", tmp_path)
    model, x = _Net(home.M()).eval(), torch.randn(3, 8, requires_grad=True)
    before = copy.deepcopy(model)
    ferryman.port(model)

    def twice(module: nn.Module, given: Any, result: Any) -> Any:
        return tuple(2.0 * g for g in given) if isinstance(module, nn.Softmax) else None

    handle = nn.modules.module.register_module_full_backward_hook(twice)
    try:
        gradients = [torch.autograd.grad(one(x)[:, 0].sum(), x)[0] for one in (before, model)]
    finally:
        handle.remove()
    assert torch.equal(*gradients)


DELTA = """
import torch
from torch import nn


class Delta(nn.Module):
    def forward(self, q, k, v, g, beta):
        state, kept = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None].exp()
            seen = (state * k[:, t, :, :, None]).sum(-2)
            state = state + k[:, t, :, :, None] * ((v[:, t] - seen) * beta[:, t, :, None])[:, :, None]
            kept.append((state * q[:, t, :, :, None]).sum(-2))
        return torch.stack(kept, 1)
"""


def test_a_loop_whose_op_takes_many_tokens_at_once_is_served_where_that_gives_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Net(load(DELTA, "ferryman_recurrent_delta", tmp_path).Delta()).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    q, v, g, beta = torch.randn(1, 80, 2, 8), torch.randn(1, 80, 2, 8), -torch.rand(1, 80, 2), torch.rand(1, 80, 2)
    k = nn.functional.normalize(torch.randn(1, 80, 2, 8), dim=-1)
    odd, forgets = v.clone(), g.clone()
    odd[0, 40, 0, 0], forgets[0, 40, 0] = torch.nan, -1e9
    calls = {"plain": (q, k, v, g, beta), "odd": (q, k, odd, g, beta), "forgets": (q, k, v, forgets, beta)}
    for what, given in {**calls, "long keys": (q, 1.6 * k, v, g, beta)}.items():
        with ferryman.trace() as trace, torch.no_grad():
            actual = model(*given)
        wanted = before(*given)
        assert (("gated_delta_rule", "torch") in trace.calls) is (what == "plain"), what
        assert torch.equal(actual.isfinite(), wanted.isfinite()) and actual.stride() == wanted.stride()
        if what == "plain":
            floor = float((before(q * (1 + 2.0**-23), *given[1:]) - wanted).abs().max())
            assert float((actual - wanted).abs().max()) <= 16 * max(floor, 2.0**-23 * float(wanted.abs().max()))
        else:
            assert torch.equal(actual.nan_to_num(0.0), wanted.nan_to_num(0.0)), what


def test_numbers_are_within_bounds_or_cannot_be_read() -> None:
    x = torch.tensor([1.0, -2.0])
    assert steady.within([(x, -2.0, 1.0)]) and not steady.within([(x, -1.0, 1.0)])
    assert not steady.within([]) and not steady.within([(torch.tensor([torch.nan]), -9.0, 9.0)])
    assert not steady.within([(x, -2.0, 1.0), (torch.tensor(torch.inf), -9.0, 9.0)])
    assert not steady.within([(torch.empty(2, device="meta"), -9.0, 9.0)])
    assert steady.readable(x) and not steady.readable(torch.empty(2, device="meta"))
    with FakeTensorMode() as mode:
        assert not steady.within([(mode.from_tensor(x), -9.0, 9.0)])
    read = torch.vmap(lambda y: y + float(steady.within([(y, -9.0, 9.0)])))
    assert torch.equal(read(x[:, None]), x[:, None])
    assert torch.equal(
        torch.jit.trace(lambda y: y + float(steady.within([(y, -9.0, 9.0)])), x, check_trace=False)(x), x
    )


class _Device(Tensor):
    """Looks as if it were on a device."""

    is_cuda = True
    device = torch.device("cuda")


@pytest.mark.parametrize(("capturing", "waits", "ordered"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1)])
def test_numbers_on_a_device_are_not_read_where_that_is_an_error(
    capturing: int, waits: int, ordered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: waits)
    x = torch.ones(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: bool(ordered))
        assert steady.readable(x.as_subclass(_Device)) is not bool(capturing or waits or ordered)
        assert steady.readable(x)


OTHERS = """
import torch
from torch import nn
from torch.nn import functional as F


class ByMode(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x) if torch.is_grad_enabled() else x.clamp(min=0.0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(6, 80, 64) / 8), nn.Parameter(torch.randn(6, 64, 40) / 6)

    def forward(self, x, ids, weights):
        at = ids.reshape(-1, 1, 1)
        a = torch.take_along_dim(self.w_in, at.expand(-1, 80, 64), 0).view(*ids.shape, 80, 64)
        b = torch.take_along_dim(self.w_out, at.expand(-1, 64, 40), 0).view(*ids.shape, 64, 40)
        g, u = (a @ x[:, None, :, None]).squeeze(-1).chunk(2, -1)
        return ((b @ (F.silu(g) * u)[..., None]).squeeze(-1) * weights[..., None]).sum(1)
"""


def test_what_is_other_where_gradients_are_on_is_not_served_as_without(tmp_path: Path) -> None:
    model = _Net(load(OTHERS, "ferryman_recurrent_mode", tmp_path).ByMode()).eval()
    before, x = copy.deepcopy(model), torch.randn(3, 9, 64)
    ferryman.port(model)
    assert torch.equal(model(x), before(x))


def test_numbers_of_experts_that_come_round_have_the_dtype_that_they_must_have(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Net(load(OTHERS, "ferryman_recurrent_experts", tmp_path).Experts()).eval()
    ferryman.port(model)
    x, ids, weights = torch.randn(14, 64), torch.randint(-20, 20, (14, 2)), torch.rand(14, 2)
    with ferryman.trace() as trace, torch.no_grad():
        model(x, ids, weights)
    assert "moe_experts" in {op for op, _ in trace.calls}
    with pytest.raises(RuntimeError, match="should be Long"):
        model(x, ids.int(), weights)

"""gated_rms_norm against its formula in PyTorch, with planted errors, and found in modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.porting.inputs.cases import cases_of, double, materialise
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import U32, ratio
from tests.ops.gated_norm.independent import gated_rms_norm as formula

OP, BACKWARD = registry.primitive("gated_rms_norm"), registry.primitive("gated_rms_norm_backward")
CASES = {case.name: case for case in cases_of(OP)}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_dispatch_serves_forward_and_backward(dtype: torch.dtype, first: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x, z, w = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in ((7, 96), (7, 96), (96,)))
    grad = torch.randn(7, 96, generator=generator).to(dtype)
    with ferryman.trace() as traced:
        y = ops.gated_rms_norm(x, z, w, 1e-6, 32, first, True)
        y.backward(grad)
    assert dict(traced.calls) == {("gated_rms_norm", "torch"): 1, ("gated_rms_norm_backward", "torch"): 1}
    args = double((x.detach(), z.detach(), w.detach(), 1e-6, 32, first, True, "silu"))
    exact = OP.body(*args)
    assert y.dtype is dtype and ratio(y.detach(), exact, OP.limits.bound(args, (exact,))[0], UNIT[dtype]) <= 1
    given = (grad.double(), *args[:6], "silu")
    truths = BACKWARD.body(*given)
    for leaf, truth, terms in zip((x, z, w), truths, BACKWARD.limits.bound(given, truths), strict=True):
        assert leaf.grad is not None and leaf.grad.dtype is dtype
        assert ratio(leaf.grad, truth, terms, UNIT[dtype]) <= 1


PLANTED: dict[str, Callable[..., Tensor]] = {
    "gate on the other side": lambda x, z, w, e, s, f, *_: formula(x, z, w, e, s, not f),
    "one group": lambda x, z, w, e, s, f, *_: formula(x, z, w, e, None, f),
    "sigmoid": lambda x, z, w, e, s, f, *_: formula(x, z, w, e, s, f, False, "sigmoid"),
    "no weight": lambda x, z, w, e, s, f, *_: formula(x, z, None, e, s, f),
    "the next group's weight": lambda x, z, w, e, s, f, *_: formula(x, z, w.roll(s), e, s, f),
    "gate and x exchanged": lambda x, z, w, e, s, f, *_: formula(z, x, w, e, s, f),
    "a mean over one column less": lambda x, z, w, e, s, f, *_: formula(
        x, z, w, e, s, f, scale=lambda h, eps: h / (h.pow(2).sum(-1, keepdim=True) / (s - 1) + eps).sqrt()
    ),
    "eps outside": lambda x, z, w, e, s, f, *_: formula(
        x, z, w, e, s, f, scale=lambda h, eps: h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3)
    ),
    "a factor": lambda x, z, w, e, s, f, *_: formula(x, z, w, e, s, f) * (1 + 2.0**-14),
}


@pytest.mark.parametrize("name", ["three_dims_norm", "three_dims_gate"])
@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_beyond_the_bound(error: str, name: str) -> None:
    values = materialise(CASES[name], OP, torch.float32, 2)
    wide = double(values)
    exact = OP.body(*wide)
    (terms,) = OP.limits.bound(wide, (exact,))
    assert ratio(ops.gated_rms_norm(*values), exact, terms, U32) <= 1
    assert ratio(PLANTED[error](*wide), exact, terms, U32) > 10


@pytest.mark.parametrize("first", [True, False])
def test_what_the_casts_round_is_within_their_term_and_no_matter_of_other_sizes(first: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    x, z, w = (torch.randn(s, generator=generator).bfloat16() for s in ((64, 96), (64, 96), (96,)))
    args = (x.double(), z.double(), w.double(), 1e-6, None, first, True, "silu")
    exact = OP.body(*args)
    term = OP.limits.bound(args, (exact,))[0]["storage"] * 2.0**-8
    a = functional.silu(z.double())
    n = formula(x.double(), z.double(), None, 1e-6, None, True) / a if first else None
    rounded = (n if n is not None else OP.body(args[0], args[1], None, *args[3:6], False, "silu")).bfloat16().double()
    moved = (rounded * w.double()).bfloat16().double() * a if first else rounded * w.double()
    worst = float(((moved - exact).abs() / (term + 2.0**-40)).max())
    assert 0.4 < worst <= 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gate": torch.zeros(3, 4)}, "gate.shape"),
        ({"weight": torch.zeros(7)}, "weight.shape"),
        ({"group_size": 3}, "group_size"),
        ({"group_size": 0}, "group_size"),
        ({"eps": -1.0}, "eps"),
        ({"activation": "gelu"}, "activation"),
        ({"x": torch.zeros(3, 8, dtype=torch.float64)}, "x.dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"x": torch.zeros(3, 8), "gate": torch.zeros(3, 8), "weight": torch.zeros(8)}
    with pytest.raises(ArgumentError, match=text):
        ops.gated_rms_norm(**{**given, **change})


# In models --------------------------------------------------------------------------------------------------


class Disguised(nn.Module):
    """A gate first, in groups; other names, other order."""

    fault = ""

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(48))
        self.parts, self.small = parts, 1e-5

    def forward(self, signal: Tensor, door: Tensor | None = None) -> Tensor:
        wide = signal.float()
        if door is not None:
            opened = door.float()
            wide = functional.gelu(opened) * wide if self.fault == "gelu" else opened * torch.sigmoid(opened) * wide
        rows = wide.unflatten(-1, (self.parts, -1))
        power = torch.mean(rows * rows, dim=-1, keepdim=True)
        rows = rows / (power.sqrt() + self.small) if self.fault == "eps" else rows * (power + self.small).rsqrt()
        return self.gain * rows.flatten(-2).to(signal.dtype)


class Last(nn.Module):
    """A gate last, which must be given."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.e = nn.Parameter(torch.randn(32)), 1e-6

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = a.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.e)
        h = self.w * h.to(a.dtype) * torch.sigmoid(b.to(torch.float32))
        return h.to(a.dtype)


def calls(run: Callable[[], Any]) -> tuple[Any, dict[Any, int]]:
    with ferryman.trace() as traced:
        output = run()
    return output, dict(traced.calls)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Disguised, Last])
def test_a_gated_norm_is_found_by_what_it_computes(kind: type[nn.Module], dtype: torch.dtype) -> None:
    module = kind().to(dtype)
    width = next(module.parameters()).numel()
    x, z = (torch.randn(2, 5, width).to(dtype) for _ in range(2))
    wanted = module(x, z)
    report = ferryman.port(module)
    # whether an optional gate is given, is the caller's
    assert report.calls() == ({"gated_rms_norm": 1} if kind is Last else {})
    assert report.maybe() == (frozenset() if kind is Last else {"gated_rms_norm"})
    output, served = calls(lambda: module(x, z))
    assert served == {("gated_rms_norm", "torch"): 1} and output.dtype is wanted.dtype
    apart = float((output - wanted).detach().abs().max() / wanted.detach().abs().max())
    assert apart <= max(2 * UNIT[dtype], 2.0**-18)  # 64 units of float32
    output.float().square().mean().backward()
    assert next(module.parameters()).grad is not None


def test_a_gate_that_is_not_given_goes_to_the_module() -> None:
    module = Disguised()
    x = torch.randn(2, 48)
    wanted = module(x)
    ferryman.port(module)
    output, served = calls(lambda: module(x, door=None))
    assert torch.equal(output, wanted) and served == {} and torch.equal(module(x), wanted)
    assert calls(lambda: module(signal=x, door=x))[1] == {("gated_rms_norm", "torch"): 1}


def test_x_in_float32_beside_narrower_weights_is_served() -> None:
    """What a scan leaves in float32."""
    module = Disguised().bfloat16()
    x, z = torch.randn(3, 48), torch.randn(3, 48).bfloat16()
    wanted = module(x, z)
    ferryman.port(module)
    output, served = calls(lambda: module(x, z))
    assert served == {("gated_rms_norm", "torch"): 1} and output.dtype is wanted.dtype is torch.float32
    assert float((output - wanted).detach().abs().max() / wanted.detach().abs().max()) <= 2.0**-20
    assert calls(lambda: module(x.bfloat16(), z.float()))[1] == {}


@pytest.mark.parametrize("fault", ["gelu", "eps"])
def test_a_look_alike_is_none(fault: str) -> None:
    module = type("Other", (Disguised,), {"fault": fault})()
    x, z = torch.randn(3, 48), torch.randn(3, 48)
    wanted = module(x, z)
    report = ferryman.port(nn.Sequential(module))
    output, served = calls(lambda: module(x, z))
    assert "gated_rms_norm" not in report.calls() and ("gated_rms_norm", "torch") not in served
    assert float((output - wanted).detach().abs().max() / wanted.detach().abs().max()) <= 2.0**-20  # its own code ran

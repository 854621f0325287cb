"""gated_delta_rule against a product of matrices, token after token, with planted errors, and found in functions."""

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
from ferryman.ops.gated_delta_rule.definition import gated_delta_rule
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.porting.inputs.cases import cases_of, double, materialise
from ferryman.porting.judging.metrics import UNIT
from ferryman.porting.model import routines
from tests.bounded import U32, ratio
from tests.interpreter import Interpreter
from tests.ops.gated_delta_rule.independent import gated_delta_rule as matrices

OP = registry.primitive("gated_delta_rule")
CASES = {case.name: case for case in cases_of(OP)}


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("split", [(1,) * 9, (70, 5, 1, 1), (33, 64)])
def test_tokens_after_each_other_give_what_all_give_at_once(dtype: torch.dtype, split: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    length = sum(split)
    q, k = (torch.randn(2, length, 2, 8, generator=generator).to(dtype) for _ in range(2))
    v = torch.randn(2, length, 4, 6, generator=generator).to(dtype)
    g, beta = -torch.rand(2, length, 4, generator=generator), torch.rand(2, length, 4, generator=generator).to(dtype)
    values = (q, k, v, g, beta, None, None, True)
    exact = OP.body(*double(values))
    terms = OP.limits.bound(double(values), exact)
    pieces: list[Tensor] = []
    kept: Tensor | None = None
    at = 0
    for size in split:
        with ferryman.trace() as trace:
            now = slice(at, at + size)
            y, kept = gated_delta_rule(q[:, now], k[:, now], v[:, now], g[:, now], beta[:, now], kept, None, True)
        assert list(trace.calls) == [("gated_delta_rule", "torch")]
        pieces.append(y)
        at += size
    whole, final = gated_delta_rule(*values)
    for y, state in ((torch.cat(pieces, 1), kept), (whole, final)):
        assert state is not None and y.dtype is dtype and state.dtype is torch.float32
        assert ratio(y, exact[0], terms[0], UNIT[dtype]) <= 1 and ratio(state, exact[1], terms[1], U32) <= 1


@pytest.mark.parametrize("alike", [0.0, 0.95, 1.0])
def test_keys_that_are_nearly_the_same_lose_no_digits(alike: float) -> None:
    """An inverse of the chunk's triangular system, made from its powers, would lose all of them here."""
    generator = torch.Generator().manual_seed(5)
    k = alike + (1 - alike) * torch.randn(1, 128, 1, 16, generator=generator)
    v, beta = torch.randn(1, 128, 1, 16, generator=generator), torch.full((1, 128, 1), 0.99)
    values = (k, k, v, None, beta, None, None, True)
    exact = OP.body(*double(values))
    y, state = gated_delta_rule(*values)
    terms = OP.limits.bound(double(values), exact)
    assert ratio(y, exact[0], terms[0], U32) <= 1 and ratio(state, exact[1], terms[1], U32) <= 1
    assert float((y - exact[0]).abs().max()) <= 2.0**-17 * float(exact[0].abs().max())


PLANTED: dict[str, Callable[..., Tensor]] = {
    "no decay": lambda q, k, v, g, b, s, c, n: matrices(q, k, v, None, b, s, c, n)[0],
    "a decay late": lambda q, k, v, g, b, s, c, n: matrices(q, k, v, g.roll(1, 1), b, s, c, n)[0],
    "no state": lambda q, k, v, g, b, s, c, n: matrices(q, k, v, g, b, None, c, n)[0],
    "no correction": lambda q, k, v, g, b, s, c, n: matrices(q, k * 0, v, g, b, s, c, False)[0],
    "a rate of 1": lambda q, k, v, g, b, s, c, n: matrices(q, k, v, g, torch.ones_like(b), s, c, n)[0],
    "no scale": lambda q, k, v, g, b, s, c, n: matrices(q, k, v, g, b, s, 1.0, n)[0],
    "not normalised": lambda q, k, v, g, b, s, c, n: matrices(q, k * 0.5, v, g, b, s, c, False)[0],
    "the next head's key": lambda q, k, v, g, b, s, c, n: matrices(q, k.roll(1, 2), v, g, b, s, c, n)[0],
    "q and k exchanged": lambda q, k, v, g, b, s, c, n: matrices(k, q, v, g, b, s, c, n)[0],
    "a future token": lambda q, k, v, g, b, s, c, n: matrices(q, k, v.roll(-1, 1), g, b, s, c, n)[0],
    "a factor": lambda q, k, v, g, b, s, c, n: 1.01 * matrices(q, k, v, g, b, s, c, n)[0],
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_beyond_the_bound(error: str) -> None:
    values = materialise(CASES["state"], OP, torch.float32)
    wide = double(values)
    exact = OP.body(*wide)
    terms = OP.limits.bound(wide, exact)[0]
    assert ratio(gated_delta_rule(*values)[0], exact[0], terms, U32) <= 1
    assert ratio(PLANTED[error](*wide), exact[0], terms, U32) > 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": torch.zeros(2, 3, 2, 5)}, "k.shape"),
        ({"v": torch.zeros(2, 3, 3, 4)}, "v.shape"),
        ({"g": torch.zeros(2, 3, 2)}, "g.shape"),
        ({"beta": torch.zeros(2, 4, 4)}, "beta.shape"),
        ({"initial_state": torch.zeros(2, 4, 6, 8)}, "initial_state.shape"),
        ({"q": torch.zeros(2, 3, 2, 8).half()}, "dtype"),
        ({"q": torch.zeros(2, 3, 8)}, "q.shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    q, v, rate = torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, 4, 6), torch.zeros(2, 3, 4)
    given: dict[str, Any] = {"q": q, "k": q, "v": v, "g": rate, "beta": rate}
    gated_delta_rule(**given)
    with pytest.raises(ArgumentError, match=text):
        gated_delta_rule(**{**given, **change})


# Gradients --------------------------------------------------------------------------------------------------

BACKWARD = registry.primitive("gated_delta_rule_backward")
LEARNED = ("small", "plain", "state", "token", "past_a_chunk", "prime", "layout_rows", "own_float16", "deep_decay")


def by_name(values: tuple[Any, ...]) -> dict[str, Any]:
    """Random gradients of both results beside what forward takes, in float64, and exact in float32."""
    known = dict(zip(OP.names, values, strict=True))
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(known["v"].shape, generator=generator).double()
    batch, _, heads, dim = y.shape
    state = torch.randn(batch, heads, known["q"].shape[3], dim, generator=generator).double()
    return {"grad_y": y, "grad_final_state": state} | known


def backward_args(known: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(known[n] for n in BACKWARD.names)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_are_within_their_bounds(name: str, dtype: torch.dtype) -> None:
    values = list(materialise(CASES[name], OP, dtype))
    values = [v.detach().requires_grad_() if isinstance(v, Tensor) else v for v in values]
    known = by_name(tuple(v.detach().double() if isinstance(v, Tensor) else v for v in values))
    with ferryman.trace() as trace:
        results = ops.gated_delta_rule(*values)
        cotangents = [known[f"grad_{n}"].to(o.dtype) for n, o in zip(OP.outputs, results, strict=True)]
        gradients = torch.autograd.grad(results, [v for v in values if isinstance(v, Tensor)], cotangents)
    assert set(trace.calls) == {("gated_delta_rule", "torch"), ("gated_delta_rule_backward", "torch")}
    known |= {f"grad_{n}": c.double() for n, c in zip(OP.outputs, cotangents, strict=True)}
    exact = BACKWARD.body(*backward_args(known))
    every = zip(exact, BACKWARD.limits.bound(backward_args(known), exact), OP.gradient.owners, strict=True)
    there = [(want, terms) for want, terms, names in every if known[names[0]] is not None]
    for got, (want, terms) in zip(gradients, there, strict=True):
        assert ratio(got, want, terms, UNIT[got.dtype]) <= 1


def test_planted_errors_of_gradients_are_beyond_their_bounds() -> None:
    """Of one token, a hundredth is seen; of many, a token late, another head's, the state's decay left out."""
    args = backward_args(by_name(double(materialise(CASES["token"], OP, torch.float32))))
    exact = BACKWARD.body(*args)
    for want, terms in zip(exact, BACKWARD.limits.bound(args, exact), strict=True):
        assert ratio(1.01 * want, want, terms, U32) > 1
    known = by_name(double(materialise(CASES["state"], OP, torch.float32)))
    exact = BACKWARD.body(*backward_args(known))
    bounds = BACKWARD.limits.bound(backward_args(known), exact)
    wrong = {
        "no decay": BACKWARD.body(*backward_args(known | {"g": torch.zeros_like(known["g"])})),
        "no gradient of the state": BACKWARD.body(*backward_args(known | {"grad_final_state": None})),
        "not normalised": BACKWARD.body(*backward_args(known | {"qk_l2norm": False})),
        "a token late": tuple(x.roll(1, 1) for x in exact),
    }
    for name, gradients in wrong.items():
        seen = [ratio(got, want, terms, U32) > 3 for got, want, terms in zip(gradients, exact, bounds, strict=True)]
        # the final state asks no query, and the first one is forgotten before it
        assert all(seen[1:5] if name == "no gradient of the state" else seen), (name, seen)


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
name = "gated_delta_rule_backward"
op, line = registry.primitive(name), registry.implementation(name, "triton.chunked")
found = {}
for case in cases_of(op):
    if case.name == "exact_layout":
        cell = check_cell(op, line, case, torch.bfloat16, simulate=profile("h200"))
        found[case.name] = (cell.verdict, cell.reason)
print(json.dumps(found))
"""


def test_the_triton_backward_is_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 1 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts


def test_few_tokens_have_a_line_of_their_own_in_triton() -> None:
    names = [line.name for line in registry.implementations("gated_delta_rule")]
    assert names.index("triton.recurrent") < names.index("triton.chunked")


# In models --------------------------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    return x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()


def remember(
    ask: Tensor,
    key: Tensor,
    say: Tensor,
    fade: Tensor,
    rate: Tensor,
    keep: bool = False,
    before: Tensor | None = None,
    normal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A delta rule in other words, its options in another order."""
    kind = ask.dtype
    share = say.shape[2] // ask.shape[2]
    ask, key, say, fade, rate = [x.transpose(1, 2).float() for x in (ask, key, say, fade, rate)]
    if normal:
        ask, key = unit(ask), unit(key)
    ask, key = (x.repeat_interleave(share, 1) for x in (ask, key))
    ask = ask / ask.shape[-1] ** 0.5
    if before is None:
        memory = say.new_zeros(say.shape[0], say.shape[1], ask.shape[-1], say.shape[-1])
    else:
        memory = before.to(say.dtype)
    out = torch.zeros_like(say)
    for i in range(say.shape[2]):
        memory = fade[:, :, i].exp()[..., None, None] * memory
        wrong = say[:, :, i] - torch.einsum("bhkv,bhk->bhv", memory, key[:, :, i])
        memory = memory + torch.einsum("bhk,bhv->bhkv", key[:, :, i], rate[:, :, i, None] * wrong)
        out[:, :, i] = torch.einsum("bhkv,bhk->bhv", memory, ask[:, :, i])
    return out.transpose(1, 2).to(kind), memory if keep else None


def forget(
    ask: Tensor,
    key: Tensor,
    say: Tensor,
    fade: Tensor,
    rate: Tensor,
    before: Tensor | None = None,
    keep: bool = False,
    normal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """It corrects by the state before its decay."""
    ask, key, say, fade, rate = [x.transpose(1, 2).float() for x in (ask, key, say, fade, rate)]
    if normal:
        ask, key = unit(ask), unit(key)
    ask = ask / ask.shape[-1] ** 0.5
    memory = say.new_zeros(say.shape[0], say.shape[1], ask.shape[-1], say.shape[-1]) if before is None else before
    out = torch.zeros_like(say)
    for i in range(say.shape[2]):
        wrong = say[:, :, i] - (memory * key[:, :, i, :, None]).sum(-2)
        memory = fade[:, :, i].exp()[..., None, None] * memory
        memory = memory + key[:, :, i, :, None] * (rate[:, :, i, None] * wrong)[:, :, None]
        out[:, :, i] = (memory * ask[:, :, i, :, None]).sum(-2)
    return out.transpose(1, 2), memory if keep else None


def drawn(dtype: torch.dtype, shared: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 6, shared, 8, generator=generator).to(dtype) for _ in range(2))
    v, state = torch.randn(2, 6, 4, 5, generator=generator).to(dtype), torch.randn(2, 4, 8, 5, generator=generator)
    g, beta = -torch.rand(2, 6, 4, generator=generator), torch.rand(2, 6, 4, generator=generator).to(dtype)
    return q, k, v, g, beta, state


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_a_delta_rule_is_found_by_what_it_computes(dtype: torch.dtype) -> None:
    served = routines.served_routine(remember)
    assert served is not None and served.op == "gated_delta_rule" and served.gradient
    q, k, v, g, beta, state = drawn(dtype)
    for keep in (False, True):
        for normal in (False, True):
            wanted, last = remember(q, k, v, g, beta, keep, state, normal)
            with ferryman.trace() as trace:
                out, kept = served.replacement(q, k, v, g, beta, normal=normal, before=state, keep=keep)
            assert dict(trace.calls) == {("gated_delta_rule", "torch"): 1} and out.dtype is dtype
            assert float((out - wanted).norm()) <= max(UNIT[dtype], 2.0**-18) * float(wanted.norm())
            assert (kept is None) == (last is None) == (not keep)


def test_gradients_come_from_the_op_and_no_token_goes_to_the_function() -> None:
    served = routines.served_routine(remember)
    assert served is not None
    q, *rest, _ = drawn(torch.float32)
    with ferryman.trace() as trace:
        served.replacement(*(x[:, :0] for x in (q, *rest)))
    assert not trace.calls
    learned = [x.clone().requires_grad_() for x in (q, *rest)]
    with ferryman.trace() as trace:
        gradients = torch.autograd.grad(served.replacement(*learned)[0].square().sum(), learned)
    assert dict(trace.calls) == {("gated_delta_rule", "torch"): 1, ("gated_delta_rule_backward", "torch"): 1}
    for got, want in zip(gradients, torch.autograd.grad(remember(*learned)[0].square().sum(), learned), strict=True):
        assert float((got - want).norm()) <= 2.0**-16 * float(want.norm())


def test_a_look_alike_is_none() -> None:
    assert routines.served_routine(forget) is None


@pytest.mark.slow
def test_it_is_found_in_a_models_layer() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3NextConfig"):
        pytest.skip("this transformers has none")
    from ferryman.porting.model import bundled

    model = bundled.build("qwen3_next", True, torch.float32)
    assert isinstance(model, nn.Module)
    ids = torch.randint(1, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = model(ids).logits
    wanted.square().mean().backward()
    slopes = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    report = ferryman.port(model)
    with ferryman.trace() as trace:
        logits = model(ids).logits
        logits.square().mean().backward()
    counts = {op: n for (op, _), n in trace.calls.items()}
    assert counts["gated_delta_rule_backward"] == counts["gated_delta_rule"]
    for name, parameter in model.named_parameters():
        # not the sums over all tokens of what cancels: there the model's own function is off by 1e-3
        if name in slopes and parameter.dim() > 1:
            assert parameter.grad is not None
            assert float((parameter.grad - slopes[name]).norm()) <= 2.0**-12 * float(slopes[name].norm()), name
    assert counts["gated_delta_rule"] >= 1 and counts["gated_rms_norm"] == counts["gated_delta_rule"]
    assert "gated_delta_rule" in report.maybe() and "gated_delta_rule" not in report.calls()
    assert float((logits - wanted).norm()) <= 2.0**-16 * float(wanted.norm())
    assert functional.cosine_similarity(logits.flatten(), wanted.flatten(), 0) > 0.99999

"""gated_delta_rule against a product of matrices, token after token, with planted errors, and found in functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, FerrymanError
from ferryman.ops.gated_delta_rule.definition import gated_delta_rule
from ferryman.porting.inputs.cases import cases_of, double, materialise
from ferryman.porting.model import routines

OP = registry.primitive("gated_delta_rule")
CASES = {case.name: case for case in cases_of(OP)}
NAMES = (
    "small",
    "plain",
    "state",
    "token",
    "past_a_chunk",
    "prime",
    "layout_rows",
    "own_float16",
    "deep_decay",
    "scaled",
)
UNITS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def matrices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor | None,
    scale: float | None,
    norm: bool,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The state as products of exp(g) (I - beta k k^T), each applied to all that came before it."""
    width, shared = q.shape[3], v.shape[2] // q.shape[2]
    if norm:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    s = torch.zeros(v.shape[0], v.shape[2], width, v.shape[3], dtype=v.dtype) if state is None else state
    made = []
    for t in range(v.shape[1]):
        key, rate = k[:, t, :, :, None], beta[:, t, :, None, None]
        turn = torch.eye(width, dtype=v.dtype) - rate * key @ key.mT
        s = turn @ (s if g is None else g[:, t, :, None, None].exp() * s) + rate * key @ v[:, t, :, None, :]
        made.append((q[:, t, :, None, :] @ s).squeeze(2) * (width**-0.5 if scale is None else scale))
    return torch.stack(made, 1) if made else torch.zeros_like(v), s


def ratio(got: Tensor, exact: Tensor, terms: dict[str, Tensor], unit: float, accumulate: float = 2.0**-24) -> float:
    """The largest error in bounds."""
    smallest = 2.0**-25 if unit == 2.0**-11 else 0.0
    room = accumulate * terms["accumulate"] + unit * exact.abs() + terms["absolute"] + smallest
    return float(((got.double() - exact).abs() / (room + 1e-300)).max())


@pytest.mark.parametrize("name", NAMES)
def test_the_definition_is_a_product_of_matrices(name: str) -> None:
    values = double(materialise(CASES[name], OP, torch.float32))
    exact = matrices(*values)
    for got, truth, terms in zip(OP.body(*values), exact, OP.bound(values, exact), strict=True):
        assert ratio(got, truth, terms, 0.0, 2.0**-53) <= 1


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("split", [(1,) * 9, (70, 5, 1, 1), (33, 64)])
def test_tokens_after_each_other_give_what_all_give_at_once(dtype: torch.dtype, split: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    length = sum(split)
    q, k = (torch.randn(2, length, 2, 8, generator=generator).to(dtype) for _ in range(2))
    v = torch.randn(2, length, 4, 6, generator=generator).to(dtype)
    g, beta = -torch.rand(2, length, 4, generator=generator), torch.rand(2, length, 4, generator=generator).to(dtype)
    values = (q, k, v, g, beta, None, None, True)
    exact = OP.body(*double(values))
    terms = OP.bound(double(values), exact)
    made: list[Tensor] = []
    kept: Tensor | None = None
    at = 0
    for size in split:
        with ferryman.trace() as trace:
            now = slice(at, at + size)
            y, kept = gated_delta_rule(q[:, now], k[:, now], v[:, now], g[:, now], beta[:, now], kept, None, True)
        assert list(trace.calls) == [("gated_delta_rule", "torch")]
        made.append(y)
        at += size
    whole, final = gated_delta_rule(*values)
    for y, state in ((torch.cat(made, 1), kept), (whole, final)):
        assert state is not None and y.dtype is dtype and state.dtype is torch.float32
        assert ratio(y, exact[0], terms[0], UNITS[dtype]) <= 1 and ratio(state, exact[1], terms[1], 2.0**-24) <= 1


@pytest.mark.parametrize("alike", [0.0, 0.95, 1.0])
def test_keys_that_are_nearly_the_same_lose_no_digits(alike: float) -> None:
    """An inverse of the chunk's triangular system, made from its powers, would lose all of them here."""
    generator = torch.Generator().manual_seed(5)
    k = alike + (1 - alike) * torch.randn(1, 128, 1, 16, generator=generator)
    v, beta = torch.randn(1, 128, 1, 16, generator=generator), torch.full((1, 128, 1), 0.99)
    values = (k, k, v, None, beta, None, None, True)
    exact = OP.body(*double(values))
    y, state = gated_delta_rule(*values)
    terms = OP.bound(double(values), exact)
    assert ratio(y, exact[0], terms[0], 2.0**-24) <= 1 and ratio(state, exact[1], terms[1], 2.0**-24) <= 1
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
    terms = OP.bound(wide, exact)[0]
    assert ratio(gated_delta_rule(*values)[0], exact[0], terms, 2.0**-24) <= 1
    assert ratio(PLANTED[error](*wide), exact[0], terms, 2.0**-24) > 3


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


def test_a_gradient_is_refused_and_named() -> None:
    values = materialise(CASES["small"], OP, torch.float32)
    y, _ = gated_delta_rule(values[0].clone().requires_grad_(), *values[1:])
    with pytest.raises((FerrymanError, RuntimeError)):
        y.sum().backward()


def test_few_tokens_have_a_line_of_their_own_in_triton() -> None:
    names = [line.name for line in registry.implementations("gated_delta_rule")]
    assert names.index("triton.recurrent") < names.index("triton")


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
        held = say.new_zeros(say.shape[0], say.shape[1], ask.shape[-1], say.shape[-1])
    else:
        held = before.to(say.dtype)
    out = torch.zeros_like(say)
    for i in range(say.shape[2]):
        held = fade[:, :, i].exp()[..., None, None] * held
        wrong = say[:, :, i] - torch.einsum("bhkv,bhk->bhv", held, key[:, :, i])
        held = held + torch.einsum("bhk,bhv->bhkv", key[:, :, i], rate[:, :, i, None] * wrong)
        out[:, :, i] = torch.einsum("bhkv,bhk->bhv", held, ask[:, :, i])
    return out.transpose(1, 2).to(kind), held if keep else None


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
    held = say.new_zeros(say.shape[0], say.shape[1], ask.shape[-1], say.shape[-1]) if before is None else before
    out = torch.zeros_like(say)
    for i in range(say.shape[2]):
        wrong = say[:, :, i] - (held * key[:, :, i, :, None]).sum(-2)
        held = fade[:, :, i].exp()[..., None, None] * held
        held = held + key[:, :, i, :, None] * (rate[:, :, i, None] * wrong)[:, :, None]
        out[:, :, i] = (held * ask[:, :, i, :, None]).sum(-2)
    return out.transpose(1, 2), held if keep else None


def drawn(dtype: torch.dtype, shared: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 6, shared, 8, generator=generator).to(dtype) for _ in range(2))
    v, state = torch.randn(2, 6, 4, 5, generator=generator).to(dtype), torch.randn(2, 4, 8, 5, generator=generator)
    g, beta = -torch.rand(2, 6, 4, generator=generator), torch.rand(2, 6, 4, generator=generator).to(dtype)
    return q, k, v, g, beta, state


@pytest.mark.parametrize("dtype", UNITS, ids=str)
def test_a_delta_rule_is_found_by_what_it_computes(dtype: torch.dtype) -> None:
    served = routines.served_routine(remember)
    assert served is not None and served.op == "gated_delta_rule" and not served.gradient
    q, k, v, g, beta, state = drawn(dtype)
    for keep in (False, True):
        for normal in (False, True):
            wanted, last = remember(q, k, v, g, beta, keep, state, normal)
            with ferryman.trace() as trace:
                found, kept = served.replacement(q, k, v, g, beta, normal=normal, before=state, keep=keep)
            assert dict(trace.calls) == {("gated_delta_rule", "torch"): 1} and found.dtype is dtype
            assert float((found - wanted).norm()) <= max(UNITS[dtype], 2.0**-18) * float(wanted.norm())
            assert (kept is None) == (last is None) == (not keep)


def test_a_gradient_and_no_token_go_to_the_function() -> None:
    served = routines.served_routine(remember)
    assert served is not None
    q, *rest, _ = drawn(torch.float32)
    with ferryman.trace() as trace:
        found, _ = served.replacement(q.clone().requires_grad_(), *rest)
        served.replacement(*(x[:, :0] for x in (q, *rest)))
    assert not trace.calls and found.requires_grad
    with torch.no_grad(), ferryman.trace() as trace:
        served.replacement(q.clone().requires_grad_(), *rest)
    assert dict(trace.calls) == {("gated_delta_rule", "torch"): 1}


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
    with torch.no_grad():
        wanted = model(ids).logits
        report = ferryman.port(model)
        with ferryman.trace() as trace:
            found = model(ids).logits
    made = {op: n for (op, _), n in trace.calls.items()}
    assert made["gated_delta_rule"] >= 1 and made["gated_rms_norm"] == made["gated_delta_rule"]
    assert "gated_delta_rule" in report.maybe() and "gated_delta_rule" not in report.calls()
    assert float((found - wanted).norm()) <= 2.0**-16 * float(wanted.norm())
    assert functional.cosine_similarity(found.flatten(), wanted.flatten(), 0) > 0.99999

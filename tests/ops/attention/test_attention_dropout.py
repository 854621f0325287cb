"""Dropout: which pairs it takes, by a stated generator; that every way takes the same; who serves it, who refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import lockfile, registry
from ferryman.errors import ArgumentError
from ferryman.ops.attention import dropout_kernels, scores
from ferryman.porting.inputs.cases import cases_of
from tests.bounded import U32
from tests.interpreter import Interpreter
from tests.ops.attention.plain_philox import is_dropped, philox

OP = registry.primitive("attention")
BACKWARD = registry.primitive("attention_backward")
CASES = {case.name: case for case in cases_of(OP)}
CPU = torch.device("cpu")
SAME = 2.0**-40  # float64, sums of fewer than 2^10 numbers about 1 in another order
# Random123's own file of known answers (kat_vectors): counter, key, words of philox4x32-10
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def _words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_generator_gives_the_known_answers(counter: str, key: str, answer: str) -> None:
    given, seed = _words(counter), _words(key)
    assert philox(given, seed) == _words(answer)  # type: ignore[arg-type]
    there = scores.philox(tuple(map(torch.tensor, given)), tuple(map(torch.tensor, seed)))
    assert tuple(map(int, there)) == _words(answer)
    if given[3] == 0:
        packed = torch.tensor(seed[0] + (seed[1] << 32))
        assert tuple(dropout_kernels._philox(packed, *map(torch.tensor, given[:3])).tolist()) == _words(answer)


@pytest.mark.parametrize("dropout_p", [1e-9, 0.1, 0.5, 0.75])
def test_both_ways_of_pytorch_keep_what_the_docstring_says(dropout_p: float) -> None:
    q, k = torch.empty(3, 4, 11, 8), torch.empty(3, 2, 23, 8)
    seeds = torch.tensor([-(2**63), 2**33 + 5, 977])
    meaning = scores.kept(q.double(), k.double(), dropout_p, seeds)
    kernels = dropout_kernels.kept_factor(q, k, dropout_p, seeds)
    assert meaning is not None and kernels is not None and meaning.dtype == torch.float64
    wanted = torch.tensor(
        [
            [[[not is_dropped(dropout_p, int(s), h, i, j) for j in range(23)] for i in range(11)] for h in range(4)]
            for s in seeds
        ]
    )
    assert torch.equal(meaning, wanted.double() / (1 - dropout_p))
    assert torch.equal(kernels, (wanted.double() / (1 - dropout_p)).float())


def _is_binomial(count: int, of: int, share: float) -> bool:
    """Within 5 standard deviations: a right generator fails once in two million."""
    return abs(count - of * share) <= 5 * math.sqrt(of * share * (1 - share))


def test_the_rate_is_the_one_asked_for_and_neighbours_are_independent() -> None:
    q, k, seeds = torch.empty(4, 4, 128, 1), torch.empty(4, 4, 256, 1), torch.tensor([0, 1, 2**32, -1])
    for p in (0.01, 0.1, 0.5, 0.9):
        kept = dropout_kernels.kept_factor(q, k, p, seeds)
        assert kept is not None
        lost = kept == 0
        assert _is_binomial(int(lost.sum()), lost.numel(), p), p
        for axis in range(4):  # sequences (their seeds differ in one bit, of either half), heads, queries, keys
            for apart in (1, 2, 3) if axis == 3 else (1,):  # the words of one counter are 1 to 3 keys apart
                here, there = (
                    lost.narrow(axis, 0, lost.shape[axis] - apart),
                    lost.narrow(axis, apart, lost.shape[axis] - apart),
                )
                both = int((here & there).sum())
                assert _is_binomial(both, here.numel(), p * p), (p, axis, apart)
    seen = dropout_kernels._philox(torch.tensor(5), torch.arange(4096), torch.tensor(3), torch.tensor(9))
    for bit in range(32):
        assert _is_binomial(int((seen >> bit & 1).sum()), seen.numel(), 0.5), bit


def test_forward_and_backward_drop_the_same_under_autograd() -> None:
    q, k, v = (torch.randn(2, n, 40, 32, requires_grad=True) for n in (4, 2, 2))
    seeds = torch.randint(2**63 - 1, (2,))
    with ferryman.trace() as traced:
        out, lse = ops.attention(q, k, v, causal=True, dropout_p=0.3, dropout_seed=seeds, return_lse=True)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert set(traced.calls) == {("attention", "torch.composed"), ("attention_backward", "torch.composed")}
    wide = [x.detach().double() for x in (torch.ones_like(out), q, k, v, out, lse)]
    args = (wide[0], None, *wide[1:], True, None, None, 0.0, None, None, None, None, False, 0.3, seeds)
    right = BACKWARD.body(*args)
    for got, want, terms in zip(grads, right, BACKWARD.limits.bound(args, right), strict=False):
        room = U32 * (2 * terms["accumulate"] + want.abs() + 8 * terms.get("storage", torch.zeros(())))
        assert bool(((got.double() - want).abs() <= room + 1e-12).all())


def test_a_sequence_loses_the_same_alone_as_in_any_batch() -> None:
    q = torch.randn(3, 2, 17, 32)
    seeds = torch.tensor([5, 6, 5])
    together = ops.attention(q, q, q, dropout_p=0.5, dropout_seed=seeds)
    for i in range(3):
        own = q[i : i + 1]
        assert torch.equal(ops.attention(own, own, own, dropout_p=0.5, dropout_seed=seeds[i : i + 1])[0], together[i])
    assert torch.equal(together, ops.attention(q, q, q, dropout_p=0.5, dropout_seed=seeds))
    assert not torch.equal(together, ops.attention(q, q, q, dropout_p=0.5, dropout_seed=seeds + 1))
    plain = ops.attention(q, q, q)
    assert torch.equal(ops.attention(q, q, q, dropout_seed=seeds), plain)  # a seed alone is no dropout
    spread = torch.stack((seeds, seeds + 1), 1)[:, 0]  # strided
    assert torch.equal(ops.attention(q, q, q, dropout_p=0.5, dropout_seed=spread), together)


SEED = torch.zeros(2, dtype=torch.int64)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "all is dropped": ({"dropout_p": 1.0, "dropout_seed": SEED}, "less than 1"),
    "below 0": ({"dropout_p": -0.1, "dropout_seed": SEED}, "at least 0"),
    "no number": ({"dropout_p": math.nan, "dropout_seed": SEED}, "at least 0"),
    "no seed": ({"dropout_p": 0.1}, "dropout_seed"),
    "another dtype": ({"dropout_p": 0.1, "dropout_seed": SEED.int()}, "torch.int64"),
    "one for all": ({"dropout_p": 0.1, "dropout_seed": SEED[:1]}, "(2,)"),
    "a Python number": ({"dropout_p": 0.1, "dropout_seed": 7}, "torch.Tensor"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("warm", [False, True])
def test_wrong_arguments_are_said(what: str, warm: bool) -> None:
    q, (more, said) = torch.randn(2, 2, 5, 16), WRONG[what]
    if warm:
        for _ in range(3):
            ops.attention(q, q, q, dropout_p=0.1, dropout_seed=SEED)
    with pytest.raises(ArgumentError) as error:
        ops.attention(q, q, q, **more)
    assert said in str(error.value)


def test_kernels_with_another_generator_are_not_chosen() -> None:
    """On every profile with accelerators: PyTorch's kernels and Hopper's refuse, and what serves is not composed."""
    q = torch.empty(2, 8, 256, 128, dtype=torch.bfloat16, device="meta")
    few = torch.empty(2, 8, 1, 128, dtype=torch.bfloat16, device="meta")
    seeds = torch.empty(2, dtype=torch.int64, device="meta")
    for device in ("h200", "a100-sxm-80", "mi300x"):
        explanation = ferryman.explain("attention", q, q, q, dropout_p=0.1, dropout_seed=seeds, device=device)
        takes = {row.implementation for row in explanation.rows if not any("dropout_p" in why for why in row.reasons)}
        masked = {"triton.masked", "triton.masked_decode"}  # for calls with a mask
        assert takes == {"torch.composed", "triton.decode", "triton.tiled", "triton.packed", "definition"} | masked
        assert explanation.chosen == "triton.tiled", (device, explanation.chosen)
        decoding = ferryman.explain("attention", few, q, q, dropout_p=0.1, dropout_seed=seeds, device=device)
        assert str(decoding.chosen).startswith("triton."), device
        args = (q, None, q, q, q, q, q[..., 0].float())
        back = ferryman.explain("attention_backward", *args, causal=True, **_REST, dropout_seed=seeds, device=device)
        assert back.chosen == "triton.tiled"


_REST: dict[str, Any] = {"scale": None, "window": None, "softcap": 0.0, "mask": None, "dropout_p": 0.1}


def test_regions_and_saved_calls_of_before_hold() -> None:
    q = torch.randn(1, 2, 5, 16)
    before = torch.ops.ferryman.attention(q, q, q, True, None, None, 0.0, None)
    now = torch.ops.ferryman.attention(q, q, q, True, None, None, 0.0, None, None, None, None, 0.0, None)
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    plain = (q, q, q, True, None, None, 0.0, None, None, None, None)
    region = lockfile.region(OP, (*plain, 0.0, None))
    assert "dropout" not in region
    assert lockfile.region(OP, (*plain, 0.1, SEED)) == f"{region} dropout_p=x dropout_seed=int64[2]c"


def test_compiled_in_one_graph_with_a_seed_that_is_drawn_in_it() -> None:
    q = torch.randn(2, 2, 8, 16, requires_grad=True)

    def call(q: Tensor) -> Tensor:
        seeds = torch.randint(2**63 - 1, (2,), device=q.device)
        out: Tensor = ops.attention(q, q, q, causal=True, dropout_p=0.5, dropout_seed=seeds)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for run in (call, compiled, compiled):
        torch.manual_seed(4)
        out = run(q)
        results.append((out, *torch.autograd.grad(out.square().sum(), q)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert not torch.equal(compiled(q), results[0][0])  # the next seed


def test_vmap_and_meta() -> None:
    q = torch.randn(3, 2, 2, 8, 16)
    seeds = torch.arange(6).view(3, 2)
    mapped = torch.vmap(lambda x, s: ops.attention(x, x, x, dropout_p=0.5, dropout_seed=s))(q, seeds)
    for one, x, s in zip(mapped, q, seeds, strict=True):
        assert torch.equal(one, ops.attention(x, x, x, dropout_p=0.5, dropout_seed=s))
    there = q[0].to("meta")
    out = ops.attention(there, there, there, dropout_p=0.5, dropout_seed=seeds[0].to("meta"))
    assert out.shape == q[0].shape and out.device.type == "meta"


INTERPRETED = """
import json
import torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
found = {}
for op, line, names in (
    ("attention", "triton.tiled", ("dropout", "dropout_causal", "dropout_nonfinite", "exact_dropout")),
    ("attention", "triton.packed", ("dropout", "dropout_causal", "dropout_nonfinite", "exact_dropout")),
    ("attention", "triton.decode", ("dropout_decode",)),
    ("attention_backward", "triton.tiled", ("dropout_causal", "dropout_most", "exact_dropout")),
):
    known, one = registry.primitive(op), registry.implementation(op, line)
    for case in cases_of(known):
        if case.name in names:
            cell = check_cell(known, one, case, torch.float16, simulate=profile("h200"), times=1)
            found[f"{op} {line} {case.name}"] = (cell.verdict, cell.reason)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_triton_kernels_drop_the_same_interpreted_with_a_hoppers_tiles(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 12 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts

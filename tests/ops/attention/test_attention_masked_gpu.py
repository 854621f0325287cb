"""Attention over the blocks that a mask leaves, and FlexAttention, on a device: right, captured once and replayed with
other masks, and never compiled by a call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.device_profiles import detect
from ferryman.dispatch import registry, select
from ferryman.errors import CaptureError, Unsupported
from ferryman.ops.attention import flex_kernels, flex_variants
from ferryman.porting.inputs.cases import cases_of
from ferryman.testing import assert_parity
from tests.ops.attention.test_attention_masked import MASKS, OP, _arguments, _lines

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _on_device(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_any_mask_is_right(name: str, dtype: torch.dtype) -> None:
    for line in _lines(name):
        assert_parity("attention", line, _on_device(_arguments(name, dtype)))


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_long_masks_are_right(dim: int) -> None:
    q = torch.randn(2, 8, 1030, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 2051, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = torch.rand(2, 1, 1030, 2051, device="cuda") < 0.9
    mask[0, :, :, 300:900], mask[1, :, :700, 64:] = False, False
    assert_parity("attention", "triton.masked", {"q": q, "k": k, "v": v, "mask": mask})


def _calls(queries: int, keys: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    q = torch.randn(4, 8, queries, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(4, 2, keys, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    j = torch.arange(keys, device="cuda")
    masks = [
        torch.rand(4, 1, queries, keys, device="cuda") < 0.5,
        (j < 130).expand(4, 1, queries, keys).contiguous(),
        torch.zeros(4, 1, queries, keys, dtype=torch.bool, device="cuda"),
        torch.ones(4, 1, queries, keys, dtype=torch.bool, device="cuda"),
    ]
    return {"q": q, "k": k, "v": v}, masks


def _captured_and_replayed(line: str, queries: int, keys: int) -> None:
    given, masks = _calls(queries, keys)
    mask = masks[0].clone()
    with ferryman.use(attention=line), torch.no_grad():
        wanted = [[x.clone() for x in ops.attention(**given, mask=m, return_lse=True)] for m in masks]
        ops.attention(**given, mask=mask, return_lse=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = ops.attention(**given, mask=mask, return_lse=True)
    for each, result in zip(reversed(masks), reversed(wanted), strict=True):
        mask.copy_(each)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(outputs[0], result[0]) and torch.equal(outputs[1], result[1])
    assert bool((wanted[2][0] == 0).all()) and bool((wanted[2][1] == -math.inf).all())


HOPPER = pytest.param(
    "triton.hopper",
    300,
    marks=pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper"
    ),
)


@pytest.mark.parametrize(("line", "queries"), [("triton.masked", 300), ("triton.masked_decode", 1), HOPPER])
def test_it_is_captured_once_and_replayed_with_other_masks(line: str, queries: int) -> None:
    _captured_and_replayed(line, queries, 1111)


def test_a_replay_of_many_calls_is_the_launchers_own() -> None:
    """From the 64th call on the launches are repeated without the launcher: contents are still read each time."""
    given, masks = _calls(200, 700)
    with ferryman.use(attention="triton.masked"), torch.no_grad():
        first = [ops.attention(**given, mask=m).clone() for m in masks]
        for _ in range(40):
            for mask, wanted in zip(masks, first, strict=True):
                assert torch.equal(ops.attention(**given, mask=mask), wanted)


# ------------------------------------------------------------------------------------------------------- FlexAttention


@pytest.fixture(autouse=True)
def _nothing_prepared() -> Any:
    yield
    flex_variants.forget()
    flex_kernels.forget()
    ferryman.reload()


def _flex_cases() -> list[str]:
    """The op's small cases that flex's conditions allow in 16 bits, dropout and narrow heads apart."""
    names = []
    for case in cases_of(OP):
        args = case.args
        narrow = min(args["q"].shape[3], args["v"].shape[3]) < 16
        if (
            case.tier == "small"
            and not args.get("dropout_p")
            and not narrow
            and args["k"].shape[2]
            and args["q"].shape[2]
        ):
            names.append(case.name)
    return names


@pytest.mark.parametrize("name", _flex_cases())
def test_flex_is_right(name: str) -> None:
    assert_parity("attention", "torch.flex", name, dtype=torch.bfloat16)  # which prepares what it names


def test_flex_serves_after_it_was_prepared_and_never_compiles_in_a_call() -> None:
    given, masks = _calls(300, 700)
    with ferryman.use(attention="torch.flex"), torch.no_grad():
        with pytest.raises(Unsupported, match="required: compiled for such calls before"):
            ops.attention(**given, mask=masks[0])
        assert ferryman.prepare(ops.attention, **given, mask=masks[0]) == ("torch.flex",)
        wanted = ops.attention(**given, mask=masks[0])
        with torch.compiler.set_stance("fail_on_recompile"):  # Dynamo is not asked
            other, others = _calls(513, 1290)
            try:
                longer = ops.attention(**other, mask=others[0])
            except Unsupported as error:  # lengths that its compilation fixed are refused in words
                assert "compiled for such calls before" in str(error)
            else:
                _near(longer, other, others[0])
    _near(wanted, given, masks[0])


@pytest.mark.parametrize("queries, keys", [(300, 1200), (129, 5000)])
def test_flex_prepared_with_as_many_queries_as_keys_is_right_with_others(queries: int, keys: int) -> None:
    """A size that equals another one in the call that is compiled is not that one in later calls."""
    for asked in ((300, 300), (queries, keys)):
        q, k = (torch.randn(1, 4, n, 64, dtype=torch.bfloat16, device="cuda") for n in asked)
        ferryman.prepare(ops.attention, q, k, k, causal=True)
        with ferryman.use(attention="torch.flex"), torch.no_grad():
            got = ops.attention(q, k, k, causal=True)
        exact = OP.body(q.double(), k.double(), k.double(), True, None, None, 0.0, None)[0]
        assert float((got.double() - exact).norm()) < 2.0**-7 * float(exact.norm())


def _near(got: Tensor, given: dict[str, Tensor], mask: Tensor) -> None:
    exact = OP.body(*(x.double() for x in given.values()), False, None, None, 0.0, mask)[0]
    # P and the output are rounded to 8 bits each, of sums whose terms have unit variance
    assert float((got.double() - exact).norm()) < 2.0**-7 * float(exact.norm())


def test_flex_is_captured_and_replayed_with_other_masks() -> None:
    given, masks = _calls(300, 1111)
    ferryman.prepare(ops.attention, **given, mask=masks[0])
    _captured_and_replayed("torch.flex", 300, 1111)


def test_flex_is_not_prepared_under_capture() -> None:
    given, masks = _calls(300, 700)
    torch.cuda.synchronize()
    graph, raised = torch.cuda.CUDAGraph(), False
    with torch.cuda.graph(graph):
        try:
            ferryman.prepare(ops.attention, **given, mask=masks[0])
        except CaptureError:
            raised = True
    assert raised


def test_bench_times_flex_once_it_is_compiled() -> None:
    from ferryman.porting.bench import runner

    device = torch.device("cuda")
    profile = detect(device)
    plan = runner.Plan(device, profile, torch.bfloat16, (), (), (), 0)
    given, masks = _calls(300, 700)
    args = tuple(
        {**dict.fromkeys(OP.names), **OP.added, "causal": False, "softcap": 0.0, **given, "mask": masks[0]}.values()
    )
    contenders = {c.name: c for c in runner.implementations(plan, OP, args)}
    assert contenders["torch.flex"].skipped is None
    assert (
        select.refusals(registry.implementation("attention", "torch.flex"), select.View.of(OP, args, profile), profile)
        == []
    )

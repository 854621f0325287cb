"""FlexAttention as an implementation: what it reads from tensors is the op's meaning; it serves what was prepared, and
says so where nothing was. On a CPU it gives no log-sum-exp once it is compiled, so that there it serves no call: the
output is judged compiled, both results as PyTorch composes the same function."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.device_profiles import profile
from ferryman.dispatch import preparing, registry, select
from ferryman.errors import ArgumentError, CompileError, Unsupported
from ferryman.ops.attention import flex_kernels, flex_variants
from ferryman.ops.attention.sinks_kernels import with_sinks
from ferryman.porting.inputs.cases import cases_of
from ferryman.testing import assert_parity
from tests.bounded import U32

OP = registry.primitive("attention")
LINE = registry.implementation("attention", "torch.flex")
_ROUNDED = ("p", "o")


@pytest.fixture(autouse=True)
def _nothing_prepared() -> Iterator[None]:
    yield
    flex_variants.forget()
    flex_kernels.forget()
    ferryman.reload()


def _composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """The functions that Inductor compiles, called as they are."""
    variant = flex_variants.variant_of(q, k, v, causal, window, softcap, mask, key_range, chunk)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    given = flex_kernels._given(variant, q, k, v, factor, window, softcap, mask, key_range, chunk)
    seen, rest = flex_kernels._split(given)
    rest = tuple(None if x is None else x.detach() for x in rest)  # it has no backward on a CPU
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # it says that it is not compiled
        out, lse = flex_kernels._attend(variant)(*rest, *flex_kernels._tables(variant)(*seen))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return with_sinks(out, lse.float().contiguous(), sinks)


QUICK = ("longer_queries", "softcap_mask", "sinks_window", "chunk_range")


def _cases() -> list[Any]:
    # composed by PyTorch, the scores of infinite queries differ; on a device all gates run
    return [
        pytest.param(case.name, marks=[] if case.name in QUICK else [pytest.mark.slow])
        for case in cases_of(OP)
        if case.tier == "small"
        and case.args.get("dropout_seed") is None
        and "nonfinite" not in case.name
        and case.args["k"].shape[2]
        and case.args["q"].shape[2]
    ]


@pytest.mark.parametrize("name", _cases())
def test_what_it_reads_from_tensors_is_the_ops_meaning(name: str) -> None:
    assert_parity("attention", _composed, name, dtype=torch.float32, roundings=_ROUNDED)


# what a call has, and whether it is compiled for any lengths
COMPILED = {
    "causal": ({"causal": True}, True),
    "window, chunk": ({"causal": True, "window": 50, "chunk": 64}, True),
    "softcap": ({"softcap": 5.0}, True),
    "mask": ({"mask": "bool"}, False),
    "bias": ({"mask": "float"}, False),
    "range": ({"causal": True, "key_range": True}, False),
}


def _call(options: dict[str, Any], queries: int, keys: int) -> tuple[Any, ...]:
    q = torch.randn(2, queries, 4, 32).transpose(1, 2)
    k, v = torch.randn(2, 2, keys, 32), torch.randn(2, 2, keys, 32)
    call_options = dict(options)
    if "mask" in call_options:
        seen = torch.rand(2, 1, queries, keys) < 0.6
        call_options["mask"] = seen if call_options["mask"] == "bool" else torch.randn(1, 4, queries, keys)
    if "key_range" in call_options:
        call_options["key_range"] = torch.tensor([[0, keys], [20, keys - 30]], dtype=torch.int32)
    given = {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": None, **OP.added, **call_options}
    return (q, k, v, *(given[name] for name in OP.names[3:]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_function_is_right_with_other_contents_and_lengths(name: str) -> None:
    """By the op's own bound of the output. Inductor's C++ of masks fails with symbolic strides: those are static."""
    options, dynamic = COMPILED[name]
    first = _call(options, 200, 330)
    compiled: Any = None
    for queries, keys, other in ((200, 330, options), (200, 330, options), *([(317, 450, _moved(options))] * dynamic)):
        args = first if compiled is None else _call(other, queries, keys)
        variant = flex_variants.variant_of(*_asked(args))
        given = flex_kernels._given(variant, *args[:3], 32**-0.5, args[5], args[6], args[7], args[9], args[10])
        if compiled is None:
            compiled = flex_kernels.Compiled(variant, given, with_lse=False, dynamic=dynamic)
        assert compiled.serves(*(None if x is None else x.to("meta") for x in given))
        got = compiled(*given)
        got = got[0] if isinstance(got, (tuple, list)) else got
        _within_bound(args, got)
    shorter = _call(options, 60, 330)  # fewer queries than a block have another kernel
    assert flex_variants.variant_of(*_asked(shorter)) != variant


def test_a_row_of_nan_scores_has_no_log_sum_exp_of_minus_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlexAttention's kernel on a GPU leaves them: rows 0 to 3 of NaN scores, that see nothing, that see nothing
    beside values of NaN, and with values of NaN alone."""
    from torch.nn.attention import flex_attention as library

    args = _call({"causal": True}, 4, 4)
    asked = _asked(args)
    variant = flex_variants.variant_of(*asked)
    given = flex_kernels._given(variant, *args[:3], 0.2, None, 0.0, None, None, None)
    seen, rest = flex_kernels._split(given)
    lo, hi, *lists = flex_kernels._tables(variant)(*seen)
    lo[:, 1:3], hi[:, 1:3] = 4, 4
    out, lse = torch.ones(2, 4, 4, 32), torch.zeros(2, 4, 4)
    out[:, :, 0], out[:, :, 1], out[:, :, 2:] = torch.nan, 0.0, torch.nan
    lse[:, :, :3] = -torch.inf
    monkeypatch.setattr(library, "flex_attention", lambda *args, **options: (out, SimpleNamespace(lse=lse)))
    got, sums = flex_kernels._attend(variant)(*rest, lo, hi, *lists)
    assert got is out
    wanted = torch.tensor([torch.nan, -torch.inf, -torch.inf, 0.0]).expand(2, 4, 4)
    assert torch.equal(sums.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


def _within_bound(args: tuple[Any, ...], out: Tensor) -> None:
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    exact = OP.body(*wide)
    bound = OP.limits.bound(wide, exact)[0]
    limit = U32 * bound["accumulate"] + bound["absolute"]
    assert bool(((out.double() - exact[0]).abs() <= limit).all())


def _moved(options: dict[str, Any]) -> dict[str, Any]:
    """Other numbers of the same kinds."""
    return {n: x + 7 if type(x) is int else x * 2 if type(x) is float else x for n, x in options.items()}


def _asked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, causal, _, window, softcap, mask, _, key_range, chunk, *_ = args
    return q, k, v, causal, window, softcap, mask, key_range, chunk


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_variants_of_other_heads_and_widths_share_the_tables_of_what_a_query_sees() -> None:
    def compiled(heads: int, width: int, queries: int, **options: Any) -> flex_kernels.Compiled:
        q, k = torch.randn(2, heads, queries, width), torch.randn(2, heads, 330, width)
        args = _bound(q, k, **options)
        variant = flex_variants.variant_of(*_asked(args))
        given = flex_kernels._given(variant, q, k, k, 0.2, args[5], 0.0, None, None, None)
        attended = flex_kernels.Compiled(variant, given, with_lse=False, dynamic=True)
        (got, *_) = attended(*given)
        _within_bound((*args[:4], 0.2, *args[5:]), got)
        return attended

    first = compiled(4, 32, 200, causal=True)
    assert compiled(6, 16, 160, causal=True).tables is first.tables
    assert compiled(4, 32, 200, causal=True, window=40).tables is not first.tables


@pytest.mark.slow
def test_tables_that_were_made_with_as_many_queries_as_keys_are_right_with_others() -> None:
    """A size that equals another one in the call that is compiled is not that one in later calls."""

    def seen(queries: int, keys: int) -> tuple[flex_variants.Variant, tuple[Tensor | None, ...]]:
        args = _call({"causal": True}, queries, keys)
        variant = flex_variants.variant_of(*_asked(args))
        given = flex_kernels._given(variant, *args[:3], 0.2, None, 0.0, None, None, None)
        return variant, flex_kernels._split(given)[0]

    variant, given = seen(300, 300)
    tables = flex_kernels._Captured(flex_kernels._tables(variant), given, True)
    for queries, keys in ((300, 300), (300, 1200), (970, 10737), (129, 130)):
        other, given = seen(queries, keys)
        assert other == variant and tables.serves(*given)
        for got, wanted in zip(tables(*given), flex_kernels._tables(variant)(*given), strict=True):
            assert torch.equal(got, wanted)


def _bound(q: Tensor, k: Tensor, **options: Any) -> tuple[Any, ...]:
    given = {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": None, **OP.added, **options}
    return (q, k, k, *(given[name] for name in OP.names[3:]))


@pytest.mark.slow
def test_sizes_beyond_the_guards_are_refused() -> None:
    args = _call({"causal": True}, 200, 330)
    variant = flex_variants.variant_of(*_asked(args))
    given = flex_kernels._given(variant, *args[:3], 0.2, None, 0.0, None, None, None)
    compiled = flex_kernels.Compiled(variant, given, with_lse=False)
    narrow = [None if x is None else x.to("meta") for x in given]
    narrow[0] = torch.empty(2, 4, 200, 16, device="meta")
    assert not compiled.serves(*narrow)


# ------------------------------------------------------------------------------------------------ what serves, and when


def _on_h100(**options: Any) -> tuple[Any, ...]:
    q = torch.empty(2, 8, 300, 64, dtype=torch.bfloat16, device="meta")
    given = {"causal": True, "scale": None, "window": None, "softcap": 0.0, "mask": None, **OP.added, **options}
    return (q, q, q, *(given[name] for name in OP.names[3:]))


def test_it_serves_nothing_that_was_not_compiled_and_says_what_to_do() -> None:
    args, here = _on_h100(), profile("h100")
    view = select.View.of(OP, args, here)
    reasons = select.refusals(LINE, view, here, absent=True)
    assert reasons == ["prepared is not compiled; required: compiled for such calls before (ferryman.prepare)"]
    flex_variants.add(flex_variants.variant_of(*_asked(args)), lambda *given: given[0].shape[2] == 300)
    assert select.refusals(LINE, view, here, absent=True) == []
    longer = torch.empty(2, 8, 301, 64, dtype=torch.bfloat16, device="meta")
    other = (longer, *args[1:])
    assert select.refusals(LINE, select.View.of(OP, other, here), here, absent=True) == reasons
    windowed = _on_h100(window=64)
    assert select.refusals(LINE, select.View.of(OP, windowed, here), here, absent=True) == reasons


def test_it_is_asked_for_in_vain_before() -> None:
    q = torch.randn(1, 2, 140, 32)
    with ferryman.use(attention="torch.flex"), pytest.raises(Unsupported, match="required: a device of nvidia or amd"):
        ops.attention(q, q, q)
    dropping = _on_h100(dropout_p=0.1, dropout_seed=torch.empty(2, dtype=torch.int64, device="meta"))
    reasons = select.refusals(LINE, select.View.of(OP, dropping, profile("h100")), profile("h100"), absent=True)
    assert any(why.startswith("dropout_p is 0.1") for why in reasons)


def test_untuned_dispatch_does_not_choose_it_even_where_it_is_compiled() -> None:
    args, here = _on_h100(window=64), profile("h100")
    flex_variants.add(flex_variants.variant_of(*_asked(args)), lambda *given: True)
    decision = select.select(OP, args, here, select.State({}, False), absent=True)
    assert decision.implementation.name != "torch.flex"
    asked = select.select(OP, args, here, select.State({"attention": ("torch.flex",)}, False), absent=True)
    assert asked.implementation.name == "torch.flex"


def test_a_launcher_without_its_compilation_raises_and_compiles_nothing() -> None:
    args = _call({"causal": True}, 200, 330)
    target = select.target_of(profile("cpu"))
    with pytest.raises(CompileError, match="nothing is compiled in a call; required: ferryman.prepare"):
        flex_kernels.attention(*args, target)


def test_prepare_leaves_out_what_cannot_serve_and_refuses_tensors_without_data() -> None:
    q = torch.randn(1, 2, 140, 32)
    assert ferryman.prepare(ops.attention, q, q, q, causal=True) == ()
    assert ferryman.prepare("rms_norm", torch.randn(3, 8)) == ()
    with pytest.raises(ArgumentError, match="tensors without data"):
        ferryman.prepare(ops.attention, *(x.to("meta") for x in (q, q, q)))


def test_prepare_compiles_once_and_lets_dispatch_choose_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that stands in for Inductor, and the CPU for a device that it serves."""
    variants: list[Any] = []

    class Standing:
        def __init__(self, variant: Any, given: Any) -> None:
            variants.append(variant)

        def serves(self, *given: Any) -> bool:
            return True

        def __call__(self, *given: Any) -> Any:
            return None

    served = tuple(c for c in LINE.when if "profile.vendor" not in c.facts and "q.dtype" not in c.facts)
    import dataclasses

    line = dataclasses.replace(LINE, when=served)
    monkeypatch.setattr(flex_kernels, "Compiled", Standing)
    monkeypatch.setattr(registry, "implementations", lambda op: (line,))
    args = _call({"causal": True}, 200, 330)
    before = preparing.plan.generation
    ready_lines = preparing.ready(OP, args, profile("cpu"))
    assert ready_lines == (("torch.flex",), {}) and len(variants) == 1 and preparing.plan.generation == before + 1
    assert preparing.ready(OP, args, profile("cpu"))[0] == ("torch.flex",) and len(variants) == 1
    assert preparing.plan.generation == before + 1
    assert preparing.ready(OP, args, profile("cpu"), ["triton"]) == ((), {})

    def broken(variant: Any, given: Any) -> Any:
        raise RuntimeError("no such template")

    monkeypatch.setattr(flex_kernels, "Compiled", broken)
    _, failed = preparing.ready(OP, _call({"window": 9}, 200, 330), profile("cpu"))
    assert "no such template" in str(failed["torch.flex"])


def test_it_is_judged_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_cell` prepares where it is told to, for the case and for the calls of further gates; else it refuses."""
    from ferryman.porting.judging import parity

    asked: list[tuple[int, ...]] = []

    def ready(op: Any, args: Any, profile: Any, names: Any) -> Any:
        asked.append(tuple(args[0].shape))
        return (), {"torch.flex": CompileError("torch", "attention", "cpu", "no template")}

    monkeypatch.setattr(parity.preparing, "ready", ready)
    case = next(case for case in cases_of(OP) if case.name == "gqa")
    cell = parity.check_cell(OP, LINE, case, torch.float32, ahead=True)
    assert cell.verdict == "QUARANTINED" and "no template" in str(cell.reason) and asked == [(2, 6, 17, 64)]
    assert parity.check_cell(OP, LINE, case, torch.float32).verdict == "UNIMPLEMENTED" and len(asked) == 1

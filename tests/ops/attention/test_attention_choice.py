"""Which line serves a call of attention that nobody measured, and what PyTorch's kernels are handed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from ferryman.device_profiles import profile
from ferryman.dispatch import registry, select
from ferryman.ops.attention import arguments, flex_variants, torch_kernels, traced_forms, window_kernels
from ferryman.porting.bench import grid
from tests.bounded import judged

OP = registry.primitive("attention")


@pytest.mark.parametrize(
    ("name", "chosen", "source"),
    [
        # few tiles and many keys: FlashAttention divides the keys
        ("B9 H32/4 Q73 K4701 D80 causal range", "triton.hopper", "menu"),
        ("B6 H32/4 Q8 K5576 D112 causal range", "triton.packed", "menu"),
        ("B4 H16/4 Q68 K68 D128 causal range", "triton.packed", "menu"),
        ("B15 H2/2 Q73 K11976 D128 causal chunk256", "triton.tiled", "menu"),
        ("B5 H64/4 Q30 K2748 D96 causal chunk256", "triton.packed", "menu"),
        ("B3 H64/8 Q2425 K2425 D64 causal dropout", "triton.tiled", "profile"),
        ("B20 H20/20 Q1542 K1542 D80 dropout", "triton.packed", "menu"),
        ("B3 H20/20 Q2809 K2809 D32 sinks", "triton.packed", "menu"),
        ("B2 H14/2 Q43 K2537 D96 sinks", "triton.packed", "menu"),
        ("B9 H1/1 Q39 K10364 D192", "triton.packed", "menu"),
        ("B2 H2/1 Q188 K9756 D112", "triton.packed", "menu"),
        ("B30 H2/1 Q113 K3303 D160", "torch.cudnn", "menu"),
        ("B1 H8/1 Q346 K346 D256", "torch.cudnn", "menu"),
        ("B1 H2/1 Q507 K507 D256 causal", "torch.flash", "menu"),
        ("B1 H1/1 Q1020 K1020 D64 causal", "torch.flash", "menu"),
        # little work of wide heads, and much before each query
        ("B2 H1/1 Q100 K100 D192 causal", "torch.cudnn", "menu"),
        ("B3 H2/1 Q82 K1234 D128 keys", "triton.hopper", "profile"),
        ("B3 H8/8 Q2 K4096 D96", "triton.decode", "profile"),
        ("B3 H1/1 Q155 K9663 D128", "triton.packed", "menu"),
        # few queries, whose keys a program of Triton's reads in turn
        ("B4 H4/1 Q10 K652 D128 causal", "triton.packed", "menu"),
        ("B1 H28/4 Q3 K152 D160 causal", "torch.flash", "menu"),
        ("B12 H2/2 Q40 K182 D80", "triton.tiled", "menu"),
        ("B4 H2/2 Q263 K452 D128 sinks", "triton.tiled", "menu"),
        # little work in a narrow window, and beside Hopper's kernel
        ("B4 H4/4 Q1275 K1275 D64 causal window64", "torch.flash", "menu"),
        ("B1 H8/8 Q2046 K2046 D128 causal window128", "triton.hopper", "profile"),
        ("B1 H16/8 Q442 K442 D128 causal", "torch.cudnn", "menu"),
        ("B2 H16/2 Q1732 K1732 D128 causal", "triton.hopper", "profile"),
        ("B2 H2/1 Q4056 K4056 D64 causal chunk256", "triton.tiled", "menu"),
        # a token at head sizes that 16 does not divide
        ("B2 H256/16 Q1 K2935 D72 causal window1024", "torch.cudnn_decode", "menu"),
        ("B3 H8/8 Q1 K16287 D40 causal", "torch.cudnn_decode", "menu"),
        ("B2 H4/4 Q1 K305 D40 causal", "torch.cudnn_decode", "menu"),
        # a token that sees every key
        ("B4 H32/8 Q1 K12941 D112 causal bias", "torch.cudnn_decode", "menu"),
        ("B1 H16/1 Q1 K6557 D128 causal bias", "triton.decode", "profile"),
        ("B12 H32/8 Q1 K323 D64 causal window1024", "torch.cudnn_decode", "menu"),
        ("B1 H128/8 Q1 K13234 D96 causal window512", "triton.decode", "profile"),
        ("B1 H128/16 Q1 K4182 D256 causal", "triton.decode", "profile"),
        ("B7 H16/2 Q1 K15376 D112 causal sinks", "triton.decode", "profile"),
        ("B8 H56/8 Q1 K1418 D96 causal window64", "triton.decode", "profile"),
        # little work with a mask
        ("B12 H2/1 Q81 K81 D80 padding", "triton.tiled", "menu"),
        ("B8 H4/1 Q28 K1164 D96 padding", "triton.packed", "menu"),
        ("B1 H16/8 Q393 K393 D40 causal bias", "triton.tiled", "menu"),
        ("B6 H8/8 Q216 K216 D160 padding", "triton.hopper", "profile"),
        # a mask of keys, which Hopper's kernel reads where it has holes
        ("B2 H16/16 Q1260 K1260 D64 keys", "triton.hopper", "profile"),
        ("B2 H16/16 Q1260 K1260 D64 padding", "triton.hopper", "profile"),
        ("B4 H32/8 Q2048 K2048 D128 mask", "triton.hopper", "profile"),
        ("B2 H2/1 Q4056 K4056 D64 causal chunk256", "triton.tiled", "menu"),
        ("B1 H16/4 Q10371 K10371 D128 causal chunk2048", "triton.hopper", "menu"),
        ("B9 H32/8 Q439 K439 D112 causal sinks", "triton.hopper", "profile"),
        ("B5 H64/16 Q1 K7102 D72 causal", "triton.decode", "profile"),
        ("B3 H16/4 Q1 K4228 D72 causal", "torch.cudnn_decode", "menu"),
        ("B4 H4/4 Q150 K150 D64 keys", "triton.tiled", "menu"),
        # a window, of which little work is left to smaller tiles
        ("B1 H8/8 Q400 K400 D64 causal window128", "triton.tiled", "menu"),
        ("B2 H64/8 Q4096 K4096 D64 causal window128", "triton.hopper", "profile"),
        ("B4 H128/16 Q45 K291 D192 causal bias", "triton.tiled", "menu"),
        ("B1 H1/1 Q8171 K8171 D72 causal bias", "triton.hopper", "profile"),
        ("B2 H16/16 Q297 K297 D128 causal sinks", "triton.tiled", "menu"),
        ("B1 H1/1 Q103 K103 D96 causal", "triton.tiled", "menu"),
        ("B23 H112/16 Q1 K534 D128 causal", "torch.cudnn_decode", "menu"),
        ("B14 H16/2 Q1 K2829 D112 causal", "torch.cudnn_decode", "menu"),
        ("B5 H7/1 Q301 K301 D256 padding", "triton.hopper", "profile"),
        ("B5 H16/2 Q997 K2080 D128 bias", "triton.hopper", "profile"),
        # sinks and float masks where Hopper's kernel has them
        ("B2 H128/16 Q263 K263 D128 causal sinks", "triton.hopper", "profile"),
        ("B2 H16/16 Q183 K183 D64 causal sinks", "triton.tiled", "menu"),
        ("B16 H12/12 Q559 K559 D64 bias", "triton.hopper", "profile"),
        ("B8 H32/8 Q17 K4096 D128 padding", "triton.masked", "menu"),
        # what a mask of PyTorch's would have to say
        ("B1 H8/4 Q153 K153 D64 causal chunk128", "triton.tiled", "menu"),
        # a window and chunks of all keys are none
        ("B24 H28/4 Q1033 K1033 D128 causal chunk8192", "triton.hopper", "profile"),
        ("B4 H32/8 Q2048 K2048 D128 causal window2048", "triton.hopper", "profile"),
        ("B4 H32/8 Q2048 K2048 D128 causal window2047", "triton.hopper", "profile"),
        ("B4 H32/8 Q2048 K2048 D96 causal window2047", "triton.hopper", "profile"),
        ("B2 H32/8 Q4096 K4096 D128 causal chunk1024", "triton.hopper", "menu"),
        ("B1 H16/4 Q300 K300 D128 chunk100", "triton.tiled", "menu"),
        ("B2 H32/8 Q4096 K4096 D96 causal chunk8192", "triton.hopper", "profile"),
        ("B3 H1/1 Q267 K267 D160 causal range", "triton.hopper", "menu"),
        ("B8 H2/2 Q10138 K10138 D128 causal range", "triton.hopper", "menu"),
        ("B2 H16/16 Q183 K183 D64 causal range", "triton.tiled", "menu"),
        ("B4 H32/8 Q2048 K2048 D128 causal range", "triton.hopper", "menu"),
        ("B8 H2/2 Q10138 K10138 D96 causal range", "triton.hopper", "menu"),
        ("B3 H7/1 Q113 K113 D256 causal sinks", "triton.hopper", "profile"),
    ],
)
def test_the_choice_on_an_h100(name: str, chosen: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of these cells, or of cells beside them, stand in benchmarks/results/h100, of packed rows in h200."""
    monkeypatch.setenv("FERRYMAN_LOCKFILE", "none")
    args = grid.on_meta(OP, registry.evidence(OP).named(name), torch.bfloat16)
    monkeypatch.setattr(select.cost, "knows", lambda op, here: False)
    decision = select.select(OP, args, profile("h100"), select.State({}, False), absent=True)
    assert (decision.implementation.name, decision.source) == (chosen, source)


@pytest.mark.parametrize(
    ("name", "chosen", "source"),
    [
        ("B14 H16/16 Q80 K80 D72 causal bias", "torch.cudnn_masked", "menu"),
        ("B14 H112/16 Q317 K98 D40 mask", "torch.cudnn_masked", "menu"),
        ("B29 H128/8 Q111 K163 D112 padding", "torch.cudnn_masked", "menu"),
        ("B25 H8/2 Q3 K2157 D72 causal bias", "triton.decode", "profile"),
        ("B2 H56/8 Q564 K564 D64 mask", "torch.cudnn_masked", "menu"),
        ("B2 H8/8 Q75 K75 D64 causal", "triton.decode", "profile"),
        ("B6 H2/1 Q201 K201 D64 causal", "torch.cudnn", "menu"),
        ("B2 H1/1 Q149 K149 D160 causal", "torch.cudnn", "menu"),
        ("B4 H2/2 Q145 K145 D128 causal window4096", "triton.tiled", "menu"),
        ("B4 H16/16 Q99 K201 D160", "torch.cudnn", "profile"),
        ("B2 H2/2 Q20 K20 D72 causal", "triton.decode", "profile"),
        ("B2 H4/4 Q27 K314 D72", "triton.decode", "profile"),
        ("B12 H2/1 Q252 K156 D192 keys", "torch.cudnn_masked", "menu"),
        ("B8 H2/2 Q27 K130 D256 padding", "triton.decode", "profile"),
        ("B1 H128/8 Q5 K12103 D128 causal window128", "triton.decode", "profile"),
        ("B2 H28/4 Q180 K180 D128 causal", "triton.hopper", "profile"),
        ("B6 H4/4 Q145 K145 D64 mask", "triton.tiled", "menu"),
        ("B4 H8/8 Q1 K3969 D256 padding", "triton.decode", "profile"),
        ("B2 H16/16 Q1 K7317 D64 causal sinks", "triton.decode", "profile"),
        ("B2 H2/2 Q1 K209 D128 causal", "triton.decode", "profile"),
        ("B15 H2/2 Q109 K109 D128 causal", "torch.cudnn", "menu"),
        ("B4 H2/2 Q87 K87 D80 padding", "triton.tiled", "menu"),
        ("B15 H8/8 Q87 K1616 D72 causal window128", "triton.decode", "profile"),
        ("B4 H64/8 Q23 K3524 D64 causal", "triton.tiled", "menu"),
        ("B1 H14/2 Q26 K1065 D112 causal", "torch.flash", "profile"),
        ("B7 H56/8 Q26 K3788 D128", "torch.cudnn", "profile"),
        ("B8 H16/16 Q100 K900 D96 mask", "torch.cudnn_masked", "menu"),
        ("B7 H64/16 Q18 K2176 D64 causal range", "triton.decode", "profile"),
        ("B9 H7/1 Q9 K1351 D160 causal range", "triton.decode", "profile"),
        ("B9 H7/1 Q10 K1351 D160 causal range", "triton.tiled", "profile"),
        ("B8 H32/16 Q30 K2158 D128 softcap50", "triton.decode", "profile"),
        ("B13 H128/8 Q8 K118 D96 causal sinks", "triton.decode", "profile"),
        ("B2 H16/4 Q50 K220 D192 padding", "torch.cudnn_masked", "menu"),
        ("B2 H16/4 Q50 K220 D128 padding", "triton.tiled", "menu"),
        ("B2 H14/2 Q180 K180 D128 causal", "torch.cudnn", "menu"),  # a diagonal leaves half of the products
    ],
)
def test_the_choice_of_gradients_on_an_h100(
    name: str, chosen: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = registry.primitive("attention_backward")
    args = grid.on_meta(backward, registry.evidence(OP).named(name), torch.bfloat16)
    monkeypatch.setattr(select.cost, "knows", lambda op, here: False)
    decision = select.select(backward, args, profile("h100"), select.State({}, False), absent=True)
    assert (decision.implementation.name, decision.source) == (chosen, source)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("B3 H4/4 Q9535 K9535 D100 causal softcap50", "torch.flex"),
        ("B8 H2/2 Q10138 K10138 D128 causal range", "triton.hopper"),
        ("B8 H2/2 Q10138 K10138 D100 causal range", "torch.flex"),
        ("B1 H128/16 Q3520 K3520 D64 causal range", "triton.hopper"),
        ("B1 H16/16 Q9160 K9160 D64 causal softcap50", "triton.hopper"),
        ("B28 H4/1 Q308 K5703 D160 causal", "triton.hopper"),
        ("B7 H2/1 Q999 K999 D256 causal range", "triton.hopper"),
        ("B2 H4/4 Q1000 K1000 D72 causal softcap50", "triton.hopper"),
        ("B1 H16/16 Q4096 K4096 D128 causal", "triton.hopper"),
    ],
)
def test_what_was_compiled_before_leads_where_there_is_much_to_skip(
    name: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_variants, "has", lambda *args: True)
    args = grid.on_meta(OP, registry.evidence(OP).named(name), torch.bfloat16)
    monkeypatch.setattr(select.cost, "knows", lambda op, here: False)
    monkeypatch.setenv("FERRYMAN_LOCKFILE", "none")
    decision = select.select(OP, args, profile("h100"), select.State({}, False), absent=True)
    assert decision.implementation.name == chosen


def test_a_device_without_thresholds_keeps_its_order() -> None:
    for name in ("B2 H14/2 Q43 K2537 D96 sinks", "B12 H2/1 Q81 K81 D80 padding"):
        args = grid.on_meta(OP, registry.evidence(OP).named(name), torch.bfloat16)
        decision = select.select(OP, args, profile("a100"), select.State({}, False), absent=True)
        assert decision.source == "profile"


@pytest.mark.parametrize("queries", [1, 3, 6, 9])
@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_and_chunks_of_all_keys_are_none(causal: bool, ranged: bool, queries: int) -> None:
    q, k = torch.zeros(36, 1, queries, 8), torch.zeros(36, 1, 6, 8)
    ranges = torch.cartesian_prod(torch.arange(6), torch.arange(1, 7)).int() if ranged else None
    left = set()
    for window, chunk in itertools.product((None, *range(1, 11)), repeat=2):
        fewer = arguments.hiding(q, k, causal, window, ranges, chunk)
        left.add(tuple(span is None for span in fewer))
        asked, least = (
            torch_kernels._out_of_range(queries, 6, causal, w, ranges, c, q.device).expand(36, 1, queries, 6)
            for w, c in ((window, chunk), fewer)
        )
        assert torch.equal(asked, least), (window, chunk, fewer)
        if not ranged and chunk is None and fewer[0] is not None and queries <= 6:
            whole = torch_kernels._out_of_range(queries, 6, causal, None, None, None, q.device)
            windowed = torch_kernels._out_of_range(queries, 6, causal, window, None, None, q.device)
            assert not torch.equal(whole.expand_as(windowed), windowed), f"a window of {window} hides nothing"
    assert (False, False) in left and (True, False) in left


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
@pytest.mark.parametrize("mask", [None, "bool", "float", "of one key"])
def test_a_window_leaves_one_query_the_last_keys(causal: bool, window: int, mask: str | None) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, n, 8, generator=draw) for h, n in ((4, 1), (2, 64), (2, 64)))
    given = torch.randn(2, 1, 1, 1 if mask == "of one key" else 64, generator=draw)
    hidden = {None: None, "bool": given > 0}.get(mask, given)
    rest = (None, None, None, 0.0, None, select.target_of(profile("cpu")))
    whole = torch_kernels.attention_composed(q, k, v, causal, None, window, 0.0, hidden, *rest)
    keys, values, left, cut = window_kernels.last_keys(q, k, v, window, hidden)
    assert left is None and keys.shape[2] == min(64, window)
    last = torch_kernels.attention_composed(q, keys, values, causal, None, None, 0.0, cut, *rest)
    exact, rooms = judged(
        OP, (q, k, v, causal, None, window, 0.0, hidden, *rest[:-1]), [t.dtype for t in whole], torch.float32
    )
    for results in (whole, last):
        for result, wanted, room in zip(results, exact, rooms, strict=True):
            seen = wanted.isfinite()  # of a row that sees nothing the logarithm is -inf
            assert torch.equal(result[~seen].double(), wanted[~seen])
            assert bool(((result.double() - wanted).abs() <= room)[seen].all())
    two = torch.cat([q, q], 2)
    assert window_kernels.last_keys(two, k, v, window, hidden)[2] == window


def test_a_bias_that_the_kernels_can_read_is_not_copied() -> None:
    q, k = torch.zeros(2, 4, 6, 8, dtype=torch.bfloat16), torch.zeros(2, 2, 16, 8, dtype=torch.bfloat16)
    bias = torch.randn(1, 4, 6, 16).bfloat16()
    assert torch_kernels._bias(q, k, bias).data_ptr() == bias.data_ptr()  # type: ignore[union-attr]
    wide = torch.randn(1, 4, 6, 24).bfloat16()
    for other in (bias.float(), wide[..., :15], wide[..., 1:17], bias[..., :1], bias.mT.contiguous().mT, bias > 0):
        keys = k[:, :, :15] if other.shape[-1] == 15 else k
        read = torch_kernels._bias(q, keys, other)
        assert read is not None and read.shape == (2, 4, 6, keys.shape[2]) and read.data_ptr() % 16 == 0
        assert read.stride(-1) == 1 and all(step % 8 == 0 for step in read.stride()[:-1])
        wanted = torch.where(other, 0.0, -math.inf) if other.dtype == torch.bool else other
        assert torch.equal(read, wanted.bfloat16().expand(read.shape))


def test_rows_that_see_nothing_are_cleared_and_rows_of_nan_are_not() -> None:
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 3, 8)
    bias = torch.zeros(1, 1, 4, 3)
    bias[..., 0, :], bias[..., 1, 0], bias[..., 2, :] = -math.inf, -math.inf, -math.inf
    bias[..., 2, 0] = math.nan
    for causal, kept in ((False, [False, True, True, True]), (True, [False, False, True, True])):
        out, lse = torch_kernels._without_blind(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4), q, k, causal, None, bias)
        assert out[0, 0, :, 0].tolist() == [float(x) for x in kept]
        assert lse[0, 0].tolist() == [1.0 if x else -math.inf for x in kept]
        out, lse = torch_kernels._without_blind(
            torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4), q, k, causal, None, bias != -math.inf
        )
        assert lse[0, 0].tolist() == [1.0 if x else -math.inf for x in kept]


def test_a_windowed_token_divides_the_keys_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data: as many pieces as a cache of the window's length has."""
    from ferryman.ops.attention import triton_kernels

    target = select.target_of(profile("h100"))
    seed = torch.empty(2, dtype=torch.int64, device="meta")
    grids: list[object] = []
    monkeypatch.setattr(triton_kernels, "launch", lambda kernel, grid, *args, **options: grids.append(grid))

    def launched(keys: int, window: int | None, dim: int = 96, **others: object) -> list[object]:
        q = torch.empty(2, 8, 1, dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(2, 2, keys, dim, dtype=torch.bfloat16, device="meta")
        given = {**OP.added, "mask": None, "scale": None, "softcap": 0.0, "causal": True, **others}
        args = [{"q": q, "k": k, "v": k, "window": window, **given}[name] for name in OP.names]
        grids.clear()
        triton_kernels.attention_decode(*args, target)  # type: ignore[arg-type]
        return [*grids, *triton_kernels.configurations(*args, target)]  # type: ignore[arg-type]

    for window in (64, 1024):
        assert launched(6000, window) == launched(window, None) != launched(6000, None)
    # where a key's number says more, and where rows are 40 bytes apart: not aligned alike for every length
    for others in ({"dropout_p": 0.1, "dropout_seed": seed}, {"dim": 20}):
        assert launched(6000, 1024, **others) == launched(6000, None, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "options", "much"),
    [
        ((2, 16, 2048, 64), {"mask": torch.bool}, True),
        ((2, 16, 2048, 64), {"mask": torch.bfloat16}, False),
        ((2, 16, 512, 64), {"mask": torch.bool}, False),
        ((2, 16, 2048, 80), {"mask": torch.bool}, True),
        ((2, 16, 2048, 84), {"mask": torch.bool}, False),
        ((2, 16, 2048, 64), {}, False),
        ((2, 16, 2048, 64), {"window": 1500}, False),
        ((2, 32, 2048, 64), {"window": 1500, "causal": True}, True),
        ((2, 16, 2048, 64), {"window": 500, "causal": True}, False),
        ((2, 16, 4096, 64), {"window": 1500, "causal": True}, True),
    ],
    ids=str,
)
def test_what_is_hidden_of_much_work_is_not_traced_as_a_librarys_call(
    shape: tuple[int, ...], options: dict[str, Any], much: bool
) -> None:
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    dtype = options.get("mask")
    mask = None if dtype is None else torch.empty(shape[2], shape[2], dtype=dtype, device="meta")
    args = (q, q, options.get("causal", False), options.get("window"), mask)
    assert traced_forms._hoppers_when_traced(*args) is much


@pytest.mark.parametrize(("asked", "chosen"), [(False, "triton.hopper"), (True, "triton.hopper_ordered")])
def test_gradients_that_add_in_any_order_are_not_chosen_where_equal_bits_are_asked_for(
    asked: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = registry.primitive("attention_backward")
    args = grid.on_meta(backward, registry.evidence(OP).named("B2 H28/4 Q1800 K1800 D128 causal"), torch.bfloat16)
    with monkeypatch.context() as flag:
        flag.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked)
        for device in ("h100", "h200"):
            here = profile(device)
            line = select.select(backward, args, here, select.State({}, False), absent=True).implementation
            assert line.name == chosen
            named = select.State({"attention_backward": ("triton.hopper_ordered",)}, False)
            line = select.select(backward, args, here, named, absent=True).implementation
            assert line.name == "triton.hopper_ordered" and line.deterministic is True


def test_the_forms_that_are_traced_are_tried_in_the_profiles_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(device: str) -> list[str]:
        return [line.name for line in select.traced_lines(OP, profile(device))]

    monkeypatch.setenv("FERRYMAN_LOCKFILE", "none")
    monkeypatch.setattr(registry, "probe", lambda backend, vendor: ())
    assert names("h200") == ["torch.cudnn", "torch.flash"]
    assert "torch.aotriton" in names("mi300x") and "torch.cpu" in names("cpu")
    monkeypatch.setattr(select, "preferred", lambda op, here: ["triton.hopper", "triton.tiled", "torch.cudnn"])
    assert names("h200") == []  # a line that serves every call is before it

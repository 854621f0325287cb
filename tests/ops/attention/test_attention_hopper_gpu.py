"""On Hopper: the warp-specialised forward pass is chosen where it serves, and means what the plain kernel means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import plan, select
from ferryman.ops.attention.scores import visible_in
from tests.bounded import U32
from tests.ops.attention.attention_lines import attention

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
DIMS = [40, 64, 104, 128, 200]  # of tiles, and between


@pytest.fixture
def target() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device_target = select.target_of(select.profile_for(GPU))
    if device_target.arch != "sm_90" or "wgmma" not in device_target.features:
        pytest.skip(f"{device_target.arch} is not Hopper")
    return device_target


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, target: Any) -> list[str]:
    """The names of the forward kernels that were launched, in order."""
    from ferryman.ops.attention import hopper_kernels, key_mask_kernels, pair_mask_kernels, triton_kernels

    names: list[str] = []
    for module in (hopper_kernels, key_mask_kernels, pair_mask_kernels, triton_kernels):
        launch = module.launch

        def note(kernel: Any, *args: Any, _launch: Any = launch, **meta: Any) -> None:
            names.append(kernel.fn.__name__)
            _launch(kernel, *args, **meta)

        monkeypatch.setattr(module, "launch", note)
    plan.drop_plans()
    yield names
    plan.drop_plans()


def operands(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The layout of models: (B, S, H, D) seen as (B, H, S, D)."""
    make = torch.Generator(device=GPU).manual_seed(queries + keys)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, s, h, dim, device=GPU, dtype=dtype, generator=make).transpose(1, 2) for s, h in shapes
    )


def hidden(queries: int, keys: int) -> Tensor:
    return ~torch.ones(queries, keys, dtype=torch.bool, device=GPU).tril(keys - queries)


def judge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    scale: float | None = None,
    bias: Tensor | None = None,
    key_range: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    key_mask: Tensor | None = None,
    cap: float = 0.0,
) -> None:
    """Within the sum of the rounding of P, of the output, and of float32 sums in whatever order."""
    group, dim, keys = q.shape[1] // k.shape[1], q.shape[3], k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    q64, k64, v64 = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores, size = q64 @ k64.mT * scale, q64.abs() @ k64.abs().mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores, size = scores + bias.double(), size + bias.double().abs().nan_to_num(posinf=0.0)
    seen = visible_in(q, k, causal, window, key_range, chunk)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask, -math.inf)
    want_lse = scores.logsumexp(-1)
    p = torch.exp(scores - want_lse.masked_fill(want_lse == -math.inf, 0.0)[..., None])
    want, u = p @ v64, torch.finfo(q.dtype).eps / 2
    of_scores = (2 * math.sqrt(dim) * U32 * size.amax(-1) + (8 + 6 * cap) * U32)[..., None]  # tanh by exp
    tiny = torch.finfo(q.dtype).tiny  # P below it loses bits
    bound = u * want.abs() + (u + of_scores + 6 * math.sqrt(keys) * U32) * (p @ v64.abs())
    bound += tiny * v64.abs().sum(-2, keepdim=True) + tiny
    assert out.dtype == q.dtype and out.transpose(1, 2).is_contiguous()
    assert ((out.double() - want).abs() <= bound).all(), float(((out.double() - want).abs() / bound).max())
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    some = want_lse > -math.inf
    error = (lse.double() - want_lse)[some].abs()
    assert (error <= (4 * U32 * want_lse.abs() + of_scores[..., 0])[some]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "causal"),
    [
        (2, 4, 4, 512, 512, True),
        (1, 8, 2, 333, 517, True),
        (2, 4, 2, 700, 300, True),
        (1, 2, 1, 129, 1000, False),
        (1, 3, 3, 1024, 1, False),
        (2, 2, 2, 200, 127, False),
        (1, 6, 1, 1000, 1001, True),
        (3, 32, 8, 1111, 1111, True),
        (1, 1, 1, 128, 128, True),
    ],
)
def test_within_the_bounds_of_float64(
    ran: list[str],
    target: Any,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    causal: bool,
    dim: int,
    dtype: torch.dtype,
) -> None:
    q, k, v = operands(batch, heads, kv_heads, queries, keys, dim, dtype)
    out, lse = attention(q, k, v, causal, None, None, 0.0, None, target)
    assert ran == ["attention_forward_hopper"]
    judge(q, k, v, causal, out, lse)
    again = attention(q, k, v, causal, None, None, 0.0, None, target)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse), "one result, whatever the schedule"


def biased(rows: tuple[int, int, int, int], layout: str, dtype: torch.dtype) -> Tensor:
    """A float mask (1 or B, 1 or H, Sq, Sk) in which a fifth of the keys is hidden, and all keys of row 5."""
    make = torch.Generator(device=GPU).manual_seed(sum(rows))
    first = 1 if layout == "expanded" else rows[0]
    bias = torch.randn(first, *rows[1:], device=GPU, generator=make) * 4
    bias = bias.masked_fill(torch.rand(bias.shape, device=GPU, generator=make) < 0.2, -math.inf).to(dtype)
    bias[:, :, 5] = -math.inf
    if layout == "wider":
        wide = bias.new_zeros(*bias.shape[:3], rows[3] + 24)
        wide[..., 8 : 8 + rows[3]] = bias
        return wide[..., 8 : 8 + rows[3]]
    return bias.expand(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "causal", "of_bias", "layout"),
    [
        (2, 4, 4, 512, 512, False, (1, 4), "plain"),
        (2, 4, 2, 333, 517, False, (2, 1), "plain"),  # rows that no descriptor stands for
        (3, 2, 1, 129, 1000, False, (3, 2), "wider"),
        (2, 6, 1, 1000, 1001, True, (1, 1), "wider"),
        (3, 32, 8, 704, 704, False, (3, 32), "expanded"),
        (40, 8, 8, 256, 384, True, (1, 8), "plain"),  # many tiles for each program
        (2, 2, 2, 200, 1, False, (2, 2), "plain"),
    ],
)
def test_a_float_mask_within_the_bounds_of_float64(
    ran: list[str],
    target: Any,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    causal: bool,
    of_bias: tuple[int, int],
    layout: str,
    dim: int,
    dtype: torch.dtype,
) -> None:
    q, k, v = operands(batch, heads, kv_heads, queries, keys, dim, dtype)
    bias = biased((*of_bias, queries, keys), layout, dtype)
    out, lse = attention(q, k, v, causal, None, None, 0.0, bias, target)
    assert ran == ["attention_forward_hopper"]
    judge(q, k, v, causal, out, lse, bias=bias)
    assert (out[:, :, 5] == 0).all() and (lse[:, :, 5] == -math.inf).all()
    again = attention(q, k, v, causal, None, None, 0.0, bias, target)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse), "one result, whatever the schedule"


RANGES = [(0, 700), (0, 1), (130, 700), (127, 256), (699, 700), (300, 300), (500, 20), (-9, 10_000), (256, 513)]


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("queries", [129, 700, 1111])
def test_a_key_range_within_the_bounds_of_float64(
    ran: list[str], target: Any, queries: int, dim: int, causal: bool, with_bias: bool
) -> None:
    """What a range leaves out is nothing that a row takes part of, whatever it holds but for what is not finite."""
    batch = len(RANGES)
    key_range = torch.tensor(RANGES, dtype=torch.int32, device=GPU)
    q, k, v = operands(batch, 4, 2, queries, 700, dim, torch.bfloat16)
    bias = biased((1, 4, queries, 700), "wider", torch.bfloat16) if with_bias else None
    sinks = torch.tensor([0.5, -1.0, -math.inf, 3.0], device=GPU)
    options = (causal, None, None, 0.0, bias, None, key_range, None, 0.0, None, target)
    out, lse = attention(q, k, v, *options)
    assert ran == ["attention_forward_hopper"]
    judge(q, k, v, causal, out, lse, bias=bias, key_range=key_range)
    again = attention(q, k, v, *options)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse), "one result, whatever the schedule"
    with_sinks = attention(q, k, v, *options[:5], sinks, *options[6:])
    want = torch.logaddexp(lse.double(), sinks.double()[None, :, None])
    assert torch.equal(with_sinks[1] == -math.inf, want == -math.inf)
    seen = want > -math.inf
    assert ((with_sinks[1].double() - want)[seen].abs() <= 8 * U32 * (1 + want[seen].abs())).all()
    assert (out[5:7] == 0).all() and (lse[5:7] == -math.inf).all()
    assert ran == ["attention_forward_hopper"] * 3


@pytest.mark.parametrize("more", ["", "range", "bias", "range bias"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("queries", "keys", "window", "chunk"),
    [
        *((700, 700, n, None) for n in (1, 2, 63, 128, 129, 300, 699)),
        *((1111, 900, 200, None), (200, 1500, 130, None), (129, 4096, 1000, None)),
        *((700, 700, None, n) for n in (1, 20, 128, 300)),
        *((900, 1400, None, 333), (1500, 1000, None, 128), (700, 700, 100, 256)),
    ],
)
def test_a_window_and_chunks_within_the_bounds_of_float64(
    ran: list[str], target: Any, queries: int, keys: int, window: int | None, chunk: int | None, dim: int, more: str
) -> None:
    q, k, v = operands(4, 4, 2, queries, keys, dim, torch.bfloat16)
    ranges = [(0, keys), (130, keys), (7, keys - 200), (50, 50)]
    key_range = torch.tensor(ranges, dtype=torch.int32, device=GPU) if "range" in more else None
    bias = biased((1, 4, queries, keys), "wider", torch.bfloat16) if "bias" in more else None
    options = (True, None, window, 0.0, bias, None, key_range, chunk, 0.0, None, target)
    out, lse = attention(q, k, v, *options)
    assert ran == ["attention_forward_hopper"]
    judge(q, k, v, True, out, lse, bias=bias, key_range=key_range, window=window, chunk=chunk)
    again = attention(q, k, v, *options)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse), "one result, whatever the schedule"


def key_masks(keys: int) -> Tensor:
    """(8, 1, 1, Sk): all, left and right padding, both, holes, one key, none, and an odd half."""
    place = torch.arange(keys, device=GPU)
    draw = torch.Generator(device=GPU).manual_seed(keys)
    holes = torch.rand(keys, device=GPU, generator=draw) < 0.7
    rows = [place >= 0, place >= 37, place < keys - 130, (place >= 129) & (place < keys - 1), holes, place == 5]
    return torch.stack([*rows, place < 0, place % 2 == 1])[:, None, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("ranged", [False, True], ids=["", "range"])
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window", "chunk"),
    [
        *((700, 700, False, None, None), (129, 1000, False, None, None), (1111, 515, False, None, None)),
        *((700, 700, True, None, None), (333, 5000, True, None, None), (900, 520, True, None, None)),
        *((700, 700, True, 150, None), (700, 700, True, None, 100), (300, 700, True, 64, 256)),
    ],
)
def test_a_mask_of_keys_within_the_bounds_of_float64(
    ran: list[str],
    target: Any,
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
    chunk: int | None,
    ranged: bool,
    dim: int,
    dtype: torch.dtype,
) -> None:
    q, k, v = operands(8, 4, 2, queries, keys, dim, dtype)
    mask = key_masks(keys)
    ranges = [(0, keys), (0, keys), (50, keys), (200, keys - 3), (3, keys), (0, 300), (0, keys), (130, 257)]
    key_range = torch.tensor(ranges, dtype=torch.int32, device=GPU) if ranged else None
    options = (causal, None, window, 0.0, mask, None, key_range, chunk, 0.0, None, target)
    out, lse = attention(q, k, v, *options)
    assert ran == ["attention_keys_of_mask", "attention_forward_hopper"]
    judge(q, k, v, causal, out, lse, key_range=key_range, window=window, chunk=chunk, key_mask=mask)
    assert (out[6] == 0).all() and (lse[6] == -math.inf).all()
    again = attention(q, k, v, *options)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse), "one result, whatever the schedule"


def pair_masks(shape: tuple[int, int], queries: int, keys: int) -> Tensor:
    """(1 or B, 1 or H, Sq, Sk): at random, as padding on the left of a causal mask, by documents, and nothing at all;
    of one sequence, whole documents."""
    make = torch.Generator(device=GPU).manual_seed(queries + keys)
    i, j = (torch.arange(n, device=GPU) for n in (queries, keys))
    documents = (i[:, None] // 150) == (j[None, :] // 150)
    rows = [
        torch.rand(queries, keys, device=GPU, generator=make) < 0.5,
        (j >= 137)[None, :] & (j[None, :] <= i[:, None] + (keys - queries)),
        documents,
        torch.zeros_like(documents),
    ]
    masks = torch.stack(rows if shape[0] == 4 else rows[2:3])[:, None]
    if shape[1] == 1:
        return masks
    return masks & (torch.rand(1, shape[1], 1, keys, device=GPU, generator=make) < 0.9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4), (4, 4)], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window", "chunk", "ranged"),
    [
        (700, 700, False, None, None, False),
        (333, 1500, True, None, None, True),
        (129, 515, True, 150, None, False),
        (1111, 1024, True, None, 200, True),
    ],
)
def test_a_mask_of_pairs_within_the_bounds_of_float64(
    ran: list[str],
    target: Any,
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
    chunk: int | None,
    ranged: bool,
    shape: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
) -> None:
    q, k, v = operands(4, 4, 2, queries, keys, dim, dtype)
    mask = pair_masks(shape, queries, keys)
    ranges = [(0, keys), (130, keys), (7, keys - 200), (50, 50)]
    key_range = torch.tensor(ranges, dtype=torch.int32, device=GPU) if ranged else None
    options = (causal, None, window, 0.0, mask, None, key_range, chunk, 0.0, None, target)
    out, lse = attention(q, k, v, *options)
    assert ran == ["attention_bits_of_mask", "attention_mask_lists", "attention_forward_hopper"]
    judge(q, k, v, causal, out, lse, key_range=key_range, window=window, chunk=chunk, key_mask=mask)
    if shape[0] == 4:
        assert (out[3] == 0).all() and (lse[3] == -math.inf).all()
    again = attention(q, k, v, *options)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse), "one result, whatever the schedule"
    sinks = torch.tensor([0.5, -1.0, -math.inf, 3.0], device=GPU)
    _, with_sinks = attention(q, k, v, *options[:5], sinks, *options[6:])
    want = torch.logaddexp(lse.double(), sinks.double()[None, :, None])
    seen = want > -math.inf
    assert ((with_sinks.double() - want)[seen].abs() <= 8 * U32 * (1 + want[seen].abs())).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["", "causal", "window", "bias", "keys", "pairs", "sinks"])
@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_a_soft_cap_within_the_bounds_of_float64(ran: list[str], target: Any, cap: float, kind: str, dim: int) -> None:
    queries, keys = 333, 417
    q, k, v = operands(4, 4, 2, queries, keys, dim, torch.bfloat16)
    causal, window = kind in ("causal", "window", "sinks"), 100 if kind == "window" else None
    bias = biased((1, 4, queries, keys), "wider", torch.bfloat16) if kind == "bias" else None
    hides = {"keys": key_masks(keys)[:4], "pairs": pair_masks((4, 1), queries, keys)}.get(kind)
    sinks = torch.tensor([0.5, -1.0, -math.inf, 3.0], device=GPU) if kind == "sinks" else None
    mask = hides if bias is None else bias
    out, lse = attention(q, k, v, causal, None, window, cap, mask, sinks, None, None, 0.0, None, target)
    assert ran[-1] == "attention_forward_hopper" and len(ran) == {"keys": 2, "pairs": 3}.get(kind, 1)
    if sinks is None:
        judge(q, k, v, causal, out, lse, bias=bias, window=window, key_mask=hides, cap=cap)
        return
    plain, plain_lse = attention(q, k, v, causal, None, window, cap, None, target)
    judge(q, k, v, causal, plain, plain_lse, cap=cap)
    want = torch.logaddexp(plain_lse.double(), sinks.double()[None, :, None])
    assert ((lse.double() - want).abs() <= 8 * U32 * (1 + want.abs())).all()


@pytest.mark.parametrize("form", ["keys", "one sequence", "expanded"])
def test_every_form_of_a_mask_of_keys(ran: list[str], target: Any, form: str) -> None:
    q, k, v = operands(3, 4, 2, 300, 444, 64, torch.bfloat16)
    mask = key_masks(444)[3:6]
    if form != "expanded":
        mask = mask[1] if form == "one sequence" else mask[1, 0, 0]
    else:
        mask = mask.expand(3, 4, 300, 444)
    out, lse = attention(q, k, v, True, None, None, 0.0, mask, target)
    judge(q, k, v, True, out, lse, key_mask=mask)
    assert ran == ["attention_keys_of_mask", "attention_forward_hopper"]


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_outside_a_range_may_be_anything_finite(ran: list[str], target: Any, dim: int) -> None:
    q, k, v = operands(2, 2, 2, 300, 400, dim, torch.bfloat16)
    key_range = torch.tensor([(37, 311), (0, 130)], dtype=torch.int32, device=GPU)
    want = attention(q, k, v, True, None, None, 0.0, None, None, key_range, None, 0.0, None, target)
    for b, (first, past) in enumerate(key_range.tolist()):
        for x, value in ((k, math.nan), (v, 3e38)):
            x[b, :, :first] = value
            x[b, :, past:] = value
    actual = attention(q, k, v, True, None, None, 0.0, None, None, key_range, None, 0.0, None, target)
    assert torch.equal(actual[0], want[0]) and torch.equal(actual[1], want[1])
    assert ran == ["attention_forward_hopper"] * 2


@pytest.mark.parametrize("dim", [64, 128])
def test_a_mask_in_which_a_score_is_infinite_or_nan(ran: list[str], target: Any, dim: int) -> None:
    q, k, v = operands(1, 2, 2, 256, 256, dim, torch.bfloat16)
    bias = torch.zeros(2, 256, 256, device=GPU, dtype=torch.bfloat16)
    bias[0, 7, 9], bias[1, 8, 3] = math.nan, math.inf
    out, _ = attention(q, k, v, False, None, None, 0.0, bias, target)
    assert ran == ["attention_forward_hopper"]
    assert out[0, 0, 7].isnan().all() and out[0, 1, 8].isnan().all() and int(out.isnan().any(-1).sum()) == 2


@pytest.mark.parametrize("dim", DIMS)
def test_any_aligned_layout(ran: list[str], target: Any, dim: int) -> None:
    packed = torch.randn(2, 300, 3, 4, dim, device=GPU, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    judge(q, k, v, True, *attention(q, k, v, True, 0.2, None, 0.0, None, target), scale=0.2)
    q, k, v = (x.contiguous() for x in (q, k, v))
    judge(q, k, v, True, *attention(q, k, v, True, None, None, 0.0, None, target))
    assert ran == ["attention_forward_hopper"] * 2


@pytest.mark.parametrize(("dim", "value_dim"), [(96, 64), (128, 8), (40, 32), (192, 128)])
def test_values_narrower_than_keys(ran: list[str], target: Any, dim: int, value_dim: int) -> None:
    q, k, v = operands(2, 6, 2, 333, 401, dim, torch.bfloat16)
    v = operands(2, 6, 2, 333, 401, value_dim, torch.bfloat16)[2]
    out, lse = attention(q, k, v, True, None, None, 0.0, None, target)
    assert out.shape == (2, 6, 333, value_dim)
    judge(q, k, v, True, out, lse)
    assert ran == ["attention_forward_hopper"]


@pytest.mark.parametrize("why", ["expanded", "unaligned"])
def test_what_tma_cannot_describe_is_copied(ran: list[str], target: Any, why: str) -> None:
    q, k, v = operands(2, 4, 2, 256, 256, 64, torch.bfloat16)
    if why == "expanded":
        k = k[:1].expand_as(k)
    else:
        q = torch.empty(q.numel() + 1, device=GPU, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    judge(q, k, v, True, *attention(q, k, v, True, None, None, 0.0, None, target))
    assert ran == ["attention_forward_hopper"]


def refused() -> dict[str, tuple[dict[str, Any], str]]:
    return {
        "a window to both sides": ({"window": 100, "causal": False}, "bf16"),
        "negative scale": ({"scale": -0.1}, "bf16"),
        "float32": ({}, "f32"),
        "D100": ({}, "d100"),
        "D24": ({}, "d24"),
        "few queries": ({}, "few"),
    }


@pytest.mark.parametrize("why", refused())
def test_the_plain_kernel_serves_the_rest(ran: list[str], target: Any, why: str) -> None:
    options, kind = refused()[why]
    dtype, dim = torch.float32 if kind == "f32" else torch.bfloat16, int(kind[1:]) if kind[0] == "d" else 64
    q, k, v = operands(2, 4, 2, 40 if kind == "few" else 256, 256, dim, dtype)
    window, causal = options.get("window"), options.get("causal", True)
    out, lse = attention(q, k, v, causal, options.get("scale"), window, 0.0, None, target)
    assert ran == ["attention_forward"]
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_goes_where_the_plain_kernel_sends_it(
    ran: list[str], target: Any, monkeypatch: pytest.MonkeyPatch, which: str, bad: float, dim: int
) -> None:
    from ferryman.ops.attention import triton_kernels

    tensors = dict(zip("qkv", operands(1, 2, 2, 400, 400, dim, torch.bfloat16), strict=True))
    tensors[which][0, 0, 137, 5] = bad
    got = attention(*tensors.values(), True, None, None, 0.0, None, target)
    plain = triton_kernels.attention(
        *tensors.values(), True, None, None, 0.0, None, None, None, None, 0.0, None, target
    )
    assert ran == ["attention_forward_hopper", "attention_forward"]
    # V beside a key that a row does not see reaches the rows of its tile (0 * NaN), and the kernels' tiles differ
    first = 137 if which == "v" else 0
    for mine, other in zip(got, plain, strict=True):
        assert torch.equal(kinds(mine[:, :, first:]), kinds(other[:, :, first:]))
        assert bool(mine[:, 1].isfinite().all()), "the other head"
    hidden = which != "v" and float(tensors["q"][0, 0, 137, 5] * tensors["k"][0, 0, 137, 5]) == -math.inf
    assert hidden or not bool(got[0][0, 0, 137].isfinite().all())


def kinds(x: Tensor) -> Tensor:
    """0 finite, 1 inf, -1 -inf, 2 NaN."""
    return torch.where(x.isnan(), 2.0, torch.where(x.isinf(), x.sign(), 0.0))


def test_graph_capture_and_other_threads_stream(ran: list[str], target: Any) -> None:
    q, k, v = operands(2, 8, 2, 640, 640, 128, torch.bfloat16)
    with ferryman.use(attention="triton"), torch.no_grad():
        want = [ops.attention(q, k, v, causal=True) for _ in range(3)][-1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.attention(q, k, v, causal=True)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert ran[0] == "attention_forward_hopper" and set(ran) == {"attention_forward_hopper"}
    assert torch.equal(out, want)


def test_a_replay_of_many_calls_reads_other_masks_and_ranges(target: Any) -> None:
    """From the 64th call on the launches are repeated without the launcher."""
    q, k, v = operands(2, 8, 2, 200, 700, 64, torch.bfloat16)
    masks = [*(key_masks(700)[i : i + 2] for i in (0, 2, 3, 4)), *pair_masks((4, 1), 200, 700).split(2)]
    ranges = [torch.tensor(r, dtype=torch.int32, device=GPU) for r in (((0, 700), (5, 300)), ((129, 700), (50, 50)))]
    given: list[dict[str, Any]] = [*({"mask": m} for m in masks), *({"key_range": r} for r in ranges)]
    with ferryman.use(attention="triton.hopper"), torch.no_grad():
        first = [ops.attention(q, k, v, causal=True, **more).clone() for more in given]
        for _ in range(40):
            for more, wanted in zip(given, first, strict=True):
                assert torch.equal(ops.attention(q, k, v, causal=True, **more), wanted)


def test_gradients_pair_with_it(ran: list[str], target: Any) -> None:
    q, k, v = (x.detach().requires_grad_() for x in operands(1, 4, 2, 384, 384, 64, torch.bfloat16))
    with ferryman.use("triton"):
        ops.attention(q, k, v, causal=True).float().square().sum().backward()
    gradients = [x.grad.float() for x in (q, k, v)]
    assert ran[0] == "attention_forward_hopper"
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * 64**-0.5
    p = scores.masked_fill(hidden(384, 384), -math.inf).softmax(-1)
    (p @ leaves[2].repeat_interleave(2, 1)).square().sum().backward()
    for mine, leaf in zip(gradients, leaves, strict=True):
        assert (mine - leaf.grad).norm() <= 0.01 * leaf.grad.norm()

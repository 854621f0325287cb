"""On Hopper: the warp-specialised backward pass is chosen where it serves, and means what the plain kernels mean."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import plan, registry, select
from ferryman.ops.attention.arguments import most_rows, stored_by_rows
from ferryman.ops.attention.definition import attention_backward as backward
from tests.bounded import U32, off
from tests.ops.attention.attention_lines import attention_backward

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
FUSED = ["attention_backward_rows", "attention_backward_dkv_hopper", "attention_backward_cast"]
APART = ["attention_backward_rows", "attention_backward_dkv_hopper", "attention_backward_dq_hopper"]
SUM = "attention_backward_sum"
PLAIN = ["attention_backward_dq", "attention_backward_dkv"]
PARTS = "attention_backward_parts"
FEW = ["attention_backward_few", PARTS]


def shared(names: list[str], q: Tensor, k: Tensor, causal: bool, target: Any) -> list[str]:
    """The kernels of a call, with the sum of the parts where few tiles share a group's query heads."""
    from ferryman.ops.attention.hopper_backward_kernels import deal

    group = q.shape[1] // k.shape[1]
    facts = (target.units, target.l2_bytes)
    shares, _ = deal(*k.shape[:2], group, q.shape[2], *k.shape[2:], causal, *facts)
    return [*names[:2], *([SUM] if shares > 1 else []), *names[2:]]


@pytest.fixture
def target() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device_target = select.target_of(select.profile_for(GPU))
    if device_target.arch != "sm_90" or "wgmma" not in device_target.features:
        pytest.skip(f"{device_target.arch} is not Hopper")
    return device_target


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, target: Any) -> Iterator[list[str]]:
    """The names of the backward kernels that were launched, in order."""
    from ferryman.ops.attention import few_queries_kernels, hopper_backward_kernels, triton_kernels

    names: list[str] = []
    for module in (few_queries_kernels, hopper_backward_kernels, triton_kernels):
        launch = module.launch

        def note(kernel: Any, *args: Any, _launch: Any = launch, **meta: Any) -> None:
            if "backward" in kernel.fn.__name__:
                names.append(kernel.fn.__name__)
            _launch(kernel, *args, **meta)

        monkeypatch.setattr(module, "launch", note)
    plan.drop_plans()
    yield names
    plan.drop_plans()


@contextlib.contextmanager
def asked_to_be_deterministic(asked: bool = True) -> Iterator[None]:
    """Round the kernels alone: cuBLAS raises under the flag unless its workspace is configured."""
    torch.use_deterministic_algorithms(asked)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def operands(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(grad_out, q, k, v) in the layout of models: (B, S, H, D) seen as (B, H, S, D)."""
    make = torch.Generator(device=GPU).manual_seed(queries + keys)
    shapes = ((queries, heads), (queries, heads), (keys, kv_heads), (keys, kv_heads))
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, s, h, dim, device=GPU, dtype=dtype, generator=make).transpose(1, 2) for s, h in shapes
    )


def scores_of(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=GPU).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def forward64(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse), each rounded once."""
    scores = scores_of(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    p = torch.where(torch.isneginf(lse)[..., None], 0.0, torch.exp(scores - lse[..., None]))
    out = (p @ v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.float()


def judge(
    got: tuple[Tensor, ...],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> None:
    """Every element within the sum of the roundings of P, of dS, of the output, and of float32 sums in any order."""
    group, dim, u = q.shape[1] // k.shape[1], q.shape[3], torch.finfo(q.dtype).eps / 2
    k64, v64 = (x.double().repeat_interleave(group, 1) for x in (k, v))
    q64, g = q.double(), grad_out.double()
    scores = scores_of(q, k, causal, scale)
    hidden = torch.isneginf(scores)
    p = torch.where(torch.isneginf(lse)[..., None], 0.0, torch.exp(scores - lse.double()[..., None]))
    delta = (g * out.double()).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.double()
    dp, dp_size = g @ v64.mT, g.abs() @ v64.abs().mT
    ds = p * (dp - delta[..., None])
    delta_size = (g * out.double()).abs().sum(-1)[..., None] + delta.abs()[..., None]
    # relative error of P: of the scores, of lse, of exp2; absolute error of dS
    of_p = 6 * math.sqrt(dim) * U32 * (q64.abs() @ k64.abs().mT * abs(scale) + lse.double().abs()[..., None] + 1)
    of_p = of_p.masked_fill(hidden, 0.0).nan_to_num(nan=0.0, posinf=0.0)
    of_ds = (of_p + u) * ds.abs() + 6 * math.sqrt(dim) * U32 * p * (dp_size + delta_size)
    of_ds += torch.finfo(q.dtype).tiny * ~hidden
    sums = 6 * math.sqrt(max(q.shape[2] * group, k.shape[2])) * U32
    tiny = torch.finfo(q.dtype).tiny

    def per_key_head(x: Tensor) -> Tensor:
        return x.unflatten(1, (k.shape[1], group)).sum(2)

    size = ds.abs() * abs(scale)
    wants = (
        (ds * scale) @ k64,
        (of_ds * abs(scale) + sums * size) @ k64.abs(),
        per_key_head((ds * scale).mT @ q64),
        per_key_head((of_ds * abs(scale) + sums * size).mT @ q64.abs()),
        per_key_head(p.mT @ g),
        per_key_head(((of_p + u + sums) * p + tiny * ~hidden).mT @ g.abs()),
    )
    for name, mine, want, bound in zip("qkv", got, wants[::2], wants[1::2], strict=True):
        stored = mine.transpose(1, 2) if stored_by_rows(q, k, v) else mine
        assert mine.dtype == q.dtype and stored.is_contiguous()
        ratio = (mine.double() - want).abs() / (bound + u * want.abs() + tiny)
        assert bool((ratio <= 1).all()), f"grad_{name}: {float(ratio.max())}"


SHAPES = [
    (2, 4, 4, 512, 512, True),
    (1, 8, 2, 333, 517, True),
    (2, 4, 2, 700, 300, True),
    (1, 2, 1, 129, 1000, False),
    (1, 3, 3, 1024, 1, False),
    (2, 2, 2, 200, 127, False),
    (1, 6, 1, 1000, 1001, True),
    (3, 32, 8, 1111, 1111, True),
    (1, 1, 1, 129, 128, True),
    (2, 2, 1, 256, 640, False),
    (2, 8, 2, 64, 65, True),
    (1, 16, 4, 70, 1603, False),
    (2, 14, 2, 116, 116, True),
    (1, 8, 1, 274, 274, True),
    (5, 16, 2, 300, 1743, True),
    (1, 12, 2, 2048, 2048, False),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "queries", "keys", "causal"), SHAPES)
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
    grad_out, q, k, v = operands(batch, heads, kv_heads, queries, keys, dim, dtype)
    out, lse = forward64(q, k, v, causal, dim**-0.5)
    grad_lse = torch.randn_like(lse) if queries % 2 == 0 else None
    got = attention_backward(grad_out, grad_lse, q, k, v, out, lse, causal, None, None, 0.0, None, target)
    assert ran == shared(FUSED, q, k, causal, target)
    judge(got, grad_out, grad_lse, q, k, v, out, lse, causal, dim**-0.5)


FEW_SHAPES = [
    (2, 8, 2, 1, 1111, True),
    (40, 32, 8, 1, 600, True),
    (1, 16, 1, 1, 5000, False),
    (2, 4, 4, 5, 77, True),
    (1, 4, 2, 8, 3, True),
    (3, 3, 3, 16, 333, True),
    (2, 8, 2, 7, 1000, True),
    (1, 4, 4, 61, 61, True),
    (2, 2, 2, 63, 40, True),
    (1, 16, 2, 8, 5000, False),
]


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "queries", "keys", "causal"), FEW_SHAPES)
def test_few_queries_read_the_keys_once(
    ran: list[str], target: Any, batch: int, heads: int, kv_heads: int, queries: int, keys: int, causal: bool, dim: int
) -> None:
    """As many rows as a tile has at most, of all heads of a group: repeatable, and within the same bounds."""
    grad_out, q, k, v = operands(batch, heads, kv_heads, queries, keys, dim, torch.bfloat16)
    out, lse = forward64(q, k, v, causal, dim**-0.5)
    more = (q, k, v, out, lse, causal, None, None, 0.0, None, target)
    got, again = (attention_backward(grad_out, None, *more) for _ in range(2))
    assert ran == FEW * 2 and all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    judge(got, grad_out, None, q, k, v, out, lse, causal, dim**-0.5)


HIDING = ["window", "window both sides", "bool", "keys", "bias", "range", "chunk", "softcap", "sinks", "all"]


@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (104, torch.float16), (200, torch.bfloat16)])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys"),
    [(3, 8, 2, 1, 1111), (2, 4, 4, 5, 77), (1, 8, 2, 13, 700), (2, 3, 3, 57, 300), (2, 2, 1, 64, 513)],
)
def test_few_queries_with_what_hides_keys(
    ran: list[str],
    target: Any,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype,
    kind: str,
) -> None:
    """Within the definition's own bounds in float64; rows that see nothing, keys that nobody sees, are among them."""
    if queries * heads // kv_heads > most_rows(dim):
        pytest.skip("more rows than a tile has")
    make = torch.Generator(device=GPU).manual_seed(keys)
    grad_out, q, k, v = operands(batch, heads, kv_heads, queries, keys, dim, dtype)
    causal = kind in ("window", "range", "chunk", "all")
    window = keys // 3 if "window" in kind or kind == "all" else None
    mask = None
    if kind in ("bool", "keys"):
        shape = (batch, heads, queries, keys) if kind == "bool" else (batch, 1, 1, keys)
        mask = torch.rand(shape, device=GPU, generator=make) > 0.4
    if kind in ("bias", "all"):
        mask = torch.randn(1, heads, queries, keys, device=GPU, dtype=dtype, generator=make)
    bounds = torch.tensor([[keys // 4, keys - keys // 5], [0, keys], [5, 5]], dtype=torch.int32, device=GPU)[:batch]
    key_range = bounds if kind in ("range", "all") else None
    chunk = keys // 2 + 3 if kind in ("chunk", "all") else None
    sinks = torch.randn(heads, device=GPU, dtype=dtype, generator=make) if kind == "sinks" else None
    softcap = 3.0 if kind in ("softcap", "all") else 0.0
    options: dict[str, Any] = {"causal": causal, "scale": None, "window": window, "softcap": softcap, "mask": mask}
    options |= {"sinks": sinks, "key_range": key_range, "chunk": chunk}
    with ferryman.use("triton"), torch.no_grad():
        out, lse = ops.attention(q, k, v, return_lse=True, **options)
    args = (grad_out, None, q, k, v, out, lse, *options.values())
    line = registry.implementation("attention_backward", "triton.decode")
    got = registry.launcher(line)(*args, False, 0.0, None, target)
    assert ran == FEW
    assert off(registry.primitive("attention_backward"), args, got, dtype, line) <= 1


def test_few_queries_keep_what_is_not_finite_in_its_rows(ran: list[str], target: Any) -> None:
    """An Inf in V at a key reaches dQ of its group's rows and dK of that key, no other."""
    grad_out, q, k, v = operands(1, 8, 2, 1, 700, 128, torch.bfloat16)
    out, lse = forward64(q, k, v, True, 128**-0.5)
    finite = attention_backward(grad_out, None, q, k, v, out, lse, True, None, None, 0.0, None, target)
    v[0, 1, 5, 3] = math.inf
    got = attention_backward(grad_out, None, q, k, v, out, lse, True, None, None, 0.0, None, target)
    assert ran == FEW * 2
    assert torch.equal(got[0][:, :4], finite[0][:, :4]) and not got[0][:, 4:].isfinite().any()
    got[1][0, 1, 5] = finite[1][0, 1, 5]
    assert torch.equal(got[1], finite[1]) and torch.equal(got[2], finite[2])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 4), (32, 32), (8, 1)])
def test_what_is_asked_to_be_deterministic_is(ran: list[str], target: Any, dim: int, heads: int, kv_heads: int) -> None:
    grad_out, q, k, v = operands(2, heads, kv_heads, 1000, 1000, dim, torch.bfloat16)
    out, lse = forward64(q, k, v, True, dim**-0.5)
    with asked_to_be_deterministic():
        first, *others = (
            attention_backward(grad_out, None, q, k, v, out, lse, True, None, None, 0.0, None, target) for _ in range(6)
        )
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert ran == shared(APART, q, k, True, target) * 6 and (SUM in ran) == (kv_heads < 32)
    judge(first, grad_out, None, q, k, v, out, lse, True, dim**-0.5)


def test_dispatch_follows_the_flag(ran: list[str], target: Any) -> None:
    """Also where the launches are repeated without the launcher."""
    grad_out, q, k, v = operands(1, 4, 2, 256, 256, 128, torch.bfloat16)
    out, lse = forward64(q, k, v, True, 128**-0.5)
    given = (grad_out, None, q, k, v, out, lse, True, None, None, 0.0, None)
    with ferryman.use("triton"):
        for _ in range(2):
            for asked in (False, True):
                with asked_to_be_deterministic(asked):
                    gradients = [backward(*given)[:3] for _ in range(6)]
                for got in gradients:
                    judge(got, grad_out, None, q, k, v, out, lse, True, 128**-0.5)
                    assert not asked or torch.equal(got[0], gradients[0][0])
    names = shared(FUSED, q, k, True, target)
    assert ran[: len(names)] == names and APART[2] in ran and ran.count(FUSED[2]) + ran.count(APART[2]) <= 24


@pytest.mark.parametrize("dim", [64, 128])
def test_any_aligned_layout_and_any_scale(ran: list[str], target: Any, dim: int) -> None:
    packed = torch.randn(2, 300, 4, 4, dim, device=GPU, dtype=torch.bfloat16)
    tensors = [x.transpose(1, 2) for x in packed.unbind(2)]
    for given, scale in ((tensors, -0.2), ([x.contiguous() for x in tensors], 0.03)):
        grad_out, q, k, v = given
        out, lse = forward64(q, k, v, True, scale)
        got = attention_backward(grad_out, None, q, k, v, out, lse, True, scale, None, 0.0, None, target)
        judge(got, grad_out, None, q, k, v, out, lse, True, scale)
    assert ran == FUSED * 2


@pytest.mark.parametrize("why", ["window", "softcap", "mask", "float32", "D80", "few queries"])
def test_the_plain_kernels_serve_the_rest(ran: list[str], target: Any, why: str) -> None:
    dtype, dim = torch.float32 if why == "float32" else torch.bfloat16, 80 if why == "D80" else 64
    grad_out, q, k, v = operands(2, 8, 2, 40 if why == "few queries" else 256, 256, dim, dtype)
    mask = torch.ones(256, 256, dtype=torch.bool, device=GPU) if why == "mask" else None
    out, lse = forward64(q, k, v, True, dim**-0.5)
    window, cap = 100 if why == "window" else None, 20.0 if why == "softcap" else 0.0
    got = attention_backward(grad_out, None, q, k, v, out, lse, True, None, window, cap, mask, target)
    assert ran[:2] == PLAIN and ran[2:] in ([], [PARTS] * 2)
    assert all(bool(x.isfinite().all()) for x in got)


@pytest.mark.parametrize("why", ["expanded", "unaligned"])
def test_what_tma_cannot_describe_is_copied(ran: list[str], target: Any, why: str) -> None:
    grad_out, q, k, v = operands(2, 4, 2, 256, 256, 64, torch.bfloat16)
    if why == "expanded":
        k = k[:1].expand_as(k)
    else:
        q = torch.empty(q.numel() + 1, device=GPU, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    out, lse = forward64(q, k, v, True, 64**-0.5)
    got = attention_backward(grad_out, None, q, k, v, out, lse, True, None, None, 0.0, None, target)
    assert ran == shared(FUSED, q, k, True, target)
    judge(got, grad_out, None, q, k, v, out, lse, True, 64**-0.5)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["grad_out", "q", "k", "v"])
def test_what_is_not_finite_stays_in_its_head_and_reaches_what_it_must(
    ran: list[str], target: Any, which: str, bad: float, dim: int
) -> None:
    """Keys and queries are ragged: a padded row beside it must not spread NaN to rows that do not see it."""
    tensors = dict(zip(("grad_out", "q", "k", "v"), operands(1, 2, 2, 400, 300, dim, torch.bfloat16), strict=True))
    out, lse = forward64(tensors["q"], tensors["k"], tensors["v"], False, dim**-0.5)
    tensors[which][0, 0, 137, 5] = bad
    grad_out, q, k, v = tensors.values()
    got = attention_backward(grad_out, None, q, k, v, out, lse, False, None, None, 0.0, None, target)
    assert ran == FUSED
    for x in got:
        assert bool(x[:, 1].isfinite().all()), "the other head"
    rows = {"grad_out": got[0], "q": got[0], "k": got[1], "v": got[1]}[which][0, 0]
    others = torch.arange(rows.shape[0], device=GPU) != 137
    assert not bool(rows[137].isfinite().all())
    assert bool(rows[others].isfinite().all())


def test_graph_capture(ran: list[str], target: Any) -> None:
    for dim in (64, 128):
        grad_out, q, k, v = operands(2, 8, 2, 640, 640, dim, torch.bfloat16)
        out, lse = forward64(q, k, v, True, dim**-0.5)
        given = (grad_out, None, q, k, v, out, lse, True, None, None, 0.0, None)
        with ferryman.use("triton"), torch.no_grad():
            for _ in range(3):
                backward(*given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = backward(*given)[:3]
            for _ in range(2):
                for x in got:
                    x.zero_()
                graph.replay()
                torch.cuda.synchronize()
                judge(got, grad_out, None, q, k, v, out, lse, True, dim**-0.5)


@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_through_autograd(ran: list[str], target: Any, dim: int) -> None:
    _, q, k, v = (x.detach().requires_grad_() for x in operands(1, 4, 2, 384, 384, dim, torch.bfloat16))
    with ferryman.use("triton"):
        ops.attention(q, k, v, causal=True).float().square().sum().backward()
    assert ran == shared(FUSED, q, k, True, target)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    p = scores_of(leaves[0], leaves[1], True, dim**-0.5).softmax(-1)
    (p @ leaves[2].repeat_interleave(2, 1)).square().sum().backward()
    for x, leaf in zip((q, k, v), leaves, strict=True):
        assert (x.grad - leaf.grad).norm() <= 0.01 * leaf.grad.norm()  # type: ignore[operator]


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("others_first", [False, True])
@pytest.mark.parametrize("width", [96, 128])
def test_cudnn_shares_its_plans_with_callers_of_pytorch(
    target: Any, by_rows: bool, others_first: bool, width: int
) -> None:
    """PyTorch keeps one plan of cuDNN for a shape and the strides of q, k and v, whatever those of the output are."""
    batch, heads, kv_heads, rows = 2, 8, 4, 200 + 8 * (2 * by_rows + others_first)  # a plan of this test alone

    def drawn(heads: int) -> Tensor:
        shape = (batch, rows, heads, width) if by_rows else (batch, heads, rows, width)
        x = torch.randn(shape, device=GPU, dtype=torch.bfloat16)
        return x.transpose(1, 2) if by_rows else x

    q, k, v, grad_out = drawn(heads), drawn(kv_heads), drawn(kv_heads), drawn(heads)

    def theirs() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
        with torch.nn.attention.sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(out, leaves, grad_out)

    def ours() -> tuple[Tensor, ...]:
        with torch.no_grad():
            out, lse = ops.attention(q, k, v, causal=True, return_lse=True)
            with ferryman.use(attention_backward="torch.cudnn"):
                args = (grad_out, None, q, k, v, out, lse, True, None, None, 0.0, None)
                grads = backward(*args)
        line = registry.implementation("attention_backward", "torch.cudnn")
        assert off(registry.primitive("attention_backward"), args, grads, q.dtype, line) <= 1
        return grads[:3]

    got = [run() for run in ((theirs, ours, theirs) if others_first else (ours, theirs, ours))]
    for grads in got:  # each forward rounds its output once, which moves a gradient by as much
        for one, other in zip(grads, got[others_first], strict=True):
            assert float((one.double() - other.double()).norm()) < 2.0**-6 * float(other.double().norm())

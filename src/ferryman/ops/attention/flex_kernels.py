"""Attention through PyTorch's FlexAttention, which Inductor compiles.

All that a call may see is read from tensors: one compiled function serves any lengths, batch, scale, window, softcap,
chunk, key range and mask of one `flex_variants.Variant`. Inductor takes seconds, so nothing is compiled in a call:
`prepare` does it before, on a call's own tensors, and a call of a variant that was not prepared is refused by the
menu. What is called then is Inductor's own function, past Dynamo, whose guards might compile again.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as shapes

from ferryman.backends.base import Target
from ferryman.errors import CompileError
from ferryman.ops.attention import flex_variants
from ferryman.ops.attention.flex_variants import Variant
from ferryman.ops.attention.sinks_kernels import with_sinks
from ferryman.ops.attention.torch_kernels import _blank, _is_blank, _model_layout, _scale

_BLOCK = 128  # rows and keys of a block of FlexAttention's mask
_lock = threading.Lock()


# ----------------------------------------------------------------------------------------------- what Inductor compiles


def _limits(
    sq: int, sk: int, causal: bool, window: Tensor | None, chunk: Tensor | None, key_range: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """[lo, hi) of the keys that a query sees, (B or 1, Sq) int32. Neither falls from one query to the next."""
    i = torch.arange(sq, device=like.device, dtype=torch.int32).unsqueeze(0)
    if key_range is None:
        begin, end = torch.zeros_like(i), torch.full_like(i, sk)
    else:
        begin, end = key_range.clamp(0, sk).unsqueeze(1).unbind(2)
        begin, end = begin.expand(-1, sq), end.expand(-1, sq)
    position = i + end - sq
    lo, hi = begin, end
    if causal:
        hi = torch.minimum(hi, position + 1)
    if window is not None:
        lo = torch.maximum(lo, position - window + 1)
        if not causal:
            hi = torch.minimum(hi, position + window)
    if chunk is not None:
        first = begin + torch.div((position - begin).clamp(min=0), chunk, rounding_mode="floor") * chunk
        lo = torch.maximum(lo, first)
        hi = torch.minimum(hi, torch.where(position < begin, begin, first + chunk))
    return lo, hi


def _blocks(lo: Tensor, hi: Tensor, sk: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, H, blocks of rows, blocks of keys) twice: whether some query may see some key, and each sees each. B and H
    are 1 where all are alike."""
    sq = lo.shape[1]
    rows, keys = (sq + _BLOCK - 1) // _BLOCK, (sk + _BLOCK - 1) // _BLOCK
    first = torch.arange(rows, device=lo.device) * _BLOCK
    last = (first + _BLOCK - 1).clamp(max=sq - 1)
    start = torch.arange(keys, device=lo.device, dtype=torch.int32) * _BLOCK
    some = (hi[:, last].unsqueeze(-1) > start) & (lo[:, first].unsqueeze(-1) < start + _BLOCK)
    each = (lo[:, last].unsqueeze(-1) <= start) & (hi[:, first].unsqueeze(-1) >= start + _BLOCK)
    some, each = some.unsqueeze(1), each.unsqueeze(1)
    if mask is not None:
        room = torch.nn.functional.pad(mask, (0, keys * _BLOCK - sk, 0, rows * _BLOCK - sq))
        room = room.view(mask.shape[0], mask.shape[1], rows, _BLOCK, keys, _BLOCK)
        some, each = some & room.any(5).any(3), each & room.all(5).all(3)
    return some, each


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which first), int32, as FlexAttention reads lists of blocks."""
    number = chosen.to(torch.int32)
    order = torch.argsort(number, dim=-1, descending=True, stable=True)
    return number.sum(-1).to(torch.int32), order.to(torch.int32)


def _tables(variant: Variant) -> Callable[..., tuple[Tensor, ...]]:
    """What a call may see, made on the device: limits of rows, and lists of blocks that are seen in part and whole."""

    def tables(
        q: Tensor, k: Tensor, window: Tensor | None, chunk: Tensor | None, mask: Tensor | None, key_range: Tensor | None
    ) -> tuple[Tensor, ...]:
        sq, sk = q.shape[2], k.shape[2]
        lo, hi = _limits(sq, sk, variant.causal, window, chunk, key_range, q)
        hides = None
        if mask is not None and variant.mask == "bool":
            hides = mask.expand(mask.shape[0], mask.shape[1], sq, sk)
        some, each = _blocks(lo, hi, sk, hides)
        each = each & some
        return (lo.contiguous(), hi.contiguous(), *_ordered(some & ~each), *_ordered(each))

    return tables


def _of_scores(out: Tensor, lse: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """The log-sum-exp, NaN where all that a row sees is: Triton's maximum passes over NaN, and leaves -inf there."""
    lost = (lse == -math.inf) & out[..., 0].isnan() & (hi > lo).unsqueeze(1)
    return torch.where(lost, math.nan, lse)


def _attend(variant: Variant, with_lse: bool = True) -> Callable[..., Any]:
    """FlexAttention of a variant. scale, softcap: (1,), on the device; softcap and mask are None where it has none."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    many = [not one for one in variant.mask_ones]

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor,
        softcap: Tensor | None,
        mask: Tensor | None,
        lo: Tensor,
        hi: Tensor,
        number: Tensor,
        order: Tensor,
        whole_number: Tensor,
        whole_order: Tensor,
    ) -> Any:
        def masked(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert mask is not None
            places = zip((b, h, i, j), many, strict=True)
            return mask[tuple(place if more else place * 0 for place, more in places)]

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = b if variant.by_range else b * 0
            in_range = (j >= lo[row, i]) & (j < hi[row, i])
            return in_range & masked(b, h, i, j) if variant.mask == "bool" else in_range

        def scored(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s * scale[0]
            if softcap is not None:
                s = softcap[0] * torch.tanh(s / softcap[0])
            return s + masked(b, h, i, j).to(torch.float32) if variant.mask == "float" else s

        blocks = BlockMask.from_kv_blocks(
            number,
            order,
            whole_number,
            whole_order,
            BLOCK_SIZE=_BLOCK,
            mask_mod=seen,
            seq_lengths=(q.shape[2], k.shape[2]),
            compute_q_blocks=False,
        )
        grouped = q.shape[1] != k.shape[1]
        request = AuxRequest(lse=True) if with_lse else None
        got: Any = flex_attention(
            q, k, v, score_mod=scored, block_mask=blocks, scale=1.0, enable_gqa=grouped, return_aux=request
        )
        return (got[0], _of_scores(got[0], got[1].lse, lo, hi)) if with_lse else got

    return attend


# ------------------------------------------------------------------------------------------------------------ compiling


# All variants share one code, of which Dynamo makes eight kinds and then no more.
_RECOMPILATIONS = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}


def _alone() -> Any:
    """Under it, a size is not another one because both are equal in the call that is compiled: where a graph reads the
    one alone, no guard would say so."""
    config: Any = shapes
    return config.patch(use_duck_shape=False)


class _Captured:
    """What Inductor makes of a function: called with such tensors, of any size that its guards allow."""

    def __init__(self, run: Callable[..., Any], given: Sequence[Tensor | None], dynamic: bool) -> None:
        self.names = list(inspect.signature(run).parameters)
        compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=self._compile)
        with torch.no_grad(), torch._dynamo.config.patch(_RECOMPILATIONS), _alone():
            compiled(*given)
        # what Inductor supposed of sizes while it compiled is among the guards
        self.guards = self.shapes.produce_guards_expression(self.examples, ignore_static=False) or "True"

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.source import TensorProperty, TensorPropertySource
        from torch._inductor.compile_fx import compile_fx

        self.tensors: list[tuple[int, int]] = []  # of the graph's inputs: place, which argument
        self.sizes: list[tuple[int, int, int, bool]] = []  # and of which dimension, its stride or its size
        self.examples: list[Any] = []
        self.call: Any = None
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for place, node in enumerate(nodes):
            source = node.meta["grapharg"].source
            if isinstance(source, TensorPropertySource):
                base: Any = source.base
                assert source.prop is not TensorProperty.STORAGE_OFFSET, "an argument does not begin its storage"
                argument, dim = self.names.index(base.local_name), int(source.idx or 0)
                self.sizes.append((place, argument, dim, source.prop is TensorProperty.STRIDE))
            else:
                self.tensors.append((place, self.names.index(source.local_name)))
            self.examples.append(node.meta["example_value"])
        self.count = len(nodes)
        mode: Any = torch._guards.detect_fake_mode(inputs)
        self.shapes: Any = mode.shape_env
        self.call = compile_fx(graph, list(inputs))
        compiled: Callable[..., Any] = self.call
        return compiled

    def _inputs(self, args: Sequence[Tensor | None]) -> list[Any]:
        inputs: list[Any] = [None] * self.count
        for place, argument in self.tensors:
            inputs[place] = args[argument]
        for place, argument, dim, stride in self.sizes:
            x = args[argument]
            assert x is not None
            inputs[place] = x.stride(dim) if stride else x.shape[dim]
        return inputs

    def serves(self, *args: Tensor | None) -> bool:
        """Whether it was compiled for sizes like these; the tensors' contents are not read."""
        satisfied: bool = self.shapes.evaluate_guards_expression(self.guards, self._inputs(args))
        return satisfied

    def __call__(self, *args: Tensor | None) -> Any:
        return self.call(*self._inputs(args))


_captured: dict[tuple[Any, ...], list[_Captured]] = {}  # tables, by what of a variant they depend on


def _captured_tables(
    variant: Variant, tables: Callable[..., tuple[Tensor, ...]], seen: tuple[Tensor | None, ...], dynamic: bool
) -> _Captured:
    """Compiled tables: those of another variant where they serve, as they do for other heads and widths."""
    options = (variant.causal, variant.window, variant.chunk, variant.by_range)
    mask_ones = variant.mask_ones if variant.mask == "bool" else None
    key = (variant.device, variant.ones, *options, mask_ones, dynamic)
    for one in _captured.get(key, ()):
        if one.serves(*seen):
            return one
    captured = _Captured(tables, seen, dynamic)
    _captured.setdefault(key, []).append(captured)
    return captured


class Compiled:
    """What a variant's calls run. with_lse, dynamic: as everywhere but on a CPU, where a compiled FlexAttention has no
    log-sum-exp, and Inductor's C++ reads no mask of symbolic strides."""

    def __init__(
        self, variant: Variant, given: tuple[Tensor | None, ...], with_lse: bool = True, dynamic: bool = True
    ) -> None:
        self.plain = _tables(variant)
        seen, rest = _split(tuple(map(_beginning, given)))
        self.tables = _captured_tables(variant, self.plain, seen, dynamic)
        with torch.no_grad():
            self.attend = _Captured(_attend(variant, with_lse), (*rest, *self.tables(*seen)), dynamic)

    def serves(self, *given: Tensor | None) -> bool:
        """Whether it was compiled for sizes like these. ``given``: on "meta"."""
        seen, rest = _split(given)
        return self.tables.serves(*seen) and self.attend.serves(*rest, *self.plain(*seen))

    def __call__(self, *given: Tensor | None) -> Any:
        seen, rest = _split(given)
        with torch.no_grad():
            return self.attend(*rest, *self.tables(*seen))


def _beginning(x: Tensor | None) -> Tensor | None:
    """``x``, or a copy in its strides that begins its storage: an offset would be one more size in the guards, while
    what Inductor makes reads addresses, and copies an argument that is less aligned than this one."""
    if x is None or x.storage_offset() == 0:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _split(given: Sequence[Tensor | None]) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """The arguments of `_tables`, and the first of `_attend`'s."""
    q, k, v, scale, softcap, window, chunk, mask, key_range = given
    return (q, k, window, chunk, mask, key_range), (q, k, v, scale, softcap, mask)


_compiled: dict[Variant, list[Compiled]] = {}
_MOST_CHOSEN = 4096
_chosen: dict[tuple[Any, ...], Compiled] = {}  # by variant, batch and lengths: that whose guards hold


def forget() -> None:
    """Leave all that was compiled."""
    with _lock:
        _compiled.clear()
        _chosen.clear()
        _captured.clear()


def _given(
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor | None, ...]:
    """`Compiled`'s arguments in the layout that a variant was compiled for. Scalars are written by the device, so that
    a capture holds them."""

    def number(value: float | None, dtype: torch.dtype) -> Tensor | None:
        return None if value is None else torch.full((1,), value, dtype=dtype, device=q.device)

    far = q.shape[2] + k.shape[2]  # a span that is longer hides nothing more
    spans = (None if span is None else min(span, far) for span in (window, chunk))
    if mask is not None:
        mask = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape)).contiguous()
    return (
        *(flex_variants.laid_out(x) for x in (q, k, v)),
        number(scale, torch.float32),
        number(softcap or None, torch.float32),
        *(number(span, torch.int32) for span in spans),
        mask,
        None if key_range is None else key_range.contiguous(),
    )


def prepare(
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
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> bool:
    """Compile what a call like this needs, and run it once; False where that was done before. Raises CompileError."""
    asked = (q, k, v, causal, window, softcap, mask, key_range, chunk)
    variant = flex_variants.variant_of(*asked)
    with _lock:
        if _serves(*asked):
            return False
        given = _given(variant, q, k, v, _scale(q, scale), window, softcap, mask, key_range, chunk)
        try:
            compiled = Compiled(variant, given)
            compiled(*given)  # Inductor's kernels pick their tiles at their first launch
        except Exception as error:  # Dynamo, Inductor and Triton raise what they like
            why = f"{type(error).__name__}: {str(error).strip()[:2000]}"
            raise CompileError("torch", f"attention (torch.flex), {variant}", str(q.device), why) from error
        _compiled.setdefault(variant, []).append(compiled)
        flex_variants.add(variant, _serves)
    return True


def _without_data(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _serves(*args: Any) -> bool:
    return _serving(*args) is not None


def _serving(*args: Any) -> Compiled | None:
    """What was compiled for a call. args: as `flex_variants.variant_of` takes them."""
    q, k, v, _, window, softcap, mask, key_range, chunk = map(_without_data, args)
    variant = flex_variants.variant_of(*args)
    given = _given(variant, q, k, v, 1.0, window, softcap, mask, key_range, chunk)
    for one in _compiled.get(variant, ()):
        if one.serves(*given):
            if len(_chosen) >= _MOST_CHOSEN:
                _chosen.clear()
            _chosen[(variant, q.shape[0], q.shape[2], k.shape[2])] = one
            return one
    return None


def attention(
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
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    if _is_blank(q, k):
        return _blank(q, v, sinks)
    variant = flex_variants.variant_of(q, k, v, causal, window, softcap, mask, key_range, chunk)
    key = (variant, q.shape[0], q.shape[2], k.shape[2])
    run = _chosen.get(key)
    if run is None:
        run = _serving(q, k, v, causal, window, softcap, mask, key_range, chunk)
    if run is None:
        why = "nothing is compiled in a call; required: ferryman.prepare with a call like it before"
        raise CompileError("torch", f"attention (torch.flex), {variant}", str(q.device), why)
    out, lse = run(*_given(variant, q, k, v, _scale(q, scale), window, softcap, mask, key_range, chunk))
    return with_sinks(_model_layout(out), lse.contiguous(), sinks)

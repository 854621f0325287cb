"""Attention and masks for transformers' own interfaces, registered there as "ferryman" when this is imported."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ferryman import ops
from ferryman.errors import PortError
from ferryman.ops.attention.definition import attention_with_lse
from ferryman.ops.attention.recognise import expressible

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
except ImportError as error:
    raise ImportError(
        f"ferryman.integrations.transformers needs transformers >= 5.17: {error}; pip install 'ferryman[models]'"
    ) from error

NAME = "ferryman"

# The attention and mask functions --------------------------------------------------------------------------


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: (B, H, S, D) strided, KV heads unrepeated, to (B, S, H, D) and no attention weights.

    Without a mask the call is causal, bottom-right aligned, within the layer's window. A mask says everything itself.
    What `ops.attention` cannot express (dropout, a paged cache, a head over 256) is transformers' own sdpa function's,
    and so is a bias that learns, whose gradient PyTorch's fused kernels give.
    """
    if kwargs.get("output_attentions"):
        warnings.warn("ferryman's attention gives no attention weights; unport and use eager for them", stacklevel=2)
    causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    window = None
    if attention_mask is None and sliding_window is not None and key.shape[2] > sliding_window:
        window = sliding_window
    bias = kwargs.get("position_bias")
    mask, sinks = attention_mask, kwargs.pop("s_aux", None)
    if bias is not None and not (bias.requires_grad and torch.is_grad_enabled()):
        mask = bias.detach() if mask is None else _added(bias.detach(), mask)
    plain = not dropout and kwargs.get("cache") is None and (sinks is None or sinks.shape == query.shape[1:2])
    if plain and (bias is None or mask is not attention_mask) and expressible(query, key, value, mask):
        out = ops.attention(
            query,
            key,
            value,
            causal=causal,
            scale=scaling,
            window=window,
            softcap=softcap or 0.0,
            mask=mask,
            sinks=sinks,
        )
        return out.transpose(1, 2), None  # contiguous already: the op lays it out as (B, S, H, D)
    if sinks is not None:
        if softcap or kwargs.get("cache") is not None:
            raise PortError("attention with sinks and a softcap, or a paged cache: no function here gives it; unport")
        attention_mask = _explicit(query, key, causal, window) if mask is None else mask
        key, value, attention_mask = _beside_sinks(query, key, value, attention_mask, sinks)
        is_causal, bias = False, kwargs.pop("position_bias", None)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None and query.shape[2] > 1 and (window is not None or query.shape[2] != key.shape[2]):
        attention_mask = _explicit(query, key, causal, window)
    if softcap is not None:
        kwargs["softcap"] = softcap
    found: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return found


def _added(bias: Tensor, mask: Tensor) -> Tensor:
    """One additive mask of a bias and a mask."""
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _beside_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(key, value, mask) with one key more, of zeros and without value, whose score is the head's sink by the mask."""
    batch, heads, rows, _ = query.shape
    key, value = functional.pad(key, (0, 0, 0, 1)), functional.pad(value, (0, 0, 0, 1))
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    column = sinks.to(query.dtype).view(1, -1, 1, 1).expand(batch, heads, rows, 1)
    return key, value, torch.cat((mask.to(query.dtype).expand(batch, heads, rows, -1), column), -1)


def _explicit(query: Tensor, key: Tensor, causal: bool, window: int | None) -> Tensor:
    """The boolean mask of bottom-right causality within a window, for a function that cannot say it otherwise."""
    rows = torch.arange(query.shape[2], device=query.device).unsqueeze(1) + (key.shape[2] - query.shape[2])
    columns = torch.arange(key.shape[2], device=query.device).unsqueeze(0)
    seen = columns <= rows if causal else torch.ones_like(columns <= rows)
    if window is not None:
        seen = seen & (columns > rows - window)
        if not causal:
            seen = seen & (columns < rows + window)
    return seen[None, None]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """None where bottom-right causality and the layer's window say it all; otherwise sdpa's boolean mask.

    Unlike sdpa's, it is also left out when appending several tokens to a cache, and under torch.compile.
    """
    if allow_is_causal_skip and _plain(q_length, kv_length, q_offset, kv_offset, attention_mask, local_size, kwargs):
        return None
    made: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )
    return made


def _plain(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    local_size: int | None,
    others: dict[str, Any],
) -> bool:
    if isinstance(q_offset, Tensor):  # a static cache: how far it is filled is known to the device only
        return False
    if q_offset + q_length != kv_offset + kv_length:  # keys beyond the last query
        return False
    config = others.get("config")
    if local_size is not None and (
        getattr(config, "sliding_window", None) != local_size or getattr(config, "attention_chunk_size", None)
    ):
        return False  # a chunk is local too, and the layer passes no window for it
    if padding is None:
        return True
    if torch.compiler.is_compiling() or padding.shape[-1] < kv_offset + kv_length:
        return False
    return bool(padding[:, kv_offset : kv_offset + kv_length].all())  # one synchronisation, as sdpa's mask makes


# Whether another attention function is that one ------------------------------------------------------------


def same_as_ours(module: nn.Module, forward: Callable[..., Any], heads: int, head_dim: int) -> str | None:
    """None where ``forward``, a model's own attention function with sinks, means what `ops.attention` means: shown in
    float64 on drawn tensors, with and without a mask, on a stand-in that has the module's numbers and drawn sinks. Else
    why not, in words."""
    held = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    sinks = [n for n, p in module.named_parameters(recurse=False) if p.shape == (heads,)]
    if len(sinks) != 1:
        return f"it has {len(sinks)} parameters of {heads} numbers that could be sinks; required: 1"
    draw = torch.Generator().manual_seed(0)
    group = int(held.get("num_key_value_groups", 1))
    exact = attention_with_lse.primitive.body  # type: ignore[attr-defined]
    for masked in (False, True):
        q, k, v = (
            torch.randn(2, n, 7, head_dim, generator=draw, dtype=torch.float64)
            for n in (heads, heads // group, heads // group)
        )
        drawn = torch.randn(heads, generator=draw, dtype=torch.float64)
        mask = torch.randn(2, 1, 7, 7, generator=draw, dtype=torch.float64) if masked else None
        if mask is not None:
            mask[:, :, :, -2:] = torch.finfo(torch.float32).min  # as transformers hides keys
            mask[1, :, 0] = torch.finfo(torch.float32).min
        stand_in = types.SimpleNamespace(**held | {sinks[0]: drawn, "training": False})
        try:
            with torch.no_grad():
                found = forward(stand_in, q, k, v, mask, scaling=0.37, dropout=0.0, sliding_window=None, s_aux=drawn)[0]
        except Exception as error:  # noqa: BLE001 - a function of the library's may raise anything: it is not ours then
            return f"its own attention function raised {type(error).__name__} on a stand-in for the module"
        wanted = exact(q, k, v, False, 0.37, None, 0.0, mask, drawn)[0].transpose(1, 2)
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=0.0, atol=_SAME):
            return "its own attention function gives other results than ops.attention with sinks"
    return None


_SAME = 2.0**-40  # of sums of a few numbers about 1, in float64, in another order


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)


@contextlib.contextmanager
def watch(seen: Callable[[Any, str, Tensor], None]) -> Iterator[None]:
    """Within it, ``seen(module, name, tensor)`` is told what reaches attention and what leaves it, ported or not."""
    before: dict[str, Any] = {}

    def telling(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def told(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen(module, "rotated queries", query)
            seen(module, "rotated keys", key)
            out = own(module, query, key, value, *args, **kwargs)
            seen(module, "attention's result", out[0])
            return out

        return told

    for name in ("sdpa", NAME):
        before[name] = ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS[name] = telling(before[name])
    try:
        yield
    finally:
        for name, own in before.items():
            ALL_ATTENTION_FUNCTIONS[name] = own

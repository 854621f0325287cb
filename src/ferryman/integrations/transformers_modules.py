"""Attention and masks for transformers' own interfaces, registered there as "ferryman" when this is imported."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ferryman import ops
from ferryman.dispatch import state
from ferryman.errors import PortError
from ferryman.integrations import transformers_masks
from ferryman.ops.attention.definition import attention_with_lse
from ferryman.ops.attention.recognise import expressible
from ferryman.porting.model.exact import Widened

try:
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        AttentionMaskInterface,
        causal_mask_function,
        prepare_padding_mask,
        sliding_window_causal_mask_function,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
except ImportError as error:
    raise ImportError(
        f"ferryman.integrations.transformers needs transformers >= 5.17: {error}; pip install 'ferryman[models]'"
    ) from error

NAME = "ferryman"


class Causal(NamedTuple):
    """What a causal mask says in fewer numbers. `attention_mask` writes it on the mask that it makes: a slice, a sum or
    any other tensor made from that mask does not have it, and is read as the mask that it is."""

    key_range: Tensor  # (B, 2) int32: the first key that a sequence has, and the end of its keys
    keys: Tensor | None  # (B, 1, 1, Sk) bool: the 2-D mask of padding, which may have holes
    window: int | None
    chunk: int | None


# Ids of configs of ported models, all of whose attention passes the layer's window with a call: it needs no mask then.
windowed: set[int] = set()
_SAYS = "ferryman_causal"  # the mask's attribute
_SELF = "ferryman_sees_itself"  # that of a mask by which each query sees its own key at least

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

    Without a mask the call is causal, bottom-right aligned, within the layer's window. A mask says everything itself;
    one of `attention_mask`'s says it as a key range, too, which kernels read instead.
    What `ops.attention` cannot express (a paged cache, a head over 256) is transformers' own sdpa function's. So is
    dropout, which draws from PyTorch's generator: with the op's the port would train on other numbers. And so is a bias
    that learns, whose gradient PyTorch's fused kernels give; with a soft cap it is composed of PyTorch's functions.
    Raises PortError for a soft cap beside a paged cache or sinks, which neither expresses.
    """
    if kwargs.get("output_attentions"):
        warnings.warn("ferryman's attention gives no attention weights; unport and use eager for them", stacklevel=2)
    causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    window = None
    if attention_mask is None and sliding_window is not None and key.shape[2] > sliding_window:
        window = sliding_window
    bias, sinks = kwargs.get("position_bias"), kwargs.pop("s_aux", None)
    learns = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    said = _said(query, key, attention_mask)
    mask = attention_mask if said is None else said.keys
    if bias is not None and not learns:
        mask = bias.detach() if mask is None else _added(bias.detach(), mask)
    plain = not dropout and kwargs.get("cache") is None and (sinks is None or sinks.shape == query.shape[1:2])
    if bias is None and sinks is None and not softcap and _inductors(attention_mask):
        plain = False
    if plain and not learns and expressible(query, key, value, mask):
        out = ops.attention(
            query,
            key,
            value,
            causal=causal if said is None else True,
            scale=scaling,
            window=window if said is None else said.window,
            softcap=softcap or 0.0,
            mask=mask,
            sinks=sinks,
            key_range=None if said is None else said.key_range,
            chunk=None if said is None else said.chunk,
        )
        return out.transpose(1, 2), None  # contiguous already: the op lays it out as (B, S, H, D)
    if sinks is not None:
        if softcap or kwargs.get("cache") is not None:
            raise PortError("attention with sinks and a softcap, or a paged cache: no function here gives it; unport")
        attention_mask = _explicit(query, key, causal, window) if attention_mask is None else attention_mask
        if bias is not None and not learns:
            attention_mask = _added(bias.detach(), attention_mask)
        key, value, attention_mask = _beside_sinks(query, key, value, attention_mask, sinks)
        is_causal, bias = False, kwargs.pop("position_bias", None)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap:
        if kwargs.get("cache") is not None:
            raise PortError("attention with a softcap and a paged cache: no function here gives it; unport")
        seen = _explicit(query, key, causal, window) if attention_mask is None else attention_mask
        bias = kwargs.get("position_bias")
        seen = seen if bias is None else _added(bias, seen)
        return _capped(query, key, value, seen, dropout, scaling, softcap), None
    if attention_mask is None and query.shape[2] > 1 and (window is not None or query.shape[2] != key.shape[2]):
        attention_mask = _explicit(query, key, causal, window)
    outputs: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return outputs


def _inductors(mask: Tensor | None) -> bool:
    """Whether a mask that is read whole belongs to a graph that is compiled, where nothing is requested. Inductor makes
    it once a forward and calls sdpa's kernels with it; an opaque call per layer would work on it each time, so that
    rows which see nothing are zeros, and here there are none."""
    return torch.compiler.is_compiling() and getattr(mask, _SELF, False) and not (state.requests or _exporting())


def _exporting() -> bool:
    """An exported program keeps the op: it may run on another vendor's device. Read outside the trace, in which Dynamo
    takes it for true in torch 2.11."""
    return torch.compiler.is_exporting()


_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _said(query: Tensor, key: Tensor, mask: Tensor | None) -> Causal | None:
    """What `attention_mask` wrote on the mask, where it speaks of these queries and keys."""
    said: Causal | None = getattr(mask, _SAYS, None)
    if said is None or mask is None or mask.shape[-2:] != (query.shape[2], key.shape[2]):
        return None
    return said if said.key_range.shape[0] == query.shape[0] else None


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


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scaling: float | None, softcap: float
) -> Tensor:
    """Attention whose scores have a soft cap, with dropout or a bias that learns: sdpa's function has no cap."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    least = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    weights = functional.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()


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
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """None where bottom-right causality and the layer's window say it all; otherwise sdpa's boolean mask.

    Unlike sdpa's, it is also left out when appending several tokens to a cache, and under torch.compile. One of both
    directions is left out where there is no padding: the module says that it is not causal. Where the mask
    is causal (padding, a static cache, a window or chunks), what it says stands on it as a `Causal`, too: made on the
    device from offsets and the 2-D mask, once a forward, without reading their values. A model whose own code works on
    the mask gets the one that its implementation made.
    """
    given: dict[str, Any] = kwargs | {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": allow_is_causal_skip,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
    }
    mask: Tensor | None
    before = transformers_masks.expected(kwargs.get("config"))
    if before:
        mask = ALL_MASK_ATTENTION_FUNCTIONS[before](**given, local_size=local_size)
        return mask
    if allow_is_causal_skip and _plain(q_length, kv_length, q_offset, kv_offset, attention_mask, local_size, kwargs):
        return None
    if allow_is_bidirectional_skip and attention_mask is None and local_size is None:
        return None
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**given | {"allow_is_causal_skip": False})
    if mask is None:
        return None
    itself = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if itself and attention_mask is None and not kwargs.get("use_vmap") and not allow_is_bidirectional_skip:
        setattr(mask, _SELF, True)  # causal, in a window, chunks or packed sequences
    size = None if kwargs.get("config") is None else getattr(kwargs["config"], "attention_chunk_size", None)
    chunk = local_size if local_size is not None and size == local_size else None
    if not _causal(mask_function, local_size, allow_is_causal_skip) or (chunk is not None and kv_offset):
        return mask
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    keys = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].bool()
    end = torch.as_tensor(q_offset, device=mask.device) + (q_length - kv_offset)
    end = end.to(torch.int32).expand(batch_size)
    first = torch.zeros_like(end) if keys is None else keys.int().argmax(-1).to(torch.int32)
    causal = Causal(
        torch.stack((first, end), -1),
        None if keys is None else keys[:, None, None],
        local_size if chunk is None else None,
        chunk,
    )
    setattr(mask, _SAYS, causal)
    return mask


def _causal(function: Callable[..., Any], local_size: int | None, said: bool) -> bool:
    """Whether transformers' mask function is causality alone, with a window or chunks: it says so (``said``) but where
    it wants a mask for compiling; then it is the library's own function."""
    if said or local_size is None:
        return said or function is causal_mask_function
    return not torch.compiler.is_compiling() and _alike(function, sliding_window_causal_mask_function(local_size))


def _alike(one: Any, other: Any) -> bool:
    """Whether two functions have one code, and closures over the same numbers and such functions."""
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        if one is other:
            return True
        contents, wanted = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other))
        return one.__code__ is other.__code__ and _alike(contents, wanted)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return isinstance(one, int) and isinstance(other, int) and one == other


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
    if local_size is not None and kv_offset + kv_length > local_size and id(config) not in windowed:
        return False  # not every layer passes its window
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


def same_as_ours(
    module: nn.Module, forward: Callable[..., Any], heads: int, head_dim: int, passed: frozenset[str]
) -> str | None:
    """None where ``forward``, a model's own attention function, means what `ops.attention` means: shown in float64 on
    drawn tensors, with and without a mask, on a stand-in that has the module's numbers, and drawn sinks and a soft cap
    of the scores where the module ``passed`` such. Else why not, in words."""
    with_sinks = "s_aux" in passed
    numbers = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    sinks = [n for n, p in module.named_parameters(recurse=False) if p.shape == (heads,)]
    if with_sinks and len(sinks) != 1:
        return f"it has {len(sinks)} parameters of {heads} numbers that could be sinks; required: 1"
    draw = torch.Generator().manual_seed(0)
    group = int(numbers.get("num_key_value_groups", 1))
    exact = attention_with_lse.primitive.body  # type: ignore[attr-defined]
    for masked, cap in itertools.product((False, True), (None, 1.3) if "softcap" in passed else (None,)):
        q, k, v = (
            torch.randn(2, n, 7, head_dim, generator=draw, dtype=torch.float64)
            for n in (heads, heads // group, heads // group)
        )
        drawn = torch.randn(heads, generator=draw, dtype=torch.float64)
        mask = torch.randn(2, 1, 7, 7, generator=draw, dtype=torch.float64) if masked else None
        if mask is not None:
            mask[:, :, :, -2:] = torch.finfo(torch.float32).min  # as transformers hides keys
            if with_sinks:  # without, what a row that sees nothing gives is not the same in any two functions
                mask[1, :, 0] = torch.finfo(torch.float32).min
        stand_in = types.SimpleNamespace(**numbers | ({sinks[0]: drawn} if with_sinks else {}) | {"training": False})
        more: dict[str, Any] = {"s_aux": drawn} if with_sinks else {}
        more |= {"softcap": cap} if "softcap" in passed else {}
        try:
            with torch.no_grad(), Widened(torch.float64):
                own = forward(stand_in, q, k, v, mask, scaling=0.37, dropout=0.0, sliding_window=None, **more)[0]
        except Exception as error:  # noqa: BLE001 - a function of the library's may raise anything: it is not ours then
            return f"its own attention function raised {type(error).__name__} on a stand-in for the module"
        taken = drawn if with_sinks else None
        wanted = exact(q, k, v, False, 0.37, None, cap or 0.0, mask, taken)[0].transpose(1, 2)
        if own.shape != wanted.shape or not torch.allclose(own, wanted, rtol=0.0, atol=_SAME):
            what = "sinks" if with_sinks else "a soft cap"
            return f"its own attention function gives other results than ops.attention with {what}"
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
        def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen(module, "rotated queries", query)
            seen(module, "rotated keys", key)
            out = own(module, query, key, value, *args, **kwargs)
            seen(module, "attention's result", out[0])
            return out

        return watched

    for name in ("sdpa", NAME):
        before[name] = ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS[name] = telling(before[name])
    try:
        yield
    finally:
        for name, own in before.items():
            ALL_ATTENTION_FUNCTIONS[name] = own

"""What a ported transformers module computes: the classes that `port` gives modules, the attention and mask functions.

The functions are registered with transformers' own interfaces as "ferryman" when this is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ferryman import ops
from ferryman.errors import PortError

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
except ImportError as error:
    raise ImportError(f"ferryman.integrations.transformers needs transformers >= 5.17: {error}; "
                      "pip install 'ferryman[models]'") from error  # fmt: skip

NAME = "ferryman"
# Arguments that other attention functions take and `ops.attention` does not; all are None in the supported models.
_BEYOND = ("position_bias", "cache", "s_aux", "head_mask", "alibi")


# The attention and mask functions --------------------------------------------------------------------------


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: (B, H, S, D) strided, KV heads unrepeated, to (B, S, H, D) and no attention weights.

    Without a mask the call is causal, bottom-right aligned, within the layer's window. A mask says everything itself.
    """
    if dropout:
        raise PortError(f"{type(module).__name__}: attention dropout is {dropout}; required: 0 (attention_dropout=0)")
    for name in _BEYOND:
        if kwargs.get(name) is not None:
            raise PortError(f"{type(module).__name__}: ferryman's attention takes no {name}; unport the model")
    if kwargs.get("output_attentions"):
        warnings.warn("ferryman's attention gives no attention weights; unport and use eager for them", stacklevel=2)
    causal, window = False, None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None and key.shape[2] > sliding_window:
            if not causal:
                raise PortError(f"{type(module).__name__}: a window on both sides needs its mask; got none")
            window = sliding_window
    out = ops.attention(
        query, key, value, causal=causal, scale=scaling, window=window, softcap=softcap or 0.0, mask=attention_mask
    )
    return out.transpose(1, 2), None  # contiguous already: the op lays it out as (B, S, H, D)


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    attention_mask: Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """None where bottom-right causality and the layer's window say it all; otherwise sdpa's boolean mask.

    Unlike sdpa's, it is also left out when appending several tokens to a cache, and under torch.compile.
    """
    if allow_is_causal_skip and _plain(q_length, kv_length, q_offset, kv_offset, attention_mask, local_size, kwargs):
        return None
    made: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        attention_mask=attention_mask, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs,
    )  # fmt: skip
    return made


def _plain(
    q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, padding: Tensor | None,
    local_size: int | None, others: dict[str, Any],
) -> bool:  # fmt: skip
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


# The ported forwards ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One model family's classes, and where their sources differ."""

    prefix: str
    qk_norm: bool = False
    window: str | None = None  # who holds the sliding window that attention is given: "module" or "config"
    offset_norm: bool = False  # the norm's weight is stored less one, and multiplied before the only rounding


FAMILIES = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2", window="module"),
    "qwen3": Family("Qwen3", qk_norm=True, window="module"),
    "mistral": Family("Mistral", window="config"),
    "gemma": Family("Gemma", offset_norm=True),
}


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    """x / rms(x), rounded to x's dtype, times weight. transformers lets a wider weight widen the result."""
    if torch.promote_types(self.weight.dtype, hidden_states.dtype) == hidden_states.dtype:
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon, True)
    normalised = ops.rms_norm(hidden_states, None, self.variance_epsilon).to(hidden_states.dtype)
    widened: Tensor = self.weight * normalised
    return widened


def _offset_norm(self: Any, x: Tensor) -> Tensor:
    return ops.rms_norm(x, 1.0 + self.weight.float(), self.eps).type_as(x)


def _mlp(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    if self.ferryman_variant == "silu":
        gated = ops.silu_mul(gate, up)
    else:
        gated = ops.gelu_mul(gate, up, self.ferryman_variant)
    projected: Tensor = self.down_proj(gated)
    return projected


def _attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Rotary embedding through `ops.rope`; attention through whatever interface the config names."""
    family: Family = self.ferryman_family
    shape = hidden_states.shape[:-1]
    heads = (*shape, -1, self.head_dim)
    q, k = self.q_proj(hidden_states).view(heads), self.k_proj(hidden_states).view(heads)
    if family.qk_norm:
        q, k = self.q_norm(q), self.k_norm(k)
    v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
    cos, sin = position_embeddings
    q, k = ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    if family.window == "module":
        kwargs["sliding_window"] = self.sliding_window
    elif family.window == "config":
        kwargs["sliding_window"] = getattr(self.config, "sliding_window", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.ferryman_eager)
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    return self.o_proj(out.reshape(*shape, -1).contiguous()), weights


# The ported classes ---------------------------------------------------------------------------------------

# The parameters that a forward must take for ours to stand in for it.
FORWARDS = {
    "RMSNorm": (("hidden_states",), ("x",)),
    "MLP": (("x",),),
    "Attention": (("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"),),
}


@functools.cache
def role_of(original: Any) -> tuple[Family, str] | None:
    """(family, "RMSNorm" | "MLP" | "Attention") of a supported class itself, not of a subclass."""
    for name, family in FAMILIES.items():
        home = f"transformers.models.{name}.modeling_{name}"
        for role in FORWARDS:
            if (original.__module__, original.__name__) == (home, family.prefix + role):
                return family, role
    return None


@functools.cache
def ported_class(original: Any, variant: str) -> type[nn.Module]:
    """The subclass of a supported class that calls ops. ``variant`` names the activation of an MLP.

    It adds nothing to an instance's layout, so an instance can change into it and back.
    """
    found = role_of(original)
    if found is None:
        raise PortError(f"{original.__module__}.{original.__name__} has no port")
    family, role = found
    own: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{original.__name__} on ferryman.ops.",
        "__reduce_ex__": _reduce,
        "forward": {"Attention": _attention, "MLP": _mlp, "RMSNorm": _norm}[role],
        "ferryman_original": original,
        "ferryman_family": family,
        "ferryman_variant": variant,
    }
    if role == "RMSNorm" and family.offset_norm:
        own["forward"] = _offset_norm
    if role == "Attention":
        home = importlib.import_module(original.__module__)
        own["ferryman_eager"] = staticmethod(home.eager_attention_forward)
    return type(f"Ferryman{original.__name__}", (original,), own)


def is_ported(module: nn.Module) -> bool:
    return hasattr(type(module), "ferryman_original")


def original_of(module: nn.Module) -> type[nn.Module]:
    original: type[nn.Module] = type(module).ferryman_original  # type: ignore[attr-defined]
    return original


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle by the original's name: a class made at run time has none that another process could import."""
    return _rebuild, (self.ferryman_original, self.ferryman_variant), self.__dict__


def _rebuild(original: Any, variant: str) -> nn.Module:
    ported = ported_class(original, variant)
    return ported.__new__(ported)

"""What a ported transformers module computes: the classes that `port` gives modules, the attention and mask functions.

The functions are registered with transformers' own interfaces as "ferryman" when this is imported.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
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


# The attention and mask functions ------------------------------------------------------------------------------------


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: (B, H, S, D) strided, KV heads unrepeated, to (B, S, H, D) and no attention weights.

    Without a mask the call is causal, bottom-right aligned, within the layer's window. A mask says everything itself.
    """
    if dropout:
        raise PortError(f"{type(module).__name__}: dropout {dropout} on attention; required: 0 (set attention_dropout=0)")
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


# The ported classes --------------------------------------------------------------------------------------------------


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


class Ported:
    """Comes before the original class in a ported module's class. ``ferryman_variant`` says which activation it fuses.

    Pickles by the original's name, as a class made at run time has none that another process could import.
    """

    __slots__ = ()
    ferryman_original: type[nn.Module]
    ferryman_family: Family
    ferryman_variant: str

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.ferryman_original, self.ferryman_variant), self.__dict__


class _Norm(Ported):
    """x / rms(x), rounded to x's dtype, times weight. transformers lets a wider weight widen the result."""

    __slots__ = ()

    def forward(self, hidden_states: Tensor) -> Tensor:
        module: Any = self
        weight, eps = module.weight, module.variance_epsilon
        if torch.promote_types(weight.dtype, hidden_states.dtype) == hidden_states.dtype:
            return ops.rms_norm(hidden_states, weight, eps, True)
        normalised: Tensor = weight * ops.rms_norm(hidden_states, None, eps).to(hidden_states.dtype)
        return normalised


class _OffsetNorm(Ported):
    __slots__ = ()

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        return ops.rms_norm(x, 1.0 + module.weight.float(), module.eps).type_as(x)


class _Mlp(Ported):
    __slots__ = ()

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        gate, up = module.gate_proj(x), module.up_proj(x)
        silu = self.ferryman_variant == "silu"
        projected: Tensor = module.down_proj(
            ops.silu_mul(gate, up) if silu else ops.gelu_mul(gate, up, self.ferryman_variant)
        )
        return projected


class _Attention(Ported):
    """Rotary embedding through `ops.rope`; attention through whatever interface the config names."""

    __slots__ = ()
    ferryman_eager: Callable[..., Any]

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None = None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        module: Any = self
        family, shape = self.ferryman_family, hidden_states.shape[:-1]
        heads = (*shape, -1, module.head_dim)
        q, k = module.q_proj(hidden_states).view(heads), module.k_proj(hidden_states).view(heads)
        if family.qk_norm:
            q, k = module.q_norm(q), module.k_norm(k)
        v = module.v_proj(hidden_states).view(heads).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, module.layer_idx)
        if family.window == "module":
            kwargs["sliding_window"] = module.sliding_window
        elif family.window == "config":
            kwargs["sliding_window"] = getattr(module.config, "sliding_window", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, self.ferryman_eager)
        out, weights = attend(
            self, q, k, v, attention_mask,
            dropout=module.attention_dropout if module.training else 0.0, scaling=module.scaling, **kwargs,
        )  # fmt: skip
        return module.o_proj(out.reshape(*shape, -1).contiguous()), weights


FORWARDS = {
    "RMSNorm": (("hidden_states",), ("x",)),
    "MLP": (("x",),),
    "Attention": (("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"),),
}


@functools.cache
def role_of(original: type) -> tuple[Family, str] | None:
    """(family, "RMSNorm" | "MLP" | "Attention") of a supported class itself, not of a subclass."""
    for name, family in FAMILIES.items():
        home = f"transformers.models.{name}.modeling_{name}"
        for role in FORWARDS:
            if (original.__module__, original.__name__) == (home, family.prefix + role):
                return family, role
    return None


@functools.cache
def ported_class(original: type[nn.Module], variant: str) -> type[nn.Module]:
    found = role_of(original)
    if found is None:
        raise PortError(f"{original.__module__}.{original.__name__} has no port")
    family, role = found
    own: dict[str, Any] = {"ferryman_original": original, "ferryman_family": family, "ferryman_variant": variant}
    if role == "Attention":
        own["ferryman_eager"] = staticmethod(importlib.import_module(original.__module__).eager_attention_forward)
    base = {"Attention": _Attention, "MLP": _Mlp, "RMSNorm": _OffsetNorm if family.offset_norm else _Norm}[role]
    return type(f"Ferryman{original.__name__}", (base, original), {"__module__": __name__, **own})


def _rebuild(original: type[nn.Module], variant: str) -> nn.Module:
    ported = ported_class(original, variant)
    return ported.__new__(ported)

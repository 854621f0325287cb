"""What builds a model family: a line of data. It proposes nothing about porting: `port` does not read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What tiny configs shrink, wherever a config has it.
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "intermediate_size": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "d_ff": 96,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "head_dim": 16,
    "d_kv": 16,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 6,
    "local_attention": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 32,
}
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "speech_encoder_layers",
    "t2u_encoder_layers",
    "t2u_decoder_layers",
    "depth",
)
DEEP = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "mlp_only_layers")


@dataclass(frozen=True)
class Family:
    """``tiny`` and ``real`` override config fields; nested dictionaries go to sub-configs."""

    name: str
    auto: str  # the class of transformers that builds it from a config; or "diffusers", "elsewhere": see those
    inputs: str  # of `given.KINDS`
    model_type: str = ""  # or the name of its config's class; by default the name
    tiny: Mapping[str, Any] = field(default_factory=dict)
    real: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    length: int = 2048  # tokens at real widths

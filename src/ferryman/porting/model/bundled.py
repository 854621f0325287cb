"""Model families by name: how to build one, tiny for parity or at its default widths, and what to give it.

The widths of a family are those of its library's default config. A line proposes nothing about porting: `port` does not
read it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ferryman.errors import ArgumentError, UnknownName
from ferryman.porting.model import diffusion

Run = Callable[[nn.Module], Any]
# What tiny configs shrink, wherever a config has it.
_TINY: dict[str, Any] = {
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
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
)
_DEEP = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "mlp_only_layers")


_SHORT = {"layer_types": ["conv", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """``tiny`` and ``real`` override config fields; nested dictionaries go to sub-configs."""

    name: str
    auto: str  # the class of transformers that builds it from a config; "diffusers": see diffusion.py
    inputs: str
    model_type: str = ""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    real: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    length: int = 2048  # tokens at real widths


def _language(*names: str, **changes: Any) -> list[Family]:
    return [Family(name, "AutoModelForCausalLM", "tokens", **changes) for name in names]


def _all() -> dict[str, Family]:
    found = [
        *_language(
            "llama",
            "qwen2",
            "qwen3",
            "mistral",
            "gemma",
            "gemma2",
            "phi3",
            "glm",
            "glm4",
            "olmo",
            "olmo2",
            "granite",
            "cohere",
            "cohere2",
            "smollm3",
            "gpt2",
            "gpt_neox",
            "phi",
            "stablelm",
            "starcoder2",
            "opt",
            "ernie4_5",
            "helium",
            "seed_oss",
            "arcee",
            "exaone4",
            "nanochat",
            "bloom",
            "falcon",
        ),
        *_language("gpt_oss", "mixtral", "qwen3_moe", "olmoe", "glm4_moe", "qwen2_moe", "granitemoe", "phimoe"),
        Family("gemma3", "AutoModelForCausalLM", "tokens", "gemma3_text"),
        Family(
            "deepseek_v3",
            "AutoModelForCausalLM",
            "tokens",
            tiny={
                "kv_lora_rank": 16,
                "q_lora_rank": 24,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "n_group": 2,
                "topk_group": 1,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "first_k_dense_replace": 1,
            },
            real={"first_k_dense_replace": 1},
        ),
        Family(
            "mamba2",
            "AutoModelForCausalLM",
            "tokens",
            tiny={"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
        ),
        Family(
            "falcon_h1",
            "AutoModelForCausalLM",
            "tokens",
            tiny={
                "mamba_d_ssm": 64,
                "mamba_n_heads": 4,
                "mamba_d_head": 16,
                "mamba_d_state": 16,
                "mamba_chunk_size": 8,
            },
        ),
        Family(
            "jamba",
            "AutoModelForCausalLM",
            "tokens",
            tiny={"use_mamba_kernels": False, "mamba_dt_rank": 8},
            real={"use_mamba_kernels": False},
            length=32,
        ),  # its scan is a loop over tokens
        Family(
            "nemotron_h",
            "AutoModelForCausalLM",
            "tokens",
            tiny={
                "mamba_num_heads": 8,
                "mamba_head_dim": 16,
                "n_groups": 2,
                "ssm_state_size": 16,
                "chunk_size": 8,
            },
        ),
        Family(
            "qwen3_next",
            "AutoModelForCausalLM",
            "tokens",
            tiny={
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            layers=4,
        ),
        # the library's default config has no convolution, which every published model has
        Family("lfm2", "AutoModelForCausalLM", "tokens", tiny=_SHORT, real=_SHORT),
        *(
            Family(n, "AutoModel", "tokens")
            for n in (
                "bert",
                "roberta",
                "modernbert",
                "electra",
                "deberta-v2",
                "albert",
                "xlm-roberta",
                "mpnet",
                "eurobert",
                "camembert",
            )
        ),
        *(Family(n, "AutoModel", "pair") for n in ("t5", "bart", "marian", "mt5", "mbart", "pegasus", "blenderbot")),
        *(
            Family(n, "AutoModel", "image")
            for n in ("vit", "deit", "vit_mae", "ijepa", "vitdet", "yolos", "audio-spectrogram-transformer")
        ),
        Family("siglip_vision_model", "AutoModel", "image"),
        Family("clip_vision_model", "AutoModel", "image"),
        Family("whisper", "AutoModel", "mel", tiny={"max_source_positions": 20, "max_target_positions": 40}),
        Family("moonshine", "AutoModel", "speech_pair"),
        *(
            Family(
                n,
                "AutoModel",
                "speech",
                tiny={
                    "conv_dim": [16, 16],
                    "conv_stride": [5, 4],
                    "conv_kernel": [10, 8],
                    "num_feat_extract_layers": 2,
                    "num_conv_pos_embeddings": 16,
                    "num_conv_pos_embedding_groups": 4,
                },
            )
            for n in ("wav2vec2", "wav2vec2-conformer", "hubert", "wavlm")
        ),
        Family("encodec", "AutoModel", "audio", tiny={"hidden_size": 128}),
        Family("vits", "AutoModel", "tokens"),
        Family("fastspeech2_conformer", "AutoModel", "tokens"),
        *(Family(name, "diffusers", "") for name in diffusion.FAMILIES),
    ]
    return {family.name: family for family in found}


FAMILIES = _all()


def family(name: str) -> Family:
    if name not in FAMILIES:
        raise UnknownName("model family", name, FAMILIES)
    return FAMILIES[name]


def _shrunk(config: Any, changes: Mapping[str, Any], layers: int, tiny: bool) -> Any:
    """A config with fewer layers, and small widths where ``tiny``; nested configs too."""
    values: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        held = getattr(config, name, None)
        if name in changes and not isinstance(changes[name], Mapping):
            values[name] = changes[name]
        elif hasattr(held, "to_dict") and hasattr(held, "model_type"):
            nested = changes.get(name, {})
            values[name] = _shrunk(held, nested if isinstance(nested, Mapping) else {}, layers, tiny).to_dict()
        elif name in _LAYERS and isinstance(value, int):
            values[name] = min(value, layers)
        elif name in _DEEP and isinstance(value, list):
            values[name] = value[:layers] if len(set(map(str, value[:layers]))) > 1 else _spread(value, layers)
        elif tiny and name in _TINY and (isinstance(value, int) or name.endswith("token_id")) and value is not None:
            small = _TINY[name]
            values[name] = small if small is None else min(small, value) if not name.endswith("_id") else small
    kept = {
        k: v for k, v in config.to_dict().items() if k not in ("model_type", "transformers_version", "architectures")
    }
    return type(config)(**(kept | values | {k: v for k, v in changes.items() if not isinstance(v, Mapping)}))


def _spread(value: list[Any], layers: int) -> list[Any]:
    """A few entries of a list that show each kind in it."""
    kinds = list(dict.fromkeys(value))
    return (kinds + value)[:layers] if len(kinds) > 1 else value[:layers]


def build(name: str, tiny: bool, dtype: torch.dtype = torch.float32, layers: int | None = None) -> nn.Module:
    """A family's model with random weights, in eval mode; under a fake mode, without data."""
    wanted = family(name)
    if name in diffusion.FAMILIES:
        return diffusion.build(name, tiny, dtype)
    import transformers

    config = transformers.CONFIG_MAPPING[wanted.model_type or name]()
    config = _shrunk(config, wanted.tiny if tiny else wanted.real, layers or wanted.layers, tiny)
    auto: Any = getattr(transformers, wanted.auto)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = auto.from_config(config, dtype=dtype)
    return model.eval()


def inputs_of(name: str, tiny: bool, model: nn.Module) -> Run:
    """``run(model)``: draws the family's inputs and calls the model."""
    wanted = family(name)
    if name in diffusion.FAMILIES:
        return diffusion.Inputs(name, tiny)
    length = 17 if tiny else min(wanted.length, _longest(model.config))
    return Inputs(wanted.inputs, length, 2 if tiny else 1)


def _longest(config: Any) -> int:
    """Positions that a model has embeddings for; a few are kept for those that count from an offset."""
    held = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return max(int(held) - 8, 8) if isinstance(held, int) else 1 << 20


@dataclass(frozen=True)
class Inputs:
    """Draws inputs of a kind and calls the model with them."""

    kind: str = "tokens"
    length: int = 17
    batch: int = 2

    def __call__(self, model: nn.Module) -> Any:
        config: Any = model.config
        dtype = next(model.parameters()).dtype
        tokens = _tokens(_of(config, "vocab_size", 97), self.batch, self.length, config)
        if self.kind == "tokens":
            plain = {"use_cache": False} if getattr(config, "is_decoder", True) and hasattr(model, "generate") else {}
            return model(input_ids=tokens, **plain)
        if self.kind == "pair":
            return model(input_ids=tokens, decoder_input_ids=tokens[:, : self.length // 2], use_cache=False)
        if self.kind == "image":
            return model(pixel_values=_image(config, self.batch, dtype))
        if self.kind == "image_text":
            tokens = _tokens(_of(config, "vocab_size", 97), self.batch, min(self.length, 16), config)
            return model(input_ids=tokens, pixel_values=_image(config, self.batch, dtype))
        if self.kind == "mel":
            frames = 2 * int(config.max_source_positions)
            mel = torch.randn(self.batch, config.num_mel_bins, frames).to(dtype)
            return model(input_features=mel, decoder_input_ids=tokens[:, :16], use_cache=False)
        seconds = 1600 if self.length < 100 else 80_000
        sound = torch.randn(self.batch, seconds).to(dtype)
        if self.kind == "speech":
            return model(input_values=sound)
        if self.kind == "speech_pair":
            return model(input_values=sound, decoder_input_ids=tokens[:, :16], use_cache=False)
        return model(input_values=sound.unsqueeze(1))


def _of(config: Any, name: str, otherwise: int) -> int:
    for held in (config, getattr(config, "text_config", None)):
        value = getattr(held, name, None)
        if isinstance(value, int):
            return value
    return otherwise


def _tokens(vocabulary: int, batch: int, length: int, config: Any) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _image(config: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    held = getattr(config, "vision_config", None) or config
    size = getattr(held, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    return torch.randn(batch, getattr(held, "num_channels", 3), size, size).to(dtype)


def load(target: str) -> Any:
    """What ``package.module:factory`` returns, called without arguments: a module, or a module and its inputs."""
    home, _, name = target.partition(":")
    try:
        made = getattr(importlib.import_module(home), name)()
    except Exception as error:
        raise ArgumentError(
            "port", target, f"{type(error).__name__}: {error}", "a factory that returns a module"
        ) from error
    module = made[0] if isinstance(made, tuple) and len(made) == 2 else made
    if not isinstance(module, nn.Module):
        raise ArgumentError("port", target, type(made).__name__, "a factory that returns a torch.nn.Module")
    return made

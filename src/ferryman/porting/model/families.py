"""Model families by name, as data: the class that builds one, the config fields that make it tiny, its kind of inputs.

The widths of a family are those of its library's default config.
"""

from __future__ import annotations

from typing import Any

from ferryman.porting.model import diffusion, elsewhere, multimodal
from ferryman.porting.model.family import Family

_SHORT = {"layer_types": ["conv", "full_attention"]}


def _language(*names: str, **changes: Any) -> list[Family]:
    return [Family(name, "AutoModelForCausalLM", "tokens", **changes) for name in names]


def _all() -> dict[str, Family]:
    families = [
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
        *(Family(n, "AutoModel", "image") for n in ("vit", "deit", "vit_mae", "ijepa", "vitdet", "yolos", "dinov2")),
        Family("audio-spectrogram-transformer", "AutoModel", "patched_frames", tiny={"max_length": 64}),
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
        Family(
            "vits",
            "AutoModel",
            "tokens",
            tiny={
                "num_attention_heads": 2,
                "flow_size": 32,
                "spectrogram_bins": 33,
                "duration_predictor_filter_channels": 32,
                "duration_predictor_num_flows": 2,
                "prior_encoder_num_flows": 2,
                "prior_encoder_num_wavenet_layers": 2,
                "posterior_encoder_num_wavenet_layers": 2,
                "upsample_initial_channel": 32,
                "upsample_rates": [4, 2],
                "upsample_kernel_sizes": [8, 4],
                "resblock_kernel_sizes": [3, 7],
                "resblock_dilation_sizes": [[1, 3], [1, 3]],
            },
            length=128,
        ),
        Family("fastspeech2_conformer", "AutoModel", "tokens", length=128),
        *multimodal.seeing(),
        *multimodal.sounding(),
        *(Family(name, "diffusers", "") for name in diffusion.FAMILIES),
        *(Family(name, "elsewhere", "") for name in elsewhere.FAMILIES),
    ]
    return {family.name: family for family in families}


FAMILIES = _all()

"""Families that see, hear or speak, as data: see `families`."""

from __future__ import annotations

from typing import Any

from ferryman.porting.model.family import Family


def _sections(*sizes: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sizes)}


def _vocabulary(image: int, first: int, codes: int) -> dict[str, Any]:
    """Names of tokens of which ``codes`` from ``first`` on stand for an image's codes."""
    digits = str.maketrans("0123456789", "ABCDEFGHIJ")
    return {
        "vocabulary_map": {"<image>": image} | {f"IMGIMG{str(i).translate(digits)}Z": first + i for i in range(codes)}
    }


def seeing() -> list[Family]:
    return [
        Family(
            "llava",
            "AutoModel",
            "image_text",
            tiny={"image_token_index": 90},
            real={"text_config": {"vocab_size": 32_064}},  # as published; the default has no row for the image's token
        ),
        Family(
            "paligemma",
            "AutoModel",
            "image_text",
            tiny={
                "image_token_index": 90,
                "hidden_size": 64,
                "projection_dim": 64,
                "vision_config": {"projection_dim": 64},
            },
        ),
        Family(
            "qwen2_vl",
            "AutoModel",
            "patches_text",
            tiny={
                "image_token_id": 90,
                "text_config": {"rope_parameters": _sections(2, 3, 3)},
                "vision_config": {"embed_dim": 64},
            },
            real={
                "text_config": {"rope_parameters": _sections(16, 24, 24)},
                "vision_config": {"hidden_size": 8192},
            },
        ),
        Family(
            "qwen3_vl",
            "AutoModel",
            "patches_text",
            tiny={
                "image_token_id": 90,
                "text_config": {"rope_parameters": _sections(4, 2, 2)},
                "vision_config": {
                    "out_hidden_size": 64,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0],
                },
            },
            real={
                "text_config": {"rope_parameters": _sections(24, 20, 20)},
                "vision_config": {"out_hidden_size": 4096, "deepstack_visual_indexes": [0]},
            },
        ),
        Family(
            "qwen2_audio",
            "AutoModel",
            "mel_text",
            tiny={"audio_token_index": 90, "audio_config": {"num_mel_bins": 16, "max_source_positions": 20}},
        ),
        Family(
            "chameleon",
            "AutoModel",
            "codes_text",
            tiny={
                **_vocabulary(90, 8, 32),
                "vq_config": {
                    "embed_dim": 16,
                    "num_embeddings": 32,
                    "latent_channels": 16,
                    "resolution": 16,
                    "base_channels": 32,
                    "channel_multiplier": [1, 2],
                    "num_res_blocks": 1,
                },
            },
            real=_vocabulary(8711, 4, 8192),
        ),
        Family("convnext", "AutoModel", "image", tiny={"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}),
        Family(
            "sam",
            "AutoModel",
            "points",
            tiny={
                "vision_config": {
                    "output_channels": 32,
                    "image_size": 64,
                    "window_size": 3,
                    "global_attn_indexes": [1],
                    "num_pos_feats": 16,
                    "mlp_dim": 96,
                    "initializer_range": 0.02,
                },
                "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "image_embedding_size": 8},
                "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "iou_head_hidden_dim": 32},
            },
            real={"vision_config": {"global_attn_indexes": [1]}},
        ),
    ]


_CODEC = {
    "hidden_size": 32,
    "num_filters": 8,
    "upsampling_ratios": [4, 2],
    "codebook_size": 32,
    "codebook_dim": 16,
    "num_quantizers": 4,
    "vector_quantization_hidden_dimension": 16,
    "upsample_groups": 32,
    "head_dim": 8,
}
_VOCODER = {
    "upsample_initial_channel": 32,
    "upsample_rates": [4, 4],
    "upsample_kernel_sizes": [8, 8],
    "resblock_kernel_sizes": [3, 7],
    "resblock_dilation_sizes": [[1, 3], [1, 3]],
}


def sounding() -> list[Family]:
    return [
        Family("mimi", "AutoModel", "audio", tiny=_CODEC),
        Family(
            "dac",
            "AutoModel",
            "audio",
            tiny={
                "encoder_hidden_size": 16,
                "downsampling_ratios": [2, 4],
                "upsampling_ratios": [4, 2],
                "decoder_hidden_size": 64,
                "hidden_size": 32,
                "n_codebooks": 3,
                "codebook_size": 32,
            },
        ),
        Family(
            "musicgen",
            "MusicgenForConditionalGeneration",
            "books",
            tiny={
                "audio_encoder": {"num_filters": 8, "hidden_size": 32, "codebook_dim": 32, "codebook_size": 32},
                "decoder": {"pad_token_id": 96},
            },
        ),
        Family(
            "speecht5",
            "SpeechT5ForTextToSpeech",
            "spoken",
            tiny={
                "num_mel_bins": 16,
                "speech_decoder_prenet_units": 32,
                "speech_decoder_postnet_units": 32,
                "speaker_embedding_dim": 24,
            },
        ),
        Family(
            "speecht5_hifigan",
            "SpeechT5HifiGan",
            "spectrogram",
            "SpeechT5HifiGanConfig",
            tiny={"model_in_dim": 16, **_VOCODER},
        ),
        Family(
            "univnet",
            "AutoModel",
            "frames",
            tiny={
                "model_in_channels": 16,
                "model_hidden_channels": 8,
                "num_mel_bins": 16,
                "kernel_predictor_hidden_channels": 16,
                "resblock_dilation_sizes": [[1, 3], [1, 3], [1, 3]],
            },
        ),
        Family(
            "parakeet_ctc",
            "AutoModelForCTC",
            "frames",
            tiny={
                "encoder_config": {"subsampling_conv_channels": 16, "num_mel_bins": 16, "num_key_value_heads": 4},
                "pad_token_id": 96,
            },
        ),
        Family(
            "csm",
            "CsmForConditionalGeneration",
            "book_columns",
            tiny={
                "num_codebooks": 4,
                "text_vocab_size": 97,
                "codebook_pad_token_id": 96,
                "audio_token_id": 90,
                "audio_eos_token_id": 91,
                "depth_decoder_config": {"num_codebooks": 4, "backbone_hidden_size": 64, "max_position_embeddings": 33},
                "codec_config": _CODEC,
            },
        ),
        Family(
            "moshi",
            "MoshiForConditionalGeneration",
            "dialogue",
            tiny={
                "num_codebooks": 4,
                "audio_encoder_config": _CODEC,
                "depth_decoder_config": {"input_size": 64, "audio_vocab_size": 32, "num_codebooks": 4},
            },
        ),
        Family(
            "seamless_m4t_v2",
            "SeamlessM4Tv2ForSpeechToText",
            "frames_pair",
            tiny={
                "feature_projection_input_dim": 16,
                "speech_encoder_attention_heads": 4,
                "speech_encoder_intermediate_size": 96,
                "decoder_start_token_id": 3,
            },
        ),
    ]

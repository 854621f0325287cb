"""diffusers' model families by name: transformers, a UNet and an autoencoder, tiny or at published widths.

A few blocks of each kind stand for all. A line proposes nothing about porting: `port` does not read it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.errors import BackendUnavailable


@dataclass(frozen=True)
class Diffusion:
    """``kind``: a class of diffusers. ``tiny`` and ``real``: its arguments; ``real`` are a published model's widths.
    ``inputs``: (draw, config, batch, tiny) -> the arguments of a call, where ``draw`` makes a tensor of a shape."""

    name: str
    kind: str
    inputs: Callable[[Callable[..., Tensor], Any, int, bool], dict[str, Any]]
    tiny: Mapping[str, Any]
    real: Mapping[str, Any]


def _steps(batch: int) -> Tensor:
    return torch.randint(1, 900, (batch,))


def _latents(draw: Callable[..., Tensor], config: Any, batch: int) -> Tensor:
    return draw(batch, config.in_channels, config.sample_size, config.sample_size)


def _dit(draw: Callable[..., Tensor], config: Any, batch: int, tiny: bool) -> dict[str, Any]:
    labels = torch.randint(0, config.num_embeds_ada_norm, (batch,))
    return {"hidden_states": _latents(draw, config, batch), "timestep": _steps(batch), "class_labels": labels}


def _sd3(draw: Callable[..., Tensor], config: Any, batch: int, tiny: bool) -> dict[str, Any]:
    return {
        "hidden_states": _latents(draw, config, batch),
        "encoder_hidden_states": draw(batch, 7 if tiny else 333, config.joint_attention_dim),
        "pooled_projections": draw(batch, config.pooled_projection_dim),
        "timestep": _steps(batch).to(draw(1).dtype),
    }


def _flux(draw: Callable[..., Tensor], config: Any, batch: int, tiny: bool) -> dict[str, Any]:
    side, words = (4, 7) if tiny else (64, 512)  # of an image of 1024 pixels
    grid = torch.arange(side)
    places = torch.stack((torch.zeros(side, side), *torch.meshgrid(grid, grid, indexing="ij")), -1)
    return {
        "hidden_states": draw(batch, side * side, config.in_channels),
        "encoder_hidden_states": draw(batch, words, config.joint_attention_dim),
        "pooled_projections": draw(batch, config.pooled_projection_dim),
        "timestep": torch.rand(batch).to(draw(1).dtype),
        "img_ids": places.reshape(-1, 3).to(draw(1).dtype),
        "txt_ids": torch.zeros(words, 3).to(draw(1).dtype),
    }


def _wan(draw: Callable[..., Tensor], config: Any, batch: int, tiny: bool) -> dict[str, Any]:
    size = (2, 8, 8) if tiny else (5, 60, 104)  # 17 frames of 480 x 832 pixels
    return {
        "hidden_states": draw(batch, config.in_channels, *size),
        "encoder_hidden_states": draw(batch, 7 if tiny else 512, config.text_dim),
        "timestep": _steps(batch),
    }


def _unet(draw: Callable[..., Tensor], config: Any, batch: int, tiny: bool) -> dict[str, Any]:
    text = draw(batch, 7 if tiny else 77, config.cross_attention_dim)
    return {"sample": _latents(draw, config, batch), "timestep": _steps(batch), "encoder_hidden_states": text}


def _autoencoder(draw: Callable[..., Tensor], config: Any, batch: int, tiny: bool) -> dict[str, Any]:
    return {"sample": _latents(draw, config, batch)}


_DOWN, _UP = "DownEncoderBlock2D", "UpDecoderBlock2D"
FAMILIES = {
    family.name: family
    for family in (
        Diffusion(
            "dit",
            "DiTTransformer2DModel",
            _dit,
            {
                "num_attention_heads": 4,
                "attention_head_dim": 16,
                "num_layers": 2,
                "sample_size": 8,
                "num_embeds_ada_norm": 10,
            },
            {
                "num_attention_heads": 16,
                "attention_head_dim": 72,
                "out_channels": 8,
                "num_layers": 2,
                "sample_size": 32,
            },
        ),
        Diffusion(
            "sd3",
            "SD3Transformer2DModel",
            _sd3,
            {
                "sample_size": 8,
                "in_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 4,
                "joint_attention_dim": 32,
                "caption_projection_dim": 64,
                "pooled_projection_dim": 32,
                "out_channels": 4,
                "pos_embed_max_size": 8,
                "qk_norm": "rms_norm",
            },
            {
                "sample_size": 128,
                "num_layers": 2,
                "attention_head_dim": 64,
                "num_attention_heads": 24,
                "caption_projection_dim": 1536,
                "pos_embed_max_size": 192,
            },
        ),
        Diffusion(
            "flux",
            "FluxTransformer2DModel",
            _flux,
            {
                "in_channels": 16,
                "num_layers": 1,
                "num_single_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 4,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 32,
                "axes_dims_rope": (4, 4, 8),
            },
            {"num_layers": 1, "num_single_layers": 2},
        ),
        Diffusion(
            "wan",
            "WanTransformer3DModel",
            _wan,
            {
                "num_attention_heads": 4,
                "attention_head_dim": 16,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 32,
                "freq_dim": 32,
                "ffn_dim": 96,
                "num_layers": 2,
                "rope_max_seq_len": 32,
            },
            {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 2},
        ),
        Diffusion(
            "unet2d_condition",
            "UNet2DConditionModel",
            _unet,
            {
                "sample_size": 8,
                "block_out_channels": (32, 64),
                "layers_per_block": 1,
                "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
                "cross_attention_dim": 32,
                "norm_num_groups": 8,
            },
            {"sample_size": 64, "cross_attention_dim": 768},
        ),
        Diffusion(
            "autoencoder_kl",
            "AutoencoderKL",
            _autoencoder,
            {
                "block_out_channels": (32, 64),
                "down_block_types": (_DOWN,) * 2,
                "up_block_types": (_UP,) * 2,
                "norm_num_groups": 8,
                "sample_size": 16,
            },
            {
                "block_out_channels": (128, 256, 512, 512),
                "down_block_types": (_DOWN,) * 4,
                "up_block_types": (_UP,) * 4,
                "layers_per_block": 2,
                "sample_size": 512,
            },
        ),
    )
}


def build(name: str, tiny: bool, dtype: torch.dtype) -> nn.Module:
    """A family's model with random weights, in eval mode. Raises BackendUnavailable without diffusers."""
    try:
        home = importlib.import_module("diffusers")
    except ImportError as error:
        raise BackendUnavailable(
            f"{name} needs diffusers ({error}); pip install 'ferryman[diffusion]' (Python >= 3.11)"
        ) from error
    wanted = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = getattr(home, wanted.kind)(**(wanted.tiny if tiny else wanted.real))
    return cast(model, dtype).eval()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module with its floating tensors in a dtype."""
    for module in model.modules():  # `model.to(dtype)` swaps data, which tensors without data do not allow
        for key, weight in module._parameters.items():
            module._parameters[key] = None if weight is None else nn.Parameter(weight.detach().to(dtype))
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[key] = buffer.to(dtype)
    return model


@dataclass(frozen=True)
class Inputs:
    """Draws a family's inputs and calls the model with them."""

    name: str
    tiny: bool

    def __call__(self, model: nn.Module) -> Any:
        dtype = next(model.parameters()).dtype

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape).to(dtype)

        given = FAMILIES[self.name].inputs(draw, model.config, 2 if self.tiny else 1, self.tiny)
        return model(**given)

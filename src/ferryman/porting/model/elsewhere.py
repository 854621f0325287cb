"""Model families of timm and torchaudio by name, tiny or at published widths, two layers of each kind.

A line proposes nothing about porting: `port` does not read it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.errors import BackendUnavailable
from ferryman.porting.model.diffusion import cast


@dataclass(frozen=True)
class Elsewhere:
    """``maker``: a module's function or class, "module:name", with ``tiny`` or ``real`` arguments. ``inputs``: (draw,
    tiny) -> the arguments of a call, where ``draw`` makes a tensor of a shape."""

    name: str
    maker: str
    inputs: Callable[[Callable[..., Tensor], bool], tuple[Tensor, ...]]
    tiny: Mapping[str, Any]
    real: Mapping[str, Any]


def _picture(draw: Callable[..., Tensor], tiny: bool) -> tuple[Tensor, ...]:
    side = 32 if tiny else 224
    return (draw(2 if tiny else 1, 3, side, side),)


def _frames(draw: Callable[..., Tensor], tiny: bool) -> tuple[Tensor, ...]:
    lengths = [20, 13] if tiny else [1024]
    return draw(len(lengths), max(lengths), 64 if tiny else 256), torch.tensor(lengths)


FAMILIES = {
    family.name: family
    for family in (
        Elsewhere(
            "timm_vit",
            "timm:create_model",
            _picture,
            {"model_name": "vit_tiny_patch16_224", "img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 10},
            {"model_name": "vit_base_patch16_224", "depth": 2},
        ),
        Elsewhere(
            "timm_convnext",
            "timm:create_model",
            _picture,
            {"model_name": "convnext_atto", "depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64), "num_classes": 10},
            {"model_name": "convnext_base", "depths": (2, 2, 2, 2)},
        ),
        Elsewhere(
            "torchaudio_conformer",
            "torchaudio.models:Conformer",
            _frames,
            {"input_dim": 64, "num_heads": 4, "ffn_dim": 96, "num_layers": 2, "depthwise_conv_kernel_size": 15},
            {"input_dim": 256, "num_heads": 4, "ffn_dim": 1024, "num_layers": 2, "depthwise_conv_kernel_size": 31},
        ),
    )
}


def build(name: str, tiny: bool, dtype: torch.dtype) -> nn.Module:
    """A family's model with random weights, in eval mode. Raises BackendUnavailable without its library."""
    wanted = FAMILIES[name]
    library, _, maker = wanted.maker.partition(":")
    try:
        home = importlib.import_module(library)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another PyTorch fails with the last two
        raise BackendUnavailable(f"{name} needs {library.split('.')[0]}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = getattr(home, maker)(**(wanted.tiny if tiny else wanted.real))
    return cast(model, dtype).eval()


@dataclass(frozen=True)
class Inputs:
    """Draws a family's inputs and calls the model with them."""

    name: str
    tiny: bool

    def __call__(self, model: nn.Module) -> Any:
        dtype = next(model.parameters()).dtype

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape).to(dtype)

        return model(*FAMILIES[self.name].inputs(draw, self.tiny))

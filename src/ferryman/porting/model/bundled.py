"""Model families by name: how to build one, tiny for parity or at its default widths, and what to give it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ferryman.errors import ArgumentError, UnknownName
from ferryman.porting.model import diffusion, elsewhere
from ferryman.porting.model.families import FAMILIES
from ferryman.porting.model.family import DEEP, LAYERS, TINY, Family
from ferryman.porting.model.given import Inputs

Run = Callable[[nn.Module], Any]
HOMES: tuple[Any, ...] = (diffusion, elsewhere)  # of families that no config of transformers builds


def family(name: str) -> Family:
    if name not in FAMILIES:
        raise UnknownName("model family", name, FAMILIES)
    return FAMILIES[name]


def _shrunk(config: Any, changes: Mapping[str, Any], layers: int, tiny: bool) -> Any:
    """A config with fewer layers, and small widths where ``tiny``; nested configs too."""
    values: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        subconfig = getattr(config, name, None)
        if hasattr(subconfig, "to_dict") and hasattr(subconfig, "model_type"):
            nested = changes.get(name, {})
            values[name] = _shrunk(subconfig, nested, layers, tiny).to_dict()
        elif name in changes:
            continue
        elif name in LAYERS and isinstance(value, int):
            values[name] = min(value, layers)
        elif name in DEEP and isinstance(value, list):
            values[name] = value[:layers] if len(set(map(str, value[:layers]))) > 1 else _spread(value, layers)
        elif tiny and name in TINY and (isinstance(value, int) or name.endswith("token_id")) and value is not None:
            small = TINY[name]
            values[name] = small if small is None else min(small, value) if not name.endswith("_id") else small
    dropped = ("model_type", "transformers_version", "architectures", "stage_names", "out_features", "out_indices")
    kept = {k: v for k, v in config.to_dict().items() if k not in dropped}
    return type(config)(**(kept | {k: v for k, v in changes.items() if k not in values} | values))


def _spread(value: list[Any], layers: int) -> list[Any]:
    """A few entries of a list that show each kind in it."""
    kinds = list(dict.fromkeys(value))
    return (kinds + value)[:layers] if len(kinds) > 1 else value[:layers]


def config_of(wanted: Family) -> Any:
    """The library's default config of a family, whose type or class ``model_type`` names."""
    import transformers

    name = wanted.model_type or wanted.name
    return transformers.CONFIG_MAPPING[name]() if name in transformers.CONFIG_MAPPING else getattr(transformers, name)()


def build(name: str, tiny: bool, dtype: torch.dtype = torch.float32, layers: int | None = None) -> nn.Module:
    """A family's model with random weights, in eval mode; under a fake mode, without data."""
    wanted = family(name)
    for home in HOMES:
        if name in home.FAMILIES:
            model: nn.Module = home.build(name, tiny, dtype)
            return model
    config = _shrunk(config_of(wanted), wanted.tiny if tiny else wanted.real, layers or wanted.layers, tiny)
    return random(wanted.auto, config, dtype).eval()


def random(auto: str, config: Any, dtype: torch.dtype) -> nn.Module:
    """A model of a config with random weights. ``auto``: a class of transformers, one of its Autos or not."""
    import transformers

    maker: Any = getattr(transformers, auto)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = (getattr(maker, "from_config", None) or maker._from_config)(config, dtype=dtype)
    return model


def inputs_of(name: str, tiny: bool, model: nn.Module) -> Run:
    """``run(model)``: draws the family's inputs and calls the model."""
    wanted = family(name)
    for home in HOMES:
        if name in home.FAMILIES:
            run: Run = home.Inputs(name, tiny)
            return run
    length = 17 if tiny else min(wanted.length, _longest(model.config))
    return Inputs(wanted.inputs, length, 2 if tiny else 1)


def _longest(config: Any) -> int:
    """Positions that a model has embeddings for; a few are kept for those that count from an offset."""
    for part in (config, getattr(config, "text_config", None)):
        positions = getattr(part, "max_position_embeddings", None) or getattr(part, "n_positions", None)
        if isinstance(positions, int):
            return max(positions - 8, 8)
    return 1 << 20


def load(target: str) -> Any:
    """What ``package.module:factory`` returns, called without arguments: a module, or a module and its inputs."""
    home, _, name = target.partition(":")
    try:
        loaded = getattr(importlib.import_module(home), name)()
    except Exception as error:
        raise ArgumentError(
            "port", target, f"{type(error).__name__}: {error}", "a factory that returns a module"
        ) from error
    module = loaded[0] if isinstance(loaded, tuple) and len(loaded) == 2 else loaded
    if not isinstance(module, nn.Module):
        raise ArgumentError("port", target, type(loaded).__name__, "a factory that returns a torch.nn.Module")
    return loaded

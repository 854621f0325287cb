"""Which model `check_model` builds: published widths by name, or a local config.json. Nothing is ever downloaded.

A config.json is read as data: JSON only, size-capped, and of its keys only those listed here reach transformers, since
others can name code or kernels to fetch (``auto_map``, ``_attn_implementation``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferryman import files
from ferryman.errors import ArgumentError, UnknownName

SIZE_LIMIT = 1 << 20  # a published config.json is about 1 KiB
_OP = "check_model"

# The widths of the models' published config.json files; the rest is what transformers takes by default.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3-8B",
        {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": False,
        },
    ),
    "llama": (
        "Llama-3-8B",
        {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128_256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2": (
        "Qwen2.5-7B",
        {
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152_064,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
        },
    ),
    "mistral": (
        "Mistral-7B-v0.1",
        {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32_000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
    ),
    "gemma": (
        "Gemma-2B",
        {
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 256_000,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "max_position_embeddings": 8192,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
}

# What --tiny allows at most; head_dim stays real, since kernels are chosen by it. The window is shorter than any
# sequence, so that sliding layers do slide.
_TINY = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "sliding_window": 16,
}
# The most that a config file may ask for; the largest published dense models stay below all of them.
_MOST = {
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 256,
    "vocab_size": 1 << 20,
    "max_position_embeddings": 1 << 26,
    "sliding_window": 1 << 26,
    "num_hidden_layers": 1024,
}
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range", "attention_dropout")
_PASSED = {
    *_MOST,
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "initializer_range",
    "attention_dropout",
}


@dataclass(frozen=True)
class ModelSpec:
    """What will be built. ``cuts`` say how it is smaller than the model it is named after."""

    family: str
    title: str
    fields: Mapping[str, Any]
    cuts: tuple[str, ...]
    ignored: tuple[str, ...] = ()


def spec(name_or_path: str | os.PathLike[str], *, tiny: bool, layers: int) -> ModelSpec:
    """A preset's name ("qwen3", "llama", ...), or a local config.json or its folder. Raises UnknownName and
    ArgumentError.
    """
    if layers < 1 or (layers < 4 and not tiny):
        raise ArgumentError(_OP, "layers", layers, "at least 4 (fewer only with tiny)")
    text = os.fspath(name_or_path)
    ignored: tuple[str, ...] = ()
    if text in PRESETS:
        family, (title, fields) = text, PRESETS[text]
        fields, full = dict(fields), None
    elif text.endswith(".json") or os.sep in text or Path(text).exists():
        family, fields, ignored = _read(Path(text))
        title, full = f"{family} of {Path(text).name}", int(fields.get("num_hidden_layers", layers))
        layers = min(layers, full)
    else:
        raise UnknownName("model", text, PRESETS)
    cuts = [f"{layers} layers" + (f" of {full}" if full else "")] if full != layers else []
    fields["num_hidden_layers"] = layers
    if fields.get("layer_types") is not None:
        fields["layer_types"] = list(fields["layer_types"])[:layers]
    if tiny:
        for key, most in _TINY.items():
            value = fields.get(key)
            if value is not None and value > most:
                fields[key] = most
                cuts.append(f"{key} {most} of {value}")
        heads, kv_heads = fields["num_attention_heads"], fields.get("num_key_value_heads")
        if kv_heads is not None and heads % kv_heads:
            fields["num_key_value_heads"] = 1
    return ModelSpec(family, title, fields, tuple(cuts), ignored)


def _read(path: Path) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """(family, the keys that are passed on, the names of those that are not)."""
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ArgumentError(_OP, "model", str(path), "an existing config.json, or a preset's name")
    try:
        data = files.parse(files.read(path, SIZE_LIMIT))
    except OSError as error:
        raise ArgumentError(_OP, "model", str(path), f"a file that can be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ArgumentError(_OP, str(path), f"not JSON ({error})", "a JSON object") from error
    if not isinstance(data, dict):
        raise ArgumentError(_OP, str(path), type(data).__name__, "a JSON object")
    family = data.get("model_type")
    if not isinstance(family, str) or family not in PRESETS:
        raise ArgumentError(_OP, f"{path}: model_type", repr(family), " or ".join(map(repr, PRESETS)))
    for key in ("auto_map", "quantization_config"):
        if data.get(key):
            raise ArgumentError(_OP, f"{path}: {key}", "present", "absent: random weights, transformers' own classes")
    for key, most in _MOST.items():
        value = data.get(key)
        if key in _REQUIRED and value is None:
            raise ArgumentError(_OP, f"{path}: {key}", "absent", f"an integer from 1 to {most}")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 1 <= value <= most):
            raise ArgumentError(_OP, f"{path}: {key}", repr(value), f"an integer from 1 to {most}")
    for key in _NUMBERS:
        value = data.get(key)
        if value is not None and not _number(value):
            raise ArgumentError(_OP, f"{path}: {key}", repr(value), "a finite number")
    if not isinstance(data.get("layer_types"), list | None):
        raise ArgumentError(_OP, f"{path}: layer_types", repr(data["layer_types"]), "a list, one entry for each layer")
    ignored = sorted(k for k in data if k not in _PASSED and k != "model_type")
    return family, {k: v for k, v in data.items() if k in _PASSED and v is not None}, tuple(ignored)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def config_of(wanted: ModelSpec) -> Any:
    """transformers' config object of a spec."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    fields = dict(wanted.fields)
    theta = fields.pop("rope_theta", None)
    if theta is not None:  # transformers 5 keeps them together
        rope = fields.pop("rope_parameters", None) or fields.pop("rope_scaling", None) or {}
        if not isinstance(rope, dict):
            raise ArgumentError(_OP, "rope_scaling", repr(rope), "a JSON object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        fields["rope_parameters"] = {"rope_theta": float(theta), **rope, "rope_type": kind}
    try:
        config = CONFIG_MAPPING[wanted.family](**fields)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ArgumentError(_OP, f"the config of {wanted.title}", str(error), "what transformers accepts") from error
    return config


def build(wanted: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int, copies: float) -> Any:
    """The model with transformers' own random initialisation, on ``device``, in eval mode.

    ``copies``: how many times its weights must fit into the free memory; refused beforehand if they do not.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(wanted)
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(_OP, f"the config of {wanted.title}", str(error), "what transformers can build") from error
    needed = int(copies * sum(p.numel() * p.element_size() for p in empty.parameters()))
    free = free_bytes(device)
    if free is not None and needed > free:
        raise ArgumentError(
            _OP,
            "model",
            f"{needed / 2**30:.1f} GiB with its gradients and activations",
            f"at most the {free / 2**30:.1f} GiB free on {device}; take tiny, fewer layers, or backward=False",
        )
    indices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=indices):
        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def free_bytes(device: torch.device) -> int | None:
    """Memory that tensors can still take on a device, what PyTorch's allocator keeps for itself included."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(kept)
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None

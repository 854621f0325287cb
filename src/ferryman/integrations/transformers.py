"""Hugging Face transformers: its attention and mask interfaces, switched to "ferryman" in a model that is ported; the
loss that a model holds; and its registry of experts' implementations, which their forwards' decorators read.

Recognising what its modules compute is `ferryman.porting.model`'s; no class of transformers is known here by name.
Tested with transformers 5.17 and 5.23.
"""

from __future__ import annotations

import os
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ferryman.errors import PortError
from ferryman.integrations import transformers_losses, transformers_masks
from ferryman.integrations.transformers_modules import NAME, same_as_ours, windowed
from ferryman.integrations.transformers_modules import watch as watch  # part of what a porter offers
from ferryman.ops.attention.arguments import MAX_HEAD_DIM
from ferryman.porting.model import blocks, rewrite, routines, trace
from ferryman.porting.model.check import check_model as _check_model
from ferryman.porting.model.classes import is_ported
from ferryman.porting.model.port import attributes, port, register, unport
from ferryman.porting.model.results import ModelResult
from ferryman.porting.model.sites import Left, PortReport, Site

__all__ = ["Left", "PortReport", "Site", "check_model", "is_ported", "port", "unport", "watch"]

_SWITCHED_FROM = ("sdpa",)
_owners: dict[int, weakref.ref[nn.Module]] = {}  # id of a config that says "ferryman" -> the model ported with it


class AttentionInterface:
    """transformers' registry of attention functions; a module looks its own up by its config's name for it."""

    registry = ALL_ATTENTION_FUNCTIONS
    op = "attention"
    composed = frozenset({"softmax"})
    doubtful = frozenset({"position_bias", "cache"})  # a bias that learns, pages: see attention_forward
    fixed: frozenset[str | int] = frozenset({"attention_mask", 4})

    def switch(
        self, model: nn.Module, readers: Sequence[tuple[str, nn.Module]]
    ) -> tuple[list[tuple[str, str | None]], list[Left]]:
        """([(path of a module that holds a config, its implementation before)], readers that keep theirs)."""
        by_config: dict[int, list[tuple[str, nn.Module]]] = {}
        left: list[Left] = []
        for path, module in readers:
            if isinstance(getattr(getattr(module, "config", None), "_attn_implementation", None), str):
                by_config.setdefault(id(module.config), []).append((path, module))
            else:
                left.append(_left(path, module, "it has no config that names its attention implementation"))
        switched: list[tuple[str, str | None, Any]] = []
        for modules in by_config.values():
            path = modules[0][0]
            config: Any = modules[0][1].config
            owner = _owners.get(id(config), lambda: None)()
            if owner is not None and config._attn_implementation == NAME:
                raise PortError(
                    f"{path}: its config belongs to another ported model ({type(owner).__name__}); "
                    "give each model its own (copy.deepcopy(config)), or unport the other"
                )
            reason = _refusal(config, [m for _, m in modules])
            if reason is None:
                switched.append((path, config._attn_implementation, config))
            else:
                left += [_left(p, m, reason) for p, m in modules]
        for _, before, config in switched:
            for path, _ in by_config[id(config)]:
                transformers_masks.note(model, path, config, before)
            config._attn_implementation = NAME
            _owners[id(config)] = weakref.ref(model)
            if all("sliding_window" in _passed(m) for _, m in by_config[id(config)]):
                windowed.add(id(config))
                weakref.finalize(config, windowed.discard, id(config))
        return [(path, before) for path, before, _ in switched], left

    def restore(self, model: nn.Module, switched: list[tuple[str, str | None]]) -> None:
        for path, before in switched:
            config: Any = model.get_submodule(path).config
            config._attn_implementation = before
            _owners.pop(id(config), None)
            windowed.discard(id(config))


def _left(path: str, module: nn.Module, reason: str) -> Left:
    return Left(path, type(module).__name__, f"attention stays (the rest of it is ported): {reason}")


def _refusal(config: Any, modules: Sequence[nn.Module]) -> str | None:
    if config._attn_implementation == "eager" and all(map(_beyond_sdpa, modules)):
        different = next(filter(None, map(_differs, modules)), None)  # eager is such models' default
        if different is not None:
            return f"its implementation is 'eager', and {different}"
    elif config._attn_implementation not in (*_SWITCHED_FROM, NAME):  # ours, by from_pretrained
        return f"its implementation is {config._attn_implementation!r}; required: {' or '.join(_SWITCHED_FROM)}"
    if any(m.training and getattr(m, "attention_dropout", 0.0) for m in modules):
        return "it trains, and attention_dropout is not 0: ops.attention drops others than PyTorch does"
    if getattr(config, "output_attentions", False):
        return "config.output_attentions asks for the weights, which ops.attention does not give"
    widths = [w for m in modules if isinstance(w := getattr(m, "head_dim", None), int)]
    if widths and max(widths) > MAX_HEAD_DIM:
        return f"head_dim is {max(widths)}; required: at most {MAX_HEAD_DIM}"
    return None


def _beyond_sdpa(module: nn.Module) -> frozenset[str]:
    """What of `ops.attention`, and not of sdpa's function, a module's calls pass."""
    return _passed(module) & {"s_aux", "softcap"}


def _passed(module: nn.Module) -> frozenset[str]:
    return rewrite.rewritten(type(module), frozenset()).passed


def _differs(module: nn.Module) -> str | None:
    """Why a module with sinks or a soft cap may not be switched from the function that its forward falls back to."""
    config: Any = module.config
    own = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if own is None:
        return "its module has no eager_attention_forward"
    heads = int(config.num_attention_heads)
    width = getattr(module, "head_dim", None) or config.hidden_size // heads
    return same_as_ours(module, own, heads, int(width), _beyond_sdpa(module))


register(AttentionInterface())
attributes.append(transformers_losses)
# What a decorated forward of experts finds there is another implementation of the forward that it wraps.
blocks.registries[id(ALL_EXPERTS_FUNCTIONS)] = ALL_EXPERTS_FUNCTIONS


def _falls_back(function: types.FunctionType) -> bool:
    """Whether a function that may have another package's implementation has none here, so that its own code runs."""
    closure = dict(
        zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True)
    )
    return closure.get("implementation") is function.__wrapped__  # type: ignore[attr-defined]


def _know_fallbacks() -> None:
    """A decorator of functions, which names the package whose implementation goes first; later than 5.17."""
    from transformers.integrations import hub_kernels

    decorate = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
    if decorate is None:
        return
    for outer in decorate.__code__.co_consts:
        for code in outer.co_consts if isinstance(outer, types.CodeType) else ():
            if isinstance(code, types.CodeType) and "implementation" in code.co_freevars:
                routines.wrappers[code] = _falls_back


_know_fallbacks()


def _know_modes() -> None:
    """Whether `torch.export` runs, as some routines ask; later than 5.17."""
    from transformers.utils import import_utils

    exporting = getattr(import_utils, "is_torchdynamo_exporting", None)
    if isinstance(exporting, types.FunctionType):
        trace.modes.add(exporting)


_know_modes()


def check_model(model: str | os.PathLike[str], **options: Any) -> ModelResult:
    """`ferryman.porting.model.check.check_model` with this module as the porter."""
    return _check_model(model, porter=sys.modules[__name__], **options)

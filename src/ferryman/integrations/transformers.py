"""Hugging Face transformers on Ferryman's ops: `port(model)` and back with `unport(model)`.

A ported module is the same instance with a subclass for its class, so its parameters, buffers, hooks, device, dtype and
mode are untouched, and every reference to it keeps working. Attention goes through transformers' own attention and mask
interfaces under the name "ferryman". No module global is rebound. Tested with transformers 5.17 and 5.23.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from ferryman.errors import PortError
from ferryman.integrations.transformers_modules import (
    FAMILIES,
    FORWARDS,
    NAME,
    is_ported,
    original_of,
    ported_class,
    role_of,
)
from ferryman.integrations.transformers_modules import watch as watch  # part of what a porter offers
from ferryman.ops.attention.definition import MAX_HEAD_DIM
from ferryman.porting.model.check import check_model as _check_model
from ferryman.porting.model_results import ModelResult

from transformers.activations import GELUActivation, GELUTanh, SiLUActivation  # isort: skip - after the check above

_STATE = "_ferryman_port"


@dataclass(frozen=True)
class Site:
    """A ported module: where it is, what it was, and the ops that one forward of it calls, once each."""

    path: str
    module: str
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """A module, or part of one, that stays as it was, and why."""

    path: str
    module: str
    reason: str


@dataclass(frozen=True)
class PortReport:
    """What `port` did."""

    model: str
    ported: tuple[Site, ...]
    unsupported: tuple[Left, ...]

    def calls(self, steps: int = 1) -> dict[str, int]:
        """Calls of each op that ``steps`` forward passes of the whole model must make."""
        counted = Counter(op for site in self.ported for op in site.ops)
        return {op: n * steps for op, n in sorted(counted.items())}


@dataclass(frozen=True)
class _State:
    report: PortReport
    attention: tuple[tuple[str, str | None], ...]  # (path of a module that holds the config, its implementation before)


_LOOKS_PORTABLE = re.compile(r"(Norm|MLP|Attention|Experts|MoeBlock)$")
_owners: dict[int, weakref.ref[nn.Module]] = {}  # id of a config that says "ferryman" -> the model ported with it


def port(model: nn.Module) -> PortReport:
    """Put a transformers model on Ferryman's ops, in place; `unport` takes it back.

    Norms, gated MLP activations, rotary embedding and attention of Llama, Qwen2, Qwen3, Mistral and Gemma; other
    modules stay and are listed. Porting a ported model changes nothing. Raises PortError if nothing can be ported, if
    part of the model is ported already, or if its config belongs to another ported model.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if not isinstance(model, nn.Module):
        raise PortError(f"port: the model is {type(model).__name__}; required: a torch.nn.Module of transformers")
    if _STATE in model.__dict__:
        state: _State = model.__dict__[_STATE]
        return state.report
    variants, left = _survey(model)
    attention = [(path, m) for path, m in model.named_modules() if path in variants and variants[path] == "attention"]
    configs, refused = _switchable(model, attention)
    left += refused
    kept = {item.path for item in refused}
    if not variants:
        reasons = "; ".join(f"{item.path} ({item.module}): {item.reason}" for item in left[:3])
        raise PortError(f"nothing in {type(model).__name__} can be ported; supported: {', '.join(FAMILIES)}. {reasons}")
    sites = []
    for path, variant in variants.items():
        module = model.get_submodule(path)
        served = {"silu": "silu_mul", "tanh": "gelu_mul", "none": "gelu_mul", "norm": "rms_norm"}.get(variant)
        names = (served,) if served else ("rope",) if path in kept else ("rope", "attention")
        sites.append(Site(path, type(module).__name__, names))
        original: Any = type(module)
        module.__class__ = ported_class(original, variant)
    before = []
    for path, config in configs:
        before.append((path, config._attn_implementation))
        config._attn_implementation = NAME
        _owners[id(config)] = weakref.ref(model)
    report = PortReport(type(model).__name__, tuple(sites), tuple(sorted(left, key=lambda item: item.path)))
    model.__dict__[_STATE] = _State(report, tuple(before))
    return report


def unport(model: nn.Module) -> None:
    """Take a model back to what `port` found: classes and attention implementation. An unported one stays."""
    model = getattr(model, "_orig_mod", model)
    state = model.__dict__.pop(_STATE, None) if isinstance(model, nn.Module) else None
    if state is None:
        return
    for path, implementation in state.attention:
        config: Any = model.get_submodule(path).config
        config._attn_implementation = implementation
        _owners.pop(id(config), None)
    for module in model.modules():
        if is_ported(module):
            module.__class__ = original_of(module)


def _survey(model: nn.Module) -> tuple[dict[str, str], list[Left]]:
    """({path: variant} of what can be ported, what cannot). Raises PortError where a part is ported already."""
    variants: dict[str, str] = {}
    left: list[Left] = []
    for path, module in model.named_modules():
        name = type(module).__name__
        if is_ported(module) or _STATE in module.__dict__:
            raise PortError(f"{path or name}: ported already, alone or with a larger model; unport that one first")
        if any(role_of(base) for base in type(module).__mro__):
            variant, reason = _variant(module)
            if reason is None:
                variants[path] = variant
            else:
                left.append(Left(path, name, reason))
        elif _LOOKS_PORTABLE.search(name):
            left.append(Left(path, name, "no port for this class"))
    return variants, left


def _variant(module: nn.Module) -> tuple[str, str | None]:
    """(variant of the ported class, why it cannot be ported or None)."""
    own: Any = type(module)
    found = role_of(own)
    if found is None:
        return "", "a subclass of a supported class: its forward may mean something else"
    role = found[1]
    if "forward" in module.__dict__:
        return "", "its forward was replaced on the instance (accelerate's hooks and the kernels hub do so)"
    takes = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if takes not in FORWARDS[role]:
        return "", f"its forward takes {takes}; required: {FORWARDS[role][0]} (an untested transformers version)"
    if role == "Attention":
        return "attention", None
    if role == "RMSNorm":
        return "norm", None
    return _activation(module.act_fn)


def _activation(act: Any) -> tuple[str, str | None]:
    if getattr(act, "_forward_hooks", None) or getattr(act, "_forward_pre_hooks", None):
        return "", "act_fn has a hook, which a fused activation would not run"
    if type(act) in (SiLUActivation, nn.SiLU):
        return "silu", None
    gelu = getattr(act, "act", None)
    if type(act) is GELUActivation and gelu is nn.functional.gelu:
        return "none", None
    if type(act) is GELUTanh and isinstance(gelu, functools.partial):
        return "tanh", None
    return "", f"its activation is {type(act).__name__}; required: SiLU, or GELU with tanh or erf"


def _switchable(model: nn.Module, attention: list[tuple[str, nn.Module]]) -> tuple[list[tuple[str, Any]], list[Left]]:
    """(path and config whose attention can be switched, attention modules that keep the interface they have)."""
    held: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in attention:
        held.setdefault(id(module.config), []).append((path, module))
    ported = {path for path, _ in attention}
    switched: list[tuple[str, Any]] = []
    left: list[Left] = []
    for modules in held.values():
        path, config = modules[0][0], modules[0][1].config
        owner = _owners.get(id(config), lambda: None)()
        if owner is not None and config._attn_implementation == NAME:  # type: ignore[union-attr]
            raise PortError(
                f"{path}: its config belongs to another ported model ({type(owner).__name__}); "
                "give each model its own (copy.deepcopy(config)), or unport the other"
            )
        others = [
            p for p, m in model.named_modules()
            if p not in ported and type(m).__name__.endswith("Attention") and getattr(m, "config", None) is config
        ]  # fmt: skip
        widths = {int(m.head_dim) for _, m in modules}  # type: ignore[arg-type]
        reason = None
        if any(m.attention_dropout for _, m in modules):
            reason = "attention_dropout is not 0, and ops.attention has no dropout"
        elif getattr(config, "output_attentions", False):
            reason = "config.output_attentions asks for the weights, which ops.attention does not give"
        elif max(widths) > MAX_HEAD_DIM:
            reason = f"head_dim is {max(widths)}; required: at most {MAX_HEAD_DIM}"
        elif others:
            reason = f"{others[0]} shares its config and cannot be ported"
        if reason is None:
            switched.append((path, config))
        else:
            left += [Left(p, type(m).__name__, f"attention stays (rotary is ported): {reason}") for p, m in modules]
    return switched, left


def check_model(model: str | os.PathLike[str], **options: Any) -> ModelResult:
    """`ferryman.porting.model.check.check_model` with this module as the porter."""
    return _check_model(model, porter=sys.modules[__name__], **options)

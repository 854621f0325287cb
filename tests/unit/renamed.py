"""A model again, from a copy of its source in which every class and every attribute of its modules is renamed."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

# Attributes that transformers' own base classes, and its interfaces, read of a module
_KEPT = {
    "padding_idx",
    "num_embeddings",
    "embedding_dim",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
    "config",
    "training",
    "weight",
    "bias",
    "base_model_prefix",
    "forward",
    "scaling",
    "is_causal",
    "layer_idx",
    "num_key_value_groups",
    "gradient_checkpointing",
    "generation_config",
    "head_dim",
    "attention_dropout",
    "sliding_window",
    "device",
    "dtype",
    "inv_freq",
    "original_inv_freq",
    "attention_scaling",
    "rope_type",
    "max_seq_len_cached",
    "original_max_seq_len",
    "attention_type",
    "has_relative_attention_bias",
    "is_decoder",
}


def _own(model: nn.Module) -> list[type]:
    return sorted(
        {type(m) for m in model.modules() if type(m).__module__.startswith("transformers.models.")},
        key=lambda kind: kind.__name__,
    )


class _Rename(ast.NodeTransformer):
    def __init__(self, attributes: dict[str, str], classes: dict[str, str]) -> None:
        self.attributes, self.classes = attributes, classes

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = self.attributes.get(node.attr, node.attr)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.classes.get(node.id, node.id)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.name = self.classes.get(node.name, node.name)
        return node


def renamed(model: nn.Module, folder: Path) -> nn.Module:
    """The same computation on the same tensors, from classes in a file of our own with other names everywhere.

    The instances are made without their constructors: state and children move to the new attributes.
    """
    kinds = _own(model)
    attributes: dict[str, str] = {}
    for module in model.modules():
        if type(module) in kinds:
            names = [n for n in vars(module) if not n.startswith("_")]
            names += [*module._parameters, *module._buffers, *module._modules]
            for name in names:
                if name not in _KEPT and not name.isdigit():
                    attributes.setdefault(name, f"quarry_{len(attributes)}")
    homes = {kind.__module__ for kind in kinds}
    twins: dict[type, type] = {}
    for home in sorted(homes):
        twins |= _again(sys.modules[home], attributes, folder)
    return _moved(model, attributes, twins, {})


def _again(home: ModuleType, attributes: dict[str, str], folder: Path) -> dict[type, type]:
    """{class of a module of transformers: the same class, renamed}."""
    tree = ast.parse(inspect.getsource(home))
    classes = {n.name: f"Kiln{i}" for i, n in enumerate(tree.body) if isinstance(n, ast.ClassDef)}
    changed = _Rename(attributes, classes).visit(tree)
    body = [n for n in changed.body if not (isinstance(n, ast.Assign) and _all(n))]
    for node in body:  # relative imports
        if isinstance(node, ast.ImportFrom) and node.level:
            base = home.__name__.split(".")[: -node.level]
            node.module, node.level = ".".join([*base, *([node.module] if node.module else [])]), 0
    name = f"quarried_{home.__name__.replace('.', '_')}_{abs(hash(str(folder))) % 10**8}"
    path = folder / f"{name}.py"
    path.write_text(ast.unparse(ast.fix_missing_locations(ast.Module(body, []))), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return {getattr(home, old): getattr(module, new) for old, new in classes.items()}


def _all(node: ast.Assign) -> bool:
    return any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def _moved(module: nn.Module, attributes: dict[str, str], twins: dict[type, type], done: dict[int, nn.Module]) -> Any:
    if id(module) in done:
        return done[id(module)]
    kind: Any = twins.get(type(module), type(module))
    other = kind.__new__(kind)
    done[id(module)] = other
    own = type(module) in twins

    def called(name: str) -> str:
        return attributes.get(name, name) if own else name

    for name, value in vars(module).items():
        if name == "_modules":
            value = {called(n): None if m is None else _moved(m, attributes, twins, done) for n, m in value.items()}
        elif name in ("_parameters", "_buffers"):
            value = {called(n): t for n, t in value.items()}
        elif name == "_non_persistent_buffers_set":
            value = {called(n) for n in value}
        other.__dict__[name if name.startswith("_") else called(name)] = value
    return other

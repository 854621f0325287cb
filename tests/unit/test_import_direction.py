"""Imports point one way: cli, integrations -> porting -> dispatch -> {ops, backends, device_profiles}."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "ferryman"
FACE = "ferryman"  # the package's own __init__: what a user imports
LEAVES = {"errors", "files", "lazy", "settings"}
# What each room may import, beside itself and the leaves.
MAY: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "lazy": set(),
    "settings": {"errors", "files"},
    "ops": set(),
    "backends": set(),
    "device_profiles": set(),
    "dispatch": {"ops", "backends", "device_profiles"},
    "porting": {"dispatch", "ops", "backends", "device_profiles"},
    "testing": {"porting", "dispatch", "ops", "backends", "device_profiles"},
    "integrations": {FACE, "porting", "dispatch", "ops", "backends", "device_profiles"},
    # the model check is handed its integration by the command line, so that porting knows none
    "cli": {FACE, "integrations", "porting", "dispatch", "ops", "backends", "device_profiles"},
    # `ferryman.port` loads porting, and the integration of a library that is loaded, when it is called
    FACE: {"dispatch", "ops", "device_profiles", "porting", "integrations"},
    "__main__": {"cli"},
}
TOOLCHAINS = {"triton", "cupy", "cupy_backends", "hip", "cuda", "ziglang"}
KERNELS = re.compile(r"ops/\w+/(\w+)_kernels\.py")


def room(module: str) -> str:
    """ "ferryman.ops.norm.bounds" -> "ops"; "ferryman" or a name in it -> FACE."""
    parts = module.split(".")
    if len(parts) < 2 or not ((SOURCE / parts[1]).is_dir() or (SOURCE / f"{parts[1]}.py").is_file()):
        return FACE
    return parts[1]


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, at any depth, also by `import_module("literal")` and f-strings of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if package else module.split(".")[:-1]
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if name == "import_module" and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value.rstrip(".")


def files() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py"))


def faults(path: Path, source: str) -> list[str]:
    """What a file imports and must not."""
    module, relative = module_of(path), path.relative_to(SOURCE).as_posix()
    mine = room(module)
    kernel = KERNELS.fullmatch(relative)
    allowed = MAY[mine] | {mine} | (set() if mine in LEAVES else LEAVES)
    if kernel:
        allowed = allowed | {"backends"}
    found = []
    for line, name in imports(ast.parse(source), module, path.name == "__init__.py"):
        where = f"{relative}:{line} imports {name}"
        if name.split(".")[0] == "ferryman":
            if room(name) not in allowed:
                found.append(f"{where}: {mine} may import {', '.join(sorted(allowed))}")
            if kernel and (name.endswith(".definition") or ".definition." in name):
                found.append(f"{where}: an implementation must not import the meaning that judges it")
        elif name.split(".")[0] in TOOLCHAINS and mine == "ops" and not kernel:
            found.append(f"{where}: a definition or a menu imports no toolchain")
    return found


def test_there_is_something_to_look_at() -> None:
    rooms = {room(module_of(p)) for p in files()}
    assert set(MAY) <= rooms | {FACE}, "a room of the design is missing"
    assert rooms <= set(MAY), "a new room has no rule"


@pytest.mark.parametrize("path", files(), ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    assert faults(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ops/norm/definition.py", "from ferryman.dispatch import registry"),
        ("ops/norm/definition.py", "from ... import dispatch"),
        ("ops/norm/implementations.py", "import triton.language as tl"),
        ("ops/norm/implementations.py", "from ferryman.backends import cuda"),
        ("ops/norm/triton_kernels.py", "from ferryman.ops.norm.definition import rms_norm"),
        ("ops/norm/triton_kernels.py", "def f():\n    from .definition import rms_norm"),
        ("backends/cuda.py", "from ferryman import ops"),
        ("backends/cuda.py", "import importlib\nimportlib.import_module(f'ferryman.ops.{name}.simt_kernels')"),
        ("device_profiles/detect.py", "import ferryman.ops.norm"),
        ("dispatch/select.py", "from ferryman.porting import parity"),
        ("dispatch/select.py", "import ferryman"),
        ("porting/model/check.py", "from ferryman.integrations import transformers"),
        ("porting/judging/parity.py", "from ferryman.cli import output"),
        ("integrations/transformers.py", "from ferryman.cli import output"),
        ("errors.py", "from ferryman import settings"),
    ],
)
def test_a_wrong_import_is_found(file: str, line: str) -> None:
    assert faults(SOURCE / file, line)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ops/norm/triton_kernels.py", "import triton\nfrom ferryman.backends.base import Target"),
        ("ops/norm/definition.py", "from . import bounds\nfrom ferryman.errors import ArgumentError"),
        ("dispatch/explain.py", "from ferryman import ops, settings"),
        ("porting/model/check.py", "from ferryman.dispatch import trace"),
        ("cli/check.py", "import ferryman\nfrom ferryman.integrations import transformers"),
    ],
)
def test_a_right_import_is_not(file: str, line: str) -> None:
    assert faults(SOURCE / file, line) == []

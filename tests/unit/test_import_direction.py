"""Imports point one way: cli, integrations -> porting -> dispatch -> {ops, backends, device_profiles}; no circles.

Every import counts, also one inside a function: what is loaded late is a part of the structure, too. What stands under
`if TYPE_CHECKING:` counts for the direction, and not as a circle: it is never executed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

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


class _Executed(ast.NodeTransformer):
    """A tree without what is for a type checker alone."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse or ast.Pass()
        if isinstance(node.test, ast.Attribute) and node.test.attr == "TYPE_CHECKING":
            return node.orelse or ast.Pass()
        return node


def files() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py"))


Graph = dict[str, set[str]]


def graph(sources: Mapping[str, str], packages: Collection[str] = ()) -> Graph:
    """Module -> the modules that it imports. A name in a module is that module's; a submodule is its own."""
    imported: Graph = {}
    for module, source in sources.items():
        tree = _Executed().visit(ast.parse(source))
        imported[module] = set()
        for _, name in imports(tree, module, module in packages):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            if name and name != module:
                imported[module].add(name)
    return imported


def rooms_of(modules: Graph, package: str) -> Graph:
    """The same between what a package holds: its modules, and its folders as one each."""
    rooms: Graph = {}
    for module, others in modules.items():
        if module.startswith(package + "."):
            mine = module.removeprefix(package + ".").partition(".")[0]
            theirs = {o.removeprefix(package + ".").partition(".")[0] for o in others if o.startswith(package + ".")}
            rooms.setdefault(mine, set()).update(theirs - {mine})
    return rooms


def circles(edges: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reached: Graph = {}
    for node in edges:
        seen, left = set[str](), [node]
        while left:
            for other in edges.get(left.pop(), set()) - seen:
                seen.add(other)
                left.append(other)
        reached[node] = seen
    groups = {frozenset(o for o in edges if o in reached[node] and node in reached[o]) for node in edges}
    return sorted(sorted(group) for group in groups if group)


@functools.cache
def ours() -> tuple[Graph, list[str]]:
    packages = [module_of(p) for p in files() if p.name == "__init__.py"]
    return graph({module_of(p): p.read_text(encoding="utf-8") for p in files()}, packages), packages


def faults(path: Path, source: str) -> list[str]:
    """What a file imports and must not."""
    module, relative = module_of(path), path.relative_to(SOURCE).as_posix()
    mine = room(module)
    kernel = KERNELS.fullmatch(relative)
    allowed = MAY[mine] | {mine} | (set() if mine in LEAVES else LEAVES)
    if kernel:
        allowed = allowed | {"backends"}
    violations = []
    for line, name in imports(ast.parse(source), module, path.name == "__init__.py"):
        where = f"{relative}:{line} imports {name}"
        if name.split(".")[0] == "ferryman":
            if room(name) not in allowed:
                violations.append(f"{where}: {mine} may import {', '.join(sorted(allowed))}")
            if kernel and (name.endswith(".definition") or ".definition." in name):
                violations.append(f"{where}: an implementation must not import the meaning that judges it")
        elif name.split(".")[0] in TOOLCHAINS and mine == "ops" and not kernel:
            violations.append(f"{where}: a definition or a menu imports no toolchain")
    return violations


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
        ("dispatch/select.py", "from ferryman.porting.judging import parity"),
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


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules, _ = ours()
    assert len(modules) > 300 and sum(map(len, modules.values())) > 1000, "the imports were not read"
    assert circles(modules) == []


def test_no_room_imports_itself_by_way_of_others() -> None:
    """At every level of folders: the rooms of the package, those of porting, the files and folders of backends."""
    modules, packages = ours()
    cycles = {package: circles(rooms_of(modules, package)) for package in packages}
    assert {package: groups for package, groups in cycles.items() if groups} == {}


def test_porting_has_rooms_only() -> None:
    assert [p.name for p in (SOURCE / "porting").glob("*.py")] == ["__init__.py"]
    assert not list(imports(ast.parse((SOURCE / "porting" / "__init__.py").read_text()), "ferryman.porting", True))


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": "import b", "b": "import a"}, [["a", "b"]]),
        ({"a": "import b", "b": "def f():\n    import c", "c": "from a import x"}, [["a", "b", "c"]]),
        ({"a": "import b", "b": "import importlib\nimportlib.import_module('a')"}, [["a", "b"]]),
        ({"p": "", "p.a": "from . import b", "p.b": "from .a import x"}, [["p.a", "p.b"]]),
        ({"p": "from p.a import x", "p.a": "from p import x"}, [["p", "p.a"]]),
        ({"a": "import b", "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a"}, []),
        ({"a": "import b", "b": "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import a"}, [["a", "b"]]),
        ({"a": "import b\nimport c", "b": "import c", "c": ""}, []),
    ],
)
def test_a_circle_is_found(sources: dict[str, str], expected: list[list[str]]) -> None:
    assert circles(graph(sources, ["p"])) == expected


def test_a_circle_of_rooms_is_found_where_no_module_is_in_one() -> None:
    modules = graph({"p": "", "p.x": "", "p.x.a": "import p.y.a", "p.x.b": "", "p.y": "", "p.y.a": "import p.x.b"})
    assert circles(modules) == [] and circles(rooms_of(modules, "p")) == [["x", "y"]]

"""An op is one folder: outside `ops/` and `integrations/`, nothing that only one op has decides what happens.

What is looked for in the syntax trees: an op's or a family's name, or a parameter that one family alone has, as a whole
string, as an attribute, as a keyword, or as a function's parameter; and an import of a family or an op. Docstrings,
examples in help texts and data files say what they like.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ferryman.dispatch import registry

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src" / "ferryman"
OURS = ("ops", "integrations")
PYTORCH = (functional, torch, torch.Tensor, torch.cuda)
# Names of families or ops that mean something else in some rooms: PyTorch's switches for float32 products; "down" is a
# direction of rounding there, and a weight of experts here.
OTHERWISE = {
    "backends": {"matmul"},
    "cli": {"down"},
    "device_profiles": {"down"},
    "porting": {"matmul", "interleaved", "down"},
}
# What is left, and why.
LEFT = {
    "porting/model": "what a role is called in a report, and which calls a check of a model may leave",
    "porting/graph": "which of PyTorch's functionals mean an op, until its recognition lies in the op's folder",
}


@cache
def identifiers() -> dict[str, int]:
    """In how many files outside a word is a variable's, a parameter's or an attribute's name. ``mask`` and ``eps`` are
    everybody's words; ``cast_before_weight`` is an op's."""
    counts: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in OURS:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            names |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
            names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            for name in names:
                counts[name] = counts.get(name, 0) + 1
    return counts


@cache
def words() -> dict[str, str]:
    """What only one family has -> the family."""
    owners: dict[str, set[str]] = {}
    ordinary = {word for word, count in identifiers().items() if count >= 2}
    for family in registry.families():
        owners.setdefault(family.name, set()).add(family.name)
    for op in registry.primitives().values():
        family = registry.family_of(op).name
        owners.setdefault(op.name, set()).add(family)
        for word in {*op.names, *op.outputs} - ordinary:
            owners.setdefault(word, set()).add(family)
    return {word: next(iter(own)) for word, own in owners.items() if len(own) == 1}


def docstrings(tree: ast.AST) -> set[int]:
    """Constants that stand alone as a statement."""
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, word) of every string, attribute, keyword and parameter."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value
        elif isinstance(node, ast.Attribute):
            plain = isinstance(node.value, ast.Name) and node.value.id != "ops"
            if not (plain or isinstance(node.value, ast.Attribute)) or not any(hasattr(x, node.attr) for x in PYTORCH):
                yield node.lineno, node.attr  # PyTorch has a softmax, too
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every import of a family's module, or of a family or an op from `ferryman.ops`."""
    names = {*registry.primitives(), *(family.name for family in registry.families())}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[:2] == ["ferryman", "ops"] and len(parts) > 2 and parts[2] in names:
                yield node.lineno, parts[2]


def faults(relative: str, source: str) -> list[str]:
    """What a file names of one family."""
    known = words()
    other = OTHERWISE.get(relative.split("/")[0], set())
    tree = ast.parse(source)
    names = [
        f"{relative}:{line} names {word!r}, which {known[word]} alone has"
        for line, word in named(tree)
        if word in known and word not in other
    ]
    return [*names, *(f"{relative}:{line} imports {name} from ferryman.ops" for line, name in imported(tree))]


def files() -> list[str]:
    every = (path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    return sorted(f for f in every if f.split("/")[0] not in OURS and not f.startswith(tuple(LEFT)))


@pytest.mark.parametrize("file", files())
def test_no_file_outside_decides_by_what_one_op_has(file: str) -> None:
    assert faults(file, (SOURCE / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        'if op == "rms_norm": pass',
        'if op.startswith("rope"): pass',
        'FAMILIES = ("norm",)',
        'x = {"paged_attention": 1}',
        "ops.cross_entropy(x)",
        'args["norm_before_gate"] = 1',
        "f(softcap=1.0)",
        "from ferryman.ops.norm.definition import rms_norm",
        "from ferryman.ops import attention",
        "from ferryman.ops import rms_norm as norm_of_rows",
        "from ferryman.ops.matmul import definition",
        "import ferryman.ops.norm",
        "import ferryman.ops.norm.definition as definition",
        "def f(norm_before_gate): pass",
        "g = lambda *, softcap: softcap",
    ],
)
def test_what_decides_is_found(source: str) -> None:
    assert faults("porting/some.py", source)


def test_what_does_not_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults("porting/some.py", '"""An op such as rms_norm."""\nhelp = "such as rms_norm or softmax"') == []
    assert faults("porting/some.py", "import ferryman.ops\nfrom ferryman.ops import menu") == []
    # a parameter that has the name of something of PyTorch's
    known = words() | {"temperature": "softmax"}
    monkeypatch.setitem(globals(), "words", lambda: known)
    assert faults("porting/some.py", "torch.cuda.temperature(device)") == []
    assert faults("porting/some.py", "f(temperature=1.0)")


def test_every_exception_still_stands() -> None:
    for place in LEFT:
        every = [f.relative_to(SOURCE).as_posix() for f in (SOURCE / place).rglob("*.py")]
        assert any(faults(f, (SOURCE / f).read_text(encoding="utf-8")) for f in every), f"{place}: strike it off"


def of_one_op(files: Iterable[Path]) -> list[Path]:
    """Test files that are named after an op or a family."""
    names = {*registry.primitives(), *(family.name for family in registry.families())}
    return [path for path in files if any(f"_{name}_" in f"_{path.stem}_" for name in names)]


def test_the_tests_of_one_op_stand_in_its_folder() -> None:
    inside = sorted((TESTS / "ops").rglob("test_*.py"))
    assert of_one_op(set(TESTS.rglob("*.py")) - set((TESTS / "ops").rglob("*.py"))) == []
    named = [Path("test_triton_attention.py"), Path("test_rope_plan.py"), Path("test_rank.py")]
    assert of_one_op(named) == named[:2]
    assert {path.parts[-2] for path in inside} <= {family.name for family in registry.families()}

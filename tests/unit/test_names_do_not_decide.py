"""What a class, a module or a family is called decides nothing: the code names none, and renamed models port alike."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import ferryman
from ferryman.porting.model import bundled, families, generic
from tests.unit.renamed import renamed

transformers = pytest.importorskip("transformers")
import ferryman.integrations.transformers  # noqa: E402 - it registers itself

SOURCE = Path(ferryman.__file__).parent
# What builds, names and measures models, and proposes nothing; `port` must not import it (below).
BUILDERS = {
    "bundled.py",
    "family.py",
    "families.py",
    "multimodal.py",
    "given.py",
    "diffusion.py",
    "elsewhere.py",
    "config.py",
    "trial.py",
    "check.py",
    "modules.py",
}
READERS = [
    *sorted((SOURCE / "integrations").glob("*.py")),
    *sorted(p for p in (SOURCE / "porting" / "model").glob("*.py") if p.name not in BUILDERS),
    *sorted(SOURCE.glob("ops/*/recognise.py")),
    SOURCE / "ops" / "recognition.py",
]
# Names of PyTorch's own, and a mark of tensors without data; no model is told from another by them.
_LOOKS = ("get", "startswith", "endswith", "match", "search", "fullmatch")
OURS = ("known[function.__name__]",)  # what a copy that was compiled a line before is called
ALLOWED = {"Parameter", "Tensor", "Module", "dict", "list", "int", "float", "bool", "str", "type"}


def _names_of_models() -> set[str]:
    """Every family's name, and the classes of its file, in lower case."""
    known = {*transformers.CONFIG_MAPPING, *families.FAMILIES}
    return {re.sub(r"[-_.]", "", name).lower() for name in known if len(name) > 2}


def _strings(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, text) of string constants that are no docstrings and no messages to users."""
    prose = {
        id(n.body[0].value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef) and n.body and isinstance(n.body[0], ast.Expr)
    }
    return [
        (n.lineno, n.value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in prose
    ]


def deciding(text: str, families: set[str]) -> list[str]:
    """Lines of a source that compare, look up or match a class's or a module's name, or that hold a family's."""
    tree = ast.parse(text)
    lines = []
    for node in ast.walk(tree):
        tests: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            tests = [node]
        elif isinstance(node, ast.Subscript):
            tests = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOOKS:
            tests = [node]
        for test in tests:
            for part in ast.walk(test):
                if isinstance(part, ast.Attribute) and part.attr in ("__name__", "__qualname__"):
                    lines.append(f"{node.lineno}: {ast.unparse(node)}")
    for line, value in _strings(tree):
        plain = re.sub(r"[-_.]", "", value).lower()
        if plain in families and plain not in ("ferryman", "sdpa"):
            lines.append(f"{line}: {value!r}")
    return lines


@pytest.mark.parametrize("path", READERS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_name_of_a_class_or_family_decides(path: Path) -> None:
    lines = deciding(path.read_text(encoding="utf-8"), _names_of_models())
    kept = [line for line in lines if not any(f"'{name}'" in line or f'"{name}"' in line for name in ALLOWED)]
    kept = [line for line in kept if not line.endswith(OURS)]
    assert not kept, kept


@pytest.mark.parametrize(
    "text",
    [
        "if type(module).__name__ == 'LlamaRMSNorm': pass",
        "TABLE[type(m).__name__]",
        "TABLE.get(type(m).__qualname__)",
        "type(m).__name__.endswith('RMSNorm')",
        "kinds = {'llama': 1}",
        "'gpt-oss' in model",
    ],
)
def test_the_scan_sees_what_it_is_for(text: str) -> None:
    assert deciding(text, _names_of_models())


def test_porting_imports_nothing_that_names_families() -> None:
    for name in (
        "port",
        "recognise",
        "blocks",
        "helpers",
        "rewrite",
        "proof",
        "branches",
        "gating",
        "classes",
        "source",
    ):
        tree = ast.parse((SOURCE / "porting" / "model" / f"{name}.py").read_text(encoding="utf-8"))
        lines = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        imported = {str(n.module).rpartition(".")[2] for n in lines}
        imported |= {a.name for n in lines for a in n.names if str(n.module).endswith("porting.model")}
        naming = {"bundled", "diffusion", "elsewhere", "families", "family", "multimodal", "given", "trial", "check"}
        assert not imported & naming, name


RENAMED = ("llama", "qwen3", "gemma2", "phi3", "gpt_neox", "olmo2", "cohere", "bert", "t5", "vit")


@pytest.mark.parametrize("family", RENAMED)
def test_a_family_whose_names_are_all_changed_ports_alike(family: str, tmp_path: Path) -> None:
    model = bundled.build(family, True)
    wanted = ferryman.port(model)
    ferryman.unport(model)
    other = renamed(model, tmp_path)
    assert not [m for m in other.modules() if type(m).__module__.startswith("transformers.models.")]
    run = bundled.inputs_of(family, True, model)
    torch.manual_seed(0)
    before = dict(generic.tensors_in(run(model)))
    torch.manual_seed(0)
    assert all(torch.equal(t, before[n]) for n, t in generic.tensors_in(run(other)))
    report = ferryman.port(other)
    assert Counter(_ops(report)) == Counter(_ops(wanted))
    torch.manual_seed(0)
    after = dict(generic.tensors_in(run(other)))
    assert all(generic.relative(after[n], t) < 1e-4 for n, t in before.items())


def _ops(report: Any) -> list[tuple[str, ...]]:
    return [(*sorted(site.ops), "maybe", *site.maybe) for site in report.ported]

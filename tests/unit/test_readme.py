"""What the README shows is what happens: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ferryman.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/settings.md", "docs/ops.md")
TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[b.splitlines()[0] for b in BLOCKS])
def test_python_runs_and_prints_what_its_comments_say(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "transformers" in block:
        pytest.importorskip("transformers")
    here = block.replace('ferryman.use("cuda", "triton", "torch")', 'ferryman.use("torch")')
    exec(compile(here, "README", "exec"), {})  # noqa: S102 - our own README
    printed = capsys.readouterr().out
    for said in re.findall(r"^print\([^#]*?\)\s+# (Counter.*|\{.*)$", block, re.MULTILINE):
        assert said in printed


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) == 2


def test_commands_have_these_verbs_and_options() -> None:
    known = {c.name: c.callback.__code__.co_varnames for c in main.app.registered_commands if c.callback}
    for group in main.app.registered_groups:
        inside = group.typer_instance.registered_commands if group.typer_instance else []
        known |= {f"{group.name} {c.name}": c.callback.__code__.co_varnames for c in inside if c.callback}
    names = {"json": "as_json", "use": "request", "all": "every", "as": "stands_in_for", "for": "to"}
    commands = re.findall(r"^ {4}ferryman (.+)$", TEXT, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        verb, *words = shlex.split(command, comments=True)
        if verb not in known and words:
            verb = f"{verb} {words.pop(0)}"
        assert verb in known, command
        for option in (w.removeprefix("--") for w in words if w.startswith("--")):
            assert names.get(option, option) in known[verb], command


def test_a_command_that_ends_in_2_on_a_cpu_says_what_it_needs() -> None:
    """Without a GPU `tune` has nothing to choose from, `--as` nothing that executes PTX, Triton nothing to run on."""
    commands = re.findall(r"^ {4}ferryman (.+)$", TEXT, re.MULTILINE)
    needing = [c for c in commands if c.startswith("tune") or "--backend triton" in c or "--peers" in c]
    assert len(needing) >= 3
    for command in needing:
        assert re.search(r"#.*(on a GPU|in a clone)", command), command
    before = TEXT[: TEXT.index("ferryman check --as")].rstrip().rpartition("\n\n")[2]
    assert "newer one that is here" in " ".join(before.split())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        assert link.startswith("https://") or (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_the_extras_are_the_package_s() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    table = TEXT[TEXT.index("| extra |") :].split("\n\n")[0]
    for name in re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:])):
        assert re.search(rf"^{name} = \[", project, re.MULTILINE), name


# ---------------------------------------------------------------------------------------- tables of measured results


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The script that writes them."""
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "ci" / "readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
    return module


def test_its_tables_are_those_of_the_packed_results(tables: ModuleType) -> None:
    assert tables.written(TEXT) == TEXT, "README.md's tables are not what benchmarks/results say: make docs"


def test_a_table_that_was_edited_or_is_old_differs(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "BLOCKS", {name: block for name, block in tables.BLOCKS.items() if name != "check"})
    by_hand = TEXT.replace("| all ops, H100 | 320 |", "| all ops, H100 | 321 |", 1)
    assert by_hand != TEXT == tables.written(by_hand)
    page = tmp_path / "README.md"
    page.write_text(by_hand, "utf-8")
    monkeypatch.setattr(tables, "README", page)
    assert tables.main(["--check"]) == 1 and "make docs" in capsys.readouterr().out and page.read_text() == by_hand
    assert tables.main([]) == 0 and page.read_text("utf-8") == TEXT and tables.main(["--check"]) == 0
    results = tables.document

    def faster(name: str) -> Any:
        document = json.loads(json.dumps(results(name)))
        for family in document.get("families", ()):
            for case in family["cases"]:
                case["speed"] *= 2
        return document

    monkeypatch.setattr(tables, "document", faster)
    assert tables.written(TEXT) != TEXT  # other results, another table
    with pytest.raises(SystemExit, match="lost a mark of the table models"):
        tables.written(TEXT.replace("<!-- end of models -->", ""))

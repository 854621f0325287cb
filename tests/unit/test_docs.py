"""Pages that follow from the code are current."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> Any:
    spec = importlib.util.spec_from_file_location("ferryman_ci_docs", ROOT / "ci" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_current(docs: Any) -> None:
    assert docs.stale() == [], "run `make docs`"


def test_a_changed_page_is_noticed(docs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    assert docs.stale() == list(docs.PAGES)
    assert docs.main([]) == 0 and docs.stale() == []
    page = tmp_path / "settings.md"
    page.write_text(page.read_text("utf-8").replace("FERRYMAN_STRICT", "FERRYMAN_LAX"), "utf-8")
    assert docs.stale() == ["settings.md"]
    assert docs.main(["--check"]) == 1


def test_every_op_and_every_device_is_there(docs: Any) -> None:
    from ferryman.device_profiles import catalogue
    from ferryman.dispatch import registry

    page = docs.ops_page()
    for op in registry.primitives():
        assert f"| `{op}` |" in page
    for profile in catalogue().values():
        assert profile.generic or f"| {profile.name} |" in page


def test_the_simulators_page_names_every_instruction_and_assumption(docs: Any) -> None:
    import dataclasses
    import typing

    from ferryman.backends.simulator import findings, numerics, program

    page = docs.simulator_page()
    table = page.partition(docs._MARK)[2]
    for arch in ("gfx942", "gfx950"):
        assert f"{len(program.supported(arch))} for {arch}" in table
        for name in program.supported(arch):
            assert f"`{name}`" in table
    hints = typing.get_type_hints(numerics.Assumptions)
    for field in dataclasses.fields(numerics.Assumptions):
        values = [field.default, *(v for v in typing.get_args(hints[field.name]) if v != field.default)]
        assert f"| `{field.name}` | {', '.join(f'`{v}`' for v in values)} |" in page
    for kind in typing.get_args(findings.Kind):
        assert f"| `{kind}` |" in page


def test_editors_see_every_op() -> None:
    """`ferryman/ops/__init__.pyi` is what the folders say."""
    done = subprocess.run([sys.executable, "ci/stubs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

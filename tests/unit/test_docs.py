"""Pages that follow from the code are current."""

from __future__ import annotations

import importlib.util
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

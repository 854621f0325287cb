"""Settings: the environment wins over pyproject.toml, and what is wrong is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ferryman import settings
from ferryman.errors import SettingError, UnknownName

needs_tomllib = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory without a pyproject.toml, and nothing remembered of another one."""
    monkeypatch.chdir(tmp_path)
    settings.forget()
    yield tmp_path / "pyproject.toml"
    settings.forget()


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FERRYMAN_LOCKFILE")  # which tests set
    settings.forget()
    assert {s.key: settings.get(s.key) for s in settings.TABLE} == {s.key: s.default for s in settings.TABLE}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("backend", "cuda, triton", ("cuda", "triton")),
        ("backend", "", ()),
        ("strict", "yes", True),
        ("strict", "OFF", False),
        ("lockfile", "~/locks.json", Path.home() / "locks.json"),
        ("lockfile", "", None),
        ("profile", "mi300x", "mi300x"),
        ("cache_dir", "/some/where", Path("/some/where")),
    ],
)
def test_the_environment_is_read_now(monkeypatch: pytest.MonkeyPatch, key: str, text: str, value: object) -> None:
    monkeypatch.setenv(f"FERRYMAN_{key.upper()}", text)
    assert settings.get(key) == value


@needs_tomllib
def test_the_environment_wins_over_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write_text("[tool.ferryman]\nbackend = ['torch']\nstrict = true\n")
    assert settings.get("backend") == ("torch",)
    assert settings.get("strict") is True
    monkeypatch.setenv("FERRYMAN_BACKEND", "triton")
    monkeypatch.setenv("FERRYMAN_STRICT", "0")
    assert settings.get("backend") == ("triton",)
    assert settings.get("strict") is False


def test_a_bad_switch_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRYMAN_STRICT", "maybe")
    with pytest.raises(SettingError, match=r"FERRYMAN_STRICT is 'maybe'; required: one of 1, true"):
        settings.get("strict")


@needs_tomllib
def test_bad_projects(project: Path) -> None:
    for text, error, message in (
        ("[tool.ferryman]\nbackends = 'cuda'\n", UnknownName, "'backends'; nearest: backend"),
        ("[tool.ferryman]\nbackend = [1]\n", SettingError, r"\[tool.ferryman\] backend is \[1\]"),
        ("[tool.ferryman\n", SettingError, "pyproject.toml cannot be read"),
    ):
        project.write_text(text)
        settings.forget()
        with pytest.raises(error, match=message):
            settings.get("backend")


def test_the_table_says_all_of_it() -> None:
    table = settings.table_markdown()
    rows = [line for line in table.splitlines() if line.startswith("| `FERRYMAN_")]
    assert len(rows) == len(settings.TABLE)
    for setting, row in zip(settings.TABLE, rows, strict=True):
        assert row.startswith(f"| `FERRYMAN_{setting.key.upper()}` | `{setting.key}` |")
        assert row.endswith(f"| {setting.meaning} |")

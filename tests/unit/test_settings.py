"""Settings: the environment wins over pyproject.toml, and what is wrong is named."""

from __future__ import annotations

import os
import subprocess
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
        ("[tool.ferryman]\nbackend = 3\n", SettingError, r"pyproject.toml: \[tool.ferryman\] backend is 3; required: "),
        ("[tool.ferryman\n", SettingError, "pyproject.toml cannot be read"),
        ("a = " + "[" * 5000, SettingError, "pyproject.toml cannot be read"),
        ("[tool]\nferryman = 3\n", SettingError, r"pyproject.toml: \[tool.ferryman\] is 3; required: a table"),
        ("tool = 3\n", SettingError, r"pyproject.toml: \[tool\] is 3; required: a table"),
    ):
        project.write_text(text)
        settings.forget()
        with pytest.raises(error, match=message):
            settings.get("backend")


@needs_tomllib
def test_what_is_no_text_is_no_path_and_no_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FERRYMAN_LOCKFILE")
    for key in ("lockfile", "profile", "test_device"):
        project.write_text(f"[tool.ferryman]\n{key} = 3\n")
        settings.forget()
        with pytest.raises(SettingError, match=rf"\[tool.ferryman\] {key} is 3; required: a (path|name)"):
            settings.get(key)


@needs_tomllib
def test_a_long_value_is_cut(project: Path) -> None:
    project.write_text(f"[tool]\nferryman = {[0] * 1000}\n")
    with pytest.raises(SettingError, match=r"\.\.; required: a table") as caught:
        settings.get("backend")
    assert len(str(caught.value)) < 300 + len(str(project))


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@needs_tomllib
@pytest.mark.parametrize(
    ("verb", "text", "message"),
    [
        ("doctor", "[tool.ferryman]\nlockfil = 'x'\n", "unknown key of [tool.ferryman] in {}: 'lockfil'; nearest: "),
        ("devices", "[tool.ferryman]\nlockfil = 'x'\n", "unknown key of [tool.ferryman] in {}: 'lockfil'; nearest: "),
        ("doctor", "[tool.ferryman]\nbackend = [1]\n", "{}: [tool.ferryman] backend is [1]; required: names"),
        ("doctor", "[tool]\nferryman = 3\n", "{}: [tool.ferryman] is 3; required: a table"),
        ("doctor", "tool = 3\n", "{}: [tool] is 3; required: a table"),
        (
            "doctor",
            '[tool.ferryman]\nlockfile = "a\\u0000b"\n',
            "{}: [tool.ferryman] lockfile is 'a\\x00b'; required: a path, as text without a NUL",
        ),
    ],
)
def test_the_command_says_what_is_wrong_in_a_project(
    project: Path, verb: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FERRYMAN_LOCKFILE")
    project.write_text(text)
    done = _run("-m", "ferryman", verb)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ferryman: " + message.format(project.resolve()))


@needs_tomllib
def test_a_verbs_help_needs_no_settings(project: Path) -> None:
    project.write_text("tool = 3\n")
    done = _run("-m", "ferryman", "tune", "-h")
    assert done.returncode == 0 and "--lockfile" in done.stdout, done.stderr


@pytest.mark.parametrize("variable", ["FERRYMAN_LOCKFILE", "FERRYMAN_CACHE_DIR"])
def test_the_command_says_whose_home_is_unknown(variable: str) -> None:
    done = _run("-m", "ferryman", "doctor", **{variable: "~nosuch/x"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"ferryman: {variable} is '~nosuch/x'; required: a path")


_FIRST_CALL = """
import torch
import ferryman
rms_norm, x, weight = ferryman.ops.rms_norm, torch.ones(2, 4), torch.ones(4)
for call in (rms_norm, torch.compile(rms_norm, backend="eager")):
    try:
        call(x, weight)
    except ferryman.errors.FerrymanError as error:
        print(type(error).__name__, error)
"""


@needs_tomllib
def test_importing_works_and_the_first_call_raises(project: Path) -> None:
    project.write_text("[tool.ferryman]\nlockfil = 'x'\n")
    done = _run("-c", _FIRST_CALL)
    assert done.returncode == 0, done.stderr
    eager, compiled = [line for line in done.stdout.splitlines() if "lockfil" in line]
    assert eager.startswith("UnknownName unknown key of [tool.ferryman]")
    assert "unknown key of [tool.ferryman]" in compiled


def test_the_table_says_all_of_it() -> None:
    table = settings.table_markdown()
    rows = [line for line in table.splitlines() if line.startswith("| `FERRYMAN_")]
    assert len(rows) == len(settings.TABLE)
    for setting, row in zip(settings.TABLE, rows, strict=True):
        assert row.startswith(f"| `FERRYMAN_{setting.key.upper()}` | `{setting.key}` |")
        assert row.endswith(f"| {setting.meaning} |")

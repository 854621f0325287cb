"""Every environment variable and [tool.ferryman] key, in one table. The environment wins over pyproject.toml.

The table in docs/settings.md is generated from `TABLE`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ferryman.errors import SettingError, UnknownName

NO_LOCKFILE = Path("none")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def _switch(text: Any) -> bool:
    word = str(text).lower()
    if word not in _TRUE + _FALSE:
        raise ValueError("one of 1, true, yes, on, 0, false, no, off")
    return word in _TRUE


def _names(text: Any) -> tuple[str, ...]:
    parts = text.split(",") if isinstance(text, str) else text
    if not isinstance(parts, list) or not all(isinstance(p, str) for p in parts):
        raise ValueError("names separated by commas")
    return tuple(p.strip() for p in parts if p.strip())


def _path(text: Any) -> Path | None:
    if not isinstance(text, str) or "\0" in text:
        raise ValueError("a path, as text without a NUL")
    try:
        return Path(text).expanduser() if text else None
    except RuntimeError as error:
        raise ValueError("a path; the home directory that its ~ stands for is unknown, so write it out") from error


def _word(text: Any) -> str | None:
    if not isinstance(text, str):
        raise ValueError("a name")
    return text or None


@dataclass(frozen=True)
class Setting:
    """One setting: its pyproject key, how its text is read, its default and its meaning."""

    key: str
    read: Callable[[Any], Any]
    default: Any
    meaning: str

    @property
    def variable(self) -> str:
        return f"FERRYMAN_{self.key.upper()}"


TABLE = (
    Setting("backend", _names, (), "Backends that may serve a call, in order. An allow-list: beyond it, calls raise."),
    Setting("strict", _switch, False, "Raise instead of falling back to a less preferred implementation."),
    Setting("lockfile", _path, None, "JSON file of measured choices, as `ferryman tune` writes it; `none` for no such "
            "choices. Default: the one that comes with the package for this device."),
    Setting("profile", _word, None, "Name of the device profile to use for the accelerator, instead of detecting it."),
    Setting("test_device", _word, None, "Where the pytest plugin tests; default: the accelerator, else the CPU."),
    Setting("artefacts", _path, None, "Folder that `ferryman compile` wrote: kernels that match are not compiled."),
    Setting("cache_dir", _path, None, "Where compiled kernels are kept; default: the user's cache directory."),
)  # fmt: skip
_BY_KEY = {s.key: s for s in TABLE}


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    return {}  # Python 3.10 has no TOML reader: there, the environment only


@lru_cache(maxsize=1)
def _pyproject() -> Mapping[str, tuple[str, Any]]:
    """Each key that pyproject.toml sets: where that is, for messages, and its value."""
    path = Path("pyproject.toml")
    try:
        if not path.is_file():
            return {}
        path = path.resolve()
        table: Any = _toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingError(f"{path} cannot be read: {error}") from error
    for name, part in (("[tool]", "tool"), ("[tool.ferryman]", "ferryman")):
        table = table.get(part, {})
        if not isinstance(table, dict):
            raise SettingError(f"{path}: {name} is {_shown(table)}; required: a table")
    for key in table:
        if key == "ci":  # a matrix, which `ferryman ci` reads and checks
            continue
        if key not in _BY_KEY:
            raise UnknownName(f"key of [tool.ferryman] in {path}:", key, _BY_KEY)
    return {key: (f"{path}: [tool.ferryman] {key}", value) for key, value in table.items() if key != "ci"}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}.."


def get(key: str) -> Any:
    """The value of a setting now. Raises SettingError naming the variable, or file and key, with what it accepts.

    Raises UnknownName where pyproject.toml has a key that is no setting.
    """
    setting = _BY_KEY[key]
    if setting.variable in os.environ:
        origin, raw = setting.variable, os.environ[setting.variable]
    elif key in _pyproject():
        origin, raw = _pyproject()[key]
    else:
        return setting.default
    try:
        return setting.read(raw)
    except ValueError as error:
        raise SettingError(f"{origin} is {_shown(raw)}; required: {error}") from error


def check() -> None:
    """Raise what `get` raises for the first setting that cannot be read."""
    for setting in TABLE:
        get(setting.key)


def forget() -> None:
    """Read pyproject.toml again at the next `get`."""
    _pyproject.cache_clear()


def table_markdown() -> str:
    """The documentation's table."""
    rows = ["| variable | [tool.ferryman] key | default | meaning |", "|---|---|---|---|"]
    for s in TABLE:
        default = "none" if s.default in (None, ()) else str(s.default).lower()
        rows.append(f"| `{s.variable}` | `{s.key}` | {default} | {s.meaning} |")
    return "\n".join(rows) + "\n"

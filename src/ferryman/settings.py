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
    parts = text if isinstance(text, list) else str(text).split(",")
    if not all(isinstance(p, str) for p in parts):
        raise ValueError("names separated by commas")
    return tuple(p.strip() for p in parts if p.strip())


def _path(text: Any) -> Path | None:
    return Path(str(text)).expanduser() if text else None


def _word(text: Any) -> str | None:
    return str(text) or None


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
def _pyproject() -> Mapping[str, Any]:
    path = Path("pyproject.toml")
    if not path.is_file():
        return {}
    try:
        table = _toml(path.read_text(encoding="utf-8")).get("tool", {}).get("ferryman", {})
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingError(f"{path.resolve()} cannot be read: {error}") from error
    for key in table:
        if key not in _BY_KEY:
            raise UnknownName("[tool.ferryman] key", key, _BY_KEY)
    found: Mapping[str, Any] = table
    return found


def get(key: str) -> Any:
    """The value of a setting now. Raises SettingError naming the variable or key, with what it accepts."""
    setting = _BY_KEY[key]
    if setting.variable in os.environ:
        origin, raw = setting.variable, os.environ[setting.variable]
    elif key in _pyproject():
        origin, raw = f"[tool.ferryman] {key}", _pyproject()[key]
    else:
        return setting.default
    try:
        return setting.read(raw)
    except ValueError as error:
        raise SettingError(f"{origin} is {raw!r}; required: {error}") from error


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

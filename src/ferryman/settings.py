"""Every environment variable and key of a file, in one table: the environment wins over the working directory's
pyproject.toml ([tool.ferryman]), and that over the user's own file (`user_file`).

What leads to code that is loaded is never taken from the working directory, which may be anyone's.

The table in docs/settings.md is generated from `TABLE`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from ferryman import files
from ferryman.errors import SettingError, UnknownName

R = TypeVar("R")
_MOST_BYTES = 2**20
NO_LOCKFILE = Path("none")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class Remembered(Generic[R]):
    """A function whose results are kept until `forget`: those too that another thread is computing just then, which
    `functools.cache` would keep for good."""

    def __init__(self, function: Callable[..., R]) -> None:
        self._age = 0
        self._kept = lru_cache(maxsize=64)(lambda age, *args: function(*args))

    def __call__(self, *args: Any) -> R:
        return self._kept(self._age, *args)

    def forget(self) -> None:
        self._age += 1
        self._kept.cache_clear()


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
    leads_to_code: bool = False

    @cached_property
    def variable(self) -> str:
        return f"FERRYMAN_{self.key.upper()}"


TABLE = (
    Setting("backend", _names, (), "Backends that may serve a call, in order. An allow-list: beyond it, calls raise."),
    Setting("strict", _switch, False, "Raise instead of falling back to a less preferred implementation."),
    Setting(
        "lockfile",
        _path,
        None,
        "JSON file of measured choices, as `ferryman tune` writes it; `none` for no such "
        "choices. Default: the one that comes with the package for this device.",
    ),
    Setting("profile", _word, None, "Name of the device profile to use for the accelerator, instead of detecting it."),
    Setting("test_device", _word, None, "Where the pytest plugin tests; default: the accelerator, else the CPU."),
    Setting(
        "artefacts",
        _path,
        None,
        "Folder that `ferryman compile` wrote: kernels that match are not compiled.",
        leads_to_code=True,
    ),
    Setting(
        "cache_dir",
        _path,
        None,
        "Where compiled kernels are kept; default: the user's cache directory.",
        leads_to_code=True,
    ),
)
_BY_KEY = {s.key: s for s in TABLE}


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    return {}  # Python 3.10 has no TOML reader: there, the environment only


def user_file() -> Path | None:
    """The user's own settings: keys of the table, at the top of a TOML file. None where no home is known."""
    base = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(base) if base else Path("~/.config").expanduser()) / "ferryman" / "config.toml"
    except RuntimeError:
        return None


def _table(path: Path, tables: tuple[str, ...]) -> Mapping[str, tuple[str, Any]]:
    """Each key that a file sets, in the innermost of ``tables``: where that is, for messages, and its value."""
    try:
        if not path.exists():
            return {}
        path = path.resolve()
        table: Any = _toml(files.read(path, _MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingError(f"{path} cannot be read: {error}") from error
    for depth, part in enumerate(tables):
        table = table.get(part, {})
        if not isinstance(table, dict):
            raise SettingError(f"{path}: [{'.'.join(tables[: depth + 1])}] is {_shown(table)}; required: a table")
    name = f"[{'.'.join(tables)}] " if tables else ""
    for key in table:
        if key == "ci":  # a matrix, which `ferryman ci` reads and checks
            continue
        if key not in _BY_KEY:
            raise UnknownName(f"key of {name}in {path}:" if name else f"key of {path}:", key, _BY_KEY)
    return {key: (f"{path}: {name}{key}", value) for key, value in table.items() if key != "ci"}


@Remembered
def _files() -> Mapping[str, tuple[str, Any]]:
    """What files set: the user's own, over it the working directory's."""
    own = user_file()
    mine = {} if own is None else _table(own, ())
    project = _table(Path("pyproject.toml"), ("tool", "ferryman"))
    for setting in TABLE:
        if setting.leads_to_code and setting.key in project:
            where = f"set {setting.variable}" + ("" if own is None else f", or {setting.key} in {own}")
            raise SettingError(
                f"{project[setting.key][0]} would load code from where the working directory says; {where}"
            )
    return {**mine, **project}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}.."


def _given(setting: Setting) -> tuple[str, Any]:
    """Where a setting's text stands, and the text."""
    text = os.environ.get(setting.variable)
    if text is not None:
        return setting.variable, text
    return _files().get(setting.key, ("default", None))


def origin(key: str) -> str:
    """Where the value of a setting is from: "environment", the file and its key, or "default"."""
    place, _ = _given(_BY_KEY[key])
    return "environment" if place == _BY_KEY[key].variable else place


def get(key: str) -> Any:
    """The value of a setting now. Raises SettingError naming the variable, or file and key, with what it accepts.

    Raises UnknownName where a file has a key that is no setting.
    """
    setting = _BY_KEY[key]
    origin, raw = _given(setting)
    if origin == "default":
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
    """Read the files again at the next `get`."""
    _files.forget()


def table_markdown() -> str:
    """The documentation's table."""
    rows = ["| variable | key | in pyproject.toml | default | meaning |", "|---|---|---|---|---|"]
    for s in TABLE:
        default = "none" if s.default in (None, ()) else str(s.default).lower()
        project = "no: it leads to code" if s.leads_to_code else "yes"
        rows.append(f"| `{s.variable}` | `{s.key}` | {project} | {default} | {s.meaning} |")
    return "\n".join(rows) + "\n"

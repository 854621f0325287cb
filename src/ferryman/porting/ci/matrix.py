"""The matrix of a repository: `ferryman.yaml`, or `[tool.ferryman.ci]` of pyproject.toml. Rows are what is tested.

Everything is checked when it is read: unknown keys, rows and devices are refused with file, line and the nearest name.
"""

from __future__ import annotations

import datetime
import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ferryman import files
from ferryman.device_profiles.yaml_nodes import Node, read_nodes
from ferryman.errors import FerrymanError, ProfileError
from ferryman.porting.ci.row import HOW, SUITES, MatrixError, Quarantine, Row, Skip, consistent

_MOST_BYTES = 2**20
FILE, PYPROJECT = "ferryman.yaml", "pyproject.toml"
SCHEMA = 1
DEFAULT_ALWAYS = (FILE, PYPROJECT, "constraints.txt", "requirements*.txt", "setup.py", "setup.cfg", "conftest.py")
DEFAULT_NEVER = ("*.md", "*.rst", "docs/*", "LICENSE*", "CHANGELOG*", ".gitignore")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._/-]{0,127}(:[A-Za-z0-9._-]{1,127})?(@sha256:[0-9a-f]{64})?")
_TEXT_MOST = 500
_ROWS_MOST = 1000


@dataclass(frozen=True)
class Matrix:
    """All rows, and what holds for all of them. ``origin`` names the file."""

    origin: str
    rows: tuple[Row, ...]
    max_age_days: float = 14.0
    wait_minutes: int = 60
    require: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("src", ".")
    always: tuple[str, ...] = DEFAULT_ALWAYS
    never: tuple[str, ...] = DEFAULT_NEVER
    setup: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """A row by its id. Raises MatrixError with the nearest ones."""
        for row in self.rows:
            if row.id == name:
                return row
        raise MatrixError(f"{self.origin} has no row {name!r}; {nearest(name, [r.id for r in self.rows])}")

    @property
    def vendors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.vendor for row in self.rows))


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is none."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    return f"nearest: {', '.join(close)}" if close else f"known: {', '.join(names[:24]) or 'none'}"


def find(root: Path = Path()) -> Path:
    """The file that holds a repository's matrix. Raises MatrixError where there is none."""
    if (root / FILE).is_file():
        return root / FILE
    if (root / PYPROJECT).is_file() and "ci" in _tables(root / PYPROJECT):
        return root / PYPROJECT
    raise MatrixError(f"{root.resolve()} has no {FILE}, and no [tool.ferryman.ci] in {PYPROJECT}: ferryman ci init")


def read(path: Path) -> Matrix:
    """The matrix of a file. Raises MatrixError for anything that is not exactly what it should be."""
    origin = path.name
    try:
        if path.name == PYPROJECT:
            root = _Toml(files.read(path, _MOST_BYTES).decode()).node(_tables(path).get("ci", {}), 1)
        else:
            root = read_nodes(files.read(path, _MOST_BYTES), origin)
    except OSError as error:
        raise MatrixError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MatrixError(f"{path} cannot be read: it is not UTF-8") from error
    except ProfileError as error:
        raise MatrixError(str(error)) from error
    return _Reader(origin).matrix(root)


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    return {}


def _tables(path: Path) -> dict[str, Any]:
    """[tool.ferryman] of a pyproject.toml; empty where Python has no reader of TOML (3.10)."""
    try:
        table: Any = _toml(files.read(path, _MOST_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise MatrixError(f"{path} cannot be read: {error}") from error
    for part in ("tool", "ferryman"):
        table = table.get(part, {})
        if not isinstance(table, dict):
            raise MatrixError(f"{path}: [tool.ferryman] is no table")
    return table


class _Toml:
    """TOML values as nodes. tomllib keeps no lines: a key's is where its text first stands behind the last one."""

    def __init__(self, text: str) -> None:
        self.lines, self.at = text.splitlines(), 0

    def _line(self, key: str) -> int:
        for number in range(self.at, len(self.lines)):
            if re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", self.lines[number]):
                self.at = number
                return number + 1
        return self.at + 1

    def node(self, value: Any, line: int) -> Node:
        if isinstance(value, dict):
            entries = {}
            for key, inner in value.items():
                at = self._line(key)
                entries[key] = self.node(inner, at)
            return Node(entries, line)
        if isinstance(value, list):
            return Node([self.node(inner, line) for inner in value], line)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return Node(text, line, quoted=isinstance(value, str))


class _Reader:
    def __init__(self, origin: str) -> None:
        self.origin = origin

    def fail(self, node: Node, problem: str) -> MatrixError:
        return MatrixError(f"{self.origin}:{node.line}: {problem}")

    def mapping(self, node: Node, known: Sequence[str], what: str, needed: Sequence[str] = ()) -> dict[str, Node]:
        if not isinstance(node.value, dict):
            raise self.fail(node, f"{what} is {node.kind}; required: keys and values")
        for key, inner in node.value.items():
            if key not in known:
                raise self.fail(inner, f"unknown key {key!r} of {what}; {nearest(key, known)}")
        for key in needed:
            if key not in node.value:
                raise self.fail(node, f"{what} lacks {key!r}")
        return node.value

    def text(self, node: Node, what: str, pattern: re.Pattern[str] | None = None) -> str:
        value = node.value
        if (
            not isinstance(value, str)
            or node.is_null
            or not value
            or len(value) > _TEXT_MOST
            or not value.isprintable()
        ):
            raise self.fail(node, f"{what} is {_shown(value)}; required: a text of at most {_TEXT_MOST} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise self.fail(node, f"{what} is {_shown(value)}; required: {_REQUIRED[pattern]}")
        return value

    def texts(self, node: Node, what: str, pattern: re.Pattern[str] | None = None) -> tuple[str, ...]:
        if not isinstance(node.value, list):
            raise self.fail(node, f"{what} is {node.kind}; required: a list")
        return tuple(self.text(item, f"an entry of {what}", pattern) for item in node.value)

    def number(self, node: Node, what: str, least: float, most: float) -> float:
        try:
            value = float(str(node.value)) if isinstance(node.value, str) else float("nan")
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise self.fail(node, f"{what} is {_shown(node.value)}; required: a number from {least:g} to {most:g}")
        return value

    def matrix(self, root: Node) -> Matrix:
        known = ("schema", *(f.name for f in fields(Matrix) if f.name != "origin"))
        top = self.mapping(root, known, "the matrix", needed=("schema", "rows"))
        if top["schema"].value != str(SCHEMA):
            raise self.fail(top["schema"], f"schema is {_shown(top['schema'].value)}; this Ferryman reads {SCHEMA}")
        listed = top["rows"]
        if not isinstance(listed.value, list) or not 0 < len(listed.value) <= _ROWS_MOST:
            raise self.fail(listed, f"rows must be a list of 1 to {_ROWS_MOST} rows")
        rows: dict[str, Row] = {}
        for node in listed.value:
            row = self.row(node)
            if (first := rows.setdefault(row.id.casefold(), row)) is not row:
                more = "" if first.id == row.id else f" ({first.id!r}: not every file system tells their folders apart)"
                raise self.fail(node, f"a second row {row.id!r}; the first is on line {first.line}{more}")
        given: dict[str, Any] = {"rows": tuple(rows.values())}
        for key in ("sources", "always", "never", "setup", "require"):
            if key in top:
                given[key] = self.texts(top[key], key)
        if "max_age_days" in top:
            given["max_age_days"] = self.number(top["max_age_days"], "max_age_days", 0.01, 3650)
        if "wait_minutes" in top:
            given["wait_minutes"] = int(self.number(top["wait_minutes"], "wait_minutes", 0, 1440))
        matrix = Matrix(self.origin, **given)
        for name in matrix.require:
            if name not in matrix.vendors:
                raise self.fail(
                    top["require"], f"require names {name!r}, of which there is no row; {nearest(name, matrix.vendors)}"
                )
        return matrix

    def row(self, node: Node) -> Row:
        known = tuple(f.name for f in fields(Row) if f.name != "line")
        raw = self.mapping(node, known, "a row", needed=("vendor", "device", "backend", "how"))
        given: dict[str, Any] = {k: self.text(raw[k], k, _NAME) for k in ("vendor", "device", "backend", "how")}
        given["suite"] = self.text(raw["suite"], "suite", _NAME) if "suite" in raw else "ferryman"
        for key, known_names in (("how", HOW), ("suite", SUITES)):
            if given[key] not in known_names:
                at = raw.get(key, node)
                raise self.fail(at, f"unknown {key} {given[key]!r}; {nearest(given[key], known_names)}")
        default = f"{given['device']}-{given['backend']}-{given['how']}"
        given["id"] = self.text(raw["id"], "id", _NAME) if "id" in raw else default
        for key in ("tests", "args", "labels", "kernels"):
            if key in raw:
                given[key] = self.texts(raw[key], key, _NAME if key == "labels" else None)
        if "command" in raw:
            given["command"] = self._command(raw["command"])
        if "image" in raw:
            given["image"] = self.text(raw["image"], "image", _IMAGE)
        if "cases" in raw:
            given["cases"] = self.text(raw["cases"], "cases")
        for key in ("tests", "kernels", "cases"):
            values = given.get(key, ())
            for value in (values,) if isinstance(values, str) else values:
                if value.startswith(("/", "~", "-")) or ".." in Path(value).parts:
                    raise self.fail(raw[key], f"{key} names {value!r}; required: a path inside the repository")
        for key in ("optional", "capsule"):
            if key in raw:
                if raw[key].value not in ("true", "false"):
                    raise self.fail(raw[key], f"{key} is true or false")
                given[key] = raw[key].value == "true"
        if "skips" in raw:
            given["skips"] = self._skips(raw["skips"])
        if "quarantine" in raw:
            given["quarantine"] = self._quarantine(raw["quarantine"])
        row = Row(**given, line=node.line)
        try:
            consistent(row)
        except FerrymanError as error:
            raise self.fail(node, f"row {row.id}: {error}") from error
        return row

    def _command(self, node: Node) -> tuple[str, ...]:
        if isinstance(node.value, list):
            return self.texts(node, "command")
        try:
            return tuple(shlex.split(self.text(node, "command")))
        except ValueError as error:
            raise self.fail(node, f"command cannot be split into words: {error}") from error

    def _skips(self, node: Node) -> tuple[Skip, ...]:
        if not isinstance(node.value, list):
            raise self.fail(node, "skips must be a list of {match: .., reason: ..}, perhaps with because: ..")
        skips = []
        for item in node.value:
            raw = self.mapping(item, ("match", "reason", "because"), "an entry of skips", needed=("match", "reason"))
            because = self.text(raw["because"], "because") if "because" in raw else ""
            skips.append(Skip(self.text(raw["match"], "match"), self.text(raw["reason"], "reason"), because))
        return tuple(skips)

    def _quarantine(self, node: Node) -> Quarantine:
        raw = self.mapping(node, ("until", "reason"), "quarantine", needed=("until", "reason"))
        text = self.text(raw["until"], "until")
        try:
            day = datetime.date.fromisoformat(text)
        except ValueError as error:
            raise self.fail(raw["until"], f"until is {_shown(text)}; required: a day such as 2026-12-31") from error
        return Quarantine(day, self.text(raw["reason"], "reason"))


_REQUIRED = {
    _NAME: "a name of letters, digits, '.', '_' and '-'",
    _IMAGE: "an image's short name with a tag or a digest, such as rocm/pytorch:TAG",
}


def _shown(value: object) -> str:
    text = repr(value if isinstance(value, str) else type(value).__name__)
    return text if len(text) <= 80 else f"{text[:80]}.."

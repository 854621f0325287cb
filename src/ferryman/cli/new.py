"""`ferryman new`: the files of a package that adds an op, a device or a backend (docs/extending.md)."""

from __future__ import annotations

import keyword
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from ferryman.cli import output
from ferryman.device_profiles import catalogue
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, UnknownName
from ferryman.ops.primitive import IDENTIFIER

KINDS = ("op", "device", "backend")


def new(
    kind: Annotated[str, typer.Argument(help="op, device or backend.")],
    name: Annotated[str, typer.Argument(help="Its name, such as bias_relu: lower-case letters, digits and _.")],
    into: Annotated[Path, typer.Option(help="Folder to write the package's folder in.")] = Path(),
) -> None:
    """Write a package that adds an op, a device or a backend, whole and working, to change from there.

    `pip install ./NAME` installs it; `ferryman check --op NAME`, `bench --op NAME` and `ops --op NAME`
    then know it. Nothing that exists is written over.
    """
    written = write(kind, name, into)
    for path in written:
        output.say(str(path))
    output.say(f"now: pip install {(into / name).resolve()}")  # a bare name would be an index's package


def write(kind: str, name: str, into: Path) -> list[Path]:
    """The files that were written. Raises UnknownName, ArgumentError."""
    if kind not in KINDS:
        raise UnknownName("kind of package", kind, KINDS)
    if not IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
        raise ArgumentError("new", "name", repr(name), "lower-case letters, digits and _, no word of Python")
    taken: dict[str, Any] = {"op": registry.primitives, "device": catalogue, "backend": registry.backends}
    if name in taken[kind]():
        raise ArgumentError("new", "name", name, f"a name that no {kind} has yet")
    root = into / name
    if root.exists():
        raise ArgumentError("new", "--into", root, "a folder without that name in it")
    return [_write(source, root, name) for source in sorted(_files(kind), key=lambda pair: pair[0])]


def _files(kind: str) -> list[tuple[str, str]]:
    """(path in the package's folder, text) of each template."""
    base = resources.files("ferryman") / "templates" / kind
    templates = [("pyproject.toml", (base / "pyproject.toml.in").read_text("utf-8"))]
    for file in (base / "package").iterdir():
        if file.name.endswith(".in"):
            templates.append((f"ferryman_@NAME@/{file.name.removesuffix('.in')}", file.read_text("utf-8")))
    return templates


def _write(source: tuple[str, str], root: Path, name: str) -> Path:
    where, text = (part.replace("@NAME@", name) for part in source)
    path = root / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path

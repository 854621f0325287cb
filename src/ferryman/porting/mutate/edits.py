"""One edit of a source text: what stands where, and what it becomes."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ferryman.errors import FerrymanError


class EditError(FerrymanError, RuntimeError):
    """An edit does not fit the text that it is applied to: the text has changed since the edit was made."""


@dataclass(frozen=True)
class Edit:
    """``old`` at ``start`` (characters from the text's beginning) becomes ``new``.

    operator: the rule that made it. function: the innermost function around it. line: its line, from 1. last: the line
    where ``old`` ends. file: a path; inside the package for our own kernels.
    """

    file: str
    start: int
    old: str
    new: str
    operator: str
    function: str
    line: int
    last: int

    def apply(self, text: str) -> str:
        """Raises EditError where the old text does not stand at its place."""
        end = self.start + len(self.old)
        if text[self.start : end] != self.old:
            present = text[self.start : end]
            raise EditError(f"{self.file}:{self.line}: {present!r} stands there; required: {self.old!r}")
        return text[: self.start] + self.new + text[end:]

    @property
    def tag(self) -> str:
        """The same for the same edit of the same text around it, wherever it stands in the file."""
        return hashlib.sha256(f"{self.file}\0{self.function}\0{self.old}\0{self.new}".encode()).hexdigest()[:8]

    @property
    def note(self) -> str:
        return f"{_short(self.old)}  ->  {_short(self.new)}"

    def diff(self, text: str, context: int = 1) -> str:
        """A unified diff of the whole text, with ``context`` lines around."""
        lines = difflib.unified_diff(
            text.splitlines(),
            self.apply(text).splitlines(),
            self.file,
            f"{self.file} ({self.operator})",
            "",
            "",
            context,
            "",
        )
        return "\n".join(lines)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 100 else flat[:97] + "..."


@dataclass(frozen=True)
class Operator:
    """A rule that makes edits. models: the mistake of a human author that it stands for."""

    name: str
    models: str
    make: Callable[..., Iterator[tuple[object, str]]]


def spread(candidates: Sequence[Edit], most: int, seed: int | str) -> list[Edit]:
    """At most ``most`` edits, the operators in turn. The seed shuffles the operators, and each operator's edits."""
    import random

    by: dict[str, list[Edit]] = {}
    for edit in candidates:
        by.setdefault(edit.operator, []).append(edit)
    for name, edits in by.items():
        random.Random(f"{seed}/{name}").shuffle(edits)
    chosen: list[Edit] = []
    names = sorted(by)
    random.Random(f"{seed}").shuffle(names)
    while len(chosen) < most and by:
        for name in [n for n in names if n in by]:
            chosen.append(by[name].pop())
            if not by[name]:
                del by[name]
    return chosen[:most]

"""Untrusted YAML as a tree of nodes that remember their line.

Profiles cross machines, so no object is ever constructed from a tag: only the parser's event stream is read,
and scalars stay text until the schema says what they are (`no` is never a boolean by accident). Tags,
anchors, aliases (an alias bomb needs them), duplicate keys, several documents, deep nesting and big files are
refused with file:line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ferryman.errors import ProfileError

SIZE_LIMIT = 256 * 1024  # the largest real profile is about 5 KiB
DEPTH_LIMIT = 12  # the schema is 4 deep; 100,000 open brackets took libyaml 9.7 s, so stop early


@dataclass(frozen=True)
class Node:
    """A scalar (str), a sequence (list) or a mapping (dict). ``line`` is its key's, else its own."""

    value: str | list[Node] | dict[str, Node]
    line: int
    quoted: bool = False

    @property
    def kind(self) -> str:
        return {str: "text", list: "a list", dict: "a mapping"}[type(self.value)]

    @property
    def is_null(self) -> bool:
        return not self.quoted and self.value in ("null", "~", "")


def read_nodes(data: bytes, origin: str) -> Node:
    """The tree of one YAML document. ``origin`` names the file in errors."""
    import yaml  # here, not at the top: importing ferryman must not pay for a parser it may never use

    if len(data) > SIZE_LIMIT:
        raise ProfileError(f"{origin}:1: the file is larger than {SIZE_LIMIT} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProfileError(f"{origin}:{line}: not UTF-8: {error.reason}") from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml: about 8x faster, where PyYAML has it
    try:
        return _Reader(yaml.parse(text, Loader=loader), origin).document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ProfileError(f"{origin}:{line}: not valid YAML: {problem}") from error


class _Reader:
    def __init__(self, events: Iterator[Any], origin: str) -> None:
        self.events, self.origin = events, origin

    def fail(self, event: Any, problem: str) -> ProfileError:
        return ProfileError(f"{self.origin}:{event.start_mark.line + 1}: {problem}")

    def document(self) -> Node:
        from yaml import events

        root: Node | None = None
        ignored = (events.StreamStartEvent, events.DocumentEndEvent, events.StreamEndEvent)
        for event in self.events:
            if isinstance(event, events.DocumentStartEvent):
                if root is not None:
                    raise self.fail(event, "a second YAML document; a profile file holds one")
            elif not isinstance(event, ignored):
                root = self.node(event, 0)
        if root is None:
            raise ProfileError(f"{self.origin}:1: the file is empty")
        return root

    def node(self, event: Any, depth: int, line: int | None = None) -> Node:
        from yaml import events

        line = event.start_mark.line + 1 if line is None else line
        if isinstance(event, events.AliasEvent):
            raise self.fail(event, f"YAML aliases are refused (*{event.anchor})")
        if event.anchor is not None:
            raise self.fail(event, f"YAML anchors are refused (&{event.anchor})")
        if event.tag is not None:
            raise self.fail(event, f"YAML tags are refused ({event.tag})")
        if depth > DEPTH_LIMIT:
            raise self.fail(event, f"nested deeper than {DEPTH_LIMIT} levels")
        if isinstance(event, events.ScalarEvent):
            # a plain scalar's style is '' from libyaml and None from the Python parser
            return Node(event.value, line, quoted=bool(event.style))
        if isinstance(event, events.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(event := next(self.events), events.SequenceEndEvent):
                items.append(self.node(event, depth + 1))
            return Node(items, line)
        entries: dict[str, Node] = {}
        while not isinstance(event := next(self.events), events.MappingEndEvent):
            key = self.node(event, depth + 1)
            if not isinstance(key.value, str):
                raise self.fail(event, f"a key must be text, not {key.kind}")
            if key.value in entries:
                first = entries[key.value].line
                raise self.fail(event, f"duplicate key {key.value!r}; first on line {first}")
            entries[key.value] = self.node(next(self.events), depth + 1, key.line)
        return Node(entries, line)

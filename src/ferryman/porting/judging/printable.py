"""Text of parsed JSON, made safe for a terminal, a CI log and UTF-8."""

from __future__ import annotations

import re
from typing import Any

_CONTROLS = bytes({*range(0x20), 0x7F} - {*b"\t\n"})
_ESCAPES = (b"\\u", b"\\b", b"\\f", b"\\r")  # JSON's own, of characters that `printable` replaces
# controls, line separators, directions, halves of pairs
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_COMMAND = re.compile(r"^\s*(?=::|##\[)")  # what GitHub's and Azure's logs take for an instruction
_UNSAFE = re.compile(f"{UNPRINTABLE.pattern}|\n|{_COMMAND.pattern}")


def printable(value: Any) -> Any:
    """Parsed JSON whose texts are safe in a terminal, in a CI log and in UTF-8; lists and objects stay the same ones.

    Controls and lone surrogates become U+FFFD, a line break " | ", and GitHub's commands (``::error``) their start.
    """
    if isinstance(value, str):
        return _line(value)
    stack = [value]
    while stack:
        container = stack.pop()
        if isinstance(container, dict):
            for key in [k for k in container if _UNSAFE.search(k)]:
                container[_line(key)] = container.pop(key)
        elif not isinstance(container, list):
            continue
        for place, one in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(one, str):
                if _UNSAFE.search(one):
                    container[place] = _line(one)
            elif isinstance(one, (dict, list)):
                stack.append(one)
    return value


def _line(text: str) -> str:
    text = " | ".join(part for part in re.split(r"[\r\n\x85\u2028\u2029]+", text) if part.strip())
    return _COMMAND.sub(r"\\\g<0>", UNPRINTABLE.sub("\ufffd", text))


def is_printable(data: bytes) -> bool:
    """Whether JSON of these bytes has nothing that `printable` replaces: almost none has, and walking one takes longer
    than reading it. Text beyond ASCII is walked."""
    escaped = b"\\" in data and any(e in data for e in _ESCAPES)
    return data.isascii() and not escaped and len(data.translate(None, _CONTROLS)) == len(data)

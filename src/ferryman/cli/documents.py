"""Files that verbs write: each whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import FerrymanError


def write(path: Path, text: str, option: str = "--out") -> None:
    """Text with a last line break, through a temporary file beside it. Raises FerrymanError naming the option."""
    try:
        write_whole(path, (text if text.endswith("\n") else text + "\n").encode())
    except OSError as error:
        raise FerrymanError(f"{path} cannot be written: {error.strerror}; choose another {option}") from error

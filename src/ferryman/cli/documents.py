"""Files that verbs write: each whole or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import FerrymanError


def write(path: Path, text: str, option: str = "--out") -> None:
    """Text with a last line break, through a temporary file beside it. Raises FerrymanError naming the option."""
    try:
        write_whole(path, (text if text.endswith("\n") else text + "\n").encode())
    except OSError as error:
        raise FerrymanError(f"{path} cannot be written: {error.strerror}; choose another {option}") from error


def require_writable(path: Path, option: str = "--out") -> None:
    """Before long work: that `write` will be able to. Makes the folder. Raises FerrymanError naming the option."""
    if path.is_dir():
        raise FerrymanError(f"{path} cannot be written: it is a folder; choose another {option}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp"):
            pass
    except OSError as error:
        raise FerrymanError(f"{path} cannot be written: {error.strerror}; choose another {option}") from error

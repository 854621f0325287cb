"""Files that verbs write: each whole or not at all."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import FerrymanError


def write(path: Path, text: str, option: str = "--out") -> None:
    """Text with a last line break, through a temporary file beside the file itself, which ``path`` may link to.

    A name that ends with ".gz" is packed by gzip, the same text into the same bytes. Raises FerrymanError naming the
    option.
    """
    data = (text if text.endswith("\n") else text + "\n").encode()
    try:
        write_whole(path.resolve(), gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise FerrymanError(f"{path} cannot be written: {_why(error)}; choose another {option}") from error


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def require_writable(path: Path, option: str = "--out") -> None:
    """Before long work: that `write` will be able to. Makes the folder. Raises FerrymanError naming the option."""
    try:
        real = path.resolve()
        if real.is_dir():
            raise FerrymanError(f"{path} cannot be written: it is a folder; choose another {option}")
        if real.exists() and not real.is_file():  # a device, a pipe: what is written replaces it
            raise FerrymanError(f"{path} cannot be written: it is no regular file; choose another {option}")
        real.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=real.parent, suffix=".tmp"):
            pass
    except (OSError, RuntimeError) as error:
        raise FerrymanError(f"{path} cannot be written: {_why(error)}; choose another {option}") from error

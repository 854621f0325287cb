"""Files that verbs write: each whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ferryman.errors import FerrymanError


def write(path: Path, text: str, option: str = "--out") -> None:
    """Text with a last line break, through a temporary file beside it. Raises FerrymanError naming the option."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8", newline="\n"
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(text if text.endswith("\n") else text + "\n")
                file.close()
                temporary.chmod(0o644)
                os.replace(temporary, path)
            except BaseException:  # a full disk, an interrupt: the half-written file goes, and the error rises
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise FerrymanError(f"{path} cannot be written: {error.strerror}; choose another {option}") from error

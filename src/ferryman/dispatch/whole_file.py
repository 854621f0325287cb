"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Written beside and renamed: no reader meets half a file, and a failure leaves the old one. Raises OSError.

    A file that is there keeps its permissions; a new one gets 0644.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.close()
            temporary.chmod(mode)
            os.replace(temporary, path)
        except BaseException:  # a full disk, an interrupt: the half-written file goes, and the error rises
            temporary.unlink(missing_ok=True)
            raise

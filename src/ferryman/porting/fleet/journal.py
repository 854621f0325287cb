"""What a fleet has finished, on disk: a line for each shard, so that a run that was stopped goes on where it was.

The first line is the request's fingerprint. A last line that was cut off does not count; another request's journal is
set aside, never mixed in.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

from ferryman import files

KIND = "ferryman-fleet-journal"
_MOST_BYTES = 256 * 2**20


def fingerprint(request: Any) -> str:
    """SHA-256 of what was asked for, with the sources that answer it."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class Journal:
    """Opened for one request; ``entries`` is what it held of that request already."""

    def __init__(self, path: Path | None, request: str) -> None:
        self.path, self.entries, self.other = path, list[Any](), False
        self._file: IO[str] | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self.entries = self._read(path, request)
            if self.other:
                os.replace(path, path.with_suffix(".old.jsonl"))
        self._file = path.open("w", encoding="utf-8")  # whole lines only: what was cut off is gone
        self._line({"kind": KIND, "request": request})
        for entry in self.entries:
            self._line(entry)

    def _read(self, path: Path, request: str) -> list[Any]:
        lines = files.read(path, _MOST_BYTES).split(b"\n")
        try:
            head = files.parse(lines[0])
        except (ValueError, RecursionError):
            head = None
        if not isinstance(head, dict) or head.get("kind") != KIND or head.get("request") != request:
            self.other = True
            return []
        kept = []
        for line in lines[1:-1]:  # what stands after the last line break was cut off
            try:
                kept.append(files.parse(line))
            except (ValueError, RecursionError):
                continue
        return kept

    def add(self, entry: Any) -> None:
        self._line(entry)

    def _line(self, entry: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self, done: bool) -> None:
        """``done``: everything it held stands in a document now, and it goes."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if done and self.path is not None:
                self.path.unlink(missing_ok=True)

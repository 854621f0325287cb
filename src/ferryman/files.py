"""Files that others wrote: read whole or refused, in bounded memory, and never loaded as code from strangers' folders.

JSON of 64 MB can take 2 GB once it is parsed, so values are counted before (a comma or an opening bracket stands before
each), and then the widths of lists and objects, which bound how many errors a validation can list.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
import weakref
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

MOST_BYTES = 32 * 2**20
MOST_VALUES = 1_800_000  # a parsed one takes 90 bytes; a check of all 21,000 cells has 1.5 million
_GZIP = b"\x1f\x8b"
MOST_ITEMS = 100_000  # of one list, or one object


class Unreadable(ValueError):
    """A file cannot be read as what it should be; the message begins with its path and says why."""


def read(path: Path, most: int = MOST_BYTES) -> bytes:
    """A regular file's bytes. Raises OSError: absent, a folder, a pipe (which would be waited for), larger than
    ``most``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        data = file.read(most + 1) if status.st_size <= most else b""
        if status.st_size > most or len(data) > most:
            raise OSError(errno.EFBIG, f"it has {max(status.st_size, len(data))} bytes; required: at most {most}")
        return data


def document(path: Path, most: int = MOST_BYTES, values: int = MOST_VALUES) -> Any:
    """A JSON file, or one that gzip packed, parsed. Raises Unreadable."""
    try:
        data = unpacked(read(path, most), most)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise Unreadable(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return parse(data, values)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is not JSON: {error}") from error


def unpacked(data: bytes, most: int = MOST_BYTES) -> bytes:
    """What gzip packed, or the bytes themselves. Raises ValueError: damaged, cut, with more behind it, or larger than
    ``most``."""
    if not data.startswith(_GZIP):
        return data
    inflater = zlib.decompressobj(wbits=31)
    try:
        text = inflater.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"its gzip data is damaged: {error}") from error
    if len(text) > most:
        raise ValueError(f"it unpacks to more than {most} bytes")
    if not inflater.eof or inflater.unused_data:
        raise ValueError("its gzip data is cut" if not inflater.eof else "something follows its gzip data")
    return text


def parse(data: bytes, values: int = MOST_VALUES) -> Any:
    """JSON from UTF-8. Raises ValueError (no JSON, NaN, a key twice, a number without end, too many values) and
    RecursionError."""
    counted(data, values)
    parsed = json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    stack = [parsed]
    while stack:
        value = stack.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if len(inner) > MOST_ITEMS:
            raise ValueError(f"a list or an object has {len(inner)} items; required: at most {MOST_ITEMS}")
        stack += [one for one in inner if one.__class__ is dict or one.__class__ is list]
    return parsed


def counted(data: bytes, values: int = MOST_VALUES) -> None:
    """Raises ValueError where JSON may hold more values than that."""
    count = 1 + sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if count > values:
        raise ValueError(f"it may hold {count} values; required: at most {values}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{key[:80]!r} stands twice in one object, as after a merge")
    return members


def _no_constant(token: str) -> float:
    raise ValueError(f"{token} is not JSON")


class OwnFolder:
    """A temporary folder that goes with this object, or at the end of the process that made it. A fork of that process
    leaves it, however it exits."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.remove = weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(path: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(path, ignore_errors=True)


def distrusted(path: Path) -> str | None:
    """Why code is not loaded from a file or a folder: another user could have put it there. None where it is ours, or
    absent. A group that is one user's own (its number is the user's) is no other."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    me = os.geteuid()
    if status.st_uid not in (me, 0):
        return f"{path} belongs to user {status.st_uid}, and this process runs as {me}; choose a folder of your own"
    others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != status.st_uid else 0)
    if status.st_mode & others:
        return f"{path} is writable by others (mode {stat.S_IMODE(status.st_mode):o}); run chmod go-w on it"
    return None

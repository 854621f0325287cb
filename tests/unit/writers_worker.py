"""Writers that are killed while they write: ``writers_worker.py FOLDER KILLS SEED``; prints what each kill left."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ferryman.backends.simt import launcher
from ferryman.cli import documents
from ferryman.dispatch import whole_file
from ferryman.porting.capsule import contents as capsule

SIZES = (100, 70_000, 1_500_000)
MANY, SAMPLE = 1000, 16


def body(size: int, number: int) -> bytes:
    """Bytes that say whether they are all there."""
    text = (f"{number:09d} " * (size // 10 + 1)).encode()
    return hashlib.sha256(text).hexdigest().encode() + text


def whole(data: bytes) -> bool:
    data = data.removesuffix(b"\n")
    return hashlib.sha256(data[64:]).hexdigest().encode() == data[:64]


def planted(path: Path, data: bytes) -> None:
    """What the others must not do."""
    path.write_bytes(data)


WRITERS: dict[str, Callable[[Path, bytes], None]] = {
    "whole file": whole_file.write_whole,
    "document": lambda p, data: documents.write(p, data.decode()),
    "capsule": lambda p, data: capsule.save(data, p),
    "image": lambda p, data: launcher.keep_image(p.name, data),
    "planted": planted,
}


def write_for_ever(name: str, path: Path, ready: int) -> None:
    number = 0
    while True:
        WRITERS[name](path, body(random.choice(SIZES), number))
        if number == 0:
            os.write(ready, b"x")
        number += 1


def kill_one(name: str, path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write_for_ever(name, path, writing)
        finally:
            os._exit(3)
    os.close(writing)
    begun = os.read(reading, 1)
    os.close(reading)
    time.sleep(random.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert begun and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (name, status)


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["FERRYMAN_CACHE_DIR"] = str(folder / "cache")
    warnings.simplefilter("error")  # a damaged image is warned of
    torn: dict[str, int] = dict.fromkeys(WRITERS, 0)
    done = dict.fromkeys(WRITERS, 0)
    for kill in range(kills):
        random.seed(seed * MANY + kill)
        name = list(WRITERS)[kill % (len(WRITERS) - 1)]
        for one in (name, "planted") if kills > SAMPLE else (name,):
            path = folder / one.replace(" ", "_")
            kill_one(one, path)
            done[one] += 1
            try:
                data = launcher.cached_image(path.name) if one == "image" else path.read_bytes()
                torn[one] += data is None or not whole(data)
            except UserWarning:
                torn[one] += 1
    sys.stdout.write(json.dumps({"torn": torn, "kills": done}))


if __name__ == "__main__":
    main()

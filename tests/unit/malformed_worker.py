"""Malformed files for every reader: ``malformed_worker.py FOLDER EACH SEED``; prints what went wrong, and how much."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ferryman import settings
from ferryman.backends import artefacts
from ferryman.backends.simt import launcher
from ferryman.device_profiles import loading
from ferryman.dispatch import lockfile_document
from ferryman.errors import FerrymanError
from ferryman.porting import bench
from ferryman.porting.aot import cache
from ferryman.porting.capsule import compare, model, replay_results
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.ci import history, matrix, merged, perf, record
from ferryman.porting.fingerprint import document as fingerprint
from ferryman.porting.fleet import journal, shards
from ferryman.porting.judging import results
from ferryman.porting.model.config import config_of, spec

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "ferryman" / "device_profiles" / "data"
RESULTS = (ROOT / "tests" / "data" / "results_schema_1.json").read_bytes()
CAPSULE = (ROOT / "tests" / "data" / "h200.capsule").read_bytes()
BENCH = gzip.decompress((ROOT / "benchmarks" / "results" / "h200" / "full" / "rope.json.gz").read_bytes())
SHA = "0" * 64


def document(kind: str, **more: Any) -> bytes:
    return json.dumps({"kind": kind, "schema_version": 1, **more}).encode()


def opened(path: Path) -> object:
    log = journal.Journal(path, "r")
    log.close(done=False)
    return log.entries


def kept(path: Path) -> object:
    """An entry of the cache whose hash holds, as a writer of another version could have left it."""
    data = path.read_bytes()
    path.write_bytes(hashlib.sha256(data).digest() + data)
    return cache.get(path.name)


NOW = "2026-11-25T10:00:00+00:00"
ENVIRONMENT = {
    **dict.fromkeys(("device", "device_name", "profile", "arch", "vendor", "platform", "tier"), "cpu"),
    "versions": {"torch": "2.13.0"},
    "flags": {},
    "time": NOW,
    "seed": 0,
}
FACT = {"key": "fma", "route": "torch", "format": "f16", "value": 1.5, "detail": {"bits": [1, 2]}}
ENTRY = {
    **dict.fromkeys(("sha256", "kernels", "cases"), SHA),
    "row": "a",
    "commit": "0" * 40,
    "time": NOW,
    "verdict": "PASS",
    "met": True,
    "ops": {"rms_norm": "PASS"},
}
RUN = {"commit": "0" * 40, "time": NOW, "verdict": "PASS", "met": True, "age_days": 1.0}
ROW = {
    **dict.fromkeys(("id", "vendor", "device", "backend", "how", "suite"), "cpu"),
    "verdict": "PASS",
    "best": "PASS",
    "met": True,
    "green": True,
    "counts": {"PASS": 1},
    "trend": [RUN, RUN],
    "ops": [{"op": "rms_norm", "verdict": "PASS", "counts": {"PASS": 1}}],
}
MERGED = {
    "project": "p",
    "commit": None,
    "time": NOW,
    "rows": [ROW, ROW],
    "faults": [],
    "notes": ["a"],
    "vendors": [{"vendor": "cpu", "verdict": "PASS", "green": True, "rows": 1, "green_rows": 1}],
}
SAMPLE = {"op": "rms_norm", "case": "c", "dtype": "f32", "name": "torch", "seconds": 1e-6, "noise": 0.01}
BASELINE = {"device_name": "cpu", "profile": "cpu", "runs": [{"time": NOW, "samples": [SAMPLE] * 3}]}
RECORD = {
    "row": "a",
    "row_digest": SHA,
    "commit": "0" * 40,
    "commit_from": "git",
    "dirty": False,
    "kernels": {"a.py": SHA},
    "started": NOW,
    "finished": NOW,
    "command": ["pytest"],
    "exit_code": 0,
    "interpreted": False,
    "toolchain": {},
    "device": {"vendor": "cpu", "profile": "cpu", "arch": "cpu", "name": "cpu", "kind": "cpu"},
    "collected": ["a::b"],
    "cases": [{"id": "a::b", "outcome": "passed", "seconds": 0.1}],
    "files": {"junit.xml": SHA},
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 99,
    "num_hidden_layers": 1,
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}


def project(path: Path) -> object:
    settings.forget()
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        return settings.get("backend")
    finally:
        os.chdir(before)


READERS: dict[str, tuple[str, bytes, Callable[[Path], object]]] = {
    "results": ("r.json", RESULTS, results.load),
    "compare": ("r.json", RESULTS, lambda p: compare.compare([p, p])),
    "replay": ("r.json", RESULTS, replay_results.load),
    "bench": ("b.json", BENCH, bench.load),
    "lockfile": ("l.json", gzip.decompress((DATA / "h200.lock.json.gz").read_bytes()), lockfile_document.load),
    "capsule": ("c.capsule", CAPSULE, capsule.load),
    "any capsule": ("c.capsule", CAPSULE, model.load),
    "fingerprint": (
        "f.json",
        document("ferryman-fingerprint", environment=ENVIRONMENT, facts=[FACT, FACT]),
        fingerprint.load,
    ),
    "artefacts": (
        "manifest.json",
        artefacts.Manifest(time="", toolchain={}, profiles=[], seconds=0, entries=[]).model_dump_json().encode(),
        lambda p: artefacts.read(p.parent),
    ),
    "profile": ("p.yaml", (DATA / "h200.yaml").read_bytes(), loading.load),
    "matrix": ("ferryman.yaml", (ROOT / "ferryman.yaml").read_bytes(), matrix.read),
    "project": ("pyproject.toml", b'[tool.ferryman]\nbackend = "torch"\nstrict = true\n', project),
    "history": (
        "h.json",
        document("ferryman-ci-history", entries=[ENTRY]),
        lambda p: history.load([p]),
    ),
    "merged": ("m.json", document("ferryman-ci-merged", **MERGED), merged.load),
    "baseline": ("p.json", document("ferryman-ci-baseline", **BASELINE), perf.load),
    "record": (
        "record.json",
        document("ferryman-ci-record", **RECORD),
        lambda p: record.parse(record.read_json(p, record.SIZE_LIMIT), p.name),
    ),
    "config": (
        "config.json",
        json.dumps(CONFIG).encode(),
        lambda p: config_of(spec(p.parent, tiny=True, layers=1)),
    ),
    "journal": ("j.jsonl", document(journal.KIND, request="r") + b'\n{"a": [1]}\n{"b": 2}\n', opened),
    "times": ("t.json", document(shards.KIND, seconds={"rms_norm|f32|c": 0.5}), lambda p: shards.measured([p])),
    "kept kernel": ("0" * 64, b'{"resources": {"registers": 3}}\nimage', kept),
    "image": ("image", b"0" * 4096, lambda p: launcher.cached_image(p.name)),
}
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    10**400,
    1.5,
    -0.0,
    1e308,
    "",
    "\x00",
    "\x1b[31m",
    "\ud800",
    "x" * 100_000,
    [],
    {},
    [[]],
    {"a": {}},
    [None] * 1000,
    "NaN",
    "../../etc/passwd",
    "\u202e",
    [{}] * 50_000,
    {str(n): 0 for n in range(20_000)},
]


def places(value: Any, collected: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        collected.append((value, key))
        places(inner, collected)
    return collected


def tree(data: bytes, draw: random.Random) -> bytes:
    """One to three places of a document replaced, removed, or given to another."""
    raw = json.loads(data)
    for _ in range(draw.randrange(1, 4)):
        spots = places(raw, [])
        if not spots:
            return json.dumps(draw.choice(ODD)).encode()
        node, key = draw.choice(spots[:40] if draw.random() < 0.4 else spots)
        how = draw.random()
        if how < 0.6:
            node[key] = copy.deepcopy(draw.choice(ODD))
        elif how < 0.75:
            del node[key]
        elif how < 0.9:
            other, at = draw.choice(spots)
            node[key] = copy.deepcopy(other[at]) if at in other or (isinstance(other, list) and at < len(other)) else 0
        elif isinstance(node, dict):
            node[str(draw.choice(ODD))[:20]] = node[key]
    return json.dumps(raw).encode()


def text(data: bytes, draw: random.Random) -> bytes:
    mutated, how = bytearray(data), draw.randrange(8)
    at = draw.randrange(len(mutated) + 1)
    if how == 0:
        return bytes(mutated[:at])
    if how == 1:
        for _ in range(draw.choice((1, 3, 30, 300))):
            mutated[draw.randrange(len(mutated))] = draw.randrange(256)
    elif how == 2:
        mutated[at:at] = draw.choice((b"[" * 50_000, b'{"a":' * 20_000, b"\xff\xfe", b"9" * 6000, b"\0" * 5000))
    elif how == 3:
        mutated[at:at] = mutated[at : at + draw.choice((1, 100, 100_000))] * draw.choice((2, 40))
    elif how == 4:
        return draw.choice((b"", b"\n", b"null", b"{}", b"[]", b"NaN", b"\xef\xbb\xbf{}", b"[" + b"{}," * 3_000_000))
    elif how == 5:
        del mutated[at : at + draw.choice((1, 10, 1000))]
    elif how == 6:
        return bytes(mutated) + draw.choice((b"}", b"x", bytes(mutated), b"\0"))
    else:
        return draw.choice([one for _, one, _ in READERS.values()])
    return bytes(mutated)


def malformed(name: str, data: bytes, draw: random.Random) -> bytes:
    if name in ("journal", "kept kernel") and draw.random() < 0.6:  # a document, and more lines or an image
        head, end, rest = data.partition(b"\n")
        return tree(head, draw) + end + rest
    if data[:1] == b"{" and name not in ("journal", "kept kernel") and draw.random() < 0.6:
        return tree(data, draw)
    if name in ("profile", "matrix") and draw.random() < 0.6:
        return tree(json.dumps(yaml.safe_load(data), default=str).encode(), draw)  # JSON is YAML
    return text(data, draw)


def main() -> None:
    folder, each, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["FERRYMAN_CACHE_DIR"], os.environ["XDG_CONFIG_HOME"] = str(folder / "cache"), str(folder)
    warnings.simplefilter("ignore")
    draw, refused, read, faults, slowest = random.Random(seed), 0, 0, [], 0.0
    # what a reader imports is not what a file costs
    seeds = {name: one(folder, name, file, data, load) for name, (file, data, load) in READERS.items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(each):
        for name, (file, data, load) in READERS.items():
            content = malformed(name, data, draw)
            began, why = time.process_time(), one(folder, name, file, content, load)
            slowest = max(slowest, time.process_time() - began)
            refused, read = refused + (why == "refused"), read + (why == "read")
            if why not in ("refused", "read"):
                faults.append(f"{name} {number}: {content[:80]!r}..: {why}")
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    report = {"refused": refused, "read": read, "seeds": seeds, "count": len(faults), "seconds": slowest, "MB": peak}
    sys.stdout.write(json.dumps({**report, "faults": faults[:20]}))


def one(folder: Path, name: str, file: str, content: bytes, load: Callable[[Path], object]) -> str:
    path = folder / name.replace(" ", "_") / file
    if name == "image":
        path = launcher.cache_directory() / file
    if name == "kept kernel":
        path = cache.folder() / file[:2] / file
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(content)
    try:
        load(path)
    except (FerrymanError, cache.DamagedEntry) as error:
        long = len(str(error)) > 3000
        return f"an error of {len(str(error))} characters" if long else "refused"
    except Exception:  # noqa: BLE001 - this is what is looked for
        return traceback.format_exc()[-900:]
    return "read"


if __name__ == "__main__":
    main()

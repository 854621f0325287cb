"""A small repository, its matrix, and what honest jobs bring back from it; tests change one thing at a time."""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ferryman.device_profiles import profile
from ferryman.porting.ci import changes, commands, evidence, expected, merge, verify
from ferryman.porting.ci import matrix as matrices
from ferryman.porting.ci.history import Entry, History
from ferryman.porting.ci.judge import Context, digest
from ferryman.porting.ci.merged import Merged, RowState
from ferryman.porting.ci.row import Row
from ferryman.porting.fingerprint import compare
from ferryman.porting.judging import results
from ferryman.porting.judging.results import Finding

COMMIT, OTHER = "a" * 40, "b" * 40
NOW = datetime.datetime(2026, 11, 24, 12, 0, tzinfo=datetime.timezone.utc)
MATRIX = """schema: 1
max_age_days: 7
require: [nvidia]
rows:
  - {id: cpu, vendor: cpu, device: cpu, backend: any, how: cpu, suite: pytest, tests: [tests]}
  - {id: h200, vendor: nvidia, device: h200, backend: triton, how: hardware, suite: pytest,
     tests: [tests], labels: [self-hosted, h200]}
  - {id: mi300x, vendor: amd, device: mi300x, backend: triton, how: hardware, suite: pytest,
     tests: [tests], labels: [self-hosted, mi300x]}
  - {id: check, vendor: nvidia, device: h200, backend: torch, how: hardware, labels: [self-hosted, h200],
     args: [--op, rope, --dtype, f32, --tier, small]}
  - {id: sim, vendor: amd, device: mi300x, backend: hip, how: simulated, args: [--op, rope, --dtype, f32]}
  - {id: gtest, vendor: cpu, device: cpu, backend: torch, how: cpu, suite: command,
     command: [./run_tests, --out, "{out}/junit.xml"]}
"""
TESTS = ("tests/test_k.py::test_right[1]", "tests/test_k.py::test_right[256]", "tests/test_k.py::test_edges")
FILES = {
    "ferryman.yaml": MATRIX,
    "pyproject.toml": "[project]\nname = 'kernels'\nversion = '1'\n",
    "kernels/__init__.py": "from kernels.k import right\n",
    "kernels/k.py": "def right(x):\n    return x\n",
    "kernels/unused.py": "def nothing():\n    return 0\n",
    "tests/test_k.py": "from kernels import right\n",
    "README.md": "kernels\n",
    "run_tests": "#!/bin/sh\n",
}
NAMES = {"h200": "NVIDIA H200", "mi300x": "AMD Instinct MI300X", "cpu": "Some Processor", "l4": "NVIDIA L4"}


def repository(root: Path, matrix: str = MATRIX) -> Path:
    for name, text in {**FILES, "ferryman.yaml": matrix}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> str:
    given = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *given, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path, message: str = "x") -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD")


@dataclass
class Job:
    """What one job brings back: the record as JSON, and files beside it. ``files`` are hashed when it is written."""

    record: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    raw: str | None = None  # the record's text, where it is to be damaged
    hashes: dict[str, str] = field(default_factory=dict)  # planted in the record's place

    def write(self, root: Path) -> None:
        place = root / (self.folder or self.record["row"])
        place.mkdir(parents=True, exist_ok=True)
        record = copy.deepcopy(self.record)
        for name, text in self.files.items():
            if name == commands.TESTS:
                text = text if "cases" in text else self.plugin_record(text)
            (place / name).write_text(text)
            record["files"].setdefault(name, hashlib.sha256(text.encode()).hexdigest())
        record["files"].update(self.hashes)
        (place / "record.json").write_text(self.raw if self.raw is not None else json.dumps(record))

    def plugin_record(self, session: str) -> str:
        """What the plugin wrote, of which the record is a copy; one session's is no other's."""
        fields = {key: self.record[key] for key in ("collected", "cases", "launches", "interpreted")}
        return json.dumps({"kind": "ferryman-ci-tests", **fields, "session": session or self.folder})

    def copied(self, **more: Any) -> Job:
        job = copy.deepcopy(self)
        for name, value in more.items():
            setattr(job, name, value)
        return job


def ago(**delta: float) -> str:
    return (NOW - datetime.timedelta(**delta)).isoformat()


def numerics(device: str) -> list[dict[str, Any]]:
    findings = []
    for claim in compare(profile(device), [], unstated=False):
        exact = claim.path.startswith("numerics.arithmetic.")
        measured = claim.stated if exact else 24
        findings.append(
            Finding(path=claim.path, outcome="confirmed", stated=claim.stated, measured=measured).model_dump()
        )
    return findings


class World:
    """The repository, and judging what comes back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.matrix = matrices.read(root / "ferryman.yaml")
        self.tree = changes.Tree(root, self.matrix)

    def digests(self, row: str) -> dict[str, str]:
        return self.tree.digests(self.matrix.row(row))

    def jobs(self, *rows: str) -> dict[str, Job]:
        return {name: self.job(name) for name in rows or [row.id for row in self.matrix.rows]}

    def job(self, name: str) -> Job:
        row = self.matrix.row(name)
        known = profile(row.device)
        record: dict[str, Any] = {
            "schema_version": 1,
            "kind": "ferryman-ci-record",
            "row": name,
            "row_digest": row.digest,
            "commit": COMMIT,
            "commit_from": "git",
            "dirty": False,
            "kernels": dict(self.digests(name)),
            "started": ago(minutes=20),
            "finished": ago(minutes=10),
            "command": commands.shown(row),
            "exit_code": 0,
            "interpreted": False,
            "device": {
                "vendor": row.vendor,
                "profile": row.device,
                "arch": known.arch,
                "name": NAMES[row.device] if row.how in ("hardware", "cpu") else f"{known.title}, {row.how}",
                "kind": row.how,
            },
            "toolchain": {"torch": "2.13.0"},
            "collected": [],
            "cases": [],
            "launches": None,
            "numerics": [],
            "files": {},
        }
        job = Job(record)
        if row.how == "hardware":
            record["numerics"] = numerics(row.device)
        if row.suite == "pytest":
            record["collected"] = list(TESTS)
            launches = 2 if row.how == "hardware" else None
            record["cases"] = [
                {"id": i, "outcome": "passed", "launches": launches, "seconds": 0.1, "reason": None} for i in TESTS
            ]
            record["launches"] = None if launches is None else launches * len(TESTS)
            job.files["tests.json"] = name
        elif row.suite == "command":
            record["collected"] = ["suite::a", "suite::b"]
            job.files["junit.xml"] = JUNIT
        else:
            job.files[commands.document(row)] = document(row, record)
        return job

    def judge(
        self,
        jobs: list[Job],
        place: Path,
        *,
        history: list[Entry] | None = None,
        require: list[str] | None = None,
        files: dict[str, str] | None = None,
        now: datetime.datetime = NOW,
        **context: Any,
    ) -> Merged:
        place.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            job.write(place)
        for name, text in (files or {}).items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        runs, problems = evidence.collect([place])
        given: dict[str, Any] = {"commit": COMMIT} | context
        merge_context = Context(self.matrix, self.tree, now=now, history=History(entries=history or []), **given)
        merged, _ = merge.merge(runs, problems, merge_context)
        return verify.verified(merged, self.matrix, require)

    def entry(self, row: str, **more: Any) -> Entry:
        """A success of the past, of the sources as they are."""
        ids = sorted(self.job(row).record["collected"])
        given = {
            "row": row,
            "sha256": "c" * 64,
            "commit": OTHER,
            "time": ago(days=1),
            "met": True,
            "verdict": self.matrix.row(row).best,
            "kernels": digest([self.matrix.row(row).digest, self.digests(row)]),
            "cases": digest(ids),
        }
        return Entry.model_validate(given | more)


JUNIT = (
    '<testsuites><testsuite name="s"><testcase classname="suite" name="a"/>'
    '<testcase classname="suite" name="b" time="0.1"/></testsuite></testsuites>'
)


def document(row: Row, record: dict[str, Any], change: Any = None) -> str:
    """The result document of a row of the suite ferryman; fills the record's ids. ``change``: of its JSON."""
    import torch

    known = profile(row.device)
    place = {"hardware": "cuda:0", "simulated": "simulated", "compile": "none"}[row.how]
    ids = sorted(expected.checked(row) or ())
    cells = []
    for text in ids:
        op, implementation, dtype, case = text.split("|")
        cells.append(
            results.Cell(
                op=op,
                implementation=implementation,
                device=place,
                dtype=dtype,
                case=case,
                verdict=row.best,
                ratio=0.5,
                gates={"G2": results.Gate(outcome="pass", measure=0.5)},
            )
        )
    facts = results.environment(torch.device("cpu"), known, 0, "small").model_copy(
        update={"device": place, "device_name": record["device"]["name"], "time": ago(minutes=15)}
    )
    report = results.results(facts, cells)
    of = results.Provenance(
        commit=record["commit"],
        dirty=False,
        row=row.id,
        manifest=ids,
        kernels={k[3:]: v for k, v in record["kernels"].items() if k == "op:rope"},
    )
    record["collected"] = ids
    record["launches"] = len(ids) if row.how == "hardware" else None
    raw = json.loads(results.dumps(report.model_copy(update={"provenance": of})))
    if change is not None:
        change(raw)
    return json.dumps(raw)


def state(merged: Merged, row: str) -> RowState:
    return next(r for r in merged.rows if r.id == row)


def codes(merged: Merged, row: str | None = None) -> set[str]:
    rows = merged.rows if row is None else [state(merged, row)]
    return {w.code for r in rows for w in r.why} | {f.code for f in merged.faults}

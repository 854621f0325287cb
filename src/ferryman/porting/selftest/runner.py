"""The whole self-test on one device, or what is left of one that was interrupted."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.porting.judging.results import environment
from ferryman.porting.mutate import sources
from ferryman.porting.running.process import parentage, quiet
from ferryman.porting.selftest import worker
from ferryman.porting.selftest.alternatives import alternatives
from ferryman.porting.selftest.judging import Setting
from ferryman.porting.selftest.planting import EDITS, Backend, Mutant, catalogue
from ferryman.porting.selftest.report import Record, SelfTest, Tally, compose
from ferryman.porting.selftest.session import not_run

Progress = Callable[[int, int, str], None]
HONEST = 1000
INTERPRETED_SHARE = 10  # one right run of ten is a Triton kernel with other tiles
_PIECE = 4  # rounds of right runs that are written down at a time
Piece = tuple[str, int, int]


class Journal:
    """What is known already, by key, in a file of JSON lines that is written as results come."""

    def __init__(self, file: Path | None, stamp: dict[str, Any]) -> None:
        self._file, self.records, self.tallies = file, dict[str, Record](), dict[str, Tally]()
        if file is None:
            return
        if file.exists():
            head, *lines = file.read_text("utf-8").splitlines() or ["{}"]
            if json.loads(head) != stamp:
                raise ArgumentError(
                    "selftest", "--resume", f"{file}: {head}", f"a file of this run, {json.dumps(stamp)}"
                )
            for line in lines:
                if line.endswith("}"):  # a run that was killed may leave half a line
                    said = json.loads(line)
                    if not said.get("record", {}).get("undecided"):  # that may have more time now
                        self._keep(said["key"], said)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(stamp) + "\n", "utf-8")

    def _keep(self, key: str, said: dict[str, Any]) -> None:
        if "record" in said:
            self.records[key] = Record.model_validate(said["record"])
        else:
            self.tallies[key] = Tally.model_validate(said["tally"])

    def add(self, key: str, entry: Record | Tally) -> None:
        kind = "record" if isinstance(entry, Record) else "tally"
        said = {"key": key, kind: entry.model_dump(mode="json")}
        self._keep(key, said)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(said) + "\n")


def run(
    ops: Iterable[str] | None = None,
    honest_runs: int = HONEST,
    seed: int = 0,
    device: torch.device | str | None = None,
    every_run_judged: bool = False,
    sample: int | None = None,
    most: int | None = EDITS,
    jobs: int = 1,
    minutes: float | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
    plant_seed: int | None = None,
    backend: Backend | None = None,
    budget: float | None = None,
    implementation: str | None = None,
) -> SelfTest:
    """Judge mutants, and ``honest_runs`` runs of right alternatives, with the engine and with the other rules.

    ops: names; None is all. device: None is the accelerator, else the CPU, where edited Triton kernels are interpreted.
    every_run_judged: the engine judges also the runs after the one that caught a mutant. sample: so many mutants, drawn
    by the seed. most: edits of one op's source; None: every one. jobs: worker processes (on a CPU). minutes: what
    is not done after as many is left. resume: a file in which results are kept, and from which an interrupted run goes
    on. plant_seed: which edits are drawn; None: by ``seed``. backend: "torch" for rules and definitions alone, "triton"
    for edits of sources, "hip" for those of C++, in the simulator; None: the first two. budget: process seconds that an
    op's right kernel may take for the cells and draws that its surviving edits need; None: as many as they need.
    implementation: edits of this Triton line alone, on the cases that it serves. Raises UnknownName for an op that is
    not there, ArgumentError for a line that none of them has, or that Triton's interpreter cannot run.
    """
    began = time.perf_counter()
    if honest_runs < 0:
        raise ArgumentError("selftest", "honest_runs", honest_runs, "0 or more")
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ArgumentError("selftest", "device", repr(device), "a device that is here: cpu, cuda:1 ..") from error
    if place == torch.device("cuda"):
        place = torch.device("cuda", torch.cuda.current_device())
    profile, planted = detect(place), seed if plant_seed is None else plant_seed
    names = [registry.primitive(op).name for op in (registry.primitives() if ops is None else ops)]
    if implementation is not None:
        backend = "triton"
        if not any(sources.lines_of(op, implementation) for op in names):
            known = {line.name for op in names for line in registry.implementations(op)}
            required = f"a line of {', '.join(names)} that Triton's interpreter can run; there are {', '.join(known)}"
            raise ArgumentError("selftest", "--implementation", implementation, required)
    chosen = catalogue(names, most, planted, backend, implementation)
    if sample is not None and sample < len(chosen):
        chosen = random.Random(f"{planted}").sample(chosen, sample)
    stamp = {
        "selftest": 2,
        "ops": names,
        "honest": honest_runs,
        "seed": seed,
        "planted": planted,
        "sample": sample,
        "most": most,
        "by_gate": every_run_judged,
        "backend": backend,
        "implementation": implementation,
        "device": profile.name,
    }
    journal = Journal(resume, stamp)
    left, absent = _left([m for m in chosen if m.key not in journal.records], place, profile)
    for record in absent:
        journal.add(record.key, record)
    pieces = {
        backend: [p for p in _pieces(names, runs, backend) if p[0] not in journal.tallies]
        for backend, runs in _shares(honest_runs, place, profile, backend).items()
    }
    total = len(left) + sum(map(len, pieces.values()))
    deadline = None if minutes is None else began + 60 * minutes
    done = 0

    def heard(key: str, entry: Record | Tally) -> None:
        nonlocal done
        journal.add(key, entry)
        done += 1
        if progress is not None:
            progress(done, total, key.split(".")[0])

    base: dict[str, Any] = {
        "seed": seed,
        "plant_seed": planted,
        "most": most,
        "every_run_judged": every_run_judged,
        "ops": names,
    }
    base |= {"budget": budget, "implementation": implementation}
    todo = [
        {
            **base,
            "backend": backend,
            "mutants": [m.key for m in left if m.backend == backend],
            "honest": pieces[backend],
        }
        for backend in pieces
    ]
    with quiet():
        if place.type == "cuda" and backend != "hip":
            for job in todo:
                worker.do(job, Setting(place, profile), heard)
        else:
            _spread(todo, left, jobs, deadline, heard)
    facts = environment(place, profile, seed, "small", round(time.perf_counter() - began, 3))
    tally = Tally()
    for part in journal.tallies.values():
        tally.merge(part)
    records = [journal.records[m.key] for m in chosen if m.key in journal.records]
    return compose(facts, records, tally, every_run_judged)


def _shares(honest_runs: int, place: torch.device, profile: Profile, backend: Backend | None) -> dict[Backend, int]:
    """Right runs by way of running."""
    if backend == "hip":
        return {"hip": 0}
    if backend == "torch" or _triton(place, profile) is not None:
        return {} if backend == "triton" else {"torch": honest_runs}
    if backend == "triton":
        return {"triton": honest_runs}
    share = honest_runs // INTERPRETED_SHARE
    return {"torch": honest_runs - share, "triton": share}


def _pieces(ops: Sequence[str], runs: int, backend: str) -> list[Piece]:
    """At least ``runs`` right runs, in pieces of a few rounds; every alternative of every op runs once a round."""
    a_round = max(len(alternatives(ops, backend)), 1)
    rounds = -(-runs // a_round)
    return [(f"right.{backend}.{first}", first, min(_PIECE, rounds - first)) for first in range(0, rounds, _PIECE)]


def _triton(place: torch.device, profile: Profile) -> str | None:
    """Why Triton cannot run here, compiled or in a worker; None where it can."""
    if place.type == "cpu":
        return None if importlib.util.find_spec("triton") else "triton is not installed"
    return "; ".join(registry.probe("triton", profile.vendor)) or None


def _left(mutants: Sequence[Mutant], place: torch.device, profile: Profile) -> tuple[list[Mutant], list[Record]]:
    """(those that can run here, records of the others)."""
    triton = _triton(place, profile)
    here, absent = [], []
    for mutant in mutants:
        why = mutant.gpu if place.type != "cuda" else None
        why = why or (triton if mutant.backend == "triton" else None)
        if why is None:
            here.append(mutant)
        else:
            absent.append(not_run(mutant, why))
    return here, absent


def _spread(
    todo: list[dict[str, Any]],
    left: list[Mutant],
    jobs: int,
    deadline: float | None,
    heard: Callable[[str, Record | Tally], None],
) -> None:
    """Jobs in worker processes, an op's mutants of one backend in one; ``jobs`` at a time."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for job in sorted(todo, key=lambda j: j["backend"] != "torch"):  # what is quick begins
        by_op: dict[str, list[str]] = {}
        for key in job["mutants"]:
            by_op.setdefault(next(m.op for m in left if m.key == key), []).append(key)
        in_turn = list(by_op.items())
        random.Random(f"{job['plant_seed']}").shuffle(in_turn)  # what a deadline leaves is not always the same
        for op, keys in in_turn:
            waiting.put({**job, "ops": [op], "mutants": keys, "honest": []})
        for start in range(0, len(job["honest"]), 8):
            waiting.put({**job, "mutants": [], "honest": job["honest"][start : start + 8]})
    results: queue.SimpleQueue[tuple[str, Record | Tally] | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_drive, args=(waiting, results, deadline, stop), daemon=True) for _ in range(jobs)
    ]
    for thread in threads:
        thread.start()
    ended = 0
    try:
        while ended < len(threads):
            answer = results.get()
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                ended += 1
            else:
                heard(*answer)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)


def _drive(waiting: Any, results: Any, deadline: float | None, stop: threading.Event) -> None:
    """Takes jobs until there are none, or it is late."""
    try:
        while not stop.is_set() and (deadline is None or time.perf_counter() < deadline):
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                break
            _work(job, results, deadline, stop)
    except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
        results.put(error)
    finally:
        results.put(None)


def _work(job: dict[str, Any], results: Any, deadline: float | None, stop: threading.Event) -> None:
    """One job in a process, which the deadline ends. Raises RuntimeError where it ends before, and has not done it.

    What it writes for itself, edited modules, goes with it, also where it is killed, or a fork of it was.
    """
    path = os.pathsep.join(p for p in (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")) if p)
    env = {**os.environ, **parentage(), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    env["TRITON_INTERPRET"] = "1" if job["backend"] == "triton" else "0"
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as complaints,
        tempfile.TemporaryDirectory(prefix="ferryman-selftest-", ignore_cleanup_errors=True) as own,
    ):
        env["TMPDIR"] = own
        process = subprocess.Popen(
            [sys.executable, "-c", worker.START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=env,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(max(deadline - time.perf_counter(), 0.0), end) if deadline is not None else None
        if timer is not None:
            timer.start()
        try:
            for line in process.stdout:
                if late.is_set():
                    break  # the line may be cut
                said = json.loads(line)
                model = Record if "record" in said else Tally
                results.put((said["key"], model.model_validate(said.get("record") or said["tally"])))
                if stop.is_set():
                    end()
        finally:
            if timer is not None:
                timer.cancel()
        code = process.wait()
        if code and not late.is_set():
            complaints.seek(0)
            raise RuntimeError(f"a worker of the self-test ended with code {code}: {complaints.read()[-800:].strip()}")

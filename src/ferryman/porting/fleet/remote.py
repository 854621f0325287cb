"""What runs on a node: functions of plain values, which Ray finds there by their names."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ferryman.porting as porting
from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.porting.fingerprint.compare import verify
from ferryman.porting.fleet.cluster import FleetError
from ferryman.porting.judging.parity import SEED
from ferryman.porting.judging.results import environment, parse
from ferryman.porting.running import timing
from ferryman.porting.running.cells import dtypes_of, tier_cases, turns
from ferryman.porting.running.process import placed, quiet
from ferryman.porting.running.runner import Plan
from ferryman.porting.running.workers import Job, Workers


@lru_cache(maxsize=1)
def digest() -> str:
    """SHA-256 of this installation's sources: a version's number alone does not tell two checkouts apart."""
    root, hasher = Path(porting.__file__).parents[1], hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".yaml", ".cuh", ".json")):
        hasher.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return hasher.hexdigest()


def identity() -> dict[str, str]:
    """Which Ferryman a process runs, and on which machine."""
    try:
        version = metadata.version("ferryman")
    except metadata.PackageNotFoundError:
        version = "none installed, sources alone"
    return {"version": version, "torch": str(torch.__version__), "digest": digest(), "host": socket.gethostname()}


def claimed(device: str, profile: str) -> tuple[torch.device, Profile]:
    """The device that was claimed. Raises FleetError where a node declares what it does not have."""
    place = placed(device)
    detected = detect(place)
    if detected.name != profile:
        raise FleetError(
            f"node {socket.gethostname()} declares {profile} and has {detected.name} ({detected.title}); "
            "correct its --resources"
        )
    return place, detected


def plan(ask: dict[str, Any], profile_name: str) -> dict[str, Any]:
    """What a single process on this node's device would check: groups of cells, and what cannot run here.

    ``ask``: ops, backends, dtypes, tier, seed, full, device. A group is [interpreted, op, dtype, case]; ``lines`` has
    its implementations by [interpreted][op].
    """
    place, profile = claimed(ask["device"], profile_name)
    chosen = dtypes_of(ask["dtypes"])
    tier = ask["tier"] or ("small" if place.type == "cpu" else "standard")
    seed = SEED if ask["seed"] is None else ask["seed"]
    whole_plan = Plan(ask["ops"], ask["backends"], chosen, tier, place, profile, ask["full"])
    interpreted = Job.interpreted(whole_plan.interpreted, chosen, tier, seed, ask["full"], None)
    lines = {
        "compiled": {op.name: [x.name for x in here] for op, here in whole_plan.local},
        "interpreted": interpreted.lines,
    }
    groups = []
    for way, ops in lines.items():
        for name in ops:
            for c, case in enumerate(tier_cases(registry.primitive(name), tier)):
                groups += [
                    [way, name, dtype, case.name]
                    for d, dtype in enumerate(interpreted.dtypes)
                    if way == "compiled" or turns(c, d, len(chosen), ask["full"])
                ]
    return {
        "tier": tier,
        "seed": seed,
        "device": str(place),
        "dtypes": interpreted.dtypes,
        "lines": lines,
        "groups": groups,
        "skipped": [c.model_dump(mode="json") for c in whole_plan.skipped],
        "environment": environment(place, profile, seed, tier).model_dump(mode="json"),
    }


def check(job: dict[str, Any], profile_name: str) -> dict[str, Any]:
    """The cells of a job (`worker.Job`), each with the seconds since the one before: {"cells": [[cell, seconds]]}."""
    claimed(job["device"], profile_name)
    cells: list[list[Any]] = []
    with quiet(), Workers([Job(**job)]) as workers:
        last = time.monotonic()
        for cell in workers.remaining():
            now = time.monotonic()
            cells.append(
                [cell.model_dump_json(), round(now - last, 4) if cells else None]
            )  # the first one waits for torch
            last = now
    return {"cells": cells, "host": socket.gethostname(), "pid": os.getpid()}


def finish(document: dict[str, Any], lines: dict[str, list[str]], dtypes: list[str]) -> dict[str, Any]:
    """What is measured alone, afterwards, on one device: times of what was right, and the profile's numerics."""
    results = parse(document)
    place = placed("cpu" if results.environment.device == "cpu" else "cuda")
    profile = detect(place)
    timings = timing.slowest(results.cells) if place.type == "cpu" else []
    with quiet():
        for op, names in lines.items() if place.type != "cpu" else ():
            menu = [registry.implementation(op, name) for name in names]
            timings += timing.of_right_ones(
                registry.primitive(op), menu, dtypes_of(dtypes), place, profile, results.environment.seed, results.cells
            )
        numerics = verify(profile, place)
    return {
        "timings": [one.model_dump(mode="json") for one in timings],
        "numerics": [one.model_dump(mode="json") for one in numerics],
    }

"""The whole self-test on one device."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch

from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.porting.process import quiet
from ferryman.porting.results import environment
from ferryman.porting.selftest.judging import Setting
from ferryman.porting.selftest.mutants import catalogue
from ferryman.porting.selftest.planting import Mutant
from ferryman.porting.selftest.report import Record, SelfTest, Tally, compose
from ferryman.porting.selftest.session import each_mutant, honest, not_run
from ferryman.porting.selftest.worker import Interpreted

Progress = Callable[[int, int, str], None]
HONEST = 1000
INTERPRETED_SHARE = 10  # one right run of ten is a Triton kernel with other tiles


def run(
    ops: Iterable[str] | None = None,
    honest_runs: int = HONEST,
    seed: int = 0,
    device: torch.device | str | None = None,
    every_run_judged: bool = False,
    sample: bool = False,
    progress: Progress | None = None,
) -> SelfTest:
    """Judge every mutant, and ``honest_runs`` runs of right alternatives, with the engine and with the other rules.

    ops: names; None is all. device: None is the accelerator, else the CPU, where edited Triton kernels are interpreted
    in a worker process. every_run_judged: the engine judges also the runs after the one that caught a mutant, so that
    every gate that can catch it is counted. sample: one mutant of each class, of each way of planting. Raises
    UnknownName for an op that is not there, and EditError where an edit no longer fits the source.
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
    profile = detect(place)
    names = [registry.primitive(op).name for op in (registry.primitives() if ops is None else ops)]
    chosen = [m for m in catalogue() if m.op in set(names)]
    if sample:
        chosen = list({(m.kind, m.backend, m.gpu): m for m in reversed(chosen)}.values())[::-1]
    here, interpreted, records = _sorted(chosen, place, profile)
    triton_share = honest_runs // INTERPRETED_SHARE if _triton(place, profile) is None else 0
    tally = Tally()
    total = len(here) + len(interpreted) + honest_runs
    done = 0

    def told(label: str, more: int = 1) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(min(done, total), total, label)

    setting = Setting(place, profile)
    worker = (
        Interpreted([m.key for m in interpreted], names, triton_share, seed, every_run_judged)
        if place.type == "cpu" and (interpreted or triton_share)
        else None
    )
    counted = 0

    def heard(so_far: Tally) -> None:
        nonlocal counted
        told("right alternatives", so_far.runs - counted)
        counted = so_far.runs

    with quiet(), worker or nullcontext():
        for record in each_mutant(here, setting, seed, every_run_judged):
            records.append(record)
            told(record.op)
        tally.merge(honest(names, honest_runs - triton_share, setting, seed, "torch", heard))
        if place.type == "cuda" and triton_share:
            counted = 0
            tally.merge(honest(names, triton_share, setting, seed, "triton", heard))
        for found in worker or ():
            if isinstance(found, Tally):
                tally.merge(found)
                told("right alternatives (interpreted)", found.runs)
            else:
                records.append(found)
                told(f"{found.op} (interpreted)")
    facts = environment(place, profile, seed, "small", round(time.perf_counter() - began, 3))
    return compose(facts, records, tally, every_run_judged)


def _triton(place: torch.device, profile: Profile) -> str | None:
    """Why Triton cannot run here, compiled or in a worker; None where it can."""
    if place.type == "cpu":
        return None if importlib.util.find_spec("triton") else "triton is not installed"
    return "; ".join(registry.probe("triton", profile.vendor)) or None


def _sorted(mutants: Sequence[Mutant], place: torch.device, profile: Profile) -> tuple[
        list[Mutant], list[Mutant], list[Record]]:  # fmt: skip
    """(those of this process, those of the worker, records of those that cannot run here)."""
    here, interpreted, absent = [], [], []
    triton = _triton(place, profile)
    simt = None
    if place.type == "cuda":
        simt = "; ".join(registry.probe("cuda" if profile.vendor == "nvidia" else "hip", profile.vendor)) or None
    for mutant in mutants:
        if mutant.gpu is not None and place.type != "cuda":
            absent.append(not_run(mutant, mutant.gpu))
        elif mutant.backend == "simt" and simt is not None:
            absent.append(not_run(mutant, simt))
        elif mutant.backend == "triton" and triton is not None:
            absent.append(not_run(mutant, triton))
        elif mutant.backend == "triton" and place.type == "cpu":
            interpreted.append(mutant)
        else:
            here.append(mutant)
    return here, interpreted, absent

"""`ferryman compile`: lists, compiles and judges every kernel, and writes the folder of artefacts."""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from ferryman.backends import triton_host
from ferryman.backends.artefacts import MANIFEST, OBJECTS, Entry, Manifest, Module
from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import ArgumentError, UnknownName
from ferryman.porting.aot import cache, gates, groups, pool
from ferryman.porting.aot.groups import Group, Shapes, families_of, groups_of
from ferryman.porting.aot.targets import backends_of

TIMEOUT_SECONDS = 120.0  # for one kernel: the slowest takes 5 s on an idle core
LIST_SECONDS = 300.0
Progress = Callable[[int, int, str], None]


@dataclass
class Compiled:
    """What a run made: the manifest, where each image lies in the cache, and what was said of damaged cache entries."""

    manifest: Manifest
    images: dict[str, str] = field(default_factory=dict)  # the file of an entry -> the cache's name of it
    metadata: dict[str, bytes] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def compile_all(
    profiles: Sequence[Profile],
    *,
    ops: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    serving: Shapes | None = None,
    jobs: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
) -> Compiled:
    """Compile for every profile. A toolchain that refuses, dies or hangs gives a QUARANTINED entry with its log.

    ops: only the families that these belong to. dtypes: only these of Triton's kernels, and of the calls of models that
    are served, as "bfloat16"; None: all. serving: the shapes of those calls; None: only the forms that each family
    lists. timeout: seconds for one kernel. Raises UnknownName for an op, backend or dtype that there is not,
    ArgumentError for a backend that serves no profile, or where nothing is left to compile.
    """
    began = time.perf_counter()
    known = {p.name: p for p in profiles}
    listed = _groups(profiles, ops, backends, dtypes or groups.DTYPES, serving)
    seen: dict[str, str] = {}
    compiled = Compiled(_manifest(profiles, {}, [], 0.0))
    count = jobs or min(os.cpu_count() or 1, 8)
    advance = progress or (lambda done, total, label: None)

    entries: list[Entry] = []
    tasks: list[_Task] = []
    host: dict[str, _Task] = {}  # C modules, each once, though many groups need it
    modules: list[Module] = []
    with pool.Pool(count, command) as workers:
        for done, (group, answer) in enumerate(workers.each(listed, _list), 1):
            advance(done, len(listed), f"listing {group.profile} {group.backend} {group.family}")
            if "refused" in answer:
                entries.append(_unlisted(group, known[group.profile], answer["refused"]))
                continue
            seen |= answer["toolchain"]
            tasks += [_Task(group, row) for row in answer["kernels"]]
            for key, name in answer["modules"].items():
                host.setdefault(key, _Task(group, {"key": key, "kernel": name}, module=True))
        tasks = sorted([*tasks, *host.values()], key=lambda task: task.group)
        for done, (task, answer) in enumerate(workers.each(tasks, lambda w, t: _compile(w, t, timeout)), 1):
            if answer.get("damaged"):
                compiled.damaged.append(answer["damaged"])
            if task.module:
                module = _module(task.row, answer)
                modules.append(module)
                advance(done, len(tasks), module.name)
                if module.file is not None:
                    compiled.images[module.file] = answer["entry"]
                continue
            entry = _entry(task.group, task.row, answer, known[task.group.profile])
            entries.append(entry)
            advance(done, len(tasks), f"{task.group.profile} {entry.kernel}: {entry.verdict}")
            if entry.file is not None:
                compiled.images[entry.file] = answer["entry"]
            if entry.metadata is not None:
                compiled.metadata[entry.metadata] = _metadata(answer)
    entries.sort(key=lambda e: (e.profile, e.backend, e.family, e.dtype, e.kernel, e.key))
    modules.sort(key=lambda m: (m.name, m.source))
    compiled.manifest = _manifest(profiles, seen, entries, time.perf_counter() - began, modules)
    return compiled


@dataclass(frozen=True)
class _Task:
    group: Group
    row: dict[str, Any]
    module: bool = False  # one of Triton's C modules, no kernel


def _list(worker: pool.Worker, group: Group) -> tuple[Group, dict[str, Any]]:
    try:
        answer = worker.ask({"group": astuple(group)}, LIST_SECONDS)
    except pool.Lost as lost:
        return group, {"refused": str(lost)}
    worker.listed.add(group)
    return group, answer


def _compile(worker: pool.Worker, task: _Task, timeout: float) -> tuple[_Task, dict[str, Any]]:
    if "refused" in task.row:
        return task, task.row
    if task.group not in worker.listed:
        _, answer = _list(worker, task.group)
        if "refused" in answer:
            return task, answer
    try:
        return task, worker.ask({"group": astuple(task.group), "key": task.row["key"]}, timeout)
    except pool.Lost as lost:
        return task, {"error": str(lost)}


def write(compiled: Compiled, folder: Path) -> None:
    """Objects first, each whole; then the manifest, which names them; then what an older manifest named goes.

    Raises OSError; a folder that cannot be written keeps its old manifest, whose objects are all still there.
    """
    for file, name in compiled.images.items():
        try:
            kept = cache.get(name)
        except cache.DamagedEntry as entry:
            raise OSError(errno.EIO, f"{entry}; run it again") from entry
        if kept is None:
            raise OSError(errno.ENOENT, f"the cache lost {name} during the run; run it again")
        write_whole(folder / file, kept[1])
    for file, data in compiled.metadata.items():
        write_whole(folder / file, data)
    write_whole(
        folder / MANIFEST, (compiled.manifest.model_dump_json(indent=1, exclude_defaults=False) + "\n").encode()
    )
    wanted = {*compiled.images, *compiled.metadata}
    for path in (folder / OBJECTS).glob("*"):
        if f"{OBJECTS}/{path.name}" not in wanted and path.suffix in (".cubin", ".hsaco", ".json", ".so"):
            path.unlink()


def _groups(
    profiles: Sequence[Profile],
    ops: Sequence[str] | None,
    backends: Sequence[str] | None,
    dtypes: Sequence[str],
    serving: Shapes | None,
) -> list[Group]:
    for dtype in dtypes:
        if dtype not in groups.DTYPES:
            raise UnknownName("dtype", dtype, groups.DTYPES)
    for name in backends or ():
        if name not in registry.backends():
            raise UnknownName("backend", name, registry.backends())
    families = families_of(ops)
    listed: list[Group] = []
    for known in profiles:
        able = backends_of(known)
        own = [b for b in able if backends is None or b in backends]
        listed += groups_of(known, own, families, dtypes, serving)
    for name in backends or ():
        if not any(group.backend == name for group in listed):
            serves = ", ".join(sorted({b for p in profiles for b in backends_of(p)}))
            raise ArgumentError(
                "compile", "--backend", name, f"one that has kernels for these targets and ops: {serves}"
            )
    if not listed:
        raise ArgumentError("compile", "--op", ", ".join(ops or ()), "an op with kernels of ours")
    return listed


def _entry(group: Group, row: dict[str, Any], answer: dict[str, Any], known: Profile) -> Entry:
    facts = {
        "key": row["key"],
        "profile": known.name,
        "arch": known.arch,
        "backend": group.backend,
        "family": group.family,
        "kernel": row["kernel"],
        "dtype": group.dtype,
        "signature": row.get("signature", {}),
        "constexprs": row.get("constexprs", {}),
        "options": row.get("options", {}),
    }
    reason = answer.get("error") or answer.get("refused")
    if reason is not None:
        return Entry(**facts, verdict="QUARANTINED", reason=reason)
    judged = gates.judge(answer["resources"], known, row["spills_allowed"], row["aligned"])
    failed = gates.failures(judged)
    metadata = f"{OBJECTS}/{hashlib.sha256(_metadata(answer)).hexdigest()}.json" if answer["metadata"] else None
    return Entry(
        **facts,
        verdict="COMPILED_ONLY" if failed is None else "FAIL",
        reason=failed,
        kind=answer["kind"],
        file=f"{OBJECTS}/{answer['sha256']}.{answer['kind']}",
        sha256=answer["sha256"],
        metadata=metadata,
        resources=answer["resources"],
        gates=judged,
        seconds=answer.get("seconds"),
        cached=answer["cached"],
    )


def _module(row: dict[str, Any], answer: dict[str, Any]) -> Module:
    facts = {"name": row["kernel"], "source": row["key"], "abi": triton_host.abi()}
    reason = answer.get("error") or answer.get("refused")
    return Module(**facts, reason=reason) if reason else Module(**facts, file=f"{OBJECTS}/{answer['sha256']}.so")


def _metadata(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer["metadata"], sort_keys=True).encode()


def _unlisted(group: Group, known: Profile, reason: str) -> Entry:
    """A group that could not even be listed: one entry stands for all its kernels."""
    digest = hashlib.sha256(repr(group).encode()).hexdigest()
    return Entry(
        key=digest,
        profile=known.name,
        arch=known.arch,
        backend=group.backend,
        family=group.family,
        kernel="all",
        dtype=group.dtype,
        verdict="QUARANTINED",
        reason=reason,
    )


def _manifest(
    profiles: Sequence[Profile],
    versions: dict[str, str],
    entries: list[Entry],
    seconds: float,
    modules: Sequence[Module] = (),
) -> Manifest:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Manifest(
        time=now,
        toolchain=versions,
        profiles=[p.name for p in profiles],
        seconds=round(seconds, 3),
        entries=entries,
        modules=list(modules),
    )

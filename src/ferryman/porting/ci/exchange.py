"""Capsules between rows: what one row's machine recorded is replayed and judged on another (docs/capsules.md).

A row with ``capsule: true`` writes one beside its record, which has its SHA-256. `replayed` runs on a machine of
another kind, usually the gate's CPU; `reasons` is what the gate makes of it. Replays are named by the digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import CapsuleError, ResultError
from ferryman.porting.capsule import contents
from ferryman.porting.capsule.replay import replay
from ferryman.porting.capsule.replay_results import AGREE, Explained, Replay, load
from ferryman.porting.ci import expected
from ferryman.porting.ci.commands import CAPSULE
from ferryman.porting.ci.evidence import Evidence
from ferryman.porting.ci.matrix import Matrix
from ferryman.porting.ci.row import Row
from ferryman.porting.judging import results

_REFUTED = ("A is wrong", "both are wrong")
Reasons = Iterator[tuple[str, str]]


def replayed(
    runs: Sequence[Evidence],
    matrix: Matrix,
    out: Path,
    device: str = "cpu",
) -> Iterator[tuple[str, Replay | str]]:
    """Replays the capsules that runs of the matrix's rows brought, and writes ``out``/DIGEST.json for each.

    Gives (row's id, its replay), or what is wrong with the capsule. A capsule that is not what its record says is left
    out: the gate says so by itself.
    """
    known = {row.id: row for row in matrix.rows if row.capsule}
    for one in runs:
        digest = one.record.files.get(CAPSULE)
        if one.record.row not in known or digest is None or one.path is None or one.problems:
            continue
        path = one.path.parent / CAPSULE
        try:
            # the row's own backend, too, which need not run here: its recorded outputs are what is judged
            asked = ("torch", known[one.record.row].backend)
            document = replay(contents.load(path), device, backends=asked, name=f"{one.record.row}/{CAPSULE}")
        except CapsuleError as error:
            yield one.record.row, str(error)
            continue
        write_whole(out / f"{digest}.json", document.model_dump_json(indent=1).encode())
        yield one.record.row, document


def replays_of(folder: Path | None) -> dict[str, Replay]:
    """Replays by the digest of their capsule. Raises ResultError for a file that is none, or is damaged."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise ResultError(f"--replays: {folder} is no folder; required: one that `ferryman ci replay` wrote")
    read: dict[str, Replay] = {}
    for path in sorted(folder.glob("*.json")):
        one = load(path)
        if not isinstance(one, Replay):
            raise ResultError(f"{path} is a result document; required: what `ferryman ci replay` wrote")
        read[path.stem] = one
    return read


def reasons(row: Row, one: Evidence, replays: Mapping[str, Replay]) -> Reasons:
    """(code, text) of each reason why a run's capsule does not support it; none where it does, or none is asked for."""
    if not row.capsule:
        return
    digest = one.record.files.get(CAPSULE)
    if digest is None:
        yield "no-capsule", f"{CAPSULE} is not among its files; required: one, which another machine can judge"
        return
    of = replays.get(digest)
    if of is None:
        yield "not-replayed", "no other machine has judged its capsule; run `ferryman ci replay`, and give --replays"
        return
    recorded, device = of.recorded.environment, one.record.device
    if (recorded.vendor, recorded.profile, recorded.arch) != (device.vendor, device.profile, device.arch):
        yield (
            "contradictory",
            f"its capsule is of {recorded.profile} ({recorded.arch}), its record of {device.profile} ({device.arch})",
        )
    if of.replayed.environment.profile == device.profile:
        yield "not-replayed", f"its capsule was replayed on a {device.profile} too; required: another kind of device"
    ids = [results.cell_id(cell) for cell in of.recorded.cells]
    others = [name for name in ids if not expected.of_backend(name, row.backend)]
    if others:
        yield "swapped", f"its capsule has cells of another backend than {row.backend}: {expected.first_few(others, 1)}"
    wrong = [e for e in of.explained if e.explanation in _REFUTED]
    if wrong:
        yield "capsule-refuted", f"{len(wrong)} of its recorded results are wrong: {_explanation(wrong)}"
    unsure = [e for e in of.explained if e.explanation == "not judged"]
    if unsure:
        yield "not-replayed", f"{len(unsure)} of its recorded results could not be judged: {_explanation(unsure)}"
    if not any(e.judged for e in of.explained):
        yield "not-replayed", "none of its recorded results was judged"


def note(one: Evidence, replays: Mapping[str, Replay]) -> str | None:
    """What a row's replay showed, in words."""
    of = replays.get(one.record.files.get(CAPSULE, ""))
    if of is None:
        return None
    judged = [e for e in of.explained if e.judged]
    counts = Counter(e.explanation for e in judged)
    said = ", ".join(f"{counts[e]} {e}" for e in AGREE if counts[e])
    where = of.replayed.environment
    return (
        f"its capsule was replayed on {where.device_name or where.profile}: {len(judged)} recorded results were judged "
        f"again{f'; against that machine: {said}' if said else ''}"
    )


def _explanation(some: Sequence[Explained]) -> str:
    first = some[0]
    detail = f" ({first.detail})" if first.detail else ""
    return f"{first.op}|{first.implementation}|{first.dtype}|{first.case}{detail}"[:400]

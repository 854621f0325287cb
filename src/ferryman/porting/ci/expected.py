"""Which cases a row must have: ids, not counts. The ops' own lists say it, a committed file, and the row's sisters."""

from __future__ import annotations

import argparse
import fnmatch
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.errors import FerrymanError
from ferryman.porting.aot import groups
from ferryman.porting.ci.row import MatrixError, Row
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.running.cells import dtypes_of, tier_cases, turns

_CASES_LIMIT = 16 * 2**20
_TIERS = {"hardware": "standard", "stand-in": "standard", "simulated": "small", "cpu": "small"}


def family(row: Row) -> tuple[object, ...] | None:
    """What sisters share: the same tests by the same command. None for a row whose cases are listed otherwise."""
    if row.suite in ("pytest", "command"):
        return row.suite, row.tests, row.command, row.args
    return None


def excused(row: Row, case: str, why: str = "") -> str | None:
    """The reason that the matrix gives why a case need not run in a row. ``why``: what the run says of it."""
    fitting = (s for s in row.skips if _fits(case, s.match))
    return next((s.reason for s in fitting if not s.because or fnmatch.fnmatchcase(why, s.because)), None)


def _fits(case: str, pattern: str) -> bool:
    """A module that skips itself is a case with the file's name: what fits all of its tests fits it."""
    return fnmatch.fnmatchcase(case, pattern) or pattern in (case, f"{case}::*")


def listed(row: Row, root: Path) -> set[str] | None:
    """Ids that a committed file lists, one a line; None where the row names none. Raises MatrixError."""
    if row.cases is None:
        return None
    path = root / row.cases
    try:
        if path.stat().st_size > _CASES_LIMIT:
            raise MatrixError(f"{row.cases} is larger than {_CASES_LIMIT} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MatrixError(f"row {row.id}: cases names {row.cases}, which cannot be read: {error}") from error
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def of_backend(case: str, backend: str) -> bool:
    """Whether a cell's id is of a line of a backend's menu; of an op that is none of ours, whether it has that name."""
    op, name = case.split("|")[:2]
    return name in _names(op, backend)


@lru_cache(maxsize=None)
def _names(op: str, backend: str) -> frozenset[str]:
    if op not in registry.primitives():
        return frozenset({backend})
    return frozenset(line.name for line in registry.asked(op, {backend}))


def checked(row: Row) -> set[str] | None:
    """Ids of `ferryman check` for a row of that suite, from the ops' own cases; None for other suites.

    A backend that is not there is one cell for all cases: then those are missing, and the row did not run.
    """
    if row.suite != "ferryman" or row.how not in _TIERS:
        return None
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for option in ("--op", "--dtype"):
        parser.add_argument(option, action="append")
    parser.add_argument("--tier")
    parser.add_argument("--full", action="store_true")
    try:
        given, _ = parser.parse_known_args(list(row.args))
        dtypes = dtypes_of(given.dtype)
        ops = list(registry.primitives()) if given.op is None else [registry.primitive(op).name for op in given.op]
        tier = given.tier or _TIERS[row.how]
        thin = row.how == "cpu" and row.backend == "triton" and not given.full
        ids = set()
        for op in ops:
            lines = [line.name for line in registry.asked(op, {row.backend})]
            for c, case in enumerate(tier_cases(registry.primitive(op), tier)):
                for d, dtype in enumerate(dtypes):
                    if not thin or turns(c, d, len(dtypes), False):
                        ids |= {f"{op}|{name}|{dtype_name(dtype)}|{case.name}" for name in lines}
    except (FerrymanError, argparse.ArgumentError) as error:
        raise MatrixError(f"row {row.id}: its args cannot be run: {error}") from error
    return ids


def compiled(row: Row) -> set[str] | None:
    """Kernels that a row has to compile; None for other rows. Raises MatrixError where they cannot be listed here."""
    if row.suite != "ferryman" or row.how != "compile":
        return None
    known = profile(row.device)
    names: list[str] = []
    try:
        for group in groups.groups_of(known, [row.backend], groups.families_of(None)):
            names += [f"{group.family}|{row.backend}|{group.dtype}|{s.kernel}" for s in groups.sources_of(group, known)]
    except (ImportError, FerrymanError) as error:
        raise MatrixError(f"row {row.id}: its kernels cannot be listed here: {error}") from error
    return _numbered(names)


def kernels(ids: Iterable[str]) -> set[str]:
    """Cells of such a row as `compiled` names them: a kernel has several configurations, whose text is no id."""
    names = []
    for name in ids:
        op, backend, dtype, case = name.split("|", 3)
        names.append(f"{op}|{backend}|{dtype}|{case.partition(': ')[2].partition('(')[0]}")
    return _numbered(names)


def _numbered(names: Iterable[str]) -> set[str]:
    counts: Counter[str] = Counter()
    numbered = set()
    for name in names:
        counts[name] += 1
        numbered.add(f"{name} ({counts[name]})")
    return numbered


def first_few(ids: Iterable[str], most: int = 3) -> str:
    """The first few of many ids."""
    names: Sequence[str] = sorted(ids)
    return ", ".join(name[:160] for name in names[:most]) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )

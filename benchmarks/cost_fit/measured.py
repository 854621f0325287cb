"""What was measured of a device: the times in documents of `ferryman bench`, lockfiles, and draws of regret."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import torch
from pydantic import BaseModel, Field, ValidationError

from ferryman import files
from ferryman.cli import calls
from ferryman.device_profiles import Profile
from ferryman.dispatch import cost, lockfile, lockfile_document, lockfile_migrate, registry
from ferryman.errors import ResultError
from ferryman.ops.primitive import Case
from ferryman.porting.bench import document, grid

STALE, UNKNOWN, UNTRUSTED = "stale", "of unknown cases", "not to be trusted"
READ = "a document of ferryman bench, a lockfile, a table of products, or what benchmarks/regret.py wrote"


@dataclass(frozen=True)
class Measured:
    op: str
    case: str
    implementation: str
    seconds: float
    work: cost.Work
    region: str

    @property
    def group(self) -> str:
        return f"{self.op} {self.work.dtype.itemsize * 8}"


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Row(BaseModel):
    m: int
    n: int
    k: int
    us: Positive
    cublas_us: Positive


class _LinearTable(BaseModel):
    """The table of products that was measured on an H200 (results/h200/linear.json.gz), in a file of the op's name."""

    device: str
    rows: list[_Row]


class _Place(BaseModel):
    profile: str


class _Judged(BaseModel):
    op: str
    case: str
    failed: str | None = None
    seconds: dict[str, Positive] = {}
    hopeless: dict[str, Positive] = {}
    untrusted: list[str] = []


class _RegretTable(BaseModel):
    """What `benchmarks/regret.py` writes, as far as it is read here."""

    environment: _Place
    dtype: str
    cells: list[_Judged]


Form = TypeVar("Form", bound=BaseModel)


def read(path: Path) -> dict[str, Any]:
    try:
        raw = files.document(path)
    except files.Unreadable as error:
        raise ResultError(str(error)) from error
    if not isinstance(raw, dict):
        raise ResultError(f"{path} holds a {type(raw).__name__}; required: {READ}")
    return raw


def _parsed(form: type[Form], raw: dict[str, Any], path: Path) -> Form:
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ResultError(f"{path} is damaged, or none of {READ}: {place}: {first['msg']}") from error


def _require(path: Path, stated: object, profile: Profile) -> None:
    if stated != profile.name:
        raise ResultError(f"{path} is of {stated}, not of {profile.name}")


def cells(path: Path, profile: Profile, left_out: Counter[str] | None = None) -> Iterator[Measured]:
    """What a file holds of a device. ``left_out`` counts the times that are not given, by why.

    Raises FerrymanError for a file that cannot be read, is damaged, or is of another device.
    """
    gone: Counter[str] = Counter() if left_out is None else left_out
    raw = read(path)
    if raw.get("kind") == document.KIND:
        benchmark = document.parse(raw, str(path))
        _require(path, benchmark.environment.profile, profile)
        for timed in benchmark.cells:
            case = _case(timed.op, timed.case)
            known = {
                times.name: times.seconds
                for times in timed.times
                if times.role == "implementation" and times.seconds is not None and times.note is None
            }
            if case is None or timed.untrusted:
                gone[UNKNOWN if case is None else UNTRUSTED] += len(known)
                continue
            yield from _of(timed.op, case, calls.dtype_of(timed.dtype), known, profile)
    elif raw.get("kind") == "ferryman-lockfile":
        locked = lockfile_document.load(path)
        _require(path, locked.stamp.get("profile"), profile)
        for op, entries in locked.choices.items():
            for region, entry in entries.items():
                name, _, dtype = entry.case.rpartition(" ")
                case = _case(op, name)
                if case is None or lockfile_document.stale(op, entry, region) is not None:
                    gone[UNKNOWN if case is None else STALE] += len(entry.times)
                    continue
                yield from _of(op, case, calls.dtype_of(dtype), entry.times, profile)
    elif raw.get("kind") == "ferryman-regret":
        table = _parsed(_RegretTable, raw, path)
        _require(path, table.environment.profile, profile)
        for cell in table.cells:
            case = _case(cell.op, cell.case) or drawn_case(cell.op, cell.case)
            # not an implementation's own plan beside its tuned configuration
            known = {name: s for name, s in (cell.seconds | cell.hopeless).items() if "," not in name}
            if case is None or cell.failed is not None or cell.untrusted:
                gone[UNKNOWN if case is None else UNTRUSTED] += len(known)
                continue
            yield from _of(cell.op, case, calls.dtype_of(table.dtype), known, profile)
    else:
        products = _parsed(_LinearTable, raw, path)
        if products.device not in profile.identity.names:
            names = ", ".join(profile.identity.names)
            raise ResultError(f"{path} is of {products.device}, not of {profile.name} ({names})")
        op = path.name.partition(".")[0]
        for row in products.rows:
            case = drawn_case(op, f"{row.m}x{row.n}x{row.k}")
            known = {"cuda": row.us * 1e-6, "torch": row.cublas_us * 1e-6}
            if case is None:
                gone[UNKNOWN] += len(known)
                continue
            yield from _of(op, case, torch.bfloat16, known, profile)


def _of(op: str, case: Case, dtype: torch.dtype, times: Mapping[str, float], profile: Profile) -> Iterator[Measured]:
    """Results of an earlier version have its names of implementations."""
    work, region = work_of(op, case, dtype)
    known = registry.primitive(op)
    args, names = grid.on_meta(known, case, dtype), {line.name for line in registry.implementations(op)}
    for name, seconds in times.items():
        today = name if name in names else lockfile_migrate.line_of(known, args, name, profile)
        yield Measured(op, case.name, today, seconds, work, region)


def _case(op: str, name: str) -> Case | None:
    known = registry.primitives().get(op)
    if known is None:
        return None
    for size in get_args(grid.Grid):
        for case in grid.cases(known, size, torch.device("cuda")):
            if case.name == name:
                return case
    return None


def drawn_case(op: str, name: str) -> Case | None:
    """None where `benchmarks/regret.py` draws no shape of that name."""
    known = registry.primitives().get(op)
    named = None if known is None else registry.evidence(known).named
    if named is None:
        return None
    try:
        return named(name)
    except ValueError:  # another number of sizes
        return None


def work_of(op: str, case: Case, dtype: torch.dtype) -> tuple[cost.Work, str]:
    known = registry.primitive(op)
    args = grid.on_meta(known, case, dtype)
    return cost.work_of(known, args), lockfile.region(known, args)

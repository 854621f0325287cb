"""The result document: one versioned JSON of cells, timings and the environment. Renderings stand in ``report/``."""

from __future__ import annotations

import contextlib
import datetime
import math
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic_core
import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from ferryman import files
from ferryman.backends.precision import float32_precision
from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import ResultError, shown
from ferryman.porting.judging import metrics
from ferryman.porting.judging.printable import is_printable, printable

# 2: reading, distribution (with edges) and reduction of cells. 3: provenance. Documents of older versions still load.
SCHEMA_VERSION = 3

Verdict = Literal["PASS", "FAIL", "UNIMPLEMENTED", "COMPILED_ONLY", "SIMULATED", "NOT_RUN", "QUARANTINED", "MISTRUSTED"]
GateName = Literal["G0", "G1", "G2", "G3", "G4", "G5", "G6", "G7"]
Outcome = Literal["pass", "fail", "n/a"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,127}")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
# From the worst to the best that one row can say; a row is as bad as its worst cell, and green only if something ran.
_BAD: tuple[Verdict, ...] = ("FAIL", "MISTRUSTED", "QUARANTINED")
_RAN: tuple[Verdict, ...] = ("PASS", "SIMULATED", "COMPILED_ONLY", "NOT_RUN", "UNIMPLEMENTED")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", frozen=True)


class Gate(_Model):
    """One gate's outcome; "n/a" and "fail" carry a reason. ``measure`` is the number that was compared with 1."""

    outcome: Outcome
    reason: str | None = None
    measure: float | None = None


class WorstElement(_Model):
    """The element furthest out, in units of its bound."""

    output: str
    index: list[int]
    value: float
    expected: float
    bound: float


class Cell(_Model):
    """One implementation of one op on one case, in one dtype, on one device."""

    op: Name
    implementation: Name
    device: str
    dtype: Name
    case: str
    verdict: Verdict
    reason: str | None = None
    ratio: float | None = Field(default=None, description="worst error in units of its bound; at most 1 is right")
    noise: float | None = Field(default=None, description="G3: RMS error over what is allowed")
    worst: WorstElement | None = None
    reading: str | None = Field(default=None, description="what the pattern of the errors looks like, in one line")
    distribution: list[int] = Field(
        default=[],
        description="judged elements by error in bounds: below the document's first edge, between edges, from the last",
    )
    reduction: int | None = Field(default=None, description="how many terms are summed for one element of the result")
    gates: dict[GateName, Gate] = {}
    seconds: float | None = Field(
        default=None, description="median of the runs, host clock, launch included; none interpreted"
    )
    refusals: list[str] = []
    accumulation: str = "fp32"
    roundings: list[str] = []
    capsule: str | None = Field(default=None, description="the capsule whose inputs were used; None: generated here")


Clock = Literal["device events", "device events, launches included", "host clock"]
WITH_LAUNCHES: Clock = "device events, launches included"


class Timing(_Model):
    """Time of one standard case against the device profile's roofline."""

    op: Name
    implementation: Name
    device: str
    dtype: Name
    case: str
    seconds: float
    clock: Clock
    floor_seconds: float | None = None
    percent_of_roofline: float | None = None
    bound_by: str = "unknown"
    source: str = ""


class Environment(_Model):
    device: str
    device_name: str
    profile: str
    arch: str
    vendor: str
    versions: dict[str, str]
    flags: dict[str, str | bool]
    platform: str
    time: str
    seed: int
    tier: str
    seconds: float = 0.0


class Row(_Model):
    """One op x implementation: how many cells ended how. Derived from the cells; `load` checks that it agrees."""

    op: Name
    implementation: Name
    verdict: Verdict
    counts: dict[Verdict, int]
    refusals: int
    ratio: dict[str, float]
    reason: str | None = None


class Finding(_Model):
    """A numeric fact that the device profile states, against what was measured (`ferryman fingerprint`)."""

    path: str
    outcome: Literal["confirmed", "contradicted", "not stated", "not measured"]
    stated: str | int | float | None = None
    measured: str | int | float | None = None
    reason: str | None = None


class Provenance(_Model):
    """What a result is of: the tested repository's commit, the kernels, the toolchain, and which cells were meant."""

    commit: str | None = Field(
        default=None, pattern="^[0-9a-f]{40,64}$", description="of the repository in which the check ran; null: none"
    )
    dirty: bool | None = Field(default=None, description="whether files differed from the commit; null: nobody can say")
    kernels: dict[Name, str] = Field(default={}, description="SHA-256 of each op's kernel sources")
    toolchain: dict[str, str] = Field(default={}, description="ferryman, torch, triton, CUDA, HIP, driver ..")
    row: Name | None = Field(default=None, description="the row of the CI matrix that ran, `ferryman ci run`")
    manifest: list[str] = Field(default=[], description="the id of every cell that was meant to be judged")


class Results(_Model):
    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-results"] = "ferryman-results"
    environment: Environment
    cells: Annotated[list[Cell], FailFast()]  # a million wrong ones are one error
    timings: Annotated[list[Timing], FailFast()] = []
    summary: Annotated[list[Row], FailFast()] = []
    numerics: Annotated[list[Finding], FailFast()] = Field(
        default=[], description="the profile's numeric facts, verified on this device"
    )
    edges: list[float] = Field(default=[], description="errors in bounds between which `distribution` counts elements")
    provenance: Provenance | None = Field(default=None, description="what was tested; absent before version 3")


def cell_id(cell: Cell) -> str:
    """What tells a cell from the others of a document, whatever the device."""
    return f"{cell.op}|{cell.implementation}|{cell.dtype}|{cell.case}"


def row_verdict(counts: dict[Verdict, int]) -> Verdict:
    for verdict in (*_BAD, *_RAN):
        if counts.get(verdict):
            return verdict
    return "NOT_RUN"


def summarise(cells: Iterable[Cell]) -> list[Row]:
    grouped: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((cell.op, cell.implementation), []).append(cell)
    rows = []
    for (op, implementation), group in grouped.items():
        counts: dict[Verdict, int] = dict(sorted(Counter(c.verdict for c in group).items()))
        ratio: dict[str, float] = {}
        for cell in group:
            if cell.ratio is not None:
                ratio[cell.dtype] = max(ratio.get(cell.dtype, 0.0), cell.ratio)
        verdict = row_verdict(counts)
        first = next((c.reason for c in group if c.verdict == verdict and c.reason), None)
        refused = sum(1 for c in group if c.refusals)
        rows.append(
            Row(
                op=op,
                implementation=implementation,
                verdict=verdict,
                counts=counts,
                refusals=refused,
                ratio=ratio,
                reason=first,
            )
        )
    return rows


def results(environment: Environment, cells: Sequence[Cell], timings: Sequence[Timing] = ()) -> Results:
    edges = list(metrics.EDGES) if any(cell.distribution for cell in cells) else []
    return Results(
        environment=environment, cells=list(cells), timings=list(timings), summary=summarise(cells), edges=edges
    )


def failed(document: Results) -> bool:
    """Whether ``ferryman check`` exits with 1: something is wrong, its check cannot be trusted, or the device does not
    compute as its profile says (the bounds follow from that)."""
    wrong = any(cell.verdict in ("FAIL", "MISTRUSTED") for cell in document.cells)
    return wrong or any(finding.outcome == "contradicted" for finding in document.numerics)


def dumps(document: Results) -> str:
    """JSON without what is null; NaN and infinities are the strings "NaN", "Infinity" and "-Infinity"."""
    return document.model_dump_json(exclude_none=True)


def save(document: Results, path: str | Path) -> None:
    write_whole(Path(path).resolve(), dumps(document).encode())


class _Schema(GenerateJsonSchema):
    """JSON Schema of the documents as they are written: an infinity or NaN is a string."""

    def float_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [super().float_schema(schema), {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def schema() -> dict[str, Any]:
    """The published schema (docs/schema/), of the version that this Ferryman writes."""
    generated = Results.model_json_schema(schema_generator=_Schema)
    generated["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    generated["required"] = sorted({*generated["required"], "kind", "schema_version"})
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": f"Ferryman result document, version {SCHEMA_VERSION}",
        **{name: value for name, value in generated.items() if name != "title"},
    }


def load(path: str | Path) -> Results:
    """A result document from a file. Raises ResultError: too large, not JSON, from a newer schema, or inconsistent."""
    path = Path(path)
    try:
        data = files.unpacked(files.read(path))
        files.counted(data)
        raw = _parsed(data)
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is not JSON: {error}") from error
    return parse(raw, str(path), clean=is_printable(data))


def _parsed(data: bytes) -> Any:
    """JSON of bytes. pydantic's parser takes half the time; what it refuses, Python's explains or reads ("\\ud800")."""
    try:
        return pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError:
        return files.parse(data)


def parse(raw: Any, where: str = "the document", *, clean: bool = False) -> Results:
    """A result document from parsed JSON; see `load`. ``clean``: nothing in it needs `printable`."""
    if not isinstance(raw, dict) or raw.get("kind") != "ferryman-results":
        raise ResultError(f"{where} is not a Ferryman result document: its kind is not 'ferryman-results'")
    version = raw.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ResultError(
            f"{where}: schema_version is {shown(repr(version))}; required: an integer from 1 to {SCHEMA_VERSION}"
        )
    if version > SCHEMA_VERSION:
        raise ResultError(
            f"{where} has schema version {version}; this Ferryman reads up to {SCHEMA_VERSION}. Upgrade ferryman"
        )
    try:
        document = Results.model_validate(raw if clean else printable(raw))
    except ValidationError as error:
        first = error.errors()[0]
        place = shown(".".join(map(str, first["loc"])))
        raise ResultError(f"{where} is damaged: {place}: {first['msg']} ({error.error_count()} errors)") from error
    if document.summary != summarise(document.cells):
        raise ResultError(f"{where} is damaged: its summary does not follow from its cells")
    keys = Counter((c.op, c.implementation, c.device, c.dtype, c.case) for c in document.cells)
    twice = next((key for key, count in keys.items() if count > 1), None)
    if twice is not None:
        raise ResultError(f"{where} is damaged: the cell {' '.join(twice)} stands twice")
    if document.provenance is not None and document.provenance.manifest:
        missing = set(document.provenance.manifest).symmetric_difference(map(cell_id, document.cells))
        if missing:
            raise ResultError(
                f"{where} is damaged: {len(missing)} cells stand in its manifest or its cells alone, {min(missing)!r} "
                "is one"
            )
    return document


def environment(device: torch.device, profile: Any, seed: int, tier: str, seconds: float = 0.0) -> Environment:
    """What a reader of the numbers must know about the machine and the process."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("ferryman", "triton", "numpy", "transformers", "cupy-cuda13x", "cupy-cuda12x", "hip-python"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.version.hip:
        versions["hip"] = torch.version.hip
    name = _processor()
    flags: dict[str, str | bool] = {
        "float32_matmul_precision": _matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "bf16_reduced_precision_reduction": _reduced("bf16"),
        "fp16_reduced_precision_reduction": _reduced("fp16"),
    }
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return Environment(
        device=str(device),
        device_name=name,
        profile=profile.name,
        arch=profile.arch,
        vendor=profile.vendor,
        versions=versions,
        flags=flags,
        platform=platform.platform(),
        seed=seed,
        tier=tier,
        seconds=seconds,
        time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


@lru_cache(maxsize=1)
def _processor() -> str:
    """The CPU's model; where the system does not say, its architecture, which machines share."""
    with contextlib.suppress(OSError):
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^model name\s*:\s*(\S.*)$", said, re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def _reduced(kind: str) -> str:
    return str(getattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"))


def number(value: float | None) -> str:
    """A short number for tables: three digits, a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.3g}" if math.isfinite(value) else str(value)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by backend and operation
        return float32_precision()

"""`ferryman ci init`: a matrix for the kernels and tests that a repository has, and thin workflows that run it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ferryman.errors import UnknownName
from ferryman.porting.ci import provenance, workflows
from ferryman.porting.ci.matrix import FILE, Matrix, find, read
from ferryman.porting.ci.row import MatrixError
from ferryman.porting.ci.workflows import SYSTEMS, flow

VENDORS = ("cpu", "nvidia", "amd", "jetson")
_SOURCES_MOST, _READ_MOST = 5_000, 1 << 20
_TEST = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")


@dataclass(frozen=True)
class Planned:
    """Files to write by name, and what to say of them."""

    files: dict[str, str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Repository:
    """What a repository has: backends of its kernels, its tests, how it is installed."""

    backends: tuple[str, ...]
    kernels: tuple[str, ...]
    tests: tuple[str, ...]
    setup: tuple[str, ...]


def plan(root: Path, systems: Sequence[str], vendors: Sequence[str] | None = None) -> Planned:
    """What `init` writes. A matrix that is there stays, and its workflows are written from it.

    Raises UnknownName for a system or a vendor, MatrixError for a folder that has no tests and for an invalid matrix.
    """
    for name in systems:
        if name not in SYSTEMS:
            raise UnknownName("CI system", name, SYSTEMS)
    for name in vendors or ():
        if name not in VENDORS:
            raise UnknownName("vendor", name, VENDORS)
    if not root.is_dir():
        raise MatrixError(f"{root} is no folder")
    files: dict[str, str] = {}
    try:
        matrix, notes = read(find(root)), ["the matrix that is there is kept"]
    except MatrixError as error:
        if (root / FILE).exists() or "has no" not in str(error):
            raise
        repository = search(root)
        text = matrix_text(repository, vendors or _served(repository.backends))
        files[FILE] = text
        matrix = _parsed(text)
        notes = [f"found kernels for {', '.join(repository.backends)} and tests in {', '.join(repository.tests)}"]
    for name in systems:
        files[SYSTEMS[name]] = workflows.RENDER[name](matrix)
    notes.append("the images were not pulled here, and no runner was asked: the first run says whether they fit")
    return Planned(files, notes)


def _parsed(text: str) -> Matrix:
    from ferryman.device_profiles.yaml_nodes import read_nodes
    from ferryman.porting.ci.matrix import _Reader

    return _Reader(FILE).matrix(read_nodes(text.encode(), FILE))


def _served(backends: Iterable[str]) -> tuple[str, ...]:
    """A vendor without any kernel of its own is not asked for: CUDA sources say nothing of AMD."""
    vendors = ["cpu", "nvidia"]
    if {"triton", "hip", "torch"} & set(backends):
        vendors.append("amd")
    return tuple(vendors)


def search(root: Path) -> Repository:
    """Kernels and tests by what their sources say. Raises MatrixError where there are no tests."""
    try:
        names = provenance.git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    except provenance.GitError:
        names = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
    names = [n for n in names if n and not any(part.startswith(".") for part in Path(n).parts)][:_SOURCES_MOST]
    backends: dict[str, list[str]] = {}
    for name in names:
        backend = _backend(root / name)
        if backend is not None and not _TEST.search(name):
            backends.setdefault(backend, []).append(name)
    tests = sorted(n for n in names if _TEST.search(n))
    if not tests:
        raise MatrixError(
            f"{root.resolve()} has no tests (test_*.py): write one first; docs/testing.md of ferryman says how"
        )
    folders = {n.split("/")[0] for n in tests if "/" in n}
    chosen = tuple(sorted(folders | {n for n in tests if "/" not in n}))
    kernels = tuple(sorted({n for sources in backends.values() for n in sources if not n.endswith(".py")}))
    return Repository(
        tuple(b for b in ("triton", "cuda", "hip") if b in backends) or ("torch",), kernels, chosen, _setup(names)
    )


def _backend(path: Path) -> str | None:
    """Whose kernels a source holds; by its name, and what it imports."""
    if path.suffix in (".cu", ".cuh"):
        return "cuda"
    if path.suffix == ".hip":
        return "hip"
    if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _READ_MOST:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if re.search(r"^\s*(import triton|from triton)\b", text, re.MULTILINE):
        return "triton"
    if re.search(r"^\s*(import cupy|from cupy)\b|\bload_inline\(|\bRawKernel\(", text, re.MULTILINE):
        return "cuda"
    return None


def _setup(names: Sequence[str]) -> tuple[str, ...]:
    """How a job installs it: torch first, which selects the vendor; a torch that an image brings stays."""
    commands = [f"python -m pip install torch pytest 'ferryman[report]=={metadata.version('ferryman')}'"]
    commands += [
        f"python -m pip install -r {name}" for name in sorted(names) if re.fullmatch(r"requirements[\w.-]*\.txt", name)
    ]
    if "pyproject.toml" in names or "setup.py" in names:
        commands.append("python -m pip install -e .")
    return tuple(commands)


def matrix_text(repository: Repository, vendors: Sequence[str]) -> str:
    """The YAML of a first matrix."""
    lines = [
        "# What this repository tests: vendor x device x backend x how (ferryman ci, docs/ci.md of ferryman).",
        "# A row without results of this commit is NOT_RUN, never green. skips: tests that need not run there, why.",
        "schema: 1",
        "max_age_days: 14",
        "wait_minutes: 60 # for a runner that has the device",
        "require: [] # vendors that must be green: ferryman ci verify --require nvidia,amd",
        f"sources: {flow(['src', '.'])}",
        "setup:",
        *(f"  - {json.dumps(command)}" for command in repository.setup),
        "rows:",
    ]
    kernels = f", kernels: {flow(repository.kernels)}" if repository.kernels else ""
    rest = f"suite: pytest, tests: {flow(repository.tests)}{kernels}"
    for vendor in dict.fromkeys(vendors):
        if vendor == "cpu":
            for backend in [b for b in repository.backends if b == "triton"] or ["any"]:
                lines.append(f"  - {{id: cpu, vendor: cpu, device: cpu, backend: {backend}, how: cpu, {rest}}}")
            continue
        known = workflows.data("images")[vendor]
        for backend in repository.backends:
            if (backend == "hip" and known["vendor"] != "amd") or (backend == "cuda" and known["vendor"] != "nvidia"):
                continue
            device = known["device"]
            lines.append(
                f"  - {{id: {device}-{backend}, vendor: {known['vendor']}, device: {device}, backend: {backend}, "
                f"how: hardware, labels: [self-hosted, {device}], {rest}}}"
            )
    return "\n".join(lines) + "\n"

"""What a result is of: the tested repository's commit, the digests of its kernels, the toolchain that built them."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from ferryman.dispatch import kernel_code, registry
from ferryman.errors import FerrymanError
from ferryman.porting.judging.results import Provenance, Results, cell_id

_GIT_SECONDS = 30
_PACKAGES = ("ferryman", "triton", "numpy", "cupy-cuda13x", "cupy-cuda12x", "hip-python", "nvidia-cuda-nvrtc", "pytest")


class GitError(FerrymanError, RuntimeError):
    """git refused, or is not there; the message has what it said."""


@dataclass(frozen=True)
class State:
    """A work tree: its commit, and which tracked files differ from it.

    A file that git does not track shows elsewhere: where a row reaches it, its digest is one that the commit lacks.
    """

    commit: str | None
    changed: tuple[str, ...] = ()

    @property
    def dirty(self) -> bool | None:
        return None if self.commit is None else bool(self.changed)


def git(root: Path, *arguments: str) -> str:
    """What a git command prints. Raises GitError with what it said."""
    command = ["git", "-C", str(root), "-c", "core.quotePath=false", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {arguments[0]} did not run: {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitError(f"git {' '.join(arguments)} in {root}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="surrogateescape")


def state(root: Path = Path()) -> State:
    """The commit of the repository that ``root`` lies in; State(None) where there is none."""
    try:
        commit = git(root, "rev-parse", "HEAD").strip()
        listed = git(root, "status", "--porcelain=v1", "-z", "--untracked-files=no")
    except GitError:
        return State(None)
    return State(commit, tuple(entry[3:] for entry in listed.split("\0") if len(entry) > 3))


def toolchain() -> dict[str, str]:
    """Versions of what compiles and runs kernels here."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.version.hip:
        versions["hip"] = torch.version.hip
    return versions


def op_digests(ops: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the kernel sources of Ferryman's own ops."""
    return {op: kernel_code.digest(op) for op in sorted(set(ops))}


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def stamped(document: Results, row: str | None = None, root: Path = Path(), given: State | None = None) -> Results:
    """The document with what it is of. ``given``: the state of the work tree before the check began."""
    here = given or state(root)
    known = {cell.op for cell in document.cells if not cell.implementation.startswith("user:")}
    provenance = Provenance(
        commit=here.commit,
        dirty=here.dirty,
        kernels=op_digests(op for op in known if op in registry.primitives()),
        toolchain=toolchain(),
        row=row,
        manifest=sorted(cell_id(cell) for cell in document.cells),
    )
    return document.model_copy(update={"provenance": provenance})

"""Kernels that were compiled ahead of time: the manifest of a folder that `ferryman compile` wrote, and look-ups in it.

An artefact serves a launch only where its key matches: a hash over the kernel's source and all that was compiled in.
What is loaded is checked first, its hash and the arch in its file: a damaged or foreign one is reported once, and the
kernel is compiled as usual. A kernel whose every entry failed its resource gates is refused, and dispatch goes on.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from ferryman import files, settings
from ferryman.backends import code_objects
from ferryman.errors import ArtefactError, CompileError, shown

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
OBJECTS = "objects"
SIZE_LIMIT = 64 * 2**20
_IMAGE_LIMIT = 64 * 2**20

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# A file beside the manifest, named after its content's hash: no path of a manifest leads out of its folder.
File = Annotated[str, Field(pattern=r"^objects/[0-9a-f]{64}\.(cubin|hsaco|json|so)$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,255}$")]
Verdict = Literal["COMPILED_ONLY", "FAIL", "QUARANTINED"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gate(_Model):
    """One resource gate: what the kernel has against what its profile or author requires."""

    name: Name
    passed: bool
    actual: str
    required: str


class Entry(_Model):
    """One kernel configuration for one profile. ``key`` is what a launch must match; ``file`` is absent where nothing
    was compiled, and ``metadata`` is Triton's own, which its launcher needs."""

    key: Digest
    profile: Name
    arch: Name
    backend: Name
    family: Name
    kernel: Name
    dtype: Name
    verdict: Verdict
    reason: str | None = None
    kind: Literal["cubin", "hsaco"] | None = None
    file: File | None = None
    sha256: Digest | None = None
    metadata: File | None = None
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    options: dict[str, Any] = {}
    resources: dict[str, int] = {}
    gates: Annotated[list[Gate], FailFast()] = []
    seconds: float | None = None
    cached: bool = False


class Module(_Model):
    """One of Triton's C modules on the host (`triton_host`). ``source``: the hash of its text; ``abi``: the Python and
    platform that it is built for. ``file`` is absent where it could not be built, and ``reason`` says why."""

    name: Name
    source: Digest
    abi: Name
    file: File | None = None
    reason: str | None = None


class Manifest(_Model):
    """What a folder of artefacts holds. ``toolchain``: versions of what compiled it."""

    kind: Literal["ferryman-artefacts"] = "ferryman-artefacts"
    schema_version: int = SCHEMA_VERSION
    time: str
    toolchain: dict[str, str]
    profiles: list[Name]
    seconds: float
    entries: Annotated[list[Entry], FailFast()]
    modules: Annotated[list[Module], FailFast()] = []

    def counts(self) -> dict[str, int]:
        """Entries by verdict."""
        return {v: sum(e.verdict == v for e in self.entries) for v in ("COMPILED_ONLY", "FAIL", "QUARANTINED")}


def schema() -> dict[str, Any]:
    """The published schema of manifests (docs/schema/)."""
    model_schema = Manifest.model_json_schema()
    model_schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    model_schema["required"] = sorted({*model_schema["required"], "kind", "schema_version"})
    title = f"Ferryman artefact manifest, version {SCHEMA_VERSION}"
    return {"$schema": GenerateJsonSchema.schema_dialect, **model_schema, "title": title}


def read(folder: Path) -> Manifest:
    """The manifest of ``folder``. Raises ArtefactError: absent, too large, not JSON, of another version, or invalid."""
    path = folder / MANIFEST
    remedy = "run `ferryman compile --out` again"
    try:
        raw = files.document(path, SIZE_LIMIT)
    except files.Unreadable as error:
        raise ArtefactError(f"{error}; {remedy}, or unset FERRYMAN_ARTEFACTS") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ArtefactError(f"{path}: schema_version is {shown(repr(version))}; required: {SCHEMA_VERSION}; {remedy}")
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = shown(".".join(map(str, first["loc"])))
        raise ArtefactError(f"{path} is invalid at {where}: {first['msg']}; {remedy}") from error


class Store:
    """The artefacts of one folder, by key. Safe to share between threads. Raises ArtefactError as `read`, and where
    another user could have written them: they are code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for place in (folder, folder / OBJECTS, folder / MANIFEST):
            why = files.distrusted(place)
            if why is not None:
                raise ArtefactError(why)
        self.manifest = read(folder)
        self._entries: dict[str, list[Entry]] = {}
        for entry in self.manifest.entries:
            self._entries.setdefault(entry.key, []).append(entry)
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def find(self, key: str, backend: str, arch: str) -> Entry | None:
        """The entry that serves ``key`` on ``arch``. Raises CompileError where all that there are failed gates."""
        entries = [e for e in self._entries.get(key, []) if e.arch == arch]
        for entry in entries:
            if entry.verdict == "COMPILED_ONLY":
                return entry
        failed = next((e for e in entries if e.verdict == "FAIL"), None)
        if failed is None:
            return None
        raise CompileError(backend, failed.kernel, arch, f"refused by its resource gates: {failed.reason}")

    def image(self, entry: Entry) -> bytes | None:
        """The code object, checked; None, with a warning once, where it is damaged, absent or for another arch."""
        assert entry.file is not None and entry.sha256 is not None
        try:
            image = self.content(entry.file)
            if hashlib.sha256(image).hexdigest() != entry.sha256:
                raise ValueError(f"its sha256 is not the manifest's {entry.sha256[:12]}..")
            code_objects.check(image, entry.arch)
        except (OSError, ValueError) as error:
            self.warn(entry, error)
            return None
        return image

    def content(self, file: str) -> bytes:
        """A file of the folder. Raises OSError, or ValueError where its name is not its content's hash."""
        path = self.folder / file
        why = files.distrusted(path)
        if why is not None:
            raise ValueError(why)
        data = files.read(path, _IMAGE_LIMIT)
        if hashlib.sha256(data).hexdigest() != path.stem:
            raise ValueError(f"{path.name} holds {len(data)} bytes of something else, or only a part")
        return data

    def module(self, name: str, source: str, abi: str) -> bytes | None:
        """The shared object of a C module; None, with a warning once, where it is damaged or for another Python."""
        modules = [m for m in self.manifest.modules if m.name == name and m.source == source and m.file is not None]
        serving = next((m for m in modules if m.abi == abi), None)
        if serving is None:
            if modules:
                self._say(abi, f"Triton's {name}", f"it is for {modules[0].abi}, and this is {abi}")
            return None
        try:
            return self.content(str(serving.file))
        except (OSError, ValueError) as error:
            self.warn_of_module(name, source, error)
            return None

    def warn_of_module(self, name: str, source: str, why: object) -> None:
        self._say(source, f"Triton's {name}", why)

    def warn(self, entry: Entry, why: object) -> None:
        self._say(entry.key, f"{entry.kernel} for {entry.arch}", why)

    def _say(self, once: str, what: str, why: object) -> None:
        with self._lock:
            known = once in self._warned
            self._warned.add(once)
        if not known:
            warnings.warn(f"artefact of {what} in {self.folder} is not used ({why}); compiling instead", stacklevel=4)


@lru_cache(maxsize=4)
def _opened(folder: Path) -> Store | None:
    try:
        return Store(folder)
    except ArtefactError as error:
        warnings.warn(f"artefacts are not used: {error}", stacklevel=3)  # once, as this call is cached
        return None


def store() -> Store | None:
    """The artefacts that the setting ``artefacts`` names; None where it is not set or, with one warning, unusable."""
    folder: Path | None = settings.get("artefacts")
    return None if folder is None else _opened(folder.absolute())


def simt_key(arch: str, defines: Iterable[str], source: str) -> str:
    """The key of a SIMT unit: which compiler made the code object does not matter to a launch."""
    return hashlib.sha256("\0".join(("simt", arch, *defines, source)).encode()).hexdigest()


def simt_image(backend: str, unit: Any, arch: str, defines: Iterable[str]) -> bytes | None:
    """The image of a SIMT unit compiled ahead of time, or None. Raises CompileError as `Store.find`."""
    active_store = store()
    if active_store is None:
        return None
    entry = active_store.find(simt_key(arch, defines, unit.source), backend, arch)
    return None if entry is None or entry.kernel != unit.name else active_store.image(entry)

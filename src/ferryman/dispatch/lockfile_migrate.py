"""Lockfiles of an earlier version, or of today's with names of before: measured times stay, names and digests become
today's.

An implementation was called by its backend alone where its launcher chose between kernels: all of them in version 4,
some until version 6, and of version 8 the experts' in Triton and the gated activations' in C++. Each name becomes that
of the first line of the backend that serves the region's largest call, which is what the launcher did. A digest was of
a family's whole files: as they lay in version 4, as Python parsed them in version 5. In versions 6 and 7 it was of the
code that the op's launchers reach, or those of the lines that were tried, with the names of local variables. Where
those are the same still, it becomes today's. So does one that the family's menu lists under ``SAME_KERNELS``: of a
launcher that chose among the same kernels and launched them in the same way, or with names of local variables that
changed since. Else the kernels changed, and the entry stays stale: its times are kept, and `ferryman tune` measures it
anew. An entry of today's version that is not as `ferryman tune` wrote it is left as it is.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ferryman.device_profiles import Profile, resolve
from ferryman.dispatch import registry, select
from ferryman.dispatch.kernel_code import digest
from ferryman.dispatch.lockfile_document import MIGRATED, VERSION, Lockfile
from ferryman.dispatch.lockfile_entry import Entry
from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import FerrymanError, LockfileError
from ferryman.ops.primitive import Primitive

_SHARED = (
    "backends/triton_lang.py",
    "backends/triton_rows.py",
    "backends/simt/portable.cuh",
    "backends/simt/rows.cuh",
    "backends/simt/rows.py",
    "backends/simt/cluster.cuh",
    "backends/simt/whole.cuh",
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Migrated:
    """What became of a file: entries whose kernels are today's, entries that are stale, and renamed candidates."""

    valid: int
    stale: int
    renamed: Mapping[tuple[str, str, str], int]  # (op, before, after) -> candidates


def migrate(path: Path, to: Path | None = None) -> Migrated:
    """Write a lockfile of an earlier version, or with names of before, as one of today's, in its place or ``to``.

    Raises LockfileError where it is no such file, is damaged, or names what there is not.
    """
    raw = _read(path)
    profile = _profile(path, raw)
    renamed: Counter[tuple[str, str, str]] = Counter()
    choices: dict[str, dict[str, Entry]] = {}
    up_to_date = stale = 0
    for op, entries in raw["choices"].items():
        if op not in registry.primitives():
            raise LockfileError(f"{path} names the op {op!r}, which there is not; remove its entries first")
        known = registry.primitive(op)
        for region, given in entries.items():
            entry = _entry(path, known, region, given, profile, renamed, sealed=raw["version"] == VERSION)
            choices.setdefault(op, {})[region] = entry
            tried = frozenset(c.implementation for c in entry.candidates)
            current = entry.is_sealed(op, region) and entry.kernels in (digest(op), digest(op, tried))
            up_to_date, stale = up_to_date + current, stale + (not current)
    document = Lockfile(stamp=raw["stamp"], choices=choices)
    write_whole(to or path, (document.model_dump_json(indent=1) + "\n").encode())
    return Migrated(up_to_date, stale, dict(renamed))


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LockfileError(f"{path} cannot be read as JSON: {error}") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    known_versions = (*MIGRATED, VERSION)
    if not isinstance(raw, dict) or raw.get("kind") != "ferryman-lockfile" or version not in known_versions:
        known = ", ".join(map(str, known_versions))
        raise LockfileError(f"{path} is of version {version!r}; required: a ferryman-lockfile of version {known}")
    if not isinstance(raw.get("choices"), dict) or not isinstance(raw.get("stamp"), dict):
        raise LockfileError(f"{path} is damaged: it lacks choices or its stamp")
    return raw


def _profile(path: Path, raw: Mapping[str, Any]) -> Profile:
    try:
        return resolve(str(raw["stamp"].get("profile")))
    except FerrymanError as error:
        raise LockfileError(f"{path} is of a device that is not known here: {error}") from error


def _entry(
    path: Path,
    op: Primitive,
    region: str,
    given: Mapping[str, Any],
    profile: Profile,
    renamed: Counter[tuple[str, str, str]],
    *,
    sealed: bool,
) -> Entry:
    """``sealed``: one without its seal is left as it is."""
    try:
        if sealed and not (was := Entry.model_validate(given)).is_sealed(op.name, region):
            return was
        args = representative(op, region)

        def name_of(before: str) -> str:
            after = line_of(op, args, before, profile)
            if after != before:
                renamed[op.name, before, after] += 1
            return after

        candidates = [{**c, "implementation": name_of(str(c["implementation"]))} for c in given["candidates"]]
        changed = {"candidates": candidates, "kernels": _kernels(op, given["kernels"], candidates)}
        entry = Entry.model_validate({**given, **changed, "implementation": name_of(str(given["implementation"]))})
    except (KeyError, TypeError, ValueError) as error:  # pydantic's ValidationError is a ValueError
        raise LockfileError(f"{path} is damaged: {op.name} {region[:80]!r}: {error}") from error
    return entry.sealed(op.name, region)


def _kernels(op: Primitive, before: str, candidates: Sequence[Mapping[str, Any]]) -> str:
    """Today's digest of what an earlier one is of, where the code is the same; else the earlier one."""
    tried = frozenset(str(c["implementation"]) for c in candidates)
    if before in (_raw_digest(op.name), _parsed_digest(op.name), *_same_kernels(op)):
        return digest(op.name)
    for lines in (None, tried):
        if before == digest(op.name, lines, by_name=True):
            return digest(op.name, lines)
    return before


def line_of(op: Primitive, args: Sequence[Any], before: str, profile: Profile) -> str:
    """What a line of an earlier version is called today, for a call."""
    lines = registry.asked(op.name, (before,))
    if len(lines) < 2:
        return before
    view = select.View.of(op, args, profile)
    serving = [x.name for x in lines if not select.refusals(x, view, profile, absent=True)]
    return serving[0] if serving else lines[-1].name


def representative(op: Primitive, region: str) -> list[Any]:
    """The largest call of a region, on the meta device. Raises ValueError for what is no region of the op."""
    said = dict(part.split("=", 1) for part in region.split(" "))
    if list(said) != [name for name in op.names if name in said or name not in op.added]:
        raise ValueError(f"no region of {op.name}")
    return [_value(op.types[n], said[n]) if n in said else op.added[n] for n in op.names]


def _value(kind: str, text: str) -> Any:
    if text == "None":
        return None
    if kind.startswith("Tensor"):
        dtype, _, rest = text.partition("[")
        dims, _, layout = rest.partition("]")
        return _laid([_size(d) for d in dims.split(",") if d], getattr(torch, dtype), layout)
    if kind.startswith("float"):
        return 0.0 if text == "0" else 1.0
    if kind.startswith("int"):
        return _size(text)
    return {"True": True, "False": False}[text] if kind == "bool" else text


def _size(text: str) -> int:
    return int(2 ** int(text[2:])) if text.startswith("2^") else int(text)


def _laid(shape: list[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A tensor of a layout class: contiguous, with a contiguous last dimension only, or neither."""
    if layout == "c" or not shape:
        return torch.empty(shape, dtype=dtype, device="meta")
    if layout == "x":
        return torch.empty([*shape, 2], dtype=dtype, device="meta")[..., 0]
    if len(shape) == 4:
        batch, heads, rows, last = shape
        return torch.empty((batch, rows, heads, last), dtype=dtype, device="meta").transpose(1, 2)
    return torch.empty([*shape[:-1], shape[-1] + 64], dtype=dtype, device="meta")[..., : shape[-1]]


def _same_kernels(op: Primitive) -> Sequence[str]:
    """The digests of earlier code that launched today's kernels: those beside today's digest. Beside another one they
    were of the kernels of then."""
    menu = importlib.import_module(f"{registry.family_of(op).package}.implementations")
    then, earlier = getattr(menu, "SAME_KERNELS", {}).get(op.name, ("", ()))
    return tuple(earlier) if then == digest(op.name) else ()


@lru_cache(maxsize=None)
def _raw_digest(op: str) -> str:
    """As version 4 had it: of the files as they lie."""
    text = hashlib.sha256()
    for file in _sources(op):
        text.update(f"{file.parent.name}/{file.name}\0".encode() + file.read_bytes() + b"\0")
    return text.hexdigest()


@lru_cache(maxsize=None)
def _parsed_digest(op: str) -> str:
    """As version 5 had it: of the files as this release of Python parses them."""
    text = hashlib.sha256()
    for file in _sources(op):
        text.update(f"{file.parent.name}/{file.name}\0".encode() + _code(file) + b"\0")
    return text.hexdigest()


def _sources(op: str) -> list[Path]:
    """The files of an op's kernels, and those that families share."""
    root = Path(__file__).parents[1]
    files = {root / shared for shared in _SHARED}
    for line in registry.implementations(op):
        spec = importlib.util.find_spec(line.where.partition(":")[0])
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            files |= {*folder.glob("*_kernels.py"), *folder.glob("*.cuh")}
    return sorted(files, key=lambda f: (f.parent.name, f.name))


def _code(file: Path) -> bytes:
    """A source without layout, comments and docstrings."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return " ".join(_COMMENT.sub(" ", text).split()).encode()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant()), *_] as body:
                del body[0]
    return ast.dump(tree).encode()

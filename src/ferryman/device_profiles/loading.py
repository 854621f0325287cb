"""Where profiles are found, how ``extends`` is resolved, and what must hold of a finished profile."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ferryman.device_profiles.schema import FrozenMap, Identity, Profile
from ferryman.errors import STOPS, ProfileError, UnknownName

if TYPE_CHECKING:
    from ferryman.device_profiles.parse import Cell, Draft

# each loads to a directory's path, or to a package that holds YAML files
ENTRY_POINTS = "ferryman.device_profiles"

_FIELDS = {
    "units": "units",
    "xcds": "xcds",
    "clock": "clock_hz",
    "power": "power_w",
    "wave": "wave",
    "memory.size": "memory_bytes",
    "memory.bandwidth": "bandwidth",
    "caches.l1": "l1_bytes",
    "caches.l2": "l2_bytes",
    "caches.l3": "l3_bytes",
    "limits.registers_per_unit": "registers_per_unit",
    "limits.registers_per_thread": "registers_per_thread",
    "limits.shared_memory_per_block": "shared_memory",
    "limits.shared_memory_per_unit": "shared_memory_per_unit",
    "limits.max_threads_per_block": "max_threads",
    "limits.max_threads_per_unit": "max_threads_per_unit",
    "ceilings.copy": "copy_bandwidth",
    "numerics.fp8": "fp8",
}
_TABLES = {
    "peaks": "peaks",
    "ceilings": "ceilings",
    "rates": "rates",
    "numerics.accumulation": "accumulation",
    "numerics.bias": "biases",
    "numerics.arithmetic": "arithmetic",
}
_REQUIRED = ("wave", "limits.shared_memory_per_block", "limits.max_threads_per_block")
# What belongs to one card: a generic profile that carried these would lend an unknown device another card's
# numbers.
_ONE_CARD = (
    "units",
    "xcds",
    "clock",
    "power",
    "memory.",
    "caches.l2",
    "caches.l3",
    "peaks.",
    "ceilings.",
    "rates.",
)
_INHERITED_TEXT = ("vendor", "arch", "family", "partition", "power_mode")
_ARCH = {"nvidia": r"sm_\d{2,3}[a-z]?", "amd": r"gfx[0-9a-f]{3,5}", "cpu": r"cpu", "other": r"[a-z]+"}


def catalogue() -> Mapping[str, Profile]:
    """Every known profile by name: the package's, and those of entry points. Parsed once, on first need."""
    return _catalogue()


def names() -> list[str]:
    return sorted(_catalogue())


def profile(name: str) -> Profile:
    """A profile by name or alias, without case: "h200", "MI300X", "RTX 4090"."""
    table = _names(_drafts())
    if _fold(name) not in table:
        raise UnknownName("device profile", name, table)
    return _catalogue()[table[_fold(name)]]


def load(path: str | os.PathLike[str]) -> Profile:
    """A profile from one file; what it extends comes from the catalogue. Raises ProfileError with
    file:line."""
    draft = _read(Path(path))
    others = {name: other for name, other in _drafts().items() if name != draft.name}
    return _build(draft, {**others, draft.name: draft})


def build(drafts: Iterable[Draft]) -> Mapping[str, Profile]:
    """Profiles of drafts that may extend one another."""
    table = _index(drafts)
    return FrozenMap({name: _build(draft, table) for name, draft in table.items()})


@functools.lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Profile]:
    return build(_drafts().values())


@functools.lru_cache(maxsize=1)
def _drafts() -> dict[str, Draft]:
    """Ours, and other packages'. An entry point with a profile that is wrong is left out whole, and named."""
    table = _index(_read(file) for file in _yaml_files(resources.files(__package__) / "data"))
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        _broken.pop(entry.name, None)
        try:
            own = [_read(file) for file in _yaml_files(_directory(entry))]
            merged = _index([*table.values(), *own])
            for draft in own:
                _build(draft, merged)
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - another package may fail anyhow; ours stay
            text = str(error).strip()
            _broken[entry.name] = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
        else:
            table = merged
    return table


def _index(drafts: Iterable[Draft]) -> dict[str, Draft]:
    table: dict[str, Draft] = {}
    for draft in drafts:
        if draft.name in table:
            first = table[draft.name].origin
            draft.fail(draft.lines["name"], f"a second profile named {draft.name!r}; the first is in {first}")
        table[draft.name] = draft
    _names(table)  # refuses an alias with two meanings
    return table


_broken: dict[str, str] = {}


def broken() -> dict[str, str]:
    """Entry points of other packages that give no right profiles, and so are left out, with the reason."""
    return dict(_broken)


def _directory(entry: metadata.EntryPoint) -> Any:
    target = entry.load()
    if isinstance(target, ModuleType):
        target = resources.files(target)
    elif isinstance(target, (str, os.PathLike)):
        target = Path(target)
    if not (hasattr(target, "iterdir") and target.is_dir()):
        where = f"entry point {entry.name} = {entry.value} of {ENTRY_POINTS}"
        raise ProfileError(f"{where} gives no directory: {target}")
    return target


def _yaml_files(directory: Any) -> list[Any]:
    files = [file for file in directory.iterdir() if file.name.endswith((".yaml", ".yml"))]
    return sorted(files, key=lambda file: str(file.name))


def _read(file: Any) -> Draft:
    # here, not at the top: the parser is needed once, and not by `import ferryman`
    from ferryman.device_profiles.parse import parse
    from ferryman.device_profiles.yaml_nodes import SIZE_LIMIT

    if isinstance(file, Path) and file.is_fifo():
        raise ProfileError(f"{file}:1: cannot be read: it is no regular file")
    try:
        with file.open("rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)  # one byte more than allowed shows that it is too large
    except OSError as error:
        raise ProfileError(f"{file}:1: cannot be read: {error.strerror or error}") from error
    return parse(data, str(file))


def _fold(name: str) -> str:
    """How names are compared: "RTX 4090" is "rtx-4090", "generic-sm_86" is "generic-sm-86"."""
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def _names(drafts: Mapping[str, Draft]) -> dict[str, str]:
    """Every accepted name, folded, aliases included, to the profile's own."""
    table: dict[str, str] = {}
    for key in ("name", "aliases"):  # every name before any alias: an alias must not hide a profile
        for name, draft in drafts.items():
            for said in (name,) if key == "name" else draft.aliases:
                if table.setdefault(_fold(said), name) != name:
                    draft.fail(draft.lines[key], f"{said!r} already means {table[_fold(said)]!r}")
    return table


def _lineage(draft: Draft, drafts: Mapping[str, Draft]) -> list[Draft]:
    """From the root of the family to the draft itself."""
    table = _names(drafts)
    chain = [draft]
    while (base := chain[-1].text.get("extends")) is not None:
        last = chain[-1]
        line = last.lines["extends"]
        if _fold(base) not in table:
            try:
                raise UnknownName("profile to extend", base, table)
            except UnknownName as error:
                raise ProfileError(f"{last.origin}:{line}: {error}") from error
        following = drafts[table[_fold(base)]]
        if any(following is seen for seen in chain):
            path = " -> ".join([*(d.name for d in chain), following.name])
            last.fail(line, f"extends runs in a circle: {path}")
        chain.append(following)
    return chain[::-1]


def _build(draft: Draft, drafts: Mapping[str, Draft]) -> Profile:
    text: dict[str, Any] = {}
    cells: dict[str, Cell] = {}
    tiles: dict[str, Cell] = {}
    thresholds: dict[str, Cell] = {}
    features: frozenset[str] = frozenset()
    preferences: dict[str, tuple[str, ...]] = {}
    compiled: frozenset[str] = frozenset()
    for step in _lineage(draft, drafts):
        for gone in step.unset:
            cells = {p: c for p, c in cells.items() if p != gone and not p.startswith(gone + ".")}
        # how a device is recognised is never inherited
        cells = {p: c for p, c in cells.items() if not p.startswith("identity.")} | step.cells
        text |= {key: step.text[key] for key in _INHERITED_TEXT if key in step.text}
        tiles |= step.tiles
        thresholds |= step.thresholds
        features |= step.features
        preferences |= step.preferences
        compiled = compiled if step.compiled is None else step.compiled
    _check(draft, text, cells, preferences)

    tables: dict[str, Any] = {attribute: _table(cells, prefix) for prefix, attribute in _TABLES.items()}
    tables["ceilings"] = FrozenMap({d: v for d, v in tables["ceilings"].items() if d != "copy"})
    provenance = {path: cell.provenance for path, cell in cells.items()}
    provenance |= {f"tiles.{op}": cell.provenance for op, cell in tiles.items()}
    provenance |= {f"thresholds.{name}": cell.provenance for name, cell in thresholds.items()}
    identity = Identity(
        names=draft.names,
        arches=draft.arches or (text["arch"],),
        units=_value(cells, "identity.units"),
        memory=_value(cells, "identity.memory"),
        exact=draft.exact,
    )
    return Profile(
        name=draft.name,
        title=draft.text["title"],
        **text,
        **{attribute: _value(cells, path) for path, attribute in _FIELDS.items()},
        **tables,
        generic=draft.generic,
        aliases=draft.aliases,
        features=features,
        preferences=FrozenMap(preferences),
        compiled=compiled,
        tiles=FrozenMap({op: cell.value for op, cell in tiles.items()}),
        thresholds=FrozenMap({name: cell.value for name, cell in thresholds.items()}),
        identity=identity,
        provenance=FrozenMap(provenance),
    )


def _value(cells: Mapping[str, Cell], path: str) -> Any:
    return cells[path].value if path in cells else None


def _table(cells: Mapping[str, Cell], prefix: str) -> FrozenMap[Any]:
    start = prefix + "."
    return FrozenMap({p.removeprefix(start): c.value for p, c in cells.items() if p.startswith(start)})


def _check(draft: Draft, text: Mapping[str, str], cells: Mapping[str, Cell], preferences: Mapping[str, Any]) -> None:
    for key in ("vendor", "arch", "family"):
        if key not in text:
            draft.fail(1, f"{draft.name} lacks {key!r}, and extends nothing that has it")
    for path in _REQUIRED:
        if path not in cells:
            draft.fail(1, f"{draft.name} lacks {path!r}, and extends nothing that has it")
    if "default" not in preferences:
        draft.fail(1, f"{draft.name} lacks 'preferences.default', and extends nothing that has it")
    if not re.fullmatch(_ARCH[text["vendor"]], text["arch"]):
        line = draft.lines.get("arch", 1)
        draft.fail(line, f"arch is {text['arch']!r}; required for {text['vendor']}: {_ARCH[text['vendor']]}")
    if draft.generic:
        for path, cell in cells.items():
            if path.startswith(_ONE_CARD):
                problem = f"a generic profile may not carry {path}: it is one card's"
                raise ProfileError(f"{cell.origin}:{cell.line}: {problem}")
    for path, cell in cells.items():
        if not path.startswith("ceilings."):
            continue
        dtype = path.removeprefix("ceilings.")
        limit = cells.get("memory.bandwidth" if dtype == "copy" else f"peaks.{dtype}")
        if limit is not None:
            most = getattr(limit.value, "rate", limit.value)
            if cell.value > most:
                problem = f"{path} is {cell.value:g}, above the peak of {most:g}"
                raise ProfileError(f"{cell.origin}:{cell.line}: {problem}")

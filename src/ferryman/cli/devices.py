"""`ferryman devices`: what is here, what the catalogue knows, and every number of one profile with its source."""

from __future__ import annotations

from typing import Annotated

import typer

import ferryman
from ferryman.cli import output
from ferryman.device_profiles import Profile, catalogue, resolve

COLUMNS = ("device", "profile", "arch", "units", "memory", "bandwidth", "f32", "bf16", "fp8", "numbers")


def devices(
    name: Annotated[str | None, typer.Argument(help="A profile (mi300x) or a device here (cuda:0), in full.")] = None,
    every: Annotated[bool, typer.Option("--all", help="The whole catalogue, generic profiles included.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profiles as JSON.")] = False,
) -> None:
    """The devices here and the profile that describes each; peaks are dense, per second."""
    if name is not None:
        _show(resolve(name), as_json)
        return
    here = {_place(i, p): p for i, p in enumerate(ferryman.devices())}
    known = sorted(catalogue().values(), key=lambda p: (p.generic, p.vendor, p.name)) if every else []
    if as_json:
        document = {
            "here": [{"device": place, "profile": p.to_dict()} for place, p in here.items()],
            "catalogue": [p.to_dict() for p in known],
        }
        output.json_document(document)
        return
    right = ("units", "memory", "bandwidth", "f32", "bf16", "fp8")
    output.table(COLUMNS, [_row(place, p) for place, p in here.items()], right=right)
    for profile in here.values():
        for note in profile.notes:
            output.say(f"note: {note}")
    if every:
        output.say()
        output.table(COLUMNS, [_row("", p) for p in known], title="The catalogue", right=right)


def _place(index: int, profile: Profile) -> str:
    return "cpu" if profile.vendor == "cpu" else f"cuda:{index}"  # accelerators come first, the CPU last


def _row(place: str, profile: Profile) -> tuple[str | None, ...]:
    peaks = [
        output.quantity(profile.peaks[d].rate, "FLOP/s") if d in profile.peaks else None for d in ("f32", "bf16", "fp8")
    ]
    kinds = sorted({p.kind for path, p in profile.provenance.items() if path.startswith(("peaks.", "memory.", "ceil"))})
    return (
        place or profile.title,
        profile.name,
        profile.arch,
        str(profile.units) if profile.units else None,
        output.size(profile.memory_bytes),
        output.quantity(profile.bandwidth, "B/s"),
        *peaks,
        ", ".join(kinds) or None,
    )


def _show(profile: Profile, as_json: bool) -> None:
    document = profile.to_dict()
    if as_json:
        output.json_document(document)
        return
    output.say(f"{profile.name}: {profile.title}")
    plain = ("title", "name", "provenance", "identity", "peaks", "preferences", "tiles", "thresholds", "notes")
    rows: list[tuple[str, str | None]] = [
        (k, _words(v)) for k, v in document.items() if k not in plain and v not in (None, [], {}, False)
    ]
    rows += [(f"peak {d}", output.quantity(p.rate, "FLOP/s")) for d, p in profile.peaks.items()]
    rows += [(f"order, {op}", ", ".join(names)) for op, names in profile.preferences.items()]
    rows += [(f"threshold, {name}", str(value)) for name, value in profile.thresholds.items()]
    output.table(("fact", "value"), rows)
    output.say()
    sources = [(path, p.kind, p.source) for path, p in sorted(profile.provenance.items())]
    output.table(("number", "kind", "source"), sources)
    for note in profile.notes:
        output.say(f"note: {note}")


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return str(value)

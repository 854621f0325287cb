"""`ferryman ops`: which implementation serves which op on which device, for devices that are not here too."""

from __future__ import annotations

from typing import Annotated

import typer

from ferryman.cli import output, support
from ferryman.device_profiles import Profile, catalogue, resolve
from ferryman.dispatch import registry


def ops(
    device: Annotated[
        list[str] | None, typer.Option(help="A profile (mi300x) or a device here (cuda:0). Repeatable.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every fact as JSON.")] = False,
) -> None:
    """Op x implementation x device: what would serve each op's first standard case, and under which conditions.

    Without --device: one column for each device of the catalogue, holding the implementation that runs first there.
    With one: every implementation, which dtypes it takes, and why not.
    """
    known = [registry.primitive(name) for name in op] if op else list(registry.primitives().values())
    profiles = [resolve(name) for name in device] if device else _devices()
    entries = [row for one in known for profile in profiles for row in support.of(one, profile)]
    if as_json:
        output.json_document({"support": [row.to_dict() for row in entries]})
        return
    if device:
        rows = [
            (
                r.op,
                r.implementation,
                r.device,
                r.mark,
                " ".join(r.dtypes) or "-",
                "; ".join(r.conditions) or "any",
                "; ".join(r.reasons) or "-",
            )
            for r in entries
        ]
        output.table(("op", "implementation", "device", "serves", "dtypes", "conditions", "refused because"), rows)
        return
    first = {(r.op, r.device): r.implementation for r in entries if r.chosen}
    firsts = [(one.name, *(first.get((one.name, p.name), "-") for p in profiles)) for one in known]
    output.table(("op", *(p.name for p in profiles)), firsts)
    output.say()
    output.say("The implementation that runs first for each op's first standard case; the others follow in the order")
    output.say("of the device's profile: ferryman ops --device NAME, ferryman explain OP --shape .. --device NAME")


def _devices() -> list[Profile]:
    return [p for p in catalogue().values() if not p.generic or p.vendor == "cpu"]

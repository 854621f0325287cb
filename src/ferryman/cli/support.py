"""Which implementation serves which op on which device, from menus and profiles: no device is touched."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ferryman.cli import calls
from ferryman.device_profiles import Profile
from ferryman.dispatch import registry, select, state
from ferryman.errors import PackageError
from ferryman.ops.primitive import Primitive

NO_CASE = "the op's evidence has no standard case to ask about"
Verdict = tuple[str, tuple[str, ...]]  # of one implementation, with the reasons


@dataclass(frozen=True)
class Support:
    """One op x implementation on one device. ``dtypes``: those that it takes for the op's first standard case."""

    op: str
    implementation: str
    device: str
    serves: bool
    dtypes: tuple[str, ...]
    chosen: tuple[str, ...]
    conditions: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def mark(self) -> str:
        """ "first" where it is the choice, "yes" where it can serve, "-" where it cannot."""
        return "first" if self.chosen else "yes" if self.dtypes else "-"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def of(op: Primitive, profile: Profile) -> list[Support]:
    """The op's menu on a device that may be absent, asked in every storage dtype on the op's first standard case."""
    verdicts = _verdicts(op, profile)
    support = []
    for line in registry.implementations(op.name):
        asked = verdicts[line.name]
        support.append(
            Support(
                op=op.name,
                implementation=line.name,
                device=profile.name,
                serves=profile.vendor in registry.backends()[line.backend].vendors,
                dtypes=tuple(d for d, (verdict, _) in asked.items() if verdict != "refused"),
                chosen=tuple(d for d, (verdict, _) in asked.items() if verdict == "chosen"),
                conditions=tuple(map(str, line.when)),
                reasons=tuple(dict.fromkeys(reason for _, why in asked.values() for reason in why)),
            )
        )
    return support


def _verdicts(op: Primitive, profile: Profile) -> dict[str, dict[str, Verdict]]:
    """By implementation and dtype."""
    case = calls.first_case(op)
    verdicts: dict[str, dict[str, Verdict]] = {}
    if case is None:
        unjudged = registry.unjudged(op.name)
        return _refused(op, NO_CASE, *(() if unjudged is None else (unjudged,)))
    plain = state.intern({}, False)  # what is installed, requested or set here must not change the answer
    try:
        with registry.blamed(op):
            for name, dtype in calls.DTYPES.items():
                rows, _ = select.explain_rows(op, calls.of_case(op, case, dtype), profile, plain, absent=True)
                for line, verdict, why in rows:
                    verdicts.setdefault(line.name, {})[name] = (verdict, tuple(why))
    except PackageError as error:
        return _refused(op, str(error))
    return verdicts


def _refused(op: Primitive, *reasons: str) -> dict[str, dict[str, Verdict]]:
    """No line can be asked."""
    refused = dict.fromkeys(calls.DTYPES, ("refused", reasons))
    return {line.name: refused for line in registry.implementations(op.name)}

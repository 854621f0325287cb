"""One region's entry in a lockfile: the choice, every candidate that was tried, and how two measurements become one.

Only names that are identifiers are accepted, and only a choice that its own candidates bear out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from ferryman.ops.clauses import REQUIRED
from ferryman.ops.menu import NAME as LINE
from ferryman.ops.primitive import IDENTIFIER

LEAST_NOISE = 0.01  # candidates nearer than this are one; the profile's preference decides
MOST_NOISE = 0.2  # of a measurement that says anything: above, any choice would be "within its noise"
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6
_UNWRITTEN = 1e-9  # relative: what a float may lose in a file
_MOST_CANDIDATES = 64
Name = Annotated[str, Field(pattern=f"^{IDENTIFIER.pattern}$")]
_Line = Annotated[str, Field(pattern=f"^{LINE.pattern}$")]
_Configuration = dict[Literal["name"], Annotated[str, Field(min_length=1, max_length=200)]]
_Seconds = Annotated[float, Field(ge=LEAST_SECONDS, le=MOST_SECONDS, strict=True)]
_Amount = Annotated[float, Field(ge=0, le=1e24, strict=True)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Way(Strict):
    """``configuration``: {"name": its name}, or the implementation's own plan."""

    implementation: _Line
    configuration: _Configuration = {}

    @property
    def label(self) -> str:
        return " ".join((self.implementation, *self.configuration.values()))


class Candidate(_Way):
    """One way that was tried: its time, or why it has none."""

    seconds: _Seconds | None = None
    error: Annotated[str, Field(max_length=1000)] | None = None

    @model_validator(mode="after")
    def _is_timed_or_not(self) -> Self:
        if (self.seconds is None) == (self.error is None):
            raise ValueError(f"{self.label} has seconds {self.seconds} and error {self.error!r}; required: one of both")
        return self

    @property
    def failed(self) -> bool:
        """Whether it was tried and did not do; one that its own conditions keep from this call did not fail."""
        return self.error is not None and REQUIRED not in self.error


class Entry(_Way):
    """The choice for one region. ``noise``: relative difference of one candidate from itself. ``kernels``: `digest`.

    bytes, flops: the least work of the call that was measured; without them, nothing is predicted from this entry.
    seal: of all that it says of its region; an entry that was edited or moved has another's (`is_sealed`).
    """

    seconds: _Seconds
    noise: Annotated[float, Field(ge=0, le=MOST_NOISE, strict=True)] | None = None
    kernels: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: _Amount | None = None
    flops: _Amount | None = None
    case: Annotated[str, Field(max_length=200)] = ""
    time: Annotated[str, Field(max_length=40)] = ""
    candidates: Annotated[list[Candidate], Field(max_length=_MOST_CANDIDATES)] = []
    seal: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""

    def sealed(self, op: str, region: str) -> Self:
        said = [op, region, self.model_dump(mode="json", exclude={"seal"})]
        text = json.dumps(said, sort_keys=True)  # as Python writes numbers: another pydantic may write them otherwise
        return self.model_copy(update={"seal": hashlib.sha256(text.encode()).hexdigest()[:16]})

    def is_sealed(self, op: str, region: str) -> bool:
        return self.seal == self.sealed(op, region).seal

    @model_validator(mode="after")
    def _is_the_best_candidate(self) -> Self:
        if not self.candidates:
            return self  # one that nothing was compared with; a lockfile has none (`Lockfile`)
        times = {c.label: c.seconds for c in self.candidates}
        if len(times) < len(self.candidates):
            raise ValueError("a candidate stands twice; required: once each")
        own = times.get(self.label)
        if own is None:
            raise ValueError(f"the choice is {self.label}; required: a timed candidate")
        if abs(own - self.seconds) > _UNWRITTEN * own:
            raise ValueError(f"the choice takes {self.seconds} s, and among the candidates {own} s; required: the same")
        least = min(s for s in times.values() if s is not None)
        if own > least * (1 + max(self.noise or 0.0, LEAST_NOISE)) * (1 + _UNWRITTEN):
            raise ValueError(f"the choice takes {own} s; required: the least time of all, {least} s, within its noise")
        return self

    def configuration_of(self, implementation: str) -> str:
        """The name of the choice's configuration, or of the fastest one of another implementation; "": its own plan."""
        tried = [c for c in self.candidates if c.implementation == implementation and c.seconds is not None]
        if implementation == self.implementation:
            taken = self.configuration
        else:
            taken = min(tried, key=lambda c: c.seconds or 0.0).configuration if tried else {}
        return str(taken.get("name", ""))

    @property
    def times(self) -> dict[str, float]:
        """Seconds by implementation, each in the fastest of its configurations."""
        fastest: dict[str, float] = {}
        for tried in self.candidates:
            if tried.seconds is not None:
                fastest[tried.implementation] = min(tried.seconds, fastest.get(tried.implementation, tried.seconds))
        return fastest


def best(times: Mapping[str, float], noise: float) -> str:
    """The fastest; of those that the noise does not tell apart from it, the first."""
    least = min(times.values())
    return next(name for name, seconds in times.items() if seconds <= least * (1 + max(noise, LEAST_NOISE)))


def joined(old: Entry, new: Entry, preference: Sequence[str]) -> Entry:
    """``new`` with the candidates of ``old`` that were not measured again on the same case, and the choice among all.

    preference: implementations; the first of those that the noise does not tell apart is chosen.
    """
    fresh = {c.label for c in new.candidates}
    kept = [c for c in old.candidates if c.label not in fresh]
    if not kept or not new.candidates or old.kernels != new.kernels:
        return new
    if (old.case, old.bytes) != (new.case, new.bytes):  # times of two sizes are not compared
        return new
    kept.sort(key=lambda c: float("inf") if c.seconds is None else c.seconds)
    candidates = [*new.candidates, *kept][:_MOST_CANDIDATES]
    ranked = {name: place for place, name in enumerate(preference)}
    timed = sorted(
        (c for c in candidates if c.seconds is not None),
        key=lambda c: (ranked.get(c.implementation, len(ranked)), bool(c.configuration)),
    )
    noise = max(old.noise or 0.0, new.noise or 0.0)
    label = best({c.label: c.seconds for c in timed if c.seconds is not None}, noise)
    chosen = next(c for c in timed if c.label == label)
    return new.model_copy(
        update={
            "implementation": chosen.implementation,
            "configuration": chosen.configuration,
            "seconds": chosen.seconds,
            "noise": noise,
            "candidates": candidates,
        }
    )

"""One row of a repository's matrix: what is tested, on which device, how, and whether that can be at all."""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.errors import FerrymanError, UnknownName
from ferryman.porting.judging.results import Verdict
from ferryman.porting.running import simulated_route, stand_in_route

HOW = ("hardware", "simulated", "stand-in", "compile", "cpu")
SUITES = ("ferryman", "pytest", "command", "bench")
ON_DEVICE = ("hardware", "stand-in")  # what needs a machine with the device
ANY = "any"  # the backend of a suite that is not of one backend


class MatrixError(FerrymanError, ValueError):
    """The matrix is invalid; the message gives file, line and what to write instead."""


@dataclass(frozen=True)
class Skip:
    """Tests that need not run in a row: a pattern of case ids, and why.

    because: a pattern of what the run says of such a case, "" for whatever it says: a case that it says nothing of, or
    something else, has to run.
    """

    match: str
    reason: str
    because: str = ""


@dataclass(frozen=True)
class Quarantine:
    """A row that may fail until a day, for a reason; it is never green meanwhile."""

    until: datetime.date
    reason: str


@dataclass(frozen=True)
class Row:
    """One thing to test: ``suite`` on ``device`` (a profile's name), ``how``.

    backend: whose kernels. labels: of the runner. command: of a suite that is one. args: appended to the suite's own
    command. kernels: globs of sources beside what the tests import. cases: a file with the ids that must be there.
    capsule: the row also writes a capsule, which another machine must have replayed.
    """

    id: str
    vendor: str
    device: str
    backend: str
    how: str
    suite: str = "ferryman"
    tests: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    image: str | None = None
    kernels: tuple[str, ...] = ()
    cases: str | None = None
    skips: tuple[Skip, ...] = ()
    quarantine: Quarantine | None = None
    optional: bool = False
    capsule: bool = False
    line: int = field(default=0, compare=False)

    @property
    def best(self) -> Verdict:
        """The best that such a row can say: only a run on the real device can say PASS of it."""
        if self.how == "compile":
            return "COMPILED_ONLY"
        if self.how in ("simulated", "stand-in") or (self.how == "cpu" and self.backend == "triton"):
            return "SIMULATED"
        return "PASS"

    @property
    def digest(self) -> str:
        """Of what the row asks for; a quarantine and who may run it change nothing about that."""
        asked = {
            k: v for k, v in asdict(self).items() if k not in ("line", "quarantine", "optional", "labels", "image")
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    @property
    def on_device(self) -> bool:
        return self.how in ON_DEVICE

    def to_dict(self) -> dict[str, Any]:
        """For a job matrix."""
        return {
            "id": self.id,
            "vendor": self.vendor,
            "device": self.device,
            "backend": self.backend,
            "how": self.how,
            "labels": list(self.labels),
            "image": self.image or "",
        }


def consistent(row: Row) -> None:
    """Whether such a row can run at all. Raises a FerrymanError that says why not."""
    known = profile(row.device)
    if known.name != row.device:
        raise MatrixError(f"device {row.device!r} is an alias; write {known.name}")
    if known.vendor != row.vendor:
        raise MatrixError(f"device {row.device} is of vendor {known.vendor}; the row says {row.vendor}")
    if row.backend == ANY and row.suite in ("ferryman",):
        raise MatrixError("backend any is for suites of one's own; the suite ferryman checks one backend")
    if row.backend != ANY:
        if row.backend not in registry.backends():
            raise UnknownName("backend", row.backend, registry.backends())
        if row.vendor not in registry.backends()[row.backend].vendors:
            raise MatrixError(f"backend {row.backend} does not serve {row.vendor}")
    if (row.how == "cpu") != (row.vendor == "cpu"):
        raise MatrixError(f"how is {row.how!r} for vendor {row.vendor}; a CPU is tested as 'cpu', and nothing else is")
    if row.how == "compile" and row.suite == "ferryman" and row.args:
        raise MatrixError("such a row compiles every kernel of its backend, and takes no args")
    if row.how == "compile" and row.backend == "torch":
        raise MatrixError("torch's kernels come compiled; there is nothing to compile")
    if row.how in ("simulated", "stand-in") and row.suite != "ferryman":
        raise MatrixError(f"how {row.how} executes Ferryman's own ops; suite {row.suite} cannot be routed there")
    if row.how == "simulated":
        simulated_route.require(known)
        if row.backend not in simulated_route.SERVES:
            raise MatrixError(f"the simulator executes {' and '.join(simulated_route.SERVES)}, not {row.backend}")
    if row.how == "stand-in":
        stand_in_route.require(known, None)
        if row.backend not in stand_in_route.SERVES:
            raise MatrixError(f"a stand-in executes {' and '.join(stand_in_route.SERVES)}, not {row.backend}")
    if row.suite == "bench" and row.how not in ("hardware", "cpu"):
        raise MatrixError("a bench measures a device; how is hardware or cpu")
    if row.capsule and (row.suite, row.how) != ("ferryman", "hardware"):
        raise MatrixError("a capsule is recorded of Ferryman's own ops on a device: suite ferryman, how hardware")
    if row.on_device and not row.labels:
        raise MatrixError(f"{row.how} needs labels: those of the runner that has the device")
    if (row.suite == "pytest") != bool(row.tests):
        raise MatrixError("tests names what pytest runs: it goes with suite pytest, and suite pytest with it")
    if (row.suite == "command") != bool(row.command):
        raise MatrixError("command is what suite command runs: each goes with the other")

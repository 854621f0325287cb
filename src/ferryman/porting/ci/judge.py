"""Whether one run of a row is evidence for it, and if not, why: every rule is one reason with a code.

A reason doubts what is said (MISTRUSTED: someone or something altered it), or says that nothing was shown here
(NOT_RUN: another commit, too old, left out). Neither is ever green.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ferryman.device_profiles import Profile, profile
from ferryman.errors import ResultError, UnknownName
from ferryman.porting.capsule.replay_results import Replay
from ferryman.porting.ci import commands, exchange, expected, signing
from ferryman.porting.ci.changes import Decision, Tree
from ferryman.porting.ci.evidence import Evidence
from ferryman.porting.ci.history import History
from ferryman.porting.ci.matrix import Matrix
from ferryman.porting.ci.record import moment
from ferryman.porting.ci.row import Row
from ferryman.porting.fingerprint import compare, supports
from ferryman.porting.judging.results import Finding

SKEW = datetime.timedelta(minutes=5)  # clocks of machines differ
# What each code means; those in DOUBTS make a row MISTRUSTED, the others NOT_RUN.
REASONS = {
    "absent": "no record: its job did not run, was skipped, or is still waiting",
    "alone": "a result without the record of its run",
    "unreadable": "a file that cannot be read",
    "altered": "a file is not what its record says",
    "twice": "one document is there twice",
    "no-commit": "nothing says of which commit it is",
    "other-commit": "it is of another commit",
    "dirty": "files differed from the commit",
    "other-row": "the row was another when it ran",
    "other-command": "another command ran",
    "other-kernels": "the sources that ran are not those of this commit",
    "too-old": "it is older than the matrix allows",
    "clock": "its times cannot be",
    "superseded": "a later run of the same commit is known, and says otherwise",
    "other-device": "it ran on another device, or in another way, than the row names",
    "refuted": "the numbers that the device computed are not those of the device that is named",
    "no-fingerprint": "nothing shows which device computed it",
    "interpreted": "Triton was interpreted: nothing ran on the device",
    "nothing-launched": "nothing was launched on the device",
    "partial": "the run ended before all its cases",
    "exit-code": "the command's exit code and its cases disagree",
    "empty": "no case ran",
    "missing": "cases are not there that must be",
    "swapped": "cases are there that the row does not have",
    "overclaimed": "it says more than such a run can show",
    "contradictory": "it contradicts itself",
    "skipped": "tests were skipped",
    "xfailed": "tests were expected to fail",
    "deselected": "tests were deselected",
    "not-run": "cases did not run",
    "rerun": "tests failed and were run again",
    "flaky": "runs of one commit disagree",
    "failed": "cases failed",
    "no-capsule": "it wrote no capsule",
    "not-replayed": "no other machine has judged its capsule",
    "capsule-refuted": "another machine found what its capsule holds wrong",
    "unsigned": "it is not signed",
    "signature": "its signature is not of a key that may speak for this device",
    "unknown-row": "the matrix has no such row",
    "quarantined": "the row is in quarantine",
    "expired-quarantine": "the row's quarantine is over",
}
DOUBTS = frozenset(
    {
        "altered",
        "twice",
        "other-command",
        "other-row",
        "refuted",
        "overclaimed",
        "contradictory",
        "swapped",
        "signature",
        "superseded",
        "clock",
        "exit-code",
        "unreadable",
        "rerun",
        "flaky",
        "capsule-refuted",
    }
)


@dataclass(frozen=True)
class Reason:
    """Why something is no evidence: a code of REASONS, and what exactly."""

    code: str
    text: str


@dataclass
class Context:
    """What runs are judged against: the matrix, the time, the tested commit and its sources, what was before."""

    matrix: Matrix
    tree: Tree
    commit: str | None
    now: datetime.datetime
    history: History = field(default_factory=History)
    signers: Path | None = None
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    replays: Mapping[str, Replay] = field(default_factory=dict)

    def digests(self, row: Row) -> dict[str, str]:
        return self.tree.digests(row)

    def sources(self, row: Row) -> str:
        """One digest of what a row asks for and of all that it reaches."""
        return digest([row.digest, self.digests(row)])


def digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def reasons(row: Row, one: Evidence, context: Context) -> list[Reason]:
    """Every reason why a run is no evidence for a row; none where it is."""
    objections = [Reason(p.code, f"{p.file}: {p.text}") for p in one.problems]
    for rule in (_identity, _sources, _times, _device, _numbers, _cases, _document, _capsule, _signature):
        objections += rule(row, one, context)
    return objections


def _identity(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    record = one.record
    if record.commit is None or context.commit is None:
        yield Reason("no-commit", "the record names no commit" if record.commit is None else "no commit is tested here")
    elif record.commit != context.commit:
        yield Reason("other-commit", f"of {record.commit[:12]}; tested is {context.commit[:12]}")
    if record.dirty:
        yield Reason("dirty", "files differed from the commit; only what is committed can be tested")
    elif record.dirty is None and record.commit_from == "git":
        yield Reason("dirty", "git named the commit, and nobody looked whether files differed from it")
    if record.row_digest != row.digest:
        yield Reason("other-row", "what the matrix asks of the row is not what it asked when this ran")
    wanted = commands.shown(row)
    if record.command != wanted:
        yield Reason("other-command", f"{' '.join(record.command)[:200]!r} ran; required: {' '.join(wanted)!r}")


def _sources(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    wanted, given = context.digests(row), one.record.kernels
    if not given:
        yield Reason("other-kernels", "the record has no digest of any source")
        return
    differ = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
    if differ:
        yield Reason("other-kernels", f"{expected.first_few(differ)}: not the bytes of this commit")


def _times(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    started, finished = moment(one.record.started), moment(one.record.finished)
    if started > finished:
        yield Reason("clock", f"it ended at {one.record.finished}, before it began at {one.record.started}")
    if finished > context.now + SKEW:
        yield Reason("clock", f"it ended at {one.record.finished}; now is {context.now.isoformat(timespec='seconds')}")
    age = (context.now - finished).total_seconds() / 86400
    if age > context.matrix.max_age_days:
        yield Reason("too-old", f"{age:.1f} days old; required: at most {context.matrix.max_age_days:g}")
    for entry in context.history.of(row.id):
        later = moment(entry.time) > finished and entry.sha256 != one.sha256
        if later and entry.commit == one.record.commit and not entry.met:
            yield Reason(
                "superseded", f"the run of {entry.time} of this commit was {entry.verdict}; a new run is needed"
            )
            return


def _device(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    device = one.record.device
    if device.kind != row.how:
        yield Reason("other-device", f"it is a run of kind {device.kind}; required: {row.how}")
    for what, actual, wanted in (("vendor", device.vendor, row.vendor), ("profile", device.profile, row.device)):
        if actual != wanted:
            yield Reason("other-device", f"{what} is {actual}; required: {wanted}")
    known = _profile(row.device)
    if known is not None and device.arch.split(":")[0] != known.arch:
        yield Reason("other-device", f"arch is {device.arch}; a {row.device} is {known.arch}")
    names = () if known is None or device.profile != row.device else known.identity.names
    if row.how == "hardware" and names and _folded(device.name) not in map(_folded, names):
        yield Reason("other-device", f"the driver calls it {device.name!r}; required: {names[0]!r}")
    if one.record.interpreted and row.how in ("hardware", "compile"):
        yield Reason("interpreted", "TRITON_INTERPRET was set")
    if row.how != "hardware":
        return
    if not one.record.launches:
        said = "nobody counted launches: run it by the pytest plugin" if one.record.launches is None else "0 launches"
        yield Reason("nothing-launched", said)
    if row.suite == "pytest":
        counted = sum(item.launches or 0 for item in one.items)
    elif row.suite == "ferryman":
        counted = sum(item.verdict in ("PASS", "FAIL", "MISTRUSTED") for item in one.items)
    else:
        return
    if one.record.launches and counted != one.record.launches:
        yield Reason("contradictory", f"its cases launched {counted} kernels, the whole run {one.record.launches}")


def _folded(name: str) -> str:
    return " ".join(name.casefold().split())


def _profile(name: str) -> Profile | None:
    try:
        return profile(name)
    except UnknownName:
        return None


def _numbers(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    """The fingerprint against the profile that the row names, whatever profile the record names."""
    if row.how != "hardware":
        return
    known = _profile(row.device)
    wanted = {} if known is None else {f.path: f.stated for f in compare(known, [], unstated=False)}
    given = {f.path: f for f in one.record.numerics}
    for path, finding in given.items():
        fault = _refuted(finding, wanted)
        if fault:
            yield Reason("refuted", f"{path}: {fault}")
            return
    if wanted and not any(given[path].outcome == "confirmed" for path in wanted if path in given):
        yield Reason("no-fingerprint", f"none of the {len(wanted)} numeric facts of a {row.device} was confirmed")
    elif absent := wanted.keys() - given.keys():
        examples = expected.first_few(absent, 1)
        yield Reason(
            "no-fingerprint", f"{len(absent)} numeric facts of a {row.device} are not in its record: {examples}"
        )


def _refuted(finding: Finding, wanted: Mapping[str, object]) -> str | None:
    if finding.outcome == "contradicted":
        return f"measured {finding.measured}, stated {finding.stated}"
    if finding.path not in wanted:
        return f"the device that is named states no such fact (measured {finding.measured})"
    if str(wanted[finding.path]) != str(finding.stated):
        return f"the device that is named states {wanted[finding.path]}, this one {finding.stated}"
    if finding.outcome == "confirmed" and not supports(finding):
        return f"confirmed, though measured {finding.measured} and stated {finding.stated}"
    return None


def _cases(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    record, items = one.record, one.items
    if record.cases and row.suite != "pytest":
        yield Reason("contradictory", f"its record has cases of pytest, and the row's suite is {row.suite}")
    elif record.cases and commands.TESTS not in record.files:
        yield Reason("contradictory", f"its record has cases, and no {commands.TESTS}, which the pytest plugin writes")
    ids = Counter(item.id for item in items)
    again = [name for name, n in ids.items() if n > 1]
    if again:
        yield Reason("contradictory", f"cases stand twice: {expected.first_few(again)}")
    if not any(item.verdict != "NOT_RUN" for item in items) and row.suite != "bench":
        yield Reason("empty", "no case ran")
    lost = set(record.collected) - ids.keys()
    if lost:
        yield Reason(
            "partial", f"{len(lost)} of {len(record.collected)} cases have no outcome: {expected.first_few(lost)}"
        )
    more = ids.keys() - set(record.collected)
    if more:
        yield Reason("swapped", f"cases ran that were not collected: {expected.first_few(more)}")
    verdicts = Counter(item.verdict for item in items)
    if record.exit_code == 0 and verdicts["FAIL"]:
        yield Reason("exit-code", f"{verdicts['FAIL']} cases failed, and the command ended with 0")
    if record.exit_code != 0 and not (verdicts["FAIL"] or verdicts["MISTRUSTED"] or verdicts["QUARANTINED"]):
        yield Reason("exit-code", f"the command ended with {record.exit_code}, and no case failed: it broke off")
    beyond = {"SIMULATED": ("PASS",), "COMPILED_ONLY": ("PASS", "SIMULATED")}.get(row.best, ())
    over = [item.id for item in items if item.verdict in beyond]
    if over:
        yield Reason("overclaimed", f"{len(over)} cases say more than {row.best}: {expected.first_few(over, 1)}")


def _document(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    """The result document, or the benchmark, against the record that names it."""
    facts, document, record = one.facts, one.document, one.record
    if facts is None:
        return
    if (facts.vendor, facts.profile, facts.arch) != (record.device.vendor, record.device.profile, record.device.arch):
        yield Reason(
            "contradictory",
            f"the document is of {facts.profile} ({facts.arch}), its record of "
            f"{record.device.profile} ({record.device.arch})",
        )
    places = {"hardware": "cuda", "simulated": "simulated", "stand-in": "stand-in", "cpu": "cpu", "compile": "none"}
    if not facts.device.startswith(places[row.how]):
        yield Reason("other-device", f"the document's device is {facts.device!r}; required: {places[row.how]}")
    if row.how == "hardware" and facts.device_name != record.device.name:
        yield Reason("contradictory", f"the document is of {facts.device_name!r}, its record of {record.device.name!r}")
    try:
        within = moment(record.started) - SKEW <= moment(facts.time) <= moment(record.finished) + SKEW
    except ResultError:
        within = False
    if not within:
        yield Reason("clock", f"the document is of {facts.time}, its run of {record.started} to {record.finished}")
    if document is None:
        return
    of = document.provenance
    if of is None:
        yield Reason("no-commit", "the document does not say of what it is (written by an older Ferryman)")
        return
    if of.dirty and not record.dirty:
        yield Reason("contradictory", "the document says that files differed from the commit, its record does not")
    if of.row != record.row or of.commit != record.commit:
        yield Reason(
            "contradictory",
            f"the document is of row {of.row} at {str(of.commit)[:12]}, its record of "
            f"{record.row} at {str(record.commit)[:12]}",
        )
    for op, sha256 in of.kernels.items():
        if record.kernels.get(f"op:{op}", sha256) != sha256:
            yield Reason("contradictory", f"the document's kernels of {op} are not its record's")
    others = [item.id for item in one.items if not expected.of_backend(item.id, row.backend)]
    if others:
        yield Reason("swapped", f"cells of another backend than {row.backend}: {expected.first_few(others, 1)}")


def _capsule(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    for code, text in exchange.reasons(row, one, context.replays):
        yield Reason(code, text)


def _signature(row: Row, one: Evidence, context: Context) -> Iterator[Reason]:
    if context.signers is None:
        return
    if one.signature is None or one.path is None:
        yield Reason("unsigned", "no record.json.sig beside it")
        return
    why = signing.verify(one.path, one.signature, context.signers, f"{row.vendor}/{row.device}")
    if why is not None:
        yield Reason("signature", why)

"""All rows from all runs: which run counts for each, what it says, and what the history adds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ferryman.porting.ci import exchange, expected, judge
from ferryman.porting.ci import history as histories
from ferryman.porting.ci.evidence import BAD_MOST, Evidence, Item, Problem, uncollected
from ferryman.porting.ci.history import Entry
from ferryman.porting.ci.judge import DOUBTS, Context, Reason
from ferryman.porting.ci.merged import Bad, Fault, Merged, RowState, Run, Why
from ferryman.porting.ci.record import moment
from ferryman.porting.ci.row import Row
from ferryman.porting.ci.states import WRONG, ops_of, vendors
from ferryman.porting.judging.results import Verdict, row_verdict
from ferryman.porting.running.runner import THINNED

_BY_OUTCOME = ("skipped", "xfailed", "xpassed", "deselected")
_TREND = 30
_LEFT = re.compile(r"[0-9]+ of [0-9]+ cases")  # stands for what a check leaves out when it interprets
_CRASHES = (4, 5, 6, 7, 8, 11)  # signals of a program's own faults: ILL, TRAP, ABRT, BUS, FPE, SEGV


def merge(
    runs: Sequence[Evidence], problems: Sequence[Problem], context: Context, project: str = ""
) -> tuple[Merged, list[Entry]]:
    """The merged document, and what the history is to keep of these runs."""
    with uncollected():
        return _merge(runs, problems, context, project)


def _merge(
    runs: Sequence[Evidence], problems: Sequence[Problem], context: Context, project: str
) -> tuple[Merged, list[Entry]]:
    faults = [Fault(file=p.file, code=p.code, text=p.text) for p in problems]
    known = {row.id for row in context.matrix.rows}
    for one in runs:
        if one.record.row not in known:
            faults.append(Fault(file=one.file, code="unknown-row", text=f"of row {one.record.row}, which is not there"))
    again = _twice(runs)
    faults += [Fault(file=file, code="twice", text=text) for file, (_, text) in again.items()]
    mine: dict[str, list[tuple[Evidence, list[Reason]]]] = {row.id: [] for row in context.matrix.rows}
    for row in context.matrix.rows:
        for one in runs:
            if one.record.row == row.id:
                reasons = judge.reasons(row, one, context)
                if one.file in again:
                    reasons.append(Reason("twice", again[one.file][1]))
                mine[row.id].append((one, reasons))
    sisters = _sisters(context, mine)
    rows, entries = [], []
    for row in context.matrix.rows:
        state, entry = _Row(row, mine[row.id], context, sisters).state()
        rows.append(state)
        if entry is not None:
            entries.append(entry)
    merged = Merged(
        project=project or context.tree.root.resolve().name,
        commit=context.commit,
        time=context.now.isoformat(timespec="seconds"),
        rows=rows,
        vendors=vendors(rows),
        faults=faults,
        required=list(context.matrix.require),
    )
    return merged, entries


def _twice(runs: Sequence[Evidence]) -> dict[str, tuple[str, str]]:
    """Runs that share a record, or a file that says what became of their cases: by file, (digest, what to say)."""
    where: dict[str, list[Evidence]] = {}
    for one in runs:
        for sha in {one.sha256, *one.shown}:
            where.setdefault(sha, []).append(one)
    shared = {}
    for sha, several in where.items():
        if len(several) > 1:
            for one in several:
                others = ", ".join(o.file for o in several if o is not one)
                shared[one.file] = (sha, f"its content (SHA-256 {sha[:12]}) is also in {others}")
    return shared


def _sisters(
    context: Context, mine: dict[str, list[tuple[Evidence, list[Reason]]]]
) -> dict[tuple[object, ...], set[str]]:
    """The ids that any run of the same tests, at this commit, has collected."""
    collected: dict[tuple[object, ...], set[str]] = {}
    for row in context.matrix.rows:
        key = expected.family(row)
        for one, why in mine[row.id]:
            if key is not None and not {"other-commit", "other-kernels", "other-row"} & {r.code for r in why}:
                collected.setdefault(key, set()).update(one.record.collected)
    return collected


class _Row:
    """One row's runs, judged together."""

    def __init__(
        self,
        row: Row,
        runs: Sequence[tuple[Evidence, list[Reason]]],
        context: Context,
        sisters: dict[tuple[object, ...], set[str]],
    ) -> None:
        self.row, self.runs, self.context, self.sisters = row, runs, context, sisters
        self.why: list[Reason] = []
        self.notes: list[str] = []
        self.excused = 0

    def state(self) -> tuple[RowState, Entry | None]:
        good = sorted((o for o, why in self.runs if not why), key=lambda o: moment(o.record.finished))
        bad = [(o, why) for o, why in self.runs if why]
        chosen: Evidence | None = good[-1] if good else None
        items = self._counted(chosen.items) if chosen is not None else []
        verdict: Verdict = "NOT_RUN"
        if chosen is not None:
            verdict = self._verdict(chosen, items)
            verdict = self._together(verdict, chosen, good, bad)
            shown = exchange.note(chosen, self.context.replays)
            self.notes += [] if shown is None else [shown]
        else:
            self.why += [reason for _, why in bad for reason in why] or [self._absent()]
            if any(r.code in DOUBTS for r in self.why):
                verdict = "MISTRUSTED"
            if bad:
                chosen = bad[-1][0]
                items = self._counted(chosen.items)
        carried = self._carried() if not self.runs else None
        if carried is not None:
            verdict, self.why = carried.verdict, []
            self.notes.append(f"carried from {carried.commit[:12]} of {carried.time}: no change since reaches the row")
        met = verdict == self.row.best and not self.why
        quarantine, verdict, met = self._quarantine(verdict, met)
        return self._state(chosen, items, verdict, met, quarantine, carried, bool(good))

    def _counted(self, items: Sequence[Item]) -> list[Item]:
        """Without what the matrix excuses, or the check itself leaves out when it interprets."""
        kept = []
        for item in items:
            thinned = item.reason == THINNED
            if item.verdict == "NOT_RUN" and (thinned or expected.excused(self.row, item.id, item.reason) is not None):
                self.excused += 1
            else:
                kept.append(item)
        return kept

    def _verdict(self, chosen: Evidence, items: Sequence[Item]) -> Verdict:
        row = self.row
        if row.suite == "bench":
            return self._timed(chosen)
        counts = Counter(item.verdict for item in items)
        for verdict in WRONG:
            if counts[verdict]:
                named = [item for item in items if item.verdict == verdict]
                code = "rerun" if named[0].reason.startswith("rerun") else "failed"
                examples = expected.first_few(item.id for item in named)
                self.why.append(Reason(code, f"{counts[verdict]} of {len(items)} cases are {verdict}: {examples}"))
                return verdict
        left = [item for item in items if item.verdict == "NOT_RUN"]
        for code in _BY_OUTCOME:
            some = [item for item in left if item.reason.split(":")[0] == code]
            if some:
                examples = expected.first_few(item.id for item in some)
                name = "xfailed" if code == "xpassed" else code
                self.why.append(Reason(name, f"{len(some)} of {len(items)} tests were {code}: {examples}"))
        rest = [item for item in left if item.reason.split(":")[0] not in _BY_OUTCOME]
        if rest:
            self.why.append(
                Reason(
                    "not-run",
                    f"{len(rest)} of {len(items)} cases did not run: "
                    f"{expected.first_few(i.id for i in rest)} ({rest[0].reason})",
                )
            )
        self._complete({item.id for item in chosen.items})
        lower = [i for i in items if i.verdict not in (row.best, "NOT_RUN", "UNIMPLEMENTED")]
        if lower:
            examples = expected.first_few((i.id for i in lower), 1)
            self.why.append(Reason("not-run", f"{len(lower)} cases are only {lower[0].verdict}: {examples}"))
        if not counts[row.best]:
            self.why.append(Reason("empty", f"no case is {row.best}"))
        return row_verdict(dict(counts)) if not self.why else "NOT_RUN"

    def _timed(self, chosen: Evidence) -> Verdict:
        if chosen.record.exit_code != 0:
            self.why.append(Reason("failed", "something became slower, twice: see perf.json of the run"))
            return "FAIL"
        return "PASS"

    def _complete(self, ids: set[str]) -> None:
        """The set of ids against those that must be there."""
        row, root = self.row, self.context.tree.root
        family = expected.family(row)
        wanted = {
            "that its cases file lists": (expected.listed(row, root), ids),
            "of Ferryman's ops": (expected.checked(row), {i for i in ids if not _LEFT.fullmatch(i.split("|")[-1])}),
            "of Ferryman's kernels": (compiled := expected.compiled(row), expected.kernels(ids) if compiled else ids),
            "that a sister row collected": (self.sisters.get(family) if family is not None else None, ids),
        }
        for whose, (must, there) in wanted.items():
            lacking = {i for i in (must or set()) - there if expected.excused(row, i) is None}
            if lacking:
                self.why.append(
                    Reason("missing", f"{len(lacking)} cases {whose} are not there: {expected.first_few(lacking)}")
                )
            if must is not None and whose.startswith("of Ferryman") and not self.why and there - must:
                self.why.append(Reason("swapped", f"cases that no op has: {expected.first_few(there - must)}"))
        entries = [e for e in self.context.history.of(row.id) if e.met]
        now = self.context.sources(row)
        same = [e for e in entries if e.kernels == now]
        if same and same[-1].cases != judge.digest(sorted(ids)):
            self.why.append(Reason("missing", f"the same sources had other cases in the run of {same[-1].time}"))

    def _together(
        self,
        verdict: Verdict,
        chosen: Evidence,
        good: Sequence[Evidence],
        bad: Sequence[tuple[Evidence, list[Reason]]],
    ) -> Verdict:
        """What other runs of the row say beside the newest good one."""
        for other in good[:-1]:
            failed = [i for i in other.items if i.verdict in WRONG]
            if failed and verdict not in WRONG:
                self.why.append(
                    Reason(
                        "flaky",
                        f"the run of {other.record.finished} failed ({failed[0].id[:160]}), that of "
                        f"{chosen.record.finished} did not",
                    )
                )
                return "FAIL"
        for other, why in bad:
            doubts = [r for r in why if r.code in DOUBTS - {"exit-code"}]
            if doubts:
                self.why += doubts
                return "MISTRUSTED"
            failed = [i for i in other.items if i.verdict in WRONG]
            if failed and other.record.commit == chosen.record.commit and verdict not in WRONG:
                self.why.append(Reason("flaky", f"another run of this commit failed: {failed[0].id[:160]}"))
                return "FAIL"
            crash = _crash(other.record.exit_code)
            if crash and other.record.commit == chosen.record.commit and verdict not in WRONG:
                self.why.append(Reason("flaky", f"another run of this commit crashed: {crash}"))
                return "FAIL"
            self.notes.append(f"left aside: {other.file}: {why[0].code}: {why[0].text}")
        return verdict

    def _absent(self) -> Reason:
        decision = self.context.decisions.get(self.row.id)
        return Reason(
            "absent", "no record of this row is here" if decision is None or decision.chosen else decision.why
        )

    def _carried(self) -> Entry | None:
        """The last success, where the change does not reach the row: the same sources, and not too old."""
        decision, context = self.context.decisions.get(self.row.id), self.context
        if decision is None or decision.chosen or context.signers is not None:
            return None
        last = next(iter(context.history.of(self.row.id)[::-1]), None)
        if last is None or not last.met or last.kernels != context.sources(self.row):
            return None
        age = (context.now - moment(last.time)).total_seconds() / 86400
        return last if -judge.SKEW.total_seconds() / 86400 <= age <= context.matrix.max_age_days else None

    def _quarantine(self, verdict: Verdict, met: bool) -> tuple[str | None, Verdict, bool]:
        asked = self.row.quarantine
        if asked is None:
            return None, verdict, met
        until = asked.until.isoformat()
        if self.context.now.date() > asked.until:
            self.why.append(
                Reason("expired-quarantine", f"it ended on {until} ({asked.reason}); repair the row, or say until when")
            )
            return f"expired {until}", verdict if verdict in WRONG else "QUARANTINED", False
        self.why.append(Reason("quarantined", f"until {until}: {asked.reason}; without it the row were {verdict}"))
        return until, "QUARANTINED", False

    def _state(
        self,
        chosen: Evidence | None,
        items: Sequence[Item],
        verdict: Verdict,
        met: bool,
        quarantine: str | None,
        carried: Entry | None,
        real: bool,
    ) -> tuple[RowState, Entry | None]:
        row, context = self.row, self.context
        kernels = context.sources(row)
        ops = ops_of(items)
        entry = None
        if chosen is not None and real and chosen.record.commit is not None:
            entry = Entry(
                row=row.id,
                sha256=chosen.sha256,
                commit=chosen.record.commit,
                time=chosen.record.finished,
                verdict=verdict,
                met=met,
                kernels=kernels,
                cases=judge.digest(sorted(i.id for i in chosen.items)),
                ops={o.op[:200]: o.verdict for o in ops[:200]},
                reason="; ".join(r.text for r in self.why)[:400],
            )
        past = histories.extended(context.history, [entry] if entry else []).of(row.id)
        wrong = [i for i in items if i.verdict not in ("PASS", "UNIMPLEMENTED", row.best)]
        record = None if chosen is None else chosen.record
        state = RowState(
            id=row.id,
            vendor=row.vendor,
            device=row.device,
            backend=row.backend,
            how=row.how,
            suite=row.suite,
            verdict=verdict,
            best=row.best,
            met=met,
            green=met and row.best == "PASS",
            optional=row.optional,
            quarantine=quarantine,
            carried=carried is not None,
            why=[Why(code=r.code, text=r.text) for r in dict.fromkeys(self.why)],
            notes=self.notes,
            counts=dict(sorted(Counter(i.verdict for i in items).items())),
            excused=self.excused,
            ops=ops,
            bad=[Bad(id=i.id, verdict=i.verdict, reason=i.reason) for i in wrong[:BAD_MOST]],
            bad_total=len(wrong),
            commit=None if record is None else record.commit,
            time=None if record is None else record.finished,
            age_days=None if record is None else self._age(record.finished),
            seconds=None if record is None else (moment(record.finished) - moment(record.started)).total_seconds(),
            device_name=None if record is None else record.device.name,
            toolchain={} if record is None else record.toolchain,
            signed=context.signers is not None and real,
            records=[o.sha256 for o, _ in self.runs],
            kernels=kernels,
            last_real=self._run(past[-1]) if past else None,
            last_success=self._optional(histories.last_success(past)),
            first_failing=self._optional(histories.first_failing(past)),
            flips=histories.flips(past),
            trend=[self._run(e) for e in past[-_TREND:]],
        )
        return state, entry

    def _age(self, time: str) -> float:
        return round((self.context.now - moment(time)).total_seconds() / 86400, 3)

    def _run(self, entry: Entry) -> Run:
        return Run(
            commit=entry.commit,
            time=entry.time,
            verdict=entry.verdict,
            met=entry.met,
            reason=entry.reason,
            age_days=self._age(entry.time),
        )

    def _optional(self, entry: Entry | None) -> Run | None:
        return None if entry is None else self._run(entry)


def _crash(code: int) -> str | None:
    """What a command's exit code says of a crash of its own; one that was ended by others, or lost, says nothing."""
    number = -code if code < 0 else code - 128  # a shell's way of saying it
    return f"exit code {code}, signal {number}" if number in _CRASHES else None

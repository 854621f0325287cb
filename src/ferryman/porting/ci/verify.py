"""The one check to require: whether every vendor that is asked for was really tested, and nothing else is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from ferryman.errors import UnknownName
from ferryman.porting.ci.judge import REASONS
from ferryman.porting.ci.matrix import Matrix
from ferryman.porting.ci.merged import Merged, RowState
from ferryman.porting.ci.states import WRONG

# A bare result beside others is nothing that was hidden: its row says NOT_RUN, and that decides.
_TOLD_ONLY = frozenset({"alone"})


def verified(merged: Merged, matrix: Matrix, require: Sequence[str] | None = None) -> Merged:
    """The document with why it fails; no failures: it passes. Raises UnknownName for a vendor without a row.

    require: vendors whose rows on the real device must all be green; None: those that the matrix requires.
    """
    wanted = list(matrix.require if require is None else dict.fromkeys(require))
    for vendor in wanted:
        if vendor not in matrix.vendors:
            raise UnknownName("vendor of the matrix", vendor, matrix.vendors)
    failures = [f"{f.file}: {REASONS.get(f.code, f.code)}: {f.text}" for f in merged.faults if f.code not in _TOLD_ONLY]
    vendors = {v.vendor: v for v in merged.vendors}
    for vendor in wanted:
        state = vendors[vendor]
        if not state.rows:
            failures.append(f"{vendor} is required, and the matrix has no row that runs on such a device")
        elif state.green_rows == state.rows and not state.green:
            failures.append(f"{vendor} is required, and its rows are timed alone: none says that it is right")
        elif not state.green:
            failures.append(
                f"{vendor} is required, and is {state.verdict}: {state.green_rows} of {state.rows} rows are green"
            )
    for row in merged.rows:
        if _fails(row, wanted):
            why = "; ".join(f"{w.code}: {w.text}" for w in row.why) or "it is not the best that it can say"
            failures.append(f"{row.id} is {row.verdict} (required: {row.best}): {why}")
    if not any(row.met for row in merged.rows):
        failures.append("no row has evidence: nothing is shown to be right")
    return merged.model_copy(update={"failures": failures, "required": wanted, "judged": True})


def _fails(row: RowState, wanted: Sequence[str]) -> bool:
    if row.met:
        return False
    codes = {w.code for w in row.why}
    if "expired-quarantine" in codes:
        return True
    if "quarantined" in codes:
        return row.vendor in wanted and row.how == "hardware"
    if row.verdict in WRONG or row.vendor in wanted:
        return not (row.optional and row.verdict == "NOT_RUN")
    return not row.optional and row.how not in ("hardware", "stand-in")

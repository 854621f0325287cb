"""What is said of a planted bug that survives: the input that shows it, and the comparisons that let it through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ferryman.porting.mutate import reveal
from ferryman.porting.mutate.edits import Edit
from ferryman.porting.mutate.targets import Target

MOST_COMPARISONS = 3  # that are named where none met a larger error than without the bug
_SECONDS = 120
_BY_DTYPE = {
    "float32": "rtol=1.3e-6, atol=1e-5",
    "float16": "rtol=1e-3, atol=1e-5",
    "bfloat16": "rtol=1.6e-2, atol=1e-5",
    "float64": "rtol=1e-7, atol=1e-7",
}
_BY_NAME = {
    "allclose": "rtol=1e-5, atol=1e-8",
    "isclose": "rtol=1e-5, atol=1e-8",
    "assert_allclose": "rtol=1e-7, atol=0",
    "assert_almost_equal": "decimal=7",
    "assert_array_almost_equal": "decimal=6",
}


def revealed(target: Target, record: Path, edit: Edit, answers: Path) -> dict[str, Any]:
    """The last answer of `reveal`, in a process of its own. record: a folder of launches. answers: a file to write."""
    job = {
        "file": str(target.file),
        "module": target.module,
        "record": str(record),
        "edit": {"start": edit.start, "old": edit.old, "new": edit.new},
        "path": [str(target.file.parent), os.getcwd()],
        "answers": str(answers),
    }
    source = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-c", reveal.START],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=env,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        failed = f"its replay took more than {_SECONDS} s"
    else:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        failed = f"its replay ended with code {done.returncode}: {last[:200]}"
    lines = answers.read_text("utf-8").splitlines() if answers.exists() else []
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {"failed": failed}
    return answer


def words(answer: dict[str, Any]) -> str:
    """An answer of `revealed` as a sentence."""
    if "failed" in answer:
        return str(answer["failed"])
    if "difference" in answer:
        shown = f"{answer['what']}: {answer['input']}: {answer['difference']}"
        if answer["plain"]:
            return shown
        return (
            f"only the last bits differ on each of the {answer['runs']} inputs tried, beside the largest magnitude of "
            f"the result: it may change nothing that counts. The most, {shown}"
        )
    if answer["equal"]:
        return f"bitwise equal on {answer['equal']} replayed inputs: it may change nothing"
    return f"no launch could be replayed{': ' + answer['skipped'] if answer.get('skipped') else ''}"


def tolerances(plain: list[dict[str, Any]], mutated: list[dict[str, Any]]) -> list[str]:
    """The comparisons that let the bug through, a line each: all that met a larger error than without it. Where none
    did, the ones with the largest errors. plain, mutated: notes of `hook`."""
    before, after = _largest(plain), _largest(mutated)
    usual = {where: before.get(where, {"error": 0.0})["error"] for where in after}
    more = {where: one["error"] - usual[where] for where, one in after.items() if one["error"] > usual[where]}
    if more:
        return [_line(after[where], usual[where]) for where in sorted(more, key=lambda w: -more[w])]
    shown = sorted(after, key=lambda where: -after[where]["error"])[:MOST_COMPARISONS]
    lines = [_line(after[where], usual[where]) for where in shown]
    left = len(after) - len(shown)
    return [*lines, f"{left} more comparisons met no larger error with the bug than without it"] if left else lines


def _largest(notes: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """By where a comparison stands, and its name and tolerances: a line may have several."""
    by_place: dict[tuple[str, str], dict[str, Any]] = {}
    for one in notes:
        if "compared" not in one:
            continue
        place = one["where"], f"{one['compared']} {one['tolerance']}"
        if one["error"] >= by_place.get(place, {"error": -1.0})["error"]:
            by_place[place] = one
    return by_place


def _line(one: dict[str, Any], usual: float) -> str:
    where, name, given = one["where"], one["compared"], ", ".join(f"{k}={v}" for k, v in one["tolerance"].items())
    default = _BY_NAME.get(name) or _BY_DTYPE.get(one["dtype"].removeprefix("torch."), "by dtype")
    tolerance = given or f"its defaults ({default})"
    if not one["error"]:
        return f"{where}: {name} with {tolerance} met no error, with the bug and without"
    return f"{where}: {name} with {tolerance} let an error of {one['error']:.3g} through ({usual:.3g} without the bug)"

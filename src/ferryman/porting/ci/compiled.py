"""A row that compiles every kernel of a backend for a device that is not here, as a result document.

Nothing runs, so the best verdict is COMPILED_ONLY; a kernel that the toolchain refuses is QUARANTINED with its log, one
that fails its resource gates is FAIL. `ferryman ci run` starts it:

python -m ferryman.porting.ci.compiled mi300x hip FILE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ferryman.backends.artefacts import Entry
from ferryman.device_profiles import profile
from ferryman.errors import FerrymanError
from ferryman.porting import aot
from ferryman.porting.judging import results

DEVICE = "none"


def cell(entry: Entry, number: int) -> results.Cell:
    """One kernel as a cell; the number keeps configurations of one kernel apart."""
    given = ", ".join(f"{k}={v}" for k, v in {**entry.constexprs, **entry.options}.items())
    reason = None if entry.reason is None else entry.reason[:2000]
    return results.Cell(
        op=entry.family,
        implementation=entry.backend,
        device=DEVICE,
        dtype=entry.dtype,
        case=f"{number}: {entry.kernel}({given})",
        verdict=entry.verdict,
        reason=reason,
    )


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 3:
        sys.stderr.write(f"{(__doc__ or '').splitlines()[-1]}\n")
        return 2
    name, backend, path = arguments

    def progress(done: int, total: int, label: str) -> None:
        sys.stderr.write(f"{done}/{total} {label}\n")

    try:
        known = profile(name)
        manifest = aot.compile_all([known], backends=[backend], progress=progress).manifest
    except FerrymanError as error:
        sys.stderr.write(f"ferryman: {error}\n")
        return 2
    here = results.environment(torch.device("cpu"), known, 0, "compile", manifest.seconds)
    facts = here.model_copy(update={"device": DEVICE, "device_name": f"{known.title}, not here"})
    document = results.results(facts, [cell(entry, i) for i, entry in enumerate(manifest.entries)])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    results.save(document, path)
    counts = manifest.counts()
    sys.stderr.write(f"{Path(path).name}: {counts}\n")
    return int(counts["QUARANTINED"] + counts["FAIL"] > 0 or counts["COMPILED_ONLY"] == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

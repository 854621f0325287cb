"""Compiles every kernel of a backend for a device that is not here; writes what became of each as a result document.

    python ci/compile.py --profile mi300x --backend hip --out results

This is `ferryman compile` for one row of ci/matrix.yaml. Nothing runs, so the best verdict is COMPILED_ONLY; a kernel
that the toolchain refuses is QUARANTINED with its log, one that fails its resource gates is FAIL.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ferryman.backends.artefacts import Entry
from ferryman.device_profiles import profile
from ferryman.errors import FerrymanError
from ferryman.porting import aot, results

DEVICE = "none"


def cell(entry: Entry, number: int) -> results.Cell:
    """One kernel as a cell; the number keeps configurations of one kernel apart."""
    given = ", ".join(f"{k}={v}" for k, v in {**entry.constexprs, **entry.options}.items())
    reason = None if entry.reason is None else entry.reason[:2000]
    return results.Cell(op=entry.family, implementation=entry.backend, device=DEVICE, dtype=entry.dtype,
                        case=f"{number}: {entry.kernel}({given})", verdict=entry.verdict, reason=reason)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)

    def progress(done: int, total: int, label: str) -> None:
        print(f"{done}/{total} {label}", file=sys.stderr, flush=True)

    try:
        known = profile(options.profile)
        made = aot.compile_all([known], backends=[options.backend], progress=progress).manifest
    except FerrymanError as error:
        print(f"compile: {error}", file=sys.stderr)
        return 2
    here = results.environment(torch.device("cpu"), known, 0, "compile", made.seconds)
    facts = here.model_copy(update={"device": DEVICE, "device_name": f"{known.title}, not here"})
    document = results.results(facts, [cell(entry, i) for i, entry in enumerate(made.entries)])
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"compile-{known.name}-{options.backend}.json"
    results.save(document, path)
    counts = made.counts()
    print(f"{path}: {counts}")
    return int(counts["QUARANTINED"] + counts["FAIL"] > 0 or counts["COMPILED_ONLY"] == 0)


if __name__ == "__main__":
    sys.exit(main())

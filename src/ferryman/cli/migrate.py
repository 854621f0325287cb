"""`ferryman migrate`: a lockfile of an earlier version, or with earlier names, becomes one of today; its times stay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli import output
from ferryman.dispatch.lockfile_migrate import migrate as run


def migrate(
    file: Annotated[
        Path, typer.Argument(help="A lockfile that `ferryman tune` of this version, or an earlier one, wrote.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Write here; default: in the file's place.")] = None,
) -> None:
    """Bring a lockfile to this version.

    Implementations get the names that they have now, and measured times are kept. Entries whose kernels changed since
    they were measured are kept too, and hold nothing until `ferryman tune` measures them again.
    """
    done = run(file, out)
    output.say(f"{out or file}: {done.valid + done.stale} entries, {done.valid} hold, {done.stale} of other kernels")
    for (op, before, after), count in sorted(done.renamed.items()):
        output.say(f"  {op}: {before} is {after} now, in {count} candidates")
    if done.stale:
        output.say("Run `ferryman tune` on that device to measure those of other kernels again")

"""The command `ferryman`: one file for each verb.

Exit codes: 0 done, 1 a check failed, 2 bad use (an unknown name, an invalid argument, file or setting).
"""

from __future__ import annotations

import os
import sys

import typer

import ferryman
from ferryman import settings
from ferryman.cli import (
    bench,
    check,
    compare,
    compile,
    counters,
    devices,
    doctor,
    explain,
    fingerprint,
    ops,
    record,
    replay,
    report,
    selftest,
    tune,
)
from ferryman.errors import FerrymanError

app = typer.Typer(
    name="ferryman", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Carries PyTorch model code across GPU vendors: which kernel runs, whether it is right, and how fast.",
)  # fmt: skip
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("devices")(devices.devices)
app.command("ops")(ops.ops)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.command("fingerprint")(fingerprint.fingerprint)
app.command("record")(record.record)
app.command("replay")(replay.replay)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("compile")(compile.compile_)
app.command("counters")(counters.counters)
app.command("selftest")(selftest.selftest)
app.command("tune")(tune.tune)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ferryman {ferryman.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """Options that stand before a verb. No verb begins with a setting that cannot be read."""
    settings.check()


def main() -> None:
    """Run the command line; a FerrymanError is bad use and prints as one message."""
    try:
        app()
    except FerrymanError as error:
        sys.stderr.write(f"ferryman: {error}\n")
        raise SystemExit(2) from None
    except BrokenPipeError:  # `ferryman ops | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None

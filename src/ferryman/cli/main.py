"""The command `ferryman`: one file for each verb.

Exit codes: 0 done, 1 a check failed, 2 bad use (an unknown name, an invalid argument, file or setting).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any

import typer
from typer.core import TyperCommand

import ferryman
from ferryman import settings
from ferryman.cli import (
    bench,
    check,
    ci,
    compare,
    compile,
    counters,
    devices,
    docs,
    doctor,
    explain,
    fingerprint,
    fuzz,
    migrate,
    mutate,
    new,
    ops,
    port,
    record,
    replay,
    report,
    selftest,
    tune,
)
from ferryman.errors import FerrymanError

_SECONDS_TO_END = 3
# what no extra's absence may turn into a traceback: package -> extra
_EXTRAS = {
    "numpy": "triton",
    "triton": "triton",
    "transformers": "models",
    "jinja2": "report",
    "junitparser": "report",
    "matplotlib": "report",
    "ray": "fleet",
    "cupy": "cuda13",
    "msgpack": "offline",
}


class _Verb(TyperCommand):
    """No verb begins with a setting that cannot be read. Its help needs none."""

    def invoke(self, ctx: Any) -> Any:
        settings.check()
        return super().invoke(ctx)


app = typer.Typer(
    name="ferryman",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Carries PyTorch model code across GPU vendors: which kernel runs, whether it is right, and how fast.",
)
app.command("check", cls=_Verb)(check.check)
app.command("fuzz", cls=_Verb)(fuzz.fuzz)
app.command("bench", cls=_Verb)(bench.bench)
app.command("devices", cls=_Verb)(devices.devices)
app.command("ops", cls=_Verb)(ops.ops)
app.command("docs", cls=_Verb)(docs.docs)
app.command("explain", cls=_Verb)(explain.explain)
app.command("doctor", cls=_Verb)(doctor.doctor)
app.command("fingerprint", cls=_Verb)(fingerprint.fingerprint)
app.command("port", cls=_Verb)(port.port)
app.command("mutate", cls=_Verb)(mutate.mutate)
app.command("record", cls=_Verb)(record.record)
app.command("replay", cls=_Verb)(replay.replay)
app.command("compare", cls=_Verb)(compare.compare)
app.command("report", cls=_Verb)(report.report)
app.command("compile", cls=_Verb)(compile.compile_)
app.command("counters", cls=_Verb)(counters.counters)
app.command("selftest", cls=_Verb)(selftest.selftest)
app.command("tune", cls=_Verb)(tune.tune)
app.command("migrate", cls=_Verb)(migrate.migrate)
app.add_typer(ci.app, name="ci")
app.command("new", cls=_Verb)(new.new)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ferryman {ferryman.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """Options that stand before a verb."""


def main() -> None:
    """Run the command line; a FerrymanError is bad use and prints as one message."""
    if sys.stdout is None:  # `ferryman ops >&-`: the next file that is opened would become stdout
        raise SystemExit(_say("stdout is closed; redirect it to /dev/null"))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except FerrymanError as error:
        raise SystemExit(_say(str(error))) from None
    except BrokenPipeError:  # `ferryman ops | head`
        _mute()
        raise SystemExit(141) from None
    except OSError as error:  # a full disk, under stdout or a temporary folder
        _mute()
        raise SystemExit(_say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")) from None
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _EXTRAS:
            raise
        remedy = f"pip install 'ferryman[{_EXTRAS[package]}]'"
        raise SystemExit(_say(f"this needs {package}, which is not installed: {remedy}")) from None


def _say(text: str) -> int:
    """One message on stderr, if there is one. Returns the exit code of bad use."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"ferryman: {text}\n")
    return 2


def _mute() -> None:
    """What stands in stdout's buffer goes nowhere, or Python's own end would fail of it once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminated(number: int, frame: Any) -> None:
    """SIGTERM ends the command through its contexts, which end their workers and remove their folders; and without
    them where that takes more than `_SECONDS_TO_END`."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_SECONDS_TO_END)
    raise SystemExit(128 + number)

"""The command as a whole: help, exit codes, one clear message for bad use, plain text off a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ferryman as package
from ferryman.cli import main
from tests.cli.run import alone, ferryman

VERBS = (
    "bench",
    "check",
    "devices",
    "ops",
    "report",
    "explain",
    "doctor",
    "docs",
    "fingerprint",
    "fuzz",
    "migrate",
    "mutate",
    "new",
    "port",
    "selftest",
    "record",
    "replay",
    "compare",
    "compile",
    "counters",
    "tune",
)


def test_help_names_every_verb_and_what_it_is_for() -> None:
    done = ferryman("--help")
    assert done.code == 0
    for verb in VERBS:
        assert f"  {verb} " in done.out
    assert {c.name for c in main.app.registered_commands} == set(VERBS)
    assert {c.cls for c in main.app.registered_commands} == {main._Verb}  # which reads the settings first


def test_it_starts_alone_and_says_what_is_wrong(tmp_path: Path) -> None:
    done = alone("--version", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, f"ferryman {package.__version__}\n", "")
    done = alone("explain", "rms_nrom", "--shape", "8,64", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ferryman: unknown op 'rms_nrom'; nearest: rms_norm") and "Traceback" not in done.err


RMS = ("explain", "rms_norm", "--shape", "8,64")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain", "rms_nrom", "--shape", "8,64"), "unknown op 'rms_nrom'; nearest: rms_norm"),
        (("explain", "rms_norm", "--shape", "8,y"), "--shape is '8,y'; required: sizes separated by commas"),
        ((*RMS, "--device", "mi300y"), "unknown device profile 'mi300y'; nearest: mi300x"),
        ((*RMS, "--dtype", "int3"), "unknown dtype 'int3'"),
        ((*RMS, "--dtype", "fp8"), "unknown dtype for an op's tensors 'fp8'"),
        ((*RMS, "--arg", "eps=-1"), "rms_norm: eps is -1.0; required: a finite number >= 0"),
        ((*RMS, "--arg", "epss=1"), "unknown argument of rms_norm 'epss'; nearest: eps"),
        ((*RMS, "--arg", "eps"), "--arg is 'eps'; required: name=value"),
        ((*RMS, "--use", "cudo"), "unknown backend or implementation 'cudo'; nearest: cuda"),
        ((*RMS, "--layout", "col"), "unknown layout 'col'"),
        (("ops", "--op", "norm"), "unknown op 'norm'"),
        (("ops", "--device", "h20"), "unknown device profile 'h20'; nearest: h200"),
        (("devices", "cuda:9"), "unknown device 'cuda:9'; nearest: cpu"),
        (("check", "--op", "nope"), "unknown op 'nope'"),
        (("check", "--backend", "cudo"), "unknown backend or implementation 'cudo'"),
        (("check", "--dtype", "float7"), "unknown dtype 'float7'"),
        (("check", "--tier", "huge"), "unknown tier 'huge'"),
        (("check", "--device", "mi300x"), "required: a device that is here"),
        (("check", "--tiny"), "--tiny is given; required: --model"),
        (("check", "--model", "qwen33"), "unknown model 'qwen33'; nearest: qwen3"),
        (("check", "--model", "qwen3", "--op", "rope"), "--op is given; required: no --model beside it"),
        (("check", "--model", "qwen3", "--dtype", "f32", "--dtype", "f16"), "required: one dtype with --model"),
        (("check", "--model", "/nowhere/config.json"), "/nowhere/config.json; required: an existing config.json"),
    ],
)
def test_bad_use_is_one_message_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = ferryman(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("ferryman: ") and says in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [("check", "--nope"), ("explain",), ("nope",), ("check", "--layers", "x")])
def test_options_that_do_not_exist_are_bad_use_too(arguments: tuple[str, ...]) -> None:
    done = ferryman(*arguments)
    assert done.code == 2 and done.out == "" and done.err


def test_a_bad_setting_is_bad_use() -> None:
    done = ferryman("doctor", FERRYMAN_STRICT="maybe")
    assert done.code == 2
    assert "FERRYMAN_STRICT is 'maybe'; required: one of 1, true" in done.err


def test_output_is_plain_off_a_terminal() -> None:
    for arguments in (("--help",), ("ops",), ("devices", "--all"), ("doctor",)):
        done = ferryman(*arguments, TERM="xterm-256color")
        assert done.code == 0
        assert "\x1b" not in done.out + done.err and not set("│┃━─╭█") & set(done.out + done.err)
        assert done.err == ""


def test_a_closed_pipe_is_no_error() -> None:
    code = "import sys; from ferryman.cli import output; sys.argv = ['ferryman', 'devices', '--all', '--json']\n"
    code += "from ferryman.cli.main import main; main()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before it writes anything: the reader of a pipe may leave
        complaints = process.stderr.read()
        assert process.wait(timeout=60) != 0
    assert b"Traceback" not in complaints, complaints


@pytest.mark.parametrize(
    "verb", ["check", "fuzz", "fingerprint", "record --out x.capsule", "selftest", "bench", "tune"]
)
@pytest.mark.parametrize("device", ["mi300x", "mps", "cuda:77", "nonsense"])
def test_what_runs_needs_a_device_that_is_here(verb: str, device: str) -> None:
    shown = ferryman(*verb.split(), "--device", device)
    assert shown.code == 2 and device in shown.err and "Traceback" not in shown.err

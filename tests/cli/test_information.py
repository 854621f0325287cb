"""`ferryman devices`, `ops` and `doctor`."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from pathlib import Path

import pytest

from ferryman import files
from ferryman.cli import doctor, output, support
from ferryman.device_profiles import catalogue, profile
from ferryman.dispatch import registry
from ferryman.porting.report.text import table_row
from tests.cli.run import ferryman


def test_devices_here_and_the_catalogue() -> None:
    document = json.loads(ferryman("devices", "--all", "--json").out)
    assert document["here"][-1]["device"] == "cpu"
    assert {p["name"] for p in document["catalogue"]} == set(catalogue())
    text = ferryman("devices", "--all").out
    assert all(name in text for name in catalogue())


def test_a_profile_in_full_shows_every_number_and_its_source() -> None:
    done = ferryman("devices", "MI300X")
    known = profile("mi300x")
    assert done.code == 0
    for path, origin in known.provenance.items():
        assert path in done.out and origin.source in done.out
    assert json.loads(ferryman("devices", "mi300x", "--json").out) == json.loads(json.dumps(known.to_dict()))


def test_ops_answers_for_every_device_of_the_catalogue() -> None:
    document = json.loads(ferryman("ops", "--json", "--device", "mi300x", "--device", "h200").out)
    rows = {(r["op"], r["implementation"], r["device"]): r for r in document["support"]}
    assert {op for op, _, _ in rows} == set(registry.primitives())
    assert rows["rms_norm", "hip", "mi300x"]["chosen"] == ["f32", "f16", "bf16"]
    assert not rows["rms_norm", "hip", "h200"]["serves"] and rows["rms_norm", "hip", "h200"]["dtypes"] == []
    assert rows["rms_norm", "cuda", "h200"]["conditions"] == ["x contiguous in its last dimension"]


def test_exactly_one_implementation_is_first_for_each_dtype() -> None:
    for known in catalogue().values():
        for op in registry.primitives().values():
            chosen = [d for row in support.of(op, known) for d in row.chosen]
            assert sorted(chosen) == ["bf16", "f16", "f32"], (op.name, known.name)


def test_ops_asks_the_profile_and_not_the_settings() -> None:
    plain = ferryman("ops", "--device", "l4", "--op", "rope").out
    assert ferryman("ops", "--device", "l4", "--op", "rope", FERRYMAN_BACKEND="torch").out == plain


def test_doctor_says_why_each_backend_is_or_is_not_usable(tmp_path: Path) -> None:
    environment = {"FERRYMAN_CACHE_DIR": str(tmp_path), "FERRYMAN_BACKEND": "torch"}
    document = json.loads(ferryman("doctor", "--json", **environment).out)
    backends = {b["backend"]: b for b in document["backends"]}
    assert set(backends) == set(registry.backends()) - {"definition"}
    assert backends["torch"]["verdict"] == "yes"
    for backend in backends.values():
        assert bool(backend["reasons"]) == (backend["verdict"] == "no")
    assert {"python", "torch", "ferryman", "torch is built for"} <= set(document["versions"])
    assert document["caches"][0]["path"].startswith(str(tmp_path))
    assert {s["variable"]: s["origin"] for s in document["settings"]}["FERRYMAN_BACKEND"] == "environment"


def test_a_cache_is_measured_and_an_unwritable_one_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.bin").write_bytes(b"x" * 1500)
    cache = doctor._cache("ours", tmp_path)
    assert (cache["files"], cache["bytes"], cache["problem"]) == (1, 1500, None)
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)  # the superuser may write anywhere
    assert "cannot be written" in doctor._cache("ours", tmp_path / "not" / "there")["problem"]


def test_a_cache_whose_name_is_too_long_is_reported(tmp_path: Path) -> None:
    done = ferryman("doctor", "--json", FERRYMAN_CACHE_DIR=str(tmp_path / ("a" * 5000)))
    assert done.code == 0
    assert "cannot be written (File name too long)" in json.loads(done.out)["caches"][0]["problem"]


def test_advice_for_a_numpy_that_breaks_the_interpreter() -> None:
    here = [profile("cpu")]
    assert any("numpy<2.4" in a for a in doctor._advice({"triton": "3.6.0", "numpy": "2.5.2"}, here))
    assert not any("numpy" in a for a in doctor._advice({"triton": "3.6.0", "numpy": "2.3.5"}, here))
    assert not any("numpy" in a for a in doctor._advice({}, here))


def test_tables_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("name", "n"), [("a", 1), ("longer", 22), ("none", None)], title="Title", right=("n",))
    assert capsys.readouterr().out == "Title\nname     n\n------  --\na        1\nlonger  22\nnone     -\n"


def test_a_json_document_has_no_number_that_other_parsers_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    output.json_document({"least": -math.inf, "all": [math.inf, {"worst": (math.nan, 1.5)}], "where": Path("x")})
    document = files.parse(capsys.readouterr().out.encode())
    assert document == {"least": "-Infinity", "all": ["Infinity", {"worst": ["NaN", 1.5]}], "where": "x"}


def test_quantities() -> None:
    assert output.quantity(4.8e12, "B/s") == "4.8 TB/s"
    assert output.quantity(None, "B/s") is None
    assert output.quantity(12.0, "W") == "12 W"
    assert output.size(64 * 2**30) == "64 GiB"
    assert output.size(100) == "100 B"


def test_short_work_is_silent_off_a_terminal_and_long_work_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with output.progress("working") as advance:
        advance(1, 2, "half")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    monkeypatch.setattr(output, "EVERY", 0.05)
    with output.progress("working") as advance:
        advance(1, 2, "half")
        time.sleep(0.4)  # one step that is long
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("ferryman: working: 1 of 2 half after 0 s\n")
    assert 2 <= captured.err.count("\n") <= 8 and not [t for t in threading.enumerate() if t.name.endswith("(tell)")]


@pytest.mark.parametrize("text", ["a|b", "a\\|b", "a\\\\|b", "a\nb", "|", "\\", "a\r\n| b | c |"])
def test_what_stands_in_a_markdown_cell_begins_no_other(text: str) -> None:
    """Read back as GitHub's grammar does: a backslash takes the mark after it with it."""
    row = table_row(["one", text, "three"])
    assert "\n" not in row
    cells = re.findall(r"(?:\\[!-/:-@\[-`{-~]|[^|])+", row[1:-1])
    assert [re.sub(r"\\([\\|])", r"\1", cell.strip()) for cell in cells] == [
        "one",
        " ".join(text.splitlines()),
        "three",
    ]


def test_progress_draws_on_stderr_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress("working") as advance:
        advance(1, 2, "half")
    captured = capsys.readouterr()
    assert captured.out == "" and "working half" in captured.err


def test_a_table_on_a_terminal_folds_and_never_cuts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    output.table(("op", "verdict"), [("a_name_longer_than_the_terminal_is_wide", "PASS"), ("[red]x[/red]", "FAIL")])
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert all(len(line) <= 30 for line in printed.splitlines())
    assert "a_name_longer_than_the_terminal_is_wide" in "".join(line[:20].strip() for line in printed.splitlines())
    assert "[red]x[/red]" in printed, "text is not markup"

"""What comes back may be anything: refused or escaped, said, and never dropped silently."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from ferryman.errors import FerrymanError, ResultError
from ferryman.porting.ci import evidence, history, merged, signing, summary
from ferryman.porting.ci import record as records
from ferryman.porting.ci.history import History
from ferryman.porting.ci.merged import Merged
from tests.cli.run import ferryman
from tests.unit.ci_world import COMMIT, JUNIT, OTHER, World, ago, codes, repository, state

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = (
    "<script>alert(1)</script>|`x`](http://evil.example)\x1b[31m\u202e\r\n::set-output name=a::b\n::error::x @all #1"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(repository(tmp_path_factory.mktemp("documents")))


def hostile(world: World, place: Path) -> Merged:
    """Hostile text wherever a document may hold text."""
    jobs = world.jobs()
    run_record = jobs["h200"].record
    run_record["device"]["name"] = f"NVIDIA H200{HOSTILE}"
    run_record["cases"][0].update(id=HOSTILE, outcome="failed", reason=HOSTILE)
    run_record["collected"][0] = HOSTILE
    run_record["exit_code"] = 1
    jobs["gtest"].files["junit.xml"] = JUNIT.replace('name="b"', 'name="&lt;script&gt;::error::x"')
    jobs["mi300x"].folder = "<script>x"
    jobs["mi300x"].raw = "{"
    return world.judge(list(jobs.values()), place).model_copy(update={"project": HOSTILE, "notes": [HOSTILE]})


class _Tags(html.parser.HTMLParser):
    void = ("meta", "br", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_hostile_text_is_shown_and_does_nothing(world: World, tmp_path: Path) -> None:
    judgement = hostile(world, tmp_path)
    page = summary.html(judgement)
    tags = _Tags()
    tags.feed(page)
    assert tags.open == [] and not {"script", "img", "iframe"} & tags.seen
    assert "&lt;script&gt;" in page and "\x1b" not in page and "\u202e" not in page
    text = summary.markdown(judgement)
    assert "<script" not in text and "](http" not in text and "\x1b" not in text and "@all" not in text
    assert all(line.count("|") == 7 for line in text.splitlines() if line.startswith("| h200 "))
    for line in summary.commands(judgement).splitlines():
        assert line.startswith(("::error title=", "::warning title=")) and "\r" not in line
    assert "\n::set-output" not in summary.commands(judgement)  # a command begins a line
    root = ElementTree.fromstring(summary.junit(judgement))
    assert {case.get("name") for case in root.iter("testcase")} == {row.id for row in world.matrix.rows}
    badge = ElementTree.fromstring(summary.badge(judgement))
    assert badge.tag.endswith("svg") and "script" not in summary.badge(judgement)


def test_renderings_and_documents_fit_their_schemas(world: World, tmp_path: Path) -> None:
    jobs = world.jobs()
    judgement = world.judge(list(jobs.values()), tmp_path, history=[world.entry("h200"), world.entry("cpu")])
    text = merged.dumps(judgement)
    jsonschema.Draft202012Validator(json.loads((ROOT / "docs/schema/ci-merged-v1.json").read_text())).validate(
        json.loads(text)
    )
    (tmp_path / "merged.json").write_text(text)
    assert merged.load(tmp_path / "merged.json") == judgement
    raw_record = json.loads((tmp_path / "h200" / "record.json").read_text())
    schema = json.loads((ROOT / "docs/schema/ci-record-v1.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(raw_record)
    assert (
        records.dumps(records.parse(raw_record, "x"))
        == records.Record.model_validate(raw_record).model_dump_json(indent=1) + "\n"
    )
    assert "FAIL" not in summary.markdown(judgement) and "green: cpu, nvidia, amd" in summary.markdown(judgement)
    assert "green: cpu, nvidia, amd" in summary.html(judgement)


def test_long_reports_are_cut_and_say_so(world: World, tmp_path: Path) -> None:
    judgement = world.judge([], tmp_path)
    rows = [judgement.rows[0].model_copy(update={"id": f"row-{i}"}) for i in range(2000)]
    text = summary.markdown(judgement.model_copy(update={"rows": rows}))
    assert len(text) <= summary.MARKDOWN_LIMIT and "more lines; the merged document has them all" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=7), "schema version 7; this Ferryman reads up to 1"),
        (lambda d: d.update(schema_version=True), "schema_version is 'True'"),
        (lambda d: d.update(kind="other"), "is no ferryman-ci-record"),
        (lambda d: d.update(surprise=1), "is damaged: surprise"),
        (lambda d: d.update(started="yesterday"), "'yesterday' is no time"),
        (lambda d: d.update(started="2026-11-24T12:00:00"), "has no time zone"),
        (lambda d: d.update(commit="HEAD"), "is damaged: commit"),
        (lambda d: d.update(files={"../../etc/passwd": "0" * 64}), "is no file's name in its folder"),
        (lambda d: d.update(row="$(reboot)"), "is damaged: row"),
        (lambda d: d["cases"][0].update(outcome="green"), "is damaged: cases.0.outcome"),
        (lambda d: d.pop("exit_code"), "is damaged: exit_code"),
    ],
)
def test_a_damaged_record_is_told_with_what_is_wrong(world: World, tmp_path: Path, change: Any, message: str) -> None:
    job = world.job("h200")
    change(job.record)
    job.folder = "h200"
    job.write(tmp_path)
    runs, problems = evidence.collect([tmp_path])
    assert runs == [] and [p.code for p in problems] == ["unreadable"] and message in problems[0].text


def test_files_that_nobody_should_read_are_told(world: World, tmp_path: Path) -> None:
    place = tmp_path / "results"
    place.mkdir()
    (place / "deep").mkdir()
    (place / "deep" / "record.json").write_text("[" * 200_000)
    (place / "nan").mkdir()
    (place / "nan" / "record.json").write_text('{"kind": NaN}')
    (place / "binary").mkdir()
    (place / "binary" / "record.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "secret.json").write_text("{}")
    (place / "link").mkdir()
    (place / "link" / "record.json").symlink_to(tmp_path / "secret.json")
    runs, problems = evidence.collect([place, tmp_path / "absent"])
    assert runs == [] and len(problems) == 5
    assert sorted(p.code for p in problems) == ["alone", *["unreadable"] * 4]
    judgement = world.judge([], place)
    assert len(judgement.faults) == 4 and judgement.failures


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<a/>", "its root is 'a'"),
        ("<testsuite>", "is not XML"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><testsuite/>', "declares a document type"),
    ],
)
def test_junit_that_is_none_is_told(world: World, tmp_path: Path, text: str, message: str) -> None:
    job = world.job("gtest")
    job.files["junit.xml"] = text
    judgement = world.judge([job], tmp_path)
    assert any(message in w.text for w in state(judgement, "gtest").why) and "unreadable" in codes(judgement, "gtest")


def test_a_history_that_disagrees_with_another_is_refused(world: World, tmp_path: Path) -> None:
    mine, other = tmp_path / "a.json", tmp_path / "b.json"
    history.save(History(entries=[world.entry("h200")]), mine)
    history.save(History(entries=[world.entry("h200", verdict="FAIL", met=False)]), other)
    with pytest.raises(ResultError, match="histories disagree about row h200"):
        history.load([mine, other])
    assert len(history.load([mine, mine])[0].entries) == 1
    assert history.load([tmp_path / "none.json"])[0].entries == []
    other.write_text(other.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(ResultError, match="schema version 2"):
        history.load([other])
    other.write_text(mine.read_text()[:300])
    with pytest.raises(ResultError, match="is not JSON"):
        history.load([other])


def test_a_clock_that_ran_backwards_is_said_and_order_is_by_time(world: World, tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    entries = [world.entry("h200", time=ago(days=1)), world.entry("h200", sha256="d" * 64, time=ago(days=3), met=False)]
    history.save(History(entries=entries), path)
    loaded, notes = history.load([path])
    assert notes == ["row h200: its history's clock ran backwards; runs are ordered by their times"]
    assert [e.met for e in loaded.of("h200")] == [False, True]


def test_the_history_tells_since_when_a_row_fails(world: World) -> None:
    met = [True, True, False, True, False, False]
    entries = [
        world.entry("h200", sha256=f"{i:064d}", time=ago(days=10 - i), met=m, verdict="PASS" if m else "FAIL")
        for i, m in enumerate(met)
    ]
    first, success = history.first_failing(entries), history.last_success(entries)
    assert first is not None and first.time == ago(days=6)
    assert success is not None and success.time == ago(days=7)
    assert history.flips(entries) == 3
    assert history.first_failing(entries[:2]) is None
    again = history.extended(History(entries=entries), [entries[0]])
    assert len(again.entries) == len(entries), "a record is counted once"
    many = [world.entry("h200", sha256=f"{i:064d}", time=ago(days=100 - i)) for i in range(80)]
    assert [e.sha256 for e in history.extended(History(), many).of("h200")] == [e.sha256 for e in many[-history.KEPT :]]


def test_merging_the_same_results_again_adds_nothing(world: World, tmp_path: Path) -> None:
    for job in world.jobs().values():
        job.write(tmp_path / "results")
    arguments = [
        "ci",
        "merge",
        str(tmp_path / "results"),
        "--root",
        str(world.root),
        "--commit",
        COMMIT,
        "--history",
        str(tmp_path / "h.json"),
        "--out",
        str(tmp_path / "m.json"),
        "--now",
        ago(minutes=0),
    ]
    assert ferryman(*arguments).code == 0
    before = (tmp_path / "h.json").read_text()
    assert ferryman(*arguments).code == 0
    assert (tmp_path / "h.json").read_text() == before
    judgement = merged.load(tmp_path / "m.json")
    assert [r.green for r in judgement.rows] == [True, True, True, True, False, True]
    done = ferryman("ci", "summary", str(tmp_path / "m.json"), "--html", str(tmp_path / "d.html"), "--title", "T")
    assert done.code == 0 and "<h1>T" in (tmp_path / "d.html").read_text()


def test_verify_exits_with_1_for_every_vendor_that_was_not_tested(world: World, tmp_path: Path) -> None:
    arguments = ["--root", str(world.root), "--commit", COMMIT, "--now", ago(minutes=0)]
    (tmp_path / "empty").mkdir()
    done = ferryman("ci", "verify", str(tmp_path / "empty"), *arguments)
    assert done.code == 1 and "no row has evidence" in done.out
    for name, job in world.jobs().items():
        if name != "mi300x":
            job.write(tmp_path / "results")
    assert ferryman("ci", "verify", str(tmp_path / "results"), *arguments).code == 0
    done = ferryman("ci", "verify", str(tmp_path / "results"), "--require", "nvidia,amd", *arguments)
    assert done.code == 1 and "amd is required, and is NOT_RUN" in done.out
    assert ferryman("ci", "verify", str(tmp_path / "results"), "--require", "intel", *arguments).code == 2
    assert ferryman("ci", "verify", str(tmp_path / "results"), "--require", ",", *arguments).code == 2
    done = ferryman("ci", "verify", str(tmp_path / "results"), *arguments[:2], "--commit", OTHER)
    assert done.code == 1 and "other-commit" in done.out


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import subprocess

    folder = tmp_path_factory.mktemp("keys")
    lines = []
    for name, who in (("nvidia", "nvidia/*"), ("amd", "amd/mi300x"), ("cpu", "cpu/cpu")):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)], check=True)
        lines.append(f'{who} namespaces="{signing.NAMESPACE}" {(folder / f"{name}.pub").read_text().strip()}')
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / "stranger")], check=True
    )
    (folder / "allowed").write_text("\n".join(lines) + "\n")
    return folder


def test_only_signed_runs_count_where_signatures_are_required(world: World, tmp_path: Path, keys: Path) -> None:
    for name, job in world.jobs().items():
        job.write(tmp_path)
        signing.sign(tmp_path / name / "record.json", keys / world.matrix.row(name).vendor)
    judgement = world.judge([], tmp_path, signers=keys / "allowed", require=["nvidia", "amd"])
    assert judgement.failures == [] and all(row.signed for row in judgement.rows)


@pytest.mark.parametrize(
    ("what", "code"),
    [("none", "unsigned"), ("stranger", "signature"), ("nvidia", "signature"), ("edited", "signature")],
)
def test_a_forgery_of_name_and_fingerprint_needs_the_device_s_key(
    world: World, tmp_path: Path, keys: Path, what: str, code: str
) -> None:
    """A record that is right in every word, numbers included, made by someone else: without the key it is nothing."""
    for name, job in world.jobs().items():
        job.write(tmp_path)
        if name != "mi300x":
            signing.sign(tmp_path / name / "record.json", keys / world.matrix.row(name).vendor)
    forged = tmp_path / "mi300x" / "record.json"
    assert world.judge([], tmp_path, require=["amd"]).failures == [], "the numbers alone are a consistency check"
    if what != "none":
        signing.sign(forged, keys / ("amd" if what == "edited" else what))
    if what == "edited":
        forged.write_text(forged.read_text().replace('"exit_code": 0', '"exit_code":  0'))
    judgement = world.judge([], tmp_path, signers=keys / "allowed", require=["amd"])
    row = state(judgement, "mi300x")
    assert not row.met and code in codes(judgement, "mi300x") and judgement.failures


def test_nothing_is_carried_where_signatures_are_required(world: World, tmp_path: Path, keys: Path) -> None:
    from ferryman.porting.ci.changes import Decision

    out = {"mi300x": Decision(world.matrix.row("mi300x"), False, "nothing that it reaches")}
    given: dict[str, Any] = {"history": [world.entry("mi300x")], "decisions": out}
    assert state(world.judge([], tmp_path, **given), "mi300x").green
    assert not state(world.judge([], tmp_path, signers=keys / "allowed", **given), "mi300x").met


def test_signing_says_what_is_missing(tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("{}")
    with pytest.raises(FerrymanError, match="ssh-keygen sign"):
        signing.sign(path, tmp_path / "no-key")
    with pytest.raises(FerrymanError, match="is not there; --require-signed takes"):
        signing.verify(path, path, tmp_path / "none", "amd/mi300x")


def test_annotations_name_rows_that_are_not_required(world: World, tmp_path: Path) -> None:
    jobs = world.jobs()
    del jobs["mi300x"]
    text = summary.commands(world.judge(list(jobs.values()), tmp_path))
    assert re.fullmatch(r"::warning title=mi300x::NOT_RUN: absent: .*", text)

"""Profile files from elsewhere: what is inherited, and everything that is refused with file and line."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ferryman import device_profiles as dp
from ferryman.device_profiles import catalogue, profile
from ferryman.device_profiles.parse import Draft, parse
from ferryman.device_profiles.yaml_nodes import SIZE_LIMIT
from ferryman.errors import ProfileError

loading = importlib.import_module("ferryman.device_profiles.loading")

GOOD = """\
schema: 1
name: testcard
title: a test card
vendor: nvidia
arch: sm_90
family: hopper
sources:
  sheet: the datasheet of the test card
wave: {value: 32, kind: datasheet, source: sheet}
limits:
  shared_memory_per_block: {value: 48 KiB, kind: datasheet, source: sheet}
  max_threads_per_block: {value: 1024, kind: datasheet, source: sheet}
memory:
  bandwidth: {value: 1.5 TB/s, kind: datasheet, source: sheet}
peaks:
  f16: {value: 100 TFLOP/s, accumulate: f32, kind: datasheet, source: sheet}
ceilings:
  f16: {value: 90 TFLOP/s, kind: measured, source: sheet}
preferences:
  default: [cuda, torch]
"""


def write(directory: Path, text: str, name: str = "card.yaml") -> Path:
    file = directory / name
    file.write_text(text)
    return file


def test_a_good_file_loads(tmp_path: Path) -> None:
    p = dp.load(str(write(tmp_path, GOOD)))
    assert (p.name, p.wave, p.shared_memory, p.bandwidth) == ("testcard", 32, 49152, 1.5e12)
    assert p.provenance["wave"].source == "the datasheet of the test card"
    assert p.units is None and p.identity.arches == ("sm_90",)


# (what is wrong, text to replace, replacement, line of the error, what the message must say)
BAD = [
    ("unknown key", "vendor: nvidia", "vendr: nvidia", 4, "unknown key 'vendr'.*'vendor'"),
    ("unknown nested key", "bandwidth:", "bandwith:", 14, "unknown key 'bandwith' in memory.*'bandwidth'"),
    ("unknown dtype", "  f16: {value: 100", "  f61: {value: 100", 16, "unknown key 'f61' in peaks"),
    ("unknown cell key", "value: 32,", "value: 32, note: x,", 9, "unknown key 'note' in wave"),
    ("wrong unit", "1.5 TB/s", "1.5 TB", 14, "wrong unit 'TB'; required: GB/s, TB/s"),
    ("misspelt unit", "48 KiB", "48 Kib", 11, "wrong unit 'Kib'"),
    ("no unit", "1.5 TB/s", "1.5", 14, "no unit; required: GB/s, TB/s"),
    ("a unit on a count", "value: 32,", "value: 32 W,", 9, "wrong unit 'W'; required: none"),
    ("TOP/s for floats", "100 TFLOP/s", "100 TOP/s", 16, "wrong unit 'TOP/s'"),
    ("not a number", "1.5 TB/s", "fast", 14, "'fast'; required: a number"),
    ("not finite", "1.5 TB/s", ".inf TB/s", 14, "required: a number"),
    ("an exponent bomb", "value: 32,", "value: 1e999999999,", 9, "required: a plain number"),
    ("huge", "value: 32,", "value: 1e30,", 9, "whole number in range"),
    ("negative", "1.5 TB/s", "-1.5 TB/s", 14, "more than zero"),
    ("zero", "value: 32,", "value: 0,", 9, "whole number in range"),
    ("a fraction of a thread", "value: 1024,", "value: 10.5,", 12, "whole number"),
    ("wrong type: list", "1.5 TB/s", "[1.5 TB/s]", 14, "memory.bandwidth is a list; required: text"),
    ("a bare number", "{value: 1.5 TB/s, kind: datasheet, source: sheet}", "1.5 TB/s", 14, "is text; required"),
    ("no source", "32, kind: datasheet, source: sheet", "32, kind: datasheet", 9, "wave lacks 'source'"),
    ("no kind", "32, kind: datasheet, source: sheet", "32, source: sheet", 9, "wave lacks 'kind'"),
    (
        "unlisted source",
        "{value: 1.5 TB/s, kind: datasheet, source: sheet",
        "{value: 1.5 TB/s, kind: datasheet, source: shet",
        14,
        "'shet' of the sources table.*'sheet'",
    ),
    ("unknown kind", "32, kind: datasheet", "32, kind: guessed", 9, "'guessed'; required: one of datasheet"),
    ("no accumulate", "accumulate: f32, ", "", 16, "peaks.f16 lacks 'accumulate'"),
    ("unknown accumulate", "accumulate: f32", "accumulate: f33", 16, "required: one of f16, f32"),
    ("a Python tag", "a test card", "!!python/object/apply:os.system [id]", 3, "tags are refused.*python"),
    ("a harmless tag", "a test card", "!!str a test card", 3, "tags are refused"),
    ("a tag on a mapping", "wave: {", "wave: !thing {", 9, "tags are refused"),
    ("an anchor", "a test card", "&a test card", 3, "anchors are refused"),
    ("an alias", "a test card", "*a", 3, "alias"),
    ("duplicate key", "family: hopper", "name: other", 6, "duplicate key 'name'; first on line 2"),
    ("duplicate nested key", "value: 32,", "value: 32, value: 64,", 9, "duplicate key 'value'"),
    ("merge key", "memory:\n", "memory:\n  <<: {size: 1}\n", 14, "unknown key '<<' in memory"),
    ("broken YAML", "family: hopper", "family: [hopper", 7, "not valid YAML"),
    ("a tab", "  sheet: the", "\tsheet: the", 8, "not valid YAML"),
    ("two documents", "preferences:", "---\npreferences:", 19, "second YAML document"),
    ("a path as a name", "name: testcard", "name: ../../etc", 2, "not an identifier"),
    ("code as a name", "name: testcard", "name: 'a\"; b'", 2, "not an identifier"),
    ("empty name", "name: testcard", "name:", 2, "name is empty"),
    ("no schema", "schema: 1\n", "", 1, "lacks 'schema'"),
    ("a newer schema", "schema: 1", "schema: 2", 1, "schema is '2'"),
    ("unknown vendor", "vendor: nvidia", "vendor: intel", 4, "'intel'; required: one of nvidia"),
    ("another vendor's arch", "arch: sm_90", "arch: gfx942", 5, "arch is 'gfx942'; required for nvidia"),
    ("missing limits", "wave: {value: 32, kind: datasheet, source: sheet}\n", "", 1, "lacks 'wave'"),
    ("missing family", "family: hopper\n", "", 1, "lacks 'family'"),
    ("missing preferences", "preferences:\n  default: [cuda, torch]\n", "", 1, "lacks 'preferences.default'"),
    ("empty preference", "[cuda, torch]", "[]", 20, "preferences.default is empty"),
    ("repeated preference", "[cuda, torch]", "[cuda, cuda]", 20, "names something twice"),
    ("a backend that is no name", "[cuda, torch]", "[cuda, 'os.system(1)']", 20, "not an identifier"),
    ("unknown feature", "family: hopper", "family: hopper\nfeatures: [wgmmma]", 7, "'wgmmma' in features.*'wgmma'"),
    (
        "generic with a card's numbers",
        "family: hopper",
        "family: hopper\ngeneric: true",
        15,
        "generic profile may not carry memory.bandwidth",
    ),
    ("generic is not a boolean", "family: hopper", "family: hopper\ngeneric: yes", 7, "true or false"),
    ("a ceiling above the peak", "90 TFLOP/s", "110 TFLOP/s", 18, "above the peak"),
    (
        "extends nothing",
        "family: hopper",
        "family: hopper\nextends: hoper",
        7,
        "unknown profile to extend 'hoper'.*hopper",
    ),
    ("extends itself", "family: hopper", "family: hopper\nextends: testcard", 7, "circle: testcard -> testcard"),
    ("a list for a mapping", "limits:", "caches: [1]\nlimits:", 10, "caches is a list; required: a mapping"),
    ("a mapping for a key", "family: hopper", "family: hopper\n? {a: 1}\n: 2", 7, "a key must be text"),
    ("deep nesting", "a test card", "[" * 50 + "]" * 50, 3, "nested deeper"),
    (
        "fp8 flavour",
        "preferences:",
        "numerics: {fp8: {value: e4m3, kind: measured, source: sheet}}\npreferences:",
        19,
        "'e4m3'; required: one of e4m3fn",
    ),
    (
        "tile setting",
        "preferences:",
        "tiles: {linear: {config: {block: 'a b'}, kind: measured, source: sheet}}\npreferences:",
        19,
        "not an identifier",
    ),
    (
        "threshold",
        "preferences:",
        "thresholds: {moe.rows: {value: 2.5, kind: measured, source: sheet}}\npreferences:",
        19,
        "thresholds.moe.rows is '2.5'; required: a whole number in range",
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_file_is_refused_with_file_and_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert old in GOOD
    file = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ProfileError, match=message) as caught:
        dp.load(file)
    assert str(caught.value).startswith(f"{file}:{line}: "), str(caught.value)


def test_a_large_value_makes_no_large_message(tmp_path: Path) -> None:
    many = ", ".join(f"k{n}: 0" for n in range(20_000))
    with pytest.raises(ProfileError) as error:
        dp.load(write(tmp_path, GOOD.replace("schema: 1", f"schema: {{{many}}}")))
    assert len(str(error.value)) < 1000 and "schema is" in str(error.value) and "reads 1" in str(error.value)


def test_the_python_tag_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    text = GOOD.replace("a test card", f"!!python/object/apply:pathlib.Path.touch [{trap}]")
    with pytest.raises(ProfileError):
        dp.load(write(tmp_path, text))
    assert not trap.exists()


def test_an_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    start = time.process_time()
    with pytest.raises(ProfileError, match="anchors are refused"):
        dp.load(write(tmp_path, "\n".join(lines)))
    assert time.process_time() - start < 1


def test_deep_nesting_is_refused_at_once(tmp_path: Path) -> None:
    start = time.process_time()
    with pytest.raises(ProfileError):
        dp.load(write(tmp_path, "title: " + "[" * 200_000))
    assert time.process_time() - start < 2  # reading it all takes 10 s


def test_size_encoding_and_missing_files(tmp_path: Path) -> None:
    dp.load(write(tmp_path, GOOD + "#" * (SIZE_LIMIT - len(GOOD))))
    with pytest.raises(ProfileError, match=f":1: the file is larger than {SIZE_LIMIT} bytes"):
        dp.load(write(tmp_path, GOOD + "#" * (SIZE_LIMIT - len(GOOD) + 1)))
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"schema: 1\ntitle: \xe9\n")
    with pytest.raises(ProfileError, match=r"latin\.yaml:2: not UTF-8"):
        dp.load(file)
    with pytest.raises(ProfileError, match=r"absent\.yaml:1: cannot be read"):
        dp.load(tmp_path / "absent.yaml")
    with pytest.raises(ProfileError, match="cannot be read"):
        dp.load(tmp_path)
    with pytest.raises(ProfileError, match="empty"):
        dp.load(write(tmp_path, "# nothing\n"))
    with pytest.raises(ProfileError, match="the file is a list"):
        dp.load(write(tmp_path, "- a\n"))
    with pytest.raises(ProfileError, match="not valid YAML"):
        dp.load(write(tmp_path, "title: \0\n"))


def test_the_python_parser_refuses_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert dp.load(write(tmp_path, GOOD)).wave == 32
    for _, old, new, _, message in BAD:
        with pytest.raises(ProfileError, match=message if "valid YAML" not in message else "card.yaml:"):
            dp.load(write(tmp_path, GOOD.replace(old, new, 1)))


def drafts(*texts: str) -> list[Draft]:
    return [parse(text.encode(), f"file{i}.yaml") for i, text in enumerate(texts)]


def test_extends_in_a_circle_is_named() -> None:
    def member(name: str, base: str) -> str:
        return GOOD.replace("testcard", name).replace("family: hopper", f"extends: {base}")

    with pytest.raises(ProfileError, match=r"file\d.yaml:6: extends runs in a circle: a -> b -> c -> a"):
        loading.build(drafts(member("a", "b"), member("b", "c"), member("c", "a")))


def test_extends_inherits_facts_but_never_the_identity() -> None:
    base = GOOD.replace("family: hopper", "family: hopper\naliases: [base]\nidentity: {names: [NVIDIA Test]}")
    child = (
        "schema: 1\nname: child\ntitle: a slower mode\nextends: base\npower_mode: 30w\n"
        "sources: {here: measured on the desk}\nceilings: null\nfeatures: [tma]\n"
        "preferences: {linear: [torch]}\n"
        "memory: {bandwidth: {value: 750 GB/s, kind: measured, source: here}}\n"
    )
    built = loading.build(drafts(child, base))
    p = built["child"]
    assert (p.arch, p.wave, p.bandwidth, p.power_mode) == ("sm_90", 32, 0.75e12, "30w")
    assert p.peaks == built["testcard"].peaks and not p.ceilings
    assert p.provenance["wave"].source == "the datasheet of the test card"
    assert p.provenance["memory.bandwidth"].source == "measured on the desk"
    assert p.preference("linear") == ("torch",) and p.preference("rms_norm") == ("cuda", "torch")
    assert p.features == {"tma"} and p.identity.names == () and p.aliases == ()
    assert p.identity_key() != built["testcard"].identity_key()


def test_another_count_or_memory_that_identifies_a_card_is_not_inherited(tmp_path: Path) -> None:
    for base, attribute in (("rx7900xtx", "units"), ("orin-agx", "memory")):
        assert getattr(profile(base).identity, attribute) is not None
        p = dp.load(write(tmp_path, f"schema: 1\nname: sibling\ntitle: a sibling\nextends: {base}\n"))
        assert getattr(p.identity, attribute) is None
        assert f"identity.{attribute}" not in p.provenance
        assert p.bandwidth == profile(base).bandwidth


def test_names_must_mean_one_thing() -> None:
    with pytest.raises(ProfileError, match=r"file1.yaml:2: a second profile named 'testcard'.*file0.yaml"):
        loading.build(drafts(GOOD, GOOD))
    other = GOOD.replace("name: testcard", "name: other\naliases: [testcard]")
    with pytest.raises(ProfileError, match=r"file1.yaml:3: 'testcard' already means 'testcard'"):
        loading.build(drafts(GOOD, other))


class EntryPoint:
    name, value, group = "mine", "somewhere:DATA", "ferryman.device_profiles"

    def __init__(self, target: object) -> None:
        self.target = target

    def load(self) -> object:
        return self.target


Install = Callable[[object], None]


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def install(target: object) -> None:
        monkeypatch.setattr(loading.metadata, "entry_points", lambda group: [EntryPoint(target)])
        loading._drafts.cache_clear()
        loading._catalogue.cache_clear()

    yield install
    monkeypatch.undo()
    loading._drafts.cache_clear()
    loading._catalogue.cache_clear()


def test_an_entry_point_adds_profiles(entry_point: Install, tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("family: hopper", "extends: hopper"))
    entry_point(str(tmp_path))
    assert profile("TestCard").shared_memory_per_unit == 228 * 1024
    assert "h200" in catalogue()


def test_an_entry_point_may_not_replace_a_profile(entry_point: Install, tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("testcard", "h200"))
    entry_point(tmp_path)
    assert profile("h200").title != "Test Card" and "h200" in catalogue()
    assert "card.yaml:2: a second profile named 'h200'" in loading.broken()["mine"]


def test_an_entry_point_that_gives_no_directory_is_named(entry_point: Install, tmp_path: Path) -> None:
    entry_point(tmp_path / "absent")
    assert "h200" in catalogue() and "entry point mine = somewhere:DATA" in loading.broken()["mine"]

"""The HTML report: complete, valid, self-contained, safe from a document's text, never greener than it."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
import torch

from ferryman.dispatch import registry
from ferryman.errors import BackendUnavailable
from ferryman.porting.judging import results
from ferryman.porting.judging.parity import check_cell
from ferryman.porting.report import bins, html, plots, view
from ferryman.porting.report.html import headline, tables_page
from ferryman.porting.report.text import MEANING, place, verdict
from ferryman.porting.running.cells import tier_cases
from tests.unit.documents import EDGES, FULL, HOSTILE, cell, counts, document, right, stale, timing

VOID = {"meta", "br", "img", "hr", "input", "link", "col", "wbr"}


class Page(HTMLParser):
    """Elements as they nest; a wrong end tag is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.errors: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.chips: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if len({name for name, _ in attrs}) != len(attrs):
            self.errors.append(f"{tag} has an attribute twice")
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if "svg" not in self.stack:
            self.errors.append(f"{tag} is closed in itself outside of an SVG")

    def handle_endtag(self, tag: str) -> None:
        if not self.stack or self.stack.pop() != tag:
            self.errors.append(f"</{tag}> closes {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "style":
            return
        self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def full() -> str:
    return html(FULL)


def _sound(text: str) -> Page:
    page = Page(text)
    assert page.errors == [] and page.stack == []
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids)), sorted(i for i in ids if ids.count(i) > 1)[:5]
    targets = [a["href"] or "" for a in page.of("a")]
    assert {t[1:] for t in targets} <= set(ids)
    assert {a.get("scope") for a in page.of("th")} <= {"col", "row"}
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style and "url(" not in style and "@font-face" not in style
    assert set(re.findall(r"url\(([^)#]*)#", text)) <= {""}
    return page


def test_the_page_is_valid_and_needs_nothing_else(full: str) -> None:
    page = _sound(full)
    assert len(page.of("a")) > 10 and page.of("details")
    assert full.startswith('<!DOCTYPE html>\n<html lang="en">')
    policy = next(m["content"] for m in page.of("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert any(m.get("name") == "viewport" for m in page.of("meta"))


def test_someone_with_the_page_alone_learns_what_was_compared_and_what_is_wrong(full: str) -> None:
    text = Page(full).text
    facts = FULL.environment
    for word in (
        facts.profile,
        facts.device,
        facts.versions["torch"],
        facts.time,
        "deterministic_algorithms",
        "float64",
    ):
        assert word in text, word
    for name, meaning in MEANING.items():
        assert name in text and meaning in text
    assert "2 FAIL, 1 MISTRUSTED, 1 QUARANTINED cells in 3 of 7 op x implementation rows" in text
    # the failure: gate, element, value, expected, bound, distance, pattern
    for word in (
        "G2 componentwise fails:",
        "y[3, 127]",
        "1.5",
        "1.25",
        "0.00309",
        "81 bounds",
        "RMS error is 9.5 times",
    ):
        assert word in text, word
    assert text.count("last column of every row is stale") >= 2, "in the header and with the failure"
    assert "not finite" in text and "ptxas: fatal" in text and "the op's bound is not finite" in text
    # what did not run, and why a gate does not apply
    for word in (
        "cuda does not serve cpu devices",
        "left out",
        "x.stride[-1] is 2",
        "for gfx942",
        "too few finite elements",
    ):
        assert word in text, word
    assert "Not judged in this document: G1 exact probes, G4 bias, G6 batch invariance, G7 gradients" in text
    assert "numerics.fp8.bits contradicted 14 24 at K = 32" in text and "1 contradicted, 1 confirmed" in text
    assert "60%" in text and "ceilings.copy (measured)" in text


def test_gates_are_counted_by_op_and_implementation() -> None:
    judged, unjudged = view.gates_of(FULL)
    assert judged == ["G0", "G2", "G3", "G5"] and unjudged == ["G1", "G4", "G6", "G7"]
    notes = view.Notes()
    rows = {(r.op, r.implementation): r for r in view.gate_rows(FULL, judged, notes)}
    torch_row = rows["rms_norm", "torch"]
    assert (torch_row.ran, torch_row.cells) == (4, 4)
    tallies = {g: (e.passed, e.failed, e.inapplicable) for g, e in zip(judged, torch_row.entries, strict=True)}
    assert tallies == {"G0": (3, 1, 0), "G2": (2, 1, 0), "G3": (0, 1, 2), "G5": (2, 0, 0)}
    assert [list(notes.texts)[n - 1] for n in torch_row.entries[2].notes] == [
        "too few finite elements for a confidence interval (256)"
    ]
    assert rows["softmax", "hip"].ran == 0 and rows["softmax", "hip"].reason == "x.stride[-1] is 2"


def test_a_document_s_text_never_becomes_markup() -> None:
    timings = (timing(case=HOSTILE, source=HOSTILE, bound_by=HOSTILE),)
    gates = {**stale().gates, "G4": {"outcome": "n/a", "reason": HOSTILE}}
    evil = document(
        stale(
            case=HOSTILE,
            reason=HOSTILE,
            reading=HOSTILE,
            gates=gates,
            device=HOSTILE,
            accumulation=HOSTILE,
            roundings=[HOSTILE],
            capsule=HOSTILE,
        ),
        right(case=HOSTILE, reason=HOSTILE, gates=gates, verdict="SIMULATED", implementation="a:b+c.d"),
        cell("NOT_RUN", reason=HOSTILE, case=HOSTILE, implementation="cuda"),
        cell("QUARANTINED", reason=HOSTILE, implementation="hip"),
        timings=timings,
    )
    facts = evil.environment.model_copy(
        update={
            "device_name": HOSTILE,
            "profile": HOSTILE,
            "versions": {HOSTILE: HOSTILE},
            "flags": {HOSTILE: HOSTILE},
            "platform": HOSTILE,
            "time": HOSTILE,
            "tier": HOSTILE,
            "arch": HOSTILE,
            "vendor": HOSTILE,
        },
    )
    text = html(evil.model_copy(update={"environment": facts}))
    page = _sound(text)
    assert "<script" not in text and page.text.count("<script>alert('x')</script>") > 20
    assert not set(text) & {"\x1b", "\x00", "\u202e"}
    tables = [(HOSTILE, [HOSTILE], [[HOSTILE], [HOSTILE]])]
    _sound(tables_page(HOSTILE, "FAIL", HOSTILE, [HOSTILE], [HOSTILE], tables))


def _chips(text: str, section: str = "") -> list[str]:
    """The verdicts that the page shows, without the legend's."""
    if section:
        text = text[text.index(f'<section id="{section}">') :]
        text = text[: text.index("</section>")]
    else:
        legend = text.index("Verdicts of a cell")
        text = text[:legend] + text[text.index("</table>", legend) :]
    return [words.split()[1] for words in re.findall(r'class="(verdict [^"]+)"', text)]


@pytest.mark.parametrize("name", [v for v in MEANING if v != "PASS"])
def test_only_what_passed_is_green(name: str) -> None:
    only = document(cell(name, reason="why", implementation="hip"))
    text = html(only)
    chips = _chips(text)
    assert chips and set(chips) == {name} and verdict(only) == name
    assert "passed every gate" not in Page(text).text
    style = text[: text.index("</style>")]
    green = re.findall(r"^([^{}]*)\{[^{}]*var\(--pass\)[^{}]*\}", style, re.MULTILINE)
    assert green == [".PASS "], "no other verdict has its colour"
    if name in ("NOT_RUN", "UNIMPLEMENTED", "COMPILED_ONLY"):
        assert "nothing ran, so nothing is shown to be right" in headline(only)
        assert "that alone shows nothing to be right" in Page(text).text


def test_what_did_not_run_is_part_of_a_good_headline() -> None:
    good = document(right(), cell("NOT_RUN", implementation="cuda"), cell("NOT_RUN", implementation="hip"))
    assert verdict(good) == "PASS"
    assert headline(good) == "1 cells ran on this device and passed every gate that applies; 2 did not run."
    assert _chips(html(good), "overview") == ["PASS", "NOT_RUN", "NOT_RUN"]
    empty = document()
    assert verdict(empty) == "NOT_RUN" and "nothing ran" in headline(empty)
    _sound(html(empty))


def test_equal_documents_give_equal_pages(full: str) -> None:
    assert html(FULL) == full


def test_a_large_page_stays_small_and_closed() -> None:
    ops = [f"op_{i}" for i in range(20)]
    cells = [
        right(op=op, implementation=i, dtype=d, case=f"case_number_{n}", ratio=0.9 - n / 40, reduction=64 * (n + 1))
        for op in ops
        for i in ("torch", "triton", "cuda", "definition")
        for d in ("float32", "bfloat16")
        for n in range(13)
    ]
    text = html(document(*cells))
    assert len(cells) == 2080 and len(text.encode()) <= 2 * 2**20
    page = _sound(text)
    details = [a for a in page.of("details") if str(a.get("id", "")).startswith("op--")]
    assert len(details) == 20 and not any("open" in a for a in details)
    assert len(page.of("tr")) > 2080, "every cell is there"


def test_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "FAILURES_SHOWN", 3)
    monkeypatch.setattr(view, "CELLS_SHOWN", 4)
    monkeypatch.setattr(view, "GROUPS_SHOWN", 1)
    monkeypatch.setattr(view, "NOTES_SHOWN", 2)
    cells = [stale(case=f"c{i}") for i in range(10)] + [right(case=f"c{i}", op="softmax") for i in range(9)]
    cells += [stale(op="softmax", implementation="cuda"), stale(op="rope", implementation="cuda")]
    cells += [cell("NOT_RUN", op="rope", implementation="hip", reason=f"reason {i}") for i in range(5)]
    text = Page(html(document(*cells))).text
    for words in (
        "The worst 3 of the 10 wrong cells",
        "And 7 more; the JSON",
        "And 5 more; the JSON",
        "And 2 more op x implementation rows",
        "And 3 more reasons",
    ):
        assert words in text, words


def test_without_matplotlib_the_page_says_so(monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = html(FULL)
    _sound(text)
    assert (
        "<svg" not in text and text.count("matplotlib is not installed (pip install &#39;ferryman[report]&#39;)") == 3
    )
    assert "<svg" in full and "matplotlib is not installed" not in full
    with pytest.raises(BackendUnavailable, match=r"ferryman\[report\]"):
        plots.roofline(FULL)


def test_without_jinja2_a_typed_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BackendUnavailable, match=r"ferryman\[report\]"):
        html(FULL)


def test_plots_are_sound_follow_the_page_s_colours_and_keep_their_text(full: str) -> None:
    drawn = re.findall(r"<svg .*?</svg>", full, re.DOTALL)
    assert len(drawn) >= 5
    for text in drawn:
        root = ET.fromstring(text.replace("xlink:href", "href"))
        assert root.get("role") == "img" and root.get("aria-label") and root.get("viewBox")
        assert "var(--" in text and not re.search(r"#0[1-4]0[2-5]0[3-6]|#a10b0", text)
    words = " ".join(drawn)
    assert (
        "torch f32" in words
        and "error / bound" in words
        and "K, terms summed" in words
        and "% of the roofline" in words
    )


def test_the_bins_of_the_cells_of_a_line_add_up() -> None:
    histogram = bins.bins([right(ratio=0.5), stale()], EDGES)
    assert histogram is not None and sum(n for _, _, n in histogram) == 20_000
    assert histogram[0][0] == 0.0 and histogram[-1][1] == float("inf")
    assert sum(n for low, _, n in histogram if low >= 1) == sum(
        counts(81.0)[i + 1] for i, e in enumerate(EDGES) if e >= 1
    )
    assert bins.bins([right(distribution=[1, 2, 3])], EDGES) is None, "another document's bins are not mixed in"
    assert bins.bins([cell("PASS")], EDGES) is None


def test_the_errors_are_a_table_too() -> None:
    rows = {(s.op, s.implementation, s.dtype): s for s in bins.spreads(FULL)}
    mixed = rows["rms_norm", "torch", "f32"]
    assert (mixed.cells, mixed.elements, mixed.worst) == (3, "20,000", "inf")
    assert int(mixed.beyond.replace(",", "")) == sum(counts(81.0)[i + 1] for i, edge in enumerate(EDGES) if edge >= 1)
    exact = [(0.0, 0.5, 998), (0.5, 1.0, 1), (1.0, float("inf"), 1)]
    assert [bins.below(exact, share) for share in (0.5, 0.998, 0.999, 1.0)] == [
        "< 0.5",
        "< 0.5",
        "< 1",
        "beyond all bins",
    ]
    assert bins.below([], 0.5) == "-"


def test_a_document_of_the_first_version_has_no_distribution_and_still_shows_ratios() -> None:
    old = document(right(distribution=[], reduction=None), edges=())
    text = html(old)
    _sound(text)
    assert "no distribution of elements" in Page(text).text
    assert "does not say over how many terms" in Page(text).text


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_and_marks_have_the_contrast_that_wcag_asks_for() -> None:
    css = (resources.files("ferryman.porting.report") / "templates" / "report.css").read_text("utf-8")
    themes = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block)) for block in css.split(":root {")[1:3]]
    assert len(themes) == 2 and themes[0] != themes[1]
    for theme in themes:
        pairs = [("text", "page"), ("text", "panel"), ("soft", "panel"), ("link", "panel"), ("wrong", "panel")]
        pairs += [(name, f"{name}-back") for name in ("pass", "wrong", "doubt", "absent")]
        for a, b in pairs:
            assert _contrast(theme[a], theme[b]) >= 4.5, (a, b)
        for i in range(6):
            assert _contrast(theme[f"series-{i}"], theme["panel"]) >= 3, i


def test_a_wrong_kernel_s_page_names_gate_element_and_bound() -> None:
    """From the engine's own cells, not from made ones."""
    op = registry.primitive("rms_norm")
    line = next(i for i in registry.implementations("rms_norm") if i.name == "torch")
    launch = registry.launcher(line)

    def last_column_lost(*arguments: Any) -> Any:
        out = launch(*arguments).clone()
        out[..., -1] = 0.5
        return out

    cases = [c for c in tier_cases(op, "small") if c.name in ("prime", "three_dims", "wide")]
    assert len(cases) == 3
    cells = [check_cell(op, line, c, torch.float32, kernel=k) for c in cases for k in (None, last_column_lost)]
    assert [c.verdict for c in cells] == ["PASS", "FAIL"] * 3
    text = html(document(*cells, edges=()).model_copy(update={"edges": results.results(FULL.environment, cells).edges}))
    page = _sound(text)
    for wrong_cell in cells[1::2]:
        assert wrong_cell.worst is not None and wrong_cell.ratio is not None
        assert place(wrong_cell.worst) in page.text and f"{wrong_cell.worst.expected:.9g}" in page.text
    assert "G2 componentwise fails:" in page.text and "wrong: torch" in page.text
    assert "3 of 6 cells are wrong" in page.text

"""A result document as one HTML page: no script, no network, readable alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ferryman.errors import BackendUnavailable
from ferryman.porting.judging.results import Results, Verdict
from ferryman.porting.report import bins, plots, view
from ferryman.porting.report.text import ABSENT, GATES, MEANING, WRONG, plain, verdict

_HERE = "ferryman.porting.report"


@dataclass(frozen=True)
class Pictures:
    """The plots, or why there are none."""

    reduction_key: str = ""
    roofline_key: str = ""
    distribution: list[plots.Plot] = field(default_factory=list)
    reduction: list[plots.Plot] = field(default_factory=list)
    roofline: list[plots.Plot] = field(default_factory=list)
    note: str = ""
    binned: bool = False


def html(document: Results, progress: Callable[[int, int, str], None] | None = None) -> str:
    """The page. Without matplotlib it says so in the place of the plots; without jinja2 BackendUnavailable is raised.

    progress(done, total, label) is called after each plot.
    """
    notes = view.Notes()
    judged, unjudged = view.gates_of(document)
    groups, groups_left = view.groups(document)
    missing, missing_left = view.missing(document)
    counts = view.tally(document.cells)
    return render(
        "report.html.j2",
        document=document,
        facts=document.environment,
        verdict=verdict(document),
        headline=headline(document),
        counts=[(name, MEANING[name], counts.get(name, 0)) for name in MEANING],
        gates=[(name, *GATES[name]) for name in judged],
        unjudged=[(name, GATES[name][0]) for name in unjudged],
        overview=view.overview(document),
        gate_rows=view.gate_rows(document, judged, notes),
        groups=groups,
        groups_left=groups_left,
        shown_most=view.FAILURES_SHOWN,
        missing=missing,
        missing_left=missing_left,
        listings=view.listings(document, notes),
        notes=notes,
        timings=view.timing_rows(document.timings),
        numerics=Counter(f.outcome for f in document.numerics).most_common(),
        roofline=any(t.floor_seconds for t in document.timings),
        sources=view.sources(document.timings),
        spreads=bins.spreads(document),
        pictures=_pictures(document, progress),
        capsules=sorted({c.capsule for c in document.cells if c.capsule}),
    )


def tables_page(
    title: str,
    verdict: Verdict,
    summary: str,
    reasons: Sequence[str],
    sentences: Sequence[str],
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
) -> str:
    """A page of plain tables, (title, headers, rows) each, in the same dress: the check of a model uses it.

    reasons: why the verdict is what it is, at the top. sentences: what no table holds, at the end.
    """
    return render(
        "tables.html.j2",
        title=title,
        verdict=verdict,
        summary=summary,
        reasons=reasons,
        sentences=sentences,
        tables=tables,
    )


def headline(document: Results) -> str:
    """The finding in one sentence; what did not run is always part of it."""
    counts = view.tally(document.cells)
    wrong = [f"{counts[v]:,} {v}" for v in WRONG if v in counts]
    absent = sum(counts.get(v, 0) for v in ABSENT)
    passed, simulated = counts.get("PASS", 0), counts.get("SIMULATED", 0)
    parts = []
    if wrong:
        rows = sum(1 for row in document.summary if any(v in row.counts for v in WRONG))
        parts.append(f"{', '.join(wrong)} cells in {rows:,} of {len(document.summary):,} op x implementation rows")
    if passed:
        parts.append(f"{passed:,} cells ran on this device and passed every gate that applies")
    if simulated:
        parts.append(f"{simulated:,} cells were only simulated and did not run on the device")
    if absent:
        parts.append(f"{absent:,} did not run")
    if not passed and not simulated and not wrong:
        parts.append("nothing ran, so nothing is shown to be right")
    return "; ".join(parts) + "."


def _pictures(document: Results, progress: Callable[[int, int, str], None] | None) -> Pictures:
    if not plots.available():
        return Pictures(note="The plots are left out: matplotlib is not installed (pip install 'ferryman[report]').")
    ops = len({c.op for c in document.cells})
    names = plots.implementations(document)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, 2 * ops, "plots")

    edges = document.edges or None
    binned = edges is not None and any(len(c.distribution) == len(edges) + 1 for c in document.cells)
    return Pictures(
        reduction_key=plots.key("key-k", names, [c.dtype for c in document.cells]),
        roofline_key=plots.key("key-t", names, []),
        distribution=plots.distribution(document, edges, advance),
        reduction=plots.against_reduction(document, advance),
        roofline=plots.roofline(document),
        binned=binned,
    )


def render(template: str, **values: Any) -> str:
    """A page from a template of ``templates/``; every text of ``values`` is escaped. Raises BackendUnavailable without
    jinja2, which the extra ``report`` brings."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise BackendUnavailable("HTML needs jinja2; pip install 'ferryman[report]'") from error

    def clean(value: Any) -> Any:
        """Text from a document loses what HTML cannot hold; what a template made is left as it is."""
        return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_HERE, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["commas"] = lambda n: f"{n:,}"
    # the plots' own text goes through matplotlib, which escapes it
    environment.filters["svg"] = Markup
    style = (resources.files(_HERE) / "templates" / "report.css").read_text("utf-8")
    page = environment.get_template(template).render(css=Markup(style), **values)
    return page if page.endswith("\n") else page + "\n"

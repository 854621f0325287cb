"""How every plot of a report is drawn: colours that follow the page's, markers and dashes, and SVG for a page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from xml.sax.saxutils import escape

from ferryman.errors import BackendUnavailable
from ferryman.porting.report.text import SHORT

# matplotlib needs colours to draw with; these stand for the page's variables and appear nowhere in it.
TEXT, GRID, BAD, _PAGE = "#010203", "#020304", "#030405", "#040506"
SERIES = ("#a10b01", "#a10b02", "#a10b03", "#a10b04", "#a10b05", "#a10b06")
_VARIABLES = {TEXT: "--text", GRID: "--line", BAD: "--wrong", _PAGE: "--panel"} | {
    colour: f"--series-{i}" for i, colour in enumerate(SERIES)
}
_KNOWN = ("torch", "triton", "cuda", "hip", "definition")  # each keeps its colour and marker from report to report
MARKERS = ("o", "s", "^", "v", "D", "X")
DASHES: dict[str, Any] = {"float32": "-", "float16": (0, (1, 1.2)), "bfloat16": (0, (4, 1.5))}
_WIDTH = 3.5  # inches at 96 pixels: 336


@contextmanager
def drawing(salt: str) -> Iterator[None]:
    """matplotlib with its own defaults, whatever the user's are, and ids that depend on the plot only."""
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailable("plots need matplotlib; pip install 'ferryman[report]'") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": salt,
                "font.size": 8.0,
                "font.family": "DejaVu Sans",
                "text.parse_math": False,
                "axes.edgecolor": GRID,
                "axes.labelcolor": TEXT,
                "xtick.color": GRID,
                "ytick.color": GRID,
                "xtick.labelcolor": TEXT,
                "ytick.labelcolor": TEXT,
                "text.color": TEXT,
                "grid.color": GRID,
                "grid.linewidth": 0.5,
                "axes.linewidth": 0.6,
                "hatch.color": BAD,
                "hatch.linewidth": 0.6,
                "legend.frameon": False,
                "axes.spines.top": False,
                "axes.spines.right": False,
            }
        )
        yield


def canvas(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def element(figure: Any, name: str, title: str) -> str:
    """The figure as an element for a page: no prologue, ids of its own, the page's colours, and a label."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    FigureCanvasSVG(figure)
    figure.set_dpi(72)  # SVG's own
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")  # savefig would draw all of it once only to lay it out
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{name}-", text)
    text = re.sub(
        r' id="[^"]*(?:figure|axes|patch|text|line2d|xtick|ytick|matplotlib\.axis|legend|PathCollection'
        r'|FillBetweenPolyCollection|LineCollection|PolyCollection)_\d+"',
        "",
        text,
    )
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = text.replace("'DejaVu Sans'", "system-ui, sans-serif")
    # the sizes are the viewBox's: the page decides how large a plot is
    label = escape(title, {'"': "&quot;"})
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>',
        lambda m: f'<svg viewBox="{m[1]}" role="img" aria-label="{label}">',
        text,
        count=1,
    )
    return re.sub(r"\n\s*", "\n", text).strip()


def style_of(implementation: str, others: Sequence[str]) -> int:
    """A number for an implementation's colour and marker: the known ones' own, then the rest in order."""
    if implementation in _KNOWN:
        return _KNOWN.index(implementation)
    rest = [name for name in others if name not in _KNOWN]
    return (len(_KNOWN) + rest.index(implementation)) % len(SERIES)


def dtypes_of(names: set[str]) -> list[str]:
    return [d for d in SHORT if d in names] + sorted(names - set(SHORT))

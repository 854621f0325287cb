"""How every plot of a report is drawn: SVG as text, in colours that follow the page's, with a frame, axes and marks.

Lengths are points of the picture's own (72 to the inch). The page decides how large a picture is shown. The browser has
the font, so how wide a text is can only be estimated. One that is longer than its room is given the room's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from ferryman.porting.report.text import SHORT, plain

# the page's variables, for light, dark and print
TEXT, GRID, BAD = "var(--text)", "var(--line)", "var(--wrong)"
SERIES = tuple(f"var(--series-{i})" for i in range(6))
_KNOWN = ("torch", "triton", "cuda", "hip", "definition")  # each keeps its colour and marker from report to report
MARKERS = ("circle", "square", "up", "down", "diamond", "plus")
DASHES = {"float32": "", "float16": "1 1.3", "bfloat16": "4 1.6"}
BOUND = "3 1.6"
WIDTH = 252.0  # of every picture
_FONT = 8.0
_EM = 0.62  # of a letter, in the sizes of its font: what digits take in a wide one
_ROOM = 0.5  # of the width, at most, for the labels beside a frame
_OUTLINES = {  # of half a marker's size
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "up": ((0, -1), (1, 1), (-1, 1)),
    "down": ((0, 1), (1, -1), (-1, -1)),
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    "plus": (
        *((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4)),
        *((0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4), (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4)),
    ),
    "right": ((-1, -1), (1, 0), (-1, 1)),
}
_STROKES = {
    "tick": (((0, -1), (0, 1)),),
    "cross": (((-1, -1), (1, 1)), ((-1, 1), (1, -1))),
}

Point = tuple[float, float]
Tick = tuple[float, str]


def width_of(text: str, size: float = _FONT) -> float:
    """About how wide a text is in a browser's font."""
    return _EM * size * len(text)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


@dataclass
class Picture:
    """What was drawn so far; ``name`` begins the ids in it, so that a page may have many."""

    name: str
    title: str
    height: float
    parts: list[str] = field(default_factory=list)
    hatched: bool = False

    def line(self, points: Sequence[Point], colour: str, width: float = 0.9, dashes: str = "") -> None:
        if points:
            dashed = f";stroke-dasharray:{dashes}" if dashes else ""
            self.parts.append(
                f'<path d="{_path(points)}" style="fill:none;stroke:{colour};stroke-width:{width}{dashed}"/>'
            )

    def area(self, points: Sequence[Point], colour: str) -> None:
        self.parts.append(f'<path d="{_path(points)}Z" style="fill:{colour};fill-opacity:0.75"/>')

    def hatch(self, points: Sequence[Point]) -> None:
        """An area that is wrong: stripes and an outline, which tell it apart without their colour."""
        self.hatched = True
        style = f"fill:url(#{self.name}-hatch);stroke:{BAD};stroke-width:0.6"
        self.parts.append(f'<path d="{_path(points)}Z" style="{style}"/>')

    def mark(self, kind: str, x: float, y: float, size: float, colour: str, width: float = 1.0) -> None:
        """One of MARKERS or "right", filled, or a "tick" or "cross" of lines so wide."""
        half = size / 2
        if kind == "circle":
            self.parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(half)}" style="fill:{colour}"/>')
        elif kind in _OUTLINES:
            outline = _path((x + half * dx, y + half * dy) for dx, dy in _OUTLINES[kind])
            self.parts.append(f'<path d="{outline}Z" style="fill:{colour}"/>')
        else:
            strokes = "".join(_path((x + half * dx, y + half * dy) for dx, dy in own) for own in _STROKES[kind])
            self.parts.append(f'<path d="{strokes}" style="stroke:{colour};stroke-width:{width}"/>')

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: float = _FONT, room: float = math.inf
    ) -> None:
        """A text from its base line on; one that may be wider than ``room`` gets that width."""
        squeezed = f' textLength="{_n(room)}" lengthAdjust="spacingAndGlyphs"' if width_of(text, size) > room else ""
        style = f"font:{_n(size)}px system-ui,sans-serif;fill:{TEXT};text-anchor:{anchor}"
        self.parts.append(f'<text x="{_n(x)}" y="{_n(y)}" style="{style}"{squeezed}>{escape(plain(text))}</text>')

    def svg(self) -> str:
        """The picture as an element for a page, with a label for who does not see it."""
        stripes = (
            f'<defs><pattern id="{self.name}-hatch" width="3" height="3" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><path d="M0 0V3" style="stroke:{BAD};stroke-width:1.2"/></pattern></defs>'
        )
        label = escape(plain(self.title), {'"': "&quot;"})
        head = f'<svg viewBox="0 0 {_n(WIDTH)} {_n(self.height)}" role="img" aria-label="{label}">'
        return "\n".join([head, *([stripes] if self.hatched else ()), *self.parts, "</svg>"])


@dataclass(frozen=True)
class Scale:
    """From numbers ``low`` to ``high`` to places ``start`` to ``end``, evenly or by logarithms."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log2(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((value - low) / (high - low) if high != low else 0.5)


@dataclass
class Frame:
    """A picture with an axis below and labels on the left."""

    picture: Picture
    x: Scale
    y: Scale

    def below(self, ticks: Sequence[Tick], label: str, grid: bool = False) -> None:
        """The axis of x with its labels, those that have room, and what it shows."""
        bottom, top = max(self.y.start, self.y.end), min(self.y.start, self.y.end)
        self.picture.line([(self.x.start, bottom), (self.x.end, bottom)], GRID, 0.6)
        free = -math.inf
        for value, text in ticks:
            at, half = self.x(value), width_of(text) / 2
            self.picture.line([(at, bottom), (at, bottom + 3)], GRID, 0.6)
            if grid:
                self.picture.line([(at, bottom), (at, top)], GRID, 0.5)
            if at - half > free:
                middle = min(max(at, half), WIDTH - half)
                self.picture.text(middle, bottom + 11, text, "middle")
                free = middle + half + 2
        self.picture.text((self.x.start + self.x.end) / 2, bottom + 22, label, "middle", room=self.x.end - self.x.start)

    def beside(self, ticks: Sequence[Tick], size: float = _FONT, grid: bool = False) -> None:
        """The labels of y, and lines from them."""
        for value, text in ticks:
            at = self.y(value)
            if grid:
                self.picture.line([(self.x.start, at), (self.x.end, at)], GRID, 0.5)
            self.picture.text(self.x.start - 4, at + size / 3, text, "end", size, room=self.x.start - 5)

    def upright(self, label: str) -> None:
        """The axis of y, and what it shows, upwards at the left edge."""
        x, bottom, top = self.x.start, max(self.y.start, self.y.end), min(self.y.start, self.y.end)
        self.picture.line([(x, bottom), (x, top)], GRID, 0.6)
        middle = _n((bottom + top) / 2)
        self.picture.parts.append(f'<g transform="rotate(-90 8 {middle})">')
        self.picture.text(8, float(middle), label, "middle", room=bottom - top)
        self.picture.parts.append("</g>")


def frame(
    name: str,
    title: str,
    height: float,
    x: tuple[float, float],
    y: tuple[float, float],
    labels: Iterable[str],
    *,
    logarithmic: tuple[bool, bool] = (False, False),
    size: float = _FONT,
    upright: bool = False,
    right: float = 8.0,
) -> Frame:
    """An empty frame: the numbers of both axes (y upwards), and room for the labels on the left, for a text that stands
    upright there, and for what is written on the right."""
    widest = max((width_of(text, size) for text in labels), default=0.0)
    left = min(widest + 6, _ROOM * WIDTH) + (12 if upright else 0)
    across = Scale(*x, left, WIDTH - right, logarithmic[0])
    return Frame(Picture(name, title, height), across, Scale(*y, height - 27, 5, logarithmic[1]))


def powers(low: float, high: float, most: int, name: Callable[[float], str]) -> list[Tick]:
    """Powers of two from ``low`` to ``high``, at most so many, evenly; the ends where there is none."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    values = [2.0**e for e in range(first, last + 1) if e % step == 0] or sorted({low, high})
    return [(value, name(value)) for value in values]


def style_of(implementation: str, others: Sequence[str]) -> int:
    """A number for an implementation's colour and marker: the known ones' own, then the rest in order."""
    if implementation in _KNOWN:
        return _KNOWN.index(implementation)
    rest = [name for name in others if name not in _KNOWN]
    return (len(_KNOWN) + rest.index(implementation)) % len(SERIES)


def dtypes_of(names: set[str]) -> list[str]:
    return [d for d in SHORT if d in names] + sorted(names - set(SHORT))

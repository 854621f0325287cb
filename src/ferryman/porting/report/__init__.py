"""Renderings of a result document."""

from ferryman.porting.report.html import html
from ferryman.porting.report.junit import junit
from ferryman.porting.report.markdown import markdown

__all__ = ["html", "junit", "markdown"]

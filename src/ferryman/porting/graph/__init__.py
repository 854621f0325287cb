"""``torch.compile(model, backend="ferryman")``: regions of Dynamo's graph that are an op, proven and called as one.

`backend` is the function that torch.compile finds by that name; `last_report` says what became of the graphs.
"""

from __future__ import annotations

import ferryman.dispatch  # noqa: F401 - defines torch.ops.ferryman
from ferryman.porting.graph.account import Entry, GraphReport, Report, forget, last_report
from ferryman.porting.graph.backend import backend, rewrite

__all__ = ["Entry", "GraphReport", "Report", "backend", "forget", "last_report", "rewrite"]

"""Is it right here, and how fast against the limit? The parity check, its result document and its renderings."""

from ferryman.porting.cases import cases_of, materialise
from ferryman.porting.parity import check_cell, prepare
from ferryman.porting.results import Cell, Results, dumps, failed, load, save, schema
from ferryman.porting.runner import run

__all__ = [
    "Cell",
    "Results",
    "cases_of",
    "check_cell",
    "dumps",
    "failed",
    "load",
    "materialise",
    "prepare",
    "run",
    "save",
    "schema",
]

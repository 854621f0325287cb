"""How fast every implementation is, against a copy, the matrix units, the roofline and other libraries' kernels."""

from ferryman.porting.bench.compare import compare
from ferryman.porting.bench.document import Benchmark, dumps, load
from ferryman.porting.bench.runner import cells_of, run

__all__ = ["Benchmark", "cells_of", "compare", "dumps", "load", "run"]

"""How fast every implementation is, against a copy, the matrix units, the roofline and other libraries' kernels."""

from ferryman.porting.bench.compare import compare
from ferryman.porting.bench.document import Benchmark, dumps, load
from ferryman.porting.bench.runner import run

__all__ = ["Benchmark", "compare", "dumps", "load", "run"]

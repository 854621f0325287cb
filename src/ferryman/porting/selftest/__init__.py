"""The checker's own score: planted bugs that it catches, right kernels that it flags, and other rules on the same runs.

`mutants` holds the bugs, `alternatives` the right kernels, `judging` one run, `runner` all of them. docs/selftest.md:
what is measured, and how.
"""

from ferryman.porting.selftest.edits import EditError
from ferryman.porting.selftest.report import SelfTest, succeeded
from ferryman.porting.selftest.runner import run

__all__ = ["EditError", "SelfTest", "run", "succeeded"]

"""The checker's own score: planted bugs that it catches, right kernels that it flags, and other rules on the same runs.

`porting/mutate` makes the bugs; `planting` lists those of an op, `alternatives` the right kernels, `judging` is one
run, `cells` what the runs of one kernel share, `session` one mutant, `honest` right kernels in turns, `worker` a
process of them, `runner` the whole. docs/selftest.md: what is measured, and how.
"""

from ferryman.porting.mutate.edits import EditError
from ferryman.porting.selftest.report import SelfTest, succeeded
from ferryman.porting.selftest.runner import run

__all__ = ["EditError", "SelfTest", "run", "succeeded"]

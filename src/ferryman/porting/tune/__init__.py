"""Measured choices: which implementation is fastest in each shape region, written to a lockfile."""

from ferryman.porting.tune.check import Held, check
from ferryman.porting.tune.tuner import Outcome, tune

__all__ = ["Held", "Outcome", "check", "tune"]

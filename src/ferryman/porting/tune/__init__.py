"""Measured choices: which implementation is fastest in each shape region, written to a lockfile."""

from ferryman.porting.tune.check import Covered, Validity, check, covered
from ferryman.porting.tune.tuner import Outcome, tune

__all__ = ["Covered", "Outcome", "Validity", "check", "covered", "tune"]

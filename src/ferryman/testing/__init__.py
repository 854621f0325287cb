"""Parity tests of one's own kernels: what the pytest plugin (`pytest_ferryman`) gives, for any test runner."""

from ferryman.testing.parity import NotRun, assert_parity
from ferryman.testing.requirements import default_device, unmet

__all__ = ["NotRun", "assert_parity", "default_device", "unmet"]

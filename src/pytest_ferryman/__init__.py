"""The pytest plugin: fixtures `ferryman_device` and `assert_parity`, marker `requires`. docs/testing.md shows them.

It lies beside the package `ferryman`, because pytest imports plugins in every session of an environment, and `ferryman`
imports torch: only a test that asks for something here pays for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

_NOT_RUN = "ferryman: NOT_RUN"
_SIMULATED = "ferryman: SIMULATED"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ferryman")
    group.addoption(
        "--ferryman-device",
        metavar="DEVICE",
        default=None,
        help="cpu, cuda:1 ..: where parity is tested (else FERRYMAN_TEST_DEVICE, the accelerator, the CPU)",
    )
    group.addoption(
        "--ferryman-record",
        metavar="FILE",
        default=None,
        help="write what became of every test (ferryman ci run)",
    )
    group.addoption(
        "--ferryman-launches", action="store_true", help="count the kernels that each test launches on the device, too"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "requires(vendor=.., arch=.., feature=..): skip unless the device is such a one, e.g. vendor='amd', "
        "arch='gfx9*', feature='wgmma'; several names: any vendor, any arch, every feature",
    )
    if (path := config.getoption("--ferryman-record", None)) is not None:
        from pytest_ferryman.recorder import Recorder

        config.pluginmanager.register(Recorder(Path(path).absolute(), config), "ferryman-recorder")


@pytest.fixture(scope="session")
def ferryman_device(pytestconfig: pytest.Config) -> torch.device:
    """The device under test: --ferryman-device, FERRYMAN_TEST_DEVICE, the accelerator, else the CPU."""
    return _device(pytestconfig)


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest, ferryman_device: torch.device) -> Callable[..., Any]:
    """`ferryman.testing.assert_parity` on the device under test; a test in which nothing could run is skipped."""
    from ferryman import testing

    def check(op: Any, implementation: Any, case: Any = None, **options: Any) -> list[Any]:
        __tracebackhide__ = True
        try:
            cells = testing.assert_parity(op, implementation, case, **{"device": ferryman_device, **options})
        except testing.NotRun as error:
            _not_run(request.node, str(error))
        if any(cell.verdict == "SIMULATED" for cell in cells):
            request.node.user_properties.append((_SIMULATED, "interpreted: no evidence about a device"))
        return cells

    return check


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("requires"):
        if mark.args or not {"vendor", "arch", "feature"} & set(mark.kwargs):
            continue  # another plugin's marker of that name
        from ferryman.device_profiles import detect
        from ferryman.errors import FerrymanError
        from ferryman.testing import unmet

        try:
            reason = unmet(detect(_device(item.config)), **mark.kwargs)
        except FerrymanError as error:
            raise pytest.UsageError(f"{item.nodeid}: requires: {error}") from error
        if reason is not None:
            _not_run(item, reason)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was not shown here, by reason: a column with no executed case is never green."""
    for prefix, meaning in ((_NOT_RUN, "not run here"), (_SIMULATED, "simulated")):
        said = {
            (report.nodeid, str(text))
            for reports in terminalreporter.stats.values()
            for report in reports
            for name, text in getattr(report, "user_properties", ())
            if name == prefix
        }
        reasons = Counter(text for _, text in sorted(said))
        if reasons:
            terminalreporter.section(f"{prefix} ({meaning})", yellow=True)
            for reason, n in reasons.items():
                terminalreporter.line(f"{n} test{'s' if n > 1 else ''}: {reason}", yellow=True)


def _device(config: pytest.Config) -> torch.device:
    from ferryman.errors import FerrymanError
    from ferryman.testing import default_device

    try:
        return default_device(config.getoption("--ferryman-device"))
    except FerrymanError as error:
        raise pytest.UsageError(f"--ferryman-device or FERRYMAN_TEST_DEVICE: {error}") from error


def _not_run(item: pytest.Item, reason: str) -> None:
    item.user_properties.append((_NOT_RUN, reason))
    pytest.skip(f"NOT_RUN: {reason}")

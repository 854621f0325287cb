"""A pytest session inside a test's own process, which keeps the packages that it imports.

pytester forgets every module that its session imported. The next import runs such a module a second time: there are two
classes of one name then, and a package's attribute is the module again (`ferryman.ops.softmax`), where the op was put.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

_imported: dict[str, ModuleType] = {}


class _Imports:
    """Notes what a session imports, but for files of its own folder."""

    def __init__(self, folder: str) -> None:
        self.folder, self.before = folder, set(sys.modules)

    def pytest_unconfigure(self) -> None:
        for name in set(sys.modules) - self.before:
            module = sys.modules[name]
            file = getattr(module, "__file__", None)
            if file and not file.startswith(self.folder):
                _imported.setdefault(name, module)


def run_inside(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest on pytester's files."""
    return pytester.runpytest_inprocess(*arguments, plugins=[_Imports(str(pytester.path))])


@pytest.fixture(autouse=True)
def imports_stay() -> Iterator[None]:
    """It ends after `pytester`, which forgets. A file of tests imports it."""
    yield
    for name, module in _imported.items():
        sys.modules.setdefault(name, module)
    _imported.clear()

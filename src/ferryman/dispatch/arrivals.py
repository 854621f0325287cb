"""Something to do right after a module was imported for the first time, by whomever."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, with a loader that has something to do afterwards."""

    def __init__(self, wanted: Callable[[str], bool], then: Callable[[ModuleType], None]) -> None:
        self.wanted, self.then = wanted, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not self.wanted(name):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self._watch(name, spec)
                return spec
        return None

    def _watch(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        loader, then = spec.loader, self.then
        if loader is None:
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:  # a zip file's modules share one loader
                then(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


def after_import(wanted: Callable[[str], bool], then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with each module whose name is ``wanted``, when it has run and before its import returns.

    What ``then`` raises, the import raises. Threads that import the module wait for it, as for the module itself.
    """
    sys.meta_path.insert(0, _Finder(wanted, then))

"""Names of a package that are loaded when they are first asked for, so that `import ferryman` costs little."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def attributes(package: str, names: Mapping[str, str], modules: Collection[str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    names: an attribute -> the module that it stands in. modules: submodules that are attributes without being imported
    by the caller. Raises AttributeError for any other name.
    """

    def get(name: str) -> Any:
        if name in names:
            value = getattr(import_module(names[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if name in modules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get

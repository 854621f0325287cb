"""Names of a package that are loaded when they are first asked for, so that `import ferryman` costs little."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attributes(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    names: an attribute -> the module that it stands in. Any other attribute is a submodule of the package, which is
    imported. Raises AttributeError for the rest.
    """

    def get(name: str) -> Any:
        if name in names:
            value = getattr(import_module(names[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        return submodule(package, name)

    return get


def submodule(package: str, name: str) -> Any:
    """A module of a package, imported now. Raises AttributeError where there is none of that name."""
    missing = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(missing)
    try:
        return import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{name}":
            raise
        raise AttributeError(missing) from None

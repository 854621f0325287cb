"""The ops that model code calls. Each is its own specification; which implementation runs is `ferryman.dispatch`'s.

Every folder here is a family of ops. ``table.py``, which `make docs` writes from the folders, says which ops each has,
so that a family is loaded when one of its ops is first asked for. A folder that the table does not have yet is found,
too. ``__init__.pyi``, written likewise, says the same to editors and type checkers.
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pkgutil import iter_modules as _iter_modules
from types import ModuleType as _ModuleType
from typing import Any as _Any

from ferryman.ops.table import SCHEMAS as _SCHEMAS

_families = {s.partition("(")[0]: family for family, schemas in _SCHEMAS.items() for s in schemas}
__all__ = sorted(_families)  # noqa: PLE0605 - names are those of the table


class _Unopened(_ModuleType):
    """This module until an op is first asked for.

    A family that is called like one of its ops is a submodule of the same name, and Python makes each submodule that it
    imports an attribute here. The name is the op's.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, _ModuleType) and name in _families):
            super().__setattr__(name, value)


def _open() -> None:
    """Become a plain module, whose attributes CPython reads faster.

    First the families' packages whose names are ops' are imported, so that later imports set nothing. Once every op is
    loaded, nothing is left to find: a module with a ``__getattr__`` costs 30 ns at each read of an attribute.
    """
    module: _Any = _sys.modules[__name__]
    if type(module) is _Unopened:
        for family in _SCHEMAS:
            if family in _families:
                _import_module(f"{__name__}.{family}")
        module.__class__ = _ModuleType
    if __all__ and all(name in globals() for name in __all__):
        globals().pop("__getattr__", None)


def __getattr__(name: str) -> _Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family = _families.get(name)
    if family is not None:
        _open()
        globals()[name] = op = getattr(_import_module(f"{__name__}.{family}.definition"), name)
        return op
    if name in _SCHEMAS:
        _import_module(f"{__name__}.{name}.definition")
        return _sys.modules[f"{__name__}.{name}"]
    return _unlisted(name)


def _unlisted(name: str) -> _Any:
    """A module, or an op that the table does not have yet."""
    families = [module.name for module in _iter_modules(__path__) if module.ispkg]
    if name not in families and _find_spec(f"{__name__}.{name}") is not None:
        return _import_module(f"{__name__}.{name}")
    for family in sorted(families, key=_SCHEMAS.__contains__):
        op = getattr(_import_module(f"{__name__}.{family}.definition"), name, None)
        if getattr(getattr(op, "primitive", None), "name", None) == name:
            globals()[name] = op
            return op
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_sys.modules[__name__].__class__ = _Unopened

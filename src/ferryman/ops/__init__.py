"""The ops that model code calls. Each is its own specification; which implementation runs is `ferryman.dispatch`'s.

Every folder here is a family of ops. Its ``definition`` is found by its name, so that a new op changes no other file.
``__init__.pyi`` beside this file says the same to editors and type checkers; `make docs` writes it.
"""

from importlib import import_module as _import_module
from pkgutil import iter_modules as _iter_modules

__all__: list[str] = []

for _family in _iter_modules(__path__):
    if _family.ispkg:
        for _name, _op in vars(_import_module(f"{__name__}.{_family.name}.definition")).items():
            if getattr(getattr(_op, "primitive", None), "name", None) == _name:
                globals()[_name] = _op
                __all__.append(_name)
__all__.sort()

"""Write `ferryman/ops/__init__.pyi`: what editors and type checkers see of the ops, which are found by their folders.

python ci/stubs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from ferryman import ops
from ferryman.dispatch import registry

HEAD = '"""Written by `make docs` from the folders beside this file."""\n\n'


def stub() -> str:
    """The text of the file. Ops of other packages are not in it: they are imported from there."""
    names = dict[str, list[str]]()
    for name in ops.__all__:
        family = registry.family_of(registry.primitive(name))
        names.setdefault(f"{family.package}.definition", []).append(name)
    lines = [
        f"from {module} import {name} as {name}\n" for module, own in sorted(names.items()) for name in sorted(own)
    ]
    everything = "".join(f"    {name!r},\n" for name in sorted(ops.__all__)).replace("'", '"')
    return f"{HEAD}{''.join(lines)}\n__all__ = [\n{everything}]\n"


def path() -> Path:
    """Where it stands."""
    return Path(str(ops.__file__)).with_suffix(".pyi")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if not path().is_file() or path().read_text(encoding="utf-8") != stub():
            sys.exit(f"{path()} is not what the folders of ops say; run: make docs")
    else:
        path().write_text(stub(), encoding="utf-8")

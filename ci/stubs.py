"""Write what follows from the folders of `ferryman/ops`, where ops are found: ``__init__.pyi``, what editors and type
checkers see of them, and ``table.py``, the schemas that importing Ferryman defines.

python ci/stubs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

HEAD = '"""Written by `make docs` from the folders beside this file."""\n\n'
WIDTH = 120  # of a line
# The table that is there may be old. Without one, every folder is found and loaded.
_EMPTY = ModuleType("ferryman.ops.table")
_EMPTY.SCHEMAS = {}  # type: ignore[attr-defined]


def files() -> dict[Path, str]:
    """Each file's text. Ops of other packages are not in it: they are imported from there."""
    kept = sys.modules.setdefault(_EMPTY.__name__, _EMPTY)
    if kept is not _EMPTY:
        raise SystemExit("ferryman was imported before: its table may be old")
    from ferryman import ops
    from ferryman.dispatch import registry

    faces: dict[str, str] = {}
    schemas: dict[str, list[str]] = {}
    for op in registry.primitives().values():
        family = registry.family_of(op)
        if family.ours:
            faces[op.name] = f"{family.package}.definition"
            schemas.setdefault(family.name, []).append(op.schema)
            if getattr(getattr(ops, op.name, None), "primitive", None) is not op:
                raise SystemExit(f"{faces[op.name]} has no function {op.name}: model code could not call it")
    folder = Path(str(ops.__file__)).parent
    return {folder / "__init__.pyi": _stub(faces), folder / "table.py": _table(schemas)}


def _stub(faces: dict[str, str]) -> str:
    order = sorted(faces.items(), key=lambda item: (item[1], item[0]))
    lines = [f"from {module} import {name} as {name}\n" for name, module in order]
    everything = "".join(f'    "{name}",\n' for name in sorted(faces))
    return f"{HEAD}{''.join(lines)}\n__all__ = [\n{everything}]\n\ndef _open() -> None: ...\n"


def _table(schemas: dict[str, list[str]]) -> str:
    """As the formatter lays it out, which leaves long texts alone."""
    lines = []
    for family, own in sorted(schemas.items()):
        short = f'    "{family}": ("{own[0]}",),'
        whole = [f'    "{family}": (', *(f'        "{one}",' for one in own), "    ),"]
        lines += [short] if len(own) == 1 and len(short) <= WIDTH else whole
    body = "\n".join(lines)
    return f"{HEAD}# ruff: noqa: E501\nSCHEMAS: dict[str, tuple[str, ...]] = {{\n{body}\n}}\n"


if __name__ == "__main__":
    for path, text in files().items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what the folders of ops say; run: make docs")

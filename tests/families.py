"""What the folders `tests/ops/FAMILY/` say to generic tests, in files of one name. A new op joins by its own folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any


def modules(name: str) -> dict[str, ModuleType]:
    """{family: its file of this name}, of the families that have one."""
    files = sorted((Path(__file__).parent / "ops").glob(f"*/{name}.py"))
    return {file.parent.name: importlib.import_module(f"tests.ops.{file.parent.name}.{name}") for file in files}


def table(name: str, attribute: str) -> dict[Any, Any]:
    """What these files have in a table of this name, together: by op."""
    every = [dict(getattr(module, attribute, {})) for module in modules(name).values()]
    joined = {key: value for own in every for key, value in own.items()}
    assert len(joined) == sum(map(len, every)), f"two families have the same {attribute}"
    return joined

"""Exported programs without Ferryman's ops: what `ExportedProgram.run_decompositions` puts in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferryman.dispatch import declared, registry


def decompositions() -> dict[Any, Callable[..., Any]]:
    """{overload of torch.ops.ferryman: its definition, of ATen's ops}.

    ``program.run_decompositions(decompositions())`` gives a program that loads where Ferryman is not installed. It runs
    no kernel of ours there. Ops that write over an argument are left out, and stay.
    """
    return {
        getattr(torch.ops.ferryman, name).default: _composed(one)
        for name, one in declared.ops.items()
        if "!" not in one.schema
    }


def _composed(one: declared.Declared) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        definition = registry.implementations(one.name)[-1]
        return registry.launcher(definition)(*args, *one.rest(len(args)), None)

    return run

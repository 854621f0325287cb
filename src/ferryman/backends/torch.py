"""The vendor's own libraries, as PyTorch calls them; and the ops' definitions, run by PyTorch. Any device."""

from __future__ import annotations

from typing import Any

from ferryman.backends.base import Artefact
from ferryman.errors import CompileError

_EVERY = frozenset({"nvidia", "amd", "cpu", "other"})


class TorchBackend:
    name = "torch"
    vendors = _EVERY

    def probe(self, vendor: str) -> tuple[str, ...]:
        """PyTorch serves whatever device its tensors are on."""
        return ()

    def compile(self, source: Any, options: Any, arch: str) -> Artefact:
        raise CompileError(self.name, str(source), arch, "PyTorch's kernels come compiled; there is nothing to compile")


class DefinitionBackend(TorchBackend):
    name = "definition"

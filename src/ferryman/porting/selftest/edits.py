"""An edit of a kernel's source, as data, and the module that the edited text becomes.

The text is the package's own, read when the edit is applied: where the old text is not there exactly once, the edit
fails, so that a change of the kernels shows here and an edit never tests nothing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ferryman.errors import FerrymanError

ROOT = Path(__file__).resolve().parents[2]


class EditError(FerrymanError, RuntimeError):
    """A planted edit no longer fits the source: the kernels have changed, and the edit must follow."""


@dataclass(frozen=True)
class Edit:
    """``old`` becomes ``new`` in ``file`` (a path inside the package); it must stand there exactly once."""

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        found = text.count(self.old)
        if found != 1:
            raise EditError(f"{self.file}: {self.old!r} stands there {found} times; required: exactly once. "
                            "Mend the edit in ferryman.porting.selftest")  # fmt: skip
        if self.old == self.new:
            raise EditError(f"{self.file}: the edit of {self.old!r} changes nothing")
        return text.replace(self.old, self.new)

    @property
    def tag(self) -> str:
        return hashlib.sha256(f"{self.file}\0{self.old}\0{self.new}".encode()).hexdigest()[:12]


def _dotted(file: str) -> str:
    return "ferryman." + file.removesuffix(".py").replace("/", ".")


@functools.lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Edited Triton modules must be files: Triton reads its kernels' source from there. Removed at exit."""
    return tempfile.TemporaryDirectory(prefix="ferryman-selftest-")


def _load(name: str, text: str) -> ModuleType:
    path = Path(_folder().name) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EditError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _edited(file: str, edits: Sequence[Edit]) -> str:
    """A file of the package after those of the edits that are its own."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for edit in edits:
        if edit.file == file:
            text = edit.apply(text)
    return text


def _tag(edits: Sequence[Edit], file: str) -> str:
    return hashlib.sha256("\0".join((file, *(e.tag for e in edits))).encode()).hexdigest()[:12]


def triton_kernel(edits: Sequence[Edit], kernels: str, function: str) -> Callable[..., Any]:
    """The launcher of ``kernels`` (a file) after the edits, which may be of a module that it imports."""
    name = f"ferryman_edited_{_tag(edits, kernels)}"
    module = sys.modules.get(name)
    if module is None:
        text = _edited(kernels, edits)
        for file in sorted({e.file for e in edits} - {kernels}):
            shared = f"ferryman_edited_{_tag(edits, file)}"
            if shared not in sys.modules:
                _load(shared, _edited(file, edits))
            text = Edit(kernels, f"from {_dotted(file)} import", f"from {shared} import").apply(text)
        module = _load(name, text)
    launcher: Callable[..., Any] = getattr(module, function)
    return launcher


def simt_kernel(edits: Sequence[Edit], kernels: str, function: str) -> Callable[..., Any]:
    """The SIMT launcher of ``kernels`` after edits of it, of its C++ or of what the C++ includes.

    Units are loaded once by name, so an edited unit gets a name of its own.
    """
    from ferryman.backends import simt

    real = importlib.import_module(_dotted(kernels))
    tag = f"e{_tag(edits, kernels)}"
    module = ModuleType(f"ferryman_edited_{tag}")
    module.__dict__["__file__"] = real.__file__  # the C++ lies beside it
    sys.modules[module.__name__] = module  # NamedTuple looks its module up
    exec(compile(_edited(kernels, edits), f"{kernels} (edited)", "exec"), module.__dict__)  # noqa: S102 - our own source
    used: set[str] = {kernels}
    texts = {e.file: _edited(e.file, edits) for e in edits}  # an edit that does not fit fails here, not in a launch

    def family_source(path: Path, rows: bool, cluster: bool = False) -> str:
        files = simt.family_files(path, rows, cluster)
        inside = [str(f.resolve().relative_to(ROOT)) for f in files]
        used.update(inside)
        return "".join(
            f'#line 1 "{f.name}"\n{texts.get(i) or f.read_text(encoding="utf-8")}'
            for f, i in zip(files, inside, strict=True)
        )

    def unit(family: str, macro: str, stem: str, *args: object) -> simt.Unit:
        unused = {e.file for e in edits} - used
        if unused:
            raise EditError(f"{', '.join(sorted(unused))} is no part of {kernels}")
        return simt.unit(family, macro, f"{tag}_{stem}", *args)

    module.__dict__["family_source"] = functools.lru_cache(maxsize=None)(family_source)
    module.__dict__["unit"] = unit
    launcher: Callable[..., Any] = module.__dict__[function]
    return launcher

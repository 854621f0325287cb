"""What runs inside a user's tests: the target file is compiled from a changed text, and launches and comparisons are
noted.

This file is loaded by path, before anything else, in whatever Python runs the tests: it imports the standard library
alone, and edits no file. FERRYMAN_MUTATION holds the job as JSON: ``file`` (the target, resolved), ``edit`` (start,
old,
new; or null), ``log`` (JSON lines that it writes), ``record`` (a folder for launches, or null), ``kernels``.
"""

from __future__ import annotations

import importlib.machinery
import json
import linecache
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

JOB: dict[str, Any] = json.loads(os.environ.get("FERRYMAN_MUTATION", "{}"))
MOST_LAUNCHES, MOST_BYTES = 6, 1 << 26


def note(**what: Any) -> None:
    with open(JOB["log"], "a", encoding="utf-8") as out:
        out.write(json.dumps(what, default=str) + "\n")


def changed(path: str) -> str:
    with open(path, encoding="utf-8-sig") as source:
        text = source.read()
    edit = JOB["edit"]
    if edit is None:
        return text
    end = edit["start"] + len(edit["old"])
    if text[edit["start"] : end] != edit["old"]:
        raise RuntimeError(f"{path} was edited while ferryman mutate ran: run it again")
    return text[: edit["start"]] + edit["new"] + text[end:]


def _ours(path: str) -> bool:
    return os.path.realpath(path) == JOB["file"]


def install() -> None:
    """Every import of the target, by name or by path, compiles the changed text; inspect (and Triton) read it too."""
    loader: Any = importlib.machinery.SourceFileLoader
    get_code, exec_module = loader.get_code, loader.exec_module
    update = linecache.updatecache

    def remember(path: str) -> list[str]:
        text = changed(path)
        lines = text.splitlines(keepends=True)
        linecache.cache[path] = (len(text), None, lines, path)
        return lines

    def code(self: Any, name: str) -> Any:
        path = self.get_filename(name)
        if not _ours(path):
            return get_code(self, name)
        return compile("".join(remember(path)), path, "exec", dont_inherit=True)

    def execute(self: Any, module: ModuleType) -> None:
        exec_module(self, module)
        if _ours(self.get_filename(module.__name__)):
            note(loaded=module.__name__)
            if JOB["record"]:
                for name in JOB["kernels"]:
                    _watch(name, getattr(module, name, None))
        elif module.__name__ in _COMPARISONS:
            for name in _COMPARISONS[module.__name__]:
                if hasattr(module, name):
                    setattr(module, name, _compared(name, getattr(module, name)))
            if module.__name__ == "torch":
                tensor = module.Tensor
                tensor.allclose = _compared("allclose", tensor.allclose)

    def updated(filename: str, module_globals: Any = None) -> list[str]:
        return remember(filename) if _ours(filename) else update(filename, module_globals)

    loader.get_code, loader.exec_module, linecache.updatecache = code, execute, updated


# ------------------------------------------------------------------------------------------------------- launches


def _watch(name: str, kernel: Any) -> None:
    """Keeps the first launches of a kernel: its innermost ``run`` (autotuners and heuristics wrap it)."""
    while kernel is not None and not callable(getattr(kernel, "fn", None)):
        return
    while hasattr(getattr(kernel, "fn", None), "run"):
        kernel = kernel.fn
    run = getattr(kernel, "run", None)
    if run is None:
        return
    count = [0]

    def watched(*args: Any, **kwargs: Any) -> Any:
        if count[0] < MOST_LAUNCHES and not kwargs.get("warmup"):
            count[0] += 1
            try:
                _keep(f"{name}.{count[0]}", kernel.arg_names, args, dict(kwargs))
            except Exception as error:  # noqa: BLE001 - a launch that cannot be kept must not change the test
                note(not_kept=f"{name}: {type(error).__name__}: {error}")
        return run(*args, **kwargs)

    kernel.run = watched


def _keep(name: str, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    import torch

    bound = dict(zip(names, args)) | {k: v for k, v in kwargs.items() if k in names}  # noqa: B905 - defaults may be left out
    grid = kwargs["grid"]
    grid = grid(bound) if callable(grid) else grid
    size = sum(v.numel() * v.element_size() for v in bound.values() if isinstance(v, torch.Tensor))
    if size > MOST_BYTES:
        note(not_kept=f"{name}: {size} bytes of tensors")
        return
    kept = {
        k: v.detach().cpu().clone(memory_format=torch.preserve_format) if isinstance(v, torch.Tensor) else _plain(v)
        for k, v in bound.items()
    }
    torch.save({"grid": [int(n) for n in grid], "args": kept}, os.path.join(JOB["record"], f"{name}.pt"))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    inner = getattr(value, "value", None)
    if isinstance(inner, (bool, int, float, str)):
        return inner
    if type(value).__name__ == "dtype":
        return f"triton:{value}"
    raise TypeError(f"an argument of type {type(value).__name__}")


# ---------------------------------------------------------------------------------------------------- comparisons

_COMPARISONS = {
    "torch": ("allclose", "isclose"),
    "numpy": ("allclose", "isclose"),
    "torch.testing._comparison": ("assert_close",),
    "numpy.testing._private.utils": ("assert_allclose", "assert_almost_equal", "assert_array_almost_equal"),
}

_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "numpy"))
_inside = False  # a comparison that another one calls is that one's own


def _compared(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison that notes where it stands, its tolerances, and the largest error that it let through."""

    def comparison(*args: Any, **kwargs: Any) -> Any:
        global _inside
        outermost, _inside = not _inside, True
        try:
            result = original(*args, **kwargs)
        finally:
            _inside = not outermost
        if outermost and result is not False:
            try:
                _met(name, args, kwargs, result, sys._getframe(1))
            except Exception as failure:  # noqa: BLE001 - what is only watched must not fail
                note(not_seen=f"{name}: {type(failure).__name__}: {failure}")
        return result

    return comparison


def _met(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, frame: Any) -> None:
    import torch

    words = {"input": "actual", "a": "actual", "other": "expected", "desired": "expected", "b": "expected"}
    words |= {"x": "actual", "y": "expected"}
    places = ("actual", "expected", *(("decimal",) if "almost" in name else ("rtol", "atol")))
    given = dict(zip(places, args)) | {words.get(k, k): v for k, v in kwargs.items()}  # noqa: B905
    actual, expected = (
        x.detach().cpu() if isinstance(x, torch.Tensor) else torch.as_tensor(x)
        for x in (given["actual"], given["expected"])
    )
    error = (actual.double() - expected.double()).abs().nan_to_num(nan=0.0)
    if name == "isclose":  # an answer for each number: those that it refused are not let through
        passed = torch.as_tensor(result).cpu().expand(error.shape)
        if error.numel() and not bool(passed.any()):
            return
        error = error.where(passed, 0.0)
    while frame.f_back is not None and any(p in frame.f_code.co_filename for p in _PACKAGES):
        frame = frame.f_back
    note(
        compared=name,
        where=f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}",
        error=float(error.max()) if error.numel() else 0.0,
        tolerance={k: given[k] for k in ("rtol", "atol", "decimal") if k in given},
        dtype=str(expected.dtype),
    )


if JOB:
    install()

"""Calls from one interpreted kernel function to another, made cheap: Triton 3.6 prepares its language for each of them.

Its interpreter looks at every name of `triton.language` whenever a function calls another, which is a third to a half
of a kernel's time. Nothing there changes within a launch: once for each set of modules that functions know is enough.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any


@functools.cache
def hasten() -> None:
    """Change the interpreter of this process, once. `triton_bfloat16.mend` has made sure of Triton's release."""
    made: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    prepared, known = set[frozenset[int]](), dict[Any, frozenset[int]]()
    launch, prepare = made.GridExecutor.__call__, made._patch_lang

    @functools.wraps(launch)
    def launched(self: Any, *args: Any, **more: Any) -> Any:
        prepared.clear()  # a launch puts back what it has changed
        return launch(self, *args, **more)

    @functools.wraps(made.InterpretedFunction.__call__)
    def called(self: Any, *args: Any, **more: Any) -> Any:
        modules = known.get(self)
        if modules is None:
            both = (language, language.core)
            seen = (value for value in self.fn.__globals__.values() if inspect.ismodule(value))
            modules = known[self] = frozenset(id(value) for value in seen if value in both)
        if modules not in prepared:
            prepare(self.fn)
            prepared.add(modules)
        try:
            return self.rewrite()(*args, **more)
        except Exception as error:
            raise made.InterpreterError(repr(error)) from error

    made.GridExecutor.__call__ = launched
    made.InterpretedFunction.__call__ = called

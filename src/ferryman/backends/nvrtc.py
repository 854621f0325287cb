"""The bindings of NVRTC: CuPy's and cuda-bindings' do the same here; the first that is installed and loads is taken."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from ferryman.backends import code_objects
from ferryman.errors import BackendUnavailable

INSTALL = "pip install ferryman[cuda13] (or ferryman[cuda12] for a CUDA 12 driver)"
OFFLINE = "pip install cuda-bindings nvidia-cuda-nvrtc"
NOT_LOADABLE = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError)


class Nvrtc(Protocol):
    """A binding of NVRTC."""

    def version(self) -> tuple[int, int]: ...

    def compile(self, source: str, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """(cubin, log); no cubin where the source was refused."""
        ...


def _whole(cubin: bytes) -> bytes:
    """CuPy 14 takes the last byte for a terminating NUL and drops it. It is the highest of the last program header's
    alignment, so 0."""
    try:
        code_objects.code_bytes(cubin)
    except ValueError:
        return cubin + b"\0"
    return cubin


class CupyNvrtc:
    def __init__(self) -> None:
        self._nvrtc: Any = importlib.import_module("cupy.cuda").nvrtc
        self.version()  # loads the library, or raises

    def version(self) -> tuple[int, int]:
        major, minor = self._nvrtc.getVersion()
        return int(major), int(minor)

    def compile(self, source: str, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        program = self._nvrtc.createProgram(source, name, (), ())
        try:
            try:
                self._nvrtc.compileProgram(program, tuple(options))
            except self._nvrtc.NVRTCError as error:
                return None, f"{error}\n{self._nvrtc.getProgramLog(program)}"
            return _whole(bytes(self._nvrtc.getCUBIN(program))), str(self._nvrtc.getProgramLog(program))
        finally:
            self._nvrtc.destroyProgram(program)


class BindingsNvrtc:
    def __init__(self) -> None:
        self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        self.version()

    def _call(self, name: str, *args: Any) -> Any:
        code, *rest = getattr(self._nvrtc, name)(*args)
        if int(code) != 0:
            raise RuntimeError(f"{name} failed: {code}")
        return rest[0] if len(rest) == 1 else tuple(rest)

    def version(self) -> tuple[int, int]:
        major, minor = self._call("nvrtcVersion")
        return int(major), int(minor)

    def _text(self, size: str, get: str, program: Any) -> bytes:
        buffer = bytearray(int(self._call(size, program)))  # never bytes: all of Python shares those of one byte
        self._call(get, program, buffer)
        return bytes(buffer)

    def compile(self, source: str, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        program = self._call("nvrtcCreateProgram", source.encode(), name.encode(), 0, [], [])
        try:
            encoded = [o.encode() for o in options]
            (code,) = self._nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
            text = log.rstrip(b"\0 \n").decode("utf-8", errors="replace")
            if int(code) != 0:
                return None, f"{code}\n{text}"
            return self._text("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program), text
        finally:
            self._call("nvrtcDestroyProgram", program)


@functools.lru_cache(maxsize=1)
def nvrtc() -> Nvrtc:
    """The first binding of NVRTC that loads. Raises BackendUnavailable with what each one lacks."""
    missing: list[str] = []
    bindings: tuple[tuple[str, type[Nvrtc]], ...] = (("cupy", CupyNvrtc), ("cuda-bindings", BindingsNvrtc))
    for name, binding in bindings:
        try:
            return binding()
        except NOT_LOADABLE as error:
            missing.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    raise BackendUnavailable(f"NVRTC cannot be loaded ({'; '.join(missing)}); {INSTALL}, or offline {OFFLINE}")

"""Units that are loaded on a device: what `CudaRuntime` and `HipRuntime` share. Compiled images are kept on disk."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ferryman import files, settings
from ferryman.backends import replay, replay_record
from ferryman.backends.simt import Unit, defines_for
from ferryman.errors import CaptureError, SettingError

_DIGEST = hashlib.sha256().digest_size
_MOST_BYTES = 64 * 2**20


def cache_directory() -> Path:
    """Where images are kept: the setting `cache_dir`, or the user's cache directory. Raises SettingError: no home."""
    chosen: Path | None = settings.get("cache_dir")
    if chosen is None:
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            chosen = (Path(base) if base else Path("~/.cache").expanduser()) / "ferryman"
        except RuntimeError as error:
            raise SettingError("no home is known to keep compiled kernels in; set FERRYMAN_CACHE_DIR") from error
    return chosen / "simt"


def own_cache() -> Path | None:
    """`cache_directory`, where its images may be loaded; None, with a warning once, without a home or where another
    user could write there."""
    try:
        directory = cache_directory()
    except SettingError as error:
        _say_once(f"compiled kernels are not kept: {error}")
        return None
    why = files.distrusted(directory) or files.distrusted(directory.parent)
    if why is not None:
        _say_once(f"the cache of compiled kernels is not used: {why}")
        return None
    return directory


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def cached_image(key: str) -> bytes | None:
    """The image kept under ``key``, or None. A damaged file is reported, and None: it will be written again."""
    directory = own_cache()
    if directory is None:
        return None
    path = directory / key
    try:
        data = files.read(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"compiled kernel {path} cannot be read ({error}); compiling again", stacklevel=2)
        return None
    digest, image = data[:_DIGEST], data[_DIGEST:]
    if image and hashlib.sha256(image).digest() == digest:
        return image
    warnings.warn(f"compiled kernel {path} is damaged; compiling it again", stacklevel=2)
    return None


def keep_image(key: str, image: bytes) -> None:
    """Written whole to a temporary file and renamed, so that no reader meets half a file."""
    directory = own_cache()
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            try:
                file.write(hashlib.sha256(image).digest() + image)
                file.close()
                os.replace(file.name, directory / key)
            except BaseException:  # a full disk, an interrupt: nothing is left behind
                os.unlink(file.name)
                raise
    except OSError as error:
        warnings.warn(f"compiled kernels cannot be kept in {directory} ({error})", stacklevel=2)


def current_stream(index: int) -> int:
    """The raw handle of torch's current stream on a device (0.1 us, against 1 us for `torch.cuda.current_stream`)."""
    raw: int = torch._C._cuda_getCurrentRawStream(index)
    return raw


class LoadedUnits(ABC):
    """Units loaded on devices, each compiled once per architecture. Look-ups of loaded units take no lock."""

    backend: str

    def __init__(self) -> None:
        self._functions: dict[tuple[str, int], Any] = {}
        self._arches: dict[int, str] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def device_arch(self, index: int) -> str:
        """The architecture to compile for."""

    @abstractmethod
    def toolchain(self) -> str:
        """Name and version of the compiler, for the disk cache's key."""

    @abstractmethod
    def build(self, unit: Unit, arch: str) -> bytes:
        """Compile; raises CompileError."""

    @abstractmethod
    def open(self, image: bytes, unit: Unit) -> Any:
        """Load an image on the current device and find its kernel."""

    @abstractmethod
    def start(
        self,
        function: Any,
        stream: int,
        index: int,
        grid: int,
        block: int,
        shared: int,
        args: tuple[int | float, ...],
        overlapping: bool = False,
    ) -> None:
        """Launch on the current device. ``overlapping``: the kernel's unit is so, and its blocks may be started early
        where the device can."""

    def bind(
        self,
        function: Any,
        index: int,
        grid: int,
        block: int,
        shared: int,
        args: tuple[int | float, ...],
        varying: Sequence[int],
        overlapping: bool = False,
    ) -> Callable[..., None]:
        """This launch on the current device as a function of (stream, and the arguments at ``varying``)."""

        def submit(stream: int, *given: int) -> None:
            values = list(args)
            for place, value in zip(varying, given, strict=True):
                values[place] = value
            self.start(function, stream, index, grid, block, shared, tuple(values), overlapping)

        return submit

    def launch(
        self, unit: Unit, device: torch.device, grid: int, block: int, shared: int, args: tuple[int | float, ...]
    ) -> None:
        recording = replay.recording()
        if recording is not None:
            recording.add(self._step(unit, recording.device, grid, block, shared, args))
            return
        current = torch.cuda.current_device()
        index = device.index if device.index is not None else current
        if index == current:
            function = self._functions.get((unit.name, index)) or self._load(unit, index)
            self.start(function, current_stream(index), index, grid, block, shared, args, unit.overlapping)
            return
        with torch.cuda.device(index):
            function = self._functions.get((unit.name, index)) or self._load(unit, index)
            self.start(function, current_stream(index), index, grid, block, shared, args, unit.overlapping)

    def _step(
        self, unit: Unit, device: torch.device, grid: int, block: int, shared: int, args: tuple[int | float, ...]
    ) -> replay_record.Step:
        index = device.index
        with torch.cuda.device(index):
            function = self._functions.get((unit.name, index)) or self._load(unit, index)
            varying = [i for i, a in enumerate(args) if isinstance(a, replay_record.Pointer)]
            bound = self.bind(function, index, grid, block, shared, args, varying, unit.overlapping)
        return replay_record.Step(bound, (replay_record.STREAM, *[args[i] for i in varying]))

    def _load(self, unit: Unit, index: int) -> Any:
        # Loading a module is no stream operation either, so a kept image does not help while capturing.
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{self.backend}: {unit.name} is not loaded on device {index} yet, and nothing is compiled or loaded "
                "while a graph is being captured; make this call once, with these shapes, before capturing"
            )
        with self._lock:
            function = self._functions.get((unit.name, index))
            if function is None:
                function = self.open(self._image(unit, self._arch(index)), unit)
                self._functions[unit.name, index] = function
        return function

    def _arch(self, index: int) -> str:
        if index not in self._arches:
            self._arches[index] = self.device_arch(index)
        return self._arches[index]

    def _image(self, unit: Unit, arch: str) -> bytes:
        shipped = self._artefact(unit, arch)
        if shipped is not None:  # before the toolchain is asked for its version: it need not be installed
            return shipped
        text = "\0".join((self.toolchain(), arch, *defines_for(unit, arch), unit.source))
        key = f"{arch}-{hashlib.sha256(text.encode()).hexdigest()}"
        image = cached_image(key)
        if image is None:
            image = self.build(unit, arch)
            keep_image(key, image)
        return image

    def _artefact(self, unit: Unit, arch: str) -> bytes | None:
        """The image compiled ahead of time, where the setting ``artefacts`` names one that matches."""
        if settings.get("artefacts") is None:
            return None
        from ferryman.backends import artefacts

        return artefacts.simt_image(self.backend, unit, arch, defines_for(unit, arch))

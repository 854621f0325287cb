"""What every run of cells does to its own process."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.text import Text

from ferryman.backends.precision import float32_precision

_PR_SET_PDEATHSIG = 1
_PARENT = "_FERRYMAN_PARENT"


@dataclass(frozen=True)
class Numerics:
    """What a kernel can turn for the whole process, and with it an oracle's arithmetic."""

    dtype: torch.dtype
    device: torch.device
    flushes: bool
    matmul: str
    reduced: tuple[bool, bool]
    deterministic: bool
    warn_only: bool
    grad: bool

    @classmethod
    def now(cls) -> Numerics:
        matmul = torch.backends.cuda.matmul
        return cls(
            torch.get_default_dtype(),
            torch.get_default_device(),
            flushes_subnormals(),
            float32_precision(),
            (bool(matmul.allow_bf16_reduced_precision_reduction), bool(matmul.allow_fp16_reduced_precision_reduction)),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.is_grad_enabled(),
        )

    def put(self) -> None:
        """Make it so in this thread."""
        if self == Numerics.now():
            return
        torch.set_default_dtype(self.dtype)
        torch.set_default_device(None)  # a device set is a mode for every call, which torch.compile cannot trace
        if torch.get_default_device() != self.device:
            torch.set_default_device(self.device)
        torch.set_flush_denormal(self.flushes)
        matmul = torch.backends.cuda.matmul
        if float32_precision() != self.matmul:
            torch.set_float32_matmul_precision("high" if self.matmul == "tf32" else "highest")
        if float32_precision() != self.matmul:  # the kernel has set it by backend, which goes before
            matmul.fp32_precision = self.matmul
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = self.reduced
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.set_grad_enabled(self.grad)


def flushes_subnormals() -> bool:
    """Whether this thread's CPU arithmetic flushes subnormals."""
    return bool((torch.full((), 2.0**-126, dtype=torch.float32, device="cpu") * 0.5).item() == 0.0)


def end_with_parent(parent: int | None = None) -> None:
    """A worker's first act: from now on it is killed when the thread that started it ends, however that was ended.

    On Linux alone. It ends at once where its parent (``parent``, or what `parentage` said) is gone already: importing
    torch takes seconds.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if (str(parent) if parent else os.environ.get(_PARENT, str(os.getppid()))) != str(os.getppid()):
        os._exit(1)


# `end_with_parent` for a command that is none of ours: the signal outlives exec
_BOUND = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): os._exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ): signal.signal(number, signal.SIG_DFL)
if sys.argv[2] == "no": os.environ.pop("LC_CTYPE", None)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def bound(command: Sequence[str]) -> list[str]:
    """A command that is killed when the thread that started it ends, however that was ended. On Linux alone; what is
    not found stays as it is, for the one who starts it to say so."""
    if sys.platform != "linux" or shutil.which(command[0]) is None:
        return list(command)
    kept = "kept" if "LC_CTYPE" in os.environ else "no"  # Python ignores two signals, and may name a locale
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), kept, *command]


def parentage() -> dict[str, str]:
    """What a worker's environment says of its parent."""
    return {_PARENT: str(os.getpid())}


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in use now; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def machine_bytes() -> int:
    """Memory that this machine has, or that this process's control group may have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, "rb") as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # none, or "max"
            continue
    return min(limits)


@contextmanager
def quiet() -> Iterator[None]:
    """One thread on a CPU, and no warnings of planted NaN and Inf.

    Small cases gain nothing from more threads, and lose much where other work holds a core (5 s against 300).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        torch.set_num_threads(before)


def placed(device: torch.device | str | None) -> torch.device:
    """The device asked for, with its index; None is the accelerator, else the CPU."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place == torch.device("cuda"):
        place = torch.device("cuda", torch.cuda.current_device())
    return place


def failure(error: Exception, device: torch.device) -> str:
    """What a contender's error says, in a line without a terminal's colours. Raises where the device was lost to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    lines = Text.from_ansi(str(error)).plain.strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def device_lost(device: torch.device) -> str | None:
    """After an illegal access a CUDA context serves nothing more; what follows is then not judged."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"the device was lost to an earlier kernel: {str(error).splitlines()[0][:300]}"
    return None

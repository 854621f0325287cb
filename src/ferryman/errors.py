"""Every exception a user of Ferryman can meet.

Each message says what happened, the actual value against the required one, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

STOPS = (KeyboardInterrupt, GeneratorExit)  # go on whatever raises them: a user stops, or Python closes a generator


class FerrymanError(Exception):
    """Base of every error that Ferryman raises on purpose."""


def shown(value: object, most: int = 300) -> str:
    """A value's text for a message, cut; an integer of more digits than Python prints by its size."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length()} bits"
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}.."


class ArgumentError(FerrymanError, ValueError):
    """An op's argument is invalid. ``argument`` names it; the message gives actual against required."""

    def __init__(self, op: str, argument: str, actual: object, required: str) -> None:
        # as BaseException.__init__ does, which Dynamo does not trace
        self.args = (f"{op}: {argument} is {shown(actual)}; required: {required}",)
        self.op, self.argument, self.actual, self.required = op, argument, actual, required


_LONGEST = 100  # characters of a name that a message shows


class UnknownName(FerrymanError, LookupError):
    """A name that is not in its catalogue; the message lists the nearest ones, and what was left out of it."""

    def __init__(self, kind: str, name: str, known: Iterable[str], left_out: Sequence[str] = ()) -> None:
        known = sorted(known)
        short = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}.."  # of a file, it may have any length
        near = difflib.get_close_matches(short.lower(), known, n=3, cutoff=0.5) or known[:12]
        missing = f"; left out, of other packages: {'; '.join(left_out)}" if left_out else ""
        super().__init__(f"unknown {kind} {short!r}; nearest: {', '.join(near) or 'none'}{missing}")
        self.kind, self.name, self.nearest = kind, name, tuple(near)


class PackageError(FerrymanError, RuntimeError):
    """The code of another package, which adds an op, raised. ``function`` names what raised, as module:function."""

    def __init__(self, op: str, function: str, reason: str) -> None:
        super().__init__(f"{op}: {function} raised {reason}; mend or uninstall that package")
        self.op, self.function, self.reason = op, function, reason


class EvidenceError(FerrymanError, ValueError):
    """What an op is judged with is wrong itself: a case, a fill, a domain or a bound. The message names it."""


class Unsupported(FerrymanError, RuntimeError):
    """No implementation in the requested list can serve the call; every failed clause is in the message. Or a gradient
    is differentiated, which no op's is."""


class StrictModeError(FerrymanError, RuntimeError):
    """Strict mode: an implementation that was preferred could not serve the call."""


class CompileError(FerrymanError, RuntimeError):
    """A toolchain refused a kernel. ``log`` holds its output."""

    def __init__(self, backend: str, kernel: str, arch: str, log: str) -> None:
        super().__init__(f"{backend} could not compile {kernel} for {arch}:\n{log.strip()}")
        self.backend, self.kernel, self.arch, self.log = backend, kernel, arch, log


class LaunchError(FerrymanError, RuntimeError):
    """The driver refused a launch, or a launch failed."""


class CaptureError(FerrymanError, RuntimeError):
    """Something that may not happen during CUDA graph capture (compiling, tuning) was about to happen."""


class BackendUnavailable(FerrymanError, RuntimeError):
    """A backend cannot be used here; the message says why and what would make it usable."""


class ProfileError(FerrymanError, ValueError):
    """A device profile file is invalid; the message gives file and line."""


class SettingError(FerrymanError, ValueError):
    """An environment variable or a [tool.ferryman] key is invalid; the message names it."""


class LockfileError(FerrymanError, ValueError):
    """A lockfile is damaged, from a newer version, or holds names that are not identifiers."""


class ResultError(FerrymanError, ValueError):
    """A result document is damaged or from a newer schema."""


class ArtefactError(FerrymanError, ValueError):
    """A folder of compiled kernels cannot be used: its manifest is absent, damaged, or from another version."""


class CapsuleError(FerrymanError, ValueError):
    """A capsule is damaged, too large, from a newer version, or asks for what no capsule may ask for."""


class KernelError(FerrymanError, RuntimeError):
    """A kernel to check could not be loaded, or its process died while loading it; the message says what to do."""


class PortError(FerrymanError, RuntimeError):
    """A model could not be ported or unported; the message names the module."""


class SimulationError(FerrymanError, RuntimeError):
    """The simulator cannot run a kernel, or stopped it: a grid or a workgroup too large, a budget spent."""


class AssemblyError(SimulationError, ValueError):
    """Assembly text that is damaged, cut off, or holds what the simulator does not understand; with its line."""


class UnimplementedInstruction(SimulationError):
    """An instruction, or a form of one, that the simulator does not implement: instruction, kernel and line."""


class QuarantineWarning(UserWarning):
    """An implementation failed to compile and is left out for this device and shape region."""


class ProfileWarning(UserWarning):
    """The device is not in the catalogue, and a generic profile of its family stands in."""

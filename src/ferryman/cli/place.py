"""Where a verb that runs something runs it."""

from __future__ import annotations

import torch

from ferryman.device_profiles import resolve
from ferryman.errors import ArgumentError

_REQUIRED = (
    "a device that is here: cpu, cuda:1 .. (what would run on another device: ferryman ops --device, "
    "ferryman explain --device)"
)


def place(device: str | None, verb: str) -> str:
    """The torch device to run on.

    Raises UnknownName for one that is not here, ArgumentError for a profile's name or a device of another kind.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        raise ArgumentError(verb, "--device", f"{device}, the profile of {resolve(device).title}", _REQUIRED) from None
    if torch_device.type not in ("cpu", "cuda"):
        raise ArgumentError(verb, "--device", device, _REQUIRED)
    resolve(device)
    return str(torch_device)

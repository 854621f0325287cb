"""What every run of cells does to its own process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.text import Text


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
    told = Text.from_ansi(str(error)).plain.strip().splitlines() or [""]
    return f"{type(error).__name__}: {told[0][:200]}"


def device_lost(device: torch.device) -> str | None:
    """After an illegal access a CUDA context serves nothing more; what follows is then not judged."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"the device was lost to an earlier kernel: {str(error).splitlines()[0][:300]}"
    return None

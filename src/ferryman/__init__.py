"""Ferryman carries PyTorch model code across GPU vendors.

Model code calls `ferryman.ops`; `use` asks for implementations, `explain` says which would run and why not the others,
`trace` records which did, `devices` tells what is here.
"""

from __future__ import annotations

from ferryman import ops
from ferryman.device_profiles import Profile
from ferryman.dispatch import Explanation, Trace, explain, reload, strict, trace, use

__all__ = ["Explanation", "Trace", "devices", "explain", "ops", "reload", "strict", "trace", "use"]
__version__ = "0.1.0"


def devices() -> list[Profile]:
    """Profiles of the devices that PyTorch sees here, accelerators first, the CPU last."""
    import torch

    from ferryman.device_profiles import detect

    found = [detect(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    return [*found, detect("cpu")]

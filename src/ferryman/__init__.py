"""Ferryman carries PyTorch model code across GPU vendors.

Model code calls `ferryman.ops`; `use` asks for implementations, `explain` says which would run and why not the others,
`trace` records which did, `devices` tells what is here, `port` puts a model's modules on the ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ferryman.dispatch  # noqa: F401 - defines torch.ops.ferryman
from ferryman import lazy, ops

if TYPE_CHECKING:
    from torch import nn

    from ferryman.device_profiles import Profile
    from ferryman.dispatch import Explanation, Trace, explain, prepare, reload, strict, trace, use
    from ferryman.porting.model.sites import PortReport

__all__ = [
    "Explanation",
    "Trace",
    "devices",
    "explain",
    "ops",
    "port",
    "prepare",
    "reload",
    "strict",
    "trace",
    "unport",
    "use",
]
__version__ = "0.1.0"

if not TYPE_CHECKING:  # where it would allow every name
    _places = dict.fromkeys(
        ("Explanation", "Trace", "explain", "prepare", "reload", "strict", "trace", "use"), "ferryman.dispatch"
    )
    __getattr__ = lazy.attributes(
        __name__,
        {**_places, "Profile": "ferryman.device_profiles"},
        ("backends", "device_profiles", "errors", "files", "settings"),
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def devices() -> list[Profile]:
    """Profiles of the devices that PyTorch sees here, accelerators first, the CPU last."""
    import torch

    from ferryman.device_profiles import detect

    accelerators = [detect(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    return [*accelerators, detect("cpu")]


def port(model: nn.Module) -> PortReport:
    """Put a PyTorch model on Ferryman's ops, in place, where that is proven to be the same; `unport` takes it back.

    Returns what was ported, what stays, and why. Raises PortError where nothing can be ported.
    """
    from ferryman.porting.model import port as porting

    _integrate()
    return porting.port(model)


def unport(model: nn.Module) -> None:
    """Take a model back to what `port` found. An unported one stays as it is."""
    from ferryman.porting.model import port as porting

    porting.unport(model)


def _integrate() -> None:
    """Libraries that are loaded, and whose interfaces a ported model can use."""
    import sys

    if "transformers.modeling_utils" in sys.modules:
        import ferryman.integrations.transformers
    if "diffusers.models.attention_dispatch" in sys.modules:
        import ferryman.integrations.diffusers  # noqa: F401 - likewise

"""Records a capsule in which one kernel is wrong on purpose, through the Python API; the command line cannot.

    python tests/data/record_planted.py --out tests/data/planted.capsule --device cuda

The last column of every row of rms_norm's torch implementation is that of the row before. softmax stands beside it,
right, so that a replay has to tell the two apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ferryman.dispatch import registry
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule.record import record

OP, IMPLEMENTATION = "rms_norm", "torch"


def stale_last_column(*args: Any) -> Any:
    """The right result, but for the last column, which is the row before's. One row alone is right."""
    out = registry.launcher(registry.implementation(OP, IMPLEMENTATION))(*args)
    if out.dim() >= 2 and out.numel() and out.shape[-2] > 1:
        out[..., 1:, -1] = out[..., :-1, -1].clone()
    return out


def planted(device: str | torch.device = "cpu", **options: Any) -> bytes:
    """The capsule's bytes; ``options`` as `ferryman.porting.capsule.record.record` takes them."""
    given = {"ops": [OP, "softmax"], "device": device, **options}
    return record(**given, kernels={(OP, IMPLEMENTATION): stale_last_column})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("planted.capsule"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    capsule.save(planted(given.device), given.out)


if __name__ == "__main__":
    main()

"""What torch allows of float32 products on a GPU."""

from __future__ import annotations

import torch

# By backend and operation, since torch 2.9. Whoever sets those can no longer read torch's older setting for all.
_precision_of = getattr(torch._C, "_get_fp32_precision_getter", None)


def float32_precision() -> str:
    """ "tf32" or "ieee", however it was set."""
    if _precision_of is not None:
        return "tf32" if _precision_of("cuda", "matmul") == "tf32" else "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"

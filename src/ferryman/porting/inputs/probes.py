"""What exact cases (gate G1) of several ops are filled with: values whose sums and products are representable.

What one family alone is probed with stands in its evidence. Each probe is derived in docs/parity.md. All are small
integers and powers of two, which every dtype holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ferryman.ops.draw import Draw

MOST = 60  # elements of a row or column that are not 0: 60 products of at most 4, and a bias of 4, stay below 2^8


def integer(d: Draw) -> Tensor:
    return (d.uniform() * 9).floor() - 4


def digits(d: Draw) -> Tensor:
    """Dropping one of them changes any sum that it is in."""
    return ((d.words(5) & 1) * 2 - 1).double() * ((d.words(6) & 1) + 1).double()


def sparse(d: Draw) -> Tensor:
    """Dense up to 60 rows or columns, then on diagonals. The first row's last element is never 0."""
    if not d.shape:
        return digits(d)
    period = max(1, math.ceil(max(d.shape[-2:]) / MOST))
    here = (d.shape[-1] - 1 - d.columns() + d.rows()) % period == 0
    return torch.where(here, digits(d), 0.0)

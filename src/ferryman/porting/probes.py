"""What exact cases (gate G1) are filled with: values for which an op's every partial result is representable.

Each family's probe is derived in docs/parity.md. All are small integers and powers of two, which every dtype holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ferryman.porting.fills import Draw

MOST = 60  # elements of a row or column that are not 0: 60 products of at most 4, and a bias of 4, stay below 2^8


def integer(d: Draw) -> Tensor:
    return (d.uniform() * 9).floor() - 4


def ties(d: Draw) -> Tensor:
    """One and a half times the first integer whose successor a 16-bit dtype lacks: odd sums about it are ties."""
    first = 2.0**11 if d.dtype == torch.float16 else 2.0**8
    return torch.full(d.shape, 1.5 * first, dtype=torch.float64, device=d.device)


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


def _sign(columns: Tensor) -> Tensor:
    """The Thue-Morse sequence: as many + as - in every 2^n columns, and no period that a tile could have."""
    parity = columns.clone()
    for shift in (32, 16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return 1.0 - 2.0 * (parity & 1).double()


def _level(rows: Tensor) -> Tensor:
    """A small integer for each row."""
    return (rows * 3 % 17 - 8).double()


def _signs(d: Draw) -> Tensor:
    """Other ones in every row; balanced in every even number of columns."""
    return _sign(d.columns() + 2 * d.rows())


def powers(d: Draw) -> Tensor:
    return _signs(d) * torch.exp2((d.rows() * 5 % 7 - 3).double())


def levels(d: Draw) -> Tensor:
    return _level(d.rows()) + _signs(d) * torch.exp2((d.rows() * 3 % 4 - 1).double())


def plateaus(d: Draw) -> Tensor:
    return _level(d.rows()).expand(d.shape).clone()


def support(d: Draw) -> Tensor:
    if d.shape[-1] == 0:
        return d.normal()
    most = d.shape[-1].bit_length() - 1
    count = torch.exp2((most - d.rows() % (most + 1)).double())
    rank = d.words(8).argsort(-1).argsort(-1)
    return _level(d.rows()).expand(d.shape).masked_fill(rank >= count, -math.inf)


def single(d: Draw) -> Tensor:
    first = d.words(8).argsort(-1).argsort(-1) == 0
    return _level(d.rows()).expand(d.shape).masked_fill(~first, -math.inf)


def peaks(d: Draw) -> Tensor:
    """exp of the rest is below 2^-170, which is 0."""
    width = max(d.shape[-1], 1)
    rest = -128 - (d.uniform() * 128).floor()
    return torch.where(d.columns() == (width - 1 - 7 * d.rows()) % width, _level(d.rows()), rest)


def saturated(d: Draw) -> Tensor:
    size = (d.uniform() * 32).floor()
    return torch.where(d.uniform(3) < 0.7, 32 + size, -128 - 4 * size)


def codes(d: Draw) -> Tensor:
    """Walsh functions: rows of one code have the same large product, others a product of 0 (small, where the head is
    no power of two). They are counted from the end, where a causal diagonal ends."""
    seq, depth = d.shape[-2:]
    many = 1 << (depth.bit_length() - 1)
    code = (seq - 1 - d.rows() % max(seq, 1)) % many
    parity = (d.columns() % many) & code
    for shift in (16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return (1.0 - 2.0 * (parity & 1).double()) * (4.0 if depth >= 64 else 8.0)

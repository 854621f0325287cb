"""What an op's arguments may be, as data that fuzzing draws cases from.

A domain says of each argument which values it takes. Sizes are symbols, so that they fit each other: ``N`` stands for
one size throughout a case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ferryman.errors import UnknownName

Choose = Callable[[Sequence[Any]], Any]

VALUES = ("normal", "nonfinite", "tiny", "integer", "uniform", "zeros", "constant", "offset", "large")
PRODUCT = ("normal", "nonfinite", "tiny", "integer", "uniform", "zeros", "constant", "offset")
MODERATE = (*PRODUCT, "moderate")
_SELDOM = (*(False,) * 5, True)


@dataclass(frozen=True)
class Form:
    """One tensor, or a list: its dimensions by symbol, what may fill it, whether it may be absent or of another dtype.

    ``...`` stands for some leading dimensions, which all tensors of a case share. Tensors of one ``group`` have one
    fill. ``dtype``: "storage" is the dtype under test. mixed: any float dtype. ``low`` and ``high`` bound integers that
    no fill makes: numbers or symbols. ``over``: its elements share no memory: the op writes over it, or what one holds
    is not right for every other. ``layouts``: False where the op takes contiguous tensors only.
    ``count``: how many tensors a list has, by symbol; they have one fill, and layouts of their own.
    """

    dims: str
    fills: tuple[str, ...] = VALUES
    optional: bool = False
    mixed: bool = False
    group: str = ""
    dtype: str = "storage"
    low: int | str = 0
    high: int | str = 1
    over: bool = False
    layouts: bool = True
    count: str = ""


@dataclass(frozen=True)
class Sizes:
    """Sizes that are tried: zero, one, primes, powers of two and their neighbours."""

    rows: tuple[int, ...] = (0, 1, 2, 3, 5, 7, 16, 17)
    width: tuple[int, ...] = (0, 1, 2, 3, 7, 16, 31, 64, 65, 127, 128, 251, 384)
    depth: tuple[int, ...] = (0, 1, 2, 5, 16, 37, 64, 67, 96)
    batch: tuple[int, ...] = (0, 1, 2, 3)
    groups: tuple[int, ...] = (1, 2, 3)
    per_group: tuple[int, ...] = (1, 2, 3)
    queries: tuple[int, ...] = (0, 1, 2, 7, 16, 17, 33)
    keys: tuple[int, ...] = (0, 1, 3, 16, 19, 37)
    lengths: tuple[int, ...] = (0, 1, 1, 2, 3, 7, 17)
    head_dim: tuple[int, ...] = (1, 2, 8, 16, 37, 64, 80, 96, 128)
    padding: tuple[int, ...] = (0, 1, 7, 8)
    offset: tuple[int, ...] = (0, 1, 3, 8)
    windows: tuple[int | None, ...] = (None, 1, 5, 64)


class Symbols:
    """Sizes by symbol, each drawn when it is first read."""

    def __init__(self, choose: Choose, sizes: Sizes, domain: Domain) -> None:
        self.sizes, self.choose, self._domain = sizes, choose, domain
        # else a third of all cases, and half of those with many symbols, would have no element
        self._empty = bool(choose(_SELDOM))
        self._drawn: dict[str, int] = {}
        self._leading: tuple[int, ...] | None = None

    def leading(self) -> tuple[int, ...]:
        """The dimensions that ``...`` stands for."""
        if self._leading is None:
            last = getattr(self.sizes, self._domain.last)
            count = self.choose((1, 0, 2, 3))
            pools = [*[self.sizes.batch] * (count - 1), last] if count else []
            self._leading = tuple(self.size(pool) for pool in pools)
        return self._leading

    def size(self, pool: Sequence[int]) -> int:
        """One of a pool; 0 seldom, even where the pool has it."""
        return int(self.choose([n for n in pool if n or self._empty]))

    def __getitem__(self, symbol: str) -> int:
        if symbol not in self._drawn:
            if symbol not in self._domain.symbols:
                raise UnknownName("symbol of a domain", symbol, self._domain.symbols)
            rule = self._domain.symbols[symbol]
            self._drawn[symbol] = self.size(getattr(self.sizes, rule)) if isinstance(rule, str) else int(rule(self))
        return self._drawn[symbol]


Rule = str | Callable[[Symbols], int]
_POOLS: Mapping[str, Rule] = MappingProxyType({"N": "width", "K": "depth", "F": "depth", "B": "batch"})


@dataclass(frozen=True)
class Domain:
    """All arguments of an op.

    arguments: a tensor's `Form`, the values of a scalar as a tuple, or the name of a pool of `Sizes`. symbols: a pool's
    name, or how a size is drawn. last: the pool of the last of the leading dimensions. drawn: changes the arguments of
    a case that was drawn. defined: replaces, in place, what the op gives no meaning to in a storage dtype; it draws
    nothing.
    """

    arguments: Mapping[str, Form | tuple[Any, ...] | str]
    symbols: Mapping[str, Rule] = field(default_factory=lambda: _POOLS)
    last: str = "rows"
    drawn: Callable[[dict[str, Any], Symbols], None] | None = None
    defined: Callable[[dict[str, Any], torch.dtype], None] | None = None


def broadcast(symbol: str) -> Rule:
    """1, or the size of a symbol."""
    return lambda s: int(s.choose((1, s[symbol])))


def multiple(symbol: str, pool: str) -> Rule:
    """A symbol's size, so many times as one of a pool says."""
    return lambda s: s[symbol] * int(s.choose(getattr(s.sizes, pool)))


def positive(pool: str, least: int = 1) -> Rule:
    """One of a pool that is not smaller than ``least``."""
    return lambda s: int(s.choose([n for n in getattr(s.sizes, pool) if n >= least]))

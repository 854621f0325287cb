"""What judges and tools try an op with. Each family's ``evidence.py`` has one record for each of its forward ops.

Everything outside `ferryman.ops` iterates over these records, so that an op is one folder. Only ``op`` and ``cases``
are required. The other fields have a default that follows from the primitive and its cases.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ferryman.ops.domain import Domain
from ferryman.ops.draw import Fill
from ferryman.ops.primitive import STORAGE_DTYPES, Case, TensorSpec

Grid = Literal["small", "full"]
Beside = Literal["peers", "copy", "twin"]
Shape = tuple[int, ...]
Values = Mapping[str, Any]
LARGE_BYTES = 64 << 20  # more than the last cache of any device has
_SHORT = ((1, 4096), (16, 4096), (128, 4096), (256, 8192))  # decoding, and what fits in a cache
_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes that models have, for the calls that a folder of compiled kernels is to serve.

    rows: how many rows of a width to try, one number for each way in which launchers tell few from many. widths: of
    rows, multiples of 64 up to 4096, of 256 up to 16,384, of 1024 up to 32,768, and longer ones. weights: outputs and
    inputs of projections. heads: those of queries, and of keys and values.
    """

    rows: Callable[[int], Sequence[int]]
    widths: tuple[int, ...] = (
        *range(64, 4097, 64),
        *range(4352, 16_385, 256),
        *range(17_408, 32_769, 1024),
        65_536,
        131_072,
    )
    head_dims: tuple[int, ...] = (64, 80, 128, 256)
    tokens: tuple[int, ...] = (1, 2, 7, 16, 33, 64, 100, 333, 512, 1000, 2048)
    lengths: tuple[int, ...] = (1, 3, 16, 100, 1000, 4096)
    # multiples of 16 or not: Triton specialises on either
    heads: tuple[tuple[int, int], ...] = ((32, 8), (32, 32), (8, 1), (28, 4), (48, 16))
    weights: tuple[tuple[int, int], ...] = (
        (4096, 4096),
        (6144, 4096),
        (1024, 2048),
        (14_336, 4096),
        (4096, 14_336),
        (8960, 1536),
        (128_256, 4096),
    )
    vocabularies: tuple[int, ...] = (
        *(32_000, 32_064, 50_257, 50_304, 51_200, 64_000, 100_352, 128_000, 128_256, 129_280, 151_643, 151_936),
        *(152_064, 201_088, 202_048, 256_000, 262_144),
    )


@dataclass(frozen=True)
class Sampler:
    """Random sizes of real models, for `benchmarks/regret.py`. ``less`` divides widths, and bytes by its square."""

    draw: random.Random
    less: int = 1
    widths: Sequence[int] = (4096,)
    most_bytes: int = 512 << 20  # of one tensor
    most_scores: int = 1 << 31  # query-key pairs, all heads

    def around(self, low: float, high: float) -> int:
        """From ``low`` to ``high``, each scale alike."""
        return max(1, round(2 ** self.draw.uniform(math.log2(low), math.log2(max(low, high)))))

    def heads(self) -> tuple[int, int, int, int, int]:
        """Batch, heads of queries, heads of keys, length and head_dim."""
        dim, kv = self.draw.choice((64, 128)), self.draw.choice((1, 2, 4, 8))
        heads, batch = kv * self.draw.choice((1, 2, 4, 8)), self.around(1, 32)
        return batch, heads, kv, self.around(64 // min(self.less, 4), 16_384 // self.less), dim

    def fitting(self, batch: int, heads: int, queries: int, length: int, dim: int) -> int:
        """The batch, halved until its tensors and scores fit."""
        scores, size = self.most_scores // self.less**2, self.most_bytes // self.less**2
        while batch > 1 and (batch * heads * queries * length > scores or batch * heads * length * dim * 2 > size):
            batch //= 2
        return batch


def one_for_all(name: str, first: Shape) -> Shape | None:
    """A tensor has the first one's shape."""
    return first


def of_rows(name: str, first: Shape) -> Shape | None:
    """A weight and a bias have one element for each column; another tensor has the first one's shape."""
    return first[-1:] if name in ("weight", "bias") else first


@dataclass(frozen=True)
class Goal:
    """How fast an op is to be on calls of models, beside others: a row of `benchmarks/goals.py`.

    cases: the calls. reach: times the speed of the quickest of the "peers", of a "copy" of the least bytes (where those
    are LARGE_BYTES or more), or of the "twin", in operations a second. timed: the op, its gradient alone, or a step,
    which is both. twin: the plain call that a case is measured by. most_memory: what a step allocates, its gradients
    too, as a multiple of the bytes of its arguments.
    """

    name: str
    cases: Callable[[Sampler], Iterable[Case]]
    reach: Mapping[Beside, float]
    timed: Literal["forward", "backward", "step"] = "forward"
    twin: Callable[[Case], Case] | None = None
    most_memory: float | None = None


def sampled_cases(
    sampled: Callable[[Sampler], str],
    named: Callable[[str], Case],
    count: int = 12,
    moved: Callable[[Case], int] | None = None,
) -> Callable[[Sampler], list[Case]]:
    """``count`` different cases of a sampler, fewer where it has no more. moved: bytes of a case; then four of any size
    come first, and the others are LARGE_BYTES or more."""

    def cases(s: Sampler) -> list[Case]:
        known = [named(name) for name in dict.fromkeys(sampled(s) for _ in range(20 * count))]
        if moved is None:
            return known[:count]
        large = [case for case in known[4:] if moved(case) >= LARGE_BYTES // s.less**2]
        return [*known[:4], *large[:count]]

    return cases


def moved_rows(case: Case) -> int:
    """x's bytes, read and written, in 16 bits."""
    return 4 * math.prod(case.args["x"].shape)


@dataclass(frozen=True)
class Equivalent:
    """Why edits of one kernel that change no bit are no bugs that the cases miss (`ferryman selftest`).

    kernel: "op.line.function", with the menu line's name; "op.torch" of rules over results, arguments and the
    definition. edits: "old -> new in line", as the self-test prints them; a rule by its name. within: they change
    bits, and ``why`` derives that no result leaves the bounds by them.
    """

    kernel: str
    edits: tuple[str, ...]
    why: str
    within: bool = False


@dataclass(frozen=True)
class Evidence:
    """One forward op. A backward is tried with its forward's.

    cases: arguments to judge it on, of both tiers. dtypes: what "storage" stands for in turn. fuzz: the domain that
    random cases are drawn from; None: its cases with other fills and layouts. fills: contents of its own, which go
    before the common ones of the same name. bench: the cases that it is timed on; None: its first standard case.
    calls: arguments that models call it with, for `ferryman compile`; none: those of ``bench``. like: the shape of an
    argument where the first tensor has a given one (`ferryman explain --shape`); None leaves an optional one out.
    sampled: the name of one random case of a real model's size. named: the case that such a name, or one that ``bench``
    gives, stands for; it reads the sizes in it. contents: such names, of calls whose contents decide their time. goals:
    how fast it is to be beside others. equivalents: why edits of its kernels, and its backward's, change nothing.
    """

    op: str
    cases: Callable[[], Sequence[Case]]
    dtypes: tuple[Any, ...] = STORAGE_DTYPES
    fuzz: Domain | None = None
    fills: tuple[Fill, ...] = ()
    bench: Callable[[Grid], Iterable[Case]] | None = None
    calls: Callable[[ModelSizes], Iterable[Values]] | None = None
    like: Callable[[str, Shape], Shape | None] = one_for_all
    sampled: Callable[[Sampler], str] | None = None
    named: Callable[[str], Case] | None = None
    contents: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()
    equivalents: tuple[Equivalent, ...] = ()


def bench_rows(grid: Grid, itemsize: int = 2) -> list[tuple[int, int]]:
    """(rows, width) that ops of rows are timed on: larger than the last cache and smaller."""
    if grid == "small":
        return [(16, 4096), (8192, 8192)]
    return [*_SHORT, *((max(1, 2 * LARGE_BYTES // (w * itemsize)), w) for w in _WIDTHS)]


class RowCases(NamedTuple):
    """``bench`` and ``named`` of an op of rows."""

    bench: Callable[[Grid], Iterable[Case]]
    named: Callable[[str], Case]


def row_cases(arguments: Callable[[TensorSpec, TensorSpec], Values]) -> RowCases:
    """``arguments`` takes the tensor of rows, and a weight of one row."""

    def named(name: str) -> Case:
        rows, width = (int(n) for n in name.split("x"))
        return Case(name, arguments(TensorSpec((rows, width)), TensorSpec((width,), fill="weight")))

    return RowCases(lambda grid: [named(f"{rows}x{width}") for rows, width in bench_rows(grid)], named)


def sampled_rows(s: Sampler) -> str:
    """The name of a case of rows, of two-byte elements."""
    width = s.draw.choice(s.widths) // min(s.less, 16)
    return f"{s.around(1, max(2, s.most_bytes // s.less**2 / (2 * width)))}x{width}"

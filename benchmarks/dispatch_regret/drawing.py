"""Which cells are judged: shapes of the tuner's grid, and shapes drawn from each op's whole domain."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from ferryman.dispatch import registry
from ferryman.ops.evidence import Sampler
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import grid

WIDTHS = 8  # of rows, drawn anew by each seed. Few, as a kernel is compiled for each
UNTUNED = 0.55  # of the cells: half of those that count, too, where throttled clocks leave some out


@dataclass(frozen=True)
class Cell:
    op: Primitive
    case: Case


def cells(
    ops: Sequence[Primitive],
    count: int,
    size: grid.Grid,
    device: torch.device,
    seed: int,
    unlike: Collection[tuple[str, str]] = (),
) -> list[Cell]:
    """Shapes of the tuner's grid, and UNTUNED of all drawn, ``unlike`` (op, case) pairs; op by op in turns. Equal for
    equal arguments."""
    draw = random.Random(seed)
    queues: dict[str, Iterator[Case]] = {}
    for op in ops:
        known = grid.cases(op, size, device)
        shuffled = draw.sample(known, len(known))
        queues[f"tuned {op.name}"] = iter(shuffled)
        shape_seed = draw.randrange(1 << 30)
        names = {case.name for case in known} | {case for name, case in unlike if name == op.name}
        queues[f"untuned {op.name}"] = drawn(op, device, random.Random(shape_seed), names, widths_of(seed))
    picked: list[Cell] = []
    left = {"untuned": math.ceil(UNTUNED * count)}
    left["tuned"] = count - left["untuned"]
    while queues and len(picked) < count:
        for op in ops:
            for half in ("untuned", "tuned"):
                queue = queues.get(f"{half} {op.name}")
                case = next(queue, None) if queue is not None and left[half] else None
                if case is None:
                    queues.pop(f"{half} {op.name}", None)
                    continue
                left[half] -= 1
                picked.append(Cell(op, case))
        if not any(name.startswith("tuned") for name in queues):  # the grid is at its end
            left["untuned"] += left["tuned"]
            left["tuned"] = 0
    return picked[:count]


def drawn(
    op: Primitive, device: torch.device, draw: random.Random, known: Collection[str], widths: Sequence[int]
) -> Iterator[Case]:
    """Random shapes of real models with other names; small ones on a CPU. None for an op whose evidence has none."""
    evidence = registry.evidence(op)
    if evidence.sampled is None or evidence.named is None:
        return
    seen = set(known)
    sampler = Sampler(draw, 64 if device.type == "cpu" else 1, widths)
    for _ in range(10_000):
        name = evidence.sampled(sampler)
        if name not in seen:
            seen.add(name)
            yield evidence.named(name)


def widths_of(seed: int) -> tuple[int, ...]:
    """WIDTHS multiples of 64 from 256 to 65,536, none of them a power of two, as the grid's are; each scale alike."""
    draw, widths = random.Random(f"widths {seed}"), set[int]()
    while len(widths) < WIDTHS:
        width = 64 * round(2 ** draw.uniform(2, 10))
        if width & (width - 1):
            widths.add(width)
    return tuple(sorted(widths))

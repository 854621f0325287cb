"""Small calls of every op, from their evidence: what a call costs the host does not depend on how much it computes."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry, select
from ferryman.errors import UnknownName
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.cases import cases_of, materialise, specs_of


def calls(op: Primitive, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name, arguments) of an op's small cases that have elements, each of other shapes or scalars; every tensor in
    memory of its own. Those that lie as allocated and are no exact probes, where there are any."""
    whole = [case for case in cases_of(op) if all(0 not in spec.shape for spec in specs_of(case))]
    plain = [c for c in whole if not c.exact and all(spec.layout == "contiguous" for spec in specs_of(c))]
    seen = set()
    for case in plain or whole:
        args = tuple(_alone(a) for a in materialise(case, op, dtype, 0, device))
        facts = tuple(map(_facts, args))
        if facts not in seen:
            seen.add(facts)
            yield case.name, args


def _facts(value: Any) -> Any:
    """What tells calls apart beside contents."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_facts, value)) if isinstance(value, list | tuple) else (type(value), value)


def _alone(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_alone(one) for one in value]
    return value.clone() if isinstance(value, Tensor) else value


def device_of(args: Sequence[Any]) -> torch.device:
    return next(a.device for a in tensors(args))


def tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def torch_call(op: Primitive, args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """PyTorch's own call for an op, as its menu names it (``differentiable``), where that takes this call."""
    view = select.View.of(op, args, select.profile_for(device_of(args)))
    for line in registry.implementations(op.name):
        if select.differentiates(line, view) and all(clause.holds(view) for clause in line.when):
            function = line.load_differentiable()
            assert function is not None
            return lambda: function(*args, None)
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", nargs="+", metavar="OP", help="these ops; default: all")
    parser.add_argument("--sample", type=int, metavar="N", help="N of the ops, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)


def ops_of(given: argparse.Namespace) -> list[Primitive]:
    """What the options ask for, in the registry's order. Exits with 2 where one is unknown."""
    try:
        known = [registry.primitive(name) for name in given.op or registry.primitives()]
    except UnknownName as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    if given.sample is None:
        return known
    drawn = random.Random(given.seed).sample(range(len(known)), min(given.sample, len(known)))
    return [known[i] for i in sorted(drawn)]

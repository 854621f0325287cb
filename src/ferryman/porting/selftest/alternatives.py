"""Right kernels that are not ours: the definition with its sums and products in other orders, splits, trees and
libraries, the shipped kernels, and Triton's with other devices' tiles. The engine must pass them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.porting.inputs.cases import as_tuple, double
from ferryman.porting.mutate import float32, rewrites, right, sources
from ferryman.porting.mutate.rule import mapped
from ferryman.porting.selftest.planting import Kernel, nothing_declared, torch_line, used

# What a launcher reads of a device (units, shared memory, threads), without its name.
DEVICES: Mapping[str, Mapping[str, Any]] = {
    "small_ampere": {"arch": "sm_86", "vendor": "nvidia", "wave": 32, "shared_memory": 101_376, "units": 16},
    "several_rows": {"vendor": "cpu", "units": 1},
    "few_threads": {"max_threads": 256, "units": 8},
}


@dataclass(frozen=True)
class Alternative:
    """One right kernel. backend "triton" runs where Triton does: interpreted in a worker, compiled on a GPU."""

    op: str
    name: str
    make: Callable[[], Kernel]
    line: Implementation
    backend: str = "torch"

    @property
    def key(self) -> str:
        return f"{self.op}.{self.backend}.{self.name}"


def _float64(op: str) -> Kernel:
    known = registry.primitive(op)
    return lambda *args: float32.finish(known, as_tuple(known.body(*double(args[:-1]))), args[:-1])


def _copied(op: str) -> Kernel:
    """The shipped kernel on contiguous copies: another layout, another path inside the library."""
    known, kernel = registry.primitive(op), registry.launcher(torch_line(op))

    def copied(*args: Any) -> Any:
        result = kernel(*[mapped(lambda a: a.contiguous().clone(), value) for value in args])
        return float32.finish(known, as_tuple(result), args[:-1])  # a result's strides may follow an argument's

    return copied


def _rewritten(op: str, one: rewrites.Rewrite) -> Kernel:
    return float32.in_float32(registry.primitive(op), None, lambda _: rewrites.Rewritten(one.replaces))


def _elsewhere(line: Implementation, facts: Mapping[str, Any]) -> Kernel:
    kernel = registry.launcher(line)
    return lambda *args: kernel(*args[:-1], dataclasses.replace(args[-1], **facts))


def alternatives(ops: Sequence[str], backend: str) -> list[Alternative]:
    """Every right alternative of the ops, of one way of running."""
    alternates = []
    for op in ops:
        if backend == "torch":
            line, plain = torch_line(op), nothing_declared(op)
            alternates += [
                Alternative(op, "shipped", functools.partial(registry.launcher, line), line),
                Alternative(op, "copied", functools.partial(_copied, op), line),
                Alternative(op, "float64", functools.partial(_float64, op), plain),
                Alternative(op, "float32", functools.partial(float32.in_float32, registry.primitive(op)), plain),
            ]
            alternates += [
                Alternative(op, r.name, functools.partial(_rewritten, op, r), plain)
                for r in right.RIGHT
                if r.applies(set(used(op)))
            ]
            continue
        general, *others = sources.interpretable(op) or (None,)
        if general is None:
            continue
        alternates.append(Alternative(op, "shipped", functools.partial(registry.launcher, general), general, "triton"))
        alternates += [
            Alternative(op, f"shipped {line.name}", functools.partial(registry.launcher, line), line, "triton")
            for line in others
        ]
        alternates += [
            Alternative(op, name, functools.partial(_elsewhere, general, facts), general, "triton")
            for name, facts in DEVICES.items()
        ]
    return alternates

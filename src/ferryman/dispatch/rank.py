"""Implementations and configurations in the order in which they are promising, by prediction alone.

Untuned dispatch takes the first that can serve the call; `ferryman tune` measures the first eight. Implementations go
in the order of `cost.ranked`, each as its own plan has it. What other configurations an implementation has it ranks
itself (`Implementation.configurations`: it knows its tiles, waves and splits), in a unit of its own; the cost model's
seconds for its plan turn that into theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferryman.device_profiles import Profile, resolve
from ferryman.dispatch import cost, registry, select
from ferryman.ops.primitive import Primitive


@dataclass(frozen=True)
class Ranked:
    """One way to run a call. configuration: its name, "" where the implementation has one for every call. own: it is
    what the launcher takes by itself. seconds: predicted; None where nothing near was measured. behind: times its
    implementation's own plan, predicted."""

    implementation: str
    configuration: str = ""
    own: bool = True
    seconds: float | None = None
    behind: float = 1.0

    @property
    def label(self) -> str:
        """Its name among others of the call."""
        return self.implementation if self.own else f"{self.implementation} {self.configuration}"


def rank(
    op: Primitive | Callable[..., Any],
    args: Sequence[Any],
    device: Profile | torch.device | str | None = None,
    names: Sequence[str] | None = None,
) -> list[Ranked]:
    """Every implementation that can serve a call in its own plan, the most promising first; then the other
    configurations, by predicted time.

    args: in schema order; tensors may be on "meta". device: a profile or its name, which need not be here; by default
    the accelerator, else the CPU. names: these implementations only, in order of preference; without them the
    definition is left out, which runs anywhere. Raises UnknownName.
    """
    known, profile = op if isinstance(op, Primitive) else registry.primitive(op), resolve(device)
    view = select.View.of(known, args, profile)
    menu = {
        line.name: line
        for line in registry.implementations(known.name)
        if (names or line.backend != "definition") and not select.refusals(line, view, profile, absent=True)
    }
    order = select.preferred(known, profile)
    first = select.leading([n for n in order if n in menu], menu, view)
    wanted = [*first, *order, *menu] if names is None else names
    predicted = cost.predictions(known, cost.work_of(known, args), profile)
    plans, others = [], []
    for name in cost.ranked([n for n in dict.fromkeys(wanted) if n in menu], predicted):
        seconds = predicted[name][0] if name in predicted else None
        configurations = menu[name].ranked_configurations(args, select.target_of(profile))
        own, *rest = configurations or ("",)
        plans.append(Ranked(name, own, True, seconds))
        for other in rest:
            behind = configurations[other] / configurations[own]
            others.append(Ranked(name, other, False, None if seconds is None else seconds * behind, behind))
    return [*plans, *sorted(others, key=lambda r: (math.inf if r.seconds is None else r.seconds, r.behind))]

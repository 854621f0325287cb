"""How much slower than the best the model's choices are, for cells that were left out of the fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cost_fit.fitting import table
from cost_fit.measured import Measured
from ferryman.device_profiles import Profile
from ferryman.dispatch import cost, kernel_code, lockfile_entry, near, registry, select

CHOOSERS = ("preference", "cost model", "near regions", "dispatch")
Cell = dict[str, Measured]  # by implementation


def family(case: str) -> str:
    """What cells of an op share that are left out together: the numbers of heads, their size and whether there is one
    query; where a case has none of these, all sizes but the first: the weight of a product, or the width."""
    return " ".join(w for w in case.split() if w[0] in "HD" or w == "Q1") or case.partition("x")[2]


def regret(measured: Sequence[Measured], profile: Profile, whole: bool = False) -> dict[str, dict[str, list[float]]]:
    """By op, for every cell left out (or, with ``whole``, each family of cells): the regret of each of CHOOSERS.

    The profile's preference alone; the cost model without a lockfile; what regions near it predict, else preference;
    and as dispatch has it with a lockfile of what is left: regions close to it, else the cost model, else regions near.
    """
    cells_of: dict[tuple[str, str], Cell] = defaultdict(dict)
    for one in measured:
        cells_of[one.group, one.case][one.implementation] = one
    families: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for (group, case), here in cells_of.items():
        families[group, family(case) if whole else case].append(here)
    regrets: dict[str, dict[str, list[float]]] = {}
    for (group, _), left_out in families.items():
        gone = {next(iter(cell.values())).case for cell in left_out}
        rest = [m for m in measured if m.group == group and m.case not in gone]
        fitted = table(rest, profile).get(group, {})
        others = [cell for (g, case), cell in cells_of.items() if g == group and case not in gone]
        for cell in left_out:
            if len(cell) > 1:
                _judge(cell, others, fitted, profile, regrets.setdefault(group, {c: [] for c in CHOOSERS}))
    return regrets


def _judge(
    here: Cell,
    others: Sequence[Cell],
    fitted: Mapping[str, Mapping[str, cost.Coefficients]],
    profile: Profile,
    into: dict[str, list[float]],
) -> None:
    one = next(iter(here.values()))
    names = select.preferred(registry.primitive(one.op), profile)
    menu = {line.name: line for line in registry.implementations(one.op)}
    modelled = cost.predictions_of(fitted, one.work, profile)
    entries = {next(iter(cell.values())).region: _entry(cell) for cell in others}
    entries.pop(one.region, None)
    beside = near.predict(one.region, one.work, profile, entries)
    orders = (
        names,
        select.foreseen(names, menu, None, modelled)[0],
        names if beside is None else beside.ranked([*names, *menu]),
        select.foreseen(names, menu, beside, modelled)[0],
    )
    least = min(m.seconds for m in here.values())
    for chooser, order in zip(CHOOSERS, orders, strict=True):
        taken = next((n for n in order if n in here), None)  # what is not here refused the call
        if taken is not None:
            into[chooser].append(here[taken].seconds / least - 1)


def _entry(cell: Mapping[str, Measured]) -> lockfile_entry.Entry:
    best = min(cell.values(), key=lambda m: m.seconds)
    return lockfile_entry.Entry(
        implementation=best.implementation,
        seconds=best.seconds,
        kernels=kernel_code.digest(best.op),
        bytes=best.work.bytes,
        flops=best.work.flops,
        candidates=[lockfile_entry.Candidate(implementation=n, seconds=m.seconds) for n, m in cell.items()],
    )

"""Which implementation runs for these arguments on this device, and why not the others."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ferryman import settings
from ferryman.backends import redirect
from ferryman.backends.base import Target
from ferryman.backends.precision import float32_precision
from ferryman.backends.triton import interpreting
from ferryman.device_profiles import Profile, detect
from ferryman.device_profiles import profile as named_profile
from ferryman.dispatch import cost, lockfile, near, registry
from ferryman.dispatch.state import State
from ferryman.errors import StrictModeError, Unsupported
from ferryman.ops.menu import Implementation, named
from ferryman.ops.primitive import Primitive

LAST_RESORTS = ("torch", "definition")
AUTOGRAD = "autograd"  # the source of an order that PyTorch's own differentiable call leads
AUTOGRAD_BYTES = "autograd.bytes"  # the threshold of a profile up to which it does; without one it never does
_quarantined: dict[tuple[str, str, Any, str], str] = {}
_foreseen: dict[tuple[str, str, Any], tuple[Mapping[str, Any], near.Prediction | None, float]] = {}
_MOST_FORESEEN = 4096
_orders: dict[str, tuple[Any, Any, Profile, tuple[str, ...]]] = {}  # of the menu, backends and profile seen last
_MOST_THREADS = 1024  # of a block, on any device
_lock = threading.Lock()


@dataclass(frozen=True)
class View:
    """A call as clauses see it."""

    args: Mapping[str, Any]
    features: frozenset[str]
    shared_memory: int
    flags: Mapping[str, Any]
    vendor: str = ""
    thresholds: Mapping[str, int] = field(default_factory=dict)
    max_threads: int = 1024
    known: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, op: Primitive, args: Sequence[Any], profile: Profile) -> View:
        flags = {
            "interpreted": profile.vendor == "cpu" and interpreting(),
            "tf32": float32_precision() == "tf32",
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        named_args = dict(zip(op.names, args, strict=True))
        threads = target_of(profile).max_threads
        return cls(
            named_args, profile.features, profile.shared_memory, flags, profile.vendor, profile.thresholds, threads
        )


@dataclass(frozen=True)
class Decision:
    """What runs. ``refused`` pairs each preferred implementation that could not serve the call with its reasons.

    ``source`` says what put the order: "request", "lockfile" (this region was measured), "predicted ..." (from regions
    near it, or by the cost model), "autograd" (small tensors and a gradient, which PyTorch's own differentiable call
    serves), "menu" (a line that leads for such calls) or "profile". ``seconds``: of implementations, where measured or
    predicted. ``configuration``: the one that was measured fastest in this region;
    "" is the implementation's own plan.
    """

    implementation: Implementation
    refused: tuple[tuple[Implementation, tuple[str, ...]], ...]
    source: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    configuration: str = ""

    @property
    def fallback(self) -> str | None:
        """Why something less preferred runs; None when the first choice does."""
        if not self.refused:
            return None
        return "; ".join(f"{line.name}: {', '.join(why)}" for line, why in self.refused)


@lru_cache(maxsize=None)
def target_of(profile: Profile, configuration: str = "") -> Target:
    """The facts that a kernel's launcher may read, and which of its configurations it takes.

    Triton's interpreter, which a CPU has, takes any block: launchers plan for it as for the largest.
    """
    return Target(
        arch=profile.arch,
        vendor=profile.vendor,
        wave=profile.wave,
        shared_memory=profile.shared_memory,
        max_threads=_MOST_THREADS if profile.vendor == "cpu" else profile.max_threads,
        units=profile.units or 1,
        l2_bytes=profile.l2_bytes or 0,
        features=profile.features,
        registers_per_unit=profile.registers_per_unit or 0,
        configuration=configuration,
    )


def profile_for(device: torch.device) -> Profile:
    """The profile of a tensor's device: detected, unless settings name one for the accelerator, or a route does."""
    route = redirect.current()
    if route is not None and route.profile is not None:
        known: Profile = route.profile
        return known
    name = settings.get("profile")
    if name and device.type != "cpu":
        return named_profile(name)
    return detect(device)


def refusals(line: Implementation, view: View, profile: Profile, *, absent: bool = False) -> list[str]:
    """Why an implementation cannot serve a call on a device; empty when it can.

    ``absent``: the device need not be here, so only the vendor and the clauses are asked.
    """
    if profile.vendor not in registry.backends()[line.backend].vendors:
        return [f"{line.backend} does not serve {profile.vendor} devices"]
    reasons = [] if absent else list(registry.probe(line.backend, profile.vendor))
    if view.flags["deterministic"] and not line.deterministic:
        reasons.append("not deterministic; required by torch.use_deterministic_algorithms")
    unmet = (clause.reason(view) for clause in line.when if not clause.holds(view))
    return reasons + [why for why in unmet if why is not None]  # another thread may have compiled what was missing


@dataclass(frozen=True)
class _Order:
    """What is tried, first to last; where the order is from; and what is known of the times."""

    lines: list[Implementation]
    source: str
    seconds: Mapping[str, float] = field(default_factory=dict)


def preferred(op: Primitive, profile: Profile) -> list[str]:
    """The profile's order of preference, then what runs anywhere; what is composed comes before the definition only.

    A backend that can never serve this vendor is no choice that was fallen back from.
    """
    menu, backends = registry.implementations(op.name), registry.backends()
    known = _orders.get(op.name)
    if known is None or known[0] is not menu or known[1] is not backends or known[2] is not profile:
        lines = [x for x in menu if profile.vendor in backends[x.backend].vendors]
        order = named(lines, [*profile.preference(op.name), *LAST_RESORTS])
        order = sorted(order, key=lambda line: (line.backend == "definition", line.composed))
        known = _orders[op.name] = (menu, backends, profile, tuple(line.name for line in order))
    return list(known[3])


def leading(names: Sequence[str], menu: Mapping[str, Implementation], view: View) -> list[str]:
    """Those that the menu says go before the profile's order for this call, and that can serve it."""
    lines = (menu[n] for n in names)
    return [x.name for x in lines if x.leads and all(clause.holds(view) for clause in (*x.leads, *x.when))]


def differentiates(line: Implementation, view: View) -> bool:
    """Whether PyTorch's own differentiable call may stand for a line, by what the menu says of this call."""
    return line.differentiable is not None and all(clause.holds(view) for clause in line.differentiable_when)


def _differentiated(menu: Mapping[str, Implementation], view: View) -> list[str]:
    """Lines that lead where a gradient is asked for, because the host's time for a Function of ours passes what a
    kernel can save on tensors of that size. Calls that are sent elsewhere, to a simulator, launch our kernels."""
    limit = view.thresholds.get(AUTOGRAD_BYTES)
    if limit is None or redirect.current() is not None:
        return []
    if sum(x.numel() * x.element_size() for x in view.args.values() if isinstance(x, torch.Tensor)) > limit:
        return []
    serve = [x for x in menu.values() if differentiates(x, view) and all(clause.holds(view) for clause in x.when)]
    return [line.name for line in serve]


def _near(
    op: Primitive, region: str, work: cost.Work, profile: Profile, entries: Mapping[str, Any]
) -> near.Prediction | None:
    """`near.predict`, once for a region: it takes 1 ms over 122 measured ones, and a length grows with each token."""
    key, scale = (op.name, region, profile.identity_key()), cost.scale(work, profile)
    known = _foreseen.get(key)
    if known is None or known[0] is not entries:  # the lockfile was read again
        if len(_foreseen) >= _MOST_FORESEEN:
            _foreseen.clear()
        known = _foreseen[key] = (entries, near.predict(region, work, profile, entries), scale)
    _, predicted, there = known
    return None if predicted is None else predicted.carried(scale / there)


def _order(
    op: Primitive,
    args: Sequence[Any],
    profile: Profile,
    region: str,
    state: State,
    view: View,
    differentiated: bool = False,
) -> _Order:
    menu = {line.name: line for line in registry.implementations(op.name)}
    allowed = state.allowed(op.name)
    if allowed is not None:
        return _Order(named(tuple(menu.values()), allowed), "request")
    names = preferred(op, profile)
    own = _differentiated(menu, view) if differentiated else []
    if own:
        return _Order([menu[name] for name in dict.fromkeys([*own, *names])], AUTOGRAD)
    first = leading(names, menu, view)
    names, source = [*dict.fromkeys([*first, *names])], "menu" if first else "profile"
    seconds: dict[str, float] = {}
    entries = lockfile.entries(op.name, profile)
    locked = entries.get(region)
    if locked is not None and profile.vendor in registry.backends()[menu[locked.implementation].backend].vendors:
        seconds = locked.times
        seconds[locked.implementation] = locked.seconds
        names, source = [locked.implementation, *sorted(seconds, key=seconds.__getitem__), *names], "lockfile"
    elif entries or cost.knows(op.name, profile):
        work = cost.work_of(op, args)
        predicted = _near(op, region, work, profile, entries)
        if first and predicted is not None and predicted.distance > near.BEFORE:
            predicted = None  # regions farther off may lie where the line does not lead
        modelled = cost.predictions(op, work, profile)
        names, foretold, seconds = foreseen(names, menu, predicted, modelled, first)
        source = foretold if foretold != "profile" else source
    backends = registry.backends()
    serves = [n for n in dict.fromkeys(names) if n in menu and profile.vendor in backends[menu[n].backend].vendors]
    return _Order([menu[name] for name in serves], source, seconds)


def _composed_last(names: Sequence[str], menu: Mapping[str, Implementation], first: Collection[str] = ()) -> list[str]:
    """What is composed behind what can serve besides, before the definition, wherever it was not measured itself: its
    many launches take as long for less work, and its intermediate results may not fit for more. Not one of ``first``,
    which the menu says leads."""
    if not any(menu[n].composed for n in names):
        return list(names)
    return sorted(names, key=lambda n: (menu[n].backend == "definition", menu[n].composed and n not in first))


def foreseen(
    names: Sequence[str],
    menu: Mapping[str, Implementation],
    beside: near.Prediction | None,
    modelled: Mapping[str, tuple[float, float]],
    first: Collection[str] = (),
) -> tuple[list[str], str, dict[str, float]]:
    """The order of a call that nobody measured, what put it, and the seconds that it goes by.

    names: the profile's preference, which stands where nothing speaks against it. ``beside``: what `near` predicts;
    ``modelled``: what `cost` does, seconds and error by implementation. ``first``: lines that the menu says lead.
    """
    judged = {name for name, (_, error) in modelled.items() if error < math.inf}
    beside = beside and beside.with_kin(menu)
    if beside is not None and beside.goes_before(judged):
        # regions near, but outside what a line is made for, say nothing of it
        covered = {*beside.seconds, *beside.failed}
        outside = [n for n in names[:1] if menu[n].partial and n not in covered]
        order = _composed_last([*dict.fromkeys([*outside, *beside.ranked([*names, *menu])])], menu)
        return order, str(beside), dict(beside.seconds)
    seconds = {name: value for name, (value, _) in modelled.items()}
    order = cost.ranked([*names, *(n for n in modelled if n in menu and n not in names)], modelled)
    order = _composed_last(order, menu, first)
    if order[: len(names)] == list(names):
        return list(names), "profile", seconds
    return order, "predicted by the cost model", seconds


def configuration_of(
    op: Primitive, args: Sequence[Any], profile: Profile, line: Implementation, region: str = ""
) -> str:
    """Which configuration of an implementation was measured fastest in a call's region; "": its own plan. A region is
    wider than a call, and its file may be edited: a name that is not listed for this very call is not taken."""
    if line.configurations is None:
        return ""
    entry = lockfile.entries(op.name, profile).get(region or lockfile.region(op, args))
    name = "" if entry is None else entry.configuration_of(line.name)
    try:
        return name if name and name in line.ranked_configurations(args, target_of(profile)) else ""
    except ImportError:  # its toolchain is not here: the device is not, either
        return ""


def traced_lines(op: Primitive, profile: Profile) -> list[Implementation]:
    """Lines whose form torch.compile may trace on a device when nothing is requested, in the profile's order, up to the
    first without a form that serves every call.

    Measured choices that come with the package, and the cost model's, are left out of it: what a vendor's call in the
    graph saves the host is no part of them. A lockfile that the user names is obeyed, call by call.
    """
    if lockfile.covers(op.name, profile):
        return []
    lines = (registry.implementation(op.name, name) for name in preferred(op, profile))
    before = itertools.takewhile(lambda line: line.traced is not None or line.partial, lines)
    return [x for x in before if x.traced is not None and not registry.probe(x.backend, profile.vendor)]


def select(
    op: Primitive,
    args: Sequence[Any],
    profile: Profile,
    state: State,
    *,
    absent: bool = False,
    differentiated: bool = False,
) -> Decision:
    """Choose. ``differentiated``: autograd is to know the result, so that its way through the host counts.

    Raises Unsupported when a request is exhausted, StrictModeError when strict mode forbids the fallback.
    """
    view = View.of(op, args, profile)
    region = lockfile.region(op, args)
    order = _order(op, args, profile, region, state, view, differentiated)
    refused: list[tuple[Implementation, tuple[str, ...]]] = []
    passed: list[Implementation] = []
    named_in_full = state.allowed(op.name) or ()
    for line in order.lines:
        if line.partial and line.name not in named_in_full and not all(clause.holds(view) for clause in line.when):
            passed.append(line)
            continue  # made for other calls: nothing is fallen back from
        why = refusals(line, view, profile, absent=absent)
        broken = _quarantined.get((op.name, line.name, profile.identity_key(), region))
        if broken is not None:
            why.append(f"quarantined: {broken}")
        if not why:
            if order.source.startswith("predicted"):  # what the profile does not prefer is no choice fallen back from
                names = preferred(op, profile)
                before = names[: names.index(line.name)] if line.name in names else names
                refused = [(other, reasons) for other, reasons in refused if other.name in before]
            tuned = configuration_of(op, args, profile, line, region)
            decision = Decision(line, tuple(refused), order.source, order.seconds, tuned)
            if state.strict and refused:
                raise StrictModeError(
                    f"{op.name}: strict mode, and {line.name} would stand in. {decision.fallback}. "
                    "Leave strict mode, or request an implementation with ferryman.use(...)"
                )
            return decision
        refused.append((line, tuple(why)))
    allowed = ", ".join(state.allowed(op.name) or ())
    known = ", ".join(line.name for line in registry.implementations(op.name))
    others = [(line, refusals(line, view, profile, absent=absent)) for line in passed]
    reasons = "; ".join(f"{line.name}: {', '.join(why)}" for line, why in (*others, *refused))
    raise Unsupported(
        f"{op.name}: none of the requested implementations ({allowed}) can serve this call on {profile.name}. "
        f"{reasons or 'none of them implements it'}. {op.name} has: {known}"
    )


def quarantine(op: Primitive, args: Sequence[Any], line: Implementation, profile: Profile, why: str) -> bool:
    """Leave an implementation out for this device and shape region; True the first time."""
    key = (op.name, line.name, profile.identity_key(), lockfile.region(op, args))
    with _lock:
        new = key not in _quarantined
        _quarantined[key] = why.splitlines()[0] if why else "compile failure"
        return new


def clear_quarantine() -> None:
    with _lock:
        _quarantined.clear()


def quarantined() -> Mapping[tuple[str, str, Any, str], str]:
    return dict(_quarantined)


def explain_rows(
    op: Primitive, args: Sequence[Any], profile: Profile, state: State, *, absent: bool, whole: bool = False
) -> tuple[list[tuple[Implementation, str, list[str]]], Decision | None]:
    """(implementation, "chosen" | "available" | "refused" | "not requested", reasons) for the whole menu.

    And the decision: None where the call would raise. ``whole``: more outputs are asked for than PyTorch's own
    differentiable calls give.
    """
    view = View.of(op, args, profile)
    region = lockfile.region(op, args)
    try:
        grads = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        differentiated = grads and not whole
        decision: Decision | None = select(op, args, profile, state, absent=absent, differentiated=differentiated)
    except (Unsupported, StrictModeError):
        decision = None
    chosen = None if decision is None else decision.implementation
    allowed = state.allowed(op.name)
    rows = []
    for line in registry.implementations(op.name):
        why = refusals(line, view, profile, absent=absent)
        broken = _quarantined.get((op.name, line.name, profile.identity_key(), region))
        if broken is not None:
            why.append(f"quarantined: {broken}")
        if allowed is not None and not any(map(line.answers, allowed)):
            rows.append((line, "not requested", why))
        else:
            rows.append((line, "refused" if why else "chosen" if line == chosen else "available", why))
    return rows, decision

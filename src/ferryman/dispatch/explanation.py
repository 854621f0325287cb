"""Why a call runs where it runs, on a device that is here or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.device_profiles import Profile, resolve
from ferryman.dispatch import lockfile, registry, select, state
from ferryman.dispatch.order import in_order, order_of
from ferryman.errors import CompileError
from ferryman.ops.primitive import Primitive

_SOURCES = {
    "request": "as requested",
    "lockfile": "measured in this region",
    "menu": "which leads for such calls",
    select.AUTOGRAD: "PyTorch's own differentiable call, for a gradient of small tensors (thresholds.autograd.bytes)",
    "profile": "by the profile's preference",
}


@dataclass(frozen=True)
class Row:
    """One implementation: "chosen", "available", "refused" or "not requested", with actual against required.

    seconds: measured in this region if the explanation's source is "lockfile", else predicted; None where neither is.
    configuration: of what is chosen, the one that was measured fastest in this region; "" is its own plan.
    """

    implementation: str
    verdict: str
    reasons: tuple[str, ...]
    conditions: tuple[str, ...]
    accumulation: str
    roundings: tuple[str, ...]
    seconds: float | None = None
    configuration: str = ""


@dataclass(frozen=True)
class Explanation:
    """The whole menu of an op for one call. Prints as text; ``rows`` and ``to_dict`` are for programs.

    source: what put the order: "request", "lockfile" (this region was measured), "predicted ...", "autograd" (a
    gradient is asked for, and the tensors are small), "menu" (a line that leads for such calls) or "profile" (its
    stated preference); None where the call would raise. case: the call of this region that was measured; "" for none.
    launches: each Triton kernel that the chosen line would launch, with its tile and its other constants, warps and
    stages.
    """

    op: str
    device: str
    here: bool
    region: str
    rows: tuple[Row, ...]
    source: str | None = None
    case: str = ""
    launches: tuple[str, ...] = ()

    @property
    def chosen(self) -> str | None:
        return next((row.implementation for row in self.rows if row.verdict == "chosen"), None)

    def to_dict(self) -> dict[str, Any]:
        rows = [vars(row) for row in self.rows]
        return {
            "op": self.op,
            "device": self.device,
            "here": self.here,
            "region": self.region,
            "source": self.source,
            "case": self.case,
            "launches": list(self.launches),
            "rows": rows,
        }

    def __str__(self) -> str:
        place = self.device if self.here else f"{self.device}, which is not here: backends were not probed"
        lines = [f"{self.op} on {place}", f"  {self.region}"]
        for row in self.rows:
            mark = "->" if row.verdict == "chosen" else "  "
            source = f", {_SOURCES.get(self.source or '', self.source)}" if row.verdict == "chosen" else ""
            form = f", {row.configuration}" if row.configuration else ""
            lines.append(f"{mark} {row.implementation:<12} {row.verdict}{source}{form}{self._time(row)}")
            lines += [f"{'':18}{reason}" for reason in row.reasons]
            lines += [f"{'':18}launches {one}" for one in self.launches if row.verdict == "chosen"]
        return "\n".join(lines)

    def _time(self, row: Row) -> str:
        if row.seconds is None:
            return ""
        measured = self.source == "lockfile"
        beside = f" for {self.case}" if measured and self.case else ""
        return f": {'' if measured else 'about '}{row.seconds * 1e6:.3g} us{beside}"


def explain(
    op: str | Callable[..., Any], *args: Any, device: Profile | torch.device | str | None = None, **kwargs: Any
) -> Explanation:
    """Which implementation would run for these arguments, and why not the others.

    op: the op's function or name. args, kwargs: the call's arguments; tensors may be on "meta". device: a profile's
    name ("mi300x") for a device that need not be here; by default the tensors' own. Raises ArgumentError for
    invalid arguments, UnknownName for an unknown op or device, PackageError where another package's op raises.
    """
    known = registry.primitive(op)
    whole = bool(kwargs.get("return_lse")) and "return_lse" not in known.names
    kwargs = {k: v for k, v in kwargs.items() if k in known.names or k != "return_lse"}
    bound = bind(known, args, kwargs)
    with registry.blamed(known):
        return _explained(known, bound, device, whole)


def _explained(
    known: Primitive, bound: tuple[Any, ...], device: Profile | torch.device | str | None, whole: bool
) -> Explanation:
    known.check(*bound)
    tensors = [a for a in bound if isinstance(a, Tensor)]
    if device is not None:
        profile = resolve(device)
    elif tensors and tensors[0].device.type != "meta":
        profile = select.profile_for(tensors[0].device)
    else:
        profile = resolve(None)
    here = device is None or _is_here(profile)
    order = order_of(known, bound)
    if order is not None:  # what is called is the op of views
        bound = in_order(known, bound, order)
    rows, decision = select.explain_rows(known, bound, profile, state.effective(), absent=not here, whole=whole)
    region = lockfile.region(known, bound)
    entry = lockfile.entries(known.name, profile).get(region)
    return Explanation(
        known.name,
        profile.name,
        here,
        region,
        tuple(
            Row(
                line.name,
                verdict,
                tuple(why),
                tuple(map(str, line.when)),
                line.accumulation,
                line.roundings,
                None if decision is None else decision.seconds.get(line.name),
                "" if decision is None or verdict != "chosen" else decision.configuration,
            )
            for line, verdict, why in rows
        ),
        None if decision is None else decision.source,
        "" if entry is None else entry.case,
        () if decision is None else _launches(decision, bound, profile),
    )


def _launches(decision: select.Decision, args: tuple[Any, ...], profile: Profile) -> tuple[str, ...]:
    """What a Triton line would launch, by its launcher run on tensors without data. Interpreted, any tile is one;
    without Triton nothing is known of it."""
    line = decision.implementation
    if line.backend != "triton" or profile.vendor == "cpu":
        return ()
    from ferryman.backends.triton import interpreting, recorded

    if interpreting():
        return ()
    target, given = select.target_of(profile, decision.configuration), [_without_data(value) for value in args]
    texts = []
    try:
        launch = registry.launcher(line)
        launched = recorded([lambda: launch(*given, target)])
    except CompileError:
        return ()
    except Exception as error:  # noqa: BLE001 - another package's launcher; what would run is known all the same
        return (f"what cannot be said: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",)
    for one in launched:
        constants = [f"{n}={v}" for n, v in one.constexprs.items() if type(v) is int]
        stages = "" if one.num_stages is None else f", {one.num_stages} stage{'s' * (one.num_stages != 1)}"
        texts.append(f"{one.name}: {', '.join([*constants, f'{one.num_warps} warps'])}{stages}")
    return tuple(texts)


def _without_data(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_data(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def bind(known: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A call's arguments in schema order. Defaults come from the public function where the schema has none (attention's
    are keywords)."""
    from ferryman import ops

    face = getattr(ops, known.name, None)
    if face is None:
        bound: tuple[Any, ...] = known.bind(args, kwargs)
        return bound
    import inspect

    signature = inspect.signature(face)
    own = set(known.names) - set(signature.parameters)  # of the schema alone, as a quantised cache's scales
    call = signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in own})
    call.apply_defaults()
    return tuple(kwargs.get(name) if name in own else call.arguments[name] for name in known.names)


def _is_here(profile: Profile) -> bool:
    if profile.vendor == "cpu":
        return True
    if not torch.cuda.is_available():
        return False
    here = {resolve(torch.device("cuda", i)).name for i in range(torch.cuda.device_count())}
    return profile.name in here

"""The parity check of one cell: an implementation against the float64 evaluation of its op's definition.

Gates G0 to G5 (gates.py) read the outputs of some runs; G6 (batch.py) and G7 (vjp.py) run again. docs/parity.md says
what each requires and when it does not apply.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import preparing, registry
from ferryman.dispatch.select import View, refusals, target_of
from ferryman.errors import CompileError, EvidenceError, UnimplementedInstruction
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.inputs import mutation
from ferryman.porting.inputs.cases import as_tuple
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging import batch, gates, hygiene, route, vjp
from ferryman.porting.judging.gates import judge
from ferryman.porting.judging.prepared import SEED, Prepared, prepare
from ferryman.porting.judging.results import Cell, Gate, GateName, Verdict

__all__ = ["SEED", "Prepared", "check_cell", "judge", "prepare"]


@contextlib.contextmanager
def _asked_for_determinism() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_cell(
    primitive: Primitive,
    implementation: Implementation,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    profile: Profile | None = None,
    *,
    seed: int = SEED,
    prepared: Prepared | None = None,
    kernel: Callable[..., Any] | None = None,
    times: int = 3,
    simulate: Profile | None = None,
    keep: Callable[[tuple[Any, ...]], None] | None = None,
    ahead: bool = False,
) -> Cell:
    """Run one implementation on one case and judge it.

    It runs ``times`` times, and again for some gates. ``kernel`` replaces the implementation's own launcher, under its
    declarations (mutants, users' kernels). A kernel that raises fails; one that its toolchain cannot compile is
    QUARANTINED; out of memory is NOT_RUN. ``simulate``: the device whose tiles an interpreted kernel is given.
    ``keep`` is handed the outputs that are judged (a capsule stores them). ``ahead``: what serves prepared calls only
    is prepared for this one, and for those that further gates make; else it refuses.
    """
    device = torch.device(device)
    profile = profile or detect(device)
    cell = functools.partial(
        Cell,
        op=primitive.name,
        implementation=implementation.name,
        device=str(device),
        dtype=dtype_name(dtype),
        case=case.name,
        accumulation=implementation.accumulation,
        roundings=sorted(implementation.roundings),
    )
    try:
        prepared = prepared or prepare(primitive, case, dtype, device, seed)
    except torch.OutOfMemoryError as error:
        return cell(verdict="NOT_RUN", reason=f"the oracle ran out of memory: {_line(error)}")
    view = View.of(primitive, prepared.args.values, profile)
    if kernel is None:
        failed = _unready(primitive, implementation, prepared.args.values, profile) if ahead else None
        if failed is not None:
            return cell(verdict="QUARANTINED", reason=failed)
        refused = refusals(implementation, view, profile)
        if refused:
            return cell(verdict=_refusal(implementation, view, profile), refusals=refused, reason="; ".join(refused))
    target = target_of(simulate or profile)
    route.begin()
    try:
        launcher = mutation.on_copies(primitive, kernel or registry.launcher(implementation))
        runs = hygiene.run(primitive, launcher, prepared.args, target, device, times)
        if runs.differing and implementation.deterministic == "asked":
            with _asked_for_determinism():
                runs.differing = hygiene.run(primitive, launcher, prepared.args, target, device, times).differing
    except CompileError as error:
        return cell(verdict="QUARANTINED", reason=" ".join(str(error).split())[:500])  # what failed is in the log
    except torch.OutOfMemoryError as error:
        return cell(verdict="NOT_RUN", reason=f"out of memory: {_line(error)}")
    except ImportError as error:
        return cell(verdict="NOT_RUN", reason=f"the kernels cannot be loaded: {_line(error)}")
    except UnimplementedInstruction as error:
        return cell(verdict="NOT_RUN", reason=f"the simulator cannot execute it: {_line(error)}")
    except Exception as error:  # noqa: BLE001 - a kernel under test may raise anything, and that is its verdict
        return cell(verdict="FAIL", reason=f"raised {type(error).__name__}: {_line(error)}")
    if keep is not None:
        keep(runs.outputs)
    runs.faults += mutation.faults(launcher) + route.faults()
    tf32 = bool(view.flags["tf32"]) and device.type == "cuda"
    interpreted = bool(view.flags["interpreted"]) and implementation.backend == "triton"
    simulated = route.active() or interpreted
    slow = route.slow() or interpreted or simulate is not None
    again = _Again(prepared, implementation, kernel, launcher, target, profile, tf32, slow, ahead)
    try:
        judged = judge(prepared, implementation, runs, tf32=tf32)
        again.judge(runs.outputs, judged)
    except torch.OutOfMemoryError as error:
        return cell(verdict="NOT_RUN", reason=f"the comparison ran out of memory: {_line(error)}")
    except EvidenceError as error:
        return cell(verdict="MISTRUSTED", reason=_line(error))
    except Exception as error:  # noqa: BLE001 - the definition of a backward, or a bound, may be wrong; others are judged
        why = "the comparison, by the definition of the op and of its backward and their bounds"
        return cell(verdict="MISTRUSTED", reason=f"{why}, raised {type(error).__name__}: {_line(error)}")
    late = route.faults() + [fault for fault in mutation.faults(launcher) if fault not in runs.faults]
    if late:  # of the gates that ran the kernel again
        judged["gates"]["G5"] = Gate(outcome="fail", reason="; ".join(late))
        judged["reason"] = judged["reason"] or gates.first_failure(judged["gates"])
    if simulated and judged["reason"] is None:
        tiles = None if simulate is None else f"interpreted, with the tiles of {simulate.name}"
        judged["reason"] = route.evidence() or tiles
    return cell(**judged, verdict=_verdict(judged, simulated), seconds=None if simulated else runs.seconds)


def _unready(op: Primitive, line: Implementation, args: tuple[Any, ...], profile: Profile) -> str | None:
    """Prepare an implementation for a call, if it has that; why it could not be compiled."""
    if line.prepare is None:
        return None
    _, failed = preparing.ready(op, args, profile, (line.name,))
    return " ".join(str(failed[line.name]).split())[:300] if line.name in failed else None


class _Again:
    """The gates that run the kernel once more. They are left where its outputs are already wrong."""

    def __init__(
        self,
        prepared: Prepared,
        implementation: Implementation,
        kernel: Callable[..., Any] | None,
        launcher: Callable[..., Any],
        target: Target,
        profile: Profile,
        tf32: bool,
        interpreted: bool,
        ahead: bool,
    ) -> None:
        self._ahead = ahead
        self._prepared, self._implementation, self._kernel = prepared, implementation, kernel
        self._launcher, self._target, self._profile = launcher, target, profile
        self._tf32, self._interpreted = tf32, interpreted

    def judge(self, outputs: tuple[Any, ...], judged: dict[str, Any]) -> None:
        """Add G6, G7 and what they find to the fields of a cell."""
        by_gate: dict[GateName, Gate] = judged["gates"]
        if any(g.outcome == "fail" for g in by_gate.values()):
            why = "not judged: the outputs are wrong already"
            by_gate["G6"] = by_gate["G7"] = Gate(outcome="n/a", reason=why)
            return
        prepared, line = self._prepared, self._implementation
        leak = self._unseen(outputs)
        if leak is not None:
            by_gate["G5"] = Gate(outcome="fail", reason=leak)
            judged["reading"] = "future tokens leak: results change with what they may not depend on"
        declared = gates.declared_of(prepared, line, self._tf32)
        by_gate["G6"] = batch.judge(prepared, line, outputs, self._launcher, self._target, declared, self._refused)
        by_gate["G7"] = vjp.judge(
            prepared, line, self._kernel, self._target, outputs, tf32=self._tf32, interpreted=self._interpreted
        )
        judged["gates"] = {name: by_gate[name] for name in get_args(GateName)}
        judged["reason"] = judged["reason"] or gates.first_failure(by_gate)

    def _refused(self, args: tuple[Any, ...]) -> list[str]:
        if self._kernel is not None:
            return []
        if self._ahead:
            failed = _unready(self._prepared.primitive, self._implementation, args, self._profile)
            if failed is not None:
                return [failed]
        return refusals(self._implementation, View.of(self._prepared.primitive, args, self._profile), self._profile)

    def _unseen(self, outputs: tuple[Tensor, ...]) -> str | None:
        """Whether results change with what they may not depend on (the keys after a causal query)."""
        op, args = self._prepared.primitive, self._prepared.args
        if op.limits.unseen is None or any(b.shared() for b in args.buffers.values()):
            return None
        copies = args.to(self._prepared.device)
        kept = op.limits.unseen(*copies.values)
        if kept is None:
            return None
        try:
            with torch.no_grad():
                again = as_tuple(self._launcher(*copies.values, self._target))
        except torch.OutOfMemoryError:
            return None
        except Exception as error:  # noqa: BLE001 - as in the first runs
            return f"raised {type(error).__name__} on other keys: {_line(error)}"
        for name, before, after, where in zip(op.outputs, outputs, again, kept, strict=True):
            changed = gates.differing(after, before.double()) & where
            if bool(changed.any()):
                index = ", ".join(str(int(i)) for i in changed.nonzero()[0])
                return f"{name}[{index}] changes with keys that it may not see; {int(changed.sum())} elements do"
        return None


def _refusal(implementation: Implementation, view: View, profile: Profile) -> Verdict:
    """A clause that only the interpreter fails, or a backend that is not here, leaves the implementation unjudged."""
    backend = registry.backends()[implementation.backend]
    if profile.vendor not in backend.vendors or registry.probe(implementation.backend, profile.vendor):
        return "NOT_RUN"
    if view.flags["interpreted"]:
        on_device = replace(view, flags={**view.flags, "interpreted": False})
        if not refusals(implementation, on_device, profile):
            return "NOT_RUN"
    return "UNIMPLEMENTED"


def _verdict(judged: dict[str, Any], simulated: bool) -> Verdict:
    by_gate: dict[GateName, Gate] = judged["gates"]
    if any(g.outcome == "fail" for g in by_gate.values()):
        return "MISTRUSTED" if by_gate["G2"].reason == gates.UNUSABLE else "FAIL"
    return "SIMULATED" if simulated else "PASS"


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:500] if text else "no message"

"""Chooses the implementation of every op call, and installs itself as the primitives' resolver when imported."""

from __future__ import annotations

from ferryman.dispatch import cost, lockfile, plan, registry, select, state, torch_library
from ferryman.dispatch.explain import Explanation, explain
from ferryman.dispatch.request import strict, use
from ferryman.dispatch.state import Trace, trace

__all__ = ["Explanation", "Trace", "explain", "reload", "strict", "trace", "use"]


def _install() -> None:
    for op in list(registry.primitives().values()):
        if op.name not in registry.primitives():
            continue  # its family was left out
        try:
            overload = torch_library.define(op)
            runner = plan.Op(op, overload)
            plan._ops[op.name] = runner
            torch_library.register(op, runner.undifferentiated, overload, runner.recipe)
        except Exception as error:  # noqa: BLE001 - another package's op may fail anyhow; ours rises again
            registry.leave_out(op, error)
    state.count_settings()


def reload() -> None:
    """Read settings, lockfile and backends afresh, and forget every choice and quarantine."""
    from ferryman import settings

    settings.forget()
    lockfile.forget()
    cost.forget()
    registry.forget()
    select.clear_quarantine()
    plan.drop_plans()
    state.count_settings()


_install()

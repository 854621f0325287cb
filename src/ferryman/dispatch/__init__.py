"""Chooses the implementation of every op call.

Importing it defines every op of `torch.ops.ferryman` (`declared`). The rest is loaded when an op is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferryman import lazy
from ferryman.dispatch import declared

if TYPE_CHECKING:
    from ferryman.dispatch.explanation import Explanation, explain
    from ferryman.dispatch.preparing import prepare
    from ferryman.dispatch.request import strict, use
    from ferryman.dispatch.state import Trace, trace

__all__ = ["Explanation", "Trace", "explain", "prepare", "reload", "strict", "trace", "use"]

if not TYPE_CHECKING:  # where it would allow every name
    _places = {"Explanation": "explanation", "explain": "explanation", "prepare": "preparing"}
    _places |= {"strict": "request", "use": "request"}
    __getattr__ = lazy.attributes(
        __name__,
        {name: f"{__name__}.{module}" for name, module in {**_places, "Trace": "state", "trace": "state"}.items()},
        ("cost", "lockfile", "plan", "registry", "select", "state", "torch_library"),
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def reload() -> None:
    """Read settings, lockfile and backends afresh, and forget every choice and quarantine."""
    from ferryman import settings
    from ferryman.dispatch import cost, lockfile, plan, registry, select, state

    settings.forget()
    lockfile.forget()
    cost.forget()
    registry.forget()
    select.clear_quarantine()
    plan.drop_plans()
    state.count_settings()


def _registry() -> Any:
    from ferryman.dispatch import registry

    return registry


def _install() -> Any:
    from ferryman.dispatch import install

    return install


declared.every(declared.Above(_registry, _install))

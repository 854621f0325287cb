"""Children whose call has no effect beside its result, by their sources and by a recorded run.

The run is of a copy without numbers (on the meta device), under a mode that hears of what draws; parameters, buffers
and arguments have counters of what was written over them, and attributes are what they were. Where it does not run on
any input that is tried, nothing is known.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.porting.model import effects, leaf, recognise, source
from ferryman.porting.model.child_calls import is_plain_child
from ferryman.porting.model.flow import Scan
from ferryman.porting.model.recognise import Role
from ferryman.porting.model.relied import original_of

_MOST_INSIDE = 8  # modules in a child that is no leaf
_DEEP = 2
_RUN = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")  # what runs beside a forward
_known: dict[Any, bool] = {}


def free_of(module: nn.Module) -> frozenset[str]:
    """The paths of children, and of theirs, whose call has no effect beside its result."""
    return frozenset(_free(module, "", _DEEP))


def plain_of(module: nn.Module) -> frozenset[tuple[str, Any, Any]]:
    """Children that are calls of a function of PyTorch, and whether they write over what they are given."""
    named = module._modules.items()
    return frozenset((n, type(c), getattr(c, "inplace", None)) for n, c in named if is_plain_child(c))


def _free(module: nn.Module, prefix: str, deep: int) -> Iterator[str]:
    for name, child in module._modules.items():
        if child is not None:
            yield from (f"{prefix}{name}",) if is_free(child) else ()
            yield from _free(child, f"{prefix}{name}.", deep - 1) if deep > 1 else ()


def is_free(module: nn.Module) -> bool:
    try:
        return _is_free(module)
    except Exception:  # noqa: BLE001 - foreign code ran, on what it may not take
        return False


def _is_free(module: nn.Module) -> bool:
    kind = type(module)
    if kind.forward is nn.Module.forward or isinstance(module, torch.jit.ScriptModule) or not source.untouched(module):
        return False
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _RUN):
        return False
    if any(
        type(t) not in (Tensor, nn.Parameter)
        for t in (*module._parameters.values(), *module._buffers.values())
        if t is not None
    ):
        return False
    if sum(1 for _ in itertools.islice(module.modules(), 9)) > _MOST_INSIDE:
        return False
    if kind is nn.Sequential:
        return all(is_free(child) or _is_plain(child) for child in module._modules.values() if child is not None)
    key = None if module._modules else leaf.state_of(module)
    if key is None or key not in _known:
        free = _by_source(module) and is_recorded_free(module)
        if key is None:
            return free
        _known[key] = free
    return _known[key]


def _is_plain(child: nn.Module) -> bool:
    return is_plain_child(child) and not isinstance(child, nn.Dropout)


def _by_source(module: nn.Module) -> bool:
    """Of what has a role, which it is proven to compute, what it writes over is left to the run."""
    kind = type(module)
    leaf.contents_tests(module)  # reading what another's object has may do anything
    function = source.innermost(kind.forward)
    tree = source.parsed(function) if function is kind.forward else None
    names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)] if tree is not None else []
    if tree is None or not names:
        return False
    scan = Scan(function, tree, names[0], module, kind, free=free_of(module), settled=True)
    may = effects.of_function(scan, function, module, True)
    return may <= {effects.OVER} if may and isinstance(recognise.role_of(module), Role) else not may


class Recorder(TorchDispatchMode):
    """Hears whether numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


def is_recorded_free(module: nn.Module) -> bool:
    """Whether a run in either mode writes over nothing, sets nothing and draws nothing."""
    return all(_one_run(module, training) for training in (False, True))


@torch.no_grad()
def _one_run(module: nn.Module, training: bool) -> bool:
    for given in _inputs(module):
        twin = without_numbers(module, training, {})
        before, states = _counts(twin, given), torch.random.get_rng_state()
        recorder = Recorder()
        try:
            with recorder:
                twin(given)
        except Exception:  # noqa: BLE001 - foreign code ran on what it may not take
            continue
        finally:
            moved = not torch.equal(states, torch.random.get_rng_state())
            torch.random.set_rng_state(states)
        return not (moved or recorder.drawn) and _counts(twin, given) == before
    return False


def _inputs(module: nn.Module) -> Iterator[Tensor]:
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.dim()]
    sides = dict.fromkeys(side for t in tensors for side in (t.shape[-1], t.shape[0]))
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    for side in [*itertools.islice(sides, 6), 8]:
        yield torch.empty(2, 3, side, device="meta", dtype=dtype)
        yield torch.empty(2, side, 3, 5, device="meta", dtype=dtype)
    yield torch.zeros(2, 3, device="meta", dtype=torch.long)


def without_numbers(module: nn.Module, training: bool, known: dict[int, Any]) -> Any:
    """A copy of a module and what is in it, on the meta device."""
    if id(module) in known:
        return known[id(module)]
    kind: Any = original_of(module)
    twin = known[id(module)] = kind.__new__(kind)
    own = twin.__dict__
    own.update({n: _copied(v) for n, v in module.__dict__.items()})
    own["training"] = training
    for names in ("_parameters", "_buffers"):
        tensors = module.__dict__[names].items()
        own[names] = {n: t if t is None else torch.empty_like(t.detach(), device="meta") for n, t in tensors}
    own["_modules"] = {n: m and without_numbers(m, training, known) for n, m in module._modules.items()}
    return twin


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (dict, list, set) else value


def _counts(module: nn.Module, given: Tensor) -> list[Any]:
    """What shows that something was written over, or set."""
    counts: list[Any] = [given._version]
    for one in module.modules():
        for name, value in one.__dict__.items():
            inside = value if type(value) is dict else dict(enumerate(value)) if type(value) is list else {}
            counts.append((name, id(value), len(value) if isinstance(value, set) else 0))
            counts += [(n, id(v)) for n, v in inside.items()]
            tensors = [v for v in (value, *inside.values()) if isinstance(v, Tensor)]
            counts += [t._version for t in tensors]
            counts += [repr(vars(value))] if type(value) is types.SimpleNamespace else []
    return counts

"""Choices that code leaves open. PyTorch documents no order of equal elements for `topk`, nor for a sort that is not
stable, and gives other ones on other devices. What stands for such code is right if the code, with one of the choices
that it may make, gives the same: the choice must be one, and what follows from it must be the code's.

`argmax`, `max` and a stable sort document an order, and keep it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ferryman.porting.model.distance import LIMIT, Disagreement, distance, flat
from ferryman.porting.model.exact import Widened

_OPEN = {torch.topk, Tensor.topk, torch.sort, Tensor.sort, torch.argsort, Tensor.argsort}
_NAMES = {torch.topk.__name__, torch.sort.__name__, torch.argsort.__name__}
CHOOSES = {*_NAMES, torch.argmax.__name__}  # names of functions, one of which code that chooses calls
Run = Callable[..., Any]
REMARK = "of elements that are equal it may choose another one, as PyTorch does from device to device"


class Choosing(TorchFunctionMode):
    """In it, a call that leaves its choice open chooses ``ids``, (T, k), in each row in which it may.

    It may where the elements there are, rank by rank, equal to those that it chose itself, in the dtype that they have;
    in any order where it was asked for none. NaN counts as equal to NaN. ids of a row are distinct. ``asked``: whether
    there was such a call.
    """

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids, self.asked = ids, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        outcome = func(*args, **named)
        if func not in _OPEN or named.get("stable") or named.get("out") is not None:
            return outcome
        x, top = named.get("input", args[0] if args else None), func in (torch.topk, Tensor.topk)
        dim = named.get("dim", args[1 + top] if len(args) > 1 + top else -1)
        if not isinstance(x, Tensor) or not x.dim() or dim not in (-1, x.dim() - 1):
            return outcome
        self.asked = True
        own = outcome if isinstance(outcome, Tensor) else outcome.indices
        ordered = not top or named.get("sorted", args[4] if len(args) > 4 else True)
        chosen = self._chosen(x, own, bool(ordered))
        if isinstance(outcome, Tensor):
            return chosen
        return type(outcome)((x.gather(-1, chosen), chosen))

    @torch.no_grad()
    def _chosen(self, x: Tensor, own: Tensor, ordered: bool) -> Tensor:
        """The indices that a call gives, whose own are ``own``."""
        if not ordered:
            own = own.gather(-1, x.gather(-1, own).sort(dim=-1, descending=True, stable=True).indices)
        k = self.ids.shape[-1]
        if not 0 < k <= own.shape[-1] or own.numel() // own.shape[-1] * k != self.ids.numel():
            return own
        if len(own.shape) > 1 and own.numel() == 0:
            return own
        wanted = self.ids.long().reshape(*own.shape[:-1], k)
        known = ((wanted >= 0) & (wanted < x.shape[-1])).all(-1, keepdim=True)
        wanted = wanted.clamp(0, x.shape[-1] - 1)
        apart = wanted.sort(-1).values.diff(dim=-1).ne(0).all(-1, keepdim=True)
        if own.shape[-1] > k:  # all of a row in order: the others follow as they were
            others = (own.unsqueeze(-1) == wanted.unsqueeze(-2)).any(-1)
            rest = others.to(torch.int8).sort(dim=-1, stable=True).indices[..., : own.shape[-1] - k]
            wanted = torch.cat([wanted, own.gather(-1, rest)], -1)
        a, b = x.gather(-1, wanted), x.gather(-1, own)
        if not ordered:
            a, b = a.sort(-1, descending=True).values, b.sort(-1, descending=True).values
        same = ((a == b) | (a.isnan() & b.isnan())).all(-1, keepdim=True)
        return torch.where(known & apart & same, wanted, own)


def choosing(
    original: Run, candidate: Run, chosen: Callable[[Any], Tensor], strict: bool, heard: Callable[[str], Any]
) -> Run:
    """The original with what the candidate chose, where it may choose so. chosen: what of a result that is. strict: it
    must be able to in each row, or raises Disagreement. heard: is told `REMARK` where it leaves a choice open."""

    def call(*given: Any) -> Any:
        with torch.no_grad():
            ids = chosen(candidate(*(x.detach() if isinstance(x, Tensor) else x for x in given)))
        mode = Choosing(ids)
        with mode:
            result = original(*given)
        if mode.asked:
            heard(REMARK)
        if strict and not torch.equal(chosen(result), ids):
            exact = next(x.dtype for x in given[::-1] if x.is_floating_point()) == torch.float64
            raise Disagreement("it chooses others where scores differ", 1.0 if exact else 0.0)
        return result

    return call


@torch.no_grad()
def level(
    original: Run, candidate: Run, inputs: Sequence[tuple[Any, ...]], dtypes: Sequence[torch.dtype], close: float
) -> str:
    """Why two are not the same of inputs with equal, saturated and not finite numbers; "" where they are. They are
    compared without gradients, in float64 to `LIMIT` and in each of ``dtypes`` to ``close``, or two of its units."""
    for dtype in (torch.float64, *dtypes):
        room = LIMIT if dtype == torch.float64 else max(close, 2 * torch.finfo(dtype).eps)
        for given in inputs:
            low = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
            try:
                actual = flat(candidate(*low))
                if dtype == torch.float64:
                    with Widened(torch.float64):
                        wanted = flat(original(*low))
                else:
                    wanted = flat(original(*low))
                pairs = list(zip(actual, wanted, strict=True))
                if any(not w.is_floating_point() and not torch.equal(f, w) for f, w in pairs):
                    return f"it chooses others in {dtype}"
                floats = [(f.double(), w.double()) for f, w in pairs if w.is_floating_point()]
                distance("result", [f for f, _ in floats], [w for _, w in floats], room)
            except Disagreement as error:
                return str(error)
            except Exception as error:  # noqa: BLE001 - foreign code ran: what it raises is the reason
                return f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
    return ""

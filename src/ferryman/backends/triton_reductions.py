"""Reductions that this version of Triton lowers wrongly, as its own intermediate representation shows them.

Up to 3.6 Triton adds up lanes of a warp as if those of the reduced axis were neighbours (triton-lang/triton, pull
request 9219, which rewrote it). In layouts of its own making they are. A tile that was reshaped before has a linear
layout, whose lanes may lie in any order: where lanes of another axis are between, sums take in values of other rows,
without any error. Of such a kernel nothing may be launched.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MENDED = (3, 7)
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?\blane = (\[.*?\]), warp = ", re.MULTILINE)
# the type after the region of the operation, and before its result's
_REDUCTION = re.compile(
    r'"tt\.reduce"\(.*?<\{axis = (\d+) : i32.*?^\s*\}\) .*?: \((tensor<.*?>)\) ->', re.MULTILINE | re.DOTALL
)
_SLICED = re.compile(r"dim = (\d+)")


def refusal(compiled: Any) -> str | None:
    """Why a `CompiledKernel` may not be launched; None where nothing was seen, or a hook of Triton's compiled none."""
    import triton

    where = misread(getattr(compiled, "asm", {}).get("ttgir", ""), triton.__version__)
    if where is None:
        return None
    return f"Triton {triton.__version__} adds up values of other rows in {where}; sum the axes one by one instead"


def misread(ttgir: str, version: str) -> str | None:
    """The first reduction of a kernel that this Triton lowers wrongly, in words; None where there is none.

    ttgir: the kernel in Triton's GPU dialect. version: Triton's.
    """
    if tuple(map(int, version.split(".")[:2])) >= _MENDED:
        return None
    lanes: dict[str, list[list[int]]] = {name: json.loads(bases) for name, bases in _LAYOUT.findall(ttgir)}
    if not lanes:
        return None
    for axis, operand in _REDUCTION.findall(ttgir):
        layout = next((name for name in re.findall(r"#\w+", operand) if name in lanes), None)
        if layout is not None and _apart(lanes[layout], _axis(int(axis), operand)):
            return f"tt.reduce over axis {axis} of {operand.split('), ')[0]}, whose lanes are {lanes[layout]}"
    return None


def _axis(axis: int, operand: str) -> int:
    """The axis in the layout that a sliced one was made of."""
    for dim in map(int, _SLICED.findall(operand)):
        axis += dim <= axis
    return axis


def _apart(lanes: list[list[int]], axis: int) -> bool:
    """Whether bits of the lane that step along the axis are not neighbours, or step along another, too."""
    along = [i for i, step in enumerate(lanes) if step[axis]]
    alone = all(sum(map(bool, lanes[i])) == 1 for i in along)
    return bool(along) and not (alone and along[-1] - along[0] + 1 == len(along))

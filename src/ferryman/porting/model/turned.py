"""A leaf module that computes over the second dimension, such as a norm of channels: proven turned, served turned."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ferryman.porting.model.leaf import class_code

if TYPE_CHECKING:
    from ferryman.porting.model.recognise import Role


def class_of(kind: Any) -> Any:
    class Turned(kind):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.transpose(1, -1)).transpose(1, -1)

    return Turned


def module_of(module: nn.Module) -> nn.Module:
    """The module between two transpositions."""
    kind = class_of(type(module))
    other: nn.Module = kind.__new__(kind)
    other.__dict__.update(module.__dict__)
    return other


def role_of(role: Role, module: nn.Module, parameter: str) -> Role:
    """The role of a module, of the one that was shown for it turned."""
    inside = re.sub(r"(?<![\w.])x\b", "x.transpose(1, -1)", role.expression)
    return replace(
        role,
        expression=f"{inside}.transpose(1, -1)",
        parameters=(parameter,),
        tests=("x.dim() > 2", *role.tests),
        added="",
        added_op="",
        code=class_code(type(module)),
    )


def dims_of(role: Any) -> set[int]:
    """The dimensions that a role's inputs may have; none where nothing was shown."""
    tests = getattr(role, "tests", None)
    if tests is None:
        return set()
    counts = [m[1] for text in tests if (m := re.fullmatch(r"x\.dim\(\) in \(([\d, ]+)\)", text))]
    return {int(n) for n in re.findall(r"\d", counts[0])} if counts else {1, 2, 3, 4, 5}

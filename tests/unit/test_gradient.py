"""The function that autograd sees, written out for each op, takes and hands on what the op's recipe says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.device_profiles import profile
from ferryman.dispatch import gradient, registry, select, state
from ferryman.dispatch.recipe import Recipe, Source
from ferryman.errors import FerrymanError
from ferryman.ops.primitive import Primitive

SHAPE = (2, 3)


def differentiable() -> list[str]:
    return sorted(n for n in registry.primitives() if not n.endswith("_backward"))


def recipe_of(name: str) -> Recipe:
    recipe = Recipe.of(registry.primitive(name))
    if recipe.backward is None or recipe.op.mutates or "Tensor[]" in recipe.op.types.values():
        pytest.skip("no such function")
    return recipe


class Calls:
    """Stands for an op and its backward: notes what they are called with, and returns tensors of one shape."""

    def __init__(self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recipe = recipe
        self.forward: list[tuple[Any, ...]] = []
        self.backward: list[tuple[Any, ...]] = []
        self.results: list[Tensor] = []
        assert recipe.backward is not None
        monkeypatch.setitem(recipe.backward.namespace, "_resolve", self.back)

    def launch(self, *args: Any) -> Any:
        self.forward.append(args)
        return drawn(self.recipe.op)

    def back(self, *args: Any) -> Any:
        assert state.current() is ASKED
        self.backward.append(args)
        assert self.recipe.backward is not None
        result = drawn(self.recipe.backward)
        self.results = list(result) if isinstance(result, tuple) else [result]
        return result


ASKED = state.intern({"nothing": ("torch",)}, False)
TARGET = select.target_of(profile("cpu"))


def drawn(op: Primitive) -> Any:
    outputs = tuple(torch.randn(SHAPE) for _ in op.outputs)
    return outputs if len(outputs) > 1 else outputs[0]


def arguments(recipe: Recipe, asking: set[str]) -> list[Any]:
    return [
        torch.randn(SHAPE, requires_grad=n in asking) if recipe.op.types[n] in ("Tensor", "Tensor?") else object()
        for n in recipe.op.names
    ]


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b


@pytest.mark.parametrize("name", differentiable())
def test_a_backward_gets_what_its_parameters_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name)
    op = recipe.op
    owners = [n for n, i in zip(op.names, recipe.returns, strict=True) if i is not None]
    learning = [i for i, n in enumerate(op.outputs) if n not in op.gradient.nondifferentiable]
    for asking in (set(owners), *({n} for n in owners)):
        for given in (learning, *([i] for i in learning)):
            calls = Calls(recipe, monkeypatch)
            args = arguments(recipe, asking)
            plan = recipe.plan(calls.launch, TARGET, ASKED)
            result = gradient.runner_under_autograd(recipe.op)(*args, plan)
            outputs = result if isinstance(result, tuple) else (result,)
            assert calls.forward == [(*args, plan.target)]
            assert [o.requires_grad for o in outputs] == [i in learning for i in range(len(outputs))]
            grads = {i: torch.randn(SHAPE) for i in given}
            wanted = [args[op.names.index(n)] for n in owners if n in asking]
            got = torch.autograd.grad([outputs[i] for i in given], wanted, [grads[i] for i in given])

            def meant(source: Source, optional: bool) -> Any:
                if source.kind == "need":
                    return op.names[source.index] in asking  # noqa: B023
                if source.kind != "grad":
                    return (args if source.kind == "arg" else outputs)[source.index]  # noqa: B023
                absent = None if optional else torch.zeros(SHAPE)
                return grads.get(source.index, absent)  # noqa: B023

            (taken,) = calls.backward
            expected = [meant(s, o) for s, o in zip(recipe.sources, recipe.optional, strict=True)]
            assert len(taken) == len(expected) and all(map(same, taken, expected))
            places = [recipe.returns[op.names.index(n)] for n in owners if n in asking]
            assert all(torch.equal(g, calls.results[i or 0]) for g, i in zip(got, places, strict=True))


def test_most_ops_are_among_them() -> None:
    recipes = [Recipe.of(registry.primitive(name)) for name in differentiable()]
    assert sum(r.backward is not None and not r.op.mutates for r in recipes) > 15


def test_a_gradient_has_none_itself() -> None:
    recipe = Recipe.of(registry.primitive("softmax_backward"))
    x = torch.randn(SHAPE, requires_grad=True)
    args = [x if recipe.op.types[n] == "Tensor" else None for n in recipe.op.names]
    plan = recipe.plan(lambda *_: torch.zeros(SHAPE), TARGET, ASKED)
    with pytest.raises(FerrymanError, match="it is itself a gradient"):
        gradient.runner_under_autograd(recipe.op)(*args, plan).sum().backward()

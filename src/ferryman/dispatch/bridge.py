"""The `autograd.Function` of an op, written out for that op: what forward saves and backward takes are known names.

What `gradient` does by tables for any op takes as long again as PyTorch's own part of such a function. Here it is
straight code, generated once for each op whose gradient is first asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ferryman.dispatch import state
from ferryman.dispatch.gradient import Recipe, SingleLevel, nothing_behind, overwriting, twice

_TEMPLATE = """
class {name}(SingleLevel):
    @staticmethod
    def forward(ctx, plan, args, {seen}):
        {outputs} = plan.launch(*args, plan.target)
{detached}
        ctx.set_materialize_grads(False)
{kept}
        ctx.plan = plan
        return {outputs}

    @staticmethod
    def backward(ctx, {grads}):
        if grad_enabled():
            return twice(ctx, backward, {grads})
{body}

backward = {name}.backward

def run({params}, plan):
    return apply(plan, ({params},), {seen})
"""


def source_of(recipe: Recipe) -> str:
    """The class and the function that applies it: ``run(*arguments, plan)``."""
    op = recipe.op
    params = [f"{name}_" for name in op.names]  # none of the names here
    seen = [params[i] for i in recipe.seen]
    outputs = [f"out_{i}" for i in range(len(op.outputs))]
    # of memory that is the launcher's own; autograd lets nobody write in place to a view that a Function returns
    detached = [f"if {o}._is_view():\n    {o} = {o}.data" for o in outputs]
    kept = []
    if op.gradient.nondifferentiable:
        marked = [o for o, n in zip(outputs, op.outputs, strict=True) if n in op.gradient.nondifferentiable]
        kept.append(f"ctx.mark_non_differentiable({', '.join(marked)})")
    saved = [params[i] if given else outputs[i] for given, i in recipe.kept]
    if saved:
        kept.append(f"ctx.save_for_backward({', '.join(saved)})")
    if recipe.numbers:
        kept.append(f"ctx.numbers = {', '.join(f'args[{i}]' for i in recipe.numbers)},")
    if len(outputs) > 1:  # equal for every call of a plan
        facts = ", ".join(f"({o}.shape, {o}.dtype, {o}.device)" for o in outputs)
        kept.append(f"if not plan.facts:\n    plan.facts.extend(({facts}))")
    grads = [f"grad_{i}" for i in range(len(outputs))]
    return _TEMPLATE.format(
        name=f"{op.name}_Bridge",
        seen=", ".join(seen),
        params=", ".join(params),
        outputs=", ".join(outputs),
        detached=_indented(detached),
        kept=_indented(kept),
        grads=", ".join(grads),
        body=_indented(_backward(recipe, grads)),
    )


def _indented(statements: list[str]) -> str:
    return "\n".join(f"        {line}" for statement in statements for line in statement.split("\n"))


def _backward(recipe: Recipe, grads: list[str]) -> list[str]:
    """Statements of the backward, from what the context has to what goes to each argument of the function."""
    if recipe.backward is None:
        return ["nothing_behind(ctx)"]
    lines, places = [], len(recipe.seen)
    if len(grads) == 1:  # PyTorch runs a node whose gradient a Function gave as None
        lines.append(f"if {grads[0]} is None:\n    return {('None, ' * (2 + places)).rstrip()}")
    required = {i for kind, i in recipe.template if kind == "grad"}
    for i in sorted(required) if len(grads) > 1 else ():
        lines.append(f"if {grads[i]} is None:\n    {grads[i]} = zeros(ctx, {i})")
    if recipe.kept:
        lines.append(f"{''.join(f'saved_{i}, ' for i in range(len(recipe.kept)))}= ctx.saved_tensors")
    if recipe.numbers:
        lines.append(f"{''.join(f'number_{i}, ' for i in range(len(recipe.numbers)))}= ctx.numbers")
    lines.append("needs = ctx.needs_input_grad")
    spelled = {"saved": "saved_{}", "number": "number_{}", "need": "needs[{}]", "grad": "grad_{}", "grad?": "grad_{}"}
    args = ", ".join(spelled[kind].format(i) for kind, i in recipe.template)
    results = [f"to_{i}" for i in range(len(recipe.backward.outputs))]
    lines += [
        "token = enter(ctx.plan.asked)",
        f"try:\n    {', '.join(results)} = backwards['_resolve']({args})\nfinally:\n    leave(token)",
    ]
    handed = [f"{results[i]} if needs[{place}] else None" if i is not None else "None" for place, i in recipe.handed]
    lines.append(f"return None, None, {', '.join(handed)}")
    return lines


def _zeros(ctx: Any, output: int) -> torch.Tensor:
    """The gradient of an output that nothing came to."""
    shape, dtype, device = ctx.plan.facts[output]
    return torch.zeros(shape, dtype=dtype, device=device)


@functools.cache
def runner_under_autograd(recipe: Recipe) -> Callable[..., Any]:
    """What runs a plan whose result is to be differentiated: of (arguments in schema order, plan)."""
    op = recipe.op
    if op.mutates:
        return overwriting
    namespace: dict[str, Any] = {
        "SingleLevel": SingleLevel,
        "grad_enabled": torch.is_grad_enabled,
        "twice": twice,
        "nothing_behind": nothing_behind,
        "zeros": _zeros,
        "enter": state.enter,
        "leave": state.leave,
        "backwards": None if recipe.backward is None else recipe.backward.namespace,
        "__name__": __name__,
    }
    exec(compile(source_of(recipe), f"<ferryman gradient of {op.name}>", "exec"), namespace)  # noqa: S102
    function = namespace[f"{op.name}_Bridge"]
    namespace["apply"] = function.apply
    node = function._backward_cls
    if "apply" in vars(torch.autograd.function.BackwardCFunction):
        # what autograd calls: PyTorch's own finds the class's backward anew each time, in two frames of Python
        node.apply = function.backward
    run: Callable[..., Any] = namespace["run"]
    return run

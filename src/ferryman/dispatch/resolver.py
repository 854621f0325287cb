"""The source of an op's function: how a call becomes a key, and what it does with the plan that it finds.

It has the op's own parameters, so that CPython binds the arguments and a key is one tuple display. The full key
(`cold`) holds every fact that a clause can read: each tensor's class, dtype, device, shape, contiguity or strides, each
scalar, whether a gradient is needed, the request, and the extra facts (alignment, tf32, determinism) of those clauses
that read them. Reading so many attributes from Python takes 1.2 us for three tensors, so in front of it stands a brief
key whose entry is confirmed by Dynamo's own C++ tensor guard (0.2 us), which compares the same facts and the thread's
dispatch keys: modes, functorch, autocast and inference are seen by it too; whether gradients are enabled is not, and
stands in the brief key.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ferryman.dispatch import registry
from ferryman.ops.primitive import Primitive

_FACTS = "{x}.__class__, {x}.dtype, {x}.device, {x}.shape, {x}.is_contiguous() or {x}.stride(), "
_FACTS += "keys_of({x}).raw_repr()"  # a bit that says "negative" is one of them

_TEMPLATE = """
def resolve{of}({params}):
    if is_dynamo_compiling():
        return compiled{of}({args})
{hot}

def cold{of}({params}):
    if dispatch_modes() or functorch_level() is not None{autocast} or forward_ad._current_level >= 0:
        return library({args}){result}
    try:
{lines}
        key = ({key})
        run, extra, line = plan = plans[key]
    except KEY_ERRORS:
        return slow{of}({args}){result}
{warm}{bump}    try:
        return run({args}, extra){result}
    except CompileError as error:
        return recover{of}(error, line, {args}){result}
"""
# Below autograd, for the library's kernels.
_PLAIN = """

def undifferentiated({params}):
    try:
{lines_plain}
        run, extra, line = below[{key}]
    except KEY_ERRORS:
        return slow_plain({args})
{bump}    try:
        return run({args}, extra)
    except CompileError as error:
        return recover_plain(error, line, {args})
"""
# A guard takes tensors, and no lists of them: an op that has such a list goes by the full key.
_HOT = """    try:
        brief = ({brief})
        check, run, extra, line = hot[brief]
        same = check({guarded})
        if not same:
            check, run, extra, line = second[brief]
            same = check({guarded})
    except KEY_ERRORS:
        return cold{of}({args})
    if not same:
        return cold{of}({args})
{bump}    try:
        return run({args}, extra){result}
    except CompileError as error:
        return recover{of}(error, line, {args}){result}
"""
# Around a call, what Dynamo's guard does not see
_AROUND = ("current()", "grad_enabled()", "forward_ad._current_level")
FIRST = "_resolve_first"  # in an op's namespace, where its first output may be asked for alone
_EXTRA = {
    "aligned": "{arg}.data_ptr() % 16 == 0",
    "tf32": "float32_precision()",
    "deterministic": "deterministic()",
}


def guarded(op: Primitive) -> bool:
    """Whether Dynamo's guard can tell an op's calls apart: it has a tensor, and no list of tensors."""
    return [op.types[name] for name in op.tensors[:1]] == ["Tensor"] and "Tensor[]" not in op.types.values()


def _key_parts(op: Primitive) -> tuple[list[str], list[str], str]:
    """(statements, key expressions, expression for "a gradient is needed")."""
    lines, key = [], ["current()"]
    for name in op.names:
        if not op.types[name].startswith("Tensor"):
            key += _scalar(op, name)
            continue
        if op.types[name] == "Tensor[]":
            key.append(f"tuple([({_FACTS.format(x='one')}, one.requires_grad) for one in {name}])")
            continue
        facts = _FACTS.format(x=name)
        if op.types[name] == "Tensor?":
            lines.append(f"k_{name} = None if {name} is None else ({facts})")
            key.append(f"k_{name}")
        else:
            key.append(facts)
    key += _extra_facts(op)
    if op.lists:
        key.append("grad_enabled()")  # a list's tensor that asks for a gradient is refused
    wanted = {name for shared in op.gradient.owners for name in shared}
    needs: list[str] = []
    fixed: list[str] = []
    for name in op.tensors:
        test = f"{name}.requires_grad"
        if op.types[name] == "Tensor?":
            test = f"({name} is not None and {test})"
        (needs if name in wanted or op.gradient.backward is None else fixed).append(test)
    needed = f"grad_enabled() and ({' or '.join(needs + fixed) or 'False'})"
    for test in fixed if op.gradient.backward else ():
        key.append(f"needs and {test}")
    if any(line.differentiable for line in registry.implementations(op.name)):
        key += needs  # what would run the backward depends on which gradients it gives
    key.append("needs")
    return lines, key, needed


def _scalar(op: Primitive, name: str) -> list[str]:
    """A scalar's part of a key, with a number's type: 1, 1.0 and True are equal. (``type(x)`` takes 7 ns more.) A list
    of numbers is a tuple."""
    kind = op.types[name]
    if name in op.lists:
        expression = f"tuple([(one, one.__class__) for one in {name}])"
        return [f"{name} and {expression}" if kind.endswith("?") else expression]
    return [name] if kind.removesuffix("?") in ("str", "ScalarType") else [name, f"{name}.__class__"]


def _scalars(op: Primitive, names: Sequence[str]) -> list[str]:
    return [part for name in names if not op.types[name].startswith("Tensor") for part in _scalar(op, name)]


def _extra_facts(op: Primitive) -> list[str]:
    """Expressions of the facts that no tensor's metadata gives, as far as the op's menu reads them."""
    menu = registry.implementations(op.name)
    expressions = []
    read = {fact for line in menu for fact in line.reads}
    clauses = (clause for line in menu for clause in (*line.when, *line.leads, *line.differentiable_when))
    read |= {fact for clause in clauses for fact in clause.facts}
    for fact in sorted(read):
        aligned = re.fullmatch(r"(\w+)\.aligned", fact)
        if aligned:
            expressions.append(_EXTRA["aligned"].format(arg=aligned[1]))
        elif fact in _EXTRA:
            expressions.append(_EXTRA[fact])
    if not all(line.deterministic for line in menu):
        expressions.append("deterministic()")
    return expressions


def source_of(op: Primitive) -> str:
    """`resolve` and `undifferentiated`; and `resolve_first`, where the first output may be asked for alone."""
    lines, key, _ = _key_parts(op)
    plain = "\n".join(f"        {line}" for line in (*lines, "needs = False"))
    names = ", ".join(op.names)
    below = _PLAIN.format(params=names, args=names, key=", ".join(key), bump=_bump(op), lines_plain=plain)
    return _resolver(op, False) + (_resolver(op, True) if FIRST in op.namespace else "") + below


def _forms(op: Primitive) -> list[tuple[str, Sequence[str]]]:
    """(when, the arguments of the brief key): arguments that came later stand in it where they are given."""
    if not op.added:
        return [("", op.names)]
    left_out = " and ".join(f"{name} is _default_{name}" for name in op.added)
    return [(f"if {left_out}:", op.names[: -len(op.added)]), ("", op.names)]


def facts_of(op: Primitive) -> list[str]:
    """Expressions of what a guard of a call's tensors does not see, and of the first one's shape."""
    return [*_AROUND, f"{op.tensors[0]}.shape", *_scalars(op, op.names), *_extra_facts(op)]


def _bump(op: Primitive) -> str:
    """What autograd kept of an argument is no longer what it was: PyTorch counts that in the tensor's version."""
    return f"    bump(({', '.join(op.mutates)},))\n" if op.mutates else ""


def _resolver(op: Primitive, first: bool) -> str:
    """``first``: for calls of the first output alone, whose plans are others: PyTorch's own call may give that one."""
    lines, key, needed = _key_parts(op)
    names = ", ".join(op.names)
    lines = [*lines, f"needs = {needed}"]
    extra = [*_extra_facts(op), *(["'first'"] if first else [])]
    form = {"args": names, "bump": _bump(op), "of": "_first" if first else "", "result": "[0]" if first else ""}
    # an op that autocast leaves alone is not sent to the library for it, where a mutating one works on a copy
    autocast = "" if op.mutates and op.autocast is None else " or autocast()"
    hot, warm = f"    return cold{form['of']}({names})", ""
    if guarded(op):
        brief, tensors = _brief(op, op.names, extra)
        hot = _HOT.format(brief=", ".join(brief), guarded=", ".join(tensors), **form)
        warm = f"    warm(key, plan, ({', '.join(brief)}), {', '.join(tensors)})\n"
    if guarded(op) and op.added:  # a call of before costs what it did
        left_out, names_before = _forms(op)[0]
        brief, tensors = _brief(op, names_before, extra)
        short = _HOT.format(brief=", ".join(brief), guarded=", ".join(tensors), **form)
        hot = f"    {left_out}\n{textwrap.indent(short, '    ')}\n{hot}"
        short = f"warm(key, plan, ({', '.join(brief)}), {', '.join(tensors)})"
        warm = f"    {left_out}\n        {short}\n    else:\n    {warm}"
    return _TEMPLATE.format(
        autocast=autocast,
        params=names,
        key=", ".join([*key, *(["'first'"] if first else [])]),
        hot=hot,
        warm=warm,
        lines="\n".join(f"        {line}" for line in lines),
        **form,
    )


def _brief(op: Primitive, names: Sequence[str], extra: list[str]) -> tuple[list[str], list[str]]:
    """(expressions of the brief key of these arguments, tensors that the guard compares)."""
    # The guard compares requires_grad, and not whether gradients are enabled. A model calls an op with one x and
    # weights of several shapes in turn: by both shapes each has an entry of its own.
    shapes = [f"{name}.shape" for name in op.tensors[:2] if op.types[name] == "Tensor"]
    brief = [*_AROUND, *shapes, *_scalars(op, names), *extra]
    guarded: list[str] = []
    for i, name in enumerate(name for name in op.tensors if name in names):
        # A guard takes tensors only, each once: a stand-in for one that is absent, or is an earlier argument again.
        other = [f"{name} is None"] if op.types[name] == "Tensor?" else []
        if op.gradient.backward is not None and op.types[name] == "Tensor":
            other += [f"{name} is {earlier}" for earlier in op.tensors[:i] if op.types[earlier] == "Tensor"]
        brief += other
        guarded.append(f"no_{name} if {' or '.join(other)} else {name}" if other else name)
    return brief, guarded


def key_function(op: Primitive, namespace: dict[str, Any]) -> Callable[..., Any]:
    """The key alone, for `slow` to store under: the same expressions as the fast path's."""
    lines, key, _ = _key_parts(op)  # of calls of the first output alone, its last part comes after these
    body = "".join(f"    {line}\n" for line in lines)
    source = f"def key_of({', '.join(op.names)}, needs):\n{body}    return ({', '.join(key)})\n"
    exec(compile(source, f"<ferryman key {op.name}>", "exec"), namespace)  # noqa: S102
    key_of: Callable[..., Any] = namespace["key_of"]
    return key_of


def brief_function(op: Primitive, namespace: dict[str, Any]) -> Callable[..., Any]:
    """The brief key that a call's plan stands under, and the tensors that its guard compares."""
    lines = []
    for condition, names in _forms(op):
        brief, tensors = _brief(op, names, _extra_facts(op))
        lines.append(f"    {condition}{' ' if condition else ''}return ({', '.join(brief)}), ({', '.join(tensors)},)\n")
    source = f"def brief_of({', '.join(op.names)}):\n{''.join(lines)}"
    exec(compile(source, f"<ferryman key {op.name}>", "exec"), namespace)  # noqa: S102
    brief_of: Callable[..., Any] = namespace["brief_of"]
    return brief_of

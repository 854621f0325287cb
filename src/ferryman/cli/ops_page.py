"""The Markdown page of ops: docs/ops.md, which ci/docs.py writes, and what `ferryman docs` prints of any package's."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ferryman.cli import support
from ferryman.device_profiles import Profile, catalogue
from ferryman.dispatch import registry, select
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.fills import dtype_name

_WIDTH = 110  # of a signature on one line


def render(ops: Sequence[Primitive], note: str) -> str:
    """The page of these ops. ``note`` stands above it, and says who wrote it."""
    fills = _fills(ops)
    contents = f"""
## Contents of their own

What `ferryman check` fills tensors with is told in Ferryman's `docs/parity.md`. These stand in the evidence of an op,
beside or in place of the common ones.

{fills}"""
    return f"""{note}
# Ops, implementations and devices

[Where each op runs](#where-they-run), [under which conditions](#conditions), [what it means](#what-they-mean).

## Where they run

What would serve the first standard case of each op, in bfloat16, first choice first; asked of the menus' conditions and
the device profiles, with no device touched (`ferryman ops --device mi300x`, `ferryman explain`). It says what *can* run
there; what *is right* there is said by `ferryman check` on the device. On a CPU, `triton` runs in its interpreter, and
only where a process asks for it (`TRITON_INTERPRET=1`).

{_devices(ops)}
## Conditions

An implementation is refused where one of its conditions does not hold; `any` has none. The roundings and accumulation
classes are what it declares to the parity check.

{_conditions(ops)}{contents if fills else ""}
## What they mean

Every op raises `ArgumentError` for arguments that do not fit, and `Unsupported` where no implementation that a request
names serves the call.

{chr(10).join(map(_meaning, ops))}"""


def _devices(ops: Sequence[Primitive]) -> str:
    profiles = sorted((p for p in catalogue().values() if not p.generic), key=lambda p: (p.vendor != "nvidia", p.name))
    profiles.append(catalogue()["cpu"])
    lines = ["| op | " + " | ".join(p.name for p in profiles) + " |", "|---" * (len(profiles) + 1) + "|"]
    for op in ops:
        cells = [_order(p, support.of(op, p)) for p in profiles]
        lines.append(f"| `{op.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _order(profile: Profile, rows: Sequence[support.Support]) -> str:
    """The implementations that can serve, in the order in which they are tried."""
    if all(support.NO_CASE in r.reasons for r in rows):
        return "no standard case"
    if not any(r.dtypes for r in rows):  # the definition serves every call
        return "its package breaks"
    asked = "f32" if profile.vendor == "cpu" else "bf16"  # the interpreter has no bf16 dot, whichever process asks
    able = {r.implementation for r in rows if asked in r.dtypes}
    order = dict.fromkeys(
        [*select.preferred(registry.primitive(rows[0].op), profile), *(r.implementation for r in rows)]
    )
    return ", ".join(name for name in order if name in able and name != "definition") or "definition"


def _fills(ops: Sequence[Primitive]) -> str:
    """Nothing where no op has any."""
    names = {op.name for op in ops}
    lines = [
        f"| `{evidence.op}` | `{fill.name}` | {_cell(fill.meaning)} |"
        for evidence in registry.evidences().values()
        if evidence.op in names
        for fill in evidence.fills
    ]
    return "\n".join(["| op | fill | values |", "|---|---|---|", *lines]) + "\n" if lines else ""


def _conditions(ops: Sequence[Primitive]) -> str:
    lines = ["| op | implementation | conditions | accumulation | roundings |", "|---|---|---|---|---|"]
    for op in ops:
        for line in registry.implementations(op.name):
            if line.backend == "definition":
                continue
            conditions = "; ".join(map(str, line.when)) or "any"
            if not line.deterministic:
                conditions += " (not deterministic)"
            elif line.deterministic == "asked":
                conditions += " (deterministic where asked)"
            roundings = ", ".join(line.roundings) or "-"
            lines.append(f"| `{op.name}` | {line.name} | {conditions} | {line.accumulation} | {roundings} |")
    return "\n".join(lines) + "\n"


def _meaning(op: Primitive) -> str:
    function = _function(op)
    docstring = inspect.getdoc(function) or "It has no docstring."
    facts = {
        "schema": f"`torch.ops.ferryman.{op.schema}`",
        "results": ", ".join(f"`{name}`" for name in op.outputs),
        "dtypes": _dtypes(op),
        "gradient": _gradient(op),
        "may round": "; ".join(f"`{r.name}`: {r.meaning}" for r in op.limits.roundings),
        "defined in": f"`{op.body.__module__}`",
    }
    rows = "\n".join(f"| {name} | {_cell(text)} |" for name, text in facts.items() if text)
    return f"""### `{op.name}`

```python
{_signature(op.name, function)}
```

```text
{docstring}
```

| | |
|---|---|
{rows}
"""


def _function(op: Primitive) -> Callable[..., Any]:
    """What model code calls: the function of the op's name beside the definition, else the definition."""
    function = getattr(sys.modules[op.body.__module__], op.name, None)
    return function if getattr(function, "primitive", None) is op and function is not None else op.body


class _Unquoted:
    """An annotation as its source has it."""

    def __init__(self, annotation: Any) -> None:
        self._text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self._text


def _signature(name: str, function: Callable[..., Any]) -> str:
    """On one line where it fits, else a line for each parameter."""
    signature = inspect.signature(function)
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        bare = parameter.annotation is parameter.empty
        parts.append(str(parameter if bare else parameter.replace(annotation=_Unquoted(parameter.annotation))))
    gives = signature.return_annotation
    returned = "" if gives is signature.empty else f" -> {_Unquoted(gives)!r}"
    line = f"{name}({', '.join(parts)}){returned}"
    return line if len(line) <= _WIDTH else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){returned}"


def _dtypes(op: Primitive) -> str:
    own = [f"`{name}`: {', '.join(map(dtype_name, dtypes))}" for name, dtypes in op.dtypes.items()]
    storage = ", ".join(map(dtype_name, registry.evidence(op).dtypes))
    return "; ".join([*own, f"{'other tensors' if own else 'tensors'}: {storage}"])


def _gradient(op: Primitive) -> str:
    if op.gradient.backward is None:
        return "none"
    names = ", ".join(f"`{name}`" for owners in op.gradient.owners for name in owners)
    return f"of {names}, by `{op.gradient.backward}`"


def _cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("|", "\\|")

"""`ferryman explain`: which implementation would run for a call, on a device that need not be here, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from ferryman.cli import calls, output
from ferryman.device_profiles import resolve
from ferryman.dispatch import explain as explain_call
from ferryman.dispatch import registry, use
from ferryman.errors import ArgumentError, UnknownName


def explain(
    op: Annotated[str, typer.Argument(help="The op, such as rms_norm or attention_backward.")],
    shape: Annotated[str, typer.Option(help="Shape of the op's first tensor: 8,4096. Other tensors follow from it.")],
    dtype: Annotated[str, typer.Option(help="f32, f16 or bf16.")] = "bf16",
    device: Annotated[str | None, typer.Option(help="A profile (mi300x) or a device here (cuda:1, cpu).")] = None,
    layout: Annotated[
        str, typer.Option(help="How the tensors lie: contiguous, rows (padded apart), last (strided), heads.")
    ] = "contiguous",
    arg: Annotated[
        list[str] | None, typer.Option(help="name=value: a scalar, a tensor's shape, or none. Repeatable.")
    ] = None,
    request: Annotated[
        str | None, typer.Option("--use", help="An allow-list, as ferryman.use takes it: cuda,triton.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """Which implementation would run for a call, and why not the others.

    Tensors follow from --shape: a norm's weight and bias are (N,), a linear's weight is (K, K) without a bias, cos and
    sin are (1, seq, head_dim), a mask is left out, every other tensor has the same shape; a backward's are those of its
    forward. --arg k=1,8,4096,128 gives one tensor its own shape, --arg causal=true a scalar. A scalar that
    has no default, as gate_topk's k, is as in the op's first case.
    """
    known = registry.primitive(op)
    if layout not in calls.LAYOUTS:
        raise UnknownName("layout", layout, calls.LAYOUTS)
    given: dict[str, str] = {}
    for text in arg or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ArgumentError("explain", "--arg", repr(text), "name=value")
        given[name] = value
    sizes = calls.shape_of("--shape", shape)
    with registry.blamed(known):
        values = calls.from_shape(known, sizes, calls.dtype_of(dtype), layout, given)
    arguments = dict(zip(known.names, values, strict=True))
    where = resolve(device) if device is not None else None
    if request is None:
        answer = explain_call(op, device=where, **arguments)
    else:
        with use(*(name.strip() for name in request.split(","))):
            answer = explain_call(op, device=where, **arguments)
    if as_json:
        output.json_document(answer.to_dict())
        return
    output.say(str(answer))
    if answer.chosen is None:
        output.say("   nothing that was requested can serve this call: it would raise Unsupported")

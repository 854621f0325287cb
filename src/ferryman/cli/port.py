"""`ferryman port`: a model on Ferryman's ops, compared with itself, timed, and accounted for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ferryman.cli import documents, output
from ferryman.cli.calls import dtype_of
from ferryman.cli.place import place
from ferryman.device_profiles import resolve
from ferryman.errors import BackendUnavailable
from ferryman.porting.report.html import tables_page

DEFAULT_OUT = Path(".ferryman")


def port(
    model: Annotated[
        str,
        typer.Argument(help="A family's name (llama, bert, ..), a local config.json or its folder, or module:factory."),
    ],
    device: Annotated[
        str | None,
        typer.Option(help="Where it runs, or a device that is not here (mi300x): what would serve it there."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="f32, f16 or bf16.")] = "f32",
    tiny: Annotated[bool, typer.Option("--tiny", help="Small widths.")] = False,
    layers: Annotated[int | None, typer.Option(help="Layers to build; default 2, or all of a checkpoint.")] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="A float input's shape, as 2,16,64. Repeatable.")
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Compare no gradients.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Time it under torch.compile as well.")] = False,
    out: Annotated[
        Path | None, typer.Option(help=f"Where JSON and HTML go; {DEFAULT_OUT}, or none with --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
) -> None:
    """Build a model, port it, and say what serves it, what stays and why, whether it is the same, and how fast.

    Exits with 1 where parity fails.
    """
    where, profile = _where(device)
    folder = out if out is not None or as_json else DEFAULT_OUT
    run(
        model,
        where,
        profile,
        dtype_of(dtype),
        tiny,
        layers,
        folder,
        as_json,
        inputs=inputs or [],
        backward=not forward_only,
        compiled=compiled,
    )


def run(
    model: str,
    where: str,
    profile: str | None,
    dtype: torch.dtype,
    tiny: bool,
    layers: int | None,
    folder: Path | None,
    as_json: bool,
    *,
    inputs: Sequence[str] = (),
    backward: bool = True,
    compiled: bool = False,
    stem: str | None = None,
) -> None:
    """Try a model and write its documents; raises typer.Exit(1) where parity fails."""
    try:
        import transformers  # noqa: F401

        import ferryman.integrations.transformers
    except ImportError as error:
        if ":" not in model:
            raise BackendUnavailable(f"{model} needs transformers ({error}); pip install 'ferryman[models]'") from error
    from ferryman.porting.model import trial

    built = trial.build(model, tiny, layers, dtype, list(inputs))
    ferryman._integrate()  # libraries that building it loaded
    with output.progress("porting") as advance:
        stages = ["compare", "time", "compile", "account"]
        result = trial.trial(
            built,
            where,
            profile,
            backward,
            compiled,
            lambda stage: advance(stages.index(stage), len(stages), stage),
        )
    text = result.model_dump_json(indent=1)
    if as_json:
        output.say(text)
    else:
        _show(result)
    if folder is not None:
        stem = stem or "port-" + "".join(c if c.isalnum() else "-" for c in Path(model).name)
        documents.write(folder / f"{stem}.json", text)
        written = [f"{stem}.json"]
        try:
            documents.write(folder / f"{stem}.html", page(result))
            written.append(f"{stem}.html")
        except BackendUnavailable as error:
            sys.stderr.write(f"ferryman: no {stem}.html: {error}\n")
        sys.stderr.write(f"wrote {', '.join(str(folder / name) for name in written)}\n")
    if result.verdict == "FAIL":
        raise typer.Exit(1)


def _where(device: str | None) -> tuple[str, str | None]:
    """(torch device, profile that is accounted for): a profile's name runs on what is here."""
    if device is None:
        return place(None, "port"), None
    try:
        torch.device(device)
    except RuntimeError:
        return place(None, "port"), resolve(device).name
    return place(device, "port"), None


def tables(result: Any) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    whole = sum(line.seconds for line in result.account) or 1.0
    shown = result.account[:20]
    return [
        (
            "Same within limits",
            ("what", "worst tensor", "difference", "floor", "limit", "ok"),
            [
                (m.what, m.where, f"{m.value:.3g}", f"{m.floor:.3g}", f"{m.limit:.3g}", "yes" if m.ok else "no")
                for m in result.parity
            ],
        ),
        (
            f"Where the time goes on {result.accounted_for}, predicted",
            ("", "op", "implementation", "calls", "share of time", "bar"),
            [
                (
                    x.what,
                    x.op,
                    x.implementation or "-",
                    str(x.calls),
                    f"{100 * x.seconds / whole:.1f}%",
                    ("█" if x.what == "served" else "░") * round(40 * x.seconds / whole),
                )
                for x in shown
            ],
        ),
        ("Modules", ("kind",), [(line,) for line in result.kinds]),
        (
            "Unserved time by module",
            ("module", "share of time"),
            [(name or "(the model)", f"{100 * s / whole:.1f}%") for name, s in result.places.items()],
        ),
        ("Measured here", ("run", "seconds"), [(k, f"{v:.4g}") for k, v in result.seconds.items()]),
    ]


def sentences(result: Any) -> list[str]:
    said = [
        f"one forward calls {', '.join(f'{n} {op}' for op, n in result.calls.items() if not op.endswith('_backward'))}"
    ]
    if result.shares:
        shares = ", ".join(f"{100 * v:.0f}% of {k}" for k, v in result.shares.items())
        said.append(f"served on {result.accounted_for}, predicted: {shares} of what the unported model does")
    else:
        said.append(result.accounted_for)
    said.append(f"ported in {result.port_seconds:.1f} s; restored bit for bit: {'yes' if result.restored else 'no'}")
    said.append("limits are twice what one unit in the last place of every parameter does to the unported model")
    return said


def page(result: Any) -> str:
    title = f"{result.model}: ported against unported"
    return tables_page(
        title, result.verdict, sentences(result)[0], result.reasons, sentences(result)[1:], tables(result)
    )


def _show(result: Any) -> None:
    output.say(
        f"{result.verdict}: {result.model} in {result.dtype} on {result.device}, {result.parameters:,} parameters"
    )
    for title, headers, rows in tables(result):
        output.say()
        output.table(headers, rows, title=title)
    output.say()
    for sentence in [*sentences(result), *(f"FAIL: {reason}" for reason in result.reasons)]:
        output.say(sentence)

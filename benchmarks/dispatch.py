"""What choosing an implementation costs the host: a cached call, the first call at a shape, and the second.

    python benchmarks/dispatch.py [--op rms_norm ...] [--sample 8 --seed 1] [--json FILE]

Of every op, by its own small cases:

overhead_us: the op against its own implementation called directly, on the same tensors, through the same
`autograd.Function` where a gradient is needed, so that the difference is dispatch: of a positional call, one by
keywords, and one with a gradient. The implementation returns tensors of before: no kernel's noise is in it.
first_us, second_us: the first call with each of the op's shapes after all plans were dropped, which chooses, and the
next one, which puts a guard in front; third_us: a single call after that.
call_us, torch_us: the op with its real kernel, and PyTorch's own call where its menu names one, with what they compute.

The first two kinds stand twice: with the op's own menu, and with a menu of 30 lines, copies of its own under other
names. Trials alternate; each figure is the median over trials. Peers measured in the same run: a bare dictionary
look-up on (dtype, size, device), and `torch.library.custom_op` over its body.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import small_calls
from ferryman.dispatch import plan, registry, select, state
from ferryman.dispatch.gradient import runner_under_autograd
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive

BATCH, TRIALS = 40, 400  # a batch shorter than a time slice: the median survives a busy machine
ROUNDS = 60  # of first and second calls at each shape
LINES = 30
DTYPE = torch.bfloat16
Call = Callable[[], Any]


def seconds(call: Call) -> float:
    """Time of one call in the mean over a batch, without the garbage collector, as timeit does."""
    gc.collect(0)
    gc.disable()
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    taken = (time.perf_counter() - start) / BATCH
    gc.enable()
    return taken


def overhead(op: Call, direct: Call) -> tuple[float, float]:
    """(median, spread) of the difference in us, trials alternating so that drift hits both sides."""
    for call in (op, direct):
        seconds(call)
    differences = []
    for _ in range(TRIALS):
        a, b, c = seconds(direct), seconds(op), seconds(direct)
        differences.append((b - (a + c) / 2) * 1e6)
    quarters = statistics.quantiles(differences, n=4)
    return statistics.median(differences), quarters[2] - quarters[0]


# ------------------------------------------------------------------------------------------------------------- one op


@contextmanager
def quiet(launcher: Callable[..., Any]) -> Iterator[None]:
    """Every implementation is ``launcher``."""
    kept = registry.launcher
    plan.drop_plans()
    registry.launcher = lambda line: launcher
    try:
        yield
    finally:
        registry.launcher = kept
        plan.drop_plans()


@contextmanager
def menu_of(name: str, count: int) -> Iterator[None]:
    """The op's menu with ``count`` lines: its own, and copies of them behind."""
    kept = registry.implementations
    own = kept(name)
    copies = [
        dataclasses.replace(own[i % len(own)], name=f"{own[i % len(own)].backend}.copy{i}", leads=())
        for i in range(count - len(own))
    ]
    longer: tuple[Implementation, ...] = (*own, *copies)
    registry.implementations = lambda op: longer if op == name else kept(op)
    plan.drop_plans()
    try:
        yield
    finally:
        registry.implementations = kept
        plan.drop_plans()


def returning(results: Sequence[Tensor]) -> Callable[..., Any]:
    """A launcher that does nothing."""
    whole: Any = results[0] if len(results) == 1 else tuple(results)
    return lambda *args: whole


def returning_new(results: Sequence[Tensor]) -> Callable[..., Any]:
    """A launcher that gives tensors of its own, which autograd asks for."""
    if len(results) == 1:
        (only,) = results
        return lambda *args: only.detach()
    return lambda *args: tuple([x.detach() for x in results])


def direct(op: Primitive, args: tuple[Any, ...], launcher: Callable[..., Any], differentiate: bool) -> Call:
    """The call that dispatch's look-up ends in, with its two values at hand."""
    target = select.target_of(select.profile_for(small_calls.device_of(args)))
    if not differentiate:
        return lambda: launcher(*args, target)
    prepared = plan.runner_of(op).recipe.plan(launcher, target, state.effective())
    run = runner_under_autograd(op)
    return lambda: run(*args, prepared)


def spellings(op: Primitive, args: tuple[Any, ...]) -> dict[str, Call]:
    """The call as people write it: what has its default is left out."""
    parameters = op.parameters
    needed = [i for i, p in enumerate(parameters) if p.default is p.empty or args[i] is not p.default]
    ways = {
        "positional": [f"a{i}" for i in range(max(needed) + 1)],
        "keywords": ["a0", *(f"{parameters[i].name}=a{i}" for i in needed if i > 0)],
    }
    names = {"call": op.namespace[op.name], **{f"a{i}": value for i, value in enumerate(args)}}
    written = {way: f"lambda: call({', '.join(given)})" for way, given in ways.items()}
    return {way: eval(source, names) for way, source in written.items()}  # noqa: S307 - unpacking would be timed, too


def learning(op: Primitive, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments with one that asks for a gradient: the last that may have one, a weight where there is one."""
    if op.gradient.backward is None or op.mutates:
        return None
    wanted = {name for shared in op.gradient.owners for name in shared}
    for i in reversed(range(len(args))):
        value = args[i]
        if op.names[i] in wanted and isinstance(value, Tensor) and value.is_floating_point():
            return (*args[:i], torch.nn.Parameter(value.clone()), *args[i + 1 :])
    return None


def cached(op: Primitive, args: tuple[Any, ...], results: Sequence[Tensor]) -> dict[str, list[float]]:
    """{way of calling: [median, spread]} of a repeated call's dispatch."""
    rows: dict[str, list[float]] = {}
    with torch.no_grad(), quiet(launcher := returning(results)):
        for name, call in spellings(op, args).items():
            rows[name] = list(overhead(call, direct(op, args, launcher, False)))
    given = learning(op, args)
    if given is not None:
        with torch.enable_grad(), quiet(launcher := returning_new(results)):
            call = spellings(op, given)["positional"]
            rows["with a gradient"] = list(overhead(call, direct(op, given, launcher, True)))
    return rows


def early(op: Primitive, every: Sequence[tuple[Any, ...]], results: Sequence[Tensor]) -> dict[str, float]:
    """Median us of the first, second and third call at each of the op's shapes, after plans were dropped."""
    call, times = op.namespace["_resolve"], {"first": [0.0], "second": [0.0], "third": [0.0]}
    for own in times.values():
        own.clear()
    with torch.no_grad(), quiet(returning(results)):
        for _ in range(ROUNDS):
            plan.drop_plans()
            for args in every:
                for own in times.values():
                    start = time.perf_counter_ns()
                    call(*args)
                    own.append((time.perf_counter_ns() - start) / 1e3)
    return {f"{name}_us": statistics.median(own) for name, own in times.items()}


def row_of(op: Primitive, device: torch.device) -> dict[str, Any] | None:
    """None for an op without a small case."""
    every = list(small_calls.calls(op, DTYPE, device))
    if not every:
        return None
    case, args = every[0]
    call = op.namespace["_resolve"]
    with torch.no_grad():
        result = call(*args)
    results = [result] if isinstance(result, Tensor) else list(result)
    row: dict[str, Any] = {"op": op.name, "case": case, "lines": len(registry.implementations(op.name))}
    shapes = [given for _, given in every]
    row["own"] = {"overhead_us": cached(op, args, results), **early(op, shapes, results)}
    with menu_of(op.name, LINES):
        row["of_30"] = {"overhead_us": cached(op, args, results), **early(op, shapes, results)}
    own = small_calls.torch_call(op, args)
    with torch.no_grad():
        row["call_us"] = _alternating(lambda: call(*args), own or (lambda: None))[0]
        row["torch_us"] = None if own is None else _alternating(own, lambda: call(*args))[0]
    return row


def _alternating(one: Call, other: Call) -> tuple[float, float]:
    """Median us of two calls in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(TRIALS // 8):
        times[0].append(seconds(one))
        times[1].append(seconds(other))
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6


def peers() -> dict[str, float]:
    """A bare look-up, and PyTorch's own way to wrap a Python kernel, over its body."""
    x = torch.randn(4, 64, dtype=torch.bfloat16)

    def identity(a: Tensor) -> Tensor:
        return a

    table = {(x.dtype, x.shape, x.device): identity}

    @torch.library.custom_op("ferryman_benchmark::nothing", mutates_args=())
    def nothing(a: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(a)

    def body(a: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(a)

    lookup, _ = overhead(lambda: table[x.dtype, x.shape, x.device](x), lambda: identity(x))
    custom, _ = overhead(lambda: nothing(x), lambda: body(x))
    return {"dictionary_lookup_us": lookup, "custom_op_us": custom}


# ---------------------------------------------------------------------------------------------------------- the table


def measure(ops: Sequence[Primitive], device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "device": device.type,
        "dtype": str(DTYPE).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peers": peers(),
        "rows": [row for op in ops if (row := row_of(op, device)) is not None],
    }


def markdown(document: dict[str, Any]) -> str:
    lines = [
        f"{document['device']}, torch {document['torch']}, Python {document['python']}, {document['dtype']}, host "
        "microseconds (`benchmarks/dispatch.py`, which says what each column is). Where two numbers stand, the second "
        f"is that of a menu of {LINES} lines.",
        "",
        "| op | lines | cached | keywords | with a gradient | first | second | third | call | torch's call |",
        "|" + "---|" * 10,
    ]
    for row in document["rows"]:
        both = (row["own"], row["of_30"])
        cells = [row["op"], str(row["lines"])]
        for way in ("positional", "keywords", "with a gradient"):
            here = [f"{menu['overhead_us'][way][0]:.2f}" for menu in both if way in menu["overhead_us"]]
            cells.append(", ".join(here) or "-")
        cells += [", ".join(f"{menu[f'{call}_us']:.1f}" for menu in both) for call in ("first", "second", "third")]
        cells += [f"{row['call_us']:.1f}", "-" if row["torch_us"] is None else f"{row['torch_us']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for menu, title in (("own", "own menu"), ("of_30", f"{LINES} lines")):
        plain = [
            max(v[0] for w, v in r[menu]["overhead_us"].items() if w != "with a gradient") for r in document["rows"]
        ]
        first = [r[menu]["first_us"] for r in document["rows"]]
        lines.append(
            f"- {title}: a cached call's dispatch is {statistics.median(plain):.2f} us in the median of ops, "
            f"{max(plain):.2f} at most; a first call {statistics.median(first):.0f}, {max(first):.0f} at most"
        )
    titles = {"dictionary_lookup_us": "a dictionary look-up", "custom_op_us": "`torch.library.custom_op` over its body"}
    lines += [f"- {title}: {document['peers'][name]:.2f} us" for name, title in titles.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    small_calls.add_options(parser)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the document here, and the table beside it as Markdown")
    asked = parser.parse_args()
    document = measure(small_calls.ops_of(asked), torch.device(asked.device))
    if asked.json:
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
        asked.json.with_suffix(".md").write_text(markdown(document))
    print(markdown(document))


if __name__ == "__main__":
    main()

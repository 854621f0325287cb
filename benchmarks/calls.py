"""Every implementation of some named calls, side by side: what a drawn grid meets too rarely, and peers beside ours.

    python benchmarks/calls.py --json calls.json [--only attention moe_experts]      time them on this GPU
    python benchmarks/calls.py --show calls.json                                     the table of a document

Of every op, forward and backward: the first and the last cell of `ferryman bench --grid full`, and the calls whose
contents decide their time (`Evidence.contents`), such as masks. Each op's first call comes before any op's second, so
that no op takes all of the time. Times are of a device alone, by graph replay, on inputs that no cache holds, in turns
over three trials (`ferryman.porting.bench`); what is far behind the best is timed once. A row is written as soon as it
is timed. ``--ahead N``: first run each call once in N processes, which compile beside each other.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferryman import files
from ferryman.dispatch import registry, select, state
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import grid, peers, rotation, runner
from ferryman.porting.bench.condition import watch
from ferryman.porting.bench.contender import Contender, close, prepare, promising, quickest_of, steady_trials
from ferryman.porting.running.process import failure, quiet

DTYPE = torch.bfloat16
PEERS = ("sdpa", "fla")


@dataclass(frozen=True)
class Call:
    op: Primitive
    case: str
    arguments: Callable[[torch.device], tuple[Any, ...]]


def calls(only: list[str] | None, named: list[str] | None = None) -> Iterator[Call]:
    """One call of each op, then another of each, and so on. named: the calls, as an op's evidence names them."""
    device = torch.device("cuda")
    ops = [op for op in registry.primitives().values() if not only or op.name in only]
    by_op = [(op, _cases(op, device) if named is None else _named(op, named)) for op in ops]
    for turn in range(max((len(cases) for _, cases in by_op), default=0)):
        for op, cases in by_op:
            if turn < len(cases):
                yield Call(op, cases[turn].name, functools.partial(arguments, op, cases[turn]))


def _cases(op: Primitive, device: torch.device) -> list[Case]:
    cells, known = grid.cases(op, "full", device), registry.evidence(op)
    own = [] if known.named is None else [known.named(name) for name in known.contents]
    return list({case.name: case for case in (*cells[:1], *cells[-1:], *own)}.values())


def _named(op: Primitive, names: list[str]) -> list[Case]:
    known = registry.evidence(op)
    if known.named is None:
        raise SystemExit(f"the evidence of {op.name} names no calls")
    return [known.named(name) for name in names]


def arguments(op: Primitive, case: Case, device: torch.device) -> tuple[Any, ...]:
    """Drawn; a backward's with the gradient of every floating argument, an optional one's too."""
    values = dict(zip(op.names, grid.inputs(op, case, DTYPE, 0, device), strict=True))
    for name in op.names:
        argument = values.get(name.removeprefix("need_"))
        if name.startswith("need_") and isinstance(argument, Tensor):
            values[name] = argument.is_floating_point()
    return tuple(values[name] for name in op.names)


# --------------------------------------------------------------------------------------------------------------- timing


def _plan(op: Primitive, device: torch.device, adapters: tuple[peers.Adapter, ...]) -> runner.Plan:
    profile = select.profile_for(device)
    return runner.Plan(device, profile, DTYPE, (), (), adapters, 0)


def _contenders(plan: runner.Plan, op: Primitive, args: tuple[Any, ...]) -> list[Contender]:
    return [*runner.implementations(plan, op, args), *runner.peer_contenders(plan, op, args)]


def timed(call: Call, device: torch.device, adapters: tuple[peers.Adapter, ...]) -> dict[str, Any]:
    """The row of a call: microseconds by name, why a name has none, what dispatch chooses."""
    began, plan = time.monotonic(), _plan(call.op, device, adapters)
    args = call.arguments(device)
    sets, _ = rotation.sets_of(args, device, rotation.cache_of(plan.profile))
    contenders = _contenders(plan, call.op, sets[0])
    seen = watch(device)
    for contender in contenders:
        prepare(contender, sets, device, seen.sample, rotation.restoring(call.op, sets), quickest_of(contenders))
    noise, untrusted = steady_trials(promising([c for c in contenders if c.timer is not None]), seen)
    for contender in contenders:
        close(contender)
    return {
        "op": call.op.name,
        "case": call.case,
        "us": {c.name: sorted(c.trials)[len(c.trials) // 2] * 1e6 for c in contenders if c.trials},
        "skipped": {c.name: (c.skipped or "not timed")[:200] for c in contenders if not c.trials},
        "choice": select.select(call.op, args, plan.profile, state.effective()).implementation.name,
        "noise": noise,
        "untrusted": untrusted,
        "seconds": time.monotonic() - began,
    }


def ahead(share: int, of: int, todo: list[Call], device: torch.device, adapters: tuple[peers.Adapter, ...]) -> None:
    """Run every implementation of each ``of``-th call once."""
    torch.cuda.set_per_process_memory_fraction(1 / of)
    for call in todo[share::of]:
        plan = _plan(call.op, device, adapters)
        try:
            args = call.arguments(device)
            contenders = [c for c in _contenders(plan, call.op, args) if c.skipped is None]
        except torch.OutOfMemoryError:  # no room beside the others: its own turn tells
            contenders = []
        for contender in contenders:
            try:
                contender.call_of(rotation.spared(call.op, args))()
            except Exception as error:  # noqa: BLE001 - a library's own; the row says it when its turn comes
                sys.stderr.write(f"{call.op.name} {call.case}, {contender.name}: {failure(error, device)}\n")
        torch.cuda.empty_cache()


def markdown(document: dict[str, Any]) -> str:
    """A row a call; dispatch's choice in bold, the others by time."""
    lines = [
        f"{document['device']}, torch {document['torch']}, bfloat16, microseconds (`benchmarks/calls.py`). In bold "
        "what dispatch chooses without a lockfile.",
        "",
        "| op | call | times | noise |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        if "failed" in row:
            lines.append(f"| {row['op']} | {row['case']} | failed: {row['failed']} | |")
            continue
        times = [
            f"**{name} {us:,.1f}**" if name == row["choice"] else f"{name} {us:,.1f}"
            for name, us in sorted(row["us"].items(), key=lambda item: item[1])
        ]
        times += [f"{name}: {row['skipped'][name]}" for name in PEERS if name in row["skipped"]]
        lines.append(f"| {row['op']} | {row['case']} | {', '.join(times)} | {row['noise']:.1%} |")
    if document.get("left"):
        lines += ["", f"Left when time was up: {'; '.join(document['left'])}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the document here, after each call")
    parser.add_argument("--show", type=Path, help="print the table of this document, and end")
    parser.add_argument("--only", nargs="+", metavar="OP", help="calls of these ops")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="these calls of each op, as its evidence names them")
    parser.add_argument("--seconds", type=float, default=600, help="no call begins later")
    parser.add_argument("--ahead", type=int, default=0, metavar="N")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ["FERRYMAN_LOCKFILE"] = "none"  # of its processes, too
    if asked.show:
        print(markdown(files.document(asked.show)))
        return
    device, todo = torch.device("cuda:0"), list(calls(asked.only, asked.case))
    known = peers.adapters(Path(__file__).parent / "peers", PEERS)
    adapters = tuple(adapter for adapter in known if adapter.peer().reason is None)
    if asked.share:
        share, of = map(int, asked.share.split("/"))
        ahead(share, of, todo, device, adapters)
        return
    began = time.monotonic()
    command = [sys.executable, __file__, *(["--only", *asked.only] if asked.only else [])]
    command += ["--case", *asked.case] if asked.case else []
    children = [
        subprocess.Popen([*command, "--share", f"{k}/{asked.ahead}"], stdout=subprocess.DEVNULL)
        for k in range(asked.ahead)
    ]
    for child in children:
        if child.wait():
            sys.stderr.write(f"a process that runs calls once ended with code {child.returncode}\n")
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    document |= {"rows": [], "left": []}
    with quiet():
        for call in todo:
            if time.monotonic() - began > asked.seconds:
                document["left"].append(f"{call.op.name} {call.case}")
                continue
            try:
                row = timed(call, device, adapters)
            except Exception as error:  # noqa: BLE001 - no memory, mostly: the other calls are timed; a lost device rises
                row = {"op": call.op.name, "case": call.case, "failed": failure(error, device)}
            torch.cuda.empty_cache()
            document["rows"].append(row)
            if asked.json:
                asked.json.write_text(json.dumps(document, indent=1) + "\n")
    print(markdown(document))


if __name__ == "__main__":
    main()

"""How fast ops are beside others, by the goals in their evidence (`Evidence.goals`): a row a cell, a table of all.

    python benchmarks/goals.py --json goals.json --ahead 12              time them on this GPU
    python benchmarks/goals.py --json goals.json --resume                go on with what a sitting left
    python benchmarks/goals.py --show goals.json                         the table of a document, in Markdown
    python benchmarks/goals.py --rehearse --cells 1 --json r.json        tiny sizes, on a CPU

Ours is what dispatch chooses. Beside it stand the peers (`benchmarks/peers`) that are installed and near ours, a copy
of the least bytes, and a twin: what a goal asks for. All are timed by graph replay (what is long, by events) on inputs
that no cache holds, in turns over three trials; a ratio is the median of the trials' ratios, its spread their least and
most. Every goal's first cell comes before any goal's second. A cell is printed, and written, as soon as it is timed.

``--ahead N``: N processes first run each call once, for ``--ahead-seconds`` at most, which compiles kernels beside each
other; what an autotuner finds on a busy device is not kept. They share the calls, and for a library with
``prepare_share`` the configurations of its autotuners. A peer with ``SLOW_START`` whose call did not end then is left
out, and its row says so. ``--op-seconds``: no cell of a goal begins once its cells took so long.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferryman import files
from ferryman.dispatch import registry, select, state
from ferryman.ops.evidence import Goal, Sampler
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.bench import ceilings, grid, peers, rotation, runner
from ferryman.porting.bench.condition import watch
from ferryman.porting.bench.contender import Contender, close, prepare, promising, quickest_of, steady_trials
from ferryman.porting.inputs.cases import as_tuple
from ferryman.porting.running.process import failure, quiet

DTYPE = torch.bfloat16
OURS, COPY, TWIN = "ferryman", "copy", "twin"
LEAST = 0.9  # of the peers' speed, in each cell
# of rows, in models
WIDTHS = (768, 1024, 1152, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 11_008, 14_336, 18_432)
# elements of one tensor: drawing takes tens of bytes for each. In the second, of many processes at once
MOST_DRAWN, MOST_DRAWN_AHEAD = 1 << 26, 1 << 22


@dataclass(frozen=True)
class Task:
    op: Primitive  # the one that is timed; the forward of a step
    goal: Goal
    case: Case

    @property
    def key(self) -> tuple[str, str]:
        return self.goal.name, self.case.name


def tasks(only: Sequence[str] | None, seed: int, less: int = 1, cells: int | None = None) -> list[Task]:
    """One cell of each goal, then another of each, and so on; equal for equal arguments."""
    queues = []
    for op in registry.primitives().values():
        if registry.forward_of(op) is not None or (only and op.name not in only):
            continue
        for goal in registry.evidence(op).goals:
            of = op
            if goal.timed == "backward":
                assert op.gradient is not None and op.gradient.backward is not None
                of = registry.primitive(op.gradient.backward)
            sampler = Sampler(random.Random(f"{seed} {goal.name}"), less, WIDTHS)
            queues.append([Task(of, goal, case) for case in goal.cases(sampler)][:cells])
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


# --------------------------------------------------------------------------------------------------------------- inputs


def inputs(op: Primitive, case: Case, seed: int, device: torch.device, most: int = MOST_DRAWN) -> tuple[Any, ...]:
    """Arguments in schema order. Of a contiguous tensor of more than ``most`` elements the first rows are drawn, and
    repeated. Not of a backward's, which a forward gives, nor of what is written over: a fill may follow its size."""
    whole = {*op.names} if registry.forward_of(op) is not None else {*op.mutates}
    large = {n: a for n, a in case.args.items() if n not in whole and _large(a, most)}
    fewer = {n: replace(a, shape=(max(1, most // math.prod(a.shape[1:])), *a.shape[1:])) for n, a in large.items()}
    values = list(grid.inputs(op, replace(case, args={**case.args, **fewer}), DTYPE, seed, device))
    for name, spec in large.items():
        place = op.names.index(name)
        values[place] = _repeated(values[place], spec.shape)
    return tuple(values)


def _large(value: Any, most: int) -> bool:
    return isinstance(value, TensorSpec) and value.layout == "contiguous" and math.prod(value.shape) > most


def _repeated(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    whole = rows.new_empty(shape)
    for part in whole.split(len(rows)):
        part.copy_(rows[: len(part)])
    return whole


def _bytes(args: Sequence[Any]) -> int:
    return sum(a.numel() * a.element_size() for a in args if isinstance(a, Tensor))


# ----------------------------------------------------------------------------------------------------------- contenders


def step(op: Primitive, function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """A forward and its backward: the first output, and the gradient of each argument that has one."""
    assert op.gradient is not None
    given = list(args)
    places = [op.names.index(name) for name in op.gradient.grads]
    places = [place for place in places if isinstance(args[place], Tensor)]
    for place in places:
        given[place] = args[place].detach().requires_grad_()
    with torch.no_grad():
        like = as_tuple(function(*given))[0]
    generator = torch.Generator(like.device).manual_seed(0)
    grad = torch.ones_like(like)
    if like.dim():
        grad = torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)

    def call() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            first = as_tuple(function(*given))[0]
            return (first.detach(), *torch.autograd.grad(first, [given[place] for place in places], grad))

    return call


def contenders(plan: runner.Plan, task: Task, args: tuple[Any, ...]) -> list[Contender]:
    """Ours, then each peer that serves the op, with the reason of one that is not timed."""
    op, ours = task.op, task.op.namespace["_resolve"]
    if task.goal.timed != "step":
        first = Contender(OURS, "implementation", lambda a: functools.partial(ours, *a))
        return [first, *runner.peer_contenders(plan, op, args)]
    known = [Contender(OURS, "implementation", functools.partial(step, op, ours))]
    right: tuple[Tensor, ...] | None = None
    for adapter in plan.adapters:
        if op.name in adapter.steps:
            contender = Contender(adapter.name, "peer", functools.partial(step, op, adapter.steps[op.name]))
            right = step(op, ours, args)() if right is None else right
            contender.skipped = _stepped_wrong(op, contender, args, right, plan.device)
            known.append(contender)
    return known


def _stepped_wrong(
    op: Primitive, contender: Contender, args: tuple[Any, ...], right: tuple[Tensor, ...], device: torch.device
) -> str | None:
    assert op.gradient is not None
    try:
        difference = peers.apart(["the output", *map(str, op.gradient.grads)], contender.call_of(args)(), right)
        return None if difference is None else f"does not agree with ours on these inputs: {difference}"
    except peers.NotServed as error:
        return f"not served: {error}"
    except Exception as error:  # noqa: BLE001 - other libraries raise what they like; a lost device rises next
        return failure(error, device)


def _served(task: Task, adapter: peers.Adapter) -> dict[str, Callable[..., Any]]:
    """The ops that an adapter has in the way that the task times them."""
    return adapter.steps if task.goal.timed == "step" else adapter.ops


def plan_of(device: torch.device, seed: int) -> runner.Plan:
    adapters = peers.adapters(Path(__file__).parent / "peers", None)
    usable = tuple(adapter for adapter in adapters if adapter.peer().reason is None)
    return runner.Plan(device, select.profile_for(device), DTYPE, (), (), usable, seed)


# --------------------------------------------------------------------------------------------------------------- timing


def timed(
    task: Task, plan: runner.Plan, ready: set[tuple[str, str, str]] | None, small: bool = False
) -> dict[str, Any]:
    """A cell's row. ready: (goal, case, peer) that ran before; None: any may run. small: a copy is timed anyway."""
    began, op, device = time.monotonic(), task.op, plan.device
    sets, _ = rotation.sets_of(inputs(op, task.case, plan.seed, device), device, rotation.cache_of(plan.profile))
    cost = op.cost(*sets[0])
    row: dict[str, Any] = {"goal": task.goal.name, "op": op.name, "case": task.case.name}
    row |= {"bytes": cost.bytes, "flops": cost.flops}
    if ready is None:
        known = contenders(plan, task, sets[0])
    else:
        here = tuple(a for a in plan.adapters if not a.slow_start or (*task.key, a.name) in ready)
        known = contenders(replace(plan, adapters=here), task, sets[0])
        served = [a.name for a in plan.adapters if op.name in _served(task, a)]
        late = {name: "not ready in the time ahead" for name in served if name not in {a.name for a in here}}
        known += [Contender(name, "peer", lambda a: list, skipped=why) for name, why in late.items()]
    seen = watch(device)
    for contender in known:
        prepare(contender, sets, device, seen.sample, rotation.restoring(op, sets), quickest_of(known))
    others = []
    if COPY in task.goal.reach and (small or cost.bytes >= grid.LARGE_BYTES):
        copies = ceilings.copies(cost.bytes, device)
        others.append(Contender(COPY, "reference", lambda args: copies()))
        prepare(others[-1], sets, device, seen.sample)
    if task.goal.twin is not None:
        given = inputs(op, task.goal.twin(task.case), plan.seed, device)
        plain, _ = rotation.sets_of(given, device, rotation.cache_of(plan.profile))
        row["twin_flops"] = op.cost(*plain[0]).flops
        others.append(Contender(TWIN, "reference", lambda a: functools.partial(op.namespace["_resolve"], *a)))
        prepare(others[-1], plain, device, seen.sample)
    kept = promising([c for c in known if c.timer is not None])
    noise, untrusted = steady_trials([*kept, *(c for c in others if c.timer is not None)], seen)
    for contender in (*known, *others):
        close(contender)
    if task.goal.most_memory is not None and device.type == "cuda":
        row["arguments"] = _bytes(sets[0])
        row["memory"] = {c.name: _allocated(c.call_of(sets[0])) for c in known if c.skipped is None}
    return row | {
        "trials": {c.name: [t * 1e6 for t in c.trials] for c in (*known, *others) if c.trials},
        "skipped": {c.name: (c.skipped or "not timed")[:1000] for c in (*known, *others) if not c.trials},
        "choice": select.select(op, sets[0], plan.profile, state.effective()).implementation.name,
        "noise": noise,
        "untrusted": untrusted,
        "seconds": time.monotonic() - began,
    }


@torch.no_grad()
def _allocated(call: Callable[[], Any]) -> int:
    """Bytes that a call has at most beyond those before it, its results among them."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ahead(share: int, of: int, todo: list[Task], plan: runner.Plan, into: Path) -> None:
    """Run ours and every peer of each ``of``-th cell once, and write down what ended. What divides its configurations
    runs each cell, first of all: this process compiles its part of them."""
    from torch._inductor import config as inductor_config  # seconds to import, for this process alone

    torch.cuda.set_per_process_memory_fraction(0.9 / of)
    inductor_config.autotune_local_cache = False  # a choice made while others share the device
    dividing = tuple(a for a in plan.adapters if hasattr(a.module, "prepare_share"))
    for adapter in dividing:
        adapter.module.prepare_share(share, of)
    own = replace(plan, adapters=tuple(a for a in plan.adapters if a.slow_start and a not in dividing))
    parts = [(replace(plan, adapters=dividing), todo), (own, todo[share::of])]
    with into.open("a", buffering=1) as ended:
        for part, some in parts:
            for task in some:
                served = [a.name for a in part.adapters if task.op.name in _served(task, a)]
                if not served and part is not own:
                    continue
                try:
                    args = inputs(task.op, task.case, plan.seed, plan.device, MOST_DRAWN_AHEAD)
                    for contender in contenders(part, task, args):
                        if contender.skipped is None:
                            contender.call_of(rotation.spared(task.op, args))()
                    ended.writelines(json.dumps([*task.key, name]) + "\n" for name in served)
                except torch.OutOfMemoryError:  # no room beside the others: its own turn tells
                    ended.writelines(json.dumps([*task.key, name]) + "\n" for name in served)
                except Exception as error:  # noqa: BLE001 - a library's own; the row says it when its turn comes
                    sys.stderr.write(f"{task.goal.name} {task.case.name}: {failure(error, plan.device)}\n")
                torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------- table


def ratios(row: dict[str, Any], other: str) -> list[float]:
    """Ours' speed over another's in each trial, least first; of a twin, in operations a second."""
    scale = row["flops"] / row["twin_flops"] if other == TWIN else 1.0
    ours, its = row["trials"].get(OURS, []), row["trials"].get(other, [])
    if len(ours) != len(its):  # one was far behind, and timed once
        ours, its = [statistics.median(x)] if (x := ours) else [], [statistics.median(y)] if (y := its) else []
    return sorted(scale * b / a for a, b in zip(ours, its, strict=False))


def beside(row: dict[str, Any], what: str) -> tuple[str, list[float]] | None:
    """What stands beside ours, and the ratios: the quickest peer, the copy or the twin. None where it was not timed."""
    if what != "peers":
        return (what, pairs) if (pairs := ratios(row, what)) else None
    medians = {n: statistics.median(t) for n, t in row["trials"].items() if n not in (OURS, COPY, TWIN)}
    best = min(medians, key=medians.__getitem__, default=None)
    return (best, ratios(row, best)) if best is not None and ratios(row, best) else None


def line(row: dict[str, Any]) -> str:
    """A cell in one line of text."""
    if "failed" in row:
        return f"{row['goal']} | {row['case']} | failed: {row['failed']}"
    parts = [f"{n} {statistics.median(t):,.1f}" for n, t in row["trials"].items()]
    return f"{row['goal']} | {row['case']} | {row['choice']} | us: {', '.join(parts)} | {row['seconds']:.1f} s"


def markdown(document: dict[str, Any]) -> str:
    """Each goal with what was reached, then every cell."""
    asked = {row["goal"] for row in document["rows"]} | {name for name, _ in document["left"]}
    known = {g.name: g for op in registry.primitives().values() for g in _goals(op) if g.name in asked}
    rows = [row for row in document["rows"] if row["goal"] in known]
    lines = [
        f"{document['device']}, torch {document['torch']}, bfloat16, seed {document['seed']} (`benchmarks/goals.py`)."
        f" Peers: {', '.join(f'{n} {v}' for n, v in document['peers'].items())}.",
        "",
        "| goal | beside | cells | geomean | least | below 0.9 | reach | reached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, goal in known.items():
        own = [row for row in rows if row["goal"] == name and "failed" not in row]
        for what, reach in goal.reach.items():
            lines += [_summary(name, what, reach, [r for row in own if (r := beside(row, what)) is not None])]
        if goal.most_memory is not None:
            shares = [row["memory"][OURS] / row["arguments"] for row in own if OURS in row.get("memory", {})]
            worst, met = (
                ("", "not measured") if not shares else (f"{max(shares):.2f}", _yes(max(shares) <= goal.most_memory))
            )
            lines.append(f"| {name} | memory / arguments | {len(shares)} | | {worst} | | {goal.most_memory} | {met} |")
    lines += ["", "| goal | call | chosen | us | beside | ratio (spread) | noise |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['goal']} | {row['case']} | failed: {row['failed']} | | | | |")
            continue
        ours = statistics.median(row["trials"].get(OURS, [math.nan]))
        pairs = [f for what in known[row["goal"]].reach if (f := beside(row, what)) is not None]
        ratio = ", ".join(f"{statistics.median(r):.2f} ({r[0]:.2f}-{r[-1]:.2f})" for _, r in pairs)
        names = ", ".join(n for n, _ in pairs) or "; ".join(f"{n}: {why[:200]}" for n, why in row["skipped"].items())
        noise = "" if row["noise"] is None else f"{row['noise']:.1%}"
        mark = " untrusted" if row["untrusted"] else ""
        lines.append(
            f"| {row['goal']} | {row['case']} | {row['choice']} | {ours:,.1f} | {names} | {ratio} | {noise}{mark} |"
        )
        if "memory" in row:
            lines[-1] += " memory: " + ", ".join(f"{n} {b / 2**20:,.0f} MiB" for n, b in row["memory"].items())
    if document.get("left"):
        lines += [
            "",
            f"Left when time was up: {len(document['left'])} cells: {'; '.join(map(', '.join, document['left']))}",
        ]
    return "\n".join(lines)


def _goals(op: Primitive) -> tuple[Goal, ...]:
    return () if registry.forward_of(op) is not None else registry.evidence(op).goals


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _summary(name: str, what: str, reach: float, pairs: list[tuple[str, list[float]]]) -> str:
    if not pairs:
        return f"| {name} | {what} | 0 | | | | {reach} | not measured |"
    medians = [statistics.median(r) for _, r in pairs]
    geomean, low = statistics.geometric_mean(medians), sum(m < LEAST for m in medians)
    names = ", ".join(dict.fromkeys(n for n, _ in pairs))
    label = names if what == "peers" else what
    met = geomean >= reach and (not low or what != "peers")
    return f"| {name} | {label} | {len(pairs)} | {geomean:.2f} | {min(medians):.2f} | {low} | {reach} | {_yes(met)} |"


# ------------------------------------------------------------------------------------------------------------------ run


def _ready(asked: argparse.Namespace, plan: runner.Plan) -> set[tuple[str, str, str]] | None:
    """What ran once in ``--ahead`` processes; None where there are none."""
    if not asked.ahead:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--seed", str(asked.seed), *(["--op", *asked.op] if asked.op else [])]
        command += ["--cells", str(asked.cells)] if asked.cells else []
        children = [
            subprocess.Popen(
                [*command, "--share", f"{k}/{asked.ahead}", "--into", f"{folder}/{k}"], stdout=subprocess.DEVNULL
            )
            for k in range(asked.ahead)
        ]
        end = time.monotonic() + asked.ahead_seconds
        for child in children:
            try:
                child.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        texts = [path.read_text() for path in Path(folder).iterdir()]
    ended = Counter(tuple(json.loads(line)) for text in texts for line in text.splitlines() if line.endswith("]"))
    divided = {a.name for a in plan.adapters if hasattr(a.module, "prepare_share")}
    ready = {key for key, count in ended.items() if count >= (asked.ahead if key[-1] in divided else 1)}
    sys.stderr.write(f"{len(ready)} calls ran ahead\n")
    return ready


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the document here, after each cell")
    parser.add_argument("--resume", action="store_true", help="keep the cells that --json has")
    parser.add_argument("--show", type=Path, help="print the table of this document, and end")
    parser.add_argument("--op", nargs="+", help="goals of these ops")
    parser.add_argument("--cells", type=int, help="of each goal, at most")
    parser.add_argument("--seconds", type=float, default=520, help="of all; no cell begins later")
    parser.add_argument("--op-seconds", type=float, default=60, help="of a goal's cells; none begins later")
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--ahead", type=int, default=0, metavar="N")
    parser.add_argument("--ahead-seconds", type=float, default=150)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, sizes of 1/64")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = _arguments()
    if asked.show:
        print(markdown(files.document(asked.show)))
        return
    os.environ["FLA_CACHE_RESULTS"] = "0"  # what its autotuner chose while others shared the device
    began, less = time.monotonic(), 64 if asked.rehearse else 1
    device = torch.device("cpu" if asked.rehearse else "cuda:0")
    plan, todo = plan_of(device, asked.seed), tasks(asked.op, asked.seed, less, asked.cells)
    if asked.share:
        share, of = map(int, asked.share.split("/"))
        with quiet():
            ahead(share, of, todo, plan, asked.into)
        return
    name = "cpu" if asked.rehearse else torch.cuda.get_device_name(device)
    versions = {adapter.name: adapter.peer().version for adapter in plan.adapters}
    document: dict[str, Any] = {"device": name, "torch": torch.__version__, "seed": asked.seed}
    document |= {"peers": versions, "rows": [], "left": []}
    if asked.resume and asked.json is not None and asked.json.exists():
        before = files.document(asked.json)
        if [before[n] for n in ("device", "torch", "seed")] != [document[n] for n in ("device", "torch", "seed")]:
            raise SystemExit(f"{asked.json} is of {before['device']}, torch {before['torch']}, seed {before['seed']}")
        document["rows"] = [row for row in before["rows"] if "failed" not in row]
    done = {(row["goal"], row["case"]) for row in document["rows"]}
    todo = [task for task in todo if task.key not in done]
    ready, spent = _ready(asked, plan), dict[str, float]()
    with quiet():
        for task in todo:
            late = time.monotonic() - began > asked.seconds
            if late or spent.get(task.goal.name, 0.0) > asked.op_seconds:
                document["left"].append(task.key)
                continue
            start = time.monotonic()
            try:
                row = timed(task, plan, ready, asked.rehearse)
            except Exception as error:  # noqa: BLE001 - no memory, mostly: the other cells are timed; a lost device rises
                row = {"goal": task.goal.name, "op": task.op.name, "case": task.case.name}
                row["failed"] = failure(error, device)
            spent[task.goal.name] = spent.get(task.goal.name, 0.0) + time.monotonic() - start
            gc.collect()  # what failed or was compiled holds its tensors in cycles
            if device.type == "cuda":
                torch.cuda.empty_cache()
            document["rows"].append(row)
            print(line(row), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(document, indent=1) + "\n")
    if asked.json:
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
    print(markdown(document))


if __name__ == "__main__":
    main()

"""Every implementation of some named calls, side by side: what a drawn grid meets too rarely, and peers beside ours.

    python benchmarks/calls.py --json calls.json [--only attention moe_experts]      time them on this GPU
    python benchmarks/calls.py --show calls.json                                     the table of a document

Masks of attention stand here with the contents that decide its time: what a static cache, padding, packed documents or
a learned bias make. Of other ops cells of `ferryman bench --grid full` are named. Times are of a device alone, by graph
replay, on inputs that no cache holds, in turns over three trials (`ferryman.porting.bench`). A row is written as soon
as it is timed. ``--ahead N``: first run each call once in N processes, which compile beside each other.
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

import ferryman
from ferryman import files
from ferryman.dispatch import registry, select
from ferryman.ops.primitive import Primitive
from ferryman.porting.bench import grid, peers, rotation, runner
from ferryman.porting.bench.condition import watch
from ferryman.porting.bench.contender import Contender, close, prepare, steady_trials
from ferryman.porting.running.process import failure, quiet

DTYPE = torch.bfloat16
PEERS = ("sdpa", "fla")
# of `ferryman bench --grid full`
CELLS = {
    "moe_experts": ("512 E8", "8192 E8", "512 E128", "8192 E128"),
    "moe_experts_backward": ("8192 E8", "8192 E128"),
    "grouped_linear": ("1024 E8", "16384 E8", "4096 E128", "65536 E128"),
    "grouped_linear_backward": ("16384 E8",),
    "gated_delta_rule": ("B1 L2048 G16 H32", "B8 L4096 G16 H32", "B64 L1 G16 H32"),
    "gated_delta_rule_backward": ("B1 L2048 G16 H32", "B8 L4096 G16 H32"),
    "ssd_scan": ("B8 L4096 H24", "B1 L2048 H80"),
    "causal_conv1d": ("B2 D5376 L2048", "B16 D4352 L4096"),
    "causal_conv1d_backward": ("B2 D5376 L2048", "B16 D4352 L4096"),
}
# composed token after token: minutes
TIMED = dict.fromkeys(("gated_delta_rule", "gated_delta_rule_backward", "ssd_scan"), ("triton",))


@dataclass(frozen=True)
class Call:
    op: Primitive
    case: str
    arguments: Callable[[torch.device], tuple[Any, ...]]


# ---------------------------------------------------------------------------------------------------------------- masks


def _static_cache(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """A cache that is a quarter to a half full."""
    lengths = torch.randint(keys // 4, keys // 2, (batch, 1), device=device)
    seen = torch.arange(keys, device=device) < lengths
    return seen[:, None, None].expand(batch, 1, queries, keys).contiguous()


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _left_padded(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Causal, and up to half of a row's first tokens are padding."""
    padding = torch.arange(batch, device=device)[:, None] * (keys // (2 * batch))
    real = torch.arange(keys, device=device) >= padding
    return (_causal(queries, keys, device) & real[:, None])[:, None].contiguous()


def _documents(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Causal within documents of 512 tokens."""
    document = torch.arange(keys, device=device) // 512
    seen = _causal(queries, keys, device) & (document[:, None] == document)
    return seen.expand(batch, 1, queries, keys).contiguous()


def _half(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Any key with probability 1/2: no block is hidden as a whole."""
    return torch.rand(batch, 1, queries, keys, device=device) < 0.5


def _bias(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """A position bias that learns, one for all samples."""
    return torch.randn(1, heads, queries, keys, device=device, dtype=DTYPE)


# name, whether its backward, (B, H, Hk, Sq, Sk, D), mask
ATTENTION: tuple[tuple[str, bool, tuple[int, ...], Callable[..., Tensor]], ...] = (
    ("static cache, decode", False, (32, 32, 8, 1, 4096, 128), _static_cache),
    ("static cache, 17 queries", False, (8, 32, 8, 17, 4096, 128), _static_cache),
    ("left padded", False, (4, 32, 8, 2048, 2048, 128), _left_padded),
    ("documents", False, (2, 32, 8, 4096, 4096, 128), _documents),
    ("documents", False, (2, 32, 8, 4096, 4096, 64), _documents),
    ("half at random", False, (2, 16, 16, 2048, 2048, 64), _half),
    ("left padded", True, (4, 32, 8, 2048, 2048, 128), _left_padded),
    ("documents", True, (2, 32, 8, 4096, 4096, 128), _documents),
    ("learned bias", True, (2, 16, 16, 2048, 2048, 64), _bias),
    ("learned bias", True, (8, 12, 12, 512, 512, 64), _bias),
)


def _attention(sizes: tuple[int, ...], mask: Callable[..., Tensor], backward: bool) -> Callable[..., tuple[Any, ...]]:
    batch, heads, groups, queries, keys, width = sizes

    def arguments(device: torch.device) -> tuple[Any, ...]:
        torch.manual_seed(0)
        generator = torch.Generator(device=device).manual_seed(0)

        def rows(count: int, length: int) -> Tensor:
            shape = (batch, length, count, width)
            return torch.randn(shape, device=device, dtype=DTYPE, generator=generator).transpose(1, 2)

        op = registry.primitive("attention")
        given = dict.fromkeys(op.names) | {"q": rows(heads, queries), "k": rows(groups, keys), "v": rows(groups, keys)}
        given |= {"causal": False, "softcap": 0.0, "dropout_p": 0.0}
        hidden = mask(batch, heads, queries, keys, device)
        given["mask"] = hidden
        if not backward:
            return tuple(given[n] for n in op.names)
        out, lse = op.namespace["_resolve"](*(given[n] for n in op.names))
        given |= {"grad_out": torch.randn_like(out), "grad_lse": None, "out": out, "lse": lse}
        given["need_mask"] = hidden.is_floating_point()
        return tuple(given[n] for n in registry.primitive("attention_backward").names)

    return arguments


def calls(only: list[str] | None) -> Iterator[Call]:
    for name, backward, sizes, mask in ATTENTION:
        op = registry.primitive("attention_backward" if backward else "attention")
        batch, heads, groups, queries, keys, width = sizes
        case = f"{name}: B{batch} H{heads}/{groups} Q{queries} K{keys} D{width}"
        if not only or op.name in only:
            yield Call(op, case, _attention(sizes, mask, backward))
    for wanted, names in CELLS.items():
        if only and wanted not in only:
            continue
        for op, cell in runner.cells_of([wanted], grid.grid_of("full"), torch.device("cuda"), None):
            if cell.name.startswith(names):
                yield Call(op, cell.name, functools.partial(grid.inputs, op, cell, DTYPE, 0))


# --------------------------------------------------------------------------------------------------------------- timing


def _plan(op: Primitive, device: torch.device, adapters: tuple[peers.Adapter, ...]) -> runner.Plan:
    profile = select.profile_for(device)
    return runner.Plan(device, profile, DTYPE, (), TIMED.get(op.name, ()), adapters, 0)


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
        prepare(contender, sets, device, seen.sample, rotation.restoring(call.op, sets))
    noise, untrusted = steady_trials([c for c in contenders if c.timer is not None], seen)
    for contender in contenders:
        close(contender)
    keywords = dict(zip(call.op.names, args, strict=True))
    return {
        "op": call.op.name,
        "case": call.case,
        "us": {c.name: sorted(c.trials)[len(c.trials) // 2] * 1e6 for c in contenders if c.trials},
        "skipped": {c.name: (c.skipped or "not timed")[:200] for c in contenders if not c.trials},
        "choice": ferryman.explain(call.op.name, **keywords).chosen,
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
    parser.add_argument("--seconds", type=float, default=600, help="no call begins later")
    parser.add_argument("--ahead", type=int, default=0, metavar="N")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ["FERRYMAN_LOCKFILE"] = "none"  # of its processes, too
    if asked.show:
        print(markdown(files.document(asked.show)))
        return
    device, todo = torch.device("cuda:0"), list(calls(asked.only))
    known = peers.adapters(Path(__file__).parent / "peers", PEERS)
    adapters = tuple(adapter for adapter in known if adapter.peer().reason is None)
    if asked.share:
        share, of = map(int, asked.share.split("/"))
        ahead(share, of, todo, device, adapters)
        return
    began = time.monotonic()
    command = [sys.executable, __file__, *(["--only", *asked.only] if asked.only else [])]
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

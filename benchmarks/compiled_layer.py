"""A compiled Qwen3-8B decoder layer, ported, against itself unported (sdpa), on this device.

Both are compiled with fullgraph and dynamic lengths, and hold the same weights. Trials alternate, so that clocks and
heat hit both sides; a trial times several passes and the first trials are dropped. `speed` is the unported median over
the ported one (1 is equal, more is faster). Passes are timed as they are called, the host's time included (which is all
of a pass of few tokens), and for the forward in replays of a CUDA graph, which the device alone takes. Dynamo guards
every function that it traces through: a ported layer has some hundred guards more. Recompilations are counted over
lengths that neither layer has seen. In training Inductor itself guards on sizes where it weighs a fusion
(`can_fuse`), so the unported count is what the ported one is compared with. `whole_models.py` times whole models of
many families; this is one layer by the device's time alone, and what it guards on: a test of a GPU asks for both.

    python benchmarks/compiled_layer.py [--json] [--device cuda] [--dtype bfloat16] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

import ferryman
from ferryman.device_profiles import detect
from ferryman.integrations.transformers import port
from ferryman.porting.model.config import config_of, spec

# (batch, tokens). The first of a batch compiles, and on it Inductor times its candidates for a kernel, once for all
# lengths: the longest first, as on few tokens candidates may take less than a launch and be told apart by chance. Not
# 4096, the hidden size: Inductor may take a length that equals a width for it, and compile again for the next.
LENGTHS = ((1, 8192), (1, 2048), (1, 512), (4, 2048))
UNSEEN = ((1, 777), (1, 1536), (1, 3001), (4, 1023))
TRIALS, DROPPED, PASSES = 40, 5, 8


def layer(device: torch.device, dtype: torch.dtype, tiny: bool) -> tuple[Any, Any]:
    """(decoder layer with transformers' initialisation, rotary embedding), with a config of their own."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    config = config_of(spec("qwen3", tiny=tiny, layers=4))
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with device:
        decoder = Qwen3DecoderLayer(config, 0)
        for weight in decoder.parameters():
            if weight.dim() > 1:  # a norm's stays as it is
                torch.nn.init.normal_(weight, std=config.initializer_range)
        return decoder.to(dtype).eval(), Qwen3RotaryEmbedding(config)


def inputs(rotary: Any, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.randn(batch, length, rotary.config.hidden_size, device=device, dtype=dtype)
    return {"hidden_states": x, "position_embeddings": rotary(x, torch.arange(length, device=device).unsqueeze(0))}


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Mean time of one pass over PASSES passes: device events where there are any, the host clock on a CPU."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(PASSES):
            call()
        return (time.perf_counter() - begin) / PASSES
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(PASSES):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / PASSES


def forward(model: Any, given: dict[str, Any]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return model(**given)

    return call


def training(model: Any, given: dict[str, Any]) -> Callable[[], Any]:
    x = given["hidden_states"].clone().requires_grad_()
    cotangent = torch.randn_like(x)

    def call() -> Any:
        x.grad = None
        model.zero_grad(set_to_none=True)
        model(**given | {"hidden_states": x}).backward(cotangent)

    return call


def replay(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call's kernels without the host's work between them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def compare(unported: Callable[[], Any], ported: Callable[[], Any], device: torch.device) -> dict[str, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for trial in range(TRIALS + DROPPED):
        order = (0, 1) if trial % 2 else (1, 0)
        for side in order:
            taken = seconds((unported, ported)[side], device)
            if trial >= DROPPED:
                times[side].append(taken)
    medians = [statistics.median(t) for t in times]
    quarters = [statistics.quantiles(t, n=4) for t in times]
    return {
        "unported_us": medians[0] * 1e6,
        "ported_us": medians[1] * 1e6,
        "speed": medians[0] / medians[1],
        "unported_spread": (quarters[0][2] - quarters[0][0]) / medians[0],
        "ported_spread": (quarters[1][2] - quarters[1][0]) / medians[1],
    }


def graphs(call: Callable[[], Any]) -> int:
    before = counters["stats"]["unique_graphs"]
    call()
    return int(counters["stats"]["unique_graphs"] - before)


def measure(device: torch.device, dtype: torch.dtype, tiny: bool) -> dict[str, Any]:
    plain, rotary = layer(device, dtype, tiny)
    moved, _ = layer(device, dtype, tiny)
    moved.load_state_dict(plain.state_dict())
    report = port(moved)
    # Both sides, batch 1 and larger, with and without gradients share one code object: 8 graphs, which is the limit.
    torch._dynamo.config.recompile_limit = 32
    sides: list[Any] = [torch.compile(m, fullgraph=True, dynamic=True) for m in (plain, moved)]
    cases: list[dict[str, Any]] = []
    compiled = {"unported": 0, "ported": 0}
    for mode, step in (("forward", forward), ("training", training)):
        for batch, length in ((1, 64), (2, 32)) if tiny else LENGTHS:
            given = inputs(rotary, batch, length, device, dtype)
            calls = [step(side, given) for side in sides]
            for name, call in zip(compiled, calls, strict=True):
                compiled[name] += graphs(call)
            case = {"mode": mode, "batch": batch, "tokens": length, **compare(calls[0], calls[1], device)}
            if mode == "forward" and device.type == "cuda":
                case["replayed"] = compare(replay(calls[0]), replay(calls[1]), device)
            cases.append(case)
    with ferryman.trace() as traced, torch.no_grad():
        sides[1](**given)
    again = {mode: {"unported": 0, "ported": 0} for mode in ("forward", "training")}
    for batch, length in ((1, 77), (2, 41)) if tiny else UNSEEN:
        given = inputs(rotary, batch, length, device, dtype)
        for name, side in zip(compiled, sides, strict=True):
            again["forward"][name] += graphs(forward(side, given))
            again["training"][name] += graphs(training(side, given))
    return {
        "device": detect(device).name,
        "dtype": str(dtype).removeprefix("torch."),
        "tiny": tiny,
        "torch": torch.__version__,
        "cases": cases,
        "graphs_first": compiled,
        "recompilations_on_unseen_lengths": again,
        "calls_in_the_graph": {f"{op}:{by}": n for (op, by), n in traced.calls.items()},
        "ported": report.calls(1),
    }


def markdown(document: dict[str, Any]) -> str:
    model = "tiny Qwen3" if document["tiny"] else "Qwen3-8B"
    lines = [
        f"A compiled {model} decoder layer, {document['dtype']}, {document['device']}, torch {document['torch']}:"
        " unported time over ported time (`benchmarks/compiled_layer.py`). Replayed: the device's time alone.",
        "",
        "| mode | batch x tokens | unported us | ported us | speed | spread | replayed: unported | ported | speed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in document["cases"]:
        alone = _times(c["replayed"]) if "replayed" in c else ("-", "-", "-")
        spread = f"{c['unported_spread']:.2f}, {c['ported_spread']:.2f}"
        row = (c["mode"], f"{c['batch']} x {c['tokens']}", *_times(c), spread, *alone)
        lines.append(f"| {' | '.join(row)} |")
    new = document["recompilations_on_unseen_lengths"]
    counts = ", ".join(f"{mode} {n['ported']} and {n['unported']}" for mode, n in new.items())
    return "\n".join([*lines, "", f"Recompilations over lengths that neither has seen, ported and unported: {counts}."])


def _times(c: dict[str, float]) -> tuple[str, str, str]:
    return f"{c['unported_us']:.0f}", f"{c['ported_us']:.0f}", f"{c['speed']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the benchmark itself")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    document = measure(device, getattr(torch, asked.dtype), asked.tiny)
    if asked.json:
        print(json.dumps(document, indent=2))
        return
    print(markdown(document))


if __name__ == "__main__":
    main()

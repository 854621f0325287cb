"""A model compiled through backend="ferryman" against Inductor's alone, on this device.

    python benchmarks/graph_backend.py llama gemma3 --place auto --train

Real widths, few layers, bf16, random weights. Both compiled models run in turns; times are CUDA events, the medians of
the rounds with their quartiles. --place takes what the backend's option takes ("auto", "all", "none", or ops with
commas), so that the price and the gain of each op as an opaque call can be told apart: try each alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from ferryman.porting import graph

_ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"pad_token_id": 0}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 1600, "n_head": 25, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "bert": (
        "BertModel",
        "BertConfig",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
}


def _model(name: str, layers: int) -> Any:
    import transformers

    model, config, options = _ROWS[name]
    count = {"n_layer": layers} if name == "gpt2" else {"num_hidden_layers": layers}
    network = getattr(transformers, model)(getattr(transformers, config)(**options, **count))
    return network.to("cuda", torch.bfloat16)


def _step(model: Any, forward: Any, ids: torch.Tensor, train: bool) -> Callable[[], None]:
    extra = {} if type(model).__name__.startswith("Bert") else {"use_cache": False}

    def run() -> None:
        if not train:
            with torch.no_grad():
                forward(input_ids=ids, **extra)
            return
        model.zero_grad(set_to_none=True)
        if extra:
            forward(input_ids=ids, labels=ids, **extra).loss.backward()
        else:
            forward(input_ids=ids)[0].float().square().mean().backward()

    return run


def _timed(run: Callable[[], None], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    model = _model(name, args.layers).train(args.train)
    limit = min(args.length, getattr(model.config, "max_position_embeddings", args.length))
    ids = torch.randint(0, model.config.vocab_size, (args.batch, limit), device="cuda")
    report = graph.Report()
    place = args.place.split(",") if args.place not in ("auto", "all", "none") else args.place
    torch._dynamo.reset()
    plain = _step(model, torch.compile(model), ids, args.train)
    options: dict[str, Any] = {"place": place, "report": report}
    ours = _step(model, torch.compile(model, backend=graph.backend, options=options), ids, args.train)
    peaks = {}
    for label, run in (("plain", plain), ("ours", ours)):
        for _ in range(4):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peaks[label] = torch.cuda.max_memory_allocated()
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    for turn in range(args.rounds):
        pairs = [("plain", plain), ("ours", ours)]
        for label, run in pairs if turn % 2 else reversed(pairs):
            times[label].append(_timed(run, args.repeats))
    spread = {k: [round(q, 4) for q in statistics.quantiles(v, n=4)] for k, v in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["plain"], times["ours"], strict=True))
    return {
        "model": name,
        "train": args.train,
        "place": args.place,
        "shape": list(ids.shape),
        "ms quartiles": spread,
        "speed": round(ratio, 4),
        "peak": peaks,
        "calls": report.calls(),
        "rewriting seconds": round(sum(g.seconds for g in report.graphs), 2),
        "account": list(report.lines()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(_ROWS))
    parser.add_argument("--place", default="auto")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    for name in args.models:
        print(json.dumps(_row(name, args), indent=1), flush=True)


if __name__ == "__main__":
    main()

"""What choosing an implementation costs on a repeated call: the op against its own implementation called directly.

Both sides run the same launcher on the same tensors, through the same `autograd.Function` where a gradient is needed,
so the difference is dispatch. Trials alternate; each figure is the median over trials, in us.
`resolve_overhead_us` is the worst case over rms_norm and add_rms_norm (keywords, a Parameter weight, grad mode on and
off); `attention_overhead_us` is attention's. Peers measured in the same run: a bare dictionary look-up on (dtype, size,
device), and `torch.library.custom_op` over its body.

    python benchmarks/dispatch.py [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import ferryman
from ferryman.dispatch import plan, registry, select

BATCH, TRIALS = 40, 1500  # a batch shorter than a time slice: the median survives a busy machine


def seconds(call: Callable[[], Any]) -> float:
    """Time of one call in the mean over a batch, without the garbage collector, as timeit does."""
    gc.collect(0)
    gc.disable()
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    taken = (time.perf_counter() - start) / BATCH
    gc.enable()
    return taken


def overhead(op: Callable[[], Any], direct: Callable[[], Any]) -> tuple[float, float]:
    """(median, spread) of the difference in us, trials alternating so that drift hits both sides."""
    for call in (op, direct):
        seconds(call)
    differences = []
    for _ in range(TRIALS):
        a, b, c = seconds(direct), seconds(op), seconds(direct)
        differences.append((b - (a + c) / 2) * 1e6)
    quarters = statistics.quantiles(differences, n=4)
    return statistics.median(differences), quarters[2] - quarters[0]


def identity(*args: Any) -> Any:
    """A launcher that does nothing, so that the difference is not lost in a kernel's noise."""
    return args[0]


def both(*args: Any) -> Any:
    return args[0], args[1]


class Quiet:
    """Swap an op's launcher for one that returns an input, and give the direct call of what dispatch then holds."""

    def __init__(self, name: str, launcher: Callable[..., Any]) -> None:
        self.op, self.launcher = registry.primitives()[name], launcher

    def direct(self, args: tuple[Any, ...], differentiate: bool) -> Callable[[], Any]:
        """The call that dispatch's look-up ends in, with its two values at hand."""
        runner = plan.runner_of(self.op)
        profile = select.profile_for(args[0].device)
        target = select.target_of(profile)
        if differentiate:
            from ferryman.dispatch import state
            from ferryman.dispatch.gradient import differentiable

            prepared = runner.recipe.plan(self.launcher, target, state.effective())
            return lambda: differentiable(*args, prepared)
        launcher = self.launcher
        return lambda: launcher(*args, target)

    def __enter__(self) -> Quiet:
        plan.drop_plans()
        self.kept = registry.launcher
        registry.launcher = lambda line: self.launcher
        return self

    def __exit__(self, *_: object) -> None:
        registry.launcher = self.kept
        plan.drop_plans()


def cases() -> list[tuple[str, str, Callable[..., Any], Callable[[], Any], tuple[Any, ...], bool]]:
    ops = ferryman.ops
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    w, p = torch.randn(64, dtype=torch.bfloat16), torch.nn.Parameter(torch.randn(64, dtype=torch.bfloat16))
    q = torch.randn(1, 4, 8, 64, dtype=torch.bfloat16)
    norm, add = (x, w, 1e-6, False), (x, x, w, 1e-6, False)
    full = (q, q, q, True, None, None, 0.0, None, None, None, None)
    return [
        ("rms_norm(x, weight)", "rms_norm", identity, lambda: ops.rms_norm(x, w), norm, False),
        ("rms_norm keywords", "rms_norm", identity, lambda: ops.rms_norm(x, weight=w, eps=1e-6), norm, False),
        ("rms_norm Parameter, grad off", "rms_norm", identity, lambda: ops.rms_norm(x, p), (x, p, 1e-6, False), False),
        ("rms_norm Parameter, grad on", "rms_norm", _copy, lambda: ops.rms_norm(x, p), (x, p, 1e-6, False), True),
        ("add_rms_norm(x, residual, weight)", "add_rms_norm", both, lambda: ops.add_rms_norm(x, x, w), add, False),
        (
            "add_rms_norm keywords",
            "add_rms_norm",
            both,
            lambda: ops.add_rms_norm(x, residual=x, weight=w, eps=1e-6),
            add,
            False,
        ),
        (
            "add_rms_norm Parameter, grad on",
            "add_rms_norm",
            _copies,
            lambda: ops.add_rms_norm(x, x, p),
            (x, x, p, 1e-6, False),
            True,
        ),
        ("attention causal", "attention", both, lambda: ops.attention(q, q, q, causal=True), full, False),
    ]


def _copy(*args: Any) -> Any:
    return args[0].detach()


def _copies(*args: Any) -> Any:
    return args[0].detach(), args[1].detach()


def peers() -> dict[str, float]:
    """A bare look-up, and PyTorch's own way to wrap a Python kernel, over its body."""
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    table = {(x.dtype, x.shape, x.device): identity}

    @torch.library.custom_op("ferryman_benchmark::nothing", mutates_args=())
    def nothing(a: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(a)

    def body(a: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(a)

    lookup, _ = overhead(lambda: table[x.dtype, x.shape, x.device](x), lambda: identity(x))
    custom, _ = overhead(lambda: nothing(x), lambda: body(x))
    return {"dictionary_lookup_us": lookup, "custom_op_us": custom}


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for label, name, launcher, call, args, differentiate in cases():
        with Quiet(name, launcher) as quiet, torch.set_grad_enabled(differentiate):
            median, spread = overhead(call, quiet.direct(args, differentiate))
            rows.append({"case": label, "op": name, "overhead_us": median, "spread_us": spread})
    return {
        "resolve_overhead_us": max(r["overhead_us"] for r in rows if r["op"] != "attention"),
        "attention_overhead_us": max(r["overhead_us"] for r in rows if r["op"] == "attention"),
        "cases": rows,
        "peers": peers(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the document instead of the table")
    document = measure() if (options := parser.parse_args()) else {}
    if options.json:
        print(json.dumps(document, indent=1))
        return
    for row in document["cases"]:
        print(f"{row['case']:<36}{row['overhead_us']:6.2f} us  +- {row['spread_us']:.2f}")
    for name, value in document["peers"].items():
        print(f"{name:<36}{value:6.2f} us")
    print(
        f"worst of the norms {document['resolve_overhead_us']:.2f} us; "
        f"attention {document['attention_overhead_us']:.2f} us"
    )


if __name__ == "__main__":
    main()

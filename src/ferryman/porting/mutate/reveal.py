"""Which input tells a surviving mutant from the original: recorded launches, replayed interpreted with other values.

Run as a process of its own, with TRITON_INTERPRET=1: it reads a job and writes one JSON line. A mutant may write out of
bounds, so that each has a process that may end.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

START = "from ferryman.porting.mutate.reveal import main; raise SystemExit(main())"


def _load(text: str, name: str, module: str, folder: Path) -> Any:
    """A module made from a text, in the package that the target is in, so that its relative imports work."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    package = module.rpartition(".")[0]
    full = f"{package}.{name}" if package else name
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[full] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _innermost(kernel: Any) -> Any:
    while hasattr(getattr(kernel, "fn", None), "run"):
        kernel = kernel.fn
    return kernel


def _each(args: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        k: change(v) if isinstance(v, Tensor) and v.is_floating_point() and v.numel() else v for k, v in args.items()
    }


def _planted(value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        planted = x.clone()
        planted.view(-1)[planted.numel() // 2] = value
        return planted

    return change


def inputs(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what was changed, arguments): the recorded ones, other values, and each size made one smaller."""
    generator = torch.Generator().manual_seed(0)

    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(torch.randn(x.shape, generator=generator))

    yield "as recorded", args
    yield "normal values", _each(args, like)
    yield "values times 100", _each(args, lambda x: x * 100)
    yield "values times 1e-3", _each(args, lambda x: x * 1e-3)
    yield "values plus 1000", _each(args, lambda x: x + 1000)
    yield "negated values", _each(args, lambda x: -x)
    yield "a NaN in the middle", _each(args, _planted(float("nan")))
    yield "an Inf in the middle", _each(args, _planted(float("inf")))
    yield "a -Inf in the middle", _each(args, _planted(float("-inf")))
    sizes = {n for v in args.values() if isinstance(v, Tensor) for n in (*v.shape, v.numel())}
    for name, value in args.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and value in sizes and name.islower():
            yield f"{name} = {value - 1}, not {value}", {**_each(args, like), name: value - 1}


def _launch(kernel: Any, grid: list[int], args: dict[str, Any]) -> dict[str, Tensor]:
    import triton.language as tl

    given = {
        k: v.clone(memory_format=torch.preserve_format)
        if isinstance(v, Tensor)
        else getattr(tl, v.removeprefix("triton:"), None) or tl.dtype(v.removeprefix("triton:"))
        if isinstance(v, str) and v.startswith("triton:")
        else v
        for k, v in args.items()
    }
    kernel[tuple(grid)](**given)
    return {k: v for k, v in given.items() if isinstance(v, Tensor)}


def difference(original: dict[str, Tensor], mutant: dict[str, Tensor]) -> str | None:
    """The largest difference in words; None where every tensor has the same bits (NaN equals NaN)."""
    for name, right in original.items():
        wrong = mutant[name]
        apart = (wrong != right) & ~(wrong.isnan() & right.isnan()) if right.is_floating_point() else wrong != right
        if bool(apart.any()):
            gap = (wrong.double() - right.double()).abs().nan_to_num(nan=torch.inf).where(apart, -1.0)
            place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), right.shape))
            return (
                f"{name}{list(place)} is {float(wrong[place]):.6g}; without the bug {float(right[place]):.6g} "
                f"({int(apart.sum())} of {right.numel()} elements differ)"
            )
    return None


def described(args: dict[str, Any]) -> str:
    parts = [
        f"{k} {str(v.dtype).removeprefix('torch.')}{list(v.shape)}" if isinstance(v, Tensor) else f"{k}={v}"
        for k, v in args.items()
        if v is not None
    ]
    return ", ".join(parts)


def search(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The first launch and change of it that differ: {"input", "what", "difference"}; else {"equal": runs}."""
    text = Path(job["file"]).read_text(encoding="utf-8")
    edit = job["edit"]
    mutated = text[: edit["start"]] + edit["new"] + text[edit["start"] + len(edit["old"]) :]
    original = _load(text, "ferryman_original", job["module"], folder)
    mutant = _load(mutated, "ferryman_mutated", job["module"], folder)
    runs, skipped = 0, None
    for file in sorted(Path(job["record"]).glob("*.pt")):
        name = file.name.split(".")[0]
        kept = torch.load(file, weights_only=True)
        for what, args in inputs(kept["args"]):
            try:
                right = _launch(_innermost(getattr(original, name)), kept["grid"], args)
            except Exception as error:  # noqa: BLE001 - an input that the original refuses says nothing
                skipped = f"{type(error).__name__}: {error}"
                continue
            runs += 1
            try:
                wrong = _launch(_innermost(getattr(mutant, name)), kept["grid"], args)
            except Exception as error:  # noqa: BLE001 - the mutant may raise anything
                return {
                    "input": described(args),
                    "what": what,
                    "difference": f"the mutant raises {type(error).__name__}",
                }
            mismatch = difference(right, wrong)
            if mismatch is not None:
                return {"input": f"{name}({described(args)})", "what": what, "difference": mismatch}
    return {"equal": runs, "skipped": skipped}


def main() -> int:
    job = json.loads(sys.stdin.read())
    sys.path[:0] = job["path"]
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write("\n" + json.dumps(search(job, Path(folder))) + "\n")
    return 0

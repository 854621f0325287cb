"""Which input tells a surviving mutant from the original: recorded launches, replayed interpreted with other values.

Run as a process of its own, with TRITON_INTERPRET=1: it reads a job and writes JSON lines to the job's ``answers``, the
best one last. A mutant may write out of bounds, so that each has a process that may end: what it said before counts.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.mutate.targets import text_of

START = "from ferryman.porting.mutate.reveal import main; raise SystemExit(main())"
AS_RECORDED = "as recorded"
_SECONDS = 80.0  # after so many no further input is tried


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

    yield AS_RECORDED, args
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


@dataclass(frozen=True)
class Difference:
    """The largest of a result: in words, and relative to the largest magnitude that was written (infinite where one of
    two numbers is finite). rounding: one that the order of sums, or a rounding to the dtype, may give."""

    words: str
    size: float
    rounding: float

    @property
    def plain(self) -> bool:
        return self.size > self.rounding


def difference(original: dict[str, Tensor], mutant: dict[str, Tensor], before: dict[str, Any]) -> Difference | None:
    """The tensors that differ most; None where every tensor has the same bits (NaN equals NaN, and 0 equals -0).
    before: the arguments of the launch."""
    every = (_of_one(name, right, mutant[name], before[name]) for name, right in original.items())
    return max((one for one in every if one is not None), key=lambda one: (one.plain, one.size), default=None)


def _of_one(name: str, right: Tensor, wrong: Tensor, before: Tensor) -> Difference | None:
    a, b = wrong.double(), right.double()
    apart = (a != b) & ~(a.isnan() & b.isnan()) if right.is_floating_point() else wrong != right
    if not bool(apart.any()):
        return None
    gap = (a - b).abs()
    gap = gap.where(gap.isfinite() | ~(a.isfinite() | b.isfinite()), torch.inf)
    written = b.isfinite() & (apart | (b != before.double()))  # an empty tensor's old numbers say nothing
    largest = float(b.abs().where(written, 0.0).max()) or float(a.abs().where(a.isfinite(), 0.0).max()) or 1.0
    gap = gap.nan_to_num(nan=largest, posinf=torch.inf).where(apart, -1.0)  # NaN: neither is finite
    rounding = _rounding(right.dtype)
    if right.is_floating_point() and float(gap.max()) <= rounding * largest:
        # a number that is small beside the largest may be wrong as a whole, by more than sums of the largest round
        whole = gap.where((gap > b.abs() * _OWN_SHARE) & (gap > rounding / _LESS * largest), -1.0)
        gap, rounding = (whole, 0.0) if float(whole.max()) > 0 else (gap, rounding)
    place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), right.shape))
    size = float(gap[place]) / largest
    share = "" if math.isinf(size) else f", at most by {size:.2g} of the largest magnitude"
    words = (
        f"{name}{list(place)} is {_number(wrong[place])}; without the bug {_number(right[place])} "
        f"({int(apart.sum())} of {right.numel()} elements differ{share})"
    )
    return Difference(words, size, rounding)


_OWN_SHARE = 1 / 16  # of a number itself: more is no rounding of it
_LESS = 8  # times less than `_rounding` beside the largest: what a sum of large numbers leaves


def _number(x: Tensor) -> str:
    """Enough digits to tell a number from its neighbours."""
    return f"{float(x):.{17 if x.dtype == torch.float64 else 9}g}" if x.is_floating_point() else str(x.item())


def _rounding(dtype: torch.dtype) -> float:
    """Of the largest magnitude. A narrow result is rounded once; of a wide one each step of the work is. Whole numbers
    are not: any difference of theirs is plain, also one that float64 does not tell."""
    if not dtype.is_floating_point:
        return -1.0
    return (64 if dtype.itemsize >= 4 else 2) * torch.finfo(dtype).eps


def described(args: dict[str, Any]) -> str:
    parts = [
        f"{k} {str(v.dtype).removeprefix('torch.')}{list(v.shape)}" if isinstance(v, Tensor) else f"{k}={v}"
        for k, v in args.items()
        if v is not None
    ]
    return ", ".join(parts)


class Search:
    """Runs of the original and of the mutant on the same input, and the best answer so far, which is said at once."""

    def __init__(self, original: Any, mutant: Any, say: Callable[[dict[str, Any]], None]) -> None:
        self.original, self.mutant, self.say = original, mutant, say
        self.best: Difference | None = None
        self.answer: dict[str, Any] = {}
        self.runs, self.skipped = 0, ""

    def run(self, name: str, grid: list[int], what: str, args: dict[str, Any]) -> None:
        try:
            right = _launch(_innermost(getattr(self.original, name)), grid, args)
        except Exception as error:  # noqa: BLE001 - an input that the original refuses says nothing
            self.skipped = f"{type(error).__name__}: {error}"
            return
        self.runs += 1
        one: Difference | None
        try:
            one = difference(right, _launch(_innermost(getattr(self.mutant, name)), grid, args), args)
        except Exception as error:  # noqa: BLE001 - the mutant may raise anything
            one = Difference(f"the mutant raises {type(error).__name__}", math.inf, 0.0)
        if one is None or (self.best is not None and (one.plain, one.size) <= (self.best.plain, self.best.size)):
            return
        self.best = one
        self.answer = {"input": f"{name}({described(args)})", "what": what, "difference": one.words, "plain": one.plain}
        self.say({**self.answer, "runs": self.runs})

    @property
    def plain(self) -> bool:
        return self.best is not None and self.best.plain


def search(job: dict[str, Any], folder: Path, say: Callable[[dict[str, Any]], None]) -> None:
    """Says {"input", "what", "difference", "plain", "runs"} of each launch that differs more than those before, and of
    the best at the end; {"equal": runs, "skipped"} where none differs.

    The launches as recorded come first. Where they differ by no more than rounding, every change of them is tried.
    """
    text, edit = text_of(Path(job["file"])), job["edit"]
    mutated = text[: edit["start"]] + edit["new"] + text[edit["start"] + len(edit["old"]) :]
    tried = Search(
        _load(text, "ferryman_original", job["module"], folder),
        _load(mutated, "ferryman_mutated", job["module"], folder),
        say,
    )
    end = time.monotonic() + _SECONDS
    kept = [(f.name.split(".")[0], torch.load(f, weights_only=True)) for f in sorted(Path(job["record"]).glob("*.pt"))]
    for name, launch in kept:
        tried.run(name, launch["grid"], AS_RECORDED, launch["args"])
    if not tried.plain:
        for name, launch in kept:
            for what, args in inputs(launch["args"]):
                if what != AS_RECORDED and time.monotonic() < end:
                    tried.run(name, launch["grid"], what, args)
    say({**tried.answer, "runs": tried.runs} if tried.answer else {"equal": tried.runs, "skipped": tried.skipped})


def main() -> int:
    job = json.loads(sys.stdin.read())
    sys.path[:0] = job["path"]

    def say(answer: dict[str, Any]) -> None:
        with open(job["answers"], "a", encoding="utf-8") as out:
            out.write(json.dumps(answer) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        search(job, Path(folder), say)
    return 0

"""Compiles every kernel of a backend for a device that is not here; writes what became of each as a result document.

    python ci/compile.py --profile mi300x --backend hip --out results

Nothing runs, so the best verdict is COMPILED_ONLY; a kernel that the toolchain refuses is QUARANTINED with its log.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ferryman.backends.base import Target
from ferryman.device_profiles import Profile, profile
from ferryman.dispatch import registry
from ferryman.dispatch.select import target_of
from ferryman.errors import ArgumentError, CompileError, FerrymanError
from ferryman.porting import results

DTYPES = ("float32", "float16", "bfloat16")
DEVICE = "none"


def kernels(backend: str, target: Target) -> Iterator[tuple[str, str, str, Any]]:
    """(family, dtype, name, what the backend compiles) of every kernel."""
    for family in registry.FAMILIES:
        lines = [i for op in registry.primitives() for i in registry.implementations(op) if i.backend == backend]
        where = f"ferryman.ops.{family}."
        modules = sorted({line.where.partition(":")[0] for line in lines if line.where.startswith(where)})
        for name in modules:
            module = importlib.import_module(name)
            if backend == "triton":
                for dtype in DTYPES:
                    yield from ((family, dtype, _short(s), s) for s in module.specialisations(target, dtype))
            else:  # one unit holds one combination of dtypes: its name says which
                yield from ((family, "any", unit.name, unit) for unit in module.units(target))


def _short(source: Any) -> str:
    """A Triton specialisation without its signature, which is a kilobyte long."""
    given = ", ".join(f"{name}={value}" for name, value in source.constexprs.items())
    return f"{source.name}({given}; {source.num_warps} warps, {source.num_stages} stages)"


def compile_one(backend: str, source: Any, target: Target) -> Any:
    if backend == "triton":
        from ferryman.backends.triton import TritonBackend

        return TritonBackend().compile(source, None, target.arch, target)
    from ferryman.backends.simt import offline

    return offline.compile_unit(source, target.arch)


def run(known: Profile, backend: str) -> results.Results:
    """One cell for each kernel. Raises ArgumentError where there is nothing to compile."""
    registry.check_backend(backend)
    if backend not in ("triton", "cuda", "hip") or known.vendor not in registry.backends()[backend].vendors:
        raise ArgumentError("compile", "--backend", backend, f"a compiler for {known.vendor}: triton, cuda or hip")
    target, began = target_of(known), time.perf_counter()
    cells = []
    for family, dtype, name, source in kernels(backend, target):
        start = time.perf_counter()
        verdict: results.Verdict = "COMPILED_ONLY"
        reason = None
        try:
            compile_one(backend, source, target)
        except CompileError as error:
            verdict, reason = "QUARANTINED", error.log.strip()[:2000] or str(error)
        cells.append(results.Cell(op=family, implementation=backend, device=DEVICE, dtype=dtype, case=name,
                                  verdict=verdict, reason=reason))  # fmt: skip
        print(f"{time.perf_counter() - start:6.2f} s  {verdict:<13} {family} {name}", file=sys.stderr, flush=True)
    here = results.environment(torch.device("cpu"), known, 0, "compile", round(time.perf_counter() - began, 3))
    facts = here.model_copy(update={"device": DEVICE, "device_name": f"{known.title}, not here"})
    return results.results(facts, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported: this process compiles
    try:
        known = profile(options.profile)
        document = run(known, options.backend)
    except FerrymanError as error:
        print(f"compile: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"compile-{known.name}-{options.backend}.json"
    results.save(document, path)
    counts = {
        verdict: sum(c.verdict == verdict for c in document.cells) for verdict in ("COMPILED_ONLY", "QUARANTINED")
    }
    print(f"{path}: {counts}")
    return int(counts["QUARANTINED"] > 0 or counts["COMPILED_ONLY"] == 0)


if __name__ == "__main__":
    sys.exit(main())

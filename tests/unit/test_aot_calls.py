"""What a folder of artefacts serves: the kernels that calls of models launch, whichever implementation is chosen."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HIDDEN = (
    64,
    128,
    192,
    320,
    576,
    768,
    896,
    1024,
    1152,
    1536,
    2048,
    2560,
    2880,
    3072,
    3584,
    4096,
    5120,
    5376,
    6144,
    6656,
    7168,
    8192,
    12_288,
    16_384,
)
ROWS = (1, 2, 5, 16, 40, 64, 100, 132, 200, 256, 300, 700, 1000, 2048, 4000, 8192, 20_000, 32_768)
OTHERS = {
    "rows": lambda width: ROWS,
    "widths": HIDDEN,
    "head_dims": (64, 128),
    "tokens": (1, 3, 12, 64, 77, 300, 1024, 5000),
    "lengths": (1, 2, 33, 300, 2048),
    "vocabularies": (32_000, 49_152, 128_256, 151_669),
}


def launches(profile: str, backend: str) -> dict[str, Any]:
    """In a process that compiles Triton: by op, how many kernels calls launch, and which of them are not listed."""
    import torch

    from ferryman.device_profiles import profile as known_as
    from ferryman.dispatch import registry
    from ferryman.dispatch.select import target_of
    from ferryman.porting.aot import calls, groups

    known = known_as(profile)
    target = target_of(known)
    coverage: dict[str, Any] = {}
    for family in (f.name for f in registry.families()):
        listed = [
            groups.Group(
                known.name,
                backend,
                family,
                "bfloat16" if backend == "triton" else "any",
                ("bfloat16",),
                *groups.Shapes(),
            ),
            groups.Group(known.name, backend, family, "bfloat16" if backend == "triton" else "any"),
        ]
        serving, alone = ({groups._key(one, s.unit) for s in groups.sources_of(one, known)} for one in listed)
        for op in registry.primitives().values():
            if groups.family_of(op) != family:
                continue
            launched = calls.launched([op], backend, known, target, torch.bfloat16, OTHERS).keys()
            coverage[op.name] = {
                "tried": len(launched),
                "unlisted": len(launched - alone),
                "missing": sorted(launched - serving),
            }
    return coverage


@functools.cache
def coverage_of(profile: str, backend: str) -> dict[str, Any]:
    command = [sys.executable, __file__, profile, backend]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("profile", "backend"),
    [
        ("h200", "triton"),
        pytest.param("h200", "cuda", marks=pytest.mark.slow),
        pytest.param("mi300x", "hip", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_of_models_are_served(profile: str, backend: str) -> None:
    """Other rows and tokens than the listing's own, of hidden sizes that models have."""
    by_op = coverage_of(profile, backend)
    tried = {op for op, one in by_op.items() if one["tried"]}
    assert {"rms_norm", "add_rms_norm", "layer_norm", "softmax", "silu_mul", "rope"} <= tried
    assert {op: one["missing"][:3] for op, one in by_op.items() if one["missing"]} == {}
    # without the calls of models, most of them are not
    assert sum(one["unlisted"] for one in by_op.values()) > 100


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.stdout.write(json.dumps(launches(*sys.argv[1:])))

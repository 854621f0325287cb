"""`import ferryman` needs torch only, and costs little beside it."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("triton", "cupy", "yaml", "numpy", "transformers", "pydantic", "rich", "typer", "hip", "cuda")
LIMIT_SECONDS = 0.1
TRIES = 5
_CODE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import ferryman
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({name.split(".")[0] for name in set(sys.modules) - before})]))
"""


def _measure() -> tuple[float, list[str]]:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout.splitlines()[-1])
    return seconds, modules


def test_import_is_light() -> None:
    """Processor time, best of some tries: our code is measured (72 ms), not who else uses the machine."""
    found = []
    for _ in range(TRIES):
        seconds, modules = _measure()
        assert not set(modules) & set(HEAVY), "imported beside torch"
        assert "ferryman" in modules, "torch alone does not import it"
        found.append(seconds)
        if seconds <= LIMIT_SECONDS:
            return
    raise AssertionError(f"import ferryman took {min(found):.3f} s at best on top of torch; at most {LIMIT_SECONDS}")

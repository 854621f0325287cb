"""`benchmarks/launch.py` on a driver that only counts launches. Prints its rows of some ops, and what it launched."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import replay_worker
import torch

import launch
from ferryman.backends import simt_runtime
from ferryman.backends.simt import Unit
from ferryman.device_profiles import profile
from ferryman.dispatch import plan, registry, select


class Units(replay_worker.Units):
    def open(self, image: bytes, unit: Unit) -> Any:
        return SimpleNamespace(ptr=7, name=unit.name)


submitted: list[tuple[Any, ...]] = []


def main(asked: list[str], names: list[str]) -> None:
    replay_worker.install()
    simt_runtime._RUNTIMES["nvidia"] = Units()
    driver = SimpleNamespace(cuLaunchKernel=lambda *given: submitted.append(given))
    ctypes.CDLL = lambda name, *_, **__: driver  # type: ignore[assignment,misc]
    h200 = profile("h200")
    select.profile_for = lambda device: h200
    registry.probe = lambda backend, vendor: ()
    plan.REPLAYED = "cpu"
    launch.TRIALS, launch.BATCHES, launch.CALLS = 2, 2, 3
    rows = []
    for name in names:
        for row in launch.rows_of(registry.primitive(name), asked, torch.device("cpu")):
            replay_worker.launched.clear()
            rows.append(row)
    document = {"device": "none", "torch": torch.__version__, "dtype": "bfloat16", "parts": {}, "rows": rows}
    text = json.dumps({"rows": rows, "table": launch.table(document), "submitted": len(submitted)})
    sys.stdout.write(text)


if __name__ == "__main__":
    main([name for name in sys.argv[1].split(",") if name], sys.argv[2].split(","))

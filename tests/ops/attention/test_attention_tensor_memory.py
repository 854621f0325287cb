"""sm_100's tensor memory: Triton 3.6 compiles a kernel that needs too much of it into a bare `trap`, in silence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import dataclasses
from ferryman.backends.base import Target
from ferryman.backends.triton import TritonBackend
from ferryman.errors import CompileError
from ferryman.ops.attention.triton_kernels import specialisations

target = Target("sm_100", "nvidia", 32, 232448, 1024, 148, 50 << 20)
chosen = next(s for s in specialisations(target, "bfloat16", (256,)) if s.name == "attention_backward_dkv")
TritonBackend().compile(chosen, None, "sm_100", target)
large = dataclasses.replace(chosen, constexprs={**chosen.constexprs, "BLOCK_M": 64, "BLOCK_N": 64})
try:
    TritonBackend().compile(large, None, "sm_100", target)
except CompileError as error:
    print(error)
"""


def test_a_tile_beyond_tensor_memory_is_refused_and_the_chosen_one_is_not() -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, env=environment, check=True
    )
    assert "576 columns needed, sm_100 has 512" in done.stdout

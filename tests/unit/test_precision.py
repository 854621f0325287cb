"""However torch was told what float32 products may be, ops run and obey."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys, torch, ferryman
from ferryman import ops
from ferryman.backends.precision import float32_precision
x, w = torch.randn(4, 64), torch.randn(32, 64)
before = ops.linear(x, w)  # planned
exec(sys.argv[1])
for one in (x, x.bfloat16()):
    ops.rms_norm(one, None), ops.softmax(one), ops.linear(one, w.to(one.dtype))
ferryman.explain("linear", x, w)
from ferryman.porting.judging import results
from ferryman.dispatch.select import profile_for
cpu = torch.device("cpu")
flags = results.environment(cpu, profile_for(cpu), 0, "small").flags
print(json.dumps([float32_precision(), flags["float32_matmul_precision"]]))
"""

OLD = "torch.set_float32_matmul_precision('high')"


@pytest.mark.parametrize(
    ("said", "precision", "flag"),
    [
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32", "tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "ieee", "highest"),
        ("torch.backends.fp32_precision = 'tf32'", "tf32", "tf32"),
        ("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", "ieee", "ieee"),
        (OLD, "tf32", "high"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32", "high"),
        (
            "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'",
            "ieee",
            "high",
        ),
        ("pass", "ieee", "highest"),
    ],
)
def test_torchs_settings_old_and_new(said: str, precision: str, flag: str) -> None:
    """In a process each: torch does not take them back."""
    done = subprocess.run([sys.executable, "-c", CODE, said], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [precision, flag]

"""The kernels of the fingerprint: they compile to the unit that they are to probe, and compute what they say."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ferryman.backends import simt_offline
from ferryman.errors import ArgumentError, BackendUnavailable
from ferryman.porting.fingerprint import simt_kernels
from tests.compiled import compile_unit
from tests.interpreter import Interpreter

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


# (arch, left, right, input precision, promotion, the instruction of the unit)
PRODUCTS = [
    ("sm_90", "fp16", "fp16", "ieee", None, r"wgmma.*k16\.f32\.f16\.f16"),
    ("sm_90", "bf16", "bf16", "ieee", None, r"wgmma.*k16\.f32\.bf16\.bf16"),
    ("sm_90", "fp32", "fp32", "tf32", None, r"wgmma.*k8\.f32\.tf32\.tf32"),
    ("sm_90", "fp32", "fp32", "ieee", None, r"fma\.rn\.f32"),
    ("sm_90", "fp8e4nv", "fp8e4nv", "ieee", None, r"wgmma.*k32\.f32\.e4m3\.e4m3"),
    ("sm_90", "fp8e4nv", "fp8e4nv", "ieee", 64, r"wgmma.*k32\.f32\.e4m3\.e4m3"),
    ("sm_90", "fp8e5", "fp8e4nv", "ieee", None, r"wgmma.*k32\.f32\.e5m2\.e4m3"),
    ("sm_90", "i8", "i8", "ieee", None, r"wgmma.*k32\.s32\.s8\.s8"),
    ("sm_80", "bf16", "bf16", "ieee", None, r"mma\.sync.*m16n8k16.*f32\.bf16\.bf16"),
    ("gfx942", "fp16", "fp16", "ieee", None, r"v_mfma_f32_\w+_f16"),
    ("gfx942", "fp32", "fp32", "tf32", None, r"v_mfma_f32_\w+_xf32"),
    ("gfx942", "fp8e4b8", "fp8e4b8", "ieee", None, r"v_mfma_f32_\w+_fp8_fp8"),
    ("gfx950", "fp8e4nv", "fp8e4nv", "ieee", None, r"v_mfma_f32_\w+_f8f6f4"),
    ("sm_90", "fp8e4b8", "fp8e4b8", "ieee", None, None),  # a flavour that the device lacks
]
ARCHES = ("sm_80", "sm_90", "gfx90a", "gfx942", "gfx950")
COMPILER = """
import json, sys
from ferryman.backends.triton import Specialisation, TritonBackend
from ferryman.errors import CompileError
from ferryman.porting.fingerprint import triton_kernels as tk

def compiled(kernel, signature, constants, arch, warps):
    try:
        return TritonBackend().compile(Specialisation(kernel, signature, constants, warps, 1), None, arch).log
    except CompileError as error:
        return f"REFUSED {error}"

job = json.load(sys.stdin)
found = {}
for arch, left, right, precision, promote, _ in job["products"]:
    integer = left == "i8"
    signature = {"left": f"*{left}", "right": f"*{right}", "out": "*i32" if integer else "*fp32"}
    constants = {"K": 128, "TILE": 128, "BLOCK_K": 64, "PRECISION": precision, "PROMOTE": promote, "INTEGER": integer}
    found[f"{arch} {left} {right} {precision} {promote}"] = compiled(tk.product_kernel, signature, constants, arch, 8)
for arch in job["arches"]:
    for op in job["ops"]:
        for dtype in ("fp32", "fp16", "bf16") if op in ("add", "mul", "fma") else ("fp32",):
            signature = {**dict.fromkeys(("x", "y", "z", "out"), f"*{dtype}"), "n": "i32"}
            constants = {"OP": op, "BLOCK": 1024}
            found[f"{arch} {op} {dtype}"] = compiled(tk.elementwise_kernel, signature, constants, arch, 4)
json.dump(found, sys.stdout)
"""


def _worker(code: str, job: object = None, **environment: str) -> str:
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(job), capture_output=True, text=True, timeout=240, env=env
    )
    assert done.returncode == 0, done.stderr[-800:]
    return done.stdout


@functools.cache
def compiled() -> dict[str, str]:
    """Assembly of every kernel, from one process that compiles: this one may interpret Triton."""
    job = {"products": PRODUCTS, "arches": ARCHES, "ops": simt_kernels.OPS}
    texts: dict[str, str] = json.loads(_worker(COMPILER, job, TRITON_INTERPRET="0"))
    return texts


@needs_triton
@pytest.mark.parametrize(("arch", "left", "right", "precision", "promote", "unit"), PRODUCTS)
def test_a_product_goes_to_the_matrix_unit(
    arch: str, left: str, right: str, precision: str, promote: int | None, unit: str | None
) -> None:
    text = compiled()[f"{arch} {left} {right} {precision} {promote}"]
    if unit is None:
        assert text.startswith("REFUSED")
        return
    assert re.search(unit, text), f"no {unit}"
    assert ("wgmma" in text) == unit.startswith("wgmma")


@needs_triton
def test_promotion_changes_the_kernel() -> None:
    plain, promoted = (compiled()[f"sm_90 fp8e4nv fp8e4nv ieee {p}"] for p in (None, 64))
    adds = [len(re.findall(r"add\.(?:rn\.)?f32", text)) for text in (plain, promoted)]
    assert adds[1] > adds[0], "partial sums go to float32 registers"


@needs_triton
@pytest.mark.parametrize("arch", ARCHES)
def test_elementwise_functions_compile(arch: str) -> None:
    mine = {key: text for key, text in compiled().items() if key.split()[0] == arch and len(key.split()) == 3}
    assert len(mine) == len(simt_kernels.OPS) + 6
    assert [key for key, text in mine.items() if text.startswith("REFUSED")] == []
    assert re.search(r"fma\.rn\.f32|v_(pk_)?fma\w*_f32", mine[f"{arch} contraction fp32"]), "contracted by default"


@pytest.mark.parametrize("arch", simt_offline.ARCHES)
def test_the_simt_kernel_compiles(arch: str) -> None:
    unit = simt_kernels.probe_unit()
    try:
        kernel = compile_unit(unit, arch)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert kernel.resources["registers"] <= 32 and not kernel.resources.get("scratch")


def test_an_unknown_op_is_refused() -> None:
    import torch

    from ferryman.device_profiles import profile
    from ferryman.dispatch.select import target_of

    x = torch.ones(1)
    with pytest.raises(ArgumentError, match="op is sinh"):
        simt_kernels.elementwise(torch.device("cpu"), target_of(profile("h200")), "sinh", x, x, x)


WORKER = """
import json, torch
from ferryman.porting.fingerprint import triton_kernels as tk
from ferryman.porting.fingerprint.elementwise import torch_apply
cpu = torch.device("cpu")
# roundings of 2^-24: one, or two in a row, and of functions what numpy states: at most 4 in the last place
UNITS = {"exp": 8.0, "exp2": 8.0, "log": 8.0, "rsqrt": 2.0 + 2.0**-20, "contraction": 2.0}
wrong = []
for dtype in (torch.float32, torch.float16):
    a, b = (torch.randint(-3, 4, (128, 128)).to(dtype) for _ in range(2))
    if not torch.equal(tk.product("ieee", None)(a, b).double(), a.double() @ b.double().t()):
        wrong.append(f"product {dtype}")
a, b = (torch.randint(-128, 128, (128, 256), dtype=torch.int8) for _ in range(2))
if not torch.equal(tk.integer(cpu)(a, b).double(), a.double() @ b.double().t()):
    wrong.append("integers")
x, y, z = (torch.rand(3000) + 0.5 for _ in range(3))
apply = torch_apply(cpu)
for op in ("exp", "exp2", "log", "rsqrt", "sqrt", "div", "add", "mul", "contraction", "cast"):
    got = tk.elementwise(cpu, op, x, y, z, torch.float32).double()
    exact = apply(op, x.double(), y.double(), z.double(), torch.float64)
    if not ((got - exact).abs() <= UNITS.get(op, 1.0) * 2.0**-24 * exact.abs()).all():
        wrong.append(op)
got, exact = tk.elementwise(cpu, "fma", x, y, z, torch.float32).double(), x.double() * y.double() + z.double()
if not ((got - exact).abs() <= 2.0**-24 * (exact + x.double() * y.double())).all():  # in one rounding, or in two
    wrong.append("fma")
print(json.dumps(wrong))
"""


@needs_triton
def test_triton_kernels_compute_what_they_say(interpreter: Interpreter) -> None:
    """In the interpreter: their indices and their names. It says nothing about a device, and is not asked to."""
    assert interpreter.run(WORKER) == []

"""What fuzzing found, each as the least case that shows it: it stays mended."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from parity_support import CPU, check, strict

from ferryman.dispatch import registry
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.porting.inputs.cases import independent
from ferryman.porting.inputs.fills import Buffer, Draw, fill, strided
from ferryman.porting.judging import metrics
from ferryman.porting.judging.hygiene import bitwise_equal
from ferryman.porting.judging.parity import check_cell, prepare
from tests.lines import serving

T = TensorSpec
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
_NORM = {"weight": None, "eps": 1e-6}
_ATTENTION = {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": None}
_CAPPED = {
    "q": T((1, 1, 5, 8), fill="nonfinite"),
    "k": T((1, 1, 3, 8), fill="nonfinite"),
    "v": T((1, 1, 3, 8)),
    **_ATTENTION,
    "softcap": 20.0,
}
LEAST_CASES: dict[str, tuple[str, str, dict[str, Any], torch.dtype]] = {
    # elementwise PyTorch keeps a permuted input's strides; every output is declared contiguous
    "definition keeps a permuted input's strides": (
        "add_rms_norm",
        "definition",
        {"x": T((5, 6), layout="strided:1,5+0"), "residual": T((5, 6), layout="strided:1,5+0"), **_NORM},
        F32,
    ),
    "definition of a gradient too": (
        "silu_mul_backward",
        "definition",
        {n: T((5, 6), layout="strided:1,5+0") for n in ("gate", "up")},
        F16,
    ),
    "torch's composed norm gradient": (
        "rms_norm_backward",
        "torch",
        {"x": T((3, 4, 5), layout="strided:4,1,12+0"), **_NORM},
        BF16,
    ),
    # reshape(-1, 0)
    "the bound of rows without elements": (
        "rms_norm_backward",
        "torch",
        {"x": T((5, 0)), "weight": T((0,)), "eps": 1e-6},
        F32,
    ),
    "the bound of layer_norm's rows": ("layer_norm_backward", "torch", {"x": T((2, 0)), "bias": None, **_NORM}, F32),
    # 0 / 0: the bound was not finite where every gradient is 0
    "no row counts": (
        "cross_entropy_backward",
        "torch",
        {"logits": T((2, 3)), "target": T((2,), "int64", low=-1, high=0), "ignore_index": -1, "label_smoothing": 0.0},
        F32,
    ),
    # lerp of two infinite losses is inf - inf
    "a label whose logit is -inf, smoothed": (
        "cross_entropy",
        "torch",
        {
            "logits": T((1, 8), fill="masked"),
            "target": T((1,), "int64", low=0, high=8),
            "ignore_index": -100,
            "label_smoothing": 0.1,
        },
        F32,
    ),
    # tanh(inf) is 1, and its error 0, not infinite
    "softcap of an infinite score": ("attention", "torch", _CAPPED, F32),
    "and its gradient": ("attention_backward", "torch", {**_CAPPED, "grad_lse": True}, F32),
    "an infinite log-sum-exp beside zeros": (
        "attention_backward",
        "torch",
        {
            "q": T((1, 6, 1, 1), fill="nonfinite"),
            "k": T((1, 3, 7, 1)),
            "v": T((1, 3, 7, 1)),
            **_ATTENTION,
            "grad_lse": False,
        },
        F32,
    ),
    # PyTorch's CPU flash kernel: fewer keys than lanes, all scores NaN: 0
    "NaN scores of few keys": (
        "attention",
        "torch",
        {"q": T((1, 1, 2, 8), fill="nonfinite"), "k": T((1, 1, 3, 8)), "v": T((1, 1, 3, 8)), **_ATTENTION},
        F32,
    ),
    # and where all scores are -inf: a log-sum-exp of 0
    "scores of -inf alone": (
        "attention",
        "torch",
        {
            "q": T((1, 1, 7, 1), fill="nonfinite"),
            "k": T((1, 1, 16, 1), fill="nonfinite", layout="strided:16,16,0,1+0"),
            "v": T((1, 1, 16, 1), fill="nonfinite"),
            **_ATTENTION,
        },
        F32,
    ),
    # oneDNN's VDPBF16PS reads subnormals as 0
    "subnormal bfloat16 products": (
        "linear_backward",
        "torch",
        {
            "x": T((32, 37), fill="tiny"),
            "weight": T((67, 37), fill="tiny"),
            "bias": None,
            "need_x": True,
            "need_weight": True,
        },
        BF16,
    ),
    # a bound beyond float16's range leaves the sign of an overflow open
    "overflow within a wide bound": (
        "layer_norm_backward",
        "torch",
        {
            "x": T((102, 251), fill="large", layout="strided:251,0+0"),
            "weight": T((251,), "float16", "zeros"),
            "bias": None,
            "eps": 1e-5,
        },
        F32,
    ),
    # equal terms round alike: their noise is not that of independent errors
    "one value repeated by a stride of 0": (
        "rms_norm_backward",
        "torch",
        {"x": T((384,), fill="nonfinite", layout="strided:0+0"), **_NORM},
        F32,
    ),
    "a scalar's row": ("silu_mul", "torch", {n: T((), fill="nonfinite") for n in ("gate", "up")}, F32),
}


@pytest.mark.parametrize("name", LEAST_CASES)
def test_it_stays_mended(name: str) -> None:
    op, implementation, args, dtype = LEAST_CASES[name]
    primitive, case = registry.primitive(op), Case("found", args)
    for seed in range(3):
        prepared = prepare(primitive, case, dtype, CPU, seed)
        line = serving(op, implementation, prepared.args.values)
        cell = check_cell(primitive, line, case, dtype, prepared=prepared)
        assert (cell.implementation, cell.verdict) == (line.name, "PASS"), cell.reason


_INTERPRETED = """
import torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.ops.primitive import Case, TensorSpec as T
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
# an infinite query times the zeros of a padded key is NaN, and so was the slope of its softcap
capped = {"q": T((1, 1, 5, 8), fill="nonfinite"), "k": T((1, 1, 3, 8), fill="nonfinite"), "v": T((1, 1, 3, 8)),
          "causal": False, "scale": None, "window": None, "softcap": 20.0, "mask": None, "grad_lse": False}
# reshape(-1, 0)
nothing = {"x": T((0, 2, 16)), "weight": T((0, 16)), "bias": T((0,)), "need_x": False, "need_weight": False}
# past the end of a sequence a state stays infinite, beyond the inner width a gate is 0 times Inf: either was summed
own = [(name, next(c for c in cases_of(registry.primitive(name)) if c.name == wanted), torch.float16)
       for name, wanted in (("selective_scan_backward", "nonfinite"), ("moe_experts_backward", "nonfinite_narrow"))]
for name, case, dtype in (("attention_backward", Case("found", capped), torch.float32),
                          ("linear_backward", Case("found", nothing), torch.float32), *own):
    op = registry.primitive(name)
    lines = registry.asked(name, ("triton.tiled",) if name == "attention_backward" else ("triton",))
    cell = check_cell(op, lines[-1], case, dtype, times=2, simulate=profile("h200"))
    assert cell.verdict == "SIMULATED", f"{name}: {cell.reason}"
"""


def test_triton_s_stay_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_one_of_these_cases_can_fail() -> None:
    """A NaN, a wrong stride or a zero in its place is seen in each."""
    for op, implementation, args, dtype in LEAST_CASES.values():
        primitive, case = registry.primitive(op), Case("found", args)
        kernel = registry.launcher(serving(op, implementation))

        def wrong(*given: Any, kernel: Any = kernel) -> Any:
            output = kernel(*given)
            one = output if isinstance(output, torch.Tensor) else output[0]
            bad = torch.where(one.isnan(), 0.0, torch.nan).to(one.dtype) if one.numel() else one.double()
            return bad if isinstance(output, torch.Tensor) else (bad, *output[1:])

        assert check_cell(primitive, strict(op), case, dtype, kernel=wrong).verdict == "FAIL"


# --- the parts that it took ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", ["strided:0,1+3", "strided:2,1+0", "strided:1,3+1", "strided:9,2+5", "strided:0,0+1"]
)
def test_any_strides_hold_the_values_between_guards(layout: str) -> None:
    values = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    buffer = Buffer.around(values, F16, layout)
    strides, offset = layout.removeprefix("strided:").split("+")
    assert buffer.tensor.stride() == tuple(map(int, strides.split(",")))
    assert buffer.tensor.storage_offset() == 128 + int(offset)
    assert strided(buffer.tensor.stride(), int(offset)) == layout
    slots = {}
    for i in range(3):
        for j in range(4):
            slots.setdefault(i * buffer.tensor.stride(0) + j * buffer.tensor.stride(1), values[i, j].item())
            assert buffer.tensor[i, j] == slots[i * buffer.tensor.stride(0) + j * buffer.tensor.stride(1)]
    assert Buffer.repeats((3, 4), layout) == (len(slots) < 12)
    assert buffer.untouched() and not buffer.overrun()
    moved = buffer.to(CPU)
    assert bitwise_equal(moved.bytes, buffer.bytes) and moved.tensor.stride() == buffer.tensor.stride()
    buffer.tensor[0, 0] = 99
    assert not buffer.untouched() and not buffer.overrun()
    buffer.bytes[2] = 7
    assert buffer.overrun()


def test_a_given_tensor_is_copied_with_its_strides_and_alignment() -> None:
    base = torch.arange(64.0)
    for x in (base[3:35].reshape(4, 8)[:, ::2], base[1:9].expand(3, 8), base.as_strided((3, 4), (2, 1), 5), base[5]):
        buffer = Buffer.holding(x, CPU)
        assert torch.equal(buffer.tensor, x) and buffer.tensor.stride() == x.stride()
        assert buffer.tensor.data_ptr() % 16 == x.data_ptr() % 16 and buffer.tensor.data_ptr() != x.data_ptr()
        assert buffer.untouched()


def test_terms_that_are_equal_are_known() -> None:
    assert independent(Case("c", {"x": T((4, 8)), "eps": 1e-6}))
    assert not independent(Case("c", {"x": T((4, 8), layout="strided:0,1+0")}))
    assert not independent(Case("c", {"x": T((4, 8), layout="strided:4,1+0")}))
    assert independent(Case("c", {"x": T((1, 8), layout="strided:0,1+0")})), "one row repeats nothing"
    assert not independent(Case("c", {"x": torch.ones(4, 8)})) and independent(Case("c", {"x": torch.arange(4.0)}))


def test_bytes_of_tensors_with_odd_strides() -> None:
    one = torch.zeros(4)[::2][:1]
    assert bitwise_equal(one, torch.zeros(1)) and not bitwise_equal(one, -torch.zeros(1))
    empty = torch.zeros(1).expand(3)[:0]
    assert bitwise_equal(empty, torch.zeros(0)) and not bitwise_equal(torch.zeros(2), torch.ones(2))


def test_rows_of_a_scalar_and_of_nothing() -> None:
    for shape in ((), (0,), (2, 0), (0, 3), (3,), (2, 3)):
        tensor = fill("nonfinite").make(Draw.of(0, "softmax", "c", "x", shape, F32, CPU))
        assert tensor.shape == shape


@pytest.mark.parametrize(
    ("exact", "bound", "got", "right"),
    [
        (0.0, 1e5, float("inf"), True),
        (0.0, 1e5, -float("inf"), True),
        (0.0, 1e4, float("inf"), False),
        (6e4, 1e4, float("inf"), True),
        (6e4, 1e4, -float("inf"), False),
        (6e4, 1e3, float("inf"), False),
        (7e4, 1e4, 6.5e4, True),
        (7e4, 1e4, -6.5e4, False),
        (7e4, 1e4, float("nan"), False),
    ],
)
def test_overflow_within_the_bound(exact: float, bound: float, got: float, right: bool) -> None:
    given = torch.tensor([exact], dtype=torch.float64)
    allowed = metrics.Bound(torch.tensor([bound], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    _, misplaced = metrics.masks("y", torch.tensor([got], dtype=F16), given, allowed)
    assert (misplaced is None) == right


def test_the_bfloat16_product_is_right_on_a_cpu_without_subnormals() -> None:
    cells = list(
        check(
            "linear",
            registry.launcher(registry.implementation("linear", "torch")),
            registry.implementation("linear", "torch"),
            (BF16,),
        )
    )
    assert {c.verdict for c in cells} == {"PASS"}

"""The elementwise probes, on arithmetic with known faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ferryman.device_profiles.schema import FUNCTIONS
from ferryman.porting.fingerprint import elementwise, integers

CPU = torch.device("cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def _wrong(op: str, change: Any) -> elementwise.Apply:
    right = elementwise.torch_apply(CPU)

    def apply(name: str, x: Any, y: Any, z: Any, result: torch.dtype) -> torch.Tensor:
        got = right(name, x, y, z, result)
        return change(got, x, y, z) if name == op else got

    return apply


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_error_of_so_many_ulp_is_measured(function: str) -> None:
    exact, ulp = elementwise._expected(function)

    def off(got: torch.Tensor, *_: Any) -> torch.Tensor:
        wrong = exact.float()
        wrong[17] = (exact[17].float().double() + 5 * ulp[17]).float()
        return wrong

    measurement = elementwise.probe_ulp(_wrong(function, off), function)
    assert isinstance(measurement.value, float) and 4.5 <= measurement.value <= 5.5
    assert measurement.detail["at"] == elementwise.sample(function)[0][17].item()
    rounded = elementwise.probe_ulp(_wrong(function, lambda got, *_: exact.float()), function)
    assert isinstance(rounded.value, float) and 0.45 < rounded.value <= 0.5


def test_a_function_that_gives_nan_is_not_finite() -> None:
    measurement = elementwise.probe_ulp(_wrong("exp", lambda got, *_: torch.full_like(got, math.nan)), "exp")
    assert measurement.value == "not finite"


def test_samples_are_pinned_and_normal() -> None:
    for function in FUNCTIONS:
        x, y = elementwise.sample(function)
        exact, _ = elementwise._expected(function)
        assert 2**16 < x.numel() < 2**18 + 1 and x.shape == y.shape
        assert (exact.abs() >= 2.0**-126).all() and (exact.abs() < 2.0**128).all()
    bits = {f: int(elementwise.sample(f)[0].view(torch.int32).sum()) for f in ("exp", "log", "div")}
    assert bits == {"exp": -14816149492622, "log": 209819966646518, "div": 139905875312640}
    assert int(elementwise.sample("div")[1].view(torch.int32).sum()) == 140187732541440


def test_contraction() -> None:
    def fused(got: Any, x: Any, y: Any, z: Any) -> torch.Tensor:
        return (x.double() * y.double() + z.double()).float()

    def separate(got: Any, x: Any, y: Any, z: Any) -> torch.Tensor:
        return x * y + z

    assert elementwise.probe_contraction(_wrong("contraction", fused)).value == "fused"
    assert elementwise.probe_contraction(_wrong("contraction", separate)).value == "separate"
    odd = elementwise.probe_contraction(_wrong("contraction", lambda got, *_: torch.ones_like(got)))
    assert odd.value is None and "neither" in str(odd.reason)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_subnormals_of_elementwise_arithmetic(dtype: torch.dtype) -> None:
    def flushed(op: str, x: Any, y: Any, z: Any, result: torch.dtype) -> torch.Tensor:
        def flush(t: torch.Tensor) -> torch.Tensor:
            return torch.where(t.abs() < torch.finfo(result).tiny, torch.zeros_like(t), t)

        x, y, z = flush(x).double(), flush(y).double(), flush(z).double()
        return flush((x + y if op == "add" else x * y + (z if op == "fma" else 0)).to(result))

    def kept(op: str, x: Any, y: Any, z: Any, result: torch.dtype) -> torch.Tensor:
        x, y, z = x.double(), y.double(), z.double()
        return (x + y if op == "add" else x * y + (z if op == "fma" else 0)).to(result)

    def inputs_only(op: str, x: Any, y: Any, z: Any, result: torch.dtype) -> torch.Tensor:
        x = torch.where(x.abs() < torch.finfo(result).tiny, torch.zeros_like(x), x)
        return kept(op, x, y, z, result)

    ops = ("add", "mul", "fma")
    assert [f.value for f in elementwise.probe_subnormals(kept, dtype, ops)] == ["kept"] * 3
    assert [f.value for f in elementwise.probe_subnormals(flushed, dtype, ops)] == ["flushed"] * 3
    assert [f.value for f in elementwise.probe_subnormals(inputs_only, dtype, ops)] == [None] * 3


def test_conversions() -> None:
    def saturating(op: str, x: Any, y: Any, z: Any, result: torch.dtype) -> torch.Tensor:
        return x.clamp(-torch.finfo(result).max, torch.finfo(result).max).to(result)

    def truncating(op: str, x: Any, y: Any, z: Any, result: torch.dtype) -> torch.Tensor:
        return (x.view(torch.int32) & -65536).view(F32).to(result)

    measurement = elementwise.probe_overflow(saturating, torch.float8_e5m2)
    assert (measurement.value, measurement.detail["infinity"], measurement.detail["nan"]) == (
        "saturate",
        "saturate",
        "nan",
    )
    plain = elementwise.torch_apply(CPU)
    assert elementwise.probe_overflow(plain, torch.float8_e5m2).value == "inf"
    assert elementwise.probe_overflow(plain, torch.float8_e4m3fnuz).value == "nan"
    assert elementwise.probe_cast_rounding(truncating, BF16, 8).value == "toward-zero"
    assert elementwise.probe_cast_rounding(plain, BF16, 8).value == "nearest-even"


def test_integers() -> None:
    def sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.shape[1] > 2000:  # the long sum, of equal terms, without 134 MB of float64
            return torch.full((len(left), len(right)), float(left[0, 0]) * float(right[0, 0]) * left.shape[1]).double()
        return left.double() @ right.double().t()

    def wrapping(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (sums(left, right) + 2.0**31) % 2.0**32 - 2.0**31

    def saturating(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return sums(left, right).clamp(max=2**31 - 1)

    def narrow(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """22 bits: the largest sums are above 2^23."""
        return (sums(left, right) / 4).trunc() * 4

    assert [f.value for f in integers.probe(wrapping)] == ["yes", "wraps"]
    assert [f.value for f in integers.probe(saturating)] == ["yes", "saturates"]
    assert [f.value for f in integers.probe(narrow)] == ["no", None]

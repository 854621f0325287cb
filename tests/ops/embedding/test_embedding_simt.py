"""The C++ kernel of `embedding`, executed on the CPU for waves of 32 and 64 lanes in three orders of threads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.dispatch import registry
from ferryman.ops.embedding import simt_kernels
from ferryman.porting.inputs.cases import cases_of, materialise
from tests.bounded import must_be_right
from tests.unit import simt_host as host

pytestmark = pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package")
OP = registry.primitive("embedding")
KINDS = (torch.float32, torch.float16, torch.bfloat16)
Call = tuple[str, tuple[Any, ...], int]  # the units of the device


def calls() -> list[Call]:
    """Small cases whose table has unit stride, and rows, narrow and wide, that fill a small device."""
    known = [(c.name, materialise(c, OP, kind), 1) for c in cases_of(OP) for kind in KINDS]
    known = [(name, args, units) for name, args, units in known if args[1].stride(1) == 1 or args[1].shape[1] <= 1]
    draw = torch.Generator().manual_seed(1)
    for kind, width, scale in itertools.product(KINDS, (8, 67, 416, 1033, 4104), (None, 1.7)):
        weight = torch.randn(41, width, generator=draw).to(kind)
        ids = torch.randint(-2, 43, (max(19, 3 * 16_384 // width),), generator=draw)
        known.append((f"many_{width}", (ids, weight, scale), 1))
    # each has an id of 32 bits in its low half
    far = torch.tensor([1, 2**32 + 1, -(2**32) + 2, 2**40])
    return [*known, ("far", (far, torch.randn(5, 16, generator=draw).bfloat16(), None), 1)]


def checked(runtime: host.EmulatedRuntime, args: tuple[Any, ...], units: int) -> None:
    y = runtime.call(simt_kernels.embedding, args, host.target(runtime.wave, units=units))
    must_be_right("embedding", args, (y,), exact=args[2] is None)


def collected(wave: int, folder: Path, some: list[Call]) -> host.EmulatedRuntime:
    runtime = host.EmulatedRuntime(wave, folder)
    with host.in_force(runtime):
        for _, args, units in some:
            runtime.call(simt_kernels.embedding, args, host.target(wave, units=units))
    return runtime


@pytest.mark.parametrize("wave", [32, 64])
def test_every_case_is_right(wave: int, tmp_path: Path) -> None:
    some = calls()
    runtime = collected(wave, tmp_path, some)
    runtime.load(runtime.compile_collected())
    with host.in_force(runtime):
        for runtime.order in (0, 1, 2):
            for _, args, units in some:
                checked(runtime, args, units)
    launched = {name for name, *_ in runtime.launched}
    assert launched == {unit.name for unit in simt_kernels.units(host.target(wave))}


MUTANTS: dict[str, host.Mutant] = {
    "none": ("", "", None),
    "an_id_past_the_table": ("at < table.height", "at <= table.height", ""),
    "rows_side_by_side": ("const i64 row = ROWS ? first + p * side : first;", "const i64 row = first;", ""),
    "packs_too_few": (
        "chunk * PACKS + p) << lane_bits) + lane) * V;\n            if constexpr",
        "chunk + p) << lane_bits) + lane) * V;\n            if constexpr",
        "",
    ),
    "no_scale": ("values[i] *= scale", "values[i] *= 1.0f", ""),
    "ids_of_32_bits": ("(u64)words[1] << 32 | words[0]", "(u64)words[0]", ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_is_caught(name: str, tmp_path: Path) -> None:
    some = [call for call in calls() if call[0] in ("outside", "far", "many_8", "many_4104")]
    some = [call for call in some if call[1][1].dtype == torch.bfloat16]
    runtime = collected(32, tmp_path, some)

    def attempt() -> None:
        for _, args, units in some:
            checked(runtime, args, units)

    with host.in_force(runtime):
        host.assert_caught(runtime, MUTANTS[name], attempt)

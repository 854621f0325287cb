"""The C++ kernel of `kv_append`, executed on the CPU for waves of 32 and 64 lanes in three orders of threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.backends.simt import Unit
from ferryman.dispatch import registry
from ferryman.ops.kv_append import simt_kernels
from ferryman.porting.inputs.cases import cases_of, materialise
from tests.unit import simt_host as host

pytestmark = pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package")
OP = registry.primitive("kv_append")
KINDS = (torch.bfloat16, torch.float32)
UNITS = (1, 1 << 20)  # of a device that tokens fill, and that they do not


def calls() -> list[tuple[str, tuple[Any, ...], int]]:
    """Small cases, in each size of elements, and more tokens than a small device has threads for."""
    known = [(c.name, materialise(c, OP, kind), 1) for c in cases_of(OP) for kind in KINDS]
    for heads, kind in itertools.product((4, 8, 24), KINDS):
        k, v = (torch.arange(97.0 * heads * 128).view(97, heads, 128).to(kind) * sign for sign in (1, -1))
        caches = [torch.zeros(25, 4, heads, 128, dtype=kind) for _ in range(2)]
        slots = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:97]
        known += [(f"many_{heads}_{units}", (k, v, *caches, slots, None, None), units) for units in UNITS]
    return known


def checked(runtime: host.EmulatedRuntime, args: tuple[Any, ...], units: int) -> None:
    over = {i: args[i].clone() for i in (2, 3)}
    want = OP.body(*args)
    try:
        given = tuple(over.get(i, a) for i, a in enumerate(args))
        got = runtime.call(simt_kernels.kv_append, given, host.target(runtime.wave, units=units), over=(2, 3))
    finally:
        runtime._writable = []
    for result, expected in zip(got, want, strict=True):
        assert torch.equal(_bits(result), _bits(expected)), "another result"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def collected(wave: int, folder: Path, some: list[tuple[str, tuple[Any, ...], int]]) -> host.EmulatedRuntime:
    runtime = host.EmulatedRuntime(wave, folder)
    with host.in_force(runtime):
        for _, args, units in some:
            caches = tuple(a.clone() if i in (2, 3) else a for i, a in enumerate(args))
            runtime.call(simt_kernels.kv_append, caches, host.target(wave, units=units), over=(2, 3))
    return runtime


@pytest.mark.parametrize("wave", [32, 64])
def test_every_case_is_moved_bit_for_bit(wave: int, tmp_path: Path) -> None:
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
    "skipped_tokens_written": ("if (slot < 0 || slot >= places) continue;", "", ""),
    "slots_past_the_cache": ("slot >= places", "slot > places", ""),
    "values_of_keys": ("key ? k.data : v.data", "k.data", ""),
    "heads_in_order": ("to = head * x.cache_head", "to = head * x.dim", ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_is_caught(name: str, tmp_path: Path) -> None:
    some = [call for call in calls() if call[0] in ("odd", "cache_heads", "wide", "more_tokens_than_slots")]
    runtime = collected(32, tmp_path, some)

    def attempt() -> None:
        for _, args, units in some:
            checked(runtime, args, units)

    with host.in_force(runtime):
        host.assert_caught(runtime, MUTANTS[name], attempt)


def test_packs_need_whole_words_everywhere() -> None:
    names: list[str] = []

    class Recorder:
        def launch(self, unit: Unit, *rest: Any) -> None:
            names.append(unit.name)

    def launched(change: Callable[[Tensor], Tensor], place: int) -> str:
        k, v = (torch.zeros(5, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        args = [k, v, *(torch.zeros(3, 4, 2, 64, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(5).long()]
        args[place] = change(args[place])
        simt_kernels.kv_append(*args, None, None, host.target(32))  # type: ignore[arg-type]
        return names[-1]

    runtime = Recorder()
    runtime.wave = 32  # type: ignore[attr-defined]
    with host.in_force(runtime):  # type: ignore[arg-type]
        assert launched(lambda x: x, 0) == "kv_append_2_8_1_128"
        for place in range(4):
            assert launched(lambda x: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape), place) == (
                "kv_append_2_1_1_128"
            )
            assert launched(lambda x: x.mT.contiguous().mT, place) == "kv_append_2_1_1_128"
            assert launched(lambda x: torch.cat((x, x[..., :4]), -1)[..., :64], place) == "kv_append_2_1_1_128"

"""Drawn calls of every op, as Triton sees them on a device that is not here: every kernel becomes Triton's IR.

Interpreted kernels have values of Python where a compiled one has constants (a size of 1 is compiled in), so that what
does not compile may run well interpreted. Sizes of 1 are frequent here; the draw is the day's.
"""

from __future__ import annotations

import datetime
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from ferryman.backends import redirect
from ferryman.backends import triton as backend
from ferryman.device_profiles import profile
from ferryman.dispatch import registry, select
from ferryman.porting.aot.calls import Collector
from ferryman.porting.bench import grid
from ferryman.porting.inputs import fuzz

SIZES = fuzz.Sizes(
    rows=(1, 2, 17),
    width=(1, 2, 16, 31, 128),
    depth=(1, 2, 16, 67),
    batch=(1, 2),
    queries=(1, 2, 16, 17),
    keys=(1, 3, 16, 37),
    head_dim=(1, 2, 16, 37, 64, 128),
)
DAY = datetime.datetime.now(datetime.timezone.utc).toordinal()
EACH = 12


def lowered(unit: Any, arch: str) -> Any:
    """A specialisation in Triton's first IR; what fails raises Triton's CompilationError."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    source, options, gpu = backend._source(unit, arch)
    compiler = make_backend(gpu)
    parsed = compiler.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    codegen = compiler.get_codegen_implementation(parsed)
    return source.make_ir(gpu, parsed, codegen, compiler.get_module_map(), context)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.known())
@pytest.mark.parametrize("device", ["h100" if DAY % 2 else "mi300x"])
def test_drawn_calls_lower(name: str, device: str) -> None:
    op, known = registry.primitive(name), profile(device)
    target = select.target_of(known)
    launchers = {x: registry.launcher(x) for x in registry.implementations(name) if x.backend == "triton"}
    units: dict[str, Any] = {}
    for case, dtype in fuzz.cases(op, EACH, DAY, SIZES):
        args = grid.on_meta(op, case, dtype)
        view = select.View.of(op, args, known)
        for line, launcher in launchers.items():
            if select.refusals(line, view, known, absent=True):
                continue
            collector = Collector(target)
            before = redirect.to(cast(redirect.Route, collector))
            try:
                launcher(*args, target)
            finally:
                redirect.back(before)
            units |= collector.units
    assert units, "no drawn call launches a kernel"
    for unit in units.values():
        assert lowered(unit, known.arch) is not None


def test_a_kernel_that_does_not_lower_is_found() -> None:
    import triton

    from tests.unit.kernels_that_do_not_lower import method_of_a_constant

    x = torch.empty(4, device="meta")
    for n, right in ((2, True), (1, False)):
        unit = backend.specialise(method_of_a_constant, (x, n), {"num_warps": 4})
        if right:
            assert lowered(unit, "sm_90") is not None
        else:
            with pytest.raises(triton.CompilationError, match="has no attribute 'to'"):
                lowered(unit, "sm_90")

"""A menu line is one algorithm: whichever call it serves, it launches the same kernels, or leaves passes out.

Another kernel function is another line, so that `explain`, `check`, `tune` and lockfiles see the choice.
"""

from __future__ import annotations

import itertools
import re
from typing import cast

import pytest
import torch

pytest.importorskip("triton")

from ferryman.backends import redirect
from ferryman.device_profiles import profile
from ferryman.dispatch import registry, select
from ferryman.porting.aot.calls import Collector
from ferryman.porting.bench import grid
from ferryman.porting.running.cells import tier_cases

_LAYOUT = "elementwise: the C++ of tensors without gaps needs no rows"
_PACKS = "which kernel serves follows from addresses, which no clause reads: elements in packs, or one by one"
EXCEPT = {
    **{(f"{op}{way}", "activation"): _LAYOUT for op in ("silu_mul", "gelu_mul") for way in ("", "_backward")},
    **{(op, "rope"): _PACKS for op in ("rope", "rope_", "rope_backward")},
    ("attention_backward", "attention"): "without sinks there is no gradient of them, which is a pass that follows",
    ("bias_act_backward", "bias_act"): "without a bias there is no sum, and the kernel is elementwise",
}


def _kernels(unit: str) -> str:
    """A kernel's name, without a C++ unit's activation, dtypes and plan."""
    return re.split(r"_(?:Silu|GeluTanh|GeluErf|f32|f16|bf16)_|_\d|\(", unit)[0]


def _launched(op: str, backend: str, device: str) -> dict[str, set[frozenset[str]]]:
    """Line -> the sets of kernels that its calls launch."""
    primitive, known = registry.primitive(op), profile(device)
    target = select.target_of(known)
    sets: dict[str, set[frozenset[str]]] = {}
    cases = [*tier_cases(primitive, "standard"), *grid.cases(primitive, "full", torch.device("cuda"))]
    for line in registry.asked(op, (backend,)):
        launch = registry.launcher(line)
        for case, dtype in ((c, d) for c in cases for d in (torch.float32, torch.bfloat16)):
            args = grid.on_meta(primitive, case, dtype)
            view = select.View.of(primitive, args, known)
            if select.refusals(line, view, known, absent=True):
                continue
            collector = Collector(target)
            before = redirect.to(cast(redirect.Route, collector))
            try:
                launch(*args, target)
            finally:
                redirect.back(before)
            names = frozenset(_kernels(name) for name in collector.units)
            if names:
                sets.setdefault(line.name, set()).add(names)
    return sets


@pytest.mark.parametrize(("backend", "device"), [("triton", "h200"), ("triton", "mi300x"), ("cuda", "h200")])
def test_a_line_launches_the_same_kernels_for_every_call(backend: str, device: str) -> None:
    seen, several = 0, set()
    for op, primitive in registry.primitives().items():
        for line, sets in _launched(op, backend, device).items():
            seen += 1
            inmost = sorted(sets, key=len)
            if any(not few <= more for few, more in itertools.pairwise(inmost)):
                several.add((op, registry.family_of(primitive).name, line))
    assert seen > 15
    unlisted = {(op, family, line) for op, family, line in several if (op, family) not in EXCEPT}
    assert not unlisted, f"lines that launch one kernel or another: {sorted(unlisted)}; required: a line for each"
    used = {key for key in EXCEPT if any(key == (op, family) for op, family, _ in several)}
    wanted = {k for k in EXCEPT if (backend == "triton") == (k[1] in ("bias_act", "attention"))}
    assert used == wanted, f"listed and not seen: {sorted(wanted - used)}"

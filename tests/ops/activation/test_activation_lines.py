"""Which of the C++ kernels serves which layout: the menu's lines say what the launcher does."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman.backends import redirect
from ferryman.device_profiles import profile
from ferryman.dispatch import registry, select
from ferryman.porting.aot.calls import Collector
from tests.lines import serving
from tests.ops.activation import simt_cases

DEVICES = {"h200": "cuda", "mi300x": "hip"}


def unit_launched(op: str, line: str, args: tuple[Any, ...], device: str) -> str:
    """The name of the kernel that a line launches."""
    target, launch = select.target_of(profile(device)), registry.launcher(registry.implementation(op, line))
    collector = Collector(target)
    before = redirect.to(cast(redirect.Route, collector))
    try:
        launch(*args, target)
    finally:
        redirect.back(before)
    (name,) = collector.units
    return name


def halves(rows: int, n: int) -> tuple[Tensor, Tensor]:
    gate, up = torch.empty(rows, 2 * n, dtype=torch.bfloat16, device="meta").split(n, -1)
    return gate, up


@pytest.mark.parametrize(("device", "backend"), DEVICES.items())
@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul"])
def test_rows_with_gaps_have_a_line_of_their_own(op: str, device: str, backend: str) -> None:
    flat, known = torch.empty(64, 512, dtype=torch.bfloat16, device="meta"), profile(device)
    options = ("tanh",) if op == "gelu_mul" else ()
    wide = torch.empty(64, 1024, dtype=torch.bfloat16, device="meta")
    spread = torch.empty((), dtype=torch.bfloat16, device="meta").expand(64, 512)  # the gradient of a sum
    for inputs, line in (
        ((flat, flat), f"{backend}.flat"),
        (halves(64, 512), f"{backend}.rows"),
        ((flat, wide[:, :512]), f"{backend}.rows"),
        (halves(1, 512), f"{backend}.flat"),  # one row has no gap
        ((wide[0], wide[1]), f"{backend}.flat"),
    ):
        for name, args in ((op, inputs), (f"{op}_backward", (torch.empty_like(inputs[0]), *inputs))):
            explanation = ferryman.explain(name, *args, *options, device=device)
            assert explanation.chosen == line and not explanation.rows[0].reasons, (name, inputs)
            assert ("_flat_" in unit_launched(name, line, (*args, *options), device)) is line.endswith(".flat")
            refused = {f"{backend}.flat", f"{backend}.rows"} - {line}
            verdicts = {row.implementation: row.verdict for row in explanation.rows}
            assert {verdicts[other] for other in refused} == {"refused"}
    for grad, line in ((spread, f"{backend}.rows"), (spread[:1], f"{backend}.flat")):
        args = (grad, flat[: len(grad)], flat[: len(grad)], *options)
        assert serving(f"{op}_backward", backend, args, known).name == line
        assert ("_flat_" in unit_launched(f"{op}_backward", line, args, device)) is line.endswith(".flat")


@pytest.mark.parametrize("device", DEVICES)
def test_no_gap_is_a_fallback(device: str) -> None:
    """In strict mode, too: the line of tensors without gaps is for a part of the calls."""
    with ferryman.strict():
        assert ferryman.explain("silu_mul", *halves(64, 512), device=device).chosen == f"{DEVICES[device]}.rows"


@pytest.mark.parametrize(("device", "backend"), DEVICES.items())
def test_the_menu_asks_what_the_launcher_does(device: str, backend: str) -> None:
    """On every call that the emulation runs."""
    seen = set()
    for case in simt_cases.CASES:
        args, op = case.make(), case.kernel.__name__
        line = serving(op, backend, args, profile(device))
        view = select.View.of(registry.primitive(op), args, profile(device))
        if select.refusals(line, view, profile(device), absent=True):
            continue  # Triton's, of rows that are not contiguous in themselves
        assert ("_flat_" in unit_launched(op, line.name, args, device)) is line.name.endswith(".flat"), case.name
        seen.add((op, line.name))
    assert len(seen) == 7, "every op with both lines, but gelu_mul of rows"

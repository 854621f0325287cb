"""What the compiled code of Hopper's attention holds, where only a busy GPU would show that it is missing."""

from __future__ import annotations

import re

import pytest

from ferryman.backends import triton as triton_backend
from ferryman.device_profiles import profile
from ferryman.dispatch.select import target_of

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_a_masks_tile_is_released_behind_a_fence(causal: bool) -> None:
    """A TMA copy is in no order with reads of shared memory: without a fence before the barrier, ptxas lets a warp
    pass the barrier while its reads of the tile are on their way, and one thread's arrival lets the next copy begin."""
    from ferryman.ops.attention import hopper_kernels

    target = target_of(profile("h100"))
    asked = {"HAS_BIAS=True", "HAS_SINKS=False", f"CAUSAL={causal}"}
    (kernel,) = (
        s
        for s in hopper_kernels.specialisations(target, "bfloat16", (128,))
        if asked <= set(re.findall(r"\w+=\w+", str(s)))
    )
    text = triton_backend.TritonBackend().compile(kernel, None, "sm_90", target).log
    marks = re.findall(r"ldmatrix|fence\.proxy\.async|bar\.sync|mbarrier\.arrive", text)
    tiles = re.findall(r"read (.*?mbarrier\.arrive)", re.sub(r"(ldmatrix )+", "read ", " ".join(marks)))
    assert len(tiles) >= 6
    assert set(tiles) == {"fence.proxy.async bar.sync mbarrier.arrive"}

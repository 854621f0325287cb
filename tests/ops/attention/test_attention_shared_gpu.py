"""On a GPU that processes share, each launch of a Triton forward gives the bits of the first.

A kernel whose warps wait for each other may be put aside at any place."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

WORKER = """
import sys, time, torch, ferryman
from ferryman import ops
calls = []
for dim in (64, 128):
    make = torch.Generator(device="cuda").manual_seed(dim)
    q, k, v = (torch.randn(3, h, 704, dim, device="cuda", dtype=torch.float16, generator=make) for h in (32, 8, 8))
    mask = torch.randn(1, 32, 704, 704, device="cuda", dtype=torch.float16, generator=make)
    mask.masked_fill_(mask > 1, -torch.inf)
    calls += [(q, k, v, {"causal": True}), (q, k, v, {"mask": mask})]
with ferryman.use("triton"):
    first = [ops.attention(q, k, v, **more) for q, k, v, more in calls]
    again = [ops.attention(q, k, v, **more) for q, k, v, more in calls]
    torch.cuda.synchronize()
    end, launches, apart = time.monotonic() + 8, 0, [int(not torch.equal(a, b)) for a, b in zip(first, again)]
    while time.monotonic() < end:
        for i, (q, k, v, more) in enumerate(calls):
            launches += 1
            apart[i] += int(not torch.equal(ops.attention(q, k, v, **more), first[i]))
print(launches, *apart)
"""


def test_beside_other_processes_each_launch_is_as_the_first() -> None:
    workers = [subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = [worker.communicate(timeout=200)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    for launches, *apart in printed:
        assert int(launches) >= 40 and apart == ["0"] * 4

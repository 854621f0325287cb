"""What a function of PyTorch inside a served forward costs more where its call is not served.

A call may cost 0.2 us more. Times on a shared machine say little, so what takes them is counted: attributes that are
read (a tensor's takes 40 ns), calls (60 ns), and steps of Python (4 ns), in the code that stands for the function.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import ferryman
from ferryman.porting.model.uses import served


def plain(*shape: int, dtype: torch.dtype = torch.float32, learns: bool = False) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=learns)


WIDE = torch.float64
IDS = torch.tensor([1])
Q, LONG = plain(1, 4, 3, 8), plain(1, 4, 5, 8)
SDPA = F.scaled_dot_product_attention
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "attention that drops": (SDPA, (Q, Q, Q, None, 0.5), {}),
    "attention in float64": (SDPA, (plain(1, 4, 3, 8, dtype=WIDE),) * 3, {}),
    "attention of three dimensions": (SDPA, (Q[0], Q[0], Q[0]), {}),
    "attention with a mask that learns": (SDPA, (Q, Q, Q, plain(1, 1, 3, 3, learns=True)), {}),
    "layer_norm in float64": (F.layer_norm, (plain(2, 8, dtype=WIDE), (8,)), {}),
    "layer_norm of two dimensions": (F.layer_norm, (plain(2, 4, 8), (4, 8)), {}),
    "layer_norm of two dtypes": (F.layer_norm, (plain(2, 8, dtype=torch.bfloat16), (8,), plain(8)), {}),
    "rms_norm without eps": (F.rms_norm, (plain(2, 8), (8,)), {}),
    "softmax of columns": (F.softmax, (plain(2, 8), 0), {}),
    "softmax to a dtype": (F.softmax, (plain(2, 8, dtype=torch.bfloat16), -1), {"dtype": torch.float32}),
    "torch.softmax of columns": (torch.softmax, (plain(2, 8), 0), {}),
    "torch.softmax in float64": (torch.softmax, (plain(2, 8, dtype=WIDE), -1), {}),
    "silu in place": (F.silu, (plain(2), True), {}),
    "embedding of rows that are cut": (F.embedding, (IDS, plain(4, 8), None, 1.0), {}),
    "embedding with padding that learns": (F.embedding, (IDS, plain(4, 8, learns=True), 0), {}),
    "embedding in float64": (F.embedding, (IDS, plain(4, 8, dtype=WIDE)), {}),
    "linear in float64": (F.linear, (plain(2, 8, dtype=WIDE), plain(3, 8, dtype=WIDE)), {}),
    "linear of a vector": (F.linear, (plain(2, 8), plain(8)), {}),
    **{
        f"{f.__name__} in float64": (f, (plain(2, dtype=WIDE),), {})
        for f in (F.silu, F.relu, F.hardswish, torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.leaky_relu, F.elu)
    },
}
# whose sizes alone are another's: a shape takes 100 ns to read, and three must be
SIZES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "heads that are too wide": (SDPA, (plain(1, 1, 1, 512),) * 3, {}),
    "causal, of two lengths": (SDPA, (Q, LONG, LONG), {"is_causal": True}),
    "values wider than keys": (SDPA, (plain(1, 4, 3, 4), plain(1, 4, 3, 4), Q), {}),
    "a bias of one number": (F.linear, (plain(2, 8), plain(4, 8), plain(1)), {}),
}


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Steps of Python, attributes read and calls made in the files of the ops' own folders."""
    counts = {"steps": 0, "reads": 0, "calls": 0}

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.endswith("recognise.py"):
                return None
            frame.f_trace_opcodes = True
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            counts["steps"] += 1
            counts["reads"] += name in ("LOAD_ATTR", "LOAD_METHOD")
            counts["calls"] += name.startswith("CALL")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return counts


def alike(name: str, calls: Any) -> dict[str, int]:
    function, given, options = calls[name]
    ours = served()[function].replacement
    with ferryman.trace() as traced:
        torch.manual_seed(0)
        output = ours(*given, **options)
    torch.manual_seed(0)
    assert not traced.calls and torch.equal(output, function(*given, **options))
    return counted(lambda: ours(*given, **options))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_not_served_costs_little(name: str) -> None:
    counts = alike(name, CALLS)
    # two attributes of tensors and PyTorch's function by its name; one test that is a call, and that function
    assert counts["reads"] <= 3 and counts["calls"] <= 2 and counts["steps"] <= 36, counts


@pytest.mark.parametrize("name", SIZES)
def test_a_call_whose_sizes_are_not_served_reads_each_once(name: str) -> None:
    counts = alike(name, SIZES)
    assert counts["reads"] <= 11 and counts["calls"] <= 5 and counts["steps"] <= 150, counts


def test_the_counter_counts() -> None:
    counts = counted(lambda: served()[F.silu].replacement(plain(2)))
    assert counts["reads"] == 1 and counts["calls"] == 1 and counts["steps"] > 5

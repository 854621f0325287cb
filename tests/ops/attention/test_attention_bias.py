"""The gradient of attention's float mask by a kernel of its own: however the mask is broadcast, nothing in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.dispatch import registry
from tests.interpreter import Interpreter

OP = registry.primitive("attention")
BACKWARD = registry.primitive("attention_backward")
LINE = "triton.biased"

# the mask's shape beside queries (2, 4, 37, ..) of 2 key heads and 50 keys, and the call's options
MASKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "whole": ((2, 4, 37, 50), {}),
    "of all": ((1,), {"causal": True}),
    "of keys": ((2, 1, 1, 50), {}),
    "of queries": ((37, 1), {"causal": True, "window": 9}),
    "of heads": ((4, 1, 1), {"softcap": 7.0}),
    "of a batch's heads": ((1, 4, 37, 50), {"scale": -0.3, "chunk": 16}),
    "of queries and keys": ((37, 50), {"dropout_p": 0.4, "dropout_seed": torch.tensor([3, -9])}),
    "of sequences": ((2, 1, 37, 50), {"key_range": torch.tensor([[0, 50], [7, 31]], dtype=torch.int32)}),
}


def _arguments(name: str, dtype: torch.dtype) -> dict[str, Any]:
    shape, options = MASKS[name]
    draw = torch.Generator().manual_seed(2)
    sizes = {"q": (2, 4, 37, 24), "k": (2, 2, 50, 24), "v": (2, 2, 50, 16), "grad_out": (2, 4, 37, 16), "mask": shape}
    tensors: dict[str, Any] = {n: torch.randn(size, generator=draw).to(dtype) for n, size in sizes.items()}
    if len(shape) > 1 and shape[-1] > 1:
        tensors["mask"][..., 11] = -math.inf
    given = {"causal": False, "scale": None, "window": None, "softcap": 0.0, **OP.added, **tensors, **options}
    out, lse = OP.body(*(given[n] for n in OP.names))
    given |= {"out": out, "lse": lse.float(), "grad_lse": torch.randn(lse.shape, generator=draw), "need_mask": True}
    return {n: given[n] for n in BACKWARD.names}


def _judge() -> dict[str, str]:
    from ferryman.testing import assert_parity

    verdicts = {}
    for number, name in enumerate(MASKS):
        (cell,) = assert_parity(
            "attention_backward", LINE, _arguments(name, (torch.float32, torch.float16)[number % 2])
        )
        verdicts[name] = cell.verdict
    return verdicts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_is_right_however_the_mask_is_broadcast(interpreter: Interpreter) -> None:
    program = f"import json; from {__name__} import _judge; print(json.dumps(_judge()))"
    verdicts = interpreter.run(program, timeout=800)
    assert list(verdicts) == list(MASKS) and set(verdicts.values()) == {"SIMULATED"}, verdicts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_it_is_right_on_a_device(name: str, dtype: torch.dtype) -> None:
    from ferryman.testing import assert_parity

    given = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in _arguments(name, dtype).items()}
    assert_parity("attention_backward", LINE, given)

"""A server's and a trainer's steps, as `benchmarks/whole_models.py` times them: all calls of one are alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import scenarios

CPU = torch.device("cpu")
EAGER = [name for name in scenarios.NAMES if "graphed" not in name]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return scenarios.build(True, 1, CPU)


@pytest.mark.parametrize("name", EAGER)
def test_calls_of_a_step_are_alike(name: str, model: torch.nn.Module) -> None:
    seen: list[Any] = []

    def watched(**given: Any) -> Any:
        cache = given.get("past_key_values")
        before = None if cache is None else cache.get_seq_length()
        outputs = model(**given)
        seen.append((before, outputs.logits.detach()))
        return outputs

    call = scenarios.step_of(name, model, True)(watched, model)
    call()
    call()
    (length, first), (again, second) = seen
    assert torch.equal(first, second) and first.isfinite().all()
    assert length == again and (length is None) == ("_1" not in name and "_32" not in name)
    model.zero_grad()


def test_padding_is_on_the_left_and_differs(model: torch.nn.Module) -> None:
    masks: list[torch.Tensor] = []
    scenarios.step_of("qwen3_8b/padded", model, True)(lambda **given: masks.append(given["attention_mask"]), model)()
    (mask,) = masks
    assert mask[:, -1].all() and len(set(mask.sum(1).tolist())) == len(mask)


def test_an_unknown_step_is_named() -> None:
    with pytest.raises(ValueError, match="qwen3_8b/prefill"):
        scenarios.step_of("qwen3_8b/nothing", torch.nn.Linear(1, 1), True)

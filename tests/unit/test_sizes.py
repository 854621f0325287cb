"""Shapes that a user writes, for `ferryman explain` and `ferryman port --input`."""

from __future__ import annotations

import pytest
import torch

from ferryman.errors import ArgumentError
from ferryman.porting.inputs.sizes import MOST, shape_of
from ferryman.porting.model import trial


def test_a_shape_is_read() -> None:
    assert shape_of("port", "--input", "2,16x64", "2,16") == (2, 16, 64)
    assert shape_of("port", "--input", f"0,{MOST}", "2,16") == (0, MOST)


@pytest.mark.parametrize(
    ("text", "required"),
    [("2,y", "such as 2,16,64"), ("-1,64", "not negative"), (f"2,{10**20}", "sizes of"), (f"2,{MOST}", "as many")],
)
def test_inputs_that_no_tensor_has_are_refused_before_the_model_runs(text: str, required: str) -> None:
    with pytest.raises(ArgumentError, match=f"^port: --input is .*; required: .*{required}"):
        trial._caller("model", torch.nn.Identity(), None, [text])

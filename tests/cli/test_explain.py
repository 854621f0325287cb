"""`ferryman explain`: arguments from one shape, for devices that are not here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.cli import calls
from ferryman.dispatch import explain, registry
from ferryman.errors import ArgumentError, FerrymanError, UnknownName
from ferryman.porting.inputs import sizes
from ferryman.porting.inputs.cases import cases_of, specs_of
from tests.cli.run import ferryman


def explained(*arguments: str) -> Any:
    done = ferryman("explain", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_an_absent_device_is_answered_from_its_profile() -> None:
    answer = explained("rms_norm", "--shape", "8,4096", "--device", "mi300x")
    verdicts = {row["implementation"]: row["verdict"] for row in answer["rows"]}
    assert not answer["here"] and answer["device"] == "mi300x"
    assert verdicts == {
        "torch": "available",
        "triton.rows": "available",
        "triton.long": "available",
        "cuda": "refused",
        "hip": "chosen",
        "definition": "available",
    }
    cuda = next(row for row in answer["rows"] if row["implementation"] == "cuda")
    assert cuda["reasons"] == ["cuda does not serve amd devices"]


def test_a_strided_last_dimension_is_refused_with_actual_against_required() -> None:
    answer = explained("rms_norm", "--shape", "8,4096", "--device", "h200", "--layout", "last")
    cuda = next(row for row in answer["rows"] if row["implementation"] == "cuda")
    assert cuda["verdict"] == "refused"
    assert cuda["reasons"] == ["x.stride[-1] is 2; required: x contiguous in its last dimension"]
    assert next(r["implementation"] for r in answer["rows"] if r["verdict"] == "chosen") == "triton.rows"


def test_a_request_narrows_the_menu() -> None:
    answer = explained("softmax", "--shape", "4,128", "--device", "h200", "--use", "triton,torch")
    assert {r["implementation"]: r["verdict"] for r in answer["rows"]} == {
        "torch": "available",
        "triton.rows": "chosen",
        "triton.long": "available",
        "cuda": "not requested",
        "hip": "not requested",
        "definition": "not requested",
    }
    done = ferryman("explain", "softmax", "--shape", "4,128", "--device", "h200", "--use", "hip")
    assert done.code == 0 and "it would raise Unsupported" in done.out


def test_the_device_here_is_probed() -> None:
    answer = explained("silu_mul", "--shape", "4,128", "--device", "cpu")
    assert answer["here"]
    assert next(r["implementation"] for r in answer["rows"] if r["verdict"] == "chosen") == "torch"


def test_text_names_the_choice() -> None:
    done = ferryman(
        "explain",
        "attention",
        "--shape",
        "1,32,4096,128",
        "--device",
        "mi300x",
        "--arg",
        "k=1,8,4096,128",
        "--arg",
        "v=1,8,4096,128",
        "--arg",
        "causal=true",
        "--arg",
        "window=256",
        "--arg",
        "mask=none",
    )
    assert done.code == 0, done.err
    assert done.out.startswith("attention on mi300x, which is not here")
    assert "k=bfloat16[2^0,2^3,2^12,128]c" in done.out and "causal=True" in done.out and "window=2^8" in done.out
    assert "-> triton.tiled" in done.out  # of PyTorch's fused ways none on AMD has a window


def _shapes(op: str, shape: tuple[int, ...], **given: str) -> dict[str, Any]:
    known = registry.primitive(op)
    values = calls.from_shape(known, shape, torch.float16, "contiguous", given)
    known.check(*values)
    return {
        name: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) if isinstance(v, Tensor) else v
        for name, v in zip(known.names, values, strict=True)
    }


def test_other_tensors_follow_from_the_first() -> None:
    half = "float16"
    assert _shapes("layer_norm", (2, 3, 8)) == {
        "x": ((2, 3, 8), half),
        "weight": ((8,), half),
        "bias": ((8,), half),
        "eps": 1e-5,
    }
    assert _shapes("linear", (2, 8)) == {"x": ((2, 8), half), "weight": ((8, 8), half), "bias": None}
    assert _shapes("linear", (2, 8), weight="32x8", bias="32")["weight"] == ((32, 8), half)
    assert _shapes("cross_entropy", (5, 100))["target"] == ((5,), "int64")
    rope = _shapes("rope", (1, 4, 16, 64), cos="1,16,32", sin="1,16,32")
    assert rope["k"] == ((1, 4, 16, 64), half) and rope["cos"] == ((1, 16, 32), half) and rope["interleaved"] is False
    routed = _shapes("gate_topk", (5, 16), ids_dtype="int32")  # k has no default: the first case's
    assert (routed["k"], routed["bias"], routed["ids_dtype"]) == (2, None, torch.int32)
    assert _shapes("gate_topk_backward", (5, 16), k="3", ids_dtype="torch.int32")["topk_ids"] == ((5, 3), "int32")
    attention = _shapes("attention", (1, 4, 16, 64), mask="1,1,16,16")
    assert attention["mask"] == ((1, 1, 16, 16), "bool") and attention["window"] is None


@pytest.mark.parametrize("op", registry.primitives())
def test_every_op_has_calls_that_it_accepts(op: str) -> None:
    """From one shape, and from its own cases: what `explain` and `ops` ask about is a valid call."""
    known = registry.primitive(op)
    _shapes(op, specs_of(registry.evidence(known).cases()[0])[0].shape)
    for tier in ("small", "standard"):
        assert cases_of(known, tier)
        values = calls.of_case(known, calls.first_case(known, tier), torch.bfloat16)
        known.check(*values)
        assert all(v.device.type == "meta" for v in values if isinstance(v, Tensor))


def test_values_that_cannot_be_read_are_named() -> None:
    known = registry.primitive("attention")
    for given, error, message in (
        ({"causal": "1"}, ArgumentError, "causal is '1'; required: true or false"),
        ({"window": "wide"}, ArgumentError, "window is 'wide'; required: of type int"),
        ({"cause": "true"}, UnknownName, "nearest: causal"),
        ({"k": "1,-2"}, ArgumentError, "required: sizes that are not negative"),
    ):
        with pytest.raises(error, match=message):
            calls.from_shape(known, (1, 2, 8, 64), torch.float32, "contiguous", given)
    with pytest.raises(UnknownName, match="int33"):
        calls.from_shape(registry.primitive("gate_topk"), (5, 16), torch.float32, "contiguous", {"ids_dtype": "int33"})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("8,99999999999999999999", "--shape is (8, 99999999999999999999); required: sizes of 1099511627776 at most"),
        ("1048577,1048576", "as many elements in all"),
        ("0,99999999999999999999", "required: sizes of"),
    ],
)
def test_a_shape_that_no_tensor_has_is_bad_use(shape: str, message: str) -> None:
    done = ferryman("explain", "softmax", "--shape", shape, "--device", "h200")
    assert (done.code, done.out) == (2, "") and message in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.parametrize("op", registry.primitives())
def test_whatever_the_shape_an_op_is_explained_or_refused(op: str) -> None:
    known, longest = registry.primitive(op), str(sizes.MOST)
    for shape in ("0", "2,2", "1,1,0", "1,1,1,1", "2,2,2,2,2,2", longest, f"1,{longest}", f"1,1,1,{longest}"):
        try:
            values = calls.from_shape(known, calls.shape_of("--shape", shape), torch.bfloat16, "contiguous", {})
            explain(op, device="h200", **dict(zip(known.names, values, strict=True)))
        except FerrymanError as error:
            assert str(error)


def test_arguments_of_the_schema_that_the_function_lacks_are_explained() -> None:
    answer = explained("kv_append", "--shape", "2,8,64", "--arg", "slots=2", "--device", "h200")
    assert any(row["verdict"] == "chosen" for row in answer["rows"])


@pytest.mark.parametrize("layout", calls.LAYOUTS)
def test_layouts_lie_as_the_cases_do(layout: str) -> None:
    x = calls.empty((2, 3, 5, 8), torch.float32, layout)
    assert tuple(x.shape) == (2, 3, 5, 8)
    strides = {
        "contiguous": (120, 40, 8, 1),
        "rows": (240, 80, 16, 1),
        "last": (240, 80, 16, 2),
        "heads": (120, 8, 24, 1),
    }
    assert x.stride() == strides[layout]

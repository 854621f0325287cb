"""Fills: the same bits everywhere, in range per dtype, laid out as the spec says, between guards."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch

from ferryman.dispatch import registry
from ferryman.errors import UnknownName
from ferryman.ops.primitive import STORAGE_DTYPES, TensorSpec
from ferryman.porting.inputs.cases import arguments, cases_of, materialise
from ferryman.porting.inputs.fills import FILLS, GUARD_BYTES, Buffer, Draw, fill, known

CPU = torch.device("cpu")


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, op: str = "rms_norm", name: str = "x") -> Draw:
    return Draw.of(0, op, "case", name, shape, dtype, CPU)


def test_values_are_pinned() -> None:
    """Another machine rebuilds these bits; a change here breaks every stored capsule."""
    words = draw((64,)).words()
    assert hashlib.sha256(words.numpy().tobytes()).hexdigest()[:16] == "0c5f3d0b13cd7929"
    assert hashlib.sha256(draw((64,)).normal().numpy().tobytes()).hexdigest()[:16] == "142d282ede983c83"


def test_normal_and_uniform_have_their_moments_and_independent_neighbours() -> None:
    x, u = draw((400, 500)).normal(), draw((400, 500)).uniform()
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01 and 4 < x.abs().max() <= 4.9
    assert abs(u.mean() - 0.5) < 0.005 and u.min() >= 0 and u.max() < 1
    assert abs((x[:, 1:] * x[:, :-1]).mean()) < 0.01
    assert abs((x * draw((400, 500), name="weight").normal()).mean()) < 0.01


def test_a_large_draw_has_the_values_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    of = draw((7, 31))
    whole = [of.words(3), of.normal(), of.uniform(2), of.integers(-4, 9)]
    monkeypatch.setattr("ferryman.ops.draw._CPU_BLOCK", 13)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole, [of.words(3), of.normal(), of.uniform(2), of.integers(-4, 9)], strict=True)
    )


def test_every_case_of_every_op_passes_its_ops_own_checks() -> None:
    for op in registry.primitives().values():
        for case in cases_of(op):
            args = arguments(case, op, torch.float16, 0, CPU)
            op.check(*args.values)
            assert not args.untouched(), case.name
            for spec, value in zip((case.args.get(n) for n in op.names), args.values, strict=True):
                if isinstance(spec, TensorSpec):
                    assert tuple(value.shape) == spec.shape


def test_every_fill_that_a_case_names_exists_and_every_fill_is_described() -> None:
    cases = [case for evidence in registry.evidences().values() for case in evidence.cases()]
    named = {s.fill for c in cases for s in c.args.values() if isinstance(s, TensorSpec) and s.fill}
    assert named <= set(known())
    assert all(f.meaning for f in known().values())
    with pytest.raises(UnknownName, match=r"nearest: .*constant"):
        fill("constnat")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in FILLS if n not in ("nonfinite", "masked", "mask", "bias")])
def test_finite_fills_stay_in_range(name: str, dtype: torch.dtype) -> None:
    for op in ("rms_norm", "linear", "attention"):
        values = fill(name, op).make(draw((8, 96), dtype, op))
        assert values.shape == (8, 96) and bool(values.to(dtype).isfinite().all())


def test_tiny_holds_subnormals_of_its_dtype() -> None:
    for dtype in STORAGE_DTYPES:
        x = fill("tiny").make(draw((4, 96), dtype)).to(dtype)
        small = x[(x.double().abs() < torch.finfo(dtype).tiny) & (x != 0)]
        assert small.numel() > 20 and bool((x.double().abs() > torch.finfo(dtype).tiny).any() or dtype == torch.float16)


def test_nonfinite_plants_all_kinds_and_leaves_rows_clean() -> None:
    x = fill("nonfinite").make(draw((10, 32)))
    assert bool(x[0].isfinite().all()) and bool(x[1].isnan().any())
    assert bool((x[2] == math.inf).any()) and bool((x[3] == -math.inf).any())
    assert bool((x[4] == math.inf).any()) and bool((x[4] == -math.inf).any())
    keys = fill("nonfinite", "attention").make(draw((1, 2, 37, 64), op="attention", name="k"))
    values = fill("nonfinite", "attention").make(draw((1, 2, 37, 64), op="attention", name="v"))
    assert bool(keys.isfinite().all()) and bool(values[:, 0].isfinite().all())
    assert not bool(values[:, 1].isfinite().all())


def test_masks_and_biases_have_rows_that_see_nothing_and_rows_that_see_something() -> None:
    for name in ("mask", "bias", "masked"):
        x = fill(name).make(draw((9, 30)))
        seen = x if x.dtype == torch.bool else x > -math.inf
        assert bool((~seen).all(-1).any()) and bool(seen.any(-1).any())


@pytest.mark.parametrize(
    ("layout", "shape", "strides", "offset"),
    [
        ("contiguous", (4, 6), (6, 1), 0),
        ("rows", (4, 6), (13, 1), 0),
        ("last", (4, 6), (12, 2), 0),
        ("heads", (2, 3, 5, 4), (60, 4, 12, 1), 0),
        ("offset", (4, 6), (6, 1), 1),
    ],
)
def test_layouts(layout: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    values = draw(shape).normal()
    x = Buffer.around(values, torch.float32, layout).tensor
    assert x.stride() == strides and x.storage_offset() == GUARD_BYTES // 4 + offset
    assert (x.data_ptr() % 16 == 0) == (layout != "offset")
    assert torch.equal(x, values.float())


def test_a_write_is_told_from_an_overrun() -> None:
    for layout in ("contiguous", "rows", "last"):
        buffer = Buffer.around(draw((4, 6)).normal(), torch.float32, layout)
        assert buffer.untouched()
        buffer.tensor[1, 2] += 1
        assert not buffer.untouched() and not buffer.overrun()
        behind = buffer.tensor.as_strided((1,), (1,), buffer.tensor.storage_offset() + 6 if layout == "rows" else 0)
        behind.zero_()
        assert buffer.overrun()


def test_guards_are_nan_so_that_reading_one_shows() -> None:
    for dtype in STORAGE_DTYPES:
        x = Buffer.around(draw((4, 6)).normal(), dtype, "contiguous").tensor
        assert bool(x.as_strided((1,), (1,), x.storage_offset() - 1).isnan().all())


def test_unknown_layout_and_tier_are_named() -> None:
    with pytest.raises(UnknownName, match="layout"):
        Buffer.around(draw((2, 2)).normal(), torch.float32, "diagonal")


def test_a_backwards_saved_outputs_are_the_oracles_rounded_to_storage() -> None:
    op = registry.primitive("softmax_backward")
    case = next(c for c in cases_of(op) if c.name == "prime")
    x = materialise(case, registry.primitive("softmax"), torch.bfloat16)[0]
    grad, y = materialise(case, op, torch.bfloat16)
    assert torch.equal(y, torch.softmax(x.double(), -1).bfloat16())
    assert grad.shape == y.shape and not torch.equal(grad, y)


def test_an_output_in_an_arguments_place_lies_as_the_case_says() -> None:
    op = registry.primitive("cross_entropy_inplace_grad_backward")
    by_name = {case.name: case for case in cases_of(op)}
    for name, strides in (("saved_rows", (207, 1)), ("saved_last", (400, 2)), ("layout_rows", (200, 1))):
        args = arguments(by_name[name], op, torch.float32, 0, torch.device("cpu"))
        saved = args.buffers["out_logits"].tensor
        assert saved.stride() == strides, name
        assert saved.sum(-1).abs().max() < 1e-5, name  # softmax less one label


@pytest.mark.parametrize("factor", [1, 2, 128])
def test_between_is_rounded_alike_by_16_bits_and_so_is_its_square(factor: int) -> None:
    draw = Draw.of(0, "op", "case", "x", (3, 10), torch.float32, torch.device("cpu"))
    signed, plain = fill("between_signs").make(draw), fill("between").make(draw)
    assert torch.equal(signed.abs(), plain) and torch.equal(signed.sum(-1), torch.zeros(3, dtype=torch.float64))
    for values in (factor * plain, factor * plain.square()):
        off = (values.half().double() - values) / values
        assert len(off.unique()) == 1 and off.abs().min() > 3e-4


def test_optional_gradients_are_absent_in_every_other_case_and_needs_are_switched() -> None:
    attention = registry.primitive("attention_backward")
    given = [materialise(c, attention, torch.float16)[1] is None for c in cases_of(attention)[:4]]
    assert given == [True, False, True, False]
    names = [c.name for c in cases_of(registry.primitive("linear_backward"))]
    assert "square_without_need_x" in names and "square_without_need_weight" in names


def test_seeds_and_parameters_have_streams_of_their_own() -> None:
    op = registry.primitive("silu_mul")
    case = cases_of(op)[1]
    first, other, again = (materialise(case, op, torch.float32, seed)[0] for seed in (0, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(*materialise(case, op, torch.float32))


def test_the_docs_name_every_fill() -> None:
    """The common ones are explained; `make docs` lists those of one op."""
    docs = Path(__file__).parents[2] / "docs"
    text, table = ((docs / name).read_text() for name in ("parity.md", "ops.md"))
    assert [n for n in FILLS if f"`{n}`" not in text] == []
    assert [n for n in known() if f"`{n}`" not in text + table] == []


def test_arguments_move_bit_for_bit_with_layout_and_guards() -> None:
    op = registry.primitive("rms_norm")
    case = next(c for c in cases_of(op) if c.name == "layout_rows")
    here = arguments(case, op, torch.bfloat16, 0, CPU)
    there = here.to(CPU)
    x, y = here.values[0], there.values[0]
    assert y.stride() == x.stride() and y.storage_offset() == x.storage_offset() and y.data_ptr() != x.data_ptr()
    assert torch.equal(there.buffers["x"].bytes, here.buffers["x"].bytes) and there.values[2:] == here.values[2:]
    y[0, 0] += 1
    assert there.untouched() == ["x was modified"] and here.untouched() == []

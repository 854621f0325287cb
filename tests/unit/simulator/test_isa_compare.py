"""Comparisons, classes and what they write: one bit a lane, zero for lanes that are off."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.simulator import rational as q
from tests.unit.simulator.harness import FORMATS, LANES, M32, PARTIAL, Row, check, execute, register, rows, signed

UNORDERED = {"nge": "ge", "nlg": "lg", "ngt": "gt", "nle": "le", "neq": "eq", "nlt": "lt"}


def _float(kind: str, name: str) -> Callable[[int, int], bool]:
    form = FORMATS[kind]

    def oracle(x: int, y: int) -> bool:
        a, b = (form.decode(v & ((1 << form.bits) - 1)) for v in (x, y))
        ordered = not (a.nan or b.nan)
        below, same = q.less(a, b), q.equal(a, b)
        truth = {
            "f": False,
            "tru": True,
            "o": ordered,
            "u": not ordered,
            "lt": below,
            "eq": same,
            "le": below or same,
            "gt": ordered and not below and not same,
            "lg": ordered and not same,
            "ge": ordered and not below,
        }
        return not truth[UNORDERED[name]] if name in UNORDERED else truth[name]

    return oracle


INTEGER: dict[str, Callable[[int, int], bool]] = {
    "f": lambda a, b: False,
    "lt": operator.lt,
    "eq": operator.eq,
    "le": operator.le,
    "gt": operator.gt,
    "ne": operator.ne,
    "ge": operator.ge,
    "t": lambda a, b: True,
}


def _integer(kind: str, name: str) -> Callable[[int, int], bool]:
    width, low = int(kind[1:]), (1 << int(kind[1:])) - 1
    if kind[0] == "i":
        return lambda a, b: INTEGER[name](signed(a, width), signed(b, width))
    return lambda a, b: INTEGER[name](a & low, b & low)


def _table() -> list[Row]:
    table = []
    for kind in ("f32", "f16", "f64"):
        for name in ("f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u", "tru", *UNORDERED):
            table += _forms(f"v_cmp_{name}_{kind}", (kind, kind), _float(kind, name))
    for kind in ("i32", "u32", "i64", "u64", "i16", "u16"):
        edges = {"64": "b64", "32": "b32", "16": "b16"}[kind[1:]]
        for name in INTEGER:
            table += _forms(f"v_cmp_{name}_{kind}", (edges, edges), _integer(kind, name))
    return table


def _forms(name: str, reads: tuple[str, str], oracle: Callable[[int, int], bool]) -> list[Row]:
    return [
        Row(f"{name}_e32 vcc, {{a}}, {{b}}", reads, "", oracle, mask_out="vcc", limit=256),
        Row(f"{name}_e64 s[30:31], {{a}}, {{b}}", reads, "", oracle, mask_out="30", limit=128),
        Row(f"{name.replace('v_cmp_', 'v_cmpx_')}_e32 vcc, {{a}}, {{b}}", reads, "", oracle, mask_out="exec", limit=64),
    ]


def _class(kind: str, bits: int) -> int:
    """The bit of a number's class: 0 signalling NaN, 1 quiet NaN, 2..9 from -inf over the zeros to +inf."""
    form = FORMATS[kind]
    bits &= (1 << form.bits) - 1
    number = form.decode(bits)
    if number.nan:
        return 1 if bits & 1 << form.mantissa_bits - 1 else 0
    if number.infinite:
        rank = 0
    elif number.zero:
        rank = 3
    else:
        rank = 2 if number.magnitude < q.Fraction(2) ** (1 - form.bias) else 1
    return 2 + rank if number.negative else 9 - rank


CLASS_MASKS = (*(1 << n for n in range(10)), 0x3FF, 0x060, 0x003, 0x204, 0)
SIGNALLING = {"f32": (0x7F800001, 0xFFBFFFFF), "f16": (0x7C01, 0xFDFF), "f64": (0x7FF0000000000001, 0xFFF0000000000001)}


def _class_rows() -> list[Row]:
    from tests.unit.simulator.harness import EDGES

    table = []
    for kind in ("f32", "f16", "f64"):
        oracle = lambda a, m, kind=kind: m >> _class(kind, a) & 1  # noqa: E731
        edges = (EDGES[kind] + SIGNALLING[kind], CLASS_MASKS)
        for text, into in (("_e32 vcc", "vcc"), ("_e64 s[30:31]", "30")):
            table.append(
                Row(f"v_cmp_class_{kind}{text}, {{a}}, {{b}}", (kind, "b32"), "", oracle, mask_out=into, edges=edges)
            )
        table.append(
            Row(
                f"v_cmpx_class_{kind}_e32 vcc, {{a}}, {{b}}",
                (kind, "b32"),
                "",
                oracle,
                mask_out="exec",
                edges=edges,
                limit=64,
            )
        )
    return table


FORMS = [
    Row(
        "v_cmp_gt_f32_e32 vcc, 0, {b}",
        ("f32", "f32"),
        "",
        lambda a, b: q.less(q.F32.decode(b), q.real(0)),
        mask_out="vcc",
    ),
    Row(
        "v_cmp_lt_f32_e64 s[30:31], |{a}|, s20",
        ("f32",),
        "",
        lambda a: q.less(abs(q.F32.decode(a)), q.real(2)),
        mask_out="30",
        s={20: 0x40000000},
    ),
    Row(
        "v_cmp_neq_f32_e64 s[30:31], -{a}, {b}",
        ("f32", "f32"),
        "",
        lambda a, b: not q.equal(-q.F32.decode(a), q.F32.decode(b)),
        mask_out="30",
    ),
    Row("v_cmp_gt_i32_e64 s[30:31], s20, {a}", ("b32",), "", lambda a: signed(a) < -5, mask_out="30", s={20: M32 - 4}),
    Row(
        "v_cmp_gt_i64_e64 s[30:31], s[20:21], {a}",
        ("b64",),
        "",
        lambda a: signed(a, 64) < (1 << 33),
        mask_out="30",
        s={20: 0, 21: 2},
    ),
    Row("v_cmp_gt_i64_e64 s[30:31], {a}, -1", ("b64",), "", lambda a: signed(a, 64) > -1, mask_out="30"),
    Row("v_cmp_le_u32_e32 vcc, 0x10000, {b}", ("b32", "b32"), "", lambda a, b: b >= 0x10000, mask_out="vcc"),
]


@pytest.mark.daily(7)
@rows(_table() + _class_rows() + FORMS)
def test_compare(row: Row) -> None:
    check(row)


def _mask_value(value: object) -> int:
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)  # type: ignore[call-overload]


COMPARE_AND_EXEC = register("v_cmpx_gt_u32_e64 s[30:31], v1, v2")


def test_cmpx_writes_exec_and_its_destination() -> None:
    v = {1: np.arange(LANES, dtype=np.uint32), 2: np.full(LANES, 20, np.uint32)}
    result = execute(COMPARE_AND_EXEC, v=v, exec_mask=PARTIAL)
    expected = sum(1 << lane for lane in range(21, LANES)) & PARTIAL
    assert _mask_value(result.exec) == expected
    assert _mask_value(result.s[30]) | _mask_value(result.s[31]) << 32 == expected


SELECT = {
    register("v_cndmask_b32_e64 v0, v1, v2, s[30:31]"): lambda a, b, k: b if k else a,
    register("v_cndmask_b32_e64 v0, 0, v2, s[30:31]"): lambda a, b, k: b if k else 0,
    register("v_cndmask_b32_e64 v0, v1, 1.0, s[30:31]"): lambda a, b, k: 0x3F800000 if k else a,
    register("v_cndmask_b32_e64 v0, -v1, |v2|, s[30:31]"): lambda a, b, k: b & 0x7FFFFFFF if k else a ^ 0x80000000,
    register("v_cndmask_b32_e64 v0, 0, -1, s[30:31]"): lambda a, b, k: M32 if k else 0,
}


@pytest.mark.parametrize("text", SELECT)
@pytest.mark.parametrize("mask", [(1 << 64) - 1, PARTIAL])
def test_select_by_an_sgpr_pair(text: str, mask: int) -> None:
    chosen = 0x0F0F_8001_FFFF_1234
    v = {
        0: np.full(LANES, 77, np.uint32),
        1: np.arange(LANES, dtype=np.uint32) + 0x80000010,
        2: np.arange(LANES, dtype=np.uint32) * 3,
    }
    v[2] |= np.uint32(0x80000000)
    result = execute(text, v=v, s={30: chosen & M32, 31: chosen >> 32}, exec_mask=mask)
    for lane in range(LANES):
        expected = SELECT[text](int(v[1][lane]), int(v[2][lane]), chosen >> lane & 1) if mask >> lane & 1 else 77
        assert int(result.v[0][lane]) == expected, (text, lane)

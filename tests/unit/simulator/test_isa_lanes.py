"""What crosses lanes: DPP, permutes, swizzles, readlane, accumulation registers.

Sources: "CDNA3" Instruction Set Architecture (DPP, DS_SWIZZLE_B32, V_READLANE_B32); LLVM, AMDGPU modifier syntax.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.simulator import rational as q
from tests.unit.simulator.harness import FULL, LANES, M32, PARTIAL, execute, register

WAIT = "\ns_waitcnt lgkmcnt(0)"
OLD, SOURCE, OTHER = (np.arange(LANES, dtype=np.uint32) * k + c for k, c in ((3, 9000), (7, 100), (11, 5)))
#: a lane's source lane; None: out of range, SAME: not given by the manual, and not checked
Control = Callable[[int], "int | None"]
UNSTATED = -1


def _in_row(lane: int, source: int) -> int | None:
    return source if lane // 16 == source // 16 else None


def _controls() -> dict[str, Control]:
    table: dict[str, Control] = {
        "row_mirror": lambda n: n ^ 15,
        "row_half_mirror": lambda n: n ^ 7,
        "wave_shl:1": lambda n: n + 1 if n < 63 else None,
        "wave_shr:1": lambda n: n - 1 if n else None,
        "wave_rol:1": lambda n: (n + 1) % 64,
        "wave_ror:1": lambda n: (n - 1) % 64,
        "row_bcast:15": lambda n: n // 16 * 16 - 1 if n > 15 else UNSTATED,
        "row_bcast:31": lambda n: 31 if n > 31 else UNSTATED,
    }
    for p in ((1, 0, 3, 2), (2, 3, 0, 1), (0, 0, 0, 0), (3, 2, 1, 0), (1, 1, 3, 3), (0, 1, 2, 3)):
        table[f"quad_perm:[{','.join(map(str, p))}]"] = lambda n, p=p: n // 4 * 4 + p[n % 4]
    for by in (1, 2, 3, 4, 8, 15):
        table[f"row_shl:{by}"] = lambda n, by=by: _in_row(n, n + by)
        table[f"row_shr:{by}"] = lambda n, by=by: _in_row(n, n - by)
        table[f"row_ror:{by}"] = lambda n, by=by: n // 16 * 16 + (n - by) % 16
    for lane in (0, 5, 15):
        table[f"row_newbcast:{lane}"] = lambda n, lane=lane: n // 16 * 16 + lane
    return table


CONTROLS = _controls()
#: (row_mask, bank_mask, bound_ctrl, EXEC)
MASKS = (
    (0xF, 0xF, True, FULL),
    (0xF, 0xF, False, FULL),
    (0xA, 0xF, True, FULL),
    (0xF, 0x5, False, FULL),
    (0x6, 0xC, True, PARTIAL),
    (0xF, 0xF, False, PARTIAL),
)


def _dpp_text(control: str, masks: tuple) -> str:
    row_mask, bank_mask, bound_zero, _ = masks
    tail = f"row_mask:{row_mask:#x} bank_mask:{bank_mask:#x}{' bound_ctrl:1' if bound_zero else ''}"
    return register(f"v_mov_b32_dpp v0, v2 {control} {tail}")


DPP = [(control, masks, _dpp_text(control, masks)) for control in CONTROLS for masks in MASKS]


def _dpp_expected(
    control: str, masks: tuple, old: np.ndarray, source: np.ndarray, combine: Callable[[int, int], int]
) -> list[int | None]:
    """What each lane holds after; None where it is not stated. combine(moved, lane) makes the result."""
    row_mask, bank_mask, bound_zero, mask = masks
    expected: list[int | None] = []
    for lane in range(LANES):
        enabled = mask >> lane & 1 and row_mask >> lane // 16 & 1 and bank_mask >> lane % 16 // 4 & 1
        if not enabled:
            expected.append(int(old[lane]))
            continue
        at = CONTROLS[control](lane)
        if at == UNSTATED:
            expected.append(None)
        elif at is not None and mask >> at & 1:
            expected.append(combine(int(source[at]), lane))
        else:
            expected.append(combine(0, lane) if bound_zero else int(old[lane]))
    return expected


def _agree(got: np.ndarray, expected: list[int | None], what: str) -> None:
    for lane, value in enumerate(expected):
        assert value is None or int(got[lane]) == value, f"{what}: lane {lane} holds {int(got[lane])}, expected {value}"


@pytest.mark.daily(7)
@pytest.mark.parametrize(("control", "masks", "text"), DPP, ids=[text[14:] + f" exec {m[3]:x}" for _, m, text in DPP])
def test_dpp_moves(control: str, masks: tuple, text: str) -> None:
    result = execute(text, v={0: OLD, 2: SOURCE}, exec_mask=masks[3])
    _agree(result.v[0], _dpp_expected(control, masks, OLD, SOURCE, lambda moved, lane: moved), text)
    # The destination as its own source: every lane is read before any is written.
    own = text.replace("v0,", "v2,")
    result = execute(own, v={2: SOURCE}, exec_mask=masks[3])
    _agree(result.v[2], _dpp_expected(control, masks, SOURCE, SOURCE, lambda moved, lane: moved), own)


def _float_add(a: int, b: int) -> int:
    return q.F32.encode(q.add(q.F32.decode(a), q.F32.decode(b)))


def _float_max(a: int, b: int) -> int:
    return a if q.less(q.F32.decode(b), q.F32.decode(a)) else b


TAIL = "row_shr:{by} row_mask:0xf bank_mask:0xf bound_ctrl:1"
OPERATIONS = {
    register(f"v_add_u32_dpp v0, v2, v3 {TAIL.format(by=8)}"): ("row_shr:8", lambda a, b: (a + b) & M32, "int"),
    register(f"v_sub_u32_dpp v0, v2, v3 {TAIL.format(by=2)}"): ("row_shr:2", lambda a, b: (a - b) & M32, "int"),
    register(f"v_or_b32_dpp v0, v2, v3 {TAIL.format(by=4)}"): ("row_shr:4", lambda a, b: a | b, "int"),
    register(f"v_and_b32_dpp v0, v2, v3 {TAIL.format(by=1)}"): ("row_shr:1", lambda a, b: a & b, "int"),
    register(f"v_max_u32_dpp v0, v2, v3 {TAIL.format(by=8)}"): ("row_shr:8", max, "int"),
    register(f"v_min_i32_dpp v0, v2, v3 {TAIL.format(by=1)}"): ("row_shr:1", min, "int"),
    register(f"v_add_f32_dpp v0, v2, v3 {TAIL.format(by=1)}"): ("row_shr:1", _float_add, "float"),
    register("v_add_f32_dpp v0, v2, v3 row_bcast:31 row_mask:0xf bank_mask:0xf bound_ctrl:1"): (
        "row_bcast:31",
        _float_add,
        "float",
    ),
    register("v_add_f32_dpp v0, v2, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"): (
        "quad_perm:[1,0,3,2]",
        _float_add,
        "float",
    ),
    register(f"v_max_f32_dpp v0, v2, v3 {TAIL.format(by=4)}"): ("row_shr:4", _float_max, "float"),
    register("v_add_f32_dpp v0, -v2, |v3| row_shl:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"): (
        "row_shl:1",
        lambda a, b: _float_add(a ^ 0x80000000, b & 0x7FFFFFFF),
        "float",
    ),
    register("v_mul_f32_dpp v0, v2, v3 row_ror:4 row_mask:0xf bank_mask:0xf"): (
        "row_ror:4",
        lambda a, b: q.F32.encode(q.mul(q.F32.decode(a), q.F32.decode(b))),
        "float",
    ),
}


@pytest.mark.parametrize("text", OPERATIONS)
@pytest.mark.parametrize("mask", [FULL, PARTIAL])
def test_dpp_in_arithmetic(text: str, mask: int) -> None:
    control, operation, kind = OPERATIONS[text]
    source, other = SOURCE, OTHER
    if kind == "float":
        source, other = (x.astype(np.float32).view(np.uint32) for x in (SOURCE, OTHER))
    masks = (0xF, 0xF, "bound_ctrl" in text, mask)
    result = execute(text, v={0: OLD, 2: source, 3: other}, exec_mask=mask)
    expected = _dpp_expected(control, masks, OLD, source, lambda moved, lane: operation(moved, int(other[lane])))
    _agree(result.v[0], expected, text)


REDUCTION = register("""
v_add_f32_dpp v2, v2, v2 row_shr:8 row_mask:0xf bank_mask:0xf bound_ctrl:1
s_nop 1
v_add_f32_dpp v2, v2, v2 row_shr:4 row_mask:0xf bank_mask:0xf bound_ctrl:1
s_nop 1
v_add_f32_dpp v2, v2, v2 row_shr:2 row_mask:0xf bank_mask:0xf bound_ctrl:1
s_nop 1
v_add_f32_dpp v2, v2, v2 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1
s_nop 1
v_mov_b32_e32 v3, v2
s_nop 1
v_mov_b32_dpp v3, v2 row_bcast:15 row_mask:0xa bank_mask:0xf bound_ctrl:1
s_nop 1
v_add_f32_e32 v2, v2, v3
s_nop 1
v_add_f32_dpp v2, v2, v2 row_bcast:31 row_mask:0xf bank_mask:0xf bound_ctrl:1
v_readlane_b32 s20, v2, 63
""")


def test_the_reduction_that_triton_emits() -> None:
    values = (np.arange(LANES) * 17 % 101).astype(np.float32)
    result = execute(REDUCTION, v={2: values})
    assert int(result.s[20]) == q.F32.encode(q.real(int(values.sum())))


# -- one lane to a scalar and back


SCALARS = {
    register("v_readlane_b32 s20, v2, 5"): 5,
    register("v_readlane_b32 s20, v2, 63"): 63,
    register("v_readlane_b32 s20, v2, s21"): 66 % 64,
    register("v_readfirstlane_b32 s20, v2"): (PARTIAL & -PARTIAL).bit_length() - 1,
}


@pytest.mark.parametrize("text", SCALARS)
def test_reading_a_lane(text: str) -> None:
    """v_readlane takes no notice of EXEC, and its lane wraps at 64; v_readfirstlane takes the lowest active one."""
    result = execute(text, v={2: SOURCE}, s={21: 66}, exec_mask=PARTIAL)
    assert int(result.s[20]) == int(SOURCE[SCALARS[text]])


FIRST_OF_NONE = register("v_readfirstlane_b32 s20, v2")


def test_the_first_lane_of_none_is_lane_zero() -> None:
    assert int(execute(FIRST_OF_NONE, v={2: SOURCE}, exec_mask=0).s[20]) == int(SOURCE[0])


WRITES = {
    register("v_writelane_b32 v0, s20, 1"): 1,
    register("v_writelane_b32 v0, 17, s21"): 2,
    register("v_writelane_b32 v0, 17, 3"): 3,
}


@pytest.mark.parametrize("text", WRITES)
def test_writing_a_lane(text: str) -> None:
    result = execute(text, v={0: OLD}, s={20: 0xABCD, 21: 66}, exec_mask=0xF0)
    expected = OLD.copy()
    expected[WRITES[text]] = 17 if "17" in text else 0xABCD
    assert (result.v[0] == expected).all()


# -- through the LDS hardware


PERMUTES = {
    register("ds_bpermute_b32 v0, v1, v2" + WAIT): 0,
    register("ds_bpermute_b32 v0, v1, v2 offset:12" + WAIT): 12,
    register("ds_permute_b32 v0, v1, v2" + WAIT): 0,
    register("ds_permute_b32 v0, v1, v2 offset:8" + WAIT): 8,
}


@pytest.mark.parametrize("text", PERMUTES)
@pytest.mark.parametrize("mask", [FULL, PARTIAL])
def test_permutes(text: str, mask: int) -> None:
    """Addresses are bytes, and wrap at 64 lanes. Lanes that are off give nothing; the highest sender wins."""
    lanes = np.array([(n * 5 + 3) % 64 if n < 60 else 7 for n in range(LANES)])
    address = (lanes * 4 + np.arange(LANES) % 4 + 256 * (np.arange(LANES) % 3)).astype(np.uint32)
    result = execute(text, v={0: OLD, 1: address, 2: SOURCE}, exec_mask=mask)
    at = [(int(a) + PERMUTES[text]) // 4 % 64 for a in address]
    moved = [0] * LANES
    for lane in range(LANES):
        if "bpermute" in text:
            moved[lane] = int(SOURCE[at[lane]]) if mask >> at[lane] & 1 else 0
        elif mask >> lane & 1:
            moved[at[lane]] = int(SOURCE[lane])
    _agree(result.v[0], [moved[n] if mask >> n & 1 else int(OLD[n]) for n in range(LANES)], text)


def _bitmask(and_mask: int, or_mask: int, xor_mask: int) -> Callable[[int], int]:
    return lambda n: n & 32 | ((n & 31 & and_mask | or_mask) ^ xor_mask)


def _rotate(by: int, mask: int) -> Callable[[int], int]:
    return lambda n: n & 32 | (n & mask | n + by & ~mask) & 31


def _fft(mask: int) -> Callable[[int], int]:
    return lambda n: n & 32 | int(f"{n & 31:05b}"[::-1], 2) >> mask.bit_count() | n & mask


SWIZZLES = {
    register("ds_swizzle_b32 v0, v2 offset:swizzle(SWAP,16)" + WAIT): _bitmask(31, 0, 16),
    register("ds_swizzle_b32 v0, v2 offset:swizzle(SWAP,1)" + WAIT): _bitmask(31, 0, 1),
    register("ds_swizzle_b32 v0, v2 offset:swizzle(REVERSE,8)" + WAIT): _bitmask(31, 0, 7),
    register("ds_swizzle_b32 v0, v2 offset:swizzle(BROADCAST,8,3)" + WAIT): _bitmask(24, 3, 0),
    register("ds_swizzle_b32 v0, v2 offset:swizzle(QUAD_PERM,3,1,0,2)" + WAIT): lambda n: (
        n // 4 * 4 + (3, 1, 0, 2)[n % 4]
    ),
    register('ds_swizzle_b32 v0, v2 offset:swizzle(BITMASK_PERM,"01pip")' + WAIT): _bitmask(0b00111, 0b01000, 0b00010),
    register("ds_swizzle_b32 v0, v2 offset:0x401f" + WAIT): _bitmask(31, 0, 16),
    register("ds_swizzle_b32 v0, v2 offset:0xc060" + WAIT): _rotate(3, 0),
    register("ds_swizzle_b32 v0, v2 offset:0xc441" + WAIT): _rotate(-2, 1),
    register("ds_swizzle_b32 v0, v2 offset:0xe000" + WAIT): _fft(0),
    register("ds_swizzle_b32 v0, v2 offset:0xe010" + WAIT): _fft(16),
    register("ds_swizzle_b32 v0, v2 offset:0x8039" + WAIT): lambda n: n // 4 * 4 + (1, 2, 3, 0)[n % 4],
}


@pytest.mark.parametrize("text", SWIZZLES)
@pytest.mark.parametrize("mask", [FULL, PARTIAL])
def test_swizzles(text: str, mask: int) -> None:
    result = execute(text, v={0: OLD, 2: SOURCE}, exec_mask=mask)
    expected = []
    for lane in range(LANES):
        at = SWIZZLES[text](lane)
        expected.append((int(SOURCE[at]) if mask >> at & 1 else 0) if mask >> lane & 1 else int(OLD[lane]))
    _agree(result.v[0], expected, text)


# -- counting lanes, accumulation registers, swaps


LANE_ID = register("v_mbcnt_lo_u32_b32 v0, -1, 0\nv_mbcnt_hi_u32_b32 v0, -1, v0")
COUNT_BELOW = register("v_mbcnt_lo_u32_b32 v0, s20, v2\nv_mbcnt_hi_u32_b32 v0, s21, v0")


def test_lane_numbers() -> None:
    assert (execute(LANE_ID).v[0] == np.arange(LANES)).all()
    mask = 0x8765_4321_0F1E_2D3C
    result = execute(COUNT_BELOW, v={2: SOURCE}, s={20: mask & M32, 21: mask >> 32})
    assert [int(x) for x in result.v[0]] == [(mask & ((1 << n) - 1)).bit_count() + int(SOURCE[n]) for n in range(LANES)]


ACCUMULATORS = register("""
v_accvgpr_write_b32 a3, v2
v_accvgpr_write_b32 a4, 1.0
v_accvgpr_write_b32 a5, 7
s_nop 3
v_accvgpr_mov_b32 a6, a3
s_nop 3
v_accvgpr_read_b32 v0, a6
v_accvgpr_read_b32 v1, a4
""")


def test_accumulation_registers() -> None:
    kept = np.full(LANES, 4242, np.uint32)
    result = execute(
        ACCUMULATORS, v={0: kept, 1: kept, 2: SOURCE}, a={3: OLD, 4: OLD, 5: OLD, 6: OLD}, exec_mask=PARTIAL
    )
    for lane in range(LANES):
        on = PARTIAL >> lane & 1
        assert int(result.v[0][lane]) == (int(SOURCE[lane]) if on else 4242)
        assert int(result.v[1][lane]) == (0x3F800000 if on else 4242)
        assert int(result.a[5][lane]) == (7 if on else int(OLD[lane]))
        assert int(result.a[6][lane]) == (int(SOURCE[lane]) if on else int(OLD[lane]))


SHORT_NAMES = register("v_accvgpr_write a3, v2\ns_nop 3\nv_accvgpr_read v0, a3")


def test_the_names_without_a_type() -> None:
    """LLVM's assembler takes both; its printer writes _b32."""
    assert (execute(SHORT_NAMES, v={2: SOURCE}).v[0] == SOURCE).all()


SWAP = register("v_swap_b32 v0, v2")
SWAPS_950 = {
    register("v_permlane32_swap_b32_e32 v0, v2", "gfx950"): lambda n: n < 32,
    register("v_permlane16_swap_b32_e32 v0, v2", "gfx950"): lambda n: n % 32 < 16,
}


def test_swap_of_two_registers() -> None:
    result = execute(SWAP, v={0: OLD, 2: SOURCE}, exec_mask=PARTIAL)
    for lane in range(LANES):
        first, second = (SOURCE, OLD) if PARTIAL >> lane & 1 else (OLD, SOURCE)
        assert int(result.v[0][lane]) == first[lane]
        assert int(result.v[2][lane]) == second[lane]


@pytest.mark.parametrize("text", SWAPS_950)
def test_swap_of_rows_between_registers(text: str) -> None:
    """The upper part of the first register and the lower part of the second change places."""
    lower, by = SWAPS_950[text], 32 if "32_swap" in text else 16
    result = execute(text, arch="gfx950", v={0: OLD, 2: SOURCE})
    for lane in range(LANES):
        first = OLD[lane] if lower(lane) else SOURCE[lane - by]
        second = OLD[lane + by] if lower(lane) else SOURCE[lane]
        assert (int(result.v[0][lane]), int(result.v[2][lane])) == (first, second), (text, lane)

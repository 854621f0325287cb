"""Atomics on buffer, global and flat memory: integers, floats, pairs of 16-bit floats, compare and swap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.simulator import rational as q
from tests.unit.simulator.harness import LANES, M32, M64, PARTIAL, execute, implemented, register, same
from tests.unit.simulator.test_isa_lds import _float_atomic, _pair, _split, _unsigned, atomic_values
from tests.unit.simulator.test_isa_memory import OLD, WAIT, _address, at, descriptor


def _names() -> dict[str, tuple[int, Callable[[int, int], int], str]]:
    table: dict[str, tuple[int, Callable[[int, int], int], str]] = {}
    for width, tail in ((4, ""), (8, "_x2")):
        u = _unsigned(8 * width)
        table |= {
            f"add{tail}": (width, u["add_u"], "b"),
            f"sub{tail}": (width, u["sub_u"], "b"),
            f"smin{tail}": (width, u["min_i"], "b"),
            f"umin{tail}": (width, min, "b"),
            f"smax{tail}": (width, u["max_i"], "b"),
            f"umax{tail}": (width, max, "b"),
            f"and{tail}": (width, u["and_b"], "b"),
            f"or{tail}": (width, u["or_b"], "b"),
            f"xor{tail}": (width, u["xor_b"], "b"),
            f"inc{tail}": (width, u["inc_u"], "b"),
            f"dec{tail}": (width, u["dec_u"], "b"),
            f"swap{tail}": (width, lambda m, d: d, "b"),
        }
    table |= {
        "add_f32": (4, _float_atomic(q.F32, "add"), "f32"),
        "add_f64": (8, _float_atomic(q.F64, "add"), "f64"),
        "min_f64": (8, _float_atomic(q.F64, "min"), "f64"),
        "max_f64": (8, _float_atomic(q.F64, "max"), "f64"),
        "pk_add_f16": (4, _pair(q.F16), "f16"),
        "pk_add_bf16": (4, _pair(q.BF16), "bf16"),
    }
    return table


NAMES = _names()


def _atomic_texts() -> list[tuple[str, str, bool, str]]:
    texts = []
    for name, (width, _, _) in NAMES.items():
        data, into = ("v4", "v0") if width == 4 else ("v[4:5]", "v[0:1]")
        for returns in (False, True):
            tail = " sc0" if returns else ""
            destination = f"{into}, " if returns else ""
            texts.append(("global", name, returns, f"global_atomic_{name} {destination}v[8:9], {data}, off{tail}"))
            texts.append(("flat", name, returns, f"flat_atomic_{name} {destination}v[8:9], {data}{tail}"))
            texts.append(("buffer", name, returns, f"buffer_atomic_{name} {data}, v8, s[8:11], 0 offen{tail}"))
    return [(space, name, returns, register(text + WAIT, _arch(space, name))) for space, name, returns, text in texts]


def _arch(space: str, name: str) -> str:
    """Buffers add pairs of bf16 from gfx950 on; global and flat do so on gfx942."""
    return "gfx950" if (space, name) == ("buffer", "pk_add_bf16") else "gfx942"


ATOMICS = [case for case in _atomic_texts() if implemented(case[3], _arch(case[0], case[1]))]


@pytest.mark.daily(7)
@pytest.mark.parametrize(("space", "name", "returns", "text"), ATOMICS, ids=[t.split("\n")[0] for *_, t in ATOMICS])
def test_atomics(space: str, name: str, returns: bool, text: str) -> None:
    width, operation, kind = NAMES[name]
    for places in (LANES, 4):
        stored = atomic_values(kind, width, places, 5)
        data = atomic_values(kind, width, LANES, 6)
        if places == 4 and name.split("_")[0] in ("inc", "dec", "swap"):
            data = [data[n % places] for n in range(LANES)]
        array = np.frombuffer(b"".join(x.to_bytes(width, "little") for x in stored), np.uint8).copy()
        offsets = np.array([n % places * width for n in range(LANES)])
        v = {0: OLD[0], 1: OLD[1], **_split(data, width, 4), **_address(array, space, offsets)}
        result = execute(text, arch=_arch(space, name), v=v, s=descriptor(array), buffers=[array], exec_mask=PARTIAL)
        assert not result.findings, result.findings
        current, seen = list(stored), [-1] * LANES
        for lane in range(LANES):
            if PARTIAL >> lane & 1:
                seen[lane] = current[lane % places]
                current[lane % places] = operation(current[lane % places], data[lane])
        assert [at(array, k * width, width) for k in range(places)] == current, (text, places)
        source = 4 if space == "buffer" else 0
        if returns and places == LANES:
            for lane in range(LANES):
                before = data[lane] if source else int(OLD[0][lane]) | int(OLD[1][lane]) << 32
                expected = seen[lane] if PARTIAL >> lane & 1 else before
                got = sum(int(result.v[source + k][lane]) << 32 * k for k in range(width // 4))
                assert got == expected & (M64 if width == 8 else M32), (text, lane)


COMPARE_SWAP = {
    register("global_atomic_cmpswap v0, v[8:9], v[4:5], off sc0" + WAIT): 4,
    register("global_atomic_cmpswap_x2 v[0:1], v[8:9], v[4:7], off sc0" + WAIT): 8,
    register("flat_atomic_cmpswap v0, v[8:9], v[4:5] sc0" + WAIT): 4,
    register("flat_atomic_cmpswap_x2 v[0:1], v[8:9], v[4:7] sc0" + WAIT): 8,
    register("buffer_atomic_cmpswap v[4:5], v8, s[8:11], 0 offen sc0" + WAIT): 4,
    register("buffer_atomic_cmpswap_x2 v[4:7], v8, s[8:11], 0 offen sc0" + WAIT): 8,
}


@pytest.mark.parametrize("text", COMPARE_SWAP)
def test_compare_and_swap(text: str) -> None:
    """The data's first part is the new value, its second what memory is compared with."""
    width = COMPARE_SWAP[text]
    stored = [(n * 0x1_0000_0001 + 3) & ((1 << 8 * width) - 1) for n in range(LANES)]
    new = [(n * 0x7_0000_0003 + 5) & ((1 << 8 * width) - 1) for n in range(LANES)]
    compare = [m if n % 3 else m ^ 1 << (8 * width - 1) for n, m in enumerate(stored)]
    array = np.frombuffer(b"".join(x.to_bytes(width, "little") for x in stored), np.uint8).copy()
    space = text.split("_")[0]
    v = {0: OLD[0], 1: OLD[1], **_split(new, width, 4), **_split(compare, width, 4 + width // 4)}
    v |= _address(array, space, np.arange(LANES) * width)
    result = execute(text, v=v, s=descriptor(array), buffers=[array])
    source = 4 if space == "buffer" else 0
    for lane in range(LANES):
        assert at(array, lane * width, width) == (new[lane] if lane % 3 else stored[lane]), (text, lane)
        assert sum(int(result.v[source + k][lane]) << 32 * k for k in range(width // 4)) == stored[lane], (text, lane)


ROUNDED = register("global_atomic_add_f32 v[8:9], v4, off" + WAIT)


def test_float_atomics_round_to_nearest() -> None:
    a = np.array(
        [0x3F800000, 0x3F800001, 0x4B7FFFFF, 0x7F7FFFFF, 0x3DCCCCCD, 0xBF800000, 0x7F800000, 0x80000000] * 8, np.uint32
    )
    b = np.array(
        [0x33800000, 0x33800000, 0x3F000000, 0x73800000, 0x3E4CCCCD, 0x3F800000, 0xFF800000, 0x80000000] * 8, np.uint32
    )
    array = a.copy()
    execute(ROUNDED, v={4: b, **_address(array, "global", np.arange(LANES) * 4)}, buffers=[array])
    for lane in range(LANES):
        expected = q.F32.encode(q.add(q.F32.decode(int(a[lane])), q.F32.decode(int(b[lane]))))
        assert same(int(array[lane]), expected, "f32"), (lane, hex(int(array[lane])), hex(expected))

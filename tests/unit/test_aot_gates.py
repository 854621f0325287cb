"""Resource gates: each with a kernel that passes, one that does not, and actual against required in its words."""

from __future__ import annotations

from typing import Any

import pytest

from ferryman.backends.artefacts import Gate
from ferryman.device_profiles import profile
from ferryman.porting.aot import gates

HALF = {"dots_half": 2, "dots_ieee": 0, "dots_tf32": 0}
NONE = {"dots_half": 0, "dots_ieee": 0, "dots_tf32": 0}
CUBIN = {
    "registers": 128,
    "spills": 0,
    "shared": 49_152,
    "threads": 256,
    "code_bytes": 20_000,
    "matrix": 32,
    "loads": 8,
    "wide_loads": 8,
    **HALF,
}
HSACO = {
    "registers": 256,
    "agprs": 0,
    "sgprs": 90,
    "vgpr_spills": 0,
    "sgpr_spills": 0,
    "scratch": 0,
    "wave": 64,
    "shared": 32_768,
    "threads": 256,
    "code_bytes": 20_000,
    "matrix": 32,
    "loads": 8,
    "wide_loads": 8,
    "buffer_loads": 8,
    **HALF,
}


def judged(name: str, used: dict[str, int], allowed: int = 0, aligned: bool = True) -> dict[str, Gate]:
    return {gate.name: gate for gate in gates.judge(used, profile(name), allowed, aligned)}


def test_a_good_kernel_passes_every_gate_of_its_vendor() -> None:
    nvidia, amd = judged("h200", CUBIN), judged("mi300x", HSACO)
    shared = {"registers", "shared", "threads", "occupancy", "matrix", "wide_loads", "code_bytes"}
    assert set(nvidia) == shared | {"spills"}
    assert set(amd) == shared | {"vgpr_spills", "sgpr_spills", "scratch", "buffer_loads"}
    for verdicts in (nvidia, amd):
        assert all(gate.passed for gate in verdicts.values())
        assert gates.failures(list(verdicts.values())) is None


@pytest.mark.parametrize(
    ("device", "change", "gate", "says"),
    [
        ("h200", {"registers": 256}, "registers", "256 a thread, required at most 255"),
        ("h200", {"shared": 232_449}, "shared", "232449 bytes a block, required at most 232448"),
        ("l4", {"shared": 131_072}, "shared", "131072 bytes a block, required at most 101376"),
        ("mi300x", {"shared": 65_537}, "shared", "65537 bytes a block, required at most 65536"),
        ("mi300x", {"threads": 2048}, "threads", "2048 a block, required at most 1024"),
        ("h200", {"spills": 8}, "spills", "8 bytes a thread, required at most 0"),
        ("mi300x", {"vgpr_spills": 3}, "vgpr_spills", "3 registers, required at most 0"),
        ("mi300x", {"sgpr_spills": 2}, "sgpr_spills", "2 registers, required at most 0"),
        ("mi300x", {"scratch": 16}, "scratch", "16 bytes a thread, required at most 0"),
        (
            "mi300x",
            {"registers": 300, "threads": 512},
            "occupancy",
            "0 of 32 waves a unit, required at least one block",
        ),
        ("h200", {"registers": 255, "threads": 512}, "occupancy", "0 of 64 waves a unit"),
        ("h200", {"matrix": 0}, "matrix", "0 instructions, required at least 1 for 2 products"),
        ("mi300x", {"matrix": 0, **NONE, "dots_ieee": 1}, "matrix", "required at least 1 for 1 products"),
        ("h200", {"wide_loads": 0}, "wide_loads", "0 of 8 loads, required some of 16 bytes a lane"),
        ("mi300x", {"buffer_loads": 0}, "buffer_loads", "0 of 8 loads, required some through buffers"),
        ("h200", {"code_bytes": 300_000}, "code_bytes", "300000 bytes, required at most 262144"),
    ],
)
def test_what_does_not_fit_fails_with_actual_against_required(
    device: str, change: dict[str, int], gate: str, says: str
) -> None:
    base: dict[str, int] = CUBIN if profile(device).vendor == "nvidia" else HSACO
    verdicts = judged(device, {**base, **change})
    failed = [name for name, g in verdicts.items() if not g.passed]
    assert failed[0] == gate and set(failed) <= {gate, "occupancy"}  # what exceeds a block leaves room for none
    failed_as, poor = gates.failures(list(verdicts.values())), gates.poor_form(list(verdicts.values()))
    # what is slow is right: dispatch may choose it where nothing better is there
    assert says in str(poor if gate in gates.FORM else failed_as)
    assert (failed_as is None) == (gate in gates.FORM)


def test_products_without_a_matrix_form_are_not_asked_for_one() -> None:
    """IEEE float32 runs on the vector units of NVIDIA and RDNA, and on CDNA's matrix units."""
    ieee = {**NONE, "dots_ieee": 3, "matrix": 0}
    assert "matrix" not in judged("h200", {**CUBIN, **ieee})
    assert "matrix" not in judged("rx7900xtx", {**HSACO, "wave": 32, "registers": 128, **ieee})
    assert not judged("mi355x", {**HSACO, **ieee})["matrix"].passed
    assert not judged("h200", {**CUBIN, **NONE, "dots_tf32": 1, "matrix": 0})["matrix"].passed
    assert "matrix" not in judged("h200", {**CUBIN, **NONE, "matrix": 0})  # no product at all: a norm


def test_what_its_author_allowed_passes() -> None:
    assert judged("h200", {**CUBIN, "spills": 112}, allowed=112)["spills"].passed
    assert not judged("h200", {**CUBIN, "spills": 113}, allowed=112)["spills"].passed
    amd = judged("rx7900xtx", {**HSACO, "vgpr_spills": 5, "scratch": 20}, allowed=5)
    assert amd["vgpr_spills"].passed and amd["scratch"].passed


def test_what_was_not_reported_is_not_judged() -> None:
    simt: dict[str, Any] = {"registers": 64, "shared": 64, "spill_stores": 4, "spill_loads": 4, "code_bytes": 900}
    verdicts = judged("h200", simt, allowed=0, aligned=False)
    assert set(verdicts) == {"registers", "shared", "spills", "code_bytes"} and not verdicts["spills"].passed
    assert "wide_loads" not in judged("h200", {**CUBIN, "wide_loads": 0}, aligned=False)
    assert "occupancy" not in judged("generic-rdna3", HSACO)  # its cards differ in registers


@pytest.mark.parametrize(
    ("device", "used", "waves"),
    [
        # CUDA occupancy calculator, sm_90: 65536 registers, 64 warps, 228 KiB
        ("h200", {"registers": 32, "threads": 256}, 64),
        ("h200", {"registers": 64, "threads": 256}, 32),
        ("h200", {"registers": 168, "threads": 384}, 12),
        ("h200", {"registers": 32, "threads": 256, "shared": 100_000}, 16),
        # 512 registers of a lane of each of four SIMDs, which hold eight waves each
        ("mi300x", {"registers": 64, "threads": 256}, 32),
        ("mi300x", {"registers": 128, "threads": 256}, 16),
        ("mi300x", {"registers": 129, "threads": 256}, 12),
        ("mi300x", {"registers": 512, "threads": 256}, 4),
        ("mi300x", {"registers": 64, "threads": 256, "shared": 32_768}, 8),
        ("mi300x", {"registers": 256, "threads": 512}, 8),
        ("mi300x", {"registers": 128, "threads": 64}, 16),
        # two SIMDs of sixteen waves; 1536 registers of a lane, by 24
        ("rx7900xtx", {"registers": 96, "threads": 128}, 32),
        ("rx7900xtx", {"registers": 256, "threads": 256}, 8),
    ],
)
def test_occupancy(device: str, used: dict[str, int], waves: int) -> None:
    occupancy = gates.waves(used, profile(device))
    assert occupancy is not None and occupancy[0] == waves

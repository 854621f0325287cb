"""Detection, from what drivers really report: names, units and memory of real machines."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch

from ferryman import device_profiles as dp
from ferryman.device_profiles import DeviceFacts, catalogue, floor_seconds, match, profile
from ferryman.errors import ProfileWarning, UnknownName

detection = importlib.import_module("ferryman.device_profiles.detect")

MIB = 2**20


def nvidia(name: str, arch: str, mib: int, units: int, l2_mib: int | None = None) -> DeviceFacts:
    return DeviceFacts("nvidia", name, arch, mib * MIB, units, l2_mib * MIB if l2_mib else None, 32)


def amd(name: str, arch: str, mib: int, units: int, wave: int = 64) -> DeviceFacts:
    return DeviceFacts("amd", name, arch, mib * MIB, units, None, wave)


# Memory and units as torch.cuda.get_device_properties prints them on real machines.
WHOLE = [
    (nvidia("NVIDIA H200", "sm_90", 143156, 132, 60), "h200"),
    (nvidia("NVIDIA H100 80GB HBM3", "sm_90", 81089, 132, 50), "h100-sxm"),
    (nvidia("NVIDIA A100-SXM4-80GB", "sm_80", 81920, 108, 40), "a100-sxm-80"),
    (nvidia("NVIDIA A100-SXM4-80GB", "sm_80", 81050, 108, 40), "a100-sxm-80"),
    (nvidia("NVIDIA L4", "sm_89", 22478, 58, 48), "l4"),
    (nvidia("NVIDIA GeForce RTX 4090", "sm_89", 24563, 128, 72), "rtx4090"),
    (nvidia("Orin", "sm_87", 62841, 16, 4), "orin-agx"),
    (amd("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 196592, 304), "mi300x"),
    (amd("AMD Instinct MI300X VF", "gfx942:sramecc+:xnack-", 196592, 304), "mi300x"),
    (amd("AMD Instinct MI355X", "gfx950:sramecc+:xnack-", 294896, 256), "mi355x"),
    (amd("Radeon RX 7900 XTX", "gfx1100", 24560, 48, 32), "rx7900xtx"),
    (amd("AMD Radeon RX 7900 XTX", "gfx1100", 24560, 96, 32), "rx7900xtx"),
]


@pytest.mark.parametrize(("facts", "name"), WHOLE, ids=[f"{n}-{i}" for i, (_, n) in enumerate(WHOLE)])
def test_a_whole_card_gets_its_own_profile(facts: DeviceFacts, name: str) -> None:
    assert match(facts, catalogue()) is catalogue()[name]


UNKNOWN = [
    (nvidia("NVIDIA B300 SXM6 AC", "sm_103", 270000, 148), "generic-blackwell"),
    (nvidia("NVIDIA L40S", "sm_89", 45488, 142), "generic-ada"),
    (nvidia("NVIDIA GeForce RTX 4090 D", "sm_89", 24563, 114), "generic-ada"),
    (nvidia("NVIDIA GeForce RTX 4090 Laptop GPU", "sm_89", 16375, 76), "generic-ada"),
    (nvidia("NVIDIA H100 PCIe", "sm_90", 81008, 114), "generic-hopper"),
    (nvidia("NVIDIA H200 NVL", "sm_90", 143156, 132), "generic-hopper"),
    (nvidia("NVIDIA H20", "sm_90", 97285, 78), "generic-hopper"),
    (nvidia("NVIDIA A100-PCIE-40GB", "sm_80", 40326, 108), "generic-ampere"),
    (nvidia("NVIDIA GeForce RTX 3090", "sm_86", 24259, 82), "generic-sm_86"),
    (nvidia("Orin", "sm_87", 30622, 14), "generic-sm_87"),  # AGX Orin 32
    (nvidia("Orin", "sm_87", 15656, 8), "generic-sm_87"),  # Orin NX 16
    (nvidia("Orin", "sm_87", 54793, 8), "generic-sm_87"),  # AGX Orin 64 in a mode with half its SMs off
    (nvidia("NVIDIA Thor", "sm_110", 125771, 20), "generic-sm_110"),
    (nvidia("NVIDIA GeForce RTX 5090", "sm_120", 32109, 170), "generic-sm_120"),
    (nvidia("Tesla T4", "sm_75", 14930, 40), "generic-nvidia"),
    (nvidia("NVIDIA X999", "sm_999", 99999, 999), "generic-nvidia"),
    (amd("AMD Instinct MI325X", "gfx942:sramecc+:xnack-", 262000, 304), "generic-cdna3"),
    (amd("AMD Radeon Graphics", "gfx942:sramecc+:xnack-", 196592, 304), "generic-cdna3"),
    (amd("AMD Instinct MI210", "gfx90a:sramecc+:xnack-", 65520, 104), "generic-cdna2"),
    (amd("AMD Instinct MI350X", "gfx950", 294896, 256), "generic-cdna4"),
    (amd("AMD Radeon RX 7600", "gfx1102", 8176, 16, 32), "generic-rdna3"),
    (amd("AMD Radeon RX 9070 XT", "gfx1201", 16304, 32, 32), "generic-rdna4"),
    (amd("AMD Radeon VII", "gfx906:sramecc+:xnack-", 16368, 60), "generic-amd"),
    (amd("AMD Radeon RX 6800", "gfx1030", 16368, 30, 32), "generic-amd"),
    (amd("somebody's gfx90", "gfx90", 1024, 8), "generic-amd"),  # a prefix of gfx90a is not gfx90a
    (nvidia("NVIDIA H200", "sm_100", 143156, 132), "generic-blackwell"),  # the name alone is not enough
    (amd("NVIDIA H200", "gfx942", 143156, 132), "generic-cdna3"),
]


@pytest.mark.parametrize(
    ("facts", "name"), UNKNOWN, ids=[re.sub(r"\W+", "-", f"{f.name}-{f.units}") for f, _ in UNKNOWN]
)
def test_an_unknown_device_gets_its_family_and_only_its_own_numbers(facts: DeviceFacts, name: str) -> None:
    p = match(facts, catalogue())
    assert (p.name, p.generic) == (name, True)
    assert p.arch == facts.arch.split(":")[0]
    assert (p.units, p.memory_bytes, p.wave) == (facts.units, facts.memory_bytes, facts.wave)
    assert p.bandwidth is None and p.copy_bandwidth is None and p.clock_hz is None
    assert not p.peaks and not p.ceilings
    assert facts.name in p.title and facts.name in p.notes[0] and name in p.notes[0]
    assert p.provenance["units"].source == "reported by the driver"


def test_a_mig_slice_is_derived_and_says_so() -> None:
    a100 = profile("a100-sxm-80")
    p = match(nvidia("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "sm_80", 40192, 42, 20), catalogue())
    assert (p.name, p.partition, p.arch) == ("a100-sxm-80-mig-3g.40gb", "mig-3g.40gb", "sm_80")
    assert (p.units, p.memory_bytes, p.l2_bytes) == (42, 40192 * MIB, 20 * MIB)
    assert p.bandwidth == pytest.approx(2.039e12 / 2)  # 4 of the 8 memory slices
    assert p.peaks["bf16"].rate == pytest.approx(312e12 * 42 / 108)
    assert p.provenance["memory.bandwidth"].kind == p.provenance["peaks.bf16"].kind == "unverified"
    assert (p.shared_memory, p.wave, p.features) == (a100.shared_memory, 32, a100.features)
    assert p.power_w is None and not p.generic
    assert "derived" in p.notes[0] and "42 units" in p.notes[0]
    assert p.identity_key() != a100.identity_key()


@pytest.mark.parametrize(
    ("facts", "partition", "bandwidth"),
    [
        (nvidia("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "sm_80", 9728, 14), "mig-1g.10gb", 2.039e12 / 8),
        (nvidia("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", "sm_80", 9728, 14), "mig-1g.10gb.me", 2.039e12 / 8),
        (nvidia("NVIDIA H200 MIG 3g.71gb", "sm_90", 71000, 60), "mig-3g.71gb", 2.4e12),
        (nvidia("NVIDIA H100 80GB HBM3 MIG 7g.80gb", "sm_90", 81000, 132), "mig-7g.80gb", 3.35e12),
    ],
)
def test_mig_bandwidth_goes_by_eighths(facts: DeviceFacts, partition: str, bandwidth: float) -> None:
    p = match(facts, catalogue())
    assert p.partition == partition and p.bandwidth == pytest.approx(bandwidth)
    assert p.copy_bandwidth is None and not p.ceilings  # measured on the whole card
    assert not any(path.startswith("ceilings.") for path in p.provenance)


def test_a_mig_slice_of_an_unknown_card_is_generic_and_named() -> None:
    p = match(nvidia("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "sm_80", 4864, 14), catalogue())
    assert (p.name, p.partition, p.units) == ("generic-ampere", "mig-1g.5gb", 14)


@pytest.mark.parametrize(
    ("units", "mib", "partition", "xcds"),
    [(38, 49148, "cpx", 1), (38, 196592, "cpx", 1), (152, 98296, "dpx", 4)],
)
def test_an_amd_partition_is_derived(units: int, mib: int, partition: str, xcds: int) -> None:
    p = match(amd("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", mib, units), catalogue())
    assert (p.name, p.partition, p.units, p.xcds) == (f"mi300x-{partition}", partition, units, xcds)
    assert p.memory_bytes == mib * MIB
    assert p.bandwidth is None and "memory.bandwidth" not in p.provenance  # shared with its neighbours
    assert p.l2_bytes == 4 * MIB * xcds and p.l3_bytes is None
    assert p.peaks["f16"].rate == pytest.approx(1307e12 * units / 304)
    assert floor_seconds(p, 1e12, 1e9, "f16").bound == "unknown"


def test_other_deviations_are_derived_too() -> None:
    p = match(nvidia("NVIDIA H200", "sm_90", 71000, 132), catalogue())  # a virtual GPU's memory
    assert (p.name, p.units, p.bandwidth) == ("h200-69gib", 132, None)
    p = match(nvidia("NVIDIA H200", "sm_90", 143156, 100), catalogue())
    assert p.name == "h200-100u" and p.peaks["bf16"].rate == pytest.approx(989e12 * 100 / 132)


def test_a_stored_partition_wins_over_a_derived_one(tmp_path: Path) -> None:
    file = tmp_path / "mi300x-cpx.yaml"
    file.write_text(
        "schema: 1\nname: mi300x-cpx\ntitle: one XCD\nextends: mi300x\npartition: cpx\nceilings: null\n"
        "identity: {names: [AMD Instinct MI300X]}\nsources: {here: measured here}\n"
        "units: {value: 38, kind: measured, source: here}\nxcds: {value: 1, kind: measured, source: here}\n"
        "memory:\n  size: {value: 48 GiB, kind: measured, source: here}\n"
        "  bandwidth: {value: 600 GB/s, kind: measured, source: here}\n"
    )
    stored = dp.load(file)
    assert stored.partition == "cpx" and not stored.ceilings and "ceilings.f16" not in stored.provenance
    known = [*catalogue().values(), stored]
    assert match(amd("AMD Instinct MI300X", "gfx942", 49148, 38), known) is stored
    assert match(amd("AMD Instinct MI300X", "gfx942", 196592, 304), known).name == "mi300x"


def test_no_generic_profile_for_a_vendor_is_an_error() -> None:
    with pytest.raises(UnknownName, match="sm_90"):
        match(nvidia("NVIDIA X", "sm_90", 1000, 1), [profile("cpu")])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_detected", {})
    monkeypatch.setattr(detection, "_warned", set())


@pytest.mark.usefixtures("fresh")
def test_the_cpu_is_detected_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = dp.detect("cpu")
    assert (p.name, p.vendor, p.arch) == ("cpu", "cpu", "cpu")
    assert p.units is not None and p.units >= 1 and p.memory_bytes is not None and p.memory_bytes > 2**28
    assert dp.detect(torch.device("cpu")) is p is dp.detect(torch.empty(0).device)


@pytest.mark.usefixtures("fresh")
def test_devices_are_asked_once_and_an_unknown_one_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    current = 1

    def facts(index: int) -> DeviceFacts:
        asked.append(index)
        return WHOLE[0][0] if index == 0 else nvidia("NVIDIA B300", "sm_103", 270000, 148)

    monkeypatch.setattr(detection, "device_facts", facts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)

    assert dp.detect("cuda:0").name == "h200"
    with pytest.warns(ProfileWarning, match="B300.*generic-blackwell") as caught:
        assert dp.detect(None).name == "generic-blackwell"  # the current device, 1
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dp.detect(torch.device("cuda:2")).name == "generic-blackwell"  # the same model: no second warning
        assert dp.detect(torch.device("cuda", 1)) is dp.detect("cuda")
        current = 0
        assert dp.detect("cuda").name == "h200"  # "cuda" follows the current device
    assert asked == [0, 1, 2]


@pytest.mark.usefixtures("fresh")
def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda", "cuda:7", torch.device("cuda"), torch.device("cuda:7")):
        with pytest.raises(UnknownName, match="nearest: cpu"):
            dp.detect(device)
    with pytest.raises(UnknownName, match="unknown device 'toaster'"):
        dp.detect("toaster")


@pytest.mark.usefixtures("fresh")
def test_a_device_type_without_kernels_still_gets_a_profile() -> None:
    with pytest.warns(ProfileWarning, match="mps"):
        p = dp.detect("mps")
    assert (p.name, p.vendor, p.arch, p.preference("rms_norm")) == (
        "generic-other",
        "other",
        "mps",
        ("torch",),
    )


class Properties:
    """The attributes of torch's _CudaDeviceProperties that detection reads."""

    def __init__(self, **items: object) -> None:
        self.__dict__.update(items)


def test_device_facts_on_rocm_read_the_gcn_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = Properties(
        name="AMD Instinct MI300X",
        major=9,
        minor=4,
        gcnArchName="gfx942:sramecc+:xnack-",
        warp_size=64,
        total_memory=196592 * MIB,
        multi_processor_count=304,
        L2_cache_size=4 * MIB,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    facts = dp.device_facts(0)
    assert (facts.vendor, facts.arch, facts.l2_bytes) == ("amd", "gfx942:sramecc+:xnack-", None)
    p = match(facts, catalogue())
    assert p.name == "mi300x" and p.l2_bytes == 32 * MIB


def test_device_facts_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = Properties(
        name="NVIDIA H20",
        major=9,
        minor=0,
        warp_size=32,
        shared_memory_per_block_optin=232448,
        total_memory=97285 * MIB,
        multi_processor_count=78,
        L2_cache_size=60 * MIB,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    facts = dp.device_facts(0)
    assert (facts.vendor, facts.arch, facts.shared_memory) == ("nvidia", "sm_90", 232448)
    p = match(facts, catalogue())
    assert (p.name, p.units, p.l2_bytes, p.shared_memory) == ("generic-hopper", 78, 60 * MIB, 232448)


def test_resolve_takes_what_a_user_may_say() -> None:
    h200 = profile("h200")
    assert dp.resolve(h200) is h200 is dp.resolve("H200")
    assert dp.resolve("cpu").units is not None  # the device that is here, not the bare profile
    with pytest.raises(UnknownName, match="device profile"):
        dp.resolve("h2000x")

"""Which profile describes the device that is here.

``match`` is pure, so it is tested without hardware: a known name with the units and memory of the whole card
gives the card's profile; a known name with other units or memory (MIG, CPX) gives a derived profile that says
so; anything else gives the generic profile of its family, completed with what the driver reports and never
with another card's numbers. Archs are compared as whole strings: on ROCm the integer capability means nothing
(gfx942 reports 9.4, and CuPy gives "90" for both gfx906 and gfx908), and "gfx90a" must not be taken for
"gfx90".
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ferryman.device_profiles.loading import catalogue
from ferryman.device_profiles.loading import profile as _by_name
from ferryman.device_profiles.schema import FrozenMap, Peak, Profile, Provenance
from ferryman.errors import ProfileWarning, UnknownName

if TYPE_CHECKING:
    import torch

# A driver's "total memory" against the datasheet's size: 192 GB of HBM are 192 GiB (1.074), a 23.6 GiB L4 has
# lost some to ECC (0.985), an AGX Orin keeps 4% for itself.
_MEMORY_BELOW, _MEMORY_ABOVE = 0.85, 1.10
_DRIVER = Provenance("measured", "reported by the driver")
_MIG = re.compile(r"(.*\S)\s+MIG\s+(\S+)", re.IGNORECASE)
# AMD's compute partition modes, by how many devices one card appears as; every XCD by itself is CPX.
_PARTITIONS = {2: "dpx", 3: "tpx", 4: "qpx"}


@dataclass(frozen=True)
class DeviceFacts:
    """What a driver says about a device. ``arch``: "sm_90", "gfx942:sramecc+:xnack-", "cpu"."""

    vendor: str
    name: str
    arch: str
    memory_bytes: int | None = None
    units: int | None = None
    l2_bytes: int | None = None
    wave: int | None = None
    shared_memory: int | None = None


def match(facts: DeviceFacts, profiles: Mapping[str, Profile] | Iterable[Profile]) -> Profile:
    """The profile for a device with these facts. Pure: no device is touched, nothing is warned."""
    known: list[Profile] = list(profiles.values() if isinstance(profiles, Mapping) else profiles)
    facts = replace(facts, arch=facts.arch.split(":")[0])
    mig = _MIG.fullmatch(facts.name) if facts.vendor == "nvidia" else None
    name = _fold(mig.group(1) if mig else facts.name)
    named = [
        p
        for p in known
        if not p.generic
        and p.vendor == facts.vendor
        and p.arch == facts.arch
        and name in {_fold(n) for n in p.identity.names}
    ]
    # whole cards and default power modes first: they win where a stored partition or mode fits too
    named.sort(key=lambda p: (p.partition is not None, p.power_mode is not None, p.name))
    if mig is None:
        for candidate in named:
            if _units_fit(candidate, facts) and _memory_fits(candidate, facts):
                return candidate
    for candidate in named:
        if candidate.partition is None and not candidate.identity.exact:
            return _derive(candidate, facts, mig.group(2) if mig else None)
    return _complete(_family(facts, known), facts, mig.group(2) if mig else None)


def detect(device: torch.device | str | None = None) -> Profile:
    """The profile of a device that is here: a torch device, "cuda:1", or the current accelerator, else CPU.

    A dictionary look-up after the first call. Warns once (ProfileWarning) where only a generic one fits.
    """
    profile = _detected.get(device)
    if profile is not None:
        return profile
    if device is None or isinstance(device, str):
        device = _parse_device(device)
    if device.type == "cuda" and device.index is None:
        device = _current()
    return _detected.get(device) or _detect(device)


def resolve(spec: Profile | torch.device | str | None = None) -> Profile:
    """A profile from what a user may name: a profile, its name ("mi300x"), a device here ("cuda:1")."""
    if isinstance(spec, Profile):
        return spec
    if isinstance(spec, str) and not re.fullmatch(r"(cuda|cpu|mps|xpu)(:\d+)?", spec.strip().lower()):
        return _by_name(spec)
    return detect(spec)


def device_facts(index: int) -> DeviceFacts:
    """What torch reports of CUDA or ROCm device ``index``."""
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    arch = str(properties.gcnArchName) if amd else f"sm_{properties.major}{properties.minor}"
    return DeviceFacts(
        vendor="amd" if amd else "nvidia",
        name=str(properties.name),
        arch=arch,
        memory_bytes=int(properties.total_memory),
        units=int(properties.multi_processor_count),
        # on ROCm this is one XCD's share (4 MB on an MI300X): the profile knows better
        l2_bytes=None if amd else getattr(properties, "L2_cache_size", None),
        wave=getattr(properties, "warp_size", None),
        shared_memory=None if amd else getattr(properties, "shared_memory_per_block_optin", None),
    )


_detected: dict[object, Profile] = {}  # by torch.device; "cuda" without an index is never a key
_warned: set[tuple[str, str, str]] = set()
_lock = threading.Lock()


def _detect(device: torch.device) -> Profile:
    profile: Profile | None
    with _lock:
        profile = _detected.get(device)
        if profile is not None:
            return profile
        if device.type == "cuda":
            if device.index >= _device_count():
                raise UnknownName("device", str(device), _present())
            facts = device_facts(device.index)
        elif device.type == "cpu":
            facts = _cpu_facts()
        else:
            facts = DeviceFacts("other", device.type, device.type)
        profile = _detected[device] = match(facts, catalogue())
        key = (facts.vendor, facts.name, facts.arch)
        warn = profile.generic and facts.vendor != "cpu" and key not in _warned
        _warned.add(key)
    if warn:  # after the lock and the cache: a filter may turn the warning into an exception
        message = f"{profile.notes[0]} `ferryman devices` lists the catalogue."
        warnings.warn(message, ProfileWarning, stacklevel=3)
    return profile


def _parse_device(text: str | None) -> torch.device:
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise UnknownName("device", text, _present()) from error
    return device


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()


def _present() -> list[str]:
    return ["cpu", *(f"cuda:{i}" for i in range(_device_count()))]


def _current() -> torch.device:
    import torch

    # without a device current_device raises whatever the build raises; index 0 gets _detect's own error
    return torch.device("cuda", torch.cuda.current_device() if _device_count() else 0)


def _cpu_facts() -> DeviceFacts:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only: this process's share of the host
    units = len(affinity(0)) if affinity is not None else os.cpu_count()
    memory = None
    if {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(getattr(os, "sysconf_names", ())):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceFacts("cpu", "CPU", "cpu", memory, units)


def _fold(name: str) -> str:
    return " ".join(name.lower().split())


def _units_fit(profile: Profile, facts: DeviceFacts) -> bool:
    if facts.units is None or profile.units is None:
        return True
    return facts.units in (profile.units, profile.identity.units)


def _memory_fits(profile: Profile, facts: DeviceFacts) -> bool:
    if facts.memory_bytes is None:
        return True
    bounds = profile.identity.memory
    if bounds is None:
        if profile.memory_bytes is None:
            return True
        bounds = (int(profile.memory_bytes * _MEMORY_BELOW), int(profile.memory_bytes * _MEMORY_ABOVE))
    return bounds[0] <= facts.memory_bytes <= bounds[1]


def _family(facts: DeviceFacts, known: Iterable[Profile]) -> Profile:
    generics = [p for p in known if p.generic and p.vendor == facts.vendor]
    for wanted in (facts.arch, "*"):
        for candidate in sorted(generics, key=lambda p: p.name):
            if wanted in candidate.identity.arches:
                return candidate
    raise UnknownName("device", f"{facts.vendor} {facts.name} ({facts.arch})", [p.name for p in generics])


def _complete(generic: Profile, facts: DeviceFacts, mig: str | None) -> Profile:
    """A generic profile with what the driver itself reported: those numbers are this device's own."""
    reported = {
        "units": facts.units,
        "memory_bytes": facts.memory_bytes,
        "l2_bytes": facts.l2_bytes or generic.l2_bytes,
        "wave": facts.wave or generic.wave,
        "shared_memory": facts.shared_memory or generic.shared_memory,
    }
    paths = {
        "units": "units",
        "memory_bytes": "memory.size",
        "l2_bytes": "caches.l2",
        "wave": "wave",
        "shared_memory": "limits.shared_memory_per_block",
    }
    provenance = dict(generic.provenance)
    provenance |= {path: _DRIVER for field, path in paths.items() if getattr(facts, field)}
    note = (
        f"{facts.name} ({facts.arch}) is not in the catalogue: the generic profile {generic.name} stands in, "
        "without clocks, bandwidth or peaks."
    )
    return replace(
        generic,
        **reported,  # type: ignore[arg-type]  # each value has its field's type
        arch=facts.arch,
        title=f"{facts.name} ({generic.title})" if facts.vendor != "cpu" else generic.title,
        partition=_label(mig) if mig else None,
        provenance=FrozenMap(provenance),
        notes=(note,) if facts.vendor != "cpu" else (),
    )


def _derive(card: Profile, facts: DeviceFacts, mig: str | None) -> Profile:
    """A part of a known card. Peaks scale with the units; nothing measured on the whole card is kept."""
    units = facts.units if facts.units is not None else card.units
    memory = facts.memory_bytes if facts.memory_bytes is not None else card.memory_bytes
    share = units / card.units if units and card.units else None
    label = _label(mig) if mig else _partition(card, facts)
    scaled = Provenance("unverified", f"{card.name}, scaled by {units} of {card.units} units")
    dropped = ("ceilings.", "caches.l2", "caches.l3", "power", "memory.bandwidth")
    provenance = {path: where for path, where in card.provenance.items() if not path.startswith(dropped)}
    provenance |= {"units": _DRIVER, "memory.size": _DRIVER}
    peaks = {d: Peak(peak.rate * share, peak.accumulate) for d, peak in card.peaks.items()} if share else {}
    provenance |= {f"peaks.{d}": scaled for d in peaks}

    bandwidth = l2 = None
    if mig and card.bandwidth and card.memory_bytes and memory:
        # MIG divides bandwidth and L2 with the memory, in eighths; a CPX partition shares them with its
        # neighbours
        eighths = max(1, min(8, round(8 * memory / card.memory_bytes)))
        bandwidth = card.bandwidth * eighths / 8
        slices = Provenance("unverified", f"{card.name}, {eighths} of 8 MIG memory slices")
        provenance["memory.bandwidth"] = slices
    if facts.l2_bytes:
        l2 = facts.l2_bytes
        provenance["caches.l2"] = _DRIVER
    elif card.xcds and share and card.l2_bytes:
        l2 = round(card.l2_bytes * share)  # each XCD has its own L2
        provenance["caches.l2"] = scaled
    note = (
        f"{facts.name} has {units} units and {memory} bytes, the whole {card.name} {card.units} and "
        f"{card.memory_bytes}: a derived profile ({label}); peaks are scaled, "
        f"bandwidth is {'scaled' if bandwidth else 'unknown'}, "
        "ceilings measured on the whole card are left out."
    )
    return replace(
        card,
        name=f"{card.name}-{label}",
        title=f"{card.title}, {label}",
        partition=label,
        aliases=(),
        units=units,
        xcds=max(1, round(card.xcds * share)) if card.xcds and share else card.xcds,
        memory_bytes=memory,
        power_w=None,
        bandwidth=bandwidth,
        copy_bandwidth=None,
        l2_bytes=l2,
        l3_bytes=None,
        peaks=FrozenMap(peaks),
        ceilings=FrozenMap(),
        provenance=FrozenMap(provenance),
        notes=(note,),
    )


def _label(mig: str) -> str:
    # "1g.10gb+me" is not an identifier
    return "mig-" + re.sub(r"[^a-z0-9.]+", ".", mig.lower()).strip(".")


def _partition(card: Profile, facts: DeviceFacts) -> str:
    if card.xcds and card.units and facts.units and card.units % facts.units == 0:
        parts = card.units // facts.units
        if parts == card.xcds:
            return "cpx"
        if parts in _PARTITIONS:
            return _PARTITIONS[parts]
    units = f"{facts.units}u" if not _units_fit(card, facts) else ""
    memory = f"{round((facts.memory_bytes or 0) / 2**30)}gib" if not _memory_fits(card, facts) else ""
    return "-".join(part for part in (units, memory) if part)

"""Where a kernel runs: what each device offers, as data (``data/*.yaml``), and which device is here."""

from __future__ import annotations

from ferryman.device_profiles.detect import DeviceFacts, detect, device_facts, match, resolve
from ferryman.device_profiles.loading import catalogue, load, names, profile
from ferryman.device_profiles.roofline import Roofline, efficiency, floor_seconds
from ferryman.device_profiles.schema import Identity, Peak, Profile, Provenance, dtype_key

__all__ = [
    "DeviceFacts",
    "Identity",
    "Peak",
    "Profile",
    "Provenance",
    "Roofline",
    "catalogue",
    "detect",
    "device_facts",
    "dtype_key",
    "efficiency",
    "floor_seconds",
    "load",
    "match",
    "names",
    "profile",
    "resolve",
]

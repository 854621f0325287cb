"""Which device a test runs on, and whether it is the device that the test requires."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch

from ferryman import settings
from ferryman.device_profiles import Profile, catalogue, detect
from ferryman.device_profiles.schema import FEATURES, VENDORS
from ferryman.errors import ArgumentError, UnknownName


def default_device(requested: str | None = None) -> torch.device:
    """The device that tests run on: the requested one, FERRYMAN_TEST_DEVICE, the accelerator, the CPU, in this order.

    Raises UnknownName for a device that is not here.
    """
    text = requested or settings.get("test_device") or ("cuda" if torch.cuda.is_available() else "cpu")
    detect(text)
    device = torch.device(text)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def unmet(profile: Profile, **required: Any) -> str | None:
    """What a device lacks, actual against required; None where it has everything.

    vendor: "nvidia", "amd", "cpu"; arch: "sm_90", "gfx942", or a pattern such as "gfx9*"; feature: a profile's, such as
    "wgmma". Each may be several: any vendor, any arch, every feature. Raises UnknownName and ArgumentError: a test with
    a misspelt requirement would never run anywhere.
    """
    for name in required:
        if name not in ("vendor", "arch", "feature"):
            raise UnknownName("requirement", name, ("vendor", "arch", "feature"))
    if not required:
        raise ArgumentError("requires", "arguments", "none", "vendor=, arch= or feature=")
    vendors, arches, features = (_several(required, name) for name in ("vendor", "arch", "feature"))
    for vendor in vendors:
        if vendor not in VENDORS:
            raise UnknownName("vendor", vendor, VENDORS)
    known = {p.arch for p in catalogue().values()} | {profile.arch}
    known |= {a for p in catalogue().values() for a in p.identity.arches if "*" not in a}
    for arch in arches:
        if not fnmatch.filter(known, arch):
            raise UnknownName("arch", arch, known)
    for feature in features:
        if feature not in FEATURES:
            raise UnknownName("feature", feature, FEATURES)
    lacking = []
    if vendors and profile.vendor not in vendors:
        lacking.append(f"vendor is {profile.vendor}; required: {' or '.join(vendors)}")
    if arches and not any(fnmatch.fnmatchcase(profile.arch, a) for a in arches):
        lacking.append(f"arch is {profile.arch}; required: {' or '.join(arches)}")
    missing = [f for f in features if f not in profile.features]
    if missing:
        have = ", ".join(sorted(profile.features)) or "none"
        lacking.append(f"features are {have}; required: {', '.join(features)}")
    return f"{profile.title}: {'; '.join(lacking)}" if lacking else None


def _several(required: dict[str, Any], name: str) -> tuple[str, ...]:
    value = required.get(name, ())
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(v, str) for v in names) or (name in required and not names):
        raise ArgumentError("requires", name, repr(value), "a name, or several names")
    return names

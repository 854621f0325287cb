"""For which devices to compile: profiles and arches by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from ferryman.backends.base import Target
from ferryman.device_profiles import Profile, catalogue, profile
from ferryman.dispatch import registry
from ferryman.dispatch.select import target_of
from ferryman.errors import ArgumentError

ALL = "all"
BACKENDS = ("triton", "cuda", "hip")
# Arches that "all" covers beside the devices of the catalogue.
_ARCHES = ("gfx90a", "sm_87", "sm_89", "sm_100")
_ARCH = re.compile(r"sm_\d{2,3}|gfx[0-9a-f]{3,4}")
# A family's profile has no number of units, by which launchers choose tiles: it is compiled for a small, a middling and
# a large device of its family.
_UNITS = (16, 72, 160)


def profiles_for(names: Iterable[str]) -> list[Profile]:
    """Profiles by name or alias, generic ones by arch ("gfx90a", "sm_100"), or "all" of them.

    Raises UnknownName with the nearest names; ArgumentError for no name, or a device that no kernel of ours serves.
    """
    words = [word.strip() for text in names for word in text.split(",")]
    if not words or not all(words):
        raise ArgumentError("compile", "--target", repr(",".join(words)), f"names of profiles, arches, or {ALL!r}")
    profiles: dict[str, Profile] = {}
    for word in words:
        for known in _everything() if word.lower() == ALL else [_by_arch(word) or profile(word)]:
            if not backends_of(known):
                raise ArgumentError(
                    "compile", "--target", word, "an NVIDIA or AMD device; others have nothing to compile"
                )
            profiles.setdefault(known.name, known)
    return list(profiles.values())


def backends_of(known: Profile) -> list[str]:
    """The backends whose kernels can be compiled for a device."""
    return [name for name in BACKENDS if known.vendor in registry.backends()[name].vendors - {"cpu"}]


def launch_targets(known: Profile) -> list[Target]:
    """What launchers are told of the device; for a family's profile of several sizes of device."""
    target = target_of(known)
    if known.units is not None:
        return [target]
    return [dataclasses.replace(target, units=units) for units in _UNITS]


def _everything() -> list[Profile]:
    cards = [p for p in catalogue().values() if not p.generic and p.vendor in ("nvidia", "amd")]
    here = {p.arch for p in cards}
    return [*cards, *(p for arch in _ARCHES if arch not in here and (p := _by_arch(arch)) is not None)]


def _by_arch(word: str) -> Profile | None:
    """The family's profile, for exactly this arch; None where the word is no arch. The name says both."""
    arch = word.lower()
    if _ARCH.fullmatch(arch) is None:
        return None
    for known in catalogue().values():
        if known.generic and arch in known.identity.arches:
            same = known.arch == arch
            return known if same else dataclasses.replace(known, name=f"{known.name}.{arch}", arch=arch)
    return None

"""The least time that a device can need for some work, from its profile.

``seconds`` uses what well-tuned programs reached (``ceilings``, ``copy_bandwidth``) where the profile has it,
else the datasheet's peak; ``peak_seconds`` uses datasheet peaks only. Being a little faster than the first
happens (a short burst, data left in L2); being faster than the second means that the measurement is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.device_profiles.schema import Profile, dtype_key


@dataclass(frozen=True)
class Roofline:
    """Where the profile lacks a number ``seconds`` is None, ``bound`` "unknown", and ``source`` names it."""

    seconds: float | None
    bound: str  # "memory", "compute" or "unknown"
    source: str
    peak_seconds: float | None = None


def floor_seconds(profile: Profile, flops: float, bytes: float, dtype: object) -> Roofline:
    """The floor for ``flops`` operations of ``dtype`` and ``bytes`` moved (minimal bytes, never achieved
    traffic)."""
    if flops < 0 or bytes < 0:
        raise ValueError(f"flops and bytes must not be negative, got {flops} and {bytes}")
    key = dtype_key(dtype)
    parts: list[tuple[float, str, str]] = []  # (seconds, bound, source); at equal time the first names the bound
    peaks: list[float | None] = []
    missing = []
    memory = (profile.copy_bandwidth, "ceilings.copy", profile.bandwidth, "memory.bandwidth")
    compute = (profile.ceilings.get(key), f"ceilings.{key}", _peak(profile, key), f"peaks.{key}")
    for amount, bound, (reached, reached_path, peak, peak_path) in (
        (bytes, "memory", memory),
        (flops, "compute", compute),
    ):
        if amount == 0:
            continue
        rate, path = (reached, reached_path) if reached is not None else (peak, peak_path)
        if rate is None:
            missing.append(path)
            continue
        parts.append((amount / rate, bound, _cite(profile, path)))
        peaks.append(amount / peak if peak is not None else None)
    if missing:
        return Roofline(None, "unknown", f"{profile.name} has no {' and no '.join(missing)}")
    if not parts:
        return Roofline(0.0, "memory", "no work", 0.0)
    seconds, bound, source = max(parts, key=lambda part: part[0])
    known = [p for p in peaks if p is not None]
    return Roofline(seconds, bound, source, max(known) if len(known) == len(peaks) else None)


def efficiency(seconds: float, profile: Profile, flops: float, bytes: float, dtype: object) -> float | None:
    """Floor over measured time: 1.0 is at the ceiling. None where the floor is unknown."""
    if not seconds > 0:
        raise ValueError(f"seconds must be more than zero, got {seconds}")
    floor = floor_seconds(profile, flops, bytes, dtype).seconds
    return None if floor is None else floor / seconds


def _peak(profile: Profile, key: str) -> float | None:
    peak = profile.peaks.get(key)
    return None if peak is None else peak.rate


def _cite(profile: Profile, path: str) -> str:
    origin = profile.provenance.get(path)
    return path if origin is None else f"{path} ({origin.kind}: {origin.source})"

"""Simulated global memory: the tensors' own memory, bounds-checked, with a shadow that finds data races."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ferryman.backends.simulator.assembly import Instruction
from ferryman.backends.simulator.machine import Machine
from ferryman.backends.simulator.numerics import Array
from ferryman.errors import SimulationError

_LOG_BYTES = 256 << 20
_WAVE, _EPOCH = np.int64(0xFF), np.int64(0xFFFFFF00)
_ATOMIC = np.int64(-1)


class Region(NamedTuple):
    """An allocation that a kernel may touch: addresses [start, end)."""

    start: int
    end: int
    name: str
    writable: bool = True


@dataclass
class _Read:
    """One load, kept until it is known who wrote what it read."""

    region: int
    offsets: Array
    size: int
    stamps: Array
    active: Array | None
    instruction: Instruction


@dataclass
class Memory:
    """Regions of this process's own memory. ``granule``: bytes that the race shadow tells apart, the smallest access of
    the program. Everything outside the regions is out of bounds, and is not touched."""

    regions: list[Region]
    granule: int = 4
    base: int = 0
    _writers: dict[int, Array] = field(default_factory=dict)
    _reads: list[_Read] = field(default_factory=list)
    _kept: int = 0

    def __init__(self, regions: Iterable[Region], granule: int = 4) -> None:
        self.regions = sorted(r for r in regions if r.end > r.start)
        for one, other in zip(self.regions, self.regions[1:], strict=False):
            if other.start < one.end:
                raise SimulationError(f"memory regions overlap: {one.name} and {other.name}")
        if not self.regions:
            self._nothing = np.zeros(16, np.uint8)
            self.regions = [Region(self._nothing.ctypes.data, self._nothing.ctypes.data + 16, "nothing", False)]
        self.granule = granule
        self.base = self.regions[0].start // 64 * 64
        size = -(-(self.regions[-1].end - self.base) // 64) * 64
        raw = (ctypes.c_uint8 * size).from_address(self.base)
        self.bytes: Array = np.ctypeslib.as_array(raw)
        self._views = {n: self.bytes.view(np.dtype(f"u{n}")) for n in (1, 2, 4, 8)}
        self.words = self._views[4]
        self._quads = self.words.reshape(-1, 4)
        self._starts = [r.start - self.base for r in self.regions]
        self._ends = [r.end - self.base for r in self.regions]
        self._start_array, self._end_array = np.array(self._starts), np.array(self._ends)
        self._writers, self._reads, self._kept = {}, [], 0

    # ------------------------------------------------------------------------------------------------- bounds

    def locate(
        self, m: Machine, address: Array, size: int, active: Array | None, instruction: Instruction, store: bool
    ) -> tuple[Array, Array | None, int | None]:
        """(offsets from the base, the lanes that may go on (None: all), the one region that they lie in or None).
        Lanes out of bounds are reported and left out."""
        offset = address.view(np.int64) - self.base
        if active is not None:
            first = int(active.argmax())
            offset = np.where(active, offset, offset.reshape(-1)[first])
            if not active.reshape(-1)[first]:
                return np.full_like(offset, self._starts[0]), active, None
        low, high = int(offset.min()), int(offset.max())
        index = bisect.bisect_right(self._starts, low) - 1
        if index >= 0 and high + size <= self._ends[index]:
            if store and not self.regions[index].writable:
                self._refuse(
                    m, address, active, instruction, f"a store to {self.regions[index].name}, which is read-only"
                )
                return offset, np.zeros(offset.shape, bool), None
            return offset, active, index
        which = np.searchsorted(self._start_array, offset, "right") - 1
        ok = (which >= 0) & (offset + size <= self._end_array[which])
        if store:
            ok &= np.array([r.writable for r in self.regions])[which]
        bad = ~ok if active is None else active & ~ok
        if bad.any():
            self._report(m, address, bad, size, instruction, store)
        good = ok if active is None else active & ok
        return np.where(ok, offset, self._starts[0]), good, None

    def _report(self, m: Machine, address: Array, bad: Array, size: int, instruction: Instruction, store: bool) -> None:
        place = int(address[tuple(np.argwhere(bad)[0])])
        near = min(self.regions, key=lambda r: min(abs(place - r.start), abs(place - r.end)))
        side = (
            f"{place + size - near.end} bytes past the end"
            if place >= near.start
            else f"{near.start - place} bytes before"
        )
        verb = "store" if store else "load"
        message = f"a {verb} of {size} bytes is {side} of {near.name} ({near.end - near.start} bytes)"
        m.report("out-of-bounds", message, instruction, bad, address)

    def _refuse(self, m: Machine, address: Array, active: Array | None, instruction: Instruction, message: str) -> None:
        bad = np.ones(address.shape, bool) if active is None else active
        m.report("out-of-bounds", message, instruction, bad, address)

    # -------------------------------------------------------------------------------------------------- moving

    def load(self, offset: Array, size: int) -> list[Array]:
        """Words of each lane, uint32, zero-extended where ``size`` is 1 or 2."""
        if size <= 2:
            if size == 2 and (offset & 1).any():
                low, high = self.bytes[offset].astype(np.uint32), self.bytes[offset + 1].astype(np.uint32)
                return [low | (high << np.uint32(8))]
            return [self._views[size][offset // size].astype(np.uint32)]
        count = size // 4
        misaligned = int(np.bitwise_or.reduce(offset.reshape(-1))) & 15
        if misaligned & 3:
            parts = self.bytes[offset[..., None] + np.arange(size)]
            words = np.ascontiguousarray(parts).view(np.uint32)
            return [words[..., i] for i in range(count)]
        if count == 1:
            return [self._views[4].take(offset >> 2)]
        if size == 16 and misaligned == 0:
            words = self._quads.take(offset >> 4, axis=0)
            return [words[..., i] for i in range(4)]
        index = offset >> 2
        return [self._views[4].take(index + i) for i in range(count)]

    def store(self, offset: Array, words: list[Array], size: int, active: Array | None) -> None:
        """``words``: [waves, 64] of each 32 bits; only the low byte or half where ``size`` is 1 or 2."""
        if active is not None:
            offset, words = offset[active], [np.broadcast_to(w, active.shape)[active] for w in words]
        if size <= 2:
            if size == 2 and (offset & 1).any():
                self.bytes[offset], self.bytes[offset + 1] = (
                    words[0] & np.uint32(0xFF),
                    (words[0] >> np.uint32(8)) & np.uint32(0xFF),
                )
            else:
                self._views[size][offset // size] = words[0].astype(f"u{size}")
            return
        if (offset & 3).any():
            for i, word in enumerate(words):
                for b in range(4):
                    self.bytes[offset + (4 * i + b)] = (word >> np.uint32(8 * b)) & np.uint32(0xFF)
            return
        if size == 16 and not (offset & 15).any():
            self._quads[offset >> 4] = np.stack([np.broadcast_to(w, offset.shape) for w in words], -1)
            return
        index = offset >> 2
        for i, word in enumerate(words):
            self._views[4][index + i] = word

    # --------------------------------------------------------------------------------------------------- races

    def stamps(self, m: Machine) -> Array:
        """Who a wave is and how many barriers it passed: int64 [waves]."""
        group = (m.first_group + m.groups[m.sel] + 1).astype(np.int64) << 32
        return group | ((m.epoch[m.sel] & 0xFFFFFF) << 8) | m.positions[m.sel]

    def note_load(
        self, m: Machine, offset: Array, size: int, active: Array | None, region: int | None, instruction: Instruction
    ) -> None:
        if region is not None and not self.regions[region].writable:
            return
        self._reads.append(_Read(-1 if region is None else region, offset, size, self.stamps(m), active, instruction))
        self._kept += offset.nbytes
        if self._kept > _LOG_BYTES:  # the oldest half is judged by what was written so far
            half = len(self._reads) // 2
            for read in self._reads[:half]:
                self._judge(m, read)
            self._reads = self._reads[half:]
            self._kept = sum(r.offsets.nbytes for r in self._reads)

    def note_store(
        self,
        m: Machine,
        offset: Array,
        size: int,
        active: Array | None,
        region: int | None,
        instruction: Instruction,
        atomic: bool = False,
    ) -> None:
        stamps = np.broadcast_to(self.stamps(m)[:, None], offset.shape)
        waves = np.broadcast_to(np.arange(m.count)[:, None], offset.shape)
        if active is not None:
            offset, stamps, waves = offset[active], stamps[active], waves[active]
        else:
            offset, stamps, waves = offset.reshape(-1), stamps.reshape(-1), waves.reshape(-1)
        if not len(offset):
            return
        for index in (
            [region] if region is not None else np.unique(np.searchsorted(self._start_array, offset, "right") - 1)
        ):
            chosen = (
                slice(None)
                if region is not None
                else (np.searchsorted(self._start_array, offset, "right") - 1) == index
            )
            self._write(m, int(index), offset[chosen], stamps[chosen], waves[chosen], size, instruction, atomic)

    def _write(
        self,
        m: Machine,
        region: int,
        offset: Array,
        stamps: Array,
        waves: Array,
        size: int,
        instruction: Instruction,
        atomic: bool,
    ) -> None:
        if region not in self._writers:
            length = self._ends[region] - self._starts[region]
            self._writers[region] = np.zeros(-(-length // self.granule) + 16, np.int64)
        shadow = self._writers[region]
        place = self._granules(offset - self._starts[region], size)
        mine = stamps[:, None]
        before = shadow[place]
        clash = (before != 0) & (before != _ATOMIC) & self._unordered(before, mine)
        if atomic:
            shadow[place] = _ATOMIC
        else:
            clash |= before == _ATOMIC
            shadow[place] = mine
            clash |= shadow[place] != mine
        if clash.any():
            self._race(m, clash.any(1), offset, waves, region, instruction, "two waves write")

    def _granules(self, offset: Array, size: int) -> Array:
        count = max(1, size // self.granule)
        return (offset // self.granule)[:, None] + np.arange(count)

    @staticmethod
    def _unordered(before: Array, mine: Array) -> Array:
        """No barrier stands between: another workgroup, or another wave of this one since the same barrier."""
        different = before ^ mine
        return ((different >> 32) != 0) | (((different & _EPOCH) == 0) & ((different & _WAVE) != 0))

    def _race(
        self, m: Machine, clash: Array, offset: Array, waves: Array, region: int, instruction: Instruction, who: str
    ) -> None:
        first = int(clash.argmax())
        wave = int(m.members()[waves[first]])
        m.findings.add(
            "race",
            f"{who} the same bytes of {self.regions[region].name} with no barrier or atomic between",
            instruction,
            workgroup=m.first_group + int(m.groups[wave]),
            wave=int(m.positions[wave]),
            address=self.base + int(offset[first]),
        )

    def _judge(self, m: Any, read: _Read) -> None:
        """Whether someone else wrote what a load read, with nothing between."""
        for region, shadow in self._writers.items():
            if read.region not in (-1, region):
                continue
            offset = read.offsets
            inside = (offset >= self._starts[region]) & (offset + read.size <= self._ends[region])
            if read.active is not None:
                inside &= read.active
            if not inside.any():
                continue
            stamps = np.broadcast_to(read.stamps[:, None] if offset.ndim == 2 else read.stamps, offset.shape)[inside]
            place = self._granules(offset[inside] - self._starts[region], read.size)
            before = shadow[place]
            clash = ((before != 0) & ((before == _ATOMIC) | self._unordered(before, stamps[:, None]))).any(1)
            if clash.any():
                first = int(clash.argmax())
                stamp = int(stamps[first])
                m.findings.add(
                    "race",
                    f"a wave reads bytes of {self.regions[region].name} that another writes, with no barrier "
                    "or atomic between",
                    read.instruction,
                    workgroup=(stamp >> 32) - 1,
                    wave=stamp & 0xFF,
                    address=self.base + int(offset[inside][first]),
                )

    def finish(self, m: Any) -> None:
        """Judge the loads that are left. ``m``: anything with findings."""
        for read in self._reads:
            self._judge(m, read)
        self._reads, self._kept = [], 0

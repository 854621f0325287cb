"""Code objects as files (cubin, hsaco: both 64-bit ELF): whether one is whole, for which arch, how much code.

Layout: ELF-64 (System V ABI). AMD's machine numbers: LLVM, "User Guide for AMDGPU Backend", EF_AMDGPU_MACH. NVIDIA's
flags are not documented; the place of the arch was read off ptxas 12 and NVRTC 13 for sm_80 to sm_100.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<HHIQQQIHHHHHH")  # from offset 16: type, machine, version, entry, phoff, shoff, flags, ..
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NVIDIA, _AMD = 190, 224
_NO_BITS = 8  # a section that takes no room in the file
_MACH = {
    0x30: "gfx908",
    0x3F: "gfx90a",
    0x4C: "gfx942",
    0x4F: "gfx950",
    0x41: "gfx1100",
    0x46: "gfx1101",
    0x47: "gfx1102",
    0x44: "gfx1103",
    0x43: "gfx1150",
    0x4A: "gfx1151",
    0x48: "gfx1200",
    0x4E: "gfx1201",
}


def _sections(image: bytes) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every section. Raises ValueError for what is no ELF file, or not the whole of one."""
    if image[:4] != b"\x7fELF" or len(image) < 64 or image[4] != 2:
        raise ValueError("not a 64-bit ELF file")
    fields = _HEADER.unpack_from(image, 16)
    start, size, count, names = fields[5], fields[10], fields[11], fields[12]
    if size != _SECTION.size or names >= count or start + size * count > len(image):
        raise ValueError(f"truncated: {len(image)} bytes, and the section table ends at {start + size * count}")
    segments = fields[4] + fields[8] * fields[9]
    if segments > len(image):
        raise ValueError(f"truncated: {len(image)} bytes, and the program headers end at {segments}")
    table = [_SECTION.unpack_from(image, start + size * i) for i in range(count)]
    for _, kind, _, _, offset, length, *_ in table:
        if kind != _NO_BITS and offset + length > len(image):
            raise ValueError(f"truncated: {len(image)} bytes, and a section ends at {offset + length}")
    strings = table[names][4]
    for name, _, _, _, _, length, *_ in table:
        end = image.index(b"\0", strings + name)
        yield image[strings + name : end].decode("ascii", "replace"), length


def code_bytes(image: bytes) -> int:
    """Bytes of instructions. Raises ValueError for what is no whole ELF file."""
    return sum(length for name, length in _sections(image) if name == ".text" or name.startswith(".text."))


def arch_of(image: bytes) -> str | None:
    """ "sm_90", "gfx942"; None where the file does not say it in a known way. Raises ValueError as `code_bytes`."""
    for _ in _sections(image):
        pass
    fields = _HEADER.unpack_from(image, 16)
    machine, flags = fields[1], fields[6]
    if machine == _AMD:
        return _MACH.get(flags & 0xFF)
    if machine == _NVIDIA:
        return f"sm_{flags >> 8 & 0xFF if image[8] >= 8 else flags & 0xFF}"  # byte 8: version of the ABI
    raise ValueError(f"an ELF file for machine {machine}; required: {_NVIDIA} (NVIDIA) or {_AMD} (AMD)")


def check(image: bytes, arch: str) -> None:
    """Raises ValueError, with the reason, where the image is not whole or not for ``arch`` ("sm_90a" is sm_90)."""
    image_arch = arch_of(image)
    if image_arch is not None and image_arch != re.sub(r"^(sm_\d+)[af]$", r"\1", arch):
        raise ValueError(f"code for {image_arch}; required: {arch}")
    if code_bytes(image) == 0:
        raise ValueError("it holds no code")

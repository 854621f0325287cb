"""What an AMD code object says of itself: the metadata note of its ELF file (LLVM, "User Guide for AMDGPU Backend")."""

from __future__ import annotations

import importlib
import struct
from typing import Any

_PT_NOTE = 4
_NT_AMDGPU_METADATA = 32
_FIELDS = {
    ".vgpr_count": "registers",
    ".agpr_count": "agprs",
    ".sgpr_count": "sgprs",
    ".vgpr_spill_count": "vgpr_spills",
    ".sgpr_spill_count": "sgpr_spills",
    ".group_segment_fixed_size": "shared",
    ".private_segment_fixed_size": "scratch",
    ".wavefront_size": "wave",
}


def kernels(image: bytes) -> list[dict[str, Any]]:
    """The metadata of every kernel. Needs the msgpack package. Raises ValueError for what is not an AMD code object."""
    if image[:4] != b"\x7fELF" or image[4] != 2:
        raise ValueError("not a 64-bit ELF file")
    unpackb = importlib.import_module("msgpack").unpackb
    (offset,) = struct.unpack_from("<Q", image, 32)
    (count,) = struct.unpack_from("<H", image, 56)
    for i in range(count):
        kind, _, start, _, _, size, _, _ = struct.unpack_from("<IIQQQQQQ", image, offset + 56 * i)
        at = start
        while kind == _PT_NOTE and at + 12 <= start + size:
            name_size, size_of_note, note = struct.unpack_from("<III", image, at)
            data = at + 12 + (name_size + 3) // 4 * 4
            if note == _NT_AMDGPU_METADATA:
                metadata: list[dict[str, Any]] = unpackb(image[data : data + size_of_note])["amdhsa.kernels"]
                return metadata
            at = data + (size_of_note + 3) // 4 * 4
    raise ValueError("the file has no AMDGPU metadata note")


def read_hsaco(image: bytes) -> dict[str, int]:
    """Resources, the largest over the kernels; empty where msgpack is not installed (they inform, nothing more)."""
    try:
        metadata = kernels(image)
    except ImportError:
        return {}
    return {name: max(int(k.get(field, 0)) for k in metadata) for field, name in _FIELDS.items()}

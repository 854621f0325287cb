"""The block of a kernel's arguments."""

from __future__ import annotations

from ferryman.backends.simulator.assembly import Kernel


def with_hidden(
    kernel: Kernel, arguments: bytes, grid: tuple[int, int, int], threads: int, dynamic_lds: int
) -> bytearray:
    """The argument block with what the runtime adds: the launch's own sizes, where the metadata asks for them."""
    size = max(len(arguments), int(kernel.metadata.get(".kernarg_segment_size", 0)))
    block = bytearray(-(-size // 16) * 16)
    block[: len(arguments)] = arguments
    known = {
        "hidden_block_count_x": grid[0],
        "hidden_block_count_y": grid[1],
        "hidden_block_count_z": grid[2],
        "hidden_group_size_x": threads,
        "hidden_group_size_y": 1,
        "hidden_group_size_z": 1,
        "hidden_remainder_x": 0,
        "hidden_remainder_y": 0,
        "hidden_remainder_z": 0,
        "hidden_grid_dims": 3,
        "hidden_global_offset_x": 0,
        "hidden_global_offset_y": 0,
        "hidden_global_offset_z": 0,
        "hidden_dynamic_lds_size": dynamic_lds,
        "hidden_none": 0,
    }
    for entry in kernel.arguments:
        kind = str(entry[".value_kind"])
        if kind.startswith("hidden") and kind in known:
            at, length = int(entry[".offset"]), int(entry[".size"])
            block[at : at + length] = known[kind].to_bytes(length, "little")
    return block

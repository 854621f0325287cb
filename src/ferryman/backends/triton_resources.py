"""What a kernel that Triton compiled uses: from the code object, its metadata and the text of its instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

from ferryman.backends.code_objects import code_bytes

# Instructions by what they show. Loads of 16 bytes a lane: `v4.b32`, `dwordx4`; TMA and cp.async.cg move no less.
_MATRIX = {"cubin": r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", "hsaco": r"^\s*v_(?:s?mfmac?|wmma)_"}
_WIDE = {
    "cubin": r"ld\.global\S*\.v(?:4\.\w?32|2\.\w?64|8\.\w?32|4\.\w?64)|cp\.async\.cg|cp\.async\.bulk",
    "hsaco": r"^\s*(?:buffer|global)_load_(?:dwordx4|b128|lds_dwordx4)",
}
_LOADS = {"cubin": r"\bld\.global|\bcp\.async\.(?:ca|cg|bulk)", "hsaco": r"^\s*(?:buffer|global|flat)_load_"}
_BUFFER = r"^\s*buffer_load_"
_DOT = r"\btt\.dot\b([^\n:]*): tensor<\d+x\d+x(\w+)>"  # in Triton's own IR


def of(compiled: Any, kind: str, warp_size: int) -> dict[str, int]:
    """Resources of a `CompiledKernel`; ``kind`` is "cubin" or "hsaco".

    registers, spills (NVIDIA: bytes a thread; AMD: registers, of both kinds), shared (bytes a block), threads,
    code_bytes, matrix (matrix instructions), dots_half and dots_ieee and dots_tf32 (products in the source, by what
    they multiply), loads, wide_loads (of 16 bytes a lane); AMD also agprs, sgprs, vgpr_spills, sgpr_spills, scratch
    (bytes a thread), wave, buffer_loads.
    """
    text = compiled.asm["ptx" if kind == "cubin" else "amdgcn"]
    image: bytes = compiled.asm[kind]
    resources = _cubin(image) if kind == "cubin" else _amdgcn(text)
    resources["shared"] = compiled.metadata.shared  # dynamic, so the image itself says 0
    resources["threads"] = compiled.metadata.num_warps * warp_size
    resources["code_bytes"] = code_bytes(image)
    resources |= _instructions(text, kind)
    resources |= _dots(compiled.asm.get("ttir", ""))  # Gluon has none: its source names the matrix unit itself
    return resources


def _instructions(text: str, kind: str) -> dict[str, int]:
    counts = {
        name: len(re.findall(pattern[kind], text, re.MULTILINE))
        for name, pattern in (("matrix", _MATRIX), ("loads", _LOADS), ("wide_loads", _WIDE))
    }
    if kind == "hsaco":
        counts["buffer_loads"] = len(re.findall(_BUFFER, text, re.MULTILINE))
    return counts


def _dots(ttir: str) -> dict[str, int]:
    counts = {"dots_half": 0, "dots_ieee": 0, "dots_tf32": 0}
    for attributes, operand in re.findall(_DOT, ttir):
        precision = "tf32" if "inputPrecision = tf32" in attributes else "ieee"  # IEEE is not printed
        counts["dots_half" if operand != "f32" else f"dots_{precision}"] += 1
    return counts


def _cubin(image: bytes) -> dict[str, int]:
    import triton

    # with cuobjdump and not `ptxas -v`, whose log Triton drops: local memory is spills, as Triton has no local arrays
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": usage["REG"], "spills": usage["STACK"] + usage["LOCAL"]}


def _amdgcn(text: str) -> dict[str, int]:
    def note(key: str) -> int:
        match = re.search(rf"^\s*(?:-\s+)?\.{key}:\s*(\d+)", text, re.MULTILINE)
        return int(match[1]) if match else 0

    return {
        "registers": note("vgpr_count"),
        "agprs": note("agpr_count"),
        "sgprs": note("sgpr_count"),
        "spills": note("vgpr_spill_count") + note("sgpr_spill_count"),
        "vgpr_spills": note("vgpr_spill_count"),
        "sgpr_spills": note("sgpr_spill_count"),
        "scratch": note("private_segment_fixed_size"),
        "wave": note("wavefront_size"),
    }

"""A capsule's bytes: one safetensors file in which a hash covers every byte (docs/capsules.md).

The file's metadata holds format, version and two hashes; the tensor ``manifest`` holds deflated JSON; every other
tensor is named by the hash of its dtype, shape and content. Nothing here is executed, and nothing is allocated before
its size is known to be allowed.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
import sys
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as _load
from safetensors.torch import save as _save
from torch import Tensor

from ferryman import files
from ferryman.errors import CapsuleError, shown

FORMAT, VERSION = "ferryman-capsule", 1
SIZE_LIMIT = 64 * 2**20  # all ops on an H200 take about 10 MiB
MANIFEST_LIMIT = files.MOST_BYTES  # inflated; all ops on an H200 take 9 MiB
MOST_TENSORS = 100_000
MANIFEST = "manifest"
_CHUNK = 4 * 2**20
_HASH = re.compile(r"[0-9a-f]{64}")
_NO_HASH = "0" * 64
_FACTS = {"format", "version", "sha256", "manifest_sha256"}
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The one NaN that stands for all: devices differ in the payload and sign of the NaN that they produce.
_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000, torch.float64: 0x7FF8 << 48}


def digest(tensor: Tensor, layout: str = "") -> str:
    """A hash of dtype, shape, ``layout`` and every element in order; all NaNs count as one.

    SHA-256 over the SHA-256 of chunks of 4 MiB, so that large tensors are hashed by several threads.
    """
    x = tensor.detach()
    if x.dtype in _NAN:
        words = x.contiguous().view(_WORDS[x.element_size()])
        x = words.masked_fill(x.isnan(), _NAN[x.dtype])
    flat = x.contiguous().reshape(-1).view(torch.uint8).cpu() if x.numel() else torch.empty(0, dtype=torch.uint8)
    whole = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}{layout}".encode())
    for part in _parts(flat):
        whole.update(part)
    return whole.hexdigest()


def _parts(flat: Tensor) -> Iterable[bytes]:
    starts = range(0, flat.numel(), _CHUNK)

    def hashed(start: int) -> bytes:
        return hashlib.sha256(_view(flat[start : start + _CHUNK])).digest()

    if len(starts) < 2:
        return [hashed(start) for start in starts]
    with ThreadPoolExecutor(max_workers=min(8, len(starts))) as pool:  # hashlib releases the interpreter's lock
        return list(pool.map(hashed, starts))


def _view(flat: Tensor) -> Any:
    """A uint8 CPU tensor's memory as a buffer; NumPy, which torch would need for it, is not among our dependencies."""
    return (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())


def _bytes(flat: Tensor) -> bytes:
    return bytes(_view(flat)) if flat.numel() else b""


def pack(manifest: str, tensors: Mapping[str, Tensor]) -> bytes:
    """The file's bytes. ``tensors`` are named by their `digest`. Raises CapsuleError where it would be too large."""
    if sys.byteorder != "little":
        raise CapsuleError("capsules are written on little-endian machines only")
    inflated = manifest.encode()
    if len(inflated) > MANIFEST_LIMIT:
        raise CapsuleError(f"the manifest has {len(inflated)} bytes; required: at most {MANIFEST_LIMIT}")
    deflated = zlib.compress(inflated, 9)
    content = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}  # no two share memory
    content[MANIFEST] = torch.frombuffer(bytearray(deflated), dtype=torch.uint8)
    facts = {
        "format": FORMAT,
        "version": str(VERSION),
        "sha256": _NO_HASH,
        "manifest_sha256": hashlib.sha256(inflated).hexdigest(),
    }
    raw = _save(content, facts)
    if len(raw) > SIZE_LIMIT:
        raise CapsuleError(
            f"the capsule would have {len(raw)} bytes; required: at most {SIZE_LIMIT}. Record fewer ops or dtypes"
        )
    place = _hash_place(raw)
    return raw[:place] + hashlib.sha256(raw).hexdigest().encode() + raw[place + 64 :]


def _hash_place(raw: bytes) -> int:
    """Where the file's own hash stands. While it is computed, 64 zeros stand there."""
    key = b'"sha256":"'
    end = 8 + int.from_bytes(raw[:8], "little")
    place = raw.find(key, 8, end)
    if place < 0 or raw.find(key, place + 1, end) >= 0:
        raise CapsuleError("the header does not hold exactly one sha256")
    return place + len(key)


def read(path: str | Path) -> bytes:
    """A file's bytes, if there are not too many of them."""
    path = Path(path)
    try:
        return files.read(path, SIZE_LIMIT)
    except OSError as error:
        raise CapsuleError(f"{path} cannot be read: {error.strerror}") from error


def unpack(raw: bytes, where: str = "the capsule") -> tuple[Any, dict[str, Tensor], str]:
    """(the manifest as parsed JSON, the tensors by name, the file's hash). Raises CapsuleError.

    Every byte is covered by the file's hash; the manifest and each tensor also have their own, so that the message says
    what is damaged.
    """
    facts, sizes = _header(raw, where)
    if facts.get("format") != FORMAT:
        given = shown(repr(facts.get("format")))
        raise CapsuleError(f"{where} is not a capsule: its format is {given}; required: {FORMAT!r}")
    version = facts.get("version", "")
    if not re.fullmatch(r"[1-9][0-9]{0,5}", version):
        raise CapsuleError(f"{where}: version is {shown(repr(version))}; required: an integer from 1 to {VERSION}")
    if int(version) > VERSION:
        raise CapsuleError(f"{where} has version {version}; this Ferryman reads up to {VERSION}. Upgrade ferryman")
    if set(facts) != _FACTS:
        raise CapsuleError(
            f"{where}: its metadata has {', '.join(map(ascii, sorted(facts)))}; required: {', '.join(sorted(_FACTS))}"
        )
    stated, place = facts["sha256"], _hash_place(raw)
    actual = hashlib.sha256(raw[:place] + _NO_HASH.encode() + raw[place + 64 :]).hexdigest()
    whole = raw[place : place + 64] == stated.encode() and actual == stated
    if not whole and len(raw) != 8 + int.from_bytes(raw[:8], "little") + sum(sizes.values()):
        raise CapsuleError(f"{where} is damaged: it is truncated or has bytes too many")
    try:
        tensors = _load(raw)
    except SafetensorError as error:
        raise CapsuleError(f"{where} is damaged: {error}") from error
    text = _inflate(_bytes(tensors.pop(MANIFEST)), where)
    if hashlib.sha256(text).hexdigest() != facts["manifest_sha256"]:
        raise CapsuleError(f"{where} is damaged: the manifest's hash does not match")
    for name, tensor in tensors.items():
        if digest(tensor) != name:
            raise CapsuleError(f"{where} is damaged: the hash of tensor {name[:16]} does not match")
    if not whole:
        raise CapsuleError(f"{where} is damaged: the file's hash does not match")
    return parse_json(text, f"{where}: the manifest"), tensors, stated


def _header(raw: bytes, where: str) -> tuple[dict[str, str], dict[str, int]]:
    """(metadata, bytes of each tensor), read as JSON and checked before anything is allocated."""
    if raw[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        raise CapsuleError(f"{where} is a zip archive, as torch.save writes: it may carry pickle, which is never read")
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > len(raw) - 8:
        if raw[:1] == b"\x80" and raw[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
            raise CapsuleError(f"{where} is a pickle, which is never read")
        raise CapsuleError(f"{where} is truncated, or no capsule: {len(raw)} bytes, and a header of {length}")
    header = parse_json(raw[8 : 8 + length], f"{where}: the header")
    facts = header.pop("__metadata__", None)
    if not isinstance(facts, dict) or not all(isinstance(v, str) for v in facts.values()):
        raise CapsuleError(f"{where} is not a capsule: its metadata names no format")
    if len(header) > MOST_TENSORS:
        raise CapsuleError(f"{where} names {len(header)} tensors; required: at most {MOST_TENSORS}")
    sizes = {}
    for name, entry in header.items():
        if name != MANIFEST and not _HASH.fullmatch(name):
            raise CapsuleError(f"{where}: a tensor is named {name[:80]!r}; required: a hash, or {MANIFEST!r}")
        sizes[name] = _size(entry, length, len(raw), f"{where}: tensor {name[:16]}")
    if header.get(MANIFEST, {}).get("dtype") != "U8":
        raise CapsuleError(f"{where} has no manifest")
    return facts, sizes


def _size(entry: Any, header: int, total: int, where: str) -> int:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if not isinstance(dtype, str) or dtype not in _DTYPES or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CapsuleError(
            f"{where}: dtype is {str(dtype)[:40]!r}; required: one of {', '.join(_DTYPES)}, with a shape"
        )
    for key, most in (("shape", 8), ("data_offsets", 2)):
        numbers = entry[key]
        if not isinstance(numbers, list) or len(numbers) > most or not all(type(n) is int and n >= 0 for n in numbers):
            raise CapsuleError(f"{where}: {key} is {str(numbers)[:80]}; required: at most {most} integers from 0")
    size = math.prod(entry["shape"]) * torch.empty((), dtype=_DTYPES[dtype]).element_size()
    begin, end = entry["data_offsets"] if len(entry["data_offsets"]) == 2 else (0, -1)
    if size != end - begin or end > total - 8 - header:
        raise CapsuleError(f"{where} is truncated or damaged: {size} bytes by its shape, {begin} to {end} by its place")
    return size


def _inflate(deflated: bytes, where: str) -> bytes:
    machine = zlib.decompressobj()
    try:
        text = machine.decompress(deflated, MANIFEST_LIMIT)
    except zlib.error as error:
        raise CapsuleError(f"{where} is damaged: the manifest cannot be inflated ({error})") from error
    if machine.unconsumed_tail or not machine.eof:
        raise CapsuleError(f"{where}: the manifest is truncated, or has more than {MANIFEST_LIMIT} bytes")
    if machine.unused_data:
        raise CapsuleError(f"{where}: bytes follow the manifest")
    return text


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object: no key twice, no NaN, nothing nested beyond what Python follows. Raises CapsuleError."""
    try:
        document = files.parse(text)
    except (ValueError, RecursionError) as error:
        raise CapsuleError(f"{where} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CapsuleError(f"{where} is not a JSON object")
    return document

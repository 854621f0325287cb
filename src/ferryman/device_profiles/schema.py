"""What a device profile is: plain numbers in SI units, each with its source and how far to trust it.

In the file every number is a cell, ``{value: 4.8 TB/s, kind: datasheet, source: sheet}``: the value with its
unit, ``kind`` one of datasheet, measured, unverified, and ``source`` a key of the file's own ``sources``
table. ``parse.py`` reads such cells and refuses everything else; ``loading.py`` finds files and resolves
``extends``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ferryman.errors import UnknownName

VENDORS = ("nvidia", "amd", "cpu", "other")  # other: mps, xpu...: no kernels of ours, torch still runs
KINDS = ("datasheet", "measured", "unverified")
IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
DTYPES = ("f64", "f32", "tf32", "f16", "bf16", "fp8", "fp4", "i8")  # tf32 stands for XF32 on CDNA3
# How a sum of products is accumulated; each class has its own error bound (ferryman.porting).
ACCUMULATION = ("fp32", "split-k", "tf32-rne", "tf32-rz", "xf32-rd", "fp8-14bit", "int32-exact")
FP8_FLAVOURS = ("e4m3fn", "e4m3fnuz")  # OCP (max 448) and CDNA3's (max 240)
# What `ferryman fingerprint` measures and a profile may state (docs/fingerprint.md), by path below numerics.arithmetic.
ROUNDINGS = ("nearest-even", "nearest-away", "toward-zero", "down", "up")
SUBNORMALS = ("kept", "flushed")
CONTRACTION = ("fused", "separate")
OVERFLOW = ("saturate", "nan", "inf")
EXACT = ("yes", "no")
MATRIX_DTYPES = ("f32", "tf32", "f16", "bf16", "fp8")
ROUTES = ("torch", "triton", "simt")
FUNCTIONS = ("exp", "exp2", "log", "rsqrt", "sqrt", "div", "tanh")
ARITHMETIC: dict[str, str] = {
    **{
        f"matrix.{d}.{name}": kind
        for d in MATRIX_DTYPES
        for name, kind in {
            "block": "count",
            "aligned_bits": "count",
            "aligned_rounding": "rounding",
            "accumulator_bits": "count",
            "accumulator_rounding": "rounding",
            "subnormal_inputs": "subnormals",
            "subnormal_outputs": "subnormals",
        }.items()
    },
    **{
        f"matrix.{d}.{name}": kind
        for d in ("f32", "tf32")
        for name, kind in {
            "input_bits": "count",
            "input_rounding": "rounding",
        }.items()
    },
    "matrix.i8.exact": "exact",
    **{f"subnormals.{d}": "subnormals" for d in ("f32", "f16", "bf16")},
    **{f"contraction.{route}": "contraction" for route in ROUTES},
    **{f"overflow.{route}.{fp8}": "overflow" for route in ("torch", "triton") for fp8 in (*FP8_FLAVOURS, "e5m2")},
    **{f"ulp.{route}.{function}": "ratio" for route in ROUTES for function in FUNCTIONS},
}
FEATURES = {
    "bf16": "bf16 matrix instructions",
    "tf32": "TF32 matrix instructions",
    "xf32": "CDNA3's XF32: 32-bit inputs cut to 19 bits, rounded down",
    "fp8": "fp8 matrix instructions; numerics.fp8 says which flavour",
    "fp4": "fp4 matrix instructions",
    "cp_async": "asynchronous global-to-shared copies (sm_80 and newer)",
    "tma": "bulk tensor copies (sm_90 and newer)",
    "tensor_descriptor": "Triton tensor descriptors become TMA; on AMD they become poor pointer code",
    "clusters": "thread block clusters and distributed shared memory",
    "wgmma": "warp-group matrix instructions (sm_90a only)",
    "tcgen05": "tensor-memory matrix instructions (sm_100, sm_103, sm_110; not sm_120)",
    "mfma": "CDNA matrix instructions",
    "wmma": "RDNA matrix instructions (RDNA3 and newer)",
    "direct_to_lds": "16-byte global-to-LDS copies (gfx950)",
}

_DTYPE_NAMES = {
    "float64": "f64",
    "double": "f64",
    "fp64": "f64",
    "float32": "f32",
    "float": "f32",
    "fp32": "f32",
    "xf32": "tf32",
    "float16": "f16",
    "half": "f16",
    "fp16": "f16",
    "bfloat16": "bf16",
    "int8": "i8",
    "uint8": "i8",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float4_e2m1fn_x2": "fp4",
}

V = TypeVar("V")


class FrozenMap(Mapping[str, V]):
    """A read-only mapping that, unlike MappingProxyType, can be pickled and copied."""

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Provenance:
    """Where a number comes from, and whether it is datasheet, measured or unverified."""

    kind: str
    source: str


@dataclass(frozen=True)
class Peak:
    """A dense peak in operations per second, and the dtype that it accumulates in."""

    rate: float
    accumulate: str


@dataclass(frozen=True)
class Identity:
    """How a device is recognised.

    names: what the driver may call it, compared whole and without case ("NVIDIA L4" is not "NVIDIA L40S"; and
    no regular expression from a file is ever run). arches: which archs a generic profile stands for; "*" is
    any. units: another count that the driver may report for the whole device. memory: bytes it may report.
    exact: the name is shared by other devices, so units and memory must fit too.
    """

    names: tuple[str, ...] = ()
    arches: tuple[str, ...] = ()
    units: int | None = None
    memory: tuple[int, int] | None = None
    exact: bool = False


@dataclass(frozen=True)
class Profile:
    """What one device offers. Unknown numbers are None or absent: never another device's.

    Sizes are bytes, rates are per second, registers are 32 bits wide. ``units`` are SMs or CUs.
    ``shared_memory`` is what one block may have after opting in. ``peaks`` are dense datasheet limits;
    ``compiled`` are ops that a compiled graph calls whole although Inductor could fuse them.
    ``ceilings`` and ``copy_bandwidth`` are what a well-tuned program reached. ``rates`` are operations per
    clock per unit. ``provenance`` maps the path in the file ("memory.bandwidth") to its source. A ``generic``
    profile stands for a whole family.
    """

    name: str
    title: str
    vendor: str
    arch: str
    family: str
    wave: int
    shared_memory: int
    max_threads: int
    generic: bool = False
    partition: str | None = None
    power_mode: str | None = None
    units: int | None = None
    xcds: int | None = None
    clock_hz: float | None = None
    power_w: float | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    l1_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    registers_per_unit: int | None = None
    registers_per_thread: int | None = None
    shared_memory_per_unit: int | None = None
    max_threads_per_unit: int | None = None
    copy_bandwidth: float | None = None
    fp8: str | None = None
    peaks: Mapping[str, Peak] = field(default_factory=FrozenMap)
    ceilings: Mapping[str, float] = field(default_factory=FrozenMap)
    rates: Mapping[str, float] = field(default_factory=FrozenMap)
    accumulation: Mapping[str, str] = field(default_factory=FrozenMap)
    biases: Mapping[str, float] = field(default_factory=FrozenMap)
    arithmetic: Mapping[str, str | int | float] = field(default_factory=FrozenMap)
    features: frozenset[str] = frozenset()
    preferences: Mapping[str, tuple[str, ...]] = field(default_factory=FrozenMap)
    compiled: frozenset[str] = frozenset()
    tiles: Mapping[str, Mapping[str, int | str | bool]] = field(default_factory=FrozenMap)
    thresholds: Mapping[str, int] = field(default_factory=FrozenMap)
    aliases: tuple[str, ...] = ()
    identity: Identity = field(default_factory=Identity)
    provenance: Mapping[str, Provenance] = field(default_factory=FrozenMap, repr=False)
    notes: tuple[str, ...] = ()

    def identity_key(self) -> tuple[Hashable, ...]:
        """What makes a choice of implementation on this device valid; part of dispatch's key and of the
        lockfile's."""
        return (self.name, self.arch, self.units, self.memory_bytes, self.partition, self.power_mode)

    def __hash__(self) -> int:
        return hash(self.identity_key())

    def preference(self, op: str) -> tuple[str, ...]:
        """Backends in order of preference; ``X_backward`` follows ``X`` unless it has a line of its own."""
        backends = self.preferences.get(op) or self.preferences.get(op.removesuffix("_backward"))
        return backends or self.preferences["default"]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for ``ferryman devices --json``."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def dtype_key(dtype: object) -> str:
    """The profile's name of a dtype: accepts torch dtypes, "bfloat16", "bf16"."""
    text = str(dtype).lower().removeprefix("torch.")
    key = _DTYPE_NAMES.get(text, text)
    if key not in DTYPES:
        raise UnknownName("dtype", str(dtype), [*DTYPES, *_DTYPE_NAMES])
    return key


def _plain(value: Any) -> Any:
    if isinstance(value, (Provenance, Peak, Identity)):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value

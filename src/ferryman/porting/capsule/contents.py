"""What a capsule holds, as data: the cases, one device's results, outputs and machine (docs/capsules.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from torch import Tensor

from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import CapsuleError, ResultError, shown
from ferryman.porting.capsule import container
from ferryman.porting.inputs.fills import DTYPES, dtype_name
from ferryman.porting.judging.printable import UNPRINTABLE
from ferryman.porting.judging.results import Name, Results, parse

MOST_CASES = 20_000
MOST_ELEMENTS = 2**29  # of one tensor; the largest of our own cases has 2**28
TILE = 32  # consecutive elements, in row-major order
# An accumulation class widens the bound, so one that is not of docs/parity.md is refused rather than believed.
ACCUMULATIONS = ("fp32", "split-k", "tf32-rne", "tf32-rz", "tf32", "xf32-rd", "fp8-14bit", "int32-exact")

_AnyModel = TypeVar("_AnyModel", bound=BaseModel)
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,127}$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Extent = Annotated[int, Field(ge=0, le=2**31)]
Layout = Annotated[str, Field(pattern=r"^[a-z]{1,16}(:[0-9,+]{1,128})?$")]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", frozen=True, strict=True)


class Generated(Part):
    """A tensor of a case: every machine makes it from a counter (porting/inputs/fills.py)."""

    shape: list[Extent] = Field(max_length=8)
    dtype: Literal[
        "storage", "float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "bool"
    ] = "storage"
    fill: Name | None = None
    layout: Layout = "contiguous"
    low: int = 0
    high: int = 1


class Named(Part):
    """A dtype that is an argument itself."""

    scalar_type: Literal[
        "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"
    ]


Argument = Generated | Named | bool | int | float | str | None


class CaseRecord(Part):
    op: Identifier
    case: Identifier
    tier: Literal["small", "standard"] = "small"
    exact: bool = False
    inexact: list[Name] = Field(default=[], max_length=64)
    cotangent: Name | None = None
    saved: Layout = "contiguous"
    gradients: Layout | None = None
    args: dict[Identifier, Argument] = Field(max_length=64)


class Patch(Part):
    """Single elements of a tensor: ``at`` counts in row-major order."""

    at: Hash
    values: Hash


class InputRecord(Part):
    """A case in one dtype. ``hashes`` are of every tensor argument, layout included; ``stored`` are those whose bits
    are not generated but follow from a float64 evaluation (what a forward saves), which machines may round apart.
    Of large ones only those elements are stored (``patched``) that lie close to where rounding turns."""

    case: int = Field(ge=0)
    dtype: Literal["float32", "float16", "bfloat16"]
    hashes: dict[Identifier, Hash] = Field(max_length=64)
    stored: dict[Identifier, Hash] = {}
    patched: dict[Identifier, Patch] = {}


class OutputRecord(Part):
    """One output: the hash of all of it, and the elements that are stored (all, or tiles of `TILE`)."""

    name: Identifier
    dtype: Name
    shape: list[Extent] = Field(max_length=8)
    hash: Hash
    stored: Hash | None = None
    tiles: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=4096)


class RunRecord(Part):
    """What one implementation gave on one input; ``cell`` is its verdict, in the results."""

    input: int = Field(ge=0)
    cell: int = Field(ge=0)
    tf32: bool = False
    outputs: list[OutputRecord] = Field(default=[], max_length=16)


class Machine(Part):
    """The machine while it recorded, beyond `results.Environment`."""

    driver: str | None = None
    clocks_mhz: dict[Identifier, float] = {}
    power_watts: dict[Identifier, float] = {}
    temperature_celsius: float | None = None
    memory_bytes: int | None = None
    flags: dict[str, str | bool] = {}
    source: str = ""


class Manifest(Part):
    """The whole of a capsule but for its tensors. ``results`` is the document that `ferryman check` would write."""

    kind: Literal["ops"] = "ops"
    results: dict[str, Any]
    machine: Machine
    cases: Annotated[list[CaseRecord], FailFast()] = Field(max_length=MOST_CASES)
    inputs: Annotated[list[InputRecord], FailFast()] = Field(max_length=3 * MOST_CASES)
    runs: Annotated[list[RunRecord], FailFast()] = Field(max_length=30 * MOST_CASES)


@dataclass(frozen=True)
class Capsule:
    """A capsule that has been checked. ``sha256`` names it: the hash of the file."""

    manifest: Manifest
    results: Results
    tensors: dict[str, Tensor]
    sha256: str = ""
    size: int = 0

    @property
    def seed(self) -> int:
        return self.results.environment.seed


def dumps(manifest: Manifest, tensors: dict[str, Tensor]) -> bytes:
    """The bytes of a capsule, read back before they are given out: what cannot be read is never written."""
    raw = container.pack(manifest.model_dump_json(exclude_defaults=True), tensors)
    loads(raw, "the capsule that was recorded")
    return raw


def save(raw: bytes, path: str | Path) -> None:
    """Whole or not at all, through a temporary file beside it."""
    path = Path(path)
    try:
        write_whole(path, raw)
    except OSError as error:
        raise CapsuleError(f"{path} cannot be written: {error.strerror}; choose another --out") from error


def load(path: str | Path) -> Capsule:
    """A capsule from a file. Raises CapsuleError naming what is wrong with it."""
    return loads(container.read(path), str(path))


def loads(raw: bytes, where: str = "the capsule") -> Capsule:
    """A capsule from bytes; see `load`."""
    content, tensors, sha256 = unpacked(raw, where)
    return checked(content, tensors, sha256, len(raw), where)


def unpacked(raw: bytes, where: str) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """(manifest as JSON, tensors, the file's hash), with text that a terminal can be shown."""
    content, tensors, sha256 = container.unpack(raw, where)
    for text in _strings(content):
        if UNPRINTABLE.search(text):
            raise CapsuleError(f"{where}: the manifest holds control characters, in {text[:40]!r}")
    return content, tensors, sha256


def checked(content: dict[str, Any], tensors: dict[str, Tensor], sha256: str, size: int, where: str) -> Capsule:
    """A capsule of ops whose parts belong together."""
    if content.get("kind") == "model":
        raise CapsuleError(f"{where} holds a model, not ops; `ferryman replay` takes either")
    manifest = valid(Manifest, content, where)
    try:
        document = parse(manifest.results, f"{where}: its results")
    except ResultError as error:
        raise CapsuleError(str(error)) from error
    fault = _fault(manifest, document, tensors)
    if fault is not None:
        raise CapsuleError(f"{where}: {fault}")
    return Capsule(manifest, document, tensors, sha256, size)


def valid(kind: type[_AnyModel], content: dict[str, Any], where: str) -> _AnyModel:
    """A manifest by its schema. Raises CapsuleError naming the first field that is wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = shown(".".join(map(str, first["loc"])))
        raise CapsuleError(f"{where}: the manifest's {place}: {first['msg']} ({error.error_count()} errors)") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _strings(each)


def _fault(manifest: Manifest, document: Results, tensors: dict[str, Tensor]) -> str | None:
    """What is inconsistent: indices, references, sizes, and claims that nothing backs."""
    used: set[str] = set()
    for given in manifest.inputs:
        if given.case >= len(manifest.cases):
            return f"an input refers to case {given.case} of {len(manifest.cases)}"
        for name, reference in given.stored.items():
            used.add(reference)
            if reference not in tensors or name not in given.hashes:
                return f"an input's {name} refers to a tensor that is not stored"
        for name, patch in given.patched.items():
            used |= {patch.at, patch.values}
            at, values = tensors.get(patch.at), tensors.get(patch.values)
            if at is None or values is None or name not in given.hashes:
                return f"an input's {name} is patched with a tensor that is not stored"
            if at.dtype != DTYPES["int64"] or at.dim() != 1 or at.shape != values.shape:
                return f"an input's {name} is patched with {at.numel()} places and {values.numel()} values"
    if len({(given.case, given.dtype) for given in manifest.inputs}) != len(manifest.inputs):
        return "an input stands twice"
    if len({run.cell for run in manifest.runs}) != len(manifest.runs):
        return "a cell has two runs"
    for run in manifest.runs:
        if run.cell >= len(document.cells) or run.input >= len(manifest.inputs):
            return f"a run refers to cell {run.cell} and input {run.input}, which are not there"
        cell, given = document.cells[run.cell], manifest.inputs[run.input]
        case = manifest.cases[given.case]
        if (cell.op, cell.case, cell.dtype) != (case.op, case.case, given.dtype):
            return f"cell {cell.op} {cell.case} {cell.dtype} stands beside {case.op} {case.case} {given.dtype}"
        if cell.accumulation not in ACCUMULATIONS:
            return f"{cell.op} {cell.implementation}: accumulation is {cell.accumulation}; required: of {ACCUMULATIONS}"
        for output in run.outputs:
            fault = output_fault(output, tensors)
            if fault is None and cell.verdict == "PASS" and output.stored is None and numel(output.shape):
                fault = f"has {numel(output.shape)} elements, none of them stored, and says PASS"
            if fault is not None:
                return f"{cell.op} {cell.implementation} {cell.dtype} {cell.case}: {output.name} {fault}"
            used |= {output.stored} if output.stored else set()
    if used != set(tensors):
        return f"it carries {len(set(tensors) - used)} tensors that nothing refers to"
    backed = {run.cell for run in manifest.runs}
    for index, cell in enumerate(document.cells):
        if cell.verdict == "PASS" and index not in backed:
            return f"{cell.op} {cell.implementation} {cell.dtype} {cell.case} says PASS, and no run backs it"
    return None


def output_fault(output: OutputRecord, tensors: dict[str, Tensor]) -> str | None:
    if output.dtype not in DTYPES:
        return f"has dtype {output.dtype}"
    elements = numel(output.shape)
    if elements > MOST_ELEMENTS:
        return f"has {elements} elements; required: at most {MOST_ELEMENTS}"
    if output.stored is None:
        return None
    tensor = tensors.get(output.stored)
    if tensor is None:
        return "refers to a tensor that is not stored"
    if output.tiles is None:
        expected = list(output.shape)
        if output.hash != output.stored:  # a tensor's name is its hash
            return "is stored whole under another hash than its own"
    else:
        last = (elements - 1) // TILE
        ordered = all(a < b for a, b in zip(output.tiles, output.tiles[1:], strict=False))
        if not ordered or not output.tiles or output.tiles[-1] > last:
            return "has tiles that are out of order or outside"
        expected = [sum(min(TILE, elements - t * TILE) for t in output.tiles)]
    if list(tensor.shape) != expected or dtype_name(tensor.dtype) != output.dtype:
        return f"is stored as {dtype_name(tensor.dtype)} {list(tensor.shape)}; required: {output.dtype} {expected}"
    return None


def numel(shape: list[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count

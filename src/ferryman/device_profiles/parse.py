"""One profile file, from nodes to typed cells; the table CELLS is the schema.

Everything that is not in the table is refused with file:line: an unknown key, a number without unit, source
or kind, a wrong unit, a value out of its vocabulary.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

from ferryman.device_profiles import schema
from ferryman.device_profiles.schema import DTYPES, IDENTIFIER, Peak, Provenance
from ferryman.device_profiles.yaml_nodes import Node, read_nodes
from ferryman.errors import ProfileError

SCHEMA_VERSION = 1

# Units that each dimension may be written in. "GB" is 10^9 and "GiB" 2^30, always: vendors mix them up.
UNITS: dict[str, dict[str, str]] = {
    "bytes": {
        "B": "1",
        "KiB": "1024",
        "MiB": "1048576",
        "GiB": "1073741824",
        "kB": "1e3",
        "MB": "1e6",
        "GB": "1e9",
    },
    "bandwidth": {"GB/s": "1e9", "TB/s": "1e12"},
    "frequency": {"MHz": "1e6", "GHz": "1e9"},
    "power": {"W": "1"},
    "flops": {"GFLOP/s": "1e9", "TFLOP/s": "1e12", "PFLOP/s": "1e15"},
    "ops": {"TOP/s": "1e12", "POP/s": "1e15"},
    "flop_rate": {"FLOP/clk": "1"},
    "op_rate": {"OP/clk": "1"},
    "count": {"": "1"},
    "ratio": {"": "1"},
}
WORDS = {
    "fp8": schema.FP8_FLAVOURS,
    "accumulation": schema.ACCUMULATION,
    "rounding": schema.ROUNDINGS,
    "subnormals": schema.SUBNORMALS,
    "contraction": schema.CONTRACTION,
    "overflow": schema.OVERFLOW,
    "exact": schema.EXACT,
}
ACCUMULATE_DTYPES = ("f16", "f32", "f64", "i32")
_NUMBER = re.compile(r"([+-]?[0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?)(?: ([A-Za-z/]+))?")
_INTEGER = re.compile(r"-?[0-9]{1,15}")


def _by_dtype(prefix: str, floats: str, integers: str) -> dict[str, str]:
    return {f"{prefix}.{d}": integers if d == "i8" else floats for d in DTYPES}


# path in the file -> (dimension or vocabulary)
CELLS: dict[str, str] = {
    "units": "count",
    "xcds": "count",
    "clock": "frequency",
    "power": "power",
    "wave": "count",
    "memory.size": "bytes",
    "memory.bandwidth": "bandwidth",
    "caches.l1": "bytes",
    "caches.l2": "bytes",
    "caches.l3": "bytes",
    "limits.registers_per_unit": "count",
    "limits.registers_per_thread": "count",
    "limits.shared_memory_per_block": "bytes",
    "limits.shared_memory_per_unit": "bytes",
    "limits.max_threads_per_block": "count",
    "limits.max_threads_per_unit": "count",
    "ceilings.copy": "bandwidth",
    "numerics.fp8": "fp8",
    "identity.units": "count",
    "identity.memory": "range",
    **_by_dtype("peaks", "flops", "ops"),
    **_by_dtype("ceilings", "flops", "ops"),
    **_by_dtype("rates", "flop_rate", "op_rate"),
    **_by_dtype("numerics.accumulation", "accumulation", "accumulation"),
    **_by_dtype("numerics.bias", "ratio", "ratio"),
    **{f"numerics.arithmetic.{path}": kind for path, kind in schema.ARITHMETIC.items()},
}
GROUPS = {path[:i] for path in CELLS for i, letter in enumerate(path) if letter == "."}
PLAIN = ("name", "title", "vendor", "arch", "family", "partition", "power_mode", "extends")
OTHER = ("schema", "generic", "aliases", "sources", "features", "preferences", "compiled", "tiles", "thresholds")
TOP_KEYS = {*PLAIN, *OTHER, *(path.split(".")[0] for path in CELLS)}


@dataclass(frozen=True)
class Cell:
    value: Any
    provenance: Provenance
    origin: str
    line: int


_SHOWN = 300  # characters of a message's beginning and end


@dataclass
class Draft:
    """One file, checked by itself; what it leaves out may still come from the profile that it extends."""

    origin: str
    text: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    generic: bool = False
    exact: bool = False
    names: tuple[str, ...] = ()
    arches: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    cells: dict[str, Cell] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    features: frozenset[str] = frozenset()
    preferences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    compiled: frozenset[str] | None = None
    tiles: dict[str, Cell] = field(default_factory=dict)
    thresholds: dict[str, Cell] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.text["name"]

    def fail(self, line: int, problem: str) -> NoReturn:
        if len(problem) > 2 * _SHOWN:  # what the file has there may be large; what is required stands at the end
            problem = f"{problem[:_SHOWN]} .. {problem[-_SHOWN:]}"
        raise ProfileError(f"{self.origin}:{line}: {problem}")


def parse(data: bytes, origin: str) -> Draft:
    """Check one file; raises ProfileError with file:line."""
    root = read_nodes(data, origin)
    return _Parser(Draft(origin)).file(root)


class _Parser:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.sources: dict[str, str] = {}

    # -- shapes
    # -------------------------------------------------------------------------------------------------

    def mapping(self, node: Node, where: str) -> dict[str, Node]:
        if not isinstance(node.value, dict):
            self.draft.fail(node.line, f"{where} is {node.kind}; required: a mapping")
        return node.value

    def text(self, node: Node, where: str) -> str:
        if not isinstance(node.value, str) or node.is_null or not node.value.strip():
            self.draft.fail(node.line, f"{where} is {'empty' if node.is_null else node.kind}; required: text")
        if len(node.value) > 400 or not node.value.isprintable():
            self.draft.fail(node.line, f"{where} must be at most 400 printable characters")
        return node.value

    def texts(self, node: Node, where: str) -> tuple[str, ...]:
        if not isinstance(node.value, list):
            self.draft.fail(node.line, f"{where} is {node.kind}; required: a list")
        texts = tuple(self.text(item, where) for item in node.value)
        if len(set(texts)) != len(texts):
            self.draft.fail(node.line, f"{where} names something twice")
        return texts

    def identifier(self, node: Node, where: str) -> str:
        text = self.text(node, where)
        self.check_identifier(text, node.line, where)
        return text

    def check_identifier(self, text: str, line: int, where: str) -> None:
        if not IDENTIFIER.fullmatch(text):
            self.draft.fail(line, f"{where} {text!r} is not an identifier ({IDENTIFIER.pattern})")

    def boolean(self, node: Node, where: str) -> bool:
        if node.quoted or node.value not in ("true", "false"):
            self.draft.fail(node.line, f"{where} is {node.value!r}; required: true or false")
        return node.value == "true"

    def one_of(self, text: str, allowed: Iterable[str], line: int, where: str) -> str:
        if text not in allowed:
            self.draft.fail(line, f"{where} is {text!r}; required: one of {', '.join(allowed)}")
        return text

    def unknown(self, key: str, line: int, where: str, known: Iterable[str]) -> NoReturn:
        known = sorted(known)
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
        self.draft.fail(line, f"unknown key {key!r} {where}{hint}")

    # -- numbers
    # ------------------------------------------------------------------------------------------------

    def number(self, node: Node, dimension: str, where: str) -> int | float:
        text = self.text(node, where)
        units = UNITS[dimension]
        written = ", ".join(units) if "" not in units else "none"
        match = _NUMBER.fullmatch(text)
        if match is None:
            required = f"a number, one space and a unit ({written})" if "" not in units else "a plain number"
            self.draft.fail(node.line, f"{where} is {text!r}; required: {required}")
        amount, unit = match.group(1), match.group(2) or ""
        if unit not in units:
            wrong = f"wrong unit {unit!r}" if unit else "no unit"
            self.draft.fail(node.line, f"{where} is {text!r}: {wrong}; required: {written}")
        value = Decimal(amount) * Decimal(units[unit])
        if dimension in ("count", "bytes"):
            least = 1 if dimension == "count" else 0
            if value != value.to_integral_value() or not least <= value < 2**63:
                self.draft.fail(node.line, f"{where} is {text!r}; required: a whole number in range")
            return int(value)
        if dimension != "ratio" and value <= 0:
            self.draft.fail(node.line, f"{where} is {text!r}; required: more than zero")
        return float(value)

    def cell(self, node: Node, where: str, keys: tuple[str, ...]) -> tuple[dict[str, Node], Provenance]:
        """The entries of a cell: ``keys`` besides kind and source, all required, nothing else."""
        required = (*keys, "kind", "source")
        if not isinstance(node.value, dict):
            shape = ", ".join(f"{key}: .." for key in required)
            self.draft.fail(node.line, f"{where} is {node.kind}; required: {{{shape}}}")
        for key, item in node.value.items():
            if key not in required:
                self.unknown(key, item.line, f"in {where}", required)
        for key in required:
            if key not in node.value:
                self.draft.fail(node.line, f"{where} lacks {key!r}")
        kind = self.text(node.value["kind"], f"{where}.kind")
        self.one_of(kind, schema.KINDS, node.value["kind"].line, f"{where}.kind")
        source = self.text(node.value["source"], f"{where}.source")
        if source not in self.sources:
            self.unknown(source, node.value["source"].line, f"of the sources table, in {where}", self.sources)
        return node.value, Provenance(kind, self.sources[source])

    def fact(self, path: str, node: Node) -> None:
        dimension = CELLS[path]
        keys: tuple[str, ...] = ("value",)
        if dimension == "range":
            keys = ("min", "max")
        elif path.startswith("peaks."):
            keys = ("value", "accumulate")
        entries, provenance = self.cell(node, path, keys)
        value: Any
        if dimension == "range":
            value = tuple(self.number(entries[key], "bytes", f"{path}.{key}") for key in keys)
            if value[0] > value[1]:
                self.draft.fail(node.line, f"{path}: min is above max")
        elif dimension in WORDS:
            item = entries["value"]
            value = self.one_of(self.text(item, path), WORDS[dimension], item.line, path)
        else:
            value = self.number(entries["value"], dimension, path)
        if path.startswith("peaks."):
            item = entries["accumulate"]
            where = f"{path}.accumulate"
            value = Peak(value, self.one_of(self.text(item, where), ACCUMULATE_DTYPES, item.line, where))
        self.draft.cells[path] = Cell(value, provenance, self.draft.origin, node.line)

    def facts(self, path: str, node: Node) -> None:
        if node.is_null:
            self.draft.unset.append(path)
        elif path in CELLS:
            self.fact(path, node)
        else:
            for key, item in self.mapping(node, path).items():
                below = f"{path}.{key}"
                if below not in CELLS and below not in GROUPS:
                    siblings = (p[len(path) + 1 :] for p in (*CELLS, *GROUPS) if p.startswith(path + "."))
                    self.unknown(key, item.line, f"in {path}", {s.split(".")[0] for s in siblings})
                self.facts(below, item)

    # -- the file
    # -----------------------------------------------------------------------------------------------

    def file(self, root: Node) -> Draft:
        draft = self.draft
        top = self.mapping(root, "the file")
        for key, node in top.items():
            if key not in TOP_KEYS:
                self.unknown(key, node.line, "in the file", TOP_KEYS)
            draft.lines[key] = node.line
        for key in ("schema", "name", "title"):
            if key not in top:
                draft.fail(root.line, f"the file lacks {key!r}")
        if top["schema"].value != str(SCHEMA_VERSION):
            problem = f"schema is {top['schema'].value!r}; this version of Ferryman reads {SCHEMA_VERSION}"
            draft.fail(top["schema"].line, problem)
        for key, node in self.mapping(top["sources"], "sources").items() if "sources" in top else ():
            self.check_identifier(key, node.line, "the source name")
            self.sources[key] = self.text(node, f"sources.{key}")
        for key, node in top.items():
            self.entry(key, node)
        return draft

    def entry(self, key: str, node: Node) -> None:
        draft = self.draft
        if key == "title":
            draft.text[key] = self.text(node, key)
        elif key in PLAIN:
            draft.text[key] = self.identifier(node, key)
            if key == "vendor":
                self.one_of(draft.text[key], schema.VENDORS, node.line, key)
        elif key == "generic":
            draft.generic = self.boolean(node, key)
        elif key == "aliases":
            draft.aliases = self.texts(node, key)
            for alias in draft.aliases:
                self.check_identifier(alias, node.line, "the alias")
        elif key == "identity":
            self.identity(node)
        elif key == "features":
            draft.features = frozenset(self.texts(node, key))
            for feature in sorted(draft.features - schema.FEATURES.keys()):
                self.unknown(feature, node.line, "in features", schema.FEATURES)
        elif key == "preferences":
            for op, item in self.mapping(node, key).items():
                self.check_identifier(op, item.line, "the op")
                backends = draft.preferences[op] = self.texts(item, f"preferences.{op}")
                if not backends:
                    draft.fail(item.line, f"preferences.{op} is empty")
                for backend in backends:
                    self.check_identifier(backend, item.line, "the backend")
        elif key == "compiled":
            names = self.texts(node, key)
            for name in names:
                self.check_identifier(name, node.line, "the op")
            draft.compiled = frozenset(names)
        elif key == "tiles":
            for op, item in self.mapping(node, key).items():
                self.check_identifier(op, item.line, "the op")
                self.tile(op, item)
        elif key == "thresholds":
            for name, item in self.mapping(node, key).items():
                self.check_identifier(name, item.line, "the threshold")
                entries, provenance = self.cell(item, f"{key}.{name}", ("value",))
                value = self.number(entries["value"], "count", f"{key}.{name}")
                draft.thresholds[name] = Cell(value, provenance, draft.origin, item.line)
        elif key not in ("schema", "sources"):
            self.facts(key, node)

    def identity(self, node: Node) -> None:
        draft = self.draft
        for key, item in self.mapping(node, "identity").items():
            if key == "names":
                draft.names = self.texts(item, "identity.names")
            elif key == "arches":
                draft.arches = self.texts(item, "identity.arches")
            elif key == "exact":
                draft.exact = self.boolean(item, "identity.exact")
            elif f"identity.{key}" in CELLS:
                self.fact(f"identity.{key}", item)
            else:
                self.unknown(key, item.line, "in identity", ("names", "arches", "exact", "units", "memory"))

    def tile(self, op: str, node: Node) -> None:
        where = f"tiles.{op}"
        entries, provenance = self.cell(node, where, ("config",))
        config: dict[str, int | str | bool] = {}
        for key, item in self.mapping(entries["config"], f"{where}.config").items():
            self.check_identifier(key, item.line, "the setting")
            text = self.text(item, f"{where}.config.{key}")
            if not item.quoted and text in ("true", "false"):
                config[key] = text == "true"
            elif not item.quoted and _INTEGER.fullmatch(text):
                config[key] = int(text)
            else:
                self.check_identifier(text, item.line, f"{where}.config.{key}")
                config[key] = text
        self.draft.tiles[op] = Cell(schema.FrozenMap(config), provenance, self.draft.origin, node.line)

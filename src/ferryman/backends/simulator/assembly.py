"""AMDGPU assembly text, as LLVM prints it, into instructions: mnemonic, operands, modifiers, source line.

Nothing here knows what an instruction does. Anything that is not understood is an `AssemblyError` with its line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ferryman.backends.simulator import metadata
from ferryman.errors import AssemblyError

# Directives that place bytes, name symbols or describe debug information: nothing that runs depends on them.
_INERT = frozenset(
    [
        "text",
        "globl",
        "p2align",
        "p2alignl",
        "type",
        "size",
        "section",
        "long",
        "quad",
        "byte",
        "short",
        "ascii",
        "asciz",
        "fill",
        "zero",
        "uleb128",
        "sleb128",
        "ident",
        "protected",
        "hidden",
        "weak",
        "local",
        "addrsig",
        "addrsig_sym",
        "amdhsa_code_object_version",
        "cfi_sections",
        "cfi_startproc",
        "cfi_endproc",
        "cfi_escape",
        "cfi_undefined",
        "cfi_def_cfa",
        "cfi_def_cfa_offset",
        "cfi_offset",
        "data",
        "rodata",
        "bss",
        "int",
    ]
)
_ENCODINGS = ("e32", "e64", "dpp", "sdwa")
# Where the named scalar registers lie in the scalar register file (CDNA3 ISA, table of SGPR operands).
VCC, EXEC, M0, FLAT_SCRATCH, XNACK, TTMP = 106, 126, 124, 102, 104, 108
_NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
    "flat_scratch": (FLAT_SCRATCH, 2),
    "flat_scratch_lo": (FLAT_SCRATCH, 1),
    "flat_scratch_hi": (FLAT_SCRATCH + 1, 1),
    "xnack_mask": (XNACK, 2),
}
_REGISTER = re.compile(r"([vas]|ttmp)(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)")
_FLOAT = re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?")
_LABEL = re.compile(r"([A-Za-z_.$][\w.$]*):")
_SYMBOL = re.compile(r"[A-Za-z_.$][\w.$]*(@\w+)*")


@dataclass(frozen=True, slots=True)
class Register:
    """``count`` registers of a file from ``index``. file: "v" vector, "a" accumulation, "s" scalar."""

    file: str
    index: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant in the text: an integer, or a float that an instruction takes in its own format."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Word:
    """A name: a label, `off`, or what only one instruction understands."""

    name: str


@dataclass(frozen=True, slots=True)
class Operand:
    """What an instruction reads or writes. ``sext``: SDWA's sign extension of the selected part."""

    what: Register | Immediate | Word
    negate: bool = False
    absolute: bool = False
    sext: bool = False


@dataclass(frozen=True)
class Instruction:
    """``name`` is the mnemonic without its encoding ("e32", "e64", "dpp", "sdwa", or none). ``line`` counts from 1 in
    the assembly; ``source`` is "file:line" of the program, where debug information has it."""

    name: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: Mapping[str, Any]
    text: str
    line: int
    source: str | None = None


@dataclass
class Kernel:
    """One kernel's instructions, labels (name -> index of the instruction behind it), descriptor and metadata."""

    name: str
    arch: str
    instructions: list[Instruction]
    labels: dict[str, int]
    descriptor: dict[str, int]
    metadata: dict[str, Any]
    symbols: dict[str, int] = field(default_factory=dict)

    @property
    def arguments(self) -> list[dict[str, Any]]:
        """Every argument's offset, size and kind, in the order of the kernel's parameters."""
        return list(self.metadata.get(".args", ()))


def split(text: str) -> list[str]:
    """Parts between commas that stand outside brackets and parentheses."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        if c in "[(":
            depth += 1
        elif c in "])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    parts.append(text[begin:].strip())
    return [p for p in parts if p]


def operand(text: str, where: str) -> Operand:
    """One operand. Raises AssemblyError."""
    inner, negate, absolute, sext = text, False, False, False
    if inner.startswith("sext("):
        inner, sext = inner[5:-1], True
    if inner.startswith("neg("):
        inner, negate = inner[4:-1], True
    elif inner.startswith("-") and not inner[1:2].isdigit():
        inner, negate = inner[1:], True
    if inner.startswith("abs("):
        inner, absolute = inner[4:-1], True
    elif inner.startswith("|"):
        inner, absolute = inner.strip("|"), True
    what: Register | Immediate | Word
    if match := _REGISTER.fullmatch(inner):
        first = int(match[2] or match[3])
        last = int(match[4] or first)
        file, base = ("s", TTMP) if match[1] == "ttmp" else (match[1], 0)
        if last < first or base + last >= {"s": 128}.get(file, 256):
            raise AssemblyError(f"{where}: no such register: {inner}")
        what = Register(file, base + first, last - first + 1)
    elif inner in _NAMED:
        what = Register("s", *_NAMED[inner])
    elif inner.startswith("["):
        whole = [operand(p, where).what for p in split(inner[1:-1])]
        first_register = whole[0]
        if not isinstance(first_register, Register):
            raise AssemblyError(f"{where}: not a list of registers: {inner}")
        what = Register(first_register.file, first_register.index, len(whole))
    elif _FLOAT.fullmatch(inner):
        what = Immediate(float(inner))
    elif _NUMBER.fullmatch(inner):
        what = Immediate(int(inner, 0))
    elif _SYMBOL.fullmatch(inner) or "(" in inner:
        what = Word(inner)
    else:
        raise AssemblyError(f"{where}: not an operand: {text!r}")
    return Operand(what, negate, absolute, sext)


def _words(text: str) -> list[str]:
    """Parts between blanks that stand outside brackets and parentheses."""
    return re.findall(r"(?:[^\s\[(]|\[[^\]]*\]|\([^)]*\))+", text)


def _modifier(text: str, where: str) -> tuple[str, Any]:
    name, _, value = text.partition(":")
    if not value:
        return name, True
    if value.startswith("["):
        return name, tuple(int(v, 0) for v in split(value[1:-1]))
    if _NUMBER.fullmatch(value):
        return name, int(value, 0)
    if _SYMBOL.fullmatch(value) or "(" in value:
        return name, value
    raise AssemblyError(f"{where}: not a modifier: {text!r}")


def instruction(text: str, line: int, source: str | None = None) -> Instruction:
    """One line without its comment. Raises AssemblyError."""
    where = f"line {line}"
    mnemonic, _, rest = text.strip().partition(" ")
    name, _, encoding = mnemonic.rpartition("_")
    if encoding not in _ENCODINGS:
        name, encoding = mnemonic, ""
    if name.startswith("s_waitcnt") or name in ("s_sendmsg", "s_setreg_b32", "s_setreg_imm32_b32", "s_getreg_b32"):
        parts = [] if name == "s_waitcnt" else split(rest)
        modifiers = {"counts": rest} if name == "s_waitcnt" else {}
        return Instruction(
            name, encoding, tuple(operand(p, where) for p in parts), modifiers, text.strip(), line, source
        )
    parts = split(rest)
    modifiers = {}
    if parts:
        first, *more = _words(parts[-1])
        parts[-1] = first
        if ":" in first and not first.startswith(("v[", "s[", "a[", "|", "-", "ttmp[", "[")):
            parts.pop()  # an instruction without operands
            more.insert(0, first)
        modifiers = dict(_modifier(m, where) for m in more)
    return Instruction(name, encoding, tuple(operand(p, where) for p in parts), modifiers, text.strip(), line, source)


class _Reader:
    """Walks the text once."""

    def __init__(self, text: str) -> None:
        self.files: dict[str, str] = {}
        self.target: str | None = None
        self.code: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
        self.descriptors: dict[str, dict[str, int]] = {}
        self.metadata: dict[str, Any] = {}
        self.symbols: dict[str, int] = {}
        self.lds = 0
        self._functions: set[str] = set()
        self._body: tuple[list[Instruction], dict[str, int]] | None = None
        self._in_code = True
        self._source: str | None = None
        lines = iter(enumerate(text.splitlines(), 1))
        for number, line in lines:
            try:
                self._take(line, number, lines)
            except AssemblyError:
                raise
            except (ValueError, IndexError) as error:
                raise AssemblyError(f"line {number}: not understood: {line.strip()}") from error

    def _take(self, line: str, number: int, lines: Any) -> None:
        words = line.split(";", 1)[0].strip() if '"' not in line else line.strip()
        if not words:
            return
        if words == ".amdgpu_metadata":
            self._metadata(lines, number)
        elif match := _LABEL.match(words):
            self._label(match[1])
            if words[match.end() :].strip():
                self._line(words[match.end() :].strip(), number)
        elif words.startswith(".amdhsa_kernel"):
            self._descriptor(words.split()[1], lines)
        elif words.startswith("."):
            self._directive(words, number)
        elif self._in_code:
            self._line(words, number)
        else:
            raise AssemblyError(f"line {number}: an instruction outside .text: {words}")

    def _label(self, name: str) -> None:
        if name in self._functions:
            self._body = self.code.setdefault(name, ([], {}))
        if self._body is not None:
            self._body[1][name] = len(self._body[0])

    def _line(self, text: str, number: int) -> None:
        if self._body is None:
            raise AssemblyError(f"line {number}: an instruction outside any function: {text}")
        self._body[0].append(instruction(text, number, self._source))

    def _directive(self, words: str, number: int) -> None:
        name, *more = words[1:].split(None, 1)
        rest = more[0] if more else ""
        if name == "file":
            match = re.match(r'(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', rest.strip())
            if match:
                self.files[match[1]] = match[2]
        elif name == "loc":
            index, line, *_ = rest.split()
            self._source = f"{self.files.get(index, '?')}:{line}" if line != "0" else None
        elif name == "type" and "@function" in rest:
            self._functions.add(split(rest)[0])
        elif name == "amdgcn_target":
            self.target = rest.strip().strip('"').rpartition("-")[2].split(":")[0]
        elif name == "section":
            self._in_code = ".text" in rest
        elif name == "text":
            self._in_code = True
        elif name == "amdgpu_lds":
            symbol, size, align = split(rest)
            self.lds = -(-self.lds // int(align)) * int(align)
            self.symbols[symbol] = self.lds
            self.lds += int(size)
        elif name == "set":
            symbol, value = split(rest)
            if _NUMBER.fullmatch(value):
                self.symbols[symbol] = int(value, 0)
        elif name not in _INERT:
            raise AssemblyError(f"line {number}: unknown directive .{name}")

    def _descriptor(self, name: str, lines: Any) -> None:
        descriptor: dict[str, int] = {}
        for _, line in lines:
            words = line.split(";", 1)[0].split()
            if not words:
                continue
            if words[0] == ".end_amdhsa_kernel":
                self.descriptors[name] = descriptor
                return
            value = words[1] if len(words) == 2 else ""
            descriptor[words[0].removeprefix(".amdhsa_")] = int(value, 0) if _NUMBER.fullmatch(value) else -1
        raise AssemblyError(f"the descriptor of {name} has no end: the text is cut off")

    def _metadata(self, lines: Any, number: int) -> None:
        kept: list[str] = []
        for _, line in lines:
            if line.strip() == ".end_amdgpu_metadata":
                self.metadata = metadata.read("\n".join(kept), number)
                return
            kept.append(line)
        raise AssemblyError(f"line {number}: the metadata has no end: the text is cut off")


def kernels(text: str) -> dict[str, Kernel]:
    """Every kernel of an assembly file. Raises AssemblyError, with the line, for what it does not understand."""
    reader = _Reader(text)
    known = {k[".name"]: k for k in (reader.metadata or {}).get("amdhsa.kernels", ())}
    by_name = {}
    for name, descriptor in reader.descriptors.items():
        if name not in reader.code or not reader.code[name][0]:
            raise AssemblyError(f"kernel {name} has a descriptor and no instructions")
        if name not in known:
            raise AssemblyError(
                f"kernel {name} has no metadata: the text is cut off, or of another code object version"
            )
        body, labels = reader.code[name]
        descriptor["group_segment_fixed_size"] = max(descriptor.get("group_segment_fixed_size", 0), reader.lds)
        by_name[name] = Kernel(name, reader.target or "", body, labels, descriptor, known[name], reader.symbols)
    if not by_name:
        raise AssemblyError("no kernel in this text: it has no .amdhsa_kernel")
    return by_name

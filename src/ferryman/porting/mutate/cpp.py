"""Mutation operators for C++ kernels: rules over tokens, and one text that holds many mutants, chosen by an index.

There is no parser of C++ here. Regions are found whose ends tokens show: the expression of a ``return``, an
initialiser, a
condition, a whole statement. A mutant changes a few tokens of its region. `schemata` writes every variant of a region
beside the others, under ``ferryman_mutant == n``, so that one compilation serves a batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ferryman.porting.mutate.edits import Edit

_TOKEN = re.compile(
    r'(?P<skip>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)|(?P<text>"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\')'
    r"|(?P<number>0[xX][0-9a-fA-F]+[uUlL]*|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fFuUlL]*)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|.)",
    re.DOTALL | re.MULTILINE,
)
_NOT_CODE = {
    "typedef",
    "using",
    "template",
    "struct",
    "static",
    "constexpr",
    "static_assert",
    "namespace",
    "enum",
    "case",
    "break",
    "continue",
    "goto",
    "class",
    "public",
    "private",
    "default",
    "asm",
    "else",
    "do",
    "extern",
}
_COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_OPEN, _CLOSE = "([{", ")]}"
_WAITS = ("barrier", "wait", "fence", "sync", "arrive")
NARROW = """
static inline float ferryman_narrow(float v) {
    unsigned int bits;
    __builtin_memcpy(&bits, &v, 4);
    bits = (bits & 0x7f800000u) == 0x7f800000u ? bits : bits & 0xffff0000u;
    __builtin_memcpy(&v, &bits, 4);
    return v;
}
"""
PRELUDE = 'extern "C" { int ferryman_mutant = 0; }\n' + NARROW


@dataclass(frozen=True)
class Token:
    text: str
    start: int
    kind: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True)
class Region:
    """Tokens that are replaced together: an expression, or a whole statement with its semicolon."""

    tokens: tuple[Token, ...]
    statement: bool

    @property
    def start(self) -> int:
        return self.tokens[0].start

    @property
    def end(self) -> int:
        return self.tokens[-1].end


def tokens(text: str) -> list[Token]:
    return [Token(m.group(), m.start(), str(m.lastgroup)) for m in _TOKEN.finditer(text) if m.lastgroup != "skip"]


def _closing(found: Sequence[Token], at: int) -> int:
    """The index of the bracket that closes the one at ``at``; the last index where there is none."""
    depth = 0
    for i in range(at, len(found)):
        depth += (found[i].text in _OPEN) - (found[i].text in _CLOSE)
        if depth == 0:
            return i
    return len(found) - 1


def _until(found: Sequence[Token], at: int, mark: str) -> int | None:
    """The index of the first ``mark`` outside brackets, before the brackets around close."""
    depth = 0
    for i in range(at, len(found)):
        if depth == 0 and found[i].text == mark:
            return i
        depth += (found[i].text in _OPEN) - (found[i].text in _CLOSE)
        if depth < 0:
            return None
    return None


def regions(text: str) -> Iterator[Region]:
    """Every region of a source, in order; a statement's own tokens are in no other region."""
    found = tokens(text)
    i = 0
    while i < len(found):
        token, before = found[i], found[i - 1].text if i else ";"
        if token.text in ("if", "while") and i + 1 < len(found) and found[i + 1].text == "(":
            end = _closing(found, i + 1)
            yield Region(tuple(found[i + 2 : end]), False)
            i = end + 1
            continue
        if token.text in ("if", "for") and i + 2 < len(found):
            opened = i + 1 if found[i + 1].text == "(" else i + 2
            end = _closing(found, opened)
            if token.text == "for":
                first = _until(found, opened + 1, ";")
                second = None if first is None else _until(found, first + 1, ";")
                if first is not None and second is not None and second > first + 1:
                    yield Region(tuple(found[first + 1 : second]), False)
            i = end + 1
            continue
        begins = before in (";", "{", "}", "else") or (before == ")" and token.kind == "name")
        if not begins or token.text in _NOT_CODE or token.kind != "name":
            i += 1
            continue
        stop = _until(found, i, ";")
        body = _until(found, i, "{")
        if stop is None or (body is not None and body < stop):
            i += 1
            continue
        yield from _statement(found[i : stop + 1])
        i = stop + 1


def _statement(found: list[Token]) -> Iterator[Region]:
    texts = [t.text for t in found]
    if texts[0] == "return" and len(found) > 2:
        yield Region(tuple(found[1:-1]), False)
        return
    if "constexpr" in texts or "static" in texts or "__shared__" in texts:
        return
    equal = _until(found, 0, "=")
    declares = found[0].text in ("const", "auto", "typename", "float", "int", "bool", "u32", "i64", "unsigned") or (
        len(found) > 1 and found[1].kind == "name"
    )
    if equal is not None and equal >= 2 and not declares:  # T *out = .., Pack<T> x = ..: `a * b = ..` is no expression
        declares = found[equal - 1].kind == "name" and found[equal - 2].text in ("*", "&", ">")
        declares = declares and found[0].kind == "name"
    if declares:
        if equal is not None and _until(found, equal + 1, ",") is None and texts[equal + 1] not in ("{", "["):
            yield Region(tuple(found[equal + 1 : -1]), False)
    elif any(t in ("(", "=", "+=", "-=", "*=", "^=", "|=", "&=") for t in texts):
        yield Region(tuple(found), True)


def _primary(found: Sequence[Token], at: int) -> int | None:
    """The index behind the operand that begins at ``at``: a name, number or bracket with its members and calls."""
    if at >= len(found) or (found[at].kind not in ("name", "number") and found[at].text != "("):
        return None
    i = _closing(found, at) + 1 if found[at].text == "(" else at + 1
    while i < len(found):
        if found[i].text in "([" and found[i].text:
            i = _closing(found, i) + 1
        elif found[i].text in (".", "->", "::") and i + 1 < len(found):
            i += 2
        else:
            break
    return i


def _changes(region: Region, text: str) -> Iterator[tuple[str, int, int, str]]:
    """(operator, start, end, new) of every edit inside a region."""
    found = region.tokens
    for i, token in enumerate(found):
        spaced = text[token.start - 1] == " " and text[token.end : token.end + 1] in (" ", "\n")
        after = _primary(found, i + 1)
        follows = found[after].text if after is not None and after < len(found) else ""
        if token.text in _COMPARED and spaced:
            yield "comparison turned", token.start, token.end, _COMPARED[token.text]
            if token.text in ("<", "<=") and after is not None:
                yield "one short", found[after - 1].end, found[after - 1].end, " - 1"
        if token.text in "+-" and spaced and i:
            yield "sign", token.start, token.end, "-" if token.text == "+" else "+"
            if after is not None and follows not in ("*", "/", "%"):
                yield "term left out", token.start, found[after - 1].end, ""
        if token.text in "*/" and spaced and i and after is not None:
            yield "factor left out", token.start, found[after - 1].end, ""
        if token.text in ("&&", "||"):
            yield "mask in part", token.start, token.end, "||" if token.text == "&&" else "&&"
        if token.kind == "number" and spaced and not token.text.lower().startswith("0x"):
            digits = token.text.rstrip("fFuUlL")
            tail, real = token.text[len(digits) :], any(c in digits for c in ".e")
            value = float(digits) * 2 or 1.0
            yield "constant changed", token.start, token.end, f"{value!r}{tail}" if real else f"{int(digits) + 1}{tail}"
        if token.kind == "name" and i + 1 < len(found) and found[i + 1].text == "(":
            yield from _called(found, i, text)
        if token.text in ("+=", "*=", "-=") and region.statement:
            yield "factor left out" if token.text == "*=" else "term left out", token.start, token.end, "="
            if token.text == "+=":
                whole = text[region.start : token.start].strip()
                value_text = text[token.end : region.end].strip().rstrip(";")
                new = f"{whole} = ferryman_narrow({whole} + ({value_text}));"
                yield "accumulator narrowed", region.start, region.end, new
                yield "sign", token.start, token.end, "-="
    strides = sorted({t.text for t in found if t.text.endswith("stride")})
    for token in found:
        if len(strides) > 1 and token.text in strides:
            other = strides[(strides.index(token.text) + 1) % len(strides)]
            yield "parameter swapped", token.start, token.end, other
    if region.statement:
        named = any(w in t.text for t in found for w in _WAITS)
        yield "wait removed" if named else "statement left out", region.start, region.end, ";"


def _called(found: Sequence[Token], i: int, text: str) -> Iterator[tuple[str, int, int, str]]:
    name, end = found[i], _closing(found, i + 1)
    whole = i  # where the call begins, with what qualifies its name
    while whole >= 2 and found[whole - 1].text in ("::", ".", "->") and found[whole - 2].kind == "name":
        whole -= 2
    swapped = {"max": "min", "min": "max", "Max": "Min"}
    for old, new in swapped.items():
        if name.text.endswith(old):
            yield "maximum left out", name.start, name.end, name.text.removesuffix(old) + new
    comma = _until(found[: end + 1], i + 2, ",")
    if comma is None and end > i + 2:
        yield "function left out", found[whole].start, found[end].end, text[found[i + 1].start : found[end].end]
    if comma is not None and _until(found[: end + 1], comma + 1, ",") is None:
        first, second = text[found[i + 2].start : found[comma].start], text[found[comma + 1].start : found[end].start]
        yield "operands swapped", found[i + 2].start, found[end].start, f"{second}, {first}"
        if name.text.endswith(("max", "min")):
            yield "maximum left out", found[whole].start, found[end].end, f"({first})"


def functions(text: str) -> list[tuple[int, str]]:
    """(place, name) of every function's definition."""
    found = re.finditer(r"(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?\{", text)
    return [(m.start(), m[1]) for m in found if m[1] not in ("if", "for", "while", "switch", "constexpr")]


def edits(text: str, file: str) -> list[Edit]:
    """Every edit of a C++ source."""
    found: dict[tuple[int, str, str], Edit] = {}
    around = functions(text)
    for region in regions(text):
        if not region.tokens:
            continue
        inside = [n for at, n in around if at < region.start]
        for operator, start, end, new in _changes(region, text):
            line = text.count("\n", 0, start) + 1
            last = text.count("\n", 0, end) + 1
            edit = Edit(file, start, text[start:end], new, operator, inside[-1] if inside else "", line, last)
            found.setdefault((start, edit.old, new), edit)
    return sorted(found.values(), key=lambda e: (e.start, e.operator, e.new))


def schemata(text: str, file: str, chosen: Mapping[int, Edit]) -> str:
    """A source in which ``ferryman_mutant == n`` runs edit ``n`` of ``chosen``, and 0 none. A compiler's complaint
    about
    edit n names line n of the file "mutant" (`refused`)."""
    made, at = [], 0
    for region in regions(text):
        if not region.tokens:
            continue
        own = {n: e for n, e in chosen.items() if region.start <= e.start and e.start + len(e.old) <= region.end}
        if not own:
            continue
        old = text[region.start : region.end]
        back = f'\n#line {text.count(chr(10), 0, region.end) + 1} "{file}"\n'
        parts = []
        for n, edit in own.items():
            offset = edit.start - region.start
            new = old[:offset] + edit.new + old[offset + len(edit.old) :]
            flat = " ".join(re.sub(r"//[^\n]*", " ", new).split())
            body = f'\n#line {n} "mutant"\n{{ {flat} }}\n' if region.statement else f'\n#line {n} "mutant"\n({flat})\n'
            parts.append(
                f"if (ferryman_mutant == {n}) {body} else "
                if region.statement
                else f"ferryman_mutant == {n} ? {body} : "
            )
        whole = f"{{ {''.join(parts)}{{ {old}\n }} }}" if region.statement else f"({''.join(parts)}({old}\n))"
        made += [text[at : region.start], whole, back]
        at = region.end
    return "".join(made) + text[at:]


def refused(complaints: str) -> set[int]:
    """The edits that a compiler's messages name as errors, also where it was reached from."""
    lines = complaints.splitlines()
    return {int(m.group(1)) for line in lines if "error" in line for m in [re.search(r"mutant:(\d+)", line)] if m}

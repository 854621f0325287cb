"""Mutation operators for C++ kernels: rules over tokens, and one text that holds many mutants, chosen by an index.

There is no parser of C++ here. Regions are found whose ends tokens show: the expression of a ``return``, an
initialiser, a
condition, a whole statement. A mutant changes a few tokens of its region. `schemata` writes every variant of a region
beside the others, under ``ferryman_at(n)``, so that one compilation serves a batch.
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
MOST = 4096  # edits of one library
PRELUDE = (
    f'extern "C" {{ int ferryman_mutant = 0; unsigned char ferryman_seen[{MOST}]; }}\n'
    "static inline bool ferryman_at(int n) { ferryman_seen[n] = 1; return ferryman_mutant == n; }\n" + NARROW
)


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
    """Tokens that are replaced together: an expression, or a whole statement with its semicolon. condition: of an
    `if`."""

    tokens: tuple[Token, ...]
    statement: bool
    condition: bool = False

    @property
    def start(self) -> int:
        return self.tokens[0].start

    @property
    def end(self) -> int:
        return self.tokens[-1].end


def tokens(text: str) -> list[Token]:
    return [Token(m.group(), m.start(), str(m.lastgroup)) for m in _TOKEN.finditer(text) if m.lastgroup != "skip"]


def _closing(stream: Sequence[Token], at: int) -> int:
    """The index of the bracket that closes the one at ``at``; the last index where there is none."""
    depth = 0
    for i in range(at, len(stream)):
        depth += (stream[i].text in _OPEN) - (stream[i].text in _CLOSE)
        if depth == 0:
            return i
    return len(stream) - 1


def _until(stream: Sequence[Token], at: int, mark: str) -> int | None:
    """The index of the first ``mark`` outside brackets, before the brackets around close."""
    depth = 0
    for i in range(at, len(stream)):
        if depth == 0 and stream[i].text == mark:
            return i
        depth += (stream[i].text in _OPEN) - (stream[i].text in _CLOSE)
        if depth < 0:
            return None
    return None


def regions(text: str) -> Iterator[Region]:
    """Every region of a source, in order; a statement's own tokens are in no other region."""
    stream = tokens(text)
    i, body_at = 0, -1  # where the statement of an `if` or a loop begins
    while i < len(stream):
        token, before = stream[i], stream[i - 1].text if i else ";"
        if token.text in ("if", "while") and i + 1 < len(stream) and stream[i + 1].text == "(":
            end = _closing(stream, i + 1)
            yield Region(tuple(stream[i + 2 : end]), False, token.text == "if")
            i = body_at = end + 1
            continue
        if token.text in ("if", "for") and i + 2 < len(stream):
            opened = i + 1 if stream[i + 1].text == "(" else i + 2
            end = _closing(stream, opened)
            if token.text == "for":
                first = _until(stream, opened + 1, ";")
                second = None if first is None else _until(stream, first + 1, ";")
                begun = None if first is None else _until(stream[: first + 1], opened + 1, "=")
                if first is not None and begun is not None and _until(stream[: first + 1], begun, ",") is None:
                    yield Region(tuple(stream[begun + 1 : first]), False)
                if first is not None and second is not None and second > first + 1:
                    yield Region(tuple(stream[first + 1 : second]), False)
            i = body_at = end + 1
            continue
        begins = before in (";", "{", "}", "else") or i == body_at
        if not begins or token.text in _NOT_CODE or token.kind != "name":
            i += 1
            continue
        stop = _until(stream, i, ";")
        body = _until(stream, i, "{")
        if stop is None or (body is not None and body < stop):
            i += 1
            continue
        yield from _statement(stream[i : stop + 1])
        i = stop + 1


def _statement(stream: list[Token]) -> Iterator[Region]:
    texts = [t.text for t in stream]
    if texts[0] == "return" and len(stream) > 2:
        yield Region(tuple(stream[1:-1]), False)
        return
    if "constexpr" in texts or "static" in texts or "__shared__" in texts or (texts[0].isupper() and texts[1] == "("):
        return  # a macro's call may be a declaration
    equal = _until(stream, 0, "=")
    declares = stream[0].text in ("const", "auto", "typename", "float", "int", "bool", "u32", "i64", "unsigned") or (
        len(stream) > 1 and stream[1].kind == "name"
    )
    if equal is not None and equal >= 2 and not declares:  # T *out = .., Pack<T> x = ..: `a * b = ..` is no expression
        declares = stream[equal - 1].kind == "name" and stream[equal - 2].text in ("*", "&", ">", "const")
        declares = declares and stream[0].kind == "name"
    if texts[1] == "<" and ">" in texts:  # Sum<T> sum(..)
        declares = declares or stream[texts.index(">") + 1].kind == "name"
    if declares:
        if equal is not None and _until(stream, equal + 1, ",") is None and texts[equal + 1] not in ("{", "["):
            yield Region(tuple(stream[equal + 1 : -1]), False)
    elif any(t in ("(", "=", "+=", "-=", "*=", "^=", "|=", "&=") for t in texts):
        yield Region(tuple(stream), True)


def _templated(stream: Sequence[Token], at: int) -> int | None:
    """The index behind template arguments that begin at ``at`` and that a call follows: `f<T>(x)`."""
    if stream[at].text != "<" or not at or stream[at].start != stream[at - 1].end:
        return None
    stop = next((i for i in range(at, len(stream) - 1) if stream[i].text == ">"), None)
    return None if stop is None or stream[stop + 1].text != "(" else stop + 1


def _primary(stream: Sequence[Token], at: int) -> int | None:
    """The index behind the operand that begins at ``at``: a name, number or bracket with its members and calls."""
    if at >= len(stream) or (stream[at].kind not in ("name", "number") and stream[at].text != "("):
        return None
    i = _closing(stream, at) + 1 if stream[at].text == "(" else at + 1
    while i < len(stream):
        templated = _templated(stream, i)
        if stream[i].text in "([" and stream[i].text:
            i = _closing(stream, i) + 1
        elif templated is not None:
            i = templated
        elif stream[i].text in (".", "->", "::") and i + 1 < len(stream):
            i += 2
        else:
            break
    return i


def _changes(region: Region, text: str) -> Iterator[tuple[str, int, int, str]]:
    """(operator, start, end, new) of every edit inside a region."""
    stream = region.tokens
    for i, token in enumerate(stream):
        spaced = text[token.start - 1] == " " and text[token.end : token.end + 1] in (" ", "\n")
        after = _primary(stream, i + 1)
        follows = stream[after].text if after is not None and after < len(stream) else ""
        if token.text in _COMPARED and spaced:
            yield "comparison turned", token.start, token.end, _COMPARED[token.text]
            if token.text in ("<", "<=") and after is not None:
                yield "one short", stream[after - 1].end, stream[after - 1].end, " - 1"
        if token.text in "+-" and spaced and i:
            yield "sign", token.start, token.end, "-" if token.text == "+" else "+"
            if after is not None and follows not in ("*", "/", "%"):
                yield "term left out", token.start, stream[after - 1].end, ""
        if token.text in "*/" and spaced and i and after is not None:
            yield "factor left out", token.start, stream[after - 1].end, ""
        if token.text in ("&&", "||"):
            yield "mask in part", token.start, token.end, "||" if token.text == "&&" else "&&"
        alone = text[token.start - 1] == " " and text[token.end : token.end + 1] in (" ", "\n", ")", ",", ";")
        if token.kind == "number" and alone and not token.text.lower().startswith("0x"):
            digits = token.text.rstrip("fFuUlL")
            tail, real = token.text[len(digits) :], any(c in digits for c in ".e")
            value = float(digits) * 2 or 1.0
            yield "constant changed", token.start, token.end, f"{value!r}{tail}" if real else f"{int(digits) + 1}{tail}"
        if token.kind == "name" and i + 1 < len(stream) and stream[i + 1].text == "(":
            yield from _called(stream, i, text)
        if token.text in ("+=", "*=", "-=") and region.statement:
            yield "factor left out" if token.text == "*=" else "term left out", token.start, token.end, "="
            if token.text == "+=":
                whole = text[region.start : token.start].strip()
                value_text = text[token.end : region.end].strip().rstrip(";")
                new = f"{whole} = ferryman_narrow({whole} + ({value_text}));"
                yield "accumulator narrowed", region.start, region.end, new
                yield "sign", token.start, token.end, "-="
    yield from _branches(region)
    strides = sorted({t.text for t in stream if t.text.endswith("stride")})
    for token in stream:
        if len(strides) > 1 and token.text in strides:
            other = strides[(strides.index(token.text) + 1) % len(strides)]
            yield "parameter swapped", token.start, token.end, other
    if region.statement:
        named = any(w in t.text for t in stream for w in _WAITS)
        yield "wait removed" if named else "statement left out", region.start, region.end, ";"


def _branches(region: Region) -> Iterator[tuple[str, int, int, str]]:
    """A condition, of an `if` or before a `?`, that always or never holds."""
    stream, ends = region.tokens, []
    if region.condition:
        ends.append((region.start, region.end))
    for i, token in enumerate(stream):
        if token.text == "?":
            first, depth = i, 0
            while first:
                before = stream[first - 1].text
                depth += (before in _CLOSE) - (before in _OPEN)
                if depth < 0 or (depth == 0 and before in ("=", ",", ":", "?", "+=", "-=", "*=")):
                    break
                first -= 1
            ends.append((stream[first].start, stream[i - 1].end))
    for start, end in ends:
        yield "branch turned", start, end, "true"
        yield "branch turned", start, end, "false"


def _called(stream: Sequence[Token], i: int, text: str) -> Iterator[tuple[str, int, int, str]]:
    name, end = stream[i], _closing(stream, i + 1)
    whole = i  # where the call begins, with what qualifies its name
    while whole >= 2 and stream[whole - 1].text in ("::", ".", "->") and stream[whole - 2].kind == "name":
        whole -= 2
    swapped = {"max": "min", "min": "max", "Max": "Min"}
    for old, new in swapped.items():
        if name.text.endswith(old):
            yield "maximum left out", name.start, name.end, name.text.removesuffix(old) + new
    comma = _until(stream[: end + 1], i + 2, ",")
    if comma is None and end > i + 2:
        yield "function left out", stream[whole].start, stream[end].end, text[stream[i + 1].start : stream[end].end]
    if comma is not None and _until(stream[: end + 1], comma + 1, ",") is None:
        first, second = (
            text[stream[i + 2].start : stream[comma].start],
            text[stream[comma + 1].start : stream[end].start],
        )
        yield "operands swapped", stream[i + 2].start, stream[end].start, f"{second}, {first}"
        if name.text.endswith(("max", "min")):
            yield "maximum left out", stream[whole].start, stream[end].end, f"({first})"


def functions(text: str) -> list[tuple[int, str]]:
    """(place, name) of every function's definition."""
    code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)
    matches = re.finditer(r"(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?\{", code)
    return [(m.start(), m[1]) for m in matches if m[1] not in ("if", "for", "while", "switch", "constexpr", "defined")]


def edits(text: str, file: str) -> list[Edit]:
    """Every edit of a C++ source."""
    distinct: dict[tuple[int, str, str], Edit] = {}
    around = functions(text)
    for region in regions(text):
        if not region.tokens:
            continue
        inside = [n for at, n in around if at < region.start]
        for operator, start, end, new in _changes(region, text):
            line = text.count("\n", 0, start) + 1
            last = text.count("\n", 0, end) + 1
            edit = Edit(file, start, text[start:end], new, operator, inside[-1] if inside else "", line, last)
            distinct.setdefault((start, edit.old, new), edit)
    return sorted(distinct.values(), key=lambda e: (e.start, e.operator, e.new))


def schemata(text: str, file: str, chosen: Mapping[int, Edit]) -> str:
    """A source in which ``ferryman_mutant == n`` runs edit n of ``chosen``, and 0 none. With 0, ``ferryman_seen[n]``
    tells whether a run came by edit n. A compiler's complaint about edit n names line n of the file "mutant"."""
    pieces, at = [], 0
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
            parts.append(f"if (ferryman_at({n})) {body} else " if region.statement else f"ferryman_at({n}) ? {body} : ")
        whole = f"{{ {''.join(parts)}{{ {old}\n }} }}" if region.statement else f"({''.join(parts)}({old}\n))"
        pieces += [text[at : region.start], whole, back]
        at = region.end
    return "".join(pieces) + text[at:]


def refused(complaints: str) -> set[int]:
    """The edits that a compiler's messages name as errors, also where it was reached from."""
    lines = complaints.splitlines()
    return {int(m.group(1)) for line in lines if "error" in line for m in [re.search(r"mutant:(\d+)", line)] if m}

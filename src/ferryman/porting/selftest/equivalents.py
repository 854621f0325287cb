"""Which mutants change nothing, kernel by kernel, and the reasons that are written for them.

An op's are in its evidence. Functions that all families use belong to no op: theirs stand here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ferryman.dispatch import registry
from ferryman.ops.evidence import Equivalent
from ferryman.porting.selftest.report import DRAWS, MOST_EQUIVALENT, Record, SelfTest

SHARED = (
    Equivalent(
        "triton.narrow",
        ("x.to(dtype) -> (x) in return x.to(dtype)",),
        "A store narrows to its pointer's dtype by itself; bfloat16 takes another line when interpreted.",
    ),
    Equivalent(
        "triton.widen",
        ("x.to(tl.float32) -> (x) in return x.to(tl.float32)",),
        "What meets a float32 next is widened by it; a sum of two numbers of float16 is rounded to float16 either way.",
    ),
    Equivalent(
        "triton.softplus",
        (
            "0.058823529411764705 -> 0.11764705882352941 in p = 0.058823529411764705",
            "0.06666666666666667 -> 0.13333333333333333 in p = p * square + 0.06666666666666667",
        ),
        "r is 1/3 at most: r^16 / 17 and r^14 / 15 of the series are 0.03 and 0.24 units of 2^-24. The right one is "
        "off by 5.2 units, and a step may be off by 6.",
        within=True,
    ),
    Equivalent(
        "cuda.after_previous",
        ("after_previous(); -> ; in after_previous();",),
        "Nothing is started here ahead of the kernel before it.",
    ),
    Equivalent(
        "cuda.divide",
        (
            "((a | b) >> 32) == 0 -> false in if (((a | b) >> 32) == 0) {",
            "== -> != in if (((a | b) >> 32) == 0) {",
        ),
        "Either branch gives the quotient of numbers below 2^32, and no tensor here has more elements.",
    ),
    Equivalent(
        "cuda.load",
        ("4 -> 5 in platform::Memory<STEP>::template load<ACCESS>((const char*)p + at, pack.word + at / 4);",),
        "A pack of at most 16 bytes is one access, at 0.",
    ),
    Equivalent(
        "cuda.store",
        ("+ at -> in platform::Memory<STEP>::store((char*)p + at, pack.word + at / 4);",),
        "A pack of at most 16 bytes is one access, at 0.",
    ),
)


@dataclass
class Kernel:
    """What became of the mutants of one kernel function; of an op's rules together."""

    name: str
    decided: int = 0
    equivalent: list[Record] = field(default_factory=list)

    @property
    def share(self) -> float:
        return len(self.equivalent) / self.decided if self.decided else 0.0

    @property
    def over(self) -> bool:
        return self.share > MOST_EQUIVALENT


def kernels(records: Iterable[Record]) -> list[Kernel]:
    known: dict[str, Kernel] = {}
    for record in records:
        if record.outcome != "not run":
            kernel = known.setdefault(record.kernel, Kernel(record.kernel))
            kernel.decided += 1
            kernel.equivalent += [record] if record.outcome == "equivalent" else []
    return [known[name] for name in sorted(known)]


def _written(record: Record) -> Equivalent | None:
    """What the op's evidence says of a mutant, or, of a shared function, `SHARED`."""
    own = registry.evidence(registry.primitive(record.op)).equivalents
    shared = f"{record.backend}.{record.function}"
    for one in (*own, *SHARED):
        if one.kernel in (record.kernel, shared) and record.change in one.edits:
            return one
    return None


def reason(record: Record) -> str | None:
    """Why a mutant changes nothing, or nothing beyond the bounds; None where no reason is written."""
    one = _written(record)
    return None if one is None else one.why


def within(record: Record) -> bool:
    """Whether a mutant changes bits, and is known to stay within the bounds."""
    one = _written(record)
    return one is not None and one.within


def unexplained(records: Iterable[Record]) -> list[Record]:
    """The equivalent ones of kernels that have too many of them, without a reason."""
    return [r for k in kernels(records) if k.over for r in k.equivalent if reason(r) is None]


def reasons(records: Iterable[Record]) -> list[str]:
    """Every kernel with too many, a line each, and one for each of its equivalent mutants: its reason, or that there is
    none."""
    lines = []
    for kernel in kernels(records):
        if kernel.over:
            lines.append(f"{kernel.name}: {kernel.share:.0%} equivalent ({len(kernel.equivalent)} of {kernel.decided})")
            lines += [f"  {r.change} ({r.operator}): {reason(r) or 'reason missing'}" for r in kernel.equivalent]
    return lines


def page(documents: Mapping[str, SelfTest]) -> str:
    """docs/equivalents.md without its first line, from published self-tests by name."""
    lines = [
        "# Mutants that change nothing",
        "",
        "An equivalent mutant gives the right kernel's bits on every cell of the judge that it reaches, and on",
        f"{DRAWS} draws of the op's domain that the judge does not use ([selftest.md](selftest.md)). Where over",
        f"{MOST_EQUIVALENT:.0%} of one kernel's are, each has a reason, in its op's evidence. All rules of an op, over",
        "results, arguments and its definition, count as one kernel. Reasons of functions that all families use are in",
        "`ferryman/porting/selftest/equivalents.py`.",
    ]
    for name, document in documents.items():
        facts, all_of = document.environment, kernels(document.listing)
        over = [k for k in all_of if k.over]
        decided, same = sum(k.decided for k in all_of), sum(len(k.equivalent) for k in all_of)
        lines += [
            "",
            f"## {name}",
            "",
            f"{facts.device_name or facts.device}, torch {facts.versions['torch']}, seed {facts.seed}: {same} of "
            f"{decided} decided mutants are equivalent, in {sum(bool(k.equivalent) for k in all_of)} of {len(all_of)} "
            f"kernels; {len(over)} are over {MOST_EQUIVALENT:.0%}.",
            *(
                f"\nWithin the bounds, `{k.name}`, `{_cell(r.change)}`: {reason(r)}"
                for k in all_of
                for r in k.equivalent
                if within(r)
            ),
            "",
            "| operator | equivalent | decided |",
            "|---|---|---|",
        ]
        for operator, fates in document.operators.items():
            if fates.equivalent:
                lines.append(f"| {operator} | {fates.equivalent} | {fates.caught + fates.missed + fates.equivalent} |")
        lines += ["", f"By op, equivalent of decided: {_by_op(document.listing)}."]
        if over:
            lines += ["", "| kernel | equivalent | edit | reason |", "|---|---|---|---|"]
        for kernel in over:
            for record in kernel.equivalent:
                share = f"{len(kernel.equivalent)} of {kernel.decided}"
                why = reason(record) or "**reason missing**"
                lines.append(f"| `{kernel.name}` | {share} | `{_cell(record.change)}` | {_cell(why)} |")
    return "\n".join(lines) + "\n"


def _by_op(records: Iterable[Record]) -> str:
    decided = [r for r in records if r.outcome != "not run"]
    same = Counter(r.op for r in decided if r.outcome == "equivalent")
    return ", ".join(f"`{op}` {same[op]} of {count}" for op, count in sorted(Counter(r.op for r in decided).items()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

"""`ferryman fingerprint`: what a device's arithmetic does, measured, and whether its profile says the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ferryman.cli import documents, output
from ferryman.cli.place import place
from ferryman.device_profiles import detect
from ferryman.device_profiles import profile as named_profile
from ferryman.device_profiles.schema import ARITHMETIC, FUNCTIONS, ROUTES
from ferryman.errors import ArgumentError
from ferryman.porting import fingerprint as probes
from ferryman.porting.fingerprint import Fact, Fingerprint
from ferryman.porting.fingerprint.matrix import LONG
from ferryman.porting.judging.results import Finding

_RULES = {"nearest-even": "RNE", "nearest-away": "RNA", "toward-zero": "RZ", "down": "RD", "up": "RU"}
_LEGEND = (
    "fused: products that one addition takes at once, besides the accumulator. aligned, accumulator, input: bits kept\n"
    "(float32: 24) and the rounding: RNE nearest even, RNA nearest away, RZ toward zero, RD down. subnormals: in / out"
)


def fingerprint(
    device: Annotated[str | None, typer.Option(help="cuda:1, cpu; default: the accelerator, else the CPU.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Compare with this profile (h200); default: the one of the device.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Also list what differs from this fingerprint (JSON).")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document to this file.")] = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the facts as lines of a device profile.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
) -> None:
    """Probe the arithmetic of a device: matrix units, conversions, subnormals, order of sums, errors of functions.

    Every fact that the device's profile states is compared with what was measured. Exits with 1 if one is contradicted.
    """
    if as_json and as_yaml:
        raise ArgumentError("fingerprint", "--yaml", "given beside --json", "one of the two")
    stated = named_profile(profile) if profile is not None else None
    earlier = probes.load(against) if against is not None else None
    where = place(device, "fingerprint")
    with output.progress("probing") as advance:
        document = probes.fingerprint(where, advance)
    document = probes.compared(document, stated or detect(where))
    if out is not None:
        documents.write(out, probes.dumps(document))
    if as_json:
        output.say(probes.dumps(document))
    elif as_yaml:
        _yaml(document)
    else:
        _print(document)
        if earlier is not None:
            _differences(earlier, document)
    if probes.contradicted(document.findings):
        raise typer.Exit(1)


def _print(document: Fingerprint) -> None:
    facts = document.environment
    output.say(
        f"{facts.device_name or facts.device} ({facts.profile}, {facts.arch}), torch {facts.versions['torch']}: "
        f"{sum(f.value is not None for f in document.facts)} of {len(document.facts)} facts measured in "
        f"{facts.seconds:.1f} s"
    )
    output.say()
    output.table(*_matrix_table(document.facts))
    output.say(_LEGEND)
    output.say()
    output.table(*_order_table(document.facts))
    output.say("the order of a product of 128 x K x 128, from its results: how its partial sums are added up")
    output.say()
    output.table(*_function_table(document.facts))
    output.say("error: largest, in float32 ulp of the exact result, over a fixed sample of 65,000 to 260,000 numbers")
    output.say()
    output.table(("property", "route", "measured"), _other_rows(document.facts))
    for reason, names in _absent(document.facts).items():
        output.say(f"n/a {', '.join(names)}: {reason}")
    output.say()
    _findings(document.findings, document.environment.profile)


Groups = dict[tuple[str, str, str], dict[str, Fact]]


def _groups(facts: Sequence[Fact]) -> Groups:
    """Facts of matrix units by (dtype, format, route), then by name."""
    groups: Groups = {}
    for fact in facts:
        if fact.key.startswith("matrix."):
            _, dtype, name = fact.key.split(".", 2)
            groups.setdefault((dtype, fact.format, fact.route), {})[name] = fact
    return groups


def _merged(groups: Groups, cells: Callable[[dict[str, Fact]], tuple[str | None, ...]]) -> list[list[str | None]]:
    """One row for the routes and fp8 formats of a dtype that gave the same answers."""
    rows: dict[tuple[str, tuple[str | None, ...]], list[tuple[str, str]]] = {}
    for (dtype, form, route), by in groups.items():
        if any(f.value is not None for f in by.values()):
            rows.setdefault((dtype, cells(by)), []).append((form, route))
    merged: list[list[str | None]] = []
    for (dtype, shown), who in rows.items():
        formats = dict.fromkeys(form for form, _ in who)
        unit = f"fp8 {', '.join(formats)}" if dtype == "fp8" else dtype
        merged.append([unit, ", ".join(dict.fromkeys(route for _, route in who)), *shown])
    return merged


def _matrix_table(facts: Sequence[Fact]) -> tuple[Sequence[str], list[list[str | None]]]:
    def cells(by: dict[str, Fact]) -> tuple[str | None, ...]:
        if "exact" in by:
            exact = "int32" if by["exact"].value == "yes" else "not exact"
            return None, None, f"{exact}, {_value(by, 'overflow') or '?'}", None, None
        ends = [_value(by, "subnormal_inputs"), _value(by, "subnormal_outputs")]
        return (
            _value(by, "block"),
            _bits(by, "aligned"),
            _bits(by, "accumulator"),
            _bits(by, "input"),
            " / ".join(s or "-" for s in ends),
        )

    headers = ("unit", "route", "fused", "aligned", "accumulator", "input", "subnormals")
    return headers, _merged(_groups(facts), cells)


def _order_table(facts: Sequence[Fact]) -> tuple[Sequence[str], list[list[str | None]]]:
    def cells(by: dict[str, Fact]) -> tuple[str | None, ...]:
        return _words(by, "order"), _words(by, f"order_{LONG}", "partial")

    floating = {key: by for key, by in _groups(facts).items() if "order" in by}
    return ("unit", "route", "K of 64 (fp8: 128)", f"K of {LONG}"), _merged(floating, cells)


def _absent(facts: Sequence[Fact]) -> dict[str, list[str]]:
    """Reasons why a route gave nothing at all, with who gave it."""
    by_reason: dict[str, dict[str, None]] = {}
    for (dtype, form, route), by in _groups(facts).items():
        if all(f.value is None for f in by.values()):
            reason = next(iter(by.values())).reason or "no reason given"
            by_reason.setdefault(reason, {})[f"{dtype if form in ('', 'int8') else form} {route}"] = None
    for fact in facts:
        if fact.value is None and fact.key.split(".")[0] in ("ulp", "contraction", "overflow", "rounding"):
            by_reason.setdefault(fact.reason or "no reason given", {})[f"{fact.route} functions"] = None
    return {reason: list(names) for reason, names in by_reason.items()}


def _value(by: dict[str, Fact], name: str) -> str | None:
    fact = by.get(name)
    return None if fact is None or fact.value is None else str(fact.value)


def _bits(by: dict[str, Fact], name: str) -> str | None:
    bits, rule = by.get(f"{name}_bits"), _value(by, f"{name}_rounding")
    if bits is None or bits.value is None:
        return None
    if name == "input" and rule is None:
        return "all"
    return f"{'>= ' if bits.detail.get('at_least') else ''}{bits.value} {_RULES.get(rule or '', '')}".strip()


def _words(by: dict[str, Fact], name: str, parts: str | None = None) -> str | None:
    fact = by.get(name)
    if fact is None:
        return None
    words = str(fact.detail.get("words") or fact.value or "-").split(" (each")[0]
    added = _bits(by, parts) if parts is not None else None
    return f"{words}, {added}" if added else words


def _function_table(facts: Sequence[Fact]) -> tuple[Sequence[str], list[list[str | None]]]:
    rows: list[list[str | None]] = []
    for function in FUNCTIONS:
        row: list[str | None] = [function]
        for route in ROUTES:
            fact = next((f for f in facts if f.key == f"ulp.{route}.{function}"), None)
            row.append(
                None
                if fact is None or fact.value is None
                else f"{fact.value:.3f}"
                if isinstance(fact.value, float)
                else str(fact.value)
            )
        rows.append(row)
    return ("float32", *(f"{route} error" for route in ROUTES)), rows


def _other_rows(facts: Sequence[Fact]) -> list[list[str | None]]:
    """One row for each property and value: what routes and formats agree on takes one line."""
    names = {
        "fp8": "fp8 flavour",
        "contraction": "a * b + c",
        "subnormals": "subnormals",
        "overflow": "beyond the largest",
        "rounding": "conversion of float32",
        "order": "order of torch.sum",
    }
    routes: dict[tuple[str, str, str], dict[str, None]] = {}
    for fact in facts:
        kind = fact.key.split(".")[0]
        if kind in names and fact.value is not None:
            last = fact.key.split(".")[-1]
            of = (
                last
                if kind == "subnormals"
                else f"K of {last.removeprefix('sum_')}"
                if kind == "order"
                else fact.format
            )
            of = of.replace("K of sum", "K of 64")
            value = str(fact.detail.get("words") or fact.value)
            routes.setdefault((kind, of, value), {})[fact.route] = None
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (kind, of, value), who in routes.items():
        rows.setdefault((kind, ", ".join(who), value), []).append(of)
    return [[f"{names[kind]} {', '.join(of)}".strip(), who, value] for (kind, who, value), of in rows.items()]


def _findings(findings: Sequence[Finding], profile: str) -> None:
    counts: Counter[str] = Counter(f.outcome for f in findings)
    kinds = ("confirmed", "contradicted", "not measured", "not stated")
    output.say(f"profile {profile}: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds))
    for finding in findings:
        if finding.outcome == "not stated":
            continue
        line = f"{finding.outcome} {finding.path}: stated {finding.stated}"
        if finding.measured is not None and str(finding.measured) != str(finding.stated):
            line += f", measured {finding.measured}"
        output.say(line + (f" ({finding.reason})" if finding.reason else ""))


def _differences(earlier: Fingerprint, now: Fingerprint) -> None:
    before = {(f.key, f.route, f.format): f.value for f in earlier.facts}
    after = {(f.key, f.route, f.format): f.value for f in now.facts}
    changed = [k for k in {**before, **after} if before.get(k) != after.get(k)]
    where = earlier.environment
    output.say(f"against {where.device_name} (torch {where.versions.get('torch', '?')}): {len(changed)} facts differ")
    output.table(
        ("fact", "route", "there", "here"),
        [
            [key, f"{route} {form}".strip(), before.get((key, route, form)), after.get((key, route, form))]
            for key, route, form in changed
        ],
    )


def _yaml(document: Fingerprint) -> None:
    """The facts that a profile may state, where every route agrees; the others as comments."""
    facts = document.environment
    versions = facts.versions
    output.say("sources:")
    output.say(
        f"  fingerprint: ferryman fingerprint on one {facts.device_name}, torch {versions['torch']}"
        + (f", triton {versions['triton']}" if "triton" in versions else "")
        + f", {facts.time[:10]}"
    )
    output.say("numerics:")
    tree: dict[str, Any] = {}
    for key in ARITHMETIC:
        values = document.values(key)
        if not values:
            continue
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        if len({str(v) for v in values.values()}) == 1:
            value = next(iter(values.values()))
            text = f"{value:g}" if isinstance(value, float) else str(value)
            inner[name] = f"{{value: {text}, kind: measured, source: fingerprint}}"
        else:
            inner[f"# {name}"] = "; ".join(f"{route} {value}" for route, value in values.items())
    _branch({"arithmetic": tree}, 1)


def _branch(tree: dict[str, Any], depth: int) -> None:
    for key, item in tree.items():
        if isinstance(item, str):
            output.say(f"{'  ' * depth}{key}: {item}")
        elif any(not name.startswith("#") for name in item):
            output.say(f"{'  ' * depth}{key}:")
            _branch(item, depth + 1)
        else:  # nothing here that a profile can state: a mapping of comments alone would be empty
            for name, words in item.items():
                output.say(f"{'  ' * depth}# {key}.{name.removeprefix('# ')}: {words}")

"""What a profile states about arithmetic, against what was measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from ferryman.device_profiles import Profile
from ferryman.device_profiles.schema import ARITHMETIC
from ferryman.porting.fingerprint.collect import Step, flavour, measure, placed, torch_steps
from ferryman.porting.fingerprint.document import Fact, Fingerprint
from ferryman.porting.judging.results import Finding

Values = tuple[str | int | float, ...]
# What an accumulation class of a profile (parity.md) claims of the matrix unit.
_CLASSES: dict[str, dict[str, Values]] = {
    "fp32": {"accumulator_bits": (24,)},
    # ties decide nothing about the bound: half a unit either way
    "tf32-rne": {"input_bits": (11,), "input_rounding": ("nearest-even", "nearest-away")},
    "tf32-rz": {"input_bits": (11,), "input_rounding": ("toward-zero",)},
    "xf32-rd": {"input_bits": (11,), "input_rounding": ("down",)},
    "fp8-14bit": {"accumulator_bits": (14,)},
    "int32-exact": {"exact": ("yes",)},
}
_AT_LEAST = {"fp32"}  # a wider accumulator keeps this promise too


@dataclass(frozen=True)
class _Claim:
    """One statement of a profile, and the facts that decide it: by key, the values that each may have."""

    path: str
    stated: str | int | float
    wanted: dict[str, Values]
    at_least: bool = False
    at_most: bool = False


def compare(profile: Profile, facts: Collection[Fact], *, unstated: bool = True) -> list[Finding]:
    """A finding for each fact that the profile states, and (``unstated``) for each that it could state."""
    claims = _claims(profile)
    findings = [_judge(claim, facts) for claim in claims]
    if "bias" in {path.split(".")[1] for path in profile.provenance if path.startswith("numerics.")}:
        findings += [
            Finding(
                path=f"numerics.bias.{d}",
                outcome="not measured",
                stated=value,
                reason="a mean error over given inputs; the fingerprint takes no such mean",
            )
            for d, value in profile.biases.items()
        ]
    if unstated:
        said = {claim.path for claim in claims}
        for key in ARITHMETIC:
            path = f"numerics.arithmetic.{key}"
            values = {f.value for f in facts if f.key == key and f.value is not None}
            if path not in said and values:
                text = next(iter(values)) if len(values) == 1 else ", ".join(sorted(map(str, values)))
                findings.append(Finding(path=path, outcome="not stated", measured=text))
    return findings


def contradicted(findings: Iterable[Finding]) -> bool:
    return any(finding.outcome == "contradicted" for finding in findings)


def supports(finding: Finding) -> bool:
    """Whether what a finding says was measured is what it says was stated, as far as the two alone can tell."""
    stated, measured = finding.stated, finding.measured
    key = finding.path.removeprefix("numerics.arithmetic.")
    if key == finding.path:  # a class: its parts are several facts, of which the first has a least number of bits
        least = [v for key, vs in _CLASSES.get(str(stated), {}).items() if key == "accumulator_bits" for v in vs]
        return not least or not isinstance(measured, (int, float)) or measured >= float(least[0])
    if isinstance(stated, str) or isinstance(measured, str) or measured is None or stated is None:
        return str(measured) == str(stated)
    return measured <= stated if key.startswith("ulp.") else measured >= stated


def compared(document: Fingerprint, profile: Profile) -> Fingerprint:
    """The document with its findings."""
    return document.model_copy(update={"findings": compare(profile, document.facts)})


def verify(profile: Profile, device: torch.device | str | None = None) -> list[Finding]:
    """Check what a profile states, with the probes through torch alone: about a second on a GPU, nothing is compiled.

    Facts that only Triton or a SIMT kernel can show are "not measured"; `ferryman fingerprint` measures them. A profile
    that states nothing costs nothing.
    """
    claims = _claims(profile)
    if not claims:
        return compare(profile, [], unstated=False)
    wanted = {key for claim in claims for key in claim.wanted}
    _, place = placed(device)
    chosen = [s for s in torch_steps(place) if _cheap(s) and (wanted & set(s.keys) or _showsflavour(s, wanted))]
    facts = measure(chosen)
    if "fp8" in wanted:
        facts.append(flavour(facts, place))
    return compare(profile, facts, unstated=False)


def _cheap(step: Step) -> bool:
    return "partial_bits" not in step.names  # the long sums cost most


def _showsflavour(step: Step, wanted: Collection[str]) -> bool:
    return "fp8" in wanted and step.format.startswith("e4m3") and "order" in step.names


def _claims(profile: Profile) -> list[_Claim]:
    claims = []
    if profile.fp8 is not None:
        claims.append(_Claim("numerics.fp8", profile.fp8, {"fp8": (profile.fp8,)}))
    for dtype, name in profile.accumulation.items():
        wanted = {f"matrix.{dtype}.{k}": values for k, values in _CLASSES.get(name, {}).items()}
        claims.append(_Claim(f"numerics.accumulation.{dtype}", name, wanted, at_least=name in _AT_LEAST))
    for key, value in profile.arithmetic.items():
        bound = key.startswith("ulp.")
        claims.append(_Claim(f"numerics.arithmetic.{key}", value, {key: (value,)}, at_most=bound))
    return claims


def _judge(claim: _Claim, facts: Iterable[Fact]) -> Finding:
    facts = list(facts)
    against, seen, silent = [], [], []
    for key, wanted in claim.wanted.items():
        mine = [f for f in facts if f.key == key]
        answered = [f for f in mine if f.value is not None]
        if not answered:
            silent.append(f"{key}: {mine[0].reason if mine else 'no route of this run measures it'}")
        seen += answered
        against += [f for f in answered if not any(_holds(claim, value, f) for value in wanted)]
    shown = against or seen
    values = {str(f.value) for f in shown}
    measured = (shown[0].value if len(values) == 1 else ", ".join(sorted(values))) if shown else None
    if against:
        routes = "; ".join(f"{f.route} {f.format}".strip() + f": {f.key} is {f.value}" for f in against)
        return Finding(path=claim.path, outcome="contradicted", stated=claim.stated, measured=measured, reason=routes)
    if silent or not claim.wanted:
        reason = "; ".join(silent) or f"no probe shows the class {claim.stated}"
        return Finding(path=claim.path, outcome="not measured", stated=claim.stated, measured=measured, reason=reason)
    return Finding(path=claim.path, outcome="confirmed", stated=claim.stated, measured=measured)


def _holds(claim: _Claim, wanted: str | int | float, fact: Fact) -> bool:
    value = fact.value
    if isinstance(wanted, str) or isinstance(value, str) or value is None:
        return str(value) == str(wanted)
    if claim.at_most:
        return value <= wanted
    if claim.at_least or fact.detail.get("at_least"):
        return value >= wanted
    return value == wanted

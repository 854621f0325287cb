"""Every probe that can run on a device, as one document. A route that does not work gives facts with the reason."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.device_profiles import Profile, detect
from ferryman.device_profiles.schema import FUNCTIONS
from ferryman.dispatch import registry
from ferryman.dispatch.select import target_of
from ferryman.errors import BackendUnavailable
from ferryman.porting.fingerprint import elementwise, integers, matrix
from ferryman.porting.fingerprint.document import Fact, Fingerprint
from ferryman.porting.fingerprint.formats import FORMATS, Format
from ferryman.porting.fingerprint.matrix import Answer
from ferryman.porting.fingerprint.routes import Refused, Route, refusable, torch_integer, torch_routes
from ferryman.porting.judging.results import environment

Progress = Callable[[int, int, str], None]
_SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_FP8 = {n: FORMATS[n].dtype for n in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")}
_SUM_ROWS = 256


@dataclass(frozen=True)
class Step:
    """Probes that share their work. ``names`` are those of the facts, below ``prefix``, that it promises to fill."""

    route: str
    prefix: str
    names: tuple[str, ...]
    run: Callable[[], Iterable[Answer]]
    format: str = ""
    merged: bool = False  # the names are ops of one fact: they go to the route

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.prefix,) if self.merged else tuple(f"{self.prefix}.{name}" for name in self.names)

    def fact(self, answer: Answer) -> Fact:
        key = self.prefix if self.merged else f"{self.prefix}.{answer.name}"
        route = f"{self.route} {answer.name}" if self.merged else self.route
        return Fact(
            key=key, route=route, format=self.format, value=answer.value, reason=answer.reason, detail=answer.detail
        )


def fingerprint(device: torch.device | str | None = None, progress: Progress | None = None) -> Fingerprint:
    """Probe a device: None is the accelerator, else the CPU. Raises UnknownName for a device that is not here."""
    began = time.perf_counter()
    profile, place = placed(device)
    facts = measure(steps(place, profile), progress)
    facts = [*facts, flavour(facts, place)]
    described = environment(place, profile, 0, "fingerprint", round(time.perf_counter() - began, 3))
    return Fingerprint(environment=described, facts=facts)


def placed(device: torch.device | str | None) -> tuple[Profile, torch.device]:
    profile = detect(device)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place == torch.device("cuda"):
        place = torch.device("cuda", torch.cuda.current_device())
    return profile, place


def measure(chosen: Collection[Step], progress: Progress | None = None) -> list[Fact]:
    facts: list[Fact] = []
    for done, step in enumerate(chosen, 1):
        facts += _ask(step)
        if progress is not None:
            progress(done, len(chosen), f"{step.prefix} {step.route} {step.format}".strip())
    return facts


def _ask(step: Step) -> list[Fact]:
    try:
        answers = list(step.run())
    except (Refused, BackendUnavailable) as error:
        answers = [Answer(name, None, str(error)) for name in step.names]
    missing = [name for name in step.names if name not in {f.name for f in answers}]
    answers += [Answer(name, None, "the probe gave no answer") for name in missing]
    return [step.fact(f) for f in answers]


def flavour(facts: Iterable[Fact], place: torch.device) -> Fact:
    """The fp8 flavour of the matrix unit: the one that the vendor's library multiplies."""
    if place.type == "cpu":
        return Fact(key="fp8", route="torch", reason="a CPU multiplies fp8 in software, in every flavour")
    orders = [f for f in facts if f.key == "matrix.fp8.order" and f.route.startswith("torch")]
    served = sorted({f.format for f in orders if f.value is not None and f.format.startswith("e4m3")})
    if not served:
        return Fact(key="fp8", route="torch", reason="no e4m3 product works here")
    return Fact(key="fp8", route="torch", value=" and ".join(served))


# -- the list of probes


def steps(place: torch.device, profile: Profile) -> list[Step]:
    """Every probe, in the order of the document."""
    return [*torch_steps(place), *_triton_steps(place, profile), *_simt_steps(place, profile)]


def torch_steps(place: torch.device) -> list[Step]:
    """The probes through torch alone: nothing is compiled."""
    probes: list[Step] = []
    for route in torch_routes(place):
        probes += _matrix_steps(route)
    probes.append(Step("torch", "matrix.i8", integers.NAMES, lambda: integers.probe(torch_integer(place)), "int8"))
    probes.append(Step("torch sum", "order", ("sum", "sum_4096"), lambda: _sums(place)))
    return probes + _elementwise_steps("torch", place, elementwise.torch_apply(place), ("add", "mul"))


def _matrix_steps(route: Route) -> list[Step]:
    form = route.form
    reduce = matrix.summing(route.multiply, form)
    prefix = f"matrix.{form.key}"

    def step(names: tuple[str, ...], run: Callable[[], Iterable[Answer]]) -> Step:
        def asked() -> Iterable[Answer]:
            if form.name == "tf32" and next(iter(matrix.probe_inputs(reduce, form))).value == form.bits:
                # no TF32 on this device, or not served (ROCm asks for an environment variable)
                raise Refused("float32 inputs are used whole, so no tf32 unit is at work")
            return run()

        return Step(route.name, prefix, names, asked, form.name)

    short = ("order", "block", "aligned_bits", "aligned_rounding", "accumulator_bits", "accumulator_rounding")
    return [
        step(short, lambda: matrix.probe_matrix(reduce, form)),
        step(("input_bits", "input_rounding"), lambda: matrix.probe_inputs(reduce, form)),
        step(
            ("subnormal_inputs", "subnormal_outputs"),
            lambda: matrix.probe_subnormals(route.multiply, form, route.result),
        ),
        step((f"order_{matrix.LONG}", "partial_bits", "partial_rounding"), lambda: matrix.probe_long(reduce, form)),
    ]


def _overflow(apply: elementwise.Apply, dtype: torch.dtype) -> list[Answer]:
    return [elementwise.probe_overflow(apply, dtype)]


def _elementwise_steps(
    route: str, place: torch.device, ask: elementwise.Apply, ops: tuple[str, ...], *, casts: bool = True
) -> list[Step]:
    def apply(op: str, x: Tensor, y: Tensor, z: Tensor, result: torch.dtype) -> Tensor:
        with refusable(place):
            return ask(op, x, y, z, result)

    probes = [
        Step(route, f"ulp.{route}", (name,), lambda name=name: [elementwise.probe_ulp(apply, name)])  # type: ignore[misc]
        for name in FUNCTIONS
    ]
    probes.append(Step(route, "contraction", (route,), lambda: [_renamed(elementwise.probe_contraction(apply), route)]))
    for dtype, short in _SHORT.items():
        if casts or dtype == torch.float32:  # the SIMT kernel is float32
            probes.append(
                Step(
                    route,
                    f"subnormals.{short}",
                    ops,
                    functools.partial(elementwise.probe_subnormals, apply, dtype, ops),
                    merged=True,
                )
            )
    for name, dtype in _FP8.items() if casts else ():
        probes.append(
            Step(
                route,
                f"overflow.{route}",
                (name,),
                functools.partial(_overflow, apply, dtype),
                name,
            )
        )
    rounded = {"float16": FORMATS["float16"], "bfloat16": FORMATS["bfloat16"]} | {n: FORMATS[n] for n in _FP8}
    for name, form in rounded.items() if casts else ():
        probes.append(Step(route, f"rounding.{route}", (name,), lambda form=form: [_cast(apply, form)], name))  # type: ignore[misc]
    return probes


def _cast(apply: elementwise.Apply, form: Format) -> Answer:
    return _renamed(elementwise.probe_cast_rounding(apply, form.dtype, form.bits), form.name)


def _renamed(answer: Answer, name: str) -> Answer:
    return Answer(name, answer.value, answer.reason, answer.detail)


def _absent(route: str, backend: str, profile: Profile) -> str | None:
    """Why a toolchain cannot say anything about this device."""
    if profile.vendor == "cpu":
        return (
            f"{route} does not run on a CPU: Triton's interpreter says nothing about a device's arithmetic"
            if (route == "triton")
            else f"{route} kernels run on NVIDIA and AMD devices"
        )
    if profile.vendor not in registry.backends()[backend].vendors:
        return f"{backend} does not serve {profile.vendor} devices"
    return "; ".join(registry.probe(backend, profile.vendor)) or None


def _refusing(why: str) -> elementwise.Apply:
    def apply(op: str, x: Tensor, y: Tensor, z: Tensor, result: torch.dtype) -> Tensor:
        raise Refused(why)

    return apply


def _triton_steps(place: torch.device, profile: Profile) -> list[Step]:
    why = _absent("triton", "triton", profile)
    ops = ("add", "mul", "fma")
    if why is not None:
        names = ("f32", "tf32", "f16", "bf16", "fp8")
        return [
            *(_not_here("triton", f"matrix.{n}", ("order", "block", "accumulator_bits"), why) for n in names),
            _not_here("triton", "matrix.i8", integers.NAMES, why),
            *_elementwise_steps("triton", place, _refusing(why), ops),
        ]
    from ferryman.porting.fingerprint import triton_kernels

    def apply(op: str, x: Tensor, y: Tensor, z: Tensor, result: torch.dtype) -> Tensor:
        return triton_kernels.elementwise(place, op, x, y, z, result)

    probes = [step for route in triton_kernels.routes(place) for step in _matrix_steps(route)]
    integer = triton_kernels.integer(place)
    probes.append(Step("triton", "matrix.i8", integers.NAMES, lambda: integers.probe(integer), "int8"))
    return probes + _elementwise_steps("triton", place, apply, ops)


def _simt_steps(place: torch.device, profile: Profile) -> list[Step]:
    why = _absent("simt", "hip" if profile.vendor == "amd" else "cuda", profile)
    ops = ("add", "mul", "fma")
    if why is not None:
        return _elementwise_steps("simt", place, _refusing(why), ops, casts=False)
    from ferryman.porting.fingerprint import simt_kernels

    target = target_of(profile)

    def apply(op: str, x: Tensor, y: Tensor, z: Tensor, result: torch.dtype) -> Tensor:
        return simt_kernels.elementwise(place, target, op, x, y, z)

    return _elementwise_steps("simt", place, apply, ops, casts=False)


def _not_here(route: str, prefix: str, names: tuple[str, ...], why: str) -> Step:
    return Step(route, prefix, names, lambda: [Answer(name, None, why) for name in names])


def _sums(place: torch.device) -> Iterator[Answer]:
    """torch.sum over the rows of a float32 matrix; always as many rows, since their number chooses the kernel."""
    form = FORMATS["float32"]

    def reduce(terms: Tensor) -> Tensor:
        sums = []
        for part in terms.split(_SUM_ROWS):
            whole = functional.pad(part, (0, 0, 0, _SUM_ROWS - len(part))).float().to(place)
            sums.append(whole.sum(-1)[: len(part)].double().cpu())
        return torch.cat(sums)

    yield matrix.probe_order(reduce, form, form.terms, "sum")[0]
    yield matrix.probe_order(reduce, form, matrix.LONG, f"sum_{matrix.LONG}")[0]

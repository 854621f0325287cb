"""`ferryman port`: build a model, port it, compare and time it with the unported one, account for it; one document."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from ferryman.errors import ArgumentError
from ferryman.porting.inputs import sizes
from ferryman.porting.model import bundled, families, generic
from ferryman.porting.model.account import Account, account
from ferryman.porting.model.generic import Run
from ferryman.porting.model.given import Inputs

SIZE_LIMIT = 1 << 20


class Line(BaseModel):
    """An op in the account: served by an implementation, or left; shares are of the ported model's predicted time."""

    what: str
    op: str
    implementation: str
    calls: int
    flops: float
    bytes: float
    seconds: float


class Measured(BaseModel):
    what: str
    value: float
    floor: float
    limit: float
    where: str
    exact: float | None = None
    ok: bool


class Trial(BaseModel):
    """The document of `ferryman port`. Times are medians in seconds; shares and the account's seconds are predicted."""

    version: int = 1
    model: str
    device: str
    dtype: str
    parameters: int
    verdict: str
    reasons: list[str]
    parity: list[Measured]
    first_divergence: str
    restored: bool
    calls: dict[str, int]
    ported: dict[str, int]
    runs: dict[str, int]
    left: list[dict[str, str]]
    kinds: list[str]
    accounted_for: str
    shares: dict[str, float]
    account: list[Line]
    places: dict[str, float]
    seconds: dict[str, float]
    port_seconds: float


@dataclass(frozen=True)
class Built:
    name: str
    model: nn.Module
    run: Run


def build(target: str, tiny: bool, layers: int | None, dtype: torch.dtype, inputs: list[str]) -> Built:
    """A model and how it is called.

    target: ``package.module:factory`` (it returns a module, or a module and a tuple or dictionary of inputs), a
    family's name, or a local config.json or its folder. inputs: shapes of float32 tensors, "2,3,64", where the
    factory gives
    none. Downloads nothing. Raises ArgumentError and UnknownName.
    """
    if ":" in target and not Path(target).exists():
        loaded = bundled.load(target)
        model, given = loaded if isinstance(loaded, tuple) else (loaded, None)
        return Built(target, model.to(dtype).eval(), _caller(target, model, given, inputs))
    if Path(target).exists():
        model, kind = _from_config(Path(target), tiny, layers, dtype)
        return Built(target, model.eval(), Inputs(kind, 17 if tiny else 256, 2))
    return Built(target, bundled.build(target, tiny, dtype, layers), bundled.inputs_of(target, tiny, _none(target)))


def _none(name: str) -> Any:
    """A config for `bundled.inputs_of`, which reads how long the model's inputs may be."""
    import types

    wanted = bundled.family(name)
    if any(name in home.FAMILIES for home in bundled.HOMES):
        return None
    return types.SimpleNamespace(config=bundled.config_of(wanted))


def _caller(target: str, model: nn.Module, given: Any, inputs: list[str]) -> Run:
    if given is None and inputs:
        shapes = [sizes.shape_of("port", "--input", text, "2,16,64") for text in inputs]
        return lambda m: m(*(torch.randn(s).to(_dtype_of(m)) for s in shapes))
    if given is None and isinstance(getattr(model, "dummy_inputs", None), dict):
        given = model.dummy_inputs
    if isinstance(given, dict):
        return lambda m: m(**{k: _fit(v, m) for k, v in given.items()})
    if isinstance(given, torch.Tensor):
        given = (given,)
    if isinstance(given, tuple | list):
        return lambda m: m(*(_fit(v, m) for v in given))
    raise ArgumentError("port", target, "a module alone", "a factory that returns (module, inputs), or --input SHAPE")


def _fit(value: Any, model: nn.Module) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    place = next(model.parameters()).device
    return value.to(place, _dtype_of(model)) if value.is_floating_point() else value.to(place)


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _from_config(path: Path, tiny: bool, layers: int | None, dtype: torch.dtype) -> tuple[nn.Module, str]:
    """(model, kind of its inputs) of a config.json of transformers; with the weights beside it, if there are."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    folder = path if path.is_dir() else path.parent
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() or file.stat().st_size > SIZE_LIMIT:
        raise ArgumentError("port", str(file), "absent or too large", f"a config.json of at most {SIZE_LIMIT} bytes")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError("port", str(file), f"not JSON ({error})", "a JSON object") from error
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ArgumentError("port", f"{file}: model_type", repr(kind), "a type that this transformers knows")
    for key in ("auto_map", "quantization_config"):
        if data.get(key):
            raise ArgumentError(
                "port", f"{file}: {key}", "present", "absent: transformers' own classes alone are built"
            )
    data = {k: v for k, v in data.items() if k not in ("model_type", "architectures", "_attn_implementation")}
    known = next((f for f in families.FAMILIES.values() if (f.model_type or f.name) == kind), None)
    auto = known.auto if known else "AutoModelForCausalLM"
    weights = path.is_dir() and any(folder.glob("*.safetensors"))
    if weights and not tiny and layers is None:
        model = getattr(transformers, auto).from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        return model, known.inputs if known else "tokens"
    try:
        config = transformers.CONFIG_MAPPING[kind](**data)
        if tiny or layers is not None:
            config = bundled._shrunk(config, known.tiny if known and tiny else {}, layers or 2, tiny)
        return bundled.random(auto, config, dtype), known.inputs if known else "tokens"
    except (KeyError, TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
        raise ArgumentError(
            "port", str(file), " ".join(str(error).split())[:300], "a config that transformers can build"
        ) from error


def trial(
    built: Built, device: str, profile: str | None, backward: bool, compiled: bool, progress: Callable[[str], None]
) -> Trial:
    """Port, compare, time and account. profile: the device to account for; default: the one that it runs on."""
    model, run = built.model.to(device), built.run
    if device != "cpu":
        own = run
        run = lambda m: _on(own, m, device)  # noqa: E731
    progress("compare")
    parity = generic.compare(model, run, backward)
    progress("time")
    seconds = {"unported eager": timed(model, run, device)}
    begin = time.perf_counter()
    from ferryman.porting.model.port import port, unport

    port(model)
    ported_in = time.perf_counter() - begin
    seconds["ported eager"] = timed(model, run, device)
    if compiled:
        progress("compile")
        seconds["ported compiled"] = timed(torch.compile(model), run, device)
        unport(model)
        torch._dynamo.reset()
        seconds["unported compiled"] = timed(torch.compile(model), run, device)
    unport(model)
    progress("account")
    said: Account | None = None
    reason = ""
    try:
        said = account(model.to("cpu"), built.run, profile or ("h100" if device == "cpu" else device))
    except Exception as error:  # noqa: BLE001 - the model's own code ran on tensors without data
        reason = f"no account: {type(error).__name__}: {error}".split("\n", 1)[0][:200]
    lines = (
        []
        if said is None
        else [
            Line(what=w, op=o, implementation=i, calls=k.calls, flops=k.flops, bytes=k.bytes, seconds=k.seconds)
            for w, o, i, k in said.rows()
        ]
    )
    report = parity.report
    return Trial(
        model=built.name,
        device=device,
        dtype=str(_dtype_of(model)).removeprefix("torch."),
        parameters=sum(p.numel() for p in model.parameters()),
        verdict="PASS" if parity.ok else "FAIL",
        reasons=list(parity.reasons),
        parity=[Measured(**vars(d), ok=d.ok) for d in parity.distances],
        first_divergence=parity.first.path if parity.first else "",
        restored=parity.restored,
        calls=dict(parity.calls),
        ported=report.calls(runs=parity.runs, gradients=backward),
        runs=dict(parity.runs),
        left=[{"path": x.path, "module": x.module, "reason": x.reason} for x in report.unsupported],
        kinds=report.text().split("\n"),
        accounted_for=said.device if said else reason,
        shares=said.shares() if said else {},
        account=lines,
        places={k: w.seconds for k, w in sorted(said.ported.places.items(), key=lambda p: -p[1].seconds)[:12]}
        if said
        else {},
        seconds=seconds,
        port_seconds=ported_in,
    )


def _on(run: Run, model: nn.Module, device: str) -> Any:
    with torch.device(device):
        return run(model)


@torch.no_grad()
def timed(model: Any, run: Run, device: str, repeats: int = 5) -> float:
    """Median seconds of a forward, inputs' drawing included, after two that do not count."""
    seconds = []
    for i in range(repeats + 2):
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run(model)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        if i >= 2:
            seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]

"""A ported model run other ways: under torch.compile, and replayed from a CUDA graph, against itself run eagerly.

Compilation changes the sequence of ops, so nothing below a module's boundary is compared. Each decoder layer is
compiled, all with one graph where their guards allow; the stack of compiled layers then runs free, for the logits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.backends.triton import interpreting
from ferryman.errors import FerrymanError
from ferryman.porting.model import exact, measure
from ferryman.porting.model.modules import Bench, Floors, errors
from ferryman.porting.model.replay import Invoke, fed, invoke
from ferryman.porting.model.results import (
    SEEDS,
    Measure,
    ModeResult,
    ModuleErrors,
    TensorErrors,
    away,
    first_divergence,
)

BACKEND = "inductor"
WARM_UPS = 3  # passes before a capture: what compiles, tunes or allocates on first use must be done by then
_LIMIT = 64  # graphs of one function; the layers share one, and modules compiled alone have theirs

JudgeLogits = Callable[[measure.LogitDistance], list[Measure]]
Step = Callable[[Tensor], dict[str, Tensor]]
Capture = Callable[[Step, Tensor], Step]


# torch.compile ---------------------------------------------------------------------------------------------


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


class Compiled:
    """Runs a module under torch.compile.

    The function has a code object of its own, where Dynamo keeps its graphs: other compiled functions of the process
    keep theirs, and their recompilation limit, and these go when this goes.
    """

    def __init__(self, backend: str | None = None) -> None:
        own = types.FunctionType(_call.__code__.replace(), _call.__globals__, "run_module")
        self._run: Any = torch.compile(own, backend=backend or BACKEND, fullgraph=True, dynamic=False)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_LIMIT):
            return self._run(module, args, kwargs)


def cannot_compile(device: torch.device) -> str | None:
    """Why Inductor cannot compile for a device here, or None."""
    if interpreting():
        return "this process interprets Triton, which Inductor would have to compile"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Inductor compiles for this device through Triton, which is not installed"
        names, variable = ("gcc", "cc", "clang"), "CC"
    else:
        names, variable = ("g++", "c++", "clang++"), "CXX"
    asked = os.environ.get(variable)
    if any(shutil.which(name) for name in ((asked,) if asked else names)):
        return None
    return f"Inductor needs a compiler: none of {', '.join((asked,) if asked else names)} is here (set {variable})"


def compiled(bench: Bench, judge: JudgeLogits, way: Invoke | None = None) -> ModeResult:
    """The decoder layers compiled, each on the reference's input, and the logits of the compiled stack."""
    began = time.perf_counter()
    device = next(bench.model.parameters()).device
    how = f"{BACKEND}, each decoder layer alone (fullgraph, static shapes), forward" + (
        " and backward" if bench.backward else ""
    )
    why = cannot_compile(device) if way is None else None
    if why is not None:
        return ModeResult(mode="torch.compile", verdict="NOT_RUN", reason=why, how=how)
    run = way or Compiled()
    try:
        judged = bench.layers_run(run)
        first = bench.reference[bench.layers[0]].args[0].detach().requires_grad_(bench.backward)
        with torch.set_grad_enabled(bench.backward):  # the graphs that are there already
            actual, wanted = (stack(bench, first, each)["logits"].detach() for each in (run, invoke))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, FerrymanError) as error:  # Dynamo's and Inductor's are RuntimeErrors
        return _raised("torch.compile", how, error, began)
    logits = judge(measure.logit_distance(wanted, actual))
    return _result("torch.compile", how, judged, logits, began)


def stack(bench: Bench, hidden: Tensor, way: Invoke = invoke) -> dict[str, Tensor]:
    """The ported decoder layers one after the other, the last norm and the head: "hidden" before the head, "logits"."""
    for path in bench.layers:
        call = fed(bench.own[path], bench.reference[path])
        hidden = exact.tensors_of(way(bench.ported.get_submodule(path), (hidden, *call.args[1:]), call.kwargs))[0]
    hidden = bench.ported.base_model.norm(hidden)
    return {"hidden": hidden, "logits": bench.ported.get_output_embeddings()(hidden)}


# CUDA graphs -----------------------------------------------------------------------------------------------


@torch.no_grad()
def _copy(into: Tensor, given: Tensor) -> None:
    into.copy_(given)


def captured(step: Step, example: Tensor) -> Step:
    """The step as a CUDA graph that is replayed on each new input."""
    static = example.detach().clone()
    with torch.cuda.device(example.device):
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                step(static)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step(static)

    def replayed(given: Tensor) -> dict[str, Tensor]:
        _copy(static, given)
        graph.replay()
        return {name: tensor.clone() for name, tensor in outputs.items()}

    return replayed


def graph_replay(bench: Bench, capture: Capture | None = None) -> ModeResult:
    """The decoder stack captured once, replayed on its input, on another, and on its own again.

    Another input shows a replay that reads what it read when captured; its own again, one that keeps state. Masks are
    made eagerly beforehand: transformers makes others while it is captured (5.23: never none), and so other calls.
    """
    began = time.perf_counter()
    device = next(bench.model.parameters()).device
    passes = [False, True] if bench.backward else [False]
    how = "decoder layers, last norm and head; forward" + (", then forward and backward" if bench.backward else "")
    if capture is None and device.type != "cuda":
        why = f"n/a: {device.type} has no CUDA graphs"
        return ModeResult(mode="CUDA graph", verdict="NOT_RUN", how=how, reason=why)
    first = bench.reference[bench.layers[0]].args[0]
    by_place: dict[tuple[str, str, str], tuple[list[Measure], Floors]] = {}
    same = total = 0
    try:
        for backward in passes:
            step = _step(bench, backward)
            replayed = (capture or captured)(step, first)
            other = first.flip(1).contiguous()  # the same tokens in another order: the same statistics, another result
            wanted, again = step(first), step(first)
            floors = {name: Floors(errors(again[name], w)) for name, w in wanted.items()}
            for seed in SEEDS:
                generator = torch.Generator(device=device).manual_seed(seed)
                moved = step(measure.one_ulp(first, generator))
                for name, floor in floors.items():
                    floor.drawn.append(errors(moved[name], wanted[name]))
            replays = (
                ("", replayed(first), wanted),
                ("new input: ", replayed(other), step(other)),
                ("again: ", replayed(first), wanted),
            )
            for label, outputs, right in replays:
                for name, floor in floors.items():
                    same += torch.equal(outputs[name], right[name])
                    total += 1
                    row = None if right[name].dim() < 2 else "row" if _slope(name) else "token"
                    judged = floor.judge(errors(outputs[name], right[name]), bench.eps, row, label)
                    by_place.setdefault(_place(bench, name), ([], floor))[0].extend(judged)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, FerrymanError) as error:  # something in the step cannot be captured
        return _raised("CUDA graph", how, error, began)
    result = _result("CUDA graph", how, _grouped(bench, by_place), [], began)
    return result.model_copy(update={"bitwise": f"{same} of {total} tensors are bitwise those of the eager run"})


def _slope(name: str) -> bool:
    return name.startswith("gradient of ")


def _step(bench: Bench, backward: bool) -> Step:
    """One pass of the stack: every module's output by its path, and with ``backward`` the gradients."""
    module_of = {path: bench.ported.get_submodule(path) for path in bench.paths if path in bench.own}
    weights = {
        f"{path}.{name}": w for path in (*bench.layers, _norm(bench)) for name, w in module_of[path].named_parameters()
    }
    cotangent = bench.reference[_norm(bench)].cotangents[0] if backward else None

    def step(given: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        start = given.detach().requires_grad_(backward)
        with torch.set_grad_enabled(backward), _outputs(module_of, outputs):
            out = stack(bench, start)
        tensors = {name: tensor.detach() for name, tensor in outputs.items()}
        if cotangent is not None:
            slopes = torch.autograd.grad(out["hidden"], [start, *weights.values()], cotangent, allow_unused=True)
            names = [f"gradient of {bench.layers[0]}.the input", *(f"gradient of {name}" for name in weights)]
            tensors |= {name: slope for name, slope in zip(names, slopes, strict=True) if slope is not None}
        return tensors

    return step


def _norm(bench: Bench) -> str:
    return next(path for path, module in bench.model.named_modules() if module is bench.model.base_model.norm)


@contextlib.contextmanager
def _outputs(modules: dict[str, nn.Module], outputs: dict[str, Tensor]) -> Iterator[None]:
    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            outputs[path] = exact.tensors_of(out)[0]

        return hook

    with contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            hooks.callback(module.register_forward_hook(keep(path)).remove)
        yield


def _place(bench: Bench, name: str) -> tuple[str, str, str]:
    """(module's path, direction, tensor) of a step's tensor."""
    if not _slope(name):
        return name, "forward", "output"
    full = name.removeprefix("gradient of ")
    owner = next(path for path in (*bench.layers, _norm(bench)) if full.startswith(f"{path}."))
    return owner, "backward", f"gradient of {full.removeprefix(f'{owner}.')}"


def _grouped(bench: Bench, by_place: dict[tuple[str, str, str], tuple[list[Measure], Floors]]) -> list[ModuleErrors]:
    by_path: dict[str, list[TensorErrors]] = {}
    for (path, way, tensor), (measures, floor) in by_place.items():
        most = max((d.relative for d in floor.drawn), default=0.0)
        tensor_errors = TensorErrors(
            tensor=tensor,
            direction="backward" if way == "backward" else "forward",
            unported=floor.own.relative,
            found=max(m.value for m in measures if m.name.endswith("error")),
            ratio=None,
            floor=most,
            measures=measures,
            away=away(measures),
        )
        by_path.setdefault(path, []).append(tensor_errors)
    judged = []
    for path, tensors in by_path.items():
        furthest, call = max(t.away for t in tensors), bench.reference[path]
        judged.append(
            ModuleErrors(
                path=path,
                module=type(bench.model.get_submodule(path)).__name__,
                ported=path in bench.sites,
                order=call.left,
                backward_order=-call.entered,
                exact=None,
                tensors=tensors,
                away=furthest,
                ok=furthest <= 1,
            )
        )
    return judged


def _raised(mode: Any, how: str, error: Exception, began: float) -> ModeResult:
    said = " ".join(str(error).split())
    return ModeResult(
        mode=mode,
        verdict="FAIL",
        how=how,
        reason=f"raised {type(error).__name__}: {said[:400]}",
        seconds=round(time.perf_counter() - began, 2),
    )


def _result(mode: Any, how: str, modules: list[ModuleErrors], logits: list[Measure], began: float) -> ModeResult:
    first = first_divergence(modules)
    wrong = [f"{m.name}: {m.value:.3g}; limit {m.limit:.3g} (floor {m.floor:.3g})" for m in logits if not m.ok]
    reason = "; ".join(([first.text] if first else []) + wrong)
    return ModeResult(
        mode=mode,
        verdict="FAIL" if reason else "PASS",
        reason=reason,
        how=how,
        modules=modules,
        logits=logits,
        first_divergence=first,
        seconds=round(time.perf_counter() - began, 2),
    )

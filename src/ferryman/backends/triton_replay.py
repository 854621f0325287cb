"""A Triton launch as a step of a replay: the compiled kernel's own C launcher, with everything but addresses bound."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ferryman.backends import replay_record
from ferryman.backends.triton_runtime import provide_scratch, release, resource_errors

_PREPACKED = {"CudaLauncher": (3, 6)}  # launchers whose C function's parameters are known, of which release


def step(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any], device: torch.device
) -> replay_record.Step:
    """The launch as a call of the compiled kernel's own C launcher. ``args`` are aligned stand-ins (`replay`).

    Which compiled kernel it is, Triton's binder decides here, once: a replay passes the same integers and aligned
    addresses, so it would decide the same again.
    """
    import triton

    if getattr(kernel, "pre_run_hooks", None) or callable(grid):
        raise replay_record.NotReplayable("hooks or a grid that want to see every launch")
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        compiled = kernel.run(*args, grid=grid, warmup=True, **meta)
        if getattr(compiled, "module", None) is None and torch.cuda.is_current_stream_capturing():
            raise replay_record.NotReplayable("a kernel that is not loaded yet, while a graph is being captured")
        try:
            run = compiled.run  # loads it
        except resource_errors() as error:
            raise replay_record.NotReplayable(str(error)) from error
    bound = dict(zip(kernel.arg_names, args, strict=False)) | dict(meta)
    values = [bound.get(p.name, p.default) for p in kernel.params]
    head: tuple[Any, ...] = (*(*grid, 1, 1)[:3], replay_record.STREAM, compiled.function)
    knobs, hooks = triton.knobs.runtime, ("launch_enter_hook", "launch_exit_hook")
    chains = [getattr(knobs, name) for name in hooks]
    idle = tuple(chain.calls for chain in chains if hasattr(chain, "calls"))
    if any(idle) or any(chain is not None and not hasattr(chain, "calls") for chain in chains):
        raise replay_record.NotReplayable("launch hooks are set")
    same = tuple((knobs, name, chain) for name, chain in zip(hooks, chains, strict=True))
    if _PREPACKED.get(type(run).__name__) == release(triton.__version__) and not (
        run.global_scratch_size or run.profile_scratch_size
    ):
        # past the launcher's Python part (0.5 us), which allocates scratch memory where a kernel needs some
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        arguments = (*head, *flags, compiled.packed_metadata, None, None, None, *values)
        return replay_record.Step(run.launch, arguments, idle, same)
    if getattr(run, "global_scratch_size", 0):
        run = _with_scratch(run)
    return replay_record.Step(run, (*head, compiled.packed_metadata, None, None, None, *values), idle, same)


def _with_scratch(run: Callable[..., None]) -> Callable[..., None]:
    """``run`` on any thread: a backward pass replays on autograd's own."""

    def run_with_scratch(*arguments: Any) -> None:
        provide_scratch()
        run(*arguments)

    return run_with_scratch

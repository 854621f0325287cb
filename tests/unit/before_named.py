"""What must work in a process that has imported `ferryman` and named no op yet: one forked process for each case.

python -m tests.unit.before_named FOLDER     # for files; prints {case: "ok" or what went wrong} as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import ferryman

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
CASES: dict[str, Callable[[], None]] = {}
NAMED = ("ferryman.ops.norm", "ferryman.ops.primitive", "ferryman.dispatch.plan", "ferryman.device_profiles")


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def inputs(requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 8, requires_grad=requires_grad), torch.randn(8, requires_grad=requires_grad)


def expected(x: Tensor, w: Tensor) -> Tensor:
    """Root mean square norm, in float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.double()


def right(y: Tensor, x: Tensor, w: Tensor) -> None:
    """Within eight roundings of float32: a mean of eight squares, a root, two products."""
    wanted = expected(x, w).detach()
    assert y.dtype == torch.float32 and bool(((y.detach() - wanted).abs() <= 8 * 2.0**-24 * wanted.abs()).all())


def right_gradients(y: Tensor, x: Tensor, w: Tensor) -> None:
    right(y, x, w)
    gradients = torch.autograd.grad(y.sum(), (x, w))
    wanted = torch.autograd.grad(expected(x, w).sum(), (x, w))
    for a, b in zip(gradients, wanted, strict=True):
        assert bool(((a - b).abs() <= 64 * 2.0**-24 * (1 + b.abs())).all())  # sums of 24 terms of about 1


@case
def eager() -> None:
    x, w = inputs()
    with ferryman.trace() as seen:
        right_gradients(ferryman.ops.rms_norm(x, w), x, w)
    assert seen.calls == {("rms_norm", "torch"): 1, ("rms_norm_backward", "torch"): 1}


@case
def from_the_definition() -> None:
    """An import of the family itself dispatches, too."""
    from ferryman.ops.norm.definition import rms_norm

    x, w = inputs()
    with ferryman.trace() as seen:
        right_gradients(rms_norm(x, w), x, w)
    assert seen.calls["rms_norm", "torch"] == 1 and ferryman.ops.rms_norm is rms_norm


@case
def library_with_gradients() -> None:
    x, w = inputs()
    with ferryman.trace() as seen:
        right_gradients(torch.ops.ferryman.rms_norm(x, w, 1e-6, False), x, w)
    assert seen.calls == {("rms_norm", "torch"): 1, ("rms_norm_backward", "torch"): 1}


@case
def one_family_alone_is_loaded() -> None:
    ferryman.ops.rms_norm(*inputs())
    families = {m.split(".")[2] for m in sys.modules if m.startswith("ferryman.ops.") and m.endswith(".definition")}
    assert families == {"norm"}, families


@case
def explained() -> None:
    assert ferryman.explain("rms_norm", *inputs()).chosen == "torch"
    assert ferryman.dispatch.explain is ferryman.explain


@case
def requested() -> None:
    x, w = inputs()
    with ferryman.use(rms_norm="definition"), ferryman.trace() as seen:
        ferryman.ops.rms_norm(x.detach(), w.detach())
    assert seen.calls == {("rms_norm", "definition"): 1}


@case
def compiled() -> None:
    x, w = inputs()
    function = torch.compile(lambda x, w: ferryman.ops.rms_norm(x, w), fullgraph=True, backend="aot_eager")
    right_gradients(function(x, w), x, w)


@case
def compiled_from_the_definition() -> None:
    from ferryman.ops.norm.definition import rms_norm

    x, w = inputs()
    function = torch.compile(lambda x, w: rms_norm(x, w), fullgraph=True, backend="aot_eager")
    right_gradients(function(x, w), x, w)


@case
def compiled_by_the_library() -> None:
    x, w = inputs()
    function = torch.compile(
        lambda x, w: torch.ops.ferryman.rms_norm(x, w, 1e-6, False),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    right_gradients(function(x, w), x, w)


@case
def opcheck() -> None:
    torch.library.opcheck(torch.ops.ferryman.rms_norm.default, (*inputs(), 1e-6, False))


@case
def autocast() -> None:
    x, _ = inputs(requires_grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ops.ferryman.linear(x, torch.randn(4, 8), None).dtype == torch.bfloat16


@case
def functorch() -> None:
    x, w = inputs(requires_grad=False)
    gradient = torch.func.grad(lambda x: torch.ops.ferryman.rms_norm(x, w, 1e-6, False).sum())(x)
    y = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(expected(y, w).sum(), y)
    assert bool(((gradient - wanted).abs() <= 64 * 2.0**-24 * (1 + wanted.abs())).all())


@case
def fake_tensors_first() -> None:
    """The first call is under a mode: what dispatch makes then must not belong to it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert ferryman.ops.rms_norm(torch.empty(3, 8)).shape == (3, 8)
    x, w = inputs(requires_grad=False)
    for _ in range(3):
        right(ferryman.ops.rms_norm(x), x, torch.ones(8))
        right(ferryman.ops.rms_norm(x, w), x, w)


@case
def meta_device_first() -> None:
    with torch.device("meta"):
        assert torch.ops.ferryman.rms_norm(torch.empty(3, 8), None, 1e-6, False).is_meta
    x, _ = inputs(requires_grad=False)
    for _ in range(3):
        right(ferryman.ops.rms_norm(x), x, torch.ones(8))


@case
def flops_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, _ = inputs(requires_grad=False)
    with FlopCounterMode(display=False) as counter:
        torch.ops.ferryman.linear(x, torch.randn(4, 8), None)
    assert counter.get_total_flops() == 2 * 3 * 8 * 4


class Normed(torch.nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.ferryman.rms_norm(x, w, 1e-6, False)


@case
def exported() -> None:
    program = torch.export.export(Normed(), inputs(requires_grad=False))
    assert any("ferryman.rms_norm" in str(node.target) for node in program.graph.nodes)
    torch.export.save(program, FOLDER / "normed.pt2")


@case
def loaded() -> None:
    program = torch.export.load(FOLDER / "normed.pt2")
    x, w = inputs(requires_grad=False)
    with ferryman.trace() as seen:
        right(program.module()(x, w), x, w)
    assert seen.calls == {("rms_norm", "torch"): 1}


@case
def named_in_cpp() -> None:
    """The dispatcher alone is asked, as a compiled program does: no attribute of `torch.ops` is read."""
    x, w = inputs()
    call = torch._C._jit_get_operation("ferryman::rms_norm")[0]
    assert "rms_norm" not in vars(torch.ops.ferryman)
    with ferryman.trace() as seen:
        right_gradients(call(x, w, 1e-6, False), x, w)
    assert seen.calls["rms_norm", "torch"] == 1


@case
def a_family_called_like_its_op() -> None:
    import ferryman.ops.softmax
    from ferryman.ops.attention import bounds  # noqa: F401 - its package becomes no attribute of `ops`

    assert callable(ferryman.ops.softmax) and callable(ferryman.ops.attention) and callable(ferryman.ops.rope)
    assert type(ferryman.ops) is type(torch), "a plain module once an op was named: CPython reads it faster"


@case
def modules_by_attribute() -> None:
    """What importing everything used to leave behind."""
    assert ferryman.errors.__name__ == "ferryman.errors" and ferryman.settings.TABLE
    assert ferryman.ops.norm.definition.rms_norm is ferryman.ops.rms_norm
    assert ferryman.ops.menu.__name__ == "ferryman.ops.menu"
    for place in (ferryman, ferryman.ops, ferryman.dispatch, torch.ops.ferryman):
        assert not hasattr(place, "no_such_name")
    assert ferryman.dispatch.registry.primitives() and "__getattr__" not in vars(ferryman.ops), "every op is loaded"
    assert set(ferryman.__all__) <= set(dir(ferryman)) and set(ferryman.ops.__all__) <= set(dir(ferryman.ops))


@case
def many_threads() -> None:
    """They come to different ops and to the same at once."""
    from concurrent.futures import ThreadPoolExecutor

    x, w = inputs(requires_grad=False)

    def call(i: int) -> Tensor:
        if i % 3 == 0:
            return torch.ops.ferryman.rms_norm(x, w, 1e-6, False)
        return ferryman.ops.rms_norm(x, w) if i % 3 == 1 else ferryman.ops.softmax(ferryman.ops.rms_norm(x, w))

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(call, range(36)))
    for i, y in enumerate(results):
        if i % 3 < 2:
            right(y, x, w)


def attempt(function: Callable[[], None]) -> str:
    """Run in a forked process; "ok", or the traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        message = "ok"
        try:
            with contextlib.redirect_stdout(sys.stderr):
                assert not [name for name in NAMED if name in sys.modules], "loaded by `import ferryman`"
                function()
        except BaseException:  # noqa: BLE001 - the parent is told
            message = traceback.format_exc()
        os.write(writing, message.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as end:
        message = end.read().decode()
    os.waitpid(child, 0)
    return message or "the process died"


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: attempt(function) for name, function in CASES.items()}) + "\n")

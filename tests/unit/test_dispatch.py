"""Which implementation runs, why not the others, and that a warmed call notices every changed fact."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._subclasses import fake_tensor as fake
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import ferryman
from ferryman import ops
from ferryman.backends.base import Target
from ferryman.cli import calls
from ferryman.device_profiles import names, profile
from ferryman.dispatch import kernel_code, lockfile, lockfile_document, lockfile_entry, plan, registry, select, state
from ferryman.errors import (
    ArgumentError,
    CompileError,
    FerrymanError,
    LockfileError,
    QuarantineWarning,
    SettingError,
    StrictModeError,
    UnknownName,
    Unsupported,
)
from ferryman.ops.clauses import at_most, dtypes, unit_stride
from ferryman.ops.menu import Implementation
from ferryman.porting.bench import grid


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ferryman.reload()
    yield
    ferryman.reload()


@contextlib.contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, line: Implementation, launch: object) -> Iterator[None]:
    """A further implementation on an op's menu, in the place of the profile's first choice."""
    menu, launcher = registry.implementations, registry.launcher
    with monkeypatch.context() as patch:
        patch.setattr(registry, "implementations", lambda op: (line, *menu(op)) if op == line.op else menu(op))
        patch.setattr(registry, "launcher", lambda asked: launch if asked is line else launcher(asked))
        backends = registry.backends()
        patch.setattr(registry, "backends", lambda: {**backends, line.backend: backends["torch"]})
        patch.setattr(registry, "probe", lambda name, vendor: ())
        plan.drop_plans()
        yield
    plan.drop_plans()


def served(call: object, op: str) -> str:
    with ferryman.trace() as seen:
        call()  # type: ignore[operator]
    names = [name for (known, name), count in seen.calls.items() if known == op and count]
    assert len(names) == 1
    return names[0]


def test_a_request_decides_and_is_recorded() -> None:
    x = torch.randn(3, 8)
    assert served(lambda: ops.rms_norm(x), "rms_norm") == "torch"
    with ferryman.use("definition"):
        assert served(lambda: ops.rms_norm(x), "rms_norm") == "definition"
        with ferryman.use(rms_norm="torch"):
            assert served(lambda: ops.rms_norm(x), "rms_norm") == "torch"
            assert served(lambda: ops.softmax(x), "softmax") == "definition"


def test_a_request_that_is_exhausted_raises_with_every_reason() -> None:
    with ferryman.use("cuda", "hip"), pytest.raises(Unsupported) as raised:
        ops.rms_norm(torch.randn(3, 8))
    message = str(raised.value)
    assert "cuda does not serve cpu" in message and "hip does not serve cpu" in message and "definition" in message


def test_a_request_for_an_op_without_such_an_implementation_raises() -> None:
    with (
        ferryman.use("cuda"),
        pytest.raises(Unsupported, match=r"attention has: torch\.cudnn, .*triton\.tiled, .*definition"),
    ):
        ops.attention(*torch.randn(3, 1, 2, 4, 8))


@pytest.mark.parametrize(
    "ask", [lambda: ferryman.use("tritno"), lambda: ferryman.use(rms_nrm="torch"), lambda: ferryman.use(rms_norm="cda")]
)
def test_unknown_names_list_the_nearest(ask: object) -> None:
    with pytest.raises(UnknownName, match="nearest: (triton|rms_norm|cuda)"), ask():  # type: ignore[operator]
        pass


def test_an_empty_request_is_refused() -> None:
    with pytest.raises(ArgumentError), ferryman.use():
        pass


def test_backward_outside_the_block_follows_the_forwards_request() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with ferryman.trace() as seen, ferryman.use("definition"):
        y = ops.rms_norm(x)
    y.sum().backward()
    assert seen.calls == {("rms_norm", "definition"): 1, ("rms_norm_backward", "definition"): 1}


def test_a_request_reaches_a_backward_on_another_thread() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with ferryman.trace() as seen, ferryman.use("definition"):
        y = ops.softmax(x)
    worker = threading.Thread(target=lambda: y.sum().backward())
    worker.start()
    worker.join()
    assert seen.calls["softmax_backward", "definition"] == 1


def test_threads_do_not_share_requests() -> None:
    x, implementations = torch.randn(3, 8), []
    with ferryman.use("definition"):
        worker = threading.Thread(target=lambda: implementations.append(served(lambda: ops.rms_norm(x), "rms_norm")))
        worker.start()
        worker.join()
    assert implementations == ["torch"]


def test_many_threads_on_warm_and_cold_keys() -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(60):
            name = ("torch", "definition")[(seed + i) % 2]
            with ferryman.use(name):
                ran = served(functools.partial(ops.rms_norm, torch.ones(1 + i % 7, 8)), "rms_norm")
                if ran != name:
                    wrong.append(name)
                ops.rms_norm(torch.ones(1 + i % 5, 8))
            if i % 20 == seed % 20:
                plan.drop_plans()

    workers = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


# Each flips one fact of rms_norm(x, weight) on a warmed call; the answer must be the changed call's own.
X, W = torch.randn(4, 16), torch.randn(16)
FLIPS = {
    "dtype of x": lambda: (X.half(), W),
    "dtype of weight": lambda: (X, W.bfloat16()),
    "rows": lambda: (torch.randn(5, 16), W),
    "width": lambda: (torch.randn(4, 24), torch.randn(24)),
    "rank": lambda: (torch.randn(2, 4, 16), W),
    "row stride": lambda: (torch.randn(4, 32)[:, :16], W),
    "last stride": lambda: (torch.randn(4, 32)[:, ::2], W),
    "no weight": lambda: (X, None),
    "strided weight": lambda: (X, torch.randn(32)[::2]),
    "requires grad": lambda: (X.clone().requires_grad_(), W),
    "Parameter": lambda: (X, torch.nn.Parameter(W)),
    "storage offset": lambda: (torch.randn(65)[1:].view(4, 16), W),
}


@pytest.mark.parametrize("flip", FLIPS)
def test_a_warmed_call_notices(flip: str) -> None:
    ops.rms_norm(X, W)
    x, w = FLIPS[flip]()
    for _ in range(2):
        y = ops.rms_norm(x, w)
        expected = ops.rms_norm.primitive.body(x.double(), None if w is None else w.double(), 1e-6, False)
        assert y.dtype == x.dtype and y.is_contiguous() and y.shape == x.shape
        unit = torch.finfo(x.dtype).eps
        assert ((y.double() - expected).abs() <= unit * expected.abs() + 1e-6).all()
        assert y.requires_grad == (x.requires_grad or (w is not None and w.requires_grad))
    ops.rms_norm(X, W)


def test_a_warmed_call_notices_changes_in_place() -> None:
    x, w = torch.randn(4, 16), torch.nn.Parameter(torch.randn(16), requires_grad=False)

    def right() -> bool:
        y = ops.rms_norm(x, w)
        expected = ops.rms_norm.primitive.body(x.double(), w.detach().double(), 1e-6, False)
        close = ((y.double() - expected).abs() <= 2 * torch.finfo(y.dtype).eps * expected.abs() + 1e-6).all()
        return bool(close) and y.requires_grad == w.requires_grad

    for _ in range(3):
        assert right()
    w.requires_grad_(True)
    assert right() and right()
    w.data = torch.randn(16, dtype=torch.bfloat16)  # what Module.to does
    assert right() and right()
    w.data = torch.randn(32)[::2]
    assert right() and right()
    w.data = torch.randn(15)
    with pytest.raises(ArgumentError, match="weight.shape"):
        ops.rms_norm(x, w)


@pytest.mark.parametrize("first", [False, True])
def test_a_warmed_call_notices_whether_gradients_are_enabled(first: bool) -> None:
    """The guard compares requires_grad alone: warmed without gradients, the launcher itself would have served here."""
    plan.drop_plans()
    w = torch.nn.Parameter(W.clone())
    for enabled in (first, not first, first):
        for _ in range(3):
            with torch.set_grad_enabled(enabled):
                y = ops.rms_norm(X, w)
            assert y.requires_grad == enabled
            assert not enabled or "_Bridge" in type(y.grad_fn).__name__  # ours, and not one of the kernel's own parts


def test_a_warmed_call_notices_modes() -> None:
    x, w = torch.randn(4, 16, dtype=torch.bfloat16), torch.randn(16, 16, dtype=torch.bfloat16)
    for _ in range(3):
        ops.linear(x, w)
    with FlopCounterMode(display=False) as counter:
        ops.linear(x, w)
    assert counter.get_total_flops() == 2 * 4 * 16 * 16
    with torch.autocast("cpu", dtype=torch.float16):
        assert ops.linear(x, w).dtype == torch.float16
    with torch.inference_mode():
        assert ops.linear(x, w).is_inference()
    assert torch.vmap(lambda a: ops.linear(a, w))(x[None]).shape == (1, 4, 16)
    with fake.FakeTensorMode() as mode:
        assert isinstance(ops.linear(mode.from_tensor(x), mode.from_tensor(w)), fake.FakeTensor)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(FerrymanError, match="forward-mode"):
            ops.linear(dual, w)  # never a silently lost tangent
    assert type(ops.linear(x, w)) is torch.Tensor


def test_the_same_tensor_twice_and_then_not() -> None:
    a, b = torch.randn(4, 16), torch.randn(4, 16)
    for left, right in ((a, a), (a, b), (a, a), (b, a), (a, b.double().float())):
        for _ in range(2):
            _, s = ops.add_rms_norm(left, right)
            assert torch.equal(s, left + right)
    with pytest.raises(ArgumentError, match="residual.dtype"):
        ops.add_rms_norm(a, b.half())


def test_without_dynamos_guard_the_full_key_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_TensorGuards", None)
    plan.drop_plans()
    runner = plan.runner_of(ops.rms_norm.primitive)
    for _ in range(3):
        ops.rms_norm(X, W)
    assert not runner.hot and len(runner.plans) == 1


def test_a_gradient_that_is_none_is_none_before_it() -> None:
    """PyTorch runs a node whose gradient a Function gave as None."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    x = torch.randn(4, 16, requires_grad=True)
    Nothing.apply(ops.rms_norm(x, W)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is None


def test_what_pytorch_serves_both_ways_is_its_own_differentiable_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator; a CPU stands for one here."""
    draw = torch.Generator().manual_seed(0)  # whole numbers: every sum is exact, in any order
    x, weight, bias = (
        torch.randint(-3, 4, s, generator=draw).float().requires_grad_() for s in ((4, 16), (8, 16), (8,))
    )

    def gradients_of(x: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
        y = ops.linear(x, weight, bias)
        return y.grad_fn.name(), list(torch.autograd.grad(y.square().sum(), (x, weight, bias)))

    plan.drop_plans()
    name, wanted = gradients_of(x)
    assert "Bridge" in name
    monkeypatch.setattr(plan, "REPLAYED", "cpu")
    plan.drop_plans()
    for _ in range(2):  # chosen, and from the plan
        name, gradients = gradients_of(x)
        assert "Bridge" not in name and "Addmm" in name
        assert all(map(torch.equal, gradients, wanted))
    with torch.no_grad():  # nothing of ours around it, either
        wanted = ops.linear(x, weight, bias)
        runs = {run.__name__ for run, _, _ in plan.runner_of(ops.linear.primitive).plans.values()}
        assert runs == {"linear_with_gradient"} and torch.equal(wanted, torch.nn.functional.linear(x, weight, bias))
    with ferryman.trace() as traced:  # which counts the backward's calls
        assert "Bridge" in gradients_of(x)[0]
    assert traced.calls["linear_backward", "torch"] == 1
    with ferryman.use("definition"):
        assert "Bridge" in gradients_of(x)[0]
    plan.drop_plans()


def test_calls_that_a_model_makes_in_turns_do_not_go_by_the_full_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """One x with weights of several shapes; a residual that is expanded and one that is not."""
    plan.drop_plans()
    wide, narrow, spread = torch.randn(32, 16), torch.randn(8, 16), torch.randn(1, 16).expand(4, 16)
    counts = {"linear": 0, "add_rms_norm": 0}
    for op in (ops.linear.primitive, ops.add_rms_norm.primitive):
        namespace = plan.runner_of(op).op.namespace

        def counted(*args: object, _cold: Any = namespace["cold"], _name: str = op.name) -> object:
            counts[_name] += 1
            return _cold(*args)

        monkeypatch.setitem(namespace, "cold", counted)
    for turn in range(100):
        if turn == 20:
            counts.update(linear=0, add_rms_norm=0)
        for weight in (wide, narrow, wide):
            ops.linear(X, weight)
        for residual in (X, spread, X):
            ops.add_rms_norm(X, residual, W)
    assert counts == {"linear": 0, "add_rms_norm": 0}


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.randn(4, 32)[:, :16],
        lambda: torch.randn(4, 16).double(),
        lambda: torch.randn(16, 4).t(),
        lambda: torch.randn(4, 16, requires_grad=True),
        lambda: torch.nn.Parameter(torch.randn(4, 16)),
        lambda: torch.randn(4, 16).to("meta"),
    ],
)
def test_the_guard_in_front_refuses(change: object) -> None:
    """By itself, beside what the brief key already tells apart."""
    runner = plan.runner_of(ops.add_rms_norm.primitive)
    for _ in range(2):
        ops.add_rms_norm(X, X + 1, W)
    ((check, *_),) = runner.hot.values()
    assert check(X, X + 2, W)
    other = change()  # type: ignore[operator]
    assert not check(other, X, W) and not check(X, other, W)


INVALID = {
    "weight on another device": (lambda: ops.rms_norm(X, W.to("meta")), "weight.device"),
    "weight of another width": (lambda: ops.rms_norm(X, torch.randn(15)), "weight.shape"),
    "negative eps": (lambda: ops.rms_norm(X, W, -1e-6), "eps"),
    "eps not a number": (lambda: ops.rms_norm(X, W, float("nan")), "eps"),
    "eps of another type": (lambda: ops.rms_norm(X, W, "1e-6"), "eps"),  # type: ignore[arg-type]
    "float64 x": (lambda: ops.rms_norm(X.double(), W), "x.dtype"),
    "integer x": (lambda: ops.rms_norm(X.long(), W), "x.dtype"),
    "x not a tensor": (lambda: ops.rms_norm([1.0], W), "x"),  # type: ignore[arg-type]
    "scalar x": (lambda: ops.rms_norm(torch.tensor(1.0)), "x.dim"),
    "sparse x": (lambda: ops.rms_norm(X.to_sparse(), W), "x.layout"),
    "residual of another dtype": (lambda: ops.add_rms_norm(X, X.half()), "residual.dtype"),
    "residual of another shape": (lambda: ops.add_rms_norm(X, X[:2]), "residual.shape"),
    "bias width": (lambda: ops.layer_norm(X, W, W[:3]), "bias.shape"),
    "up of another shape": (lambda: ops.silu_mul(X, X[:1]), "up.shape"),
    "approximate": (lambda: ops.gelu_mul(X, X, "erf"), "approximate"),
    "target dtype": (lambda: ops.cross_entropy(X, torch.zeros(4, dtype=torch.int32)), "target.dtype"),
    "target shape": (lambda: ops.cross_entropy(X, torch.zeros(3, dtype=torch.int64)), "target.shape"),
    "label smoothing": (
        lambda: ops.cross_entropy(X, torch.zeros(4, dtype=torch.int64), label_smoothing=1.5),
        "label_smoothing",
    ),
    "linear width": (lambda: ops.linear(X, torch.randn(3, 15)), "weight.shape"),
    "linear dtype": (lambda: ops.linear(X, torch.randn(3, 16).half()), "weight.dtype"),
}
Q = torch.randn(1, 4, 8, 64)
INVALID |= {
    "window 0": (lambda: ops.attention(Q, Q, Q, window=0), "window"),
    "window negative": (lambda: ops.attention(Q, Q, Q, window=-3), "window"),
    "softcap negative": (lambda: ops.attention(Q, Q, Q, softcap=-1.0), "softcap"),
    "mask shape": (lambda: ops.attention(Q, Q, Q, mask=torch.ones(3, 8, dtype=torch.bool)), "mask.shape"),
    "mask integer": (lambda: ops.attention(Q, Q, Q, mask=torch.ones(8, 8, dtype=torch.int64)), "mask.dtype"),
    "heads": (lambda: ops.attention(Q, Q[:, :3], Q[:, :3]), "k.shape"),
    "head_dim": (lambda: ops.attention(torch.randn(1, 1, 2, 257), *[torch.randn(1, 1, 2, 257)] * 2), "q.shape"),
    "rank": (lambda: ops.attention(Q[0], Q, Q), "q.shape"),
    "v shape": (lambda: ops.attention(Q, Q, Q[:, :, :4]), "v.shape"),
    "sinks shape": (lambda: ops.attention(Q, Q, Q, sinks=torch.zeros(Q.shape[1] + 1)), "sinks.shape"),
    "sinks dtype": (lambda: ops.attention(Q, Q, Q, sinks=torch.zeros(Q.shape[1], dtype=torch.int32)), "sinks.dtype"),
    "range shape": (lambda: ops.attention(Q, Q, Q, key_range=torch.zeros(9, 2, dtype=torch.int32)), "key_range.shape"),
    "range dtype": (lambda: ops.attention(Q, Q, Q, key_range=torch.zeros(len(Q), 2)), "key_range.dtype"),
    "chunk": (lambda: ops.attention(Q, Q, Q, chunk=0), "chunk"),
    "value width": (lambda: ops.attention(Q, Q, torch.randn(*Q.shape[:3], 257)), "v.shape"),
    "rope angles": (lambda: ops.rope(Q, Q, torch.randn(1, 7, 64), torch.randn(1, 7, 64)), "cos.shape"),
    "rope odd": (lambda: ops.rope(Q, Q, torch.randn(1, 8, 63), torch.randn(1, 8, 63)), "cos.shape"),
    "rope k": (lambda: ops.rope(Q, Q[:, :, :4], torch.randn(1, 8, 64), torch.randn(1, 8, 64)), "k.shape"),
}


@pytest.mark.parametrize("what", INVALID)
@pytest.mark.parametrize("warm", [False, True])
def test_invalid_arguments_are_named_before_any_launch(what: str, warm: bool) -> None:
    call, argument = INVALID[what]
    if warm:
        ops.rms_norm(X, W)
        ops.add_rms_norm(X, X)
        ops.attention(Q, Q, Q)
    with ferryman.trace() as seen, pytest.raises(ArgumentError, match="required") as raised:
        call()
    assert raised.value.argument.startswith(argument) and not seen.calls


def test_a_clause_is_reason_key_and_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Implementation(
        op="rms_norm", name="torch2", where="nowhere:rms_norm", when=(unit_stride("x"), at_most("x.shape[-1]", 16))
    )
    with planted(monkeypatch, line, lambda x, weight, eps, cast, target: x + 7), ferryman.use("torch2", "torch"):
        assert served(lambda: ops.rms_norm(X), "rms_norm") == "torch2"
        assert torch.equal(ops.rms_norm(X), X + 7)
        assert served(lambda: ops.rms_norm(torch.randn(4, 17)), "rms_norm") == "torch"
        assert served(lambda: ops.rms_norm(torch.randn(4, 32)[:, ::2]), "rms_norm") == "torch"
        with ferryman.trace() as seen:
            ops.rms_norm(torch.randn(4, 17))
        assert "x.shape[-1] is 17; required: x.shape[-1] <= 16" in next(iter(seen.fallbacks))[2]
        with ferryman.strict(), pytest.raises(StrictModeError, match="x.shape"):
            ops.rms_norm(torch.randn(4, 17))
        rows = {r.implementation: r for r in ferryman.explain(ops.rms_norm, torch.randn(4, 17)).rows}
        assert rows["torch2"].verdict == "refused" and rows["torch"].verdict == "chosen"
        assert rows["definition"].verdict == "not requested"


def test_what_is_made_for_some_calls_is_no_fallback_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Implementation(
        op="rms_norm", name="torch2", where="nowhere:rms_norm", when=(at_most("x.shape[-1]", 16),), partial=True
    )
    wide = torch.randn(4, 17)
    with planted(monkeypatch, line, lambda x, weight, eps, cast, target: x + 7):
        monkeypatch.setattr(select, "preferred", lambda op, profile: ["torch2", "torch", "definition"])
        plan.drop_plans()
        with ferryman.trace() as seen, ferryman.strict():
            assert torch.equal(ops.rms_norm(X), X + 7)
            ops.rms_norm(wide)
        assert seen.calls == {("rms_norm", "torch2"): 1, ("rms_norm", "torch"): 1} and not seen.fallbacks
        rows = {r.implementation: r for r in ferryman.explain(ops.rms_norm, wide).rows}
        assert rows["torch2"].verdict == "refused" and rows["torch"].verdict == "chosen"
        with ferryman.use("torch2", "torch"), ferryman.strict(), pytest.raises(StrictModeError, match="x.shape"):
            ops.rms_norm(wide)  # requested, it is missed
    plan.drop_plans()


@pytest.mark.daily(7)
@pytest.mark.parametrize("name", [name for name in names() if profile(name).vendor != "cpu"])
def test_no_profile_prefers_what_cannot_serve_models_shapes(name: str) -> None:
    """Strict mode would raise, and every call would count as a fallback."""
    for op in registry.primitives().values():
        for case in grid.cases(op, "full", torch.device("cuda")):
            args = calls.of_case(op, case, torch.bfloat16)
            select.select(op, args, profile(name), state.State({}, strict=True), absent=True)


@pytest.mark.parametrize("name", ["a100-sxm-80", "h200", "mi300x"])
def test_the_gradient_of_a_sum_is_no_fallback(name: str) -> None:
    """Autograd gives `.sum().backward()` one element seen as all of them: strides of 0, which launchers copy."""
    served = set()
    for op in registry.primitives().values():
        for case in grid.cases(op, "full", torch.device("cuda")):
            args = dict(zip(op.names, calls.of_case(op, case, torch.bfloat16), strict=True))
            grads = {
                n: torch.empty((), dtype=a.dtype, device="meta").expand(a.shape)
                for n, a in args.items()
                if n.startswith("grad") and isinstance(a, torch.Tensor)
            }
            if grads:
                given = tuple((args | grads).values())
                select.select(op, given, profile(name), state.State({}, strict=True), absent=True)
                served.add(op.name)
    assert {"silu_mul_backward", "rope_backward", "softmax_backward", "rms_norm_backward"} <= served


def test_dtype_clause_reads_optional_tensors() -> None:
    clause = dtypes("weight", torch.float32)
    of = ops.rms_norm.primitive
    holds = [clause.holds(select.View.of(of, (X, w, 1e-6, False), profile("cpu"))) for w in (None, W, W.half())]
    assert holds == [True, True, False]


def test_a_compile_failure_quarantines_one_implementation_here_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def launch(x: torch.Tensor, weight: object, eps: float, cast: bool, target: Target) -> torch.Tensor:
        calls.append(x.shape)
        if x.shape[-1] == 16:
            raise CompileError("torch2", "rms_norm", "cpu", "ptxas: out of registers")
        return x + 7

    line = Implementation(op="rms_norm", name="torch2", where="nowhere:rms_norm")
    with planted(monkeypatch, line, launch), ferryman.use("torch2", "torch"):
        with pytest.warns(QuarantineWarning, match="out of registers"):
            y = ops.rms_norm(X)
        assert torch.equal(y, torch.nn.functional.rms_norm(X, (16,), None, 1e-6))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ops.rms_norm(X)
            ops.rms_norm(torch.randn(3, 16))  # same region: 2^2 rows
        assert len(calls) == 1
        assert torch.equal(ops.rms_norm(torch.ones(4, 32)), torch.ones(4, 32) + 7)  # another region still works
        assert "quarantined" in str(ferryman.explain(ops.rms_norm, X))
    with planted(monkeypatch, line, launch), ferryman.use("torch2"), pytest.raises(Unsupported, match="quarantined"):
        ops.rms_norm(X)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("illegal memory access")])
def test_other_failures_rise_as_they_are(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def launch(*args: object) -> None:
        raise error

    line = Implementation(op="rms_norm", name="torch2", where="nowhere:rms_norm")
    with planted(monkeypatch, line, launch), ferryman.use("torch2", "torch"), pytest.raises(type(error)):
        ops.rms_norm(X)
    assert not select.quarantined()


def test_settings_request_and_strictness(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state.requests
    monkeypatch.setenv("FERRYMAN_BACKEND", "definition, torch")
    for _ in range(2):
        ferryman.reload()
        assert state.requests == before + 1  # what torch.compile asks before it lowers an op to its definition
    assert served(lambda: ops.rms_norm(X), "rms_norm") == "definition"
    monkeypatch.delenv("FERRYMAN_BACKEND")
    ferryman.reload()
    assert state.requests == before
    monkeypatch.setenv("FERRYMAN_STRICT", "maybe")
    ferryman.reload()
    with pytest.raises(SettingError, match="FERRYMAN_STRICT is 'maybe'"):
        ops.rms_norm(X)


def _entry(name: str = "definition", **more: object) -> lockfile_entry.Entry:
    given = {"implementation": name, "seconds": 3e-6, "kernels": kernel_code.digest("rms_norm")} | more
    own = {key: given[key] for key in ("implementation", "seconds", "configuration") if key in given}
    return lockfile_entry.Entry.model_validate({"candidates": [own], **given})


def _key(x: torch.Tensor = X) -> str:
    return lockfile.region(ops.rms_norm.primitive, (x, None, 1e-6, False))


def _lock(path: Path, **more: object) -> None:
    lockfile_document.record(path, ferryman.devices()[-1], {"rms_norm": {_key(): _entry(**more)}})  # type: ignore[arg-type]


def test_a_lockfile_choice_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lock(tmp_path / "lock.json")
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(tmp_path / "lock.json"))
    ferryman.reload()
    assert served(lambda: ops.rms_norm(X), "rms_norm") == "definition"
    assert served(lambda: ops.rms_norm(torch.randn(4, 17)), "rms_norm") == "torch"
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == ["lock.json"]


def test_an_entry_whose_kernels_changed_is_reported_and_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lock(tmp_path / "lock.json", kernels="0" * 64)
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(tmp_path / "lock.json"))
    ferryman.reload()
    with pytest.warns(UserWarning, match=r"rms_norm: its kernels changed since it was measured \(1 entries\)"):
        assert served(lambda: ops.rms_norm(X), "rms_norm") == "torch"


def test_entries_that_name_nothing_are_reported_and_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    lockfile_document.record(
        path, ferryman.devices()[-1], {"rms_norm": {_key(): _entry("gone")}, "no_op": {"k": _entry()}}
    )
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(path))
    ferryman.reload()
    with pytest.warns(UserWarning, match="no_op: there is no op 'no_op'.*rms_norm has no implementation 'gone'"):
        assert served(lambda: ops.rms_norm(X), "rms_norm") == "torch"


def test_writers_merge_and_do_not_lose_each_others_entries(tmp_path: Path) -> None:
    path, here = tmp_path / "new" / "lock.json", ferryman.devices()[-1]

    def write(first: int) -> None:
        for i in range(first, first + 8):
            lockfile_document.record(path, here, {"rms_norm": {_key(torch.empty(4, i + 1)): _entry(seconds=i + 1.0)}})

    workers = [threading.Thread(target=write, args=(8 * n,)) for n in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    entries = lockfile_document.load(path).choices["rms_norm"]
    assert {entry.seconds for entry in entries.values()} == {i + 1.0 for i in range(32)}
    lockfile_document.record(path, here, {"rms_norm": {_key(torch.empty(4, 1)): _entry(seconds=77.0)}})
    entries = lockfile_document.load(path).choices["rms_norm"]
    assert len(entries) == 32 and entries[_key(torch.empty(4, 1))].seconds == 77.0  # the newest wins


def test_a_lockfile_of_another_machine_or_a_damaged_one_is_never_written_over(tmp_path: Path) -> None:
    path, here = tmp_path / "lock.json", ferryman.devices()[-1]
    _lock(path)
    text = path.read_text().replace('"profile": "cpu"', '"profile": "h200"')
    path.write_text(text)
    with pytest.raises(LockfileError, match="is not of this machine: profile is 'h200', here 'cpu'"):
        lockfile_document.record(path, here, {})
    path.write_text(text[:-20])
    with pytest.raises(LockfileError, match="is not JSON"):
        lockfile_document.record(path, here, {})
    assert path.read_text() == text[:-20]


@pytest.mark.parametrize(
    ("fact", "locked", "holds"),
    [
        ("torch", "2.13.9+cu130", True),
        ("torch", "2.12.0", False),
        ("triton", "3.6.5", True),
        ("triton", "3.7.0", False),
        ("cuda", "13.9", True),
        ("cuda", "12.9", False),
        ("driver", "13.1", True),
        ("driver", "12.8", False),
        ("units", 78, False),
        ("partition", "CPX", False),
        ("ferryman", "0.0.1", True),
    ],
)
def test_which_stamps_hold(fact: str, locked: object, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ferryman.devices()[-1]
    mine = lockfile_document.stamp(here) | {"torch": "2.13.0", "triton": "3.6.0", "cuda": "13.0", "driver": "13.0"}
    monkeypatch.setattr(lockfile_document, "stamp", lambda profile: mine)
    document = lockfile_document.Lockfile.model_validate({"stamp": mine | {fact: locked}, "choices": {}})
    assert (lockfile_document.differing(document, here) == []) is holds


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(f'"version": {lockfile_document.VERSION}', '"version": 99'),
        lambda text: text.replace('"definition"', '"../../evil"'),
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace("3e-6", "-1.0").replace("3e-06", "-1.0"),
        lambda text: text.replace('"kernels"', '"krnls"'),
    ],
)
def test_a_damaged_lockfile_is_reported_and_ignored(
    damage: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock.json"
    _lock(path)
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(LockfileError, match="lock.json"):
        lockfile_document.load(path)
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(path))
    ferryman.reload()
    with pytest.warns(UserWarning, match="lockfile ignored"):
        assert served(lambda: ops.rms_norm(X), "rms_norm") == "torch"


def test_a_lockfile_of_another_device_is_reported_and_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    _lock(path)
    path.write_text(path.read_text().replace('"profile": "cpu"', '"profile": "h200"'))
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(path))
    ferryman.reload()
    with pytest.warns(UserWarning, match="profile is 'h200', here 'cpu'"):
        assert served(lambda: ops.rms_norm(X), "rms_norm") == "torch"


def test_explain_answers_for_a_device_that_is_not_here() -> None:
    x = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    for device, expected in {"mi300x": "hip", "h200": "cuda"}.items():
        explanation = ferryman.explain("rms_norm", x, device=device)
        assert not explanation.here and "not probed" in str(explanation)
        verdicts = {r.implementation: r.verdict for r in explanation.rows}
        assert verdicts[expected] in ("chosen", "available")
        assert verdicts["hip" if expected == "cuda" else "cuda"] == "refused"
    with pytest.raises(UnknownName, match="nearest"):
        ferryman.explain("rms_norm", x, device="mi30x")


def test_plans_are_bounded() -> None:
    before = plan.MOST_PLANS
    runner = plan.runner_of(ops.rms_norm.primitive)
    for rows in range(1, 40):
        ops.rms_norm(torch.ones(rows, 4))
    assert len(runner.plans) >= 39
    plan.MOST_PLANS = 10
    try:
        for rows in range(100, 140):
            ops.rms_norm(torch.ones(rows, 4))
        assert len(runner.plans) <= 10
    finally:
        plan.MOST_PLANS = before


def test_traced_calls_leave_no_plan_behind() -> None:
    runner = plan.runner_of(ops.softmax.primitive)
    with ferryman.trace():
        ops.softmax(torch.ones(3, 4))
    assert not runner.plans
    assert state.current() is None


def test_a_line_with_its_backends_name_is_that_backends_only_one() -> None:
    """A request of "triton" takes any line of the backend: a line of that very name could not be asked for alone."""
    lines = {op: registry.implementations(op) for op in registry.primitives()}
    others = {(op, x.name) for op, menu in lines.items() for x in menu if x.name != x.backend}
    both = [(op, x.name) for op, menu in lines.items() for x in menu if x.name == x.backend]
    assert both and not [one for one in both if any(o == one[0] and n.startswith(f"{one[1]}.") for o, n in others)]


def test_a_gradient_is_not_differentiated_again() -> None:
    """Neither eagerly, where a function runs once, nor in place, nor through the library's op."""

    def twice(outputs: Any, leaf: torch.Tensor, of_what_comes: bool) -> None:
        taken = torch.ones_like(outputs).requires_grad_(of_what_comes)  # or of what was saved alone
        (gradient,) = torch.autograd.grad(outputs, leaf, taken, create_graph=True)
        gradient.square().sum().backward()

    x = torch.randn(1, 2, 3, 16).requires_grad_()
    angles = torch.randn(1, 3, 16)
    again, itself = "not differentiated again", "itself a gradient"
    calls: tuple[tuple[Any, str, tuple[bool, ...]], ...] = (
        (lambda: ops.rms_norm(x), again, (True, False)),
        # a rotation's gradient does not depend on what was rotated
        (lambda: ops.rope_(x * 1, x.detach().clone(), angles, angles)[0], again, (True,)),
        (lambda: torch.ops.ferryman.rms_norm(x, None, 1e-6, False), itself, (True, False)),
    )
    for call, why, asked in calls:
        for of_what_comes in asked:
            with pytest.raises((RuntimeError, FerrymanError), match=why):
                twice(call(), x, of_what_comes)


def test_second_derivatives_raise_and_are_never_zeros() -> None:
    """Also where autograd is asked for an input, and would say that the gradient does not depend on it."""
    weight, times = torch.ones(16, requires_grad=True), torch.arange(16.0)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (ops.rms_norm(x, weight).square() * times).sum()

    def entropy(x: torch.Tensor) -> torch.Tensor:
        return ops.cross_entropy(x, torch.tensor([1, 2])).sum()

    for of in (loss, entropy):
        x = torch.randn(2, 16, requires_grad=True)
        (gradient,) = torch.autograd.grad(of(x), x, create_graph=True)
        assert torch.equal(gradient, torch.autograd.grad(of(x), x)[0])
        with pytest.raises(RuntimeError, match="not differentiated again"):
            torch.autograd.grad(gradient.sum(), x)
        with pytest.raises(RuntimeError, match="not differentiated again"):
            torch.autograd.functional.hessian(of, torch.randn(2, 16))


def test_compiled_autograd_takes_an_op() -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    wanted = torch.autograd.grad(ops.rms_norm(x, weight).square().sum(), (x, weight))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        ops.rms_norm(x, weight).square().sum().backward()
    assert torch.equal(x.grad, wanted[0]) and torch.equal(weight.grad, wanted[1])

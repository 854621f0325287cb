"""Dispatch under threads, reloads and unusual arguments: no stale choice, no call that skips a check."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import plan, registry, select
from ferryman.errors import ArgumentError, CompileError, QuarantineWarning
from ferryman.ops.menu import Implementation
from ferryman.porting.inputs.cases import cases_of, double, materialise
from tests import lines

X, W = torch.randn(4, 16), torch.randn(16)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ferryman.reload()
    yield
    ferryman.reload()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts a launcher of the test's own in the place of rms_norm's line "triton", and that line first."""

    def plant(launch: Callable[..., Any]) -> None:
        line = Implementation(op="rms_norm", name="triton", where="planted:nowhere")
        backends = registry.backends()
        lines.planted(monkeypatch.setattr, {line: launch}, first=True)
        monkeypatch.setattr(registry, "backends", lambda: {**backends, "triton": backends["torch"]})
        monkeypatch.setattr(registry, "probe", lambda name, vendor: ())
        monkeypatch.setattr(select, "preferred", lambda op, profile: ["triton", "torch", "definition"])
        plan.drop_plans()

    return plant


def together(*calls: Callable[[], None]) -> list[BaseException]:
    """Run in a thread each; what was raised."""
    raised: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - given to the test
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


@pytest.mark.parametrize("grads", [False, True])
def test_a_compile_failure_in_two_threads_at_once(planted: Any, grads: bool) -> None:
    both, runs = threading.Barrier(2, timeout=20), []

    def refuse(*args: Any) -> Tensor:
        runs.append(1)
        both.wait()
        raise CompileError("triton", "planted", "cpu", "no such instruction")

    planted(refuse)
    weight = W.clone().requires_grad_(grads)
    outputs: list[Tensor] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised = together(*[lambda: outputs.append(ops.rms_norm(X, weight))] * 2)
    assert raised == [] and len(runs) == 2
    with ferryman.use("torch"):
        assert all(torch.equal(y, ops.rms_norm(X, weight)) for y in outputs) and len(outputs) == 2
    assert sum(issubclass(w.category, QuarantineWarning) for w in caught) == 1


def test_another_backends_failure_inside_is_not_the_lines_own(planted: Any) -> None:
    def refuse(*args: Any) -> Tensor:
        raise CompileError("hip", "inner", "cpu", "no such instruction")

    planted(refuse)
    with pytest.raises(CompileError, match="inner"):
        ops.rms_norm(X, W)
    assert not select.quarantined()


@pytest.mark.parametrize("where", ["choosing", "warming"])
def test_a_reload_beside_a_running_choice_leaves_no_stale_plan(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The reload comes at the worst moment: after the choice was made, before it is kept."""
    runner = plan.runner_of(ops.rms_norm.primitive)
    module, name = (select, "select") if where == "choosing" else (plan, "_TensorGuards")
    known: Callable[..., Any] = getattr(module, name)

    def overtaken(*args: Any, **more: Any) -> Any:
        choice = known(*args, **more)
        monkeypatch.setattr(module, name, known)
        with monkeypatch.context() as patch:
            patch.setenv("FERRYMAN_BACKEND", "definition")
            ferryman.reload()
        monkeypatch.setenv("FERRYMAN_BACKEND", "definition")
        return choice

    if where == "warming":
        ops.rms_norm(X, W)
    monkeypatch.setattr(module, name, overtaken)
    ops.rms_norm(X, W)
    assert not runner.plans and not runner.hot
    ops.rms_norm(X, W)
    ((_, _, line),) = runner.plans.values()
    assert line.name == "definition"


def test_what_was_read_before_a_reload_is_not_kept_after_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ferryman import settings

    monkeypatch.chdir(tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.ferryman]\nbackend = "torch"\n')
    read = settings._toml

    def overtaken(text: str) -> Any:
        monkeypatch.setattr(settings, "_toml", read)
        project.write_text('[tool.ferryman]\nbackend = "definition"\n')
        ferryman.reload()
        return read(text)

    ferryman.reload()
    settings.forget()
    monkeypatch.setattr(settings, "_toml", overtaken)
    assert settings.get("backend") == ("torch",)
    assert settings.get("backend") == ("definition",)


class Counted(torch.Tensor):
    """A subclass that sees the functions that it is given to."""

    seen: list[str] = []  # noqa: RUF012 - the test's

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_sees_every_call_of_an_op() -> None:
    x = X.as_subclass(Counted)
    for _ in range(4):
        Counted.seen.clear()
        y = ops.rms_norm(x, W)
        assert type(y) is Counted and Counted.seen.count("ferryman.rms_norm.default") == 1
    assert torch.equal(y.as_subclass(torch.Tensor), ops.rms_norm(X, W))


@pytest.mark.parametrize(
    "make_input",
    [
        lambda: torch.view_as_complex(torch.randn(4, 16, 2)).conj().imag,
        lambda: torch._efficientzerotensor((4, 16)),
    ],
    ids=["negative", "zero"],
)
@pytest.mark.parametrize("way", ["eager", "warm", "library", "inference"])
def test_a_tensor_that_is_negative_by_a_bit_alone_is_made_plain_before_a_kernel_reads_it(
    planted: Any, make_input: Callable[[], Tensor], way: str
) -> None:
    def memory(x: Tensor, *others: Any) -> Tensor:
        """A kernel that goes by the address, as Triton's interpreter and every launcher of a GPU do."""
        assert not x.is_neg() and not x._is_zerotensor() and x.data_ptr()
        return x.as_strided(x.shape, x.stride()) * 3

    x = make_input()
    assert x.is_neg() or x._is_zerotensor()
    planted(memory)
    if way == "warm":
        for _ in range(3):
            ops.rms_norm(torch.randn(x.shape), W)
    with torch.inference_mode(way == "inference"):
        for _ in range(3):
            y = torch.ops.ferryman.rms_norm(x, W, 1e-6, False) if way == "library" else ops.rms_norm(x, W)
            assert torch.equal(y, x * 3)


Q = torch.randn(1, 2, 4, 8)
WRONG: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "1 for a bool": (lambda: ops.attention(Q, Q, Q, causal=True), lambda: ops.attention(Q, Q, Q, causal=1), "causal"),
    "1.0 for a bool": (
        lambda: ops.attention(Q, Q, Q, causal=True),
        lambda: ops.attention(Q, Q, Q, causal=1.0),
        "causal",
    ),
    "True for a float": (lambda: ops.rms_norm(X, W, 1.0), lambda: ops.rms_norm(X, W, True), "eps"),
    "True for an int": (
        lambda: ops.attention(Q, Q, Q, window=1),
        lambda: ops.attention(Q, Q, Q, window=True),
        "window",
    ),
    "a float for an int": (
        lambda: ops.attention(Q, Q, Q, window=2),
        lambda: ops.attention(Q, Q, Q, window=2.0),
        "window",
    ),
    "a fraction": (lambda: ops.rms_norm(X, W, 0.5), lambda: ops.rms_norm(X, W, Fraction(1, 2)), "eps"),
    "a decimal": (lambda: ops.rms_norm(X, W, 0.5), lambda: ops.rms_norm(X, W, Decimal("0.5")), "eps"),
    "a huge integer": (lambda: ops.rms_norm(X, W), lambda: ops.rms_norm(X, W, 10**400), "eps"),
    "a 6,000-digit integer": (lambda: ops.rms_norm(X, W), lambda: ops.rms_norm(X, W, 10**6000), "eps"),
    "a huge window": (
        lambda: ops.attention(Q, Q, Q, window=2),
        lambda: ops.attention(Q, Q, Q, window=10**30),
        "window",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("guards", [False, True])
def test_a_number_of_another_type_is_refused_warm_and_cold(
    monkeypatch: pytest.MonkeyPatch, what: str, warm: bool, guards: bool
) -> None:
    if not guards:
        monkeypatch.setattr(plan, "_TensorGuards", None)
    right, wrong, name = WRONG[what]
    for _ in range(3 * warm):
        right()
    for _ in range(2):
        with pytest.raises(ArgumentError) as raised:
            wrong()
        assert raised.value.argument == name and len(str(raised.value)) < 300


def test_float64_is_the_oracles_alone() -> None:
    """Docstrings name float32, float16 and bfloat16: every op refuses another dtype, eagerly and in the library."""
    for op in registry.primitives().values():
        args = double(materialise(cases_of(op)[0], op, torch.float32, 0, torch.device("cpu")))
        for call in (op.namespace["_resolve"], getattr(torch.ops.ferryman, op.name)):
            with pytest.raises(ArgumentError, match=r"dtype is torch\.float64; required: "):
                call(*args)


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5)])
def test_numpys_numbers_are_taken_as_pythons(value: Any) -> None:
    for _ in range(2):
        assert torch.equal(ops.rms_norm(X, W, value), ops.rms_norm(X, W, 0.5))
    assert torch.equal(ops.rms_norm(X, W, 1), ops.rms_norm(X, W, 1.0))
    kept = [part for key in plan.runner_of(ops.rms_norm.primitive).plans for part in key if part in (0.5, 1.0)]
    assert {type(part) for part in kept if part is not True} == {float}

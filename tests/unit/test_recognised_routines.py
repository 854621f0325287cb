"""Functions that convolve causally and that scan a state space: right ones are served, look-alikes stay."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferryman
from ferryman.dispatch import registry
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.porting.judging.metrics import UNIT
from ferryman.porting.model import routines
from ferryman.porting.model.exact import Widened
from ferryman.porting.model.routines import served_routine
from tests.bounded import U32, ratio
from tests.unit.lookalikes import Specimen, load

CONV, SCAN = registry.primitive("causal_conv1d"), registry.primitive("ssd_scan")

# In nobody's library: other names, another order of options, written otherwise.
WHOLE = """
from torch.nn import functional


def convolve(signal, taps, active=None, shift=None):
    count = signal.shape[-1]
    padded = functional.pad(signal, (taps.shape[1] - 1, 0))
    out = functional.conv1d(padded, taps[:, None], shift, groups=signal.shape[1])
    out = out[..., :count]
    if active is not None:
        out = functional.silu(out)
    return out
"""
NEXT = """
from torch.nn import functional


def advance(signal, kept, taps, shift=None):
    both = torch.cat((kept, signal), 2)
    out = functional.conv1d(both, taps[:, None], shift, groups=signal.shape[1])[..., -signal.shape[2] :]
    kept.copy_(both[..., signal.shape[2] :])
    return functional.silu(out)
"""
RECURRENT = """
from torch.nn import functional


def recur(u, delta, rate, into, out, skip=None, start=None, offset=None, last=False):
    batch, length, heads, dim = u.shape
    share = heads // into.shape[2]
    delta = delta.float() if offset is None else delta.float() + offset.float()
    delta = functional.softplus(delta)
    into, out = into.float().repeat_interleave(share, 2), out.float().repeat_interleave(share, 2)
    h = torch.zeros(batch, heads, dim, into.shape[-1], dtype=into.dtype) if start is None else start.to(into.dtype)
    y = torch.zeros(u.shape, dtype=into.dtype)
    for t in range(length):
        h = torch.exp(delta[:, t] * rate.float())[..., None, None] * h
        h = h + (delta[:, t, :, None] * u[:, t].float())[..., None] * into[:, t, :, None]
        y[:, t] = (h * out[:, t, :, None]).sum(-1)
    if skip is not None:
        y = y + skip.float()[:, None] * u.float()
    y = y.to(u.dtype)
    if last:
        return y, h
    return y
"""
FAULTS: dict[str, tuple[str, str, str]] = {
    "padded on both sides": (WHOLE, "(taps.shape[1] - 1, 0)", "(taps.shape[1] // 2, taps.shape[1] - 1)"),
    "padded on the right": (WHOLE, "(taps.shape[1] - 1, 0)", "(0, taps.shape[1] - 1)"),
    "taps turned": (WHOLE, "taps[:, None]", "taps[:, None].flip(-1)"),
    "dilated": (
        WHOLE.replace("(taps.shape[1] - 1, 0)", "(2 * taps.shape[1] - 2, 0)"),
        "groups=signal.shape[1]",
        "groups=signal.shape[1], dilation=2",
    ),
    "not zeros before the first": (WHOLE, "(taps.shape[1] - 1, 0))", "(taps.shape[1] - 1, 0), value=1.0)"),
    "another activation": (
        WHOLE,
        "    if active is not None:\n        out = functional.silu",
        "    out = functional.gelu",
    ),
    "clipped": (WHOLE, "out = out[..., :count]", "out = out[..., :count].clamp(-40, 40)"),
    "the bias taken off": (WHOLE, "shift, groups", "None if shift is None else -shift, groups"),
    "other for long ones": (WHOLE, "    if active", "    if count > 64:\n        out = 2 * out\n    if active"),
    "other for even batches": (
        WHOLE,
        "    if active",
        "    size = signal.shape[0] > 9\n    out = -out if size else out\n    if active",
    ),
    "its state stays": (NEXT, "    kept.copy_(both[..., signal.shape[2] :])\n", ""),
    "its state a token late": (NEXT, "both[..., signal.shape[2] :]", "both[..., : kept.shape[2]]"),
    "the oldest tokens read": (NEXT, "[..., -signal.shape[2] :]", "[..., : signal.shape[2]]"),
    "a state that grows": (RECURRENT, "torch.exp(delta", "torch.exp(-delta"),
    "it begins with ones": (RECURRENT, "torch.zeros(batch, heads", "torch.ones(batch, heads"),
    "groups take turns": (RECURRENT, ".repeat_interleave(share, 2)", ".repeat(1, 1, share, 1)"),
    "no step in what is read": (RECURRENT, "(delta[:, t, :, None] * u[:, t].float())", "u[:, t].float()"),
    "read before it is written": (
        RECURRENT.replace("        y[:, t] = (h * out[:, t, :, None]).sum(-1)\n", ""),
        "        h = h + (delta",
        "        y[:, t] = (h * out[:, t, :, None]).sum(-1)\n        h = h + (delta",
    ),
    "a skip of the step": (RECURRENT, "skip.float()[:, None] * u.float()", "skip.float()[:, None] * delta[..., None]"),
    "a given state is halved": (RECURRENT, "start.to(into.dtype)", "0.5 * start.to(into.dtype)"),
    "another step above 20": (RECURRENT, "functional.softplus(delta)", "functional.softplus(delta).clamp(max=20)"),
}
OPS = {"convolve": "causal_conv1d", "advance": "causal_conv1d", "recur": "ssd_scan"}


def written(source: str, folder: Path) -> Any:
    module = load([Specimen("", "", source, "")], folder)[0]
    return next(getattr(module, name) for name in OPS if hasattr(module, name))


def made_by(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    with ferryman.trace() as trace:
        result = call()
    return result, {f"{op} {line}": n for (op, line), n in trace.calls.items()}


def exactly(function: Any, *given: Any) -> Any:
    wide = [x.double() if isinstance(x, Tensor) else x for x in given]
    with Widened(torch.float64), torch.no_grad():
        return function(*wide), wide


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("source", [WHOLE, NEXT, RECURRENT], ids=list(OPS))
def test_functions_in_disguise_are_served(source: str, tmp_path: Path) -> None:
    function = written(source, tmp_path)
    routine = served_routine(function)
    assert routine is not None and routine.op == OPS[function.__name__]
    assert routine.gradient is (function.__name__ != "advance")


@pytest.mark.parametrize("fault", FAULTS)
def test_look_alikes_are_not(fault: str, tmp_path: Path) -> None:
    source, old, new = FAULTS[fault]
    assert source.count(old) >= 1
    function = written(source.replace(old, new), tmp_path)
    assert served_routine(function) is None


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("active", [None, "silu"])
def test_a_convolution_is_within_the_bound_of_the_functions_exact_result(
    dtype: torch.dtype, active: str | None, tmp_path: Path
) -> None:
    function = written(WHOLE, tmp_path)
    served = served_routine(function)
    assert served is not None
    x, weight, bias = normal(2, 9, 37).to(dtype), normal(9, 4, seed=1).to(dtype), normal(9, seed=2).to(dtype)
    exact, (wide, taps, _, shift) = exactly(function, x, weight, active, bias)
    (terms, _) = CONV.limits.bound((wide, taps, shift, None, active), (exact, wide[..., -3:]))
    output, calls = made_by(lambda: served.replacement(x, weight, active, bias))
    assert calls == {"causal_conv1d torch": 1} and output.dtype == dtype
    assert ratio(output, exact, terms, UNIT[dtype]) <= 1
    by_name, _ = made_by(lambda: served.replacement(shift=bias, signal=x, taps=weight, active=active))
    assert torch.equal(by_name, output)


def test_a_test_that_came_out_one_way_guards(tmp_path: Path) -> None:
    source = WHOLE.replace("    if active", "    out = out if signal.shape[0] < 9 else -out\n    if active")
    function = written(source, tmp_path)
    served = served_routine(function)
    assert served is not None
    weight = normal(4, 3, seed=1)
    assert made_by(lambda: served.replacement(normal(8, 4, 7), weight))[1] == {"causal_conv1d torch": 1}
    assert made_by(lambda: served.replacement(normal(9, 4, 7), weight))[1] == {}


def test_what_a_form_does_not_describe_is_the_functions_own(tmp_path: Path) -> None:
    served = served_routine(written(WHOLE, tmp_path))
    assert served is not None
    x, weight = normal(2, 4, 7), normal(4, 3, seed=1)
    for given in ((x, weight, "relu"), (x.double(), weight.double()), (x, weight, "gelu", None)):
        assert made_by(lambda g=given: served.replacement(*g))[1] == {}  # type: ignore[misc]


def test_a_convolution_learns(tmp_path: Path) -> None:
    function = written(WHOLE, tmp_path)
    served = served_routine(function)
    assert served is not None
    leaves = [normal(2, 5, 11), normal(5, 4, seed=1), normal(5, seed=2)]
    ours = [t.clone().requires_grad_() for t in leaves]
    exact = [t.double().requires_grad_() for t in leaves]
    out, calls = made_by(lambda: served.replacement(ours[0], ours[1], "silu", ours[2]))
    assert calls == {"causal_conv1d torch": 1}
    out.sum().backward()
    with Widened(torch.float64):
        function(exact[0], exact[1], "silu", exact[2]).sum().backward()
    for a, b in zip(ours, exact, strict=True):  # sums of 22 products of a few roundings each
        assert a.grad is not None and b.grad is not None
        assert float((a.grad - b.grad).abs().max() / b.grad.abs().max()) <= 64 * U32


def test_a_state_is_renewed_as_the_function_renews_it(tmp_path: Path) -> None:
    function = written(NEXT, tmp_path)
    served = served_routine(function)
    assert served is not None
    weight, bias = normal(6, 4, seed=1), normal(6, seed=2)
    state, other = normal(2, 6, 4, seed=3), normal(2, 6, 4, seed=3)
    for token in range(3):
        x = normal(2, 6, 1, seed=10 + token)
        exact, (wide, before, taps, shift) = exactly(function, x, other, weight, bias)
        terms, _ = CONV.limits.bound((wide, taps, shift, other.double()[..., 1:], "silu"), (exact, before))
        with torch.no_grad():
            output, calls = made_by(lambda x=x: served.replacement(x, state, weight, bias))  # type: ignore[misc]
            function(x, other, weight, bias)
        assert calls == {"causal_conv1d torch": 1}
        assert ratio(output, exact, terms, U32) <= 1 and torch.equal(state, other)


def scanned(length: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = (
        (2, length, 4, 8),
        (2, length, 4),
        (4,),
        (2, length, 2, 16),
        (2, length, 2, 16),
        (4,),
        (2, 4, 8, 16),
        (4,),
    )
    x, dt, a, b, c, d, state, bias = (normal(*s, seed=i) for i, s in enumerate(shapes))
    return [x.to(dtype), dt.to(dtype), -a.abs() - 0.1, b.to(dtype), c.to(dtype), d, state, bias.to(dtype)]


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_a_scan_is_within_the_bound_of_the_functions_exact_result(dtype: torch.dtype, tmp_path: Path) -> None:
    function = written(RECURRENT, tmp_path)
    served = served_routine(function)
    assert served is not None
    given = scanned(70, dtype)
    (exact, last), wide = exactly(function, *given, True)
    x, dt, a, b, c, d, state, bias = wide[:8]
    terms, ends = SCAN.limits.bound((x, dt, a, b, c, d, bias, state, True, False, None, None), (exact, last))
    (output, final), calls = made_by(lambda: served.replacement(*given, True))
    assert calls == {"ssd_scan torch": 1} and output.dtype == dtype
    assert ratio(output, exact, terms, UNIT[dtype]) <= 1 and ratio(final, last, ends, U32) <= 1
    alone, calls = made_by(lambda: served.replacement(*given))
    assert calls == {"ssd_scan torch": 1} and torch.equal(alone, output)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_a_scan_that_must_learn_is_served_with_its_gradients(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each gradient is within the backward's bound of the exact one, for the rounded cotangent that it is given."""
    function = written(RECURRENT, tmp_path)
    served = served_routine(function)
    assert served is not None and served.gradient
    given = [t.requires_grad_() for t in scanned(37, dtype)]
    weights = [normal(2, 37, 4, 8, seed=11).to(dtype), normal(2, 4, 8, 16, seed=12)]
    slopes, calls = made_by(lambda: torch.autograd.grad(served.replacement(*given, True), given, weights))
    assert calls == {"ssd_scan torch": 1, "ssd_scan_backward torch": 1}
    backward = registry.primitive("ssd_scan_backward")
    x, dt, a, b, c, d, state, bias = (t.detach().double() for t in given)
    args = (*(w.double() for w in weights), x, dt, a, b, c, d, bias, state, True, None, None)
    exact = backward.body(*args)
    order = (0, 1, 2, 3, 4, 5, 7, 6)
    for place, (want, terms) in zip(order, zip(exact, backward.limits.bound(args, exact), strict=True), strict=True):
        assert ratio(slopes[place], want, terms, UNIT[slopes[place].dtype]) <= 1, place


def test_a_weight_that_may_be_left_out_is_not_read(tmp_path: Path) -> None:
    source = WHOLE.replace("taps, active=None", "taps=None, active=None")
    assert served_routine(written(source, tmp_path)) is None


def test_each_form_is_shown_for_itself(tmp_path: Path) -> None:
    """What it returns without its last state is right, and with it is not."""
    source = RECURRENT.replace("return y, h\n", "return y, torch.exp(-delta[:, -1])[..., None, None] * h\n")
    served = served_routine(written(source, tmp_path))
    assert served is not None
    given = scanned(5, torch.float32)
    assert made_by(lambda: served.replacement(*given))[1] == {"ssd_scan torch": 1}
    assert made_by(lambda: served.replacement(*given, True))[1] == {}


def test_only_known_decorators_are_looked_into(tmp_path: Path) -> None:
    source = "import functools\n" + WHOLE.replace(
        "def convolve",
        "def loud(function):\n    @functools.wraps(function)\n    def wrapped(*args, **kwargs):\n"
        "        if kwargs.get('louder') is not None:\n            return 2 * function(*args)\n"
        "        return function(*args, **kwargs)\n    return wrapped\n\n\n@loud\ndef convolve",
    ).replace("shift=None):", "shift=None, **others):")
    function = written(source, tmp_path)
    assert served_routine(function) is None
    routines._served.pop(function)
    routines.wrappers[function.__code__] = lambda wrapped: True
    try:
        served = served_routine(function)
    finally:
        del routines.wrappers[function.__code__]
    assert served is not None
    x, weight = normal(2, 4, 7), normal(4, 3, seed=1)
    plain, calls = made_by(lambda: served.replacement(x, weight, quiet=True))
    assert calls == {"causal_conv1d torch": 1}
    twice, calls = made_by(lambda: served.replacement(x, weight, louder=True))  # the decorator acts on it
    assert calls == {} and torch.equal(twice, 2 * function(x, weight))
    assert float((plain - function(x, weight)).abs().max()) <= 8 * U32 * float(plain.abs().max())


# Modules that pad on both sides, and whose result is cut ----------------------------------------------------

CUT = """
class Mixing(nn.Module):
    def __init__(self, **changes):
        super().__init__()
        given = dict(kernel_size=4, groups=6, padding=3) | changes
        self.blend = nn.Conv1d(6, 6, **given)

    def forward(self, signal):
        count = signal.shape[-1]
        return torch.tanh(self.blend(signal)[..., :count])
"""


def mixing(folder: Path, source: str = CUT, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: Any = load([Specimen("", "", source, "")], folder)[0]
        return module.Mixing(**changes)


@pytest.mark.parametrize("cut", ["[..., :count]", "[:, :, :count]", "[..., : signal.shape[2]]"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_cut_convolution_is_served(cut: str, bias: bool, tmp_path: Path) -> None:
    module = mixing(tmp_path, CUT.replace("[..., :count]", cut), bias=bias)
    x = normal(2, 6, 9, seed=4)
    wanted = module(x)
    before = torch.autograd.grad(wanted.square().sum(), list(module.parameters()))
    report = ferryman.port(module)
    assert "causal_conv1d" in report.maybe() and not report.unsupported
    output, calls = made_by(lambda: module(x))
    assert calls.pop("causal_conv1d torch") == 1
    # sums of 5 terms of at most 3 roundings, then tanh, whose slope is at most 1
    assert float((output - wanted).abs().max()) <= 32 * U32 * float(wanted.abs().max())
    after = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    for a, b in zip(after, before, strict=True):
        assert float((a - b).norm()) <= 2.0**-16 * float(b.norm())
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert torch.equal(twin(x), output)
    ferryman.unport(module)
    assert torch.equal(module(x), wanted)


CUT_FAULTS: dict[str, Any] = {
    "padded for a shorter one": {"padding": 2},
    "padded for a longer one": {"padding": 4},
    "dilated": {"dilation": 2, "padding": 6},
    "strided": {"stride": 2, "padding": 16},
    "all channels": {"groups": 1},
    "pairs of channels": {"groups": 3},
    "reflected": {"padding_mode": "reflect"},
    "cut on the left": ("[..., :count]", "[..., -count:]"),
    "cut one later": ("[..., :count]", "[..., 1 : count + 1]"),
    "every second": ("[..., :count]", "[..., :count:2]"),
    "another dimension": ("[..., :count]", "[:, :count]"),
}


@pytest.mark.parametrize("fault", CUT_FAULTS)
def test_convolutions_that_are_not_causal_stay(fault: str, tmp_path: Path) -> None:
    change = CUT_FAULTS[fault]
    changed = isinstance(change, dict)
    module = mixing(tmp_path, CUT if changed else CUT.replace(*change), **(change if changed else {}))
    x = normal(2, 6, 9, seed=4)
    wanted = module(x)
    report = ferryman.port(module)
    output, calls = made_by(lambda: module(x))
    assert not any("causal_conv1d" in op for op in (*calls, *report.maybe())) and output.shape == wanted.shape


def test_another_length_a_hook_and_another_module_go_to_the_module(tmp_path: Path) -> None:
    module = mixing(tmp_path, CUT.replace("count = signal.shape[-1]", "count = 5"))
    ferryman.port(module)
    assert "causal_conv1d torch" in made_by(lambda: module(normal(2, 6, 5)))[1]
    assert "causal_conv1d torch" not in made_by(lambda: module(normal(2, 6, 9)))[1]
    seen: list[Any] = []
    handle = module.blend.register_forward_hook(lambda *args: seen.append(args))
    assert "causal_conv1d torch" not in made_by(lambda: module(normal(2, 6, 5)))[1] and len(seen) == 1
    handle.remove()
    module.blend = nn.Sequential(module.blend)
    assert "causal_conv1d torch" not in made_by(lambda: module(normal(2, 6, 5)))[1]


AFTERWARDS: dict[str, Callable[[Any], None]] = {
    "dilated": lambda m: setattr(m.blend, "dilation", (2,)),
    "reflected": lambda m: m.__setattr__("blend", nn.Conv1d(6, 6, 4, groups=6, padding=3, padding_mode="reflect")),
    "another one": lambda m: m.__setattr__("blend", nn.Conv1d(6, 6, 4, groups=6, padding=6, dilation=2)),
    "a bias that went": lambda m: setattr(m.blend, "bias", None),
}


@pytest.mark.parametrize("change", AFTERWARDS)
def test_a_convolution_that_changes_after_porting_is_its_own(change: str, tmp_path: Path) -> None:
    module, x = mixing(tmp_path), normal(2, 6, 9, seed=4)
    ferryman.port(module)
    assert "causal_conv1d torch" in made_by(lambda: module(x))[1]
    AFTERWARDS[change](module)
    output, calls = made_by(lambda: module(x))
    assert "causal_conv1d torch" not in calls
    ferryman.unport(module)
    assert torch.equal(output, module(x))


# Models of transformers -------------------------------------------------------------------------------------

FAMILIES = ("mamba2", "falcon_h1", "nemotron_h")


def built(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    pytest.importorskip("transformers")
    import ferryman.integrations.transformers  # noqa: F401 - it registers itself
    from ferryman.porting.model import bundled

    decorated(name, "causal_conv1d_fn")  # an older transformers writes the model without functions
    model = bundled.build(name, True, dtype)
    for n, value in changes.items():
        setattr(model.config, n, value)
    return model


def decorated(family: str, function: str) -> Any:
    pytest.importorskip("transformers")
    import ferryman.integrations.transformers  # noqa: F401

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if not hasattr(module, function):
        pytest.skip(f"this transformers writes {family} without a function {function}")
    return getattr(module, function)


@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_the_librarys_own_functions_are_proven(family: str) -> None:
    for name, op in (
        ("causal_conv1d_fn", "causal_conv1d"),
        ("causal_conv1d_update", "causal_conv1d"),
        ("mamba2_chunk_scan", "ssd_scan"),
        ("mamba2_selective_state_update", "ssd_scan"),
    ):
        routine = served_routine(decorated(family, name))
        assert routine is not None and routine.op == op


def test_packed_sequences_go_to_the_library() -> None:
    routine = served_routine(decorated("mamba2", "causal_conv1d_fn"))
    assert routine is not None
    with pytest.raises(ValueError, match="packed"):
        routine.replacement(normal(1, 4, 6), normal(4, 3), seq_idx=torch.zeros(1, 6, dtype=torch.int32))


def test_another_packages_implementation_is_left_alone() -> None:
    function = decorated("mamba2", "causal_conv1d_fn")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    twin = type(function)(function.__code__, function.__globals__, "twin", None, tuple(cells.values()))
    twin.__wrapped__ = lambda *args: None  # not what the cell `implementation` holds
    assert served_routine(twin) is None


def test_training_runs_through_the_scan_and_its_gradient() -> None:
    from ferryman.porting.model.port import port, unport

    model = built("mamba2")
    ids = torch.arange(1, 27).reshape(2, 13)
    wanted = model(input_ids=ids, labels=ids)
    wanted.loss.backward()
    slopes = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    report = port(model)
    mixers = [s for s in report.ported if "ssd_scan" in s.maybe]
    assert len(mixers) == 2 and all(s.gradient for s in mixers) and "ssd_scan" in report.maybe()
    assert "" not in report.calls(gradients=False)
    _, calls = made_by(lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert calls["causal_conv1d torch"] == 2 and calls["ssd_scan torch"] == 2
    assert calls["ssd_scan_backward torch"] == calls["causal_conv1d_backward torch"] == 2
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert float((p.grad - slopes[n]).norm()) <= 2.0**-14 * float(slopes[n].norm()), n
    with torch.no_grad():
        quiet, calls = made_by(lambda: model(input_ids=ids, use_cache=False).logits)
        assert calls["ssd_scan torch"] == calls["causal_conv1d torch"] == 2
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(twin(input_ids=ids).logits, quiet)
    unport(model)
    assert torch.equal(model(input_ids=ids, labels=ids).logits, wanted.logits)


@pytest.mark.parametrize(
    ("family", "scans"), [("mamba2", True), ("falcon_h1", True), ("lfm2", False), ("qwen3_next", False)]
)
def test_generation_gives_the_same_tokens(family: str, scans: bool) -> None:
    from ferryman.porting.model.port import port

    model: Any = built(family)
    ids = torch.randint(1, 90, (2, 5), generator=torch.Generator().manual_seed(1))
    padded = torch.ones_like(ids)
    padded[0, :2] = 0
    steps = 4

    def run() -> Any:
        return model.generate(
            ids,
            attention_mask=padded,
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )

    wanted = run()
    port(model)
    generated, calls = made_by(run)
    assert torch.equal(generated.sequences, wanted.sequences)
    assert calls["causal_conv1d torch"] % steps == 0 and calls["causal_conv1d torch"] >= steps
    assert calls.get("ssd_scan torch", 0) == (2 * steps if scans else 0)  # every token, in each of two layers
    assert ("gated_delta_rule torch" in calls) == (family == "qwen3_next")
    for a, b in zip(generated.logits, wanted.logits, strict=True):
        assert float((a - b).norm()) <= 2.0**-16 * float(b.norm())


def test_a_scan_by_channels_is_served_token_after_token() -> None:
    """All tokens at once are the library's own: its function imports other packages as it runs."""
    transformers = pytest.importorskip("transformers")
    import ferryman.integrations.transformers  # noqa: F401 - it registers itself
    from ferryman.porting.model.port import port

    if served_routine(decorated("mamba", "mamba_selective_state_update")) is None:
        pytest.skip("another package's implementation stands there")
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, state_size=8, num_hidden_layers=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(1, 90, (2, 5), generator=torch.Generator().manual_seed(1))
    steps = 4

    def run() -> Any:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )

    wanted = run()
    port(model)
    generated, calls = made_by(run)
    assert torch.equal(generated.sequences, wanted.sequences)
    assert calls["selective_scan torch"] == 2 * (steps - 1) and calls["causal_conv1d torch"] == 2 * steps
    for a, b in zip(generated.logits, wanted.logits, strict=True):
        assert float((a - b).norm()) <= 2.0**-16 * float(b.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_in_16_bits_is_nearer_to_the_exact_one_or_as_near(family: str) -> None:
    """The scan's rounding points are fewer: what is over the distance of the unported model is another result."""
    from ferryman.porting.model.port import port

    model: Any = built(family, torch.bfloat16)
    ids = torch.arange(1, 35).reshape(2, 17)
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(input_ids=ids, use_cache=False).logits
        wanted = model(input_ids=ids, use_cache=False).logits
        port(model)
        output, calls = made_by(lambda: model(input_ids=ids, use_cache=False).logits)
    assert calls["ssd_scan torch"] >= 1
    assert float((output.float() - exact).norm()) <= 1.25 * float((wanted.float() - exact).norm())


def test_a_scan_is_in_a_compiled_graph() -> None:
    from ferryman.porting.model.port import port

    model: Any = built("mamba2")
    mixer = model.backbone.layers[0].mixer
    x = normal(2, 13, 64)
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    port(model)
    torch.compiler.reset()
    with torch.no_grad():
        eager = mixer(x)
        call: Any = torch.compile(mixer, backend=backend, fullgraph=True)
        compiled = call(x)
    assert len(graphs) == 1 and any("ssd_scan" in t for t in graphs[0]) and any("causal_conv1d" in t for t in graphs[0])
    assert torch.equal(compiled, eager)

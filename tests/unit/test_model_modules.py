"""The first divergent module is named: planted faults in one module each; and a right port names none."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import ferryman
from ferryman.cli import check_model as cli
from ferryman.integrations import transformers as porter
from ferryman.porting.model import config as model_config
from ferryman.porting.model import exact, measure
from ferryman.porting.model.check import check_model
from ferryman.porting.model.modules import errors, sequential
from ferryman.porting.model.replay import unwatched
from ferryman.porting.model.results import Divergence, ModuleErrors, first_divergence
from tests.unit.model_bench import DTYPES, FAMILIES, SHORT, Wrap, backward_scaled, bench, plant, scaled

ops = SimpleNamespace(**vars(ferryman.ops))  # the right ones, whatever is planted


class Planted:
    """A porter with faults."""

    def __init__(self, **faults: Wrap) -> None:
        self.faults = {path.replace("__", "."): wrap for path, wrap in faults.items()}
        self.watch = porter.watch

    def port(self, model: Any) -> Any:
        report = porter.port(model)
        for path, wrap in self.faults.items():
            plant(model, path, wrap)
        return report

    def unport(self, model: Any) -> None:
        """Without the faults first: unport keeps what was derived from a ported class since."""
        for path in self.faults:
            module = model.get_submodule(path)
            (module.__class__,) = type(module).__bases__
        porter.unport(model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_port_names_no_module(family: str, dtype: str) -> None:
    for seed in (0, 1):
        judged = bench(family, dtype, seed, layers=2)
        modules = judged.modules()
        assert first_divergence(modules) is None, first_divergence(modules)
        assert all(m.ok and m.exact == "float64" and not m.note for m in modules) and not judged.reduced
        # Every ported module, every decoder layer, and the embedding, rotary, last norm and head.
        inside = {"input_layernorm", "self_attn", "mlp"}
        inside |= {"self_attn.q_norm", "self_attn.k_norm"} if family == "qwen3" else set()
        wanted = {f"model.layers.{i}.{name}" for i in range(2) for name in inside} | {"model.norm", "lm_head"}
        wanted.add("model.embed_tokens")
        wanted |= {"model.layers.0", "model.layers.1"}  # they call their second norm with the addition before it
        assert {m.path for m in modules if m.ported} == wanted
        others = {"model.rotary_emb"}
        assert {m.path for m in modules if not m.ported} == others
        by_path = {m.path: m for m in modules}
        attention = [t.tensor for t in by_path["model.layers.1.self_attn"].tensors]
        assert attention[:5] == [
            "rotated queries",
            "rotated keys",
            "attention's result",
            "output",
            "gradient of the input",
        ]
        # Both are measured against exact; what was not ported is the same code, and so the same error.
        ported = [t for m in modules if m.ported and m.path != "model.embed_tokens" for t in m.tensors]
        assert all(t.unported > 0 and t.found > 0 and t.ratio is not None and t.floor > 0 for t in ported)
        same = [m for m in modules if m.path in ("model.rotary_emb", "model.embed_tokens")]
        assert len(same) == 2 and all(t.ratio in (None, 1.0) for m in same for t in m.tensors)


# Faults ----------------------------------------------------------------------------------------------------


def with_attribute(name: str, change: Callable[[Any], Any]) -> Wrap:
    """The module's forward while one of its attributes is another."""

    def wrap(self: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        right = getattr(self, name)
        setattr(self, name, change(right))
        try:
            return own(*args, **kwargs)
        finally:
            setattr(self, name, right)

    return wrap


def with_op(name: str, wrong: Callable[..., Any]) -> Wrap:
    """The module's forward while it calls another op by one of ours' name."""

    def wrap(self: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        right = getattr(ferryman.ops, name)
        setattr(ferryman.ops, name, wrong)
        try:
            return own(*args, **kwargs)
        finally:
            setattr(ferryman.ops, name, right)

    return wrap


def narrower(config: Any) -> Any:
    changed = copy.copy(config)
    changed.sliding_window = config.sliding_window - 1
    return changed


def future(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, **kwargs: Any) -> Any:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
    return ops.attention(q, k, v, causal=False, mask=seen, **kwargs)


def stale_token(self: Any, own: Any, x: Tensor) -> Tensor:
    out = own(x).clone()
    out[0, 5] = out[0, 4]
    return out


def one_nan(self: Any, own: Any, x: Tensor) -> Tensor:
    out = own(x).clone()
    out[1, 3, 7] = math.nan
    return out


def no_weight_gradient(self: Any, own: Any, x: Tensor) -> Tensor:
    gated = ops.silu_mul(self.gate_proj(x), self.up_proj(x))
    return nn.functional.linear(gated, self.down_proj.weight.detach())


def leaky_residual(self: Any, own: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return own(x, *args, **kwargs) + 0.02 * x


def other_base(self: Any, own: Any, x: Tensor, position_ids: Tensor) -> Any:
    return own(x, position_ids * 1.01)


# name: (family, dtype, faulty module, fault, direction, tensor)
FAULTS: dict[str, tuple[str, str, str, Wrap, str, str]] = {
    "an MLP 1% large": ("qwen3", "bfloat16", SHORT("2.mlp"), scaled(1.01), "forward", "output"),
    "a window one short": (
        "mistral",
        "bfloat16",
        SHORT("1.self_attn"),
        with_attribute("config", narrower),
        "forward",
        "attention's result",
    ),
    "10 x eps in a norm": (
        "llama",
        "float32",
        SHORT("1.input_layernorm"),
        with_attribute("variance_epsilon", lambda e: 10 * e),
        "forward",
        "output",
    ),
    "10 x eps in the last norm": (
        "gemma",
        "float32",
        "model.norm",
        with_attribute("eps", lambda e: 10 * e),
        "forward",
        "output",
    ),
    "a mean over N-1": (
        "qwen3",
        "bfloat16",
        SHORT("0.self_attn.q_norm"),
        scaled((1 - 1 / 128) ** 0.5),
        "forward",
        "output",
    ),
    "keys' norm left out": (
        "qwen3",
        "float32",
        SHORT("2.self_attn.k_norm"),
        lambda self, own, x: x * 1.0,
        "forward",
        "output",
    ),
    "a norm's gradient 2% large": (
        "qwen2",
        "bfloat16",
        SHORT("1.input_layernorm"),
        backward_scaled(1.02),
        "backward",
        "gradient of the input",
    ),
    "an MLP's gradient 1% small": (
        "gemma",
        "float32",
        SHORT("0.mlp"),
        backward_scaled(0.99),
        "backward",
        "gradient of the input",
    ),
    "a weight without its gradient": (
        "llama",
        "bfloat16",
        SHORT("2.mlp"),
        no_weight_gradient,
        "backward",
        "gradient of down_proj.weight",
    ),
    "rotary interleaved": (
        "qwen3",
        "bfloat16",
        SHORT("0.self_attn"),
        with_op("rope", lambda q, k, c, s: ops.rope(q, k, c, s, interleaved=True)),
        "forward",
        "rotated queries",
    ),
    "keys rotated backwards": (
        "llama",
        "bfloat16",
        SHORT("1.self_attn"),
        with_op("rope", lambda q, k, c, s: (ops.rope(q, k, c, s)[0], ops.rope(q, k, c, -s)[1])),
        "forward",
        "rotated keys",
    ),
    "the future is seen": (
        "qwen2",
        "float32",
        SHORT("2.self_attn"),
        with_op("attention", future),
        "forward",
        "attention's result",
    ),
    "attention's scale 2% large": (
        "qwen3",
        "bfloat16",
        SHORT("1.self_attn"),
        with_op("attention", lambda q, k, v, *, scale, **kw: ops.attention(q, k, v, scale=1.02 * scale, **kw)),
        "backward",
        "gradient of the input",
    ),
    "one token stale": ("mistral", "bfloat16", SHORT("0.mlp"), stale_token, "forward", "output"),
    "one NaN": ("qwen3", "float32", SHORT("1.mlp"), one_nan, "forward", "output"),
    "rounded to bfloat16": (
        "llama",
        "float32",
        SHORT("2.mlp"),
        lambda self, own, x: own(x).bfloat16().float(),
        "forward",
        "output",
    ),
    "a residual counted twice": ("gemma", "bfloat16", SHORT("1"), leaky_residual, "forward", "output"),
    "other positions": ("llama", "float32", "model.rotary_emb", other_base, "forward", "output 0"),
    "a head 1% large": ("qwen3", "bfloat16", "lm_head", scaled(1.01), "forward", "output"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    family, dtype, path, fault, direction, tensor = FAULTS[name]
    modules = bench(family, dtype, faults={path: fault}).modules()
    first = first_divergence(modules)
    assert first is not None
    assert (first.path, first.direction, first.tensor) == (path, direction, tensor), first.text
    assert first.away > 1 and first.text.startswith(f"{path}: {direction} {tensor} is {first.away:.3g} limits away (")
    assert first.text.endswith("; first divergence")
    # Nothing else is blamed but what contains the faulty module.
    assert all(m.ok or path == m.path or path.startswith(f"{m.path}.") for m in modules)


def test_the_first_of_several_faults_is_named() -> None:
    later = {SHORT("2.mlp"): scaled(1.05), SHORT("1.self_attn.k_norm"): scaled(1.02), SHORT("1.mlp"): scaled(1.5)}
    first = first_divergence(bench("qwen3", faults=later).modules())
    assert first is not None and first.path == SHORT("1.self_attn.k_norm")
    back = {SHORT("0.mlp"): backward_scaled(1.5), SHORT("2.input_layernorm"): backward_scaled(1.02)}
    first = first_divergence(bench("llama", faults=back).modules())  # the backward reaches layer 2 before layer 0
    assert first is not None and (first.path, first.direction) == (SHORT("2.input_layernorm"), "backward")
    # Any forward divergence comes before any backward one.
    both = {SHORT("2.mlp"): scaled(1.05), SHORT("0.input_layernorm"): backward_scaled(1.5)}
    first = first_divergence(bench("llama", faults=both).modules())
    assert first is not None and (first.path, first.direction) == (SHORT("2.mlp"), "forward")


def test_a_wrong_shape_and_a_wrong_dtype_are_divergences() -> None:
    testbed = bench("llama", "bfloat16", layers=1)
    path = SHORT("0.mlp")
    unit, record = testbed.unit(path), testbed.run(path)
    right = record.forward["output"]
    for wrong, note in ((right[:, :-1], "shape is (2, 31, 256)"), (right.float(), "dtype is torch.float32")):
        record.forward["output"] = wrong
        judged = unit.judge(record)
        assert not judged.ok and judged.away == math.inf
        assert note in judged.tensors[0].note
    del record.forward["output"]
    assert unit.judge(record).tensors[0].note == "the ported module does not give it"


def test_a_module_that_the_port_never_calls_is_said_and_not_blamed() -> None:
    def unregistered(self: Any, own: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        norm = self._modules.pop("input_layernorm")
        try:
            object.__setattr__(
                self, "input_layernorm", lambda y: ops.rms_norm(y, norm.weight, norm.variance_epsilon, True)
            )
            return own(x, *args, **kwargs)
        finally:
            object.__delattr__(self, "input_layernorm")
            self._modules["input_layernorm"] = norm

    modules = bench("llama", "float32", layers=2, faults={SHORT("1"): unregistered}).modules()
    assert first_divergence(modules) is None
    (left,) = (m for m in modules if m.note)
    assert left.path == SHORT("1.input_layernorm") and left.ok and not left.tensors
    assert "does not call it" in left.note


# The exact twin --------------------------------------------------------------------------------------------


def test_the_exact_twin_is_exact() -> None:
    """transformers' norm casts to float32 by itself; its twin must not."""
    testbed = bench("llama", "float32", layers=1, watch=unwatched)
    path = SHORT("0.input_layernorm")
    module = testbed.model.get_submodule(path)
    x = testbed.reference[path].args[0].double()
    wanted = x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt() * module.weight.double()
    wanted, normed = wanted.detach(), testbed.unit(path).exact.forward["output"]
    assert normed.dtype == torch.float64
    assert float((normed - wanted).abs().max()) < 1e-14
    assert float((module(testbed.reference[path].args[0]).double() - wanted).detach().abs().max()) > 1e-9
    position = torch.arange(32, dtype=torch.float64)
    angle = position[:, None] * testbed.model.model.rotary_emb.inv_freq.double()
    cos = testbed.unit("model.rotary_emb").exact.forward["output 0"]
    assert float((cos[0, :, : angle.shape[1]] - angle.cos()).abs().max()) < 1e-13


def test_the_exact_logits_are_exact_and_leave_the_model_as_it_was() -> None:
    testbed = bench("qwen3", "float32", layers=2)
    tokens = torch.randint(1024, (2, 32), generator=torch.Generator().manual_seed(0))
    before = {name: p.clone() for name, p in testbed.model.named_parameters()}
    plain = testbed.model(input_ids=tokens, use_cache=False).logits.detach()
    truth, wide = exact.logits(testbed.model, tokens)
    assert truth.dtype == wide == torch.float64
    assert 1e-8 < measure.relative(plain, truth) < 1e-5
    for name, p in testbed.model.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, before[name])
    # All modules run in float64 one by one give the same bits as the model cast to float64 as a whole.
    whole = copy.deepcopy(testbed.model).double()
    with torch.no_grad(), exact.Widened(torch.float64):
        assert measure.relative(whole(input_ids=tokens, use_cache=False).logits, truth) < 1e-13


def test_without_memory_the_twin_is_float32_and_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    testbed = bench("llama", "bfloat16", layers=2)
    faulty = bench("llama", "bfloat16", layers=2, faults={SHORT("1.mlp"): scaled(1.01)})
    monkeypatch.setattr(model_config, "free_bytes", lambda device: 1 << 20)
    modules = testbed.modules()
    assert first_divergence(modules) is None
    large = [m.path for m in modules if m.exact == "float32"]
    assert SHORT("0.mlp") in large and sorted(large) == sorted(testbed.reduced)
    first = first_divergence(faulty.modules())
    assert first is not None and first.path == SHORT("1.mlp")
    assert exact.dtype_for(torch.device("cpu"), 1 << 19) == torch.float64
    assert exact.dtype_for(torch.device("cpu"), 1 << 20) == torch.float32
    assert exact.dtype_for(torch.device("mps"), 1) == torch.float32


# Measures --------------------------------------------------------------------------------------------------


def test_errors() -> None:
    wanted = torch.randn(40, 50, dtype=torch.float64)
    actual = 1.25 * wanted
    assert errors(actual, wanted).bias == pytest.approx(0.25) == errors(actual, wanted).worst
    actual[7] *= 2
    assert errors(actual, wanted).worst == pytest.approx(1.5) and errors(actual, wanted).relative < 0.5
    assert errors(None, wanted).relative == pytest.approx(1.0) and errors(None, torch.zeros(3)).relative == 0.0
    actual[3, 3] = math.nan
    assert math.isnan(errors(actual, wanted).relative) and math.isnan(errors(actual, wanted).worst)
    flat = torch.ones(1000)
    assert errors(flat, flat).spread == pytest.approx(1000**-0.5)


def test_a_sequential_sum_errs_as_derived() -> None:
    terms = torch.randn(2048, 400, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(400)
    for row in terms:
        total += row
    error = measure.relative(total, terms.double().sum(0))
    assert 0.8 < error / sequential(2048) < 1.25


# The whole check -------------------------------------------------------------------------------------------


def whole(family: str, planted: Planted, **options: Any) -> Any:
    given: dict[str, Any] = {"tiny": True, "layers": 2, "steps": 3, "tokens": 32, "run_modes": False, **options}
    return check_model(family, porter=planted, **given)


def test_the_check_gives_the_first_divergence_first() -> None:
    result = whole("qwen3", Planted(model__layers__1__mlp=scaled(1.02)))
    assert result.verdict == "FAIL" and isinstance(result.first_divergence, Divergence)
    assert result.first_divergence.path == SHORT("1.mlp") and result.reasons[0] == result.first_divergence.text
    assert result.reasons[1] == f"1 more modules beyond a limit: {SHORT('1')}"
    assert result.exact == "float64" and {m.name for m in result.exact_logits} == {m.name for m in result.logits}
    assert result.restored
    page = cli.markdown(result)
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {SHORT('1.mlp')} |"))
    assert row.endswith("| no, first divergence |") and "forward output" in row
    assert f"FAIL: {result.reasons[0]}" in page
    shown = next(rows for title, _, rows in cli.tables(result) if title.startswith("Each module"))
    assert [cells[0] for cells in shown] == [m.path for m in sorted(result.modules, key=lambda m: -m.away) if not m.ok]


def test_a_fault_of_the_backward_alone_fails_the_check() -> None:
    result = whole("llama", Planted(model__layers__0__input_layernorm=backward_scaled(1.05)))
    assert result.verdict == "FAIL" and all(m.ok for m in result.logits)
    assert result.first_divergence.path == SHORT("0.input_layernorm")
    assert result.first_divergence.direction == "backward"
    assert whole("llama", Planted(), backward=False).first_divergence is None


def test_without_a_gradient_only_the_forward_is_judged() -> None:
    modules: list[ModuleErrors] = bench("gemma", backward=False).modules()
    assert {t.direction for m in modules for t in m.tensors} == {"forward"}

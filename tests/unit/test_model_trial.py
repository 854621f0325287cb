"""Counting, comparing and trying models: bundled, of a file, of the user's own code; and the command over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman
from ferryman.errors import ArgumentError, PortError, UnknownName
from ferryman.ops.recognition import Served
from ferryman.porting.model import account, bundled, classes, generic, rewrite, serve, trial, uses
from tests.cli.run import ferryman as command
from tests.unit import portable

pytest.importorskip("transformers")
HERE = "tests.unit.portable"


@pytest.fixture
def wrong_norm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Makes what serves `layer_norm` inside forwards wrong by a factor."""

    def plant(factor: float) -> None:
        def off(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return functional.layer_norm(x, *args, **kwargs) * factor

        replacements = {**uses.served(), functional.layer_norm: Served("layer_norm", off)}
        monkeypatch.setattr(serve, "served", lambda: replacements)
        forget()

    def forget() -> None:
        rewrite._cache.clear()
        classes._class_of.cache_clear()

    yield plant
    forget()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Inner()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(self.scale(x), (8,))


def normed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Normed(), (torch.randn(3, 8),)


# Accounts


@pytest.mark.parametrize(
    ("x", "weight", "flops"),
    [
        ((6, 4), (3, 4, 5), 2 * 6 * 4 * 5),  # each row in one group
        ((6, 4), (4, 5), 2 * 6 * 4 * 5),  # cut along K
        ((3, 6, 4), (4, 5), 2 * 6 * 4 * 5),  # cut along N
        ((3, 6, 4), (3, 4, 5), 2 * 3 * 6 * 4 * 5),
    ],
)
def test_a_grouped_product_counts_what_its_rows_meet(x: tuple[int, ...], weight: tuple[int, ...], flops: int) -> None:
    assert account._grouped(torch.empty(x), torch.empty(weight)) == flops


def test_experts_are_in_the_account() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    import ferryman.integrations.transformers  # noqa: F401 - which says whose decorators stand around experts

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = bundled.build("mixtral", True, torch.bfloat16)
    coverage = account.account(model, bundled.inputs_of("mixtral", True, model))
    grouped = {op: work for op, work in coverage.unported.left.items() if "grouped_mm" in op}
    experts = sum(p.numel() for n, p in model.named_parameters() if "experts" in n and p.dim() == 3) / 4
    rows = 2 * 17 * 2  # tokens, two experts each
    assert sum(work.flops for work in grouped.values()) == 2 * rows * experts
    # the op's own FLOPs are these, and nothing of the products is left
    assert coverage.ported.served["moe_experts"].flops == 2 * rows * experts
    assert not [op for op in coverage.ported.left if "grouped_mm" in op] and coverage.shares()["flops"] > 0.99


def test_an_account_counts_exactly_and_leaves_the_model_as_it_was() -> None:
    model, (x,) = portable.decoder()
    before = model(x)
    coverage = account.account(model, lambda m: m(torch.randn(2, 7, 32)))
    assert coverage.ported.calls() == {"add_layer_norm": 1, "attention": 1, "linear": 5, "rms_norm": 1, "silu_mul": 1}
    products = sum(2 * 14 * p.numel() for p in model.parameters() if p.dim() == 2)
    assert coverage.ported.served["linear"].flops == pytest.approx(products, rel=0.02)
    shares = coverage.shares()
    assert shares["flops"] > 0.9 and 0 < shares["time"] < 1
    assert "linear" in coverage.text() and set(coverage.implementations) == set(coverage.ported.served)
    assert torch.equal(model(x), before) and not any(
        ferryman.porting.model.classes.is_ported(m) for m in model.modules()
    )


# Comparing


@pytest.mark.parametrize("factory", [portable.decoder, portable.named], ids=["decoder", "classifier"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_in_nobodys_library_port_within_their_limits(factory: Any, dtype: torch.dtype) -> None:
    model, given = factory()
    built = trial.Built("", model.to(dtype).eval(), trial._caller("", model, given, []))
    parity = generic.compare(built.model, built.run)
    assert parity.ok and parity.restored and not parity.miscounted and not parity.runs, parity.reasons
    assert {d.what for d in parity.distances} == {"output", "gradient"}
    forward = {op: n for op, n in parity.calls.items() if not op.endswith("_backward")}
    sure = {op: n for op, n in forward.items() if op not in parity.report.maybe()}
    assert sure == parity.report.calls() and all(parity.calls[f"{op}_backward"] == n for op, n in forward.items())
    assert forward["attention"] == 1


def test_modules_that_run_more_than_once_are_said_and_counted() -> None:
    model = portable.Twice().eval()
    x = torch.randn(3, 16)
    parity = generic.compare(model, lambda m: m(x))
    assert parity.ok and dict(parity.runs) == {"norm": 3, "step": 3, "spare": 0} and not parity.miscounted
    assert parity.report.calls() == {"layer_norm": 1, "linear": 2}
    assert parity.report.calls(runs=parity.runs) == {"layer_norm": 3, "linear": 3}
    assert parity.report.calls(2, runs=parity.runs) == {"layer_norm": 6, "linear": 6}


def test_a_wrong_replacement_fails_and_its_module_is_the_first_divergent(wrong_norm: Any) -> None:
    wrong_norm(1 + 2.0**-10)
    model, (x,) = normed()
    parity = generic.compare(model.eval(), lambda m: m(x))
    assert not parity.ok and parity.first is not None and parity.first.path == "second" and parity.restored
    assert parity.first.module == "Inner" and any("first divergent module: second" in r for r in parity.reasons)
    assert parity.first.value == pytest.approx(2.0**-10, rel=0.01)


def _last_norm() -> nn.Module:
    """Its last bias's gradient is a sum of cosines that cancel."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32)).to(torch.bfloat16).eval()


def test_an_error_of_the_unported_model_is_not_the_ported_ones() -> None:
    """PyTorch's CPU kernel sums a layer norm's 16-bit gradient of bias in 16 bits; ours sums in float32."""
    model, x = _last_norm(), torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    parity = generic.compare(model, lambda m: m(x))
    (gradient,) = (d for d in parity.distances if d.what == "gradient")
    assert parity.ok and gradient.where == "2.bias" and gradient.value > gradient.limit
    assert gradient.exact is not None and gradient.exact < 2.0**-8  # of the result's own rounding


def test_a_wrong_gradient_is_far_from_the_exact_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _last_norm(), torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = torch.ops.aten.native_layer_norm_backward

    def off(*args: Any) -> Any:
        grad_x, grad_weight, grad_bias = whole(*args)
        return grad_x, grad_weight, grad_bias * (1 + 2.0**-4)

    monkeypatch.setattr(torch.ops.aten, "native_layer_norm_backward", off)
    parity = generic.compare(model, lambda m: m(x))
    (gradient,) = (d for d in parity.distances if d.what == "gradient")
    assert not parity.ok and gradient.exact is not None and gradient.exact > gradient.floor
    assert "from the exact one" in parity.reasons[0]


def test_a_difference_within_the_floor_passes(wrong_norm: Any) -> None:
    wrong_norm(1.0)
    model, (x,) = normed()
    parity = generic.compare(model.eval(), lambda m: m(x))
    assert parity.ok and parity.first is None


def test_results_of_any_kind_are_walked_and_nothing_is_nearer_than_it_is() -> None:
    tensors = dict(generic.tensors_in({"a": (torch.ones(1), torch.ones(1, dtype=torch.long)), "b": [torch.zeros(2)]}))
    assert sorted(tensors) == ["output.a[0]", "output.b[0]"]
    nan = torch.tensor([1.0, float("nan")])
    assert generic.relative(nan, nan) == 0.0
    assert generic.relative(nan, torch.ones(2)) == generic.relative(torch.ones(2), torch.ones(3)) == float("inf")
    assert generic.relative(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert generic.farthest((torch.ones(1),), torch.ones(1)) == float("inf")


# Families


def test_families_build_tiny_and_real_widths_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    small = bundled.build("llama", True, torch.bfloat16, 3)
    assert sum(p.numel() for p in small.parameters()) < 1 << 20 and len(small.base_model.layers) == 3
    assert next(small.parameters()).dtype is torch.bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True):
        real = bundled.build("llama", False, torch.bfloat16)
    assert real.config.hidden_size == 4096 and sum(p.numel() for p in real.parameters()) > 1 << 29
    assert bundled.inputs_of("llama", False, real).length == 2040  # type: ignore[attr-defined]


def test_each_kind_of_layer_is_kept_where_there_are_two() -> None:
    assert len(set(bundled.build("gemma2", True).config.layer_types)) == 2
    assert bundled._spread(["a", "a", "b"], 2) == ["a", "b"] and bundled._spread(["a", "a"], 2) == ["a", "a"]


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="llama"):
        bundled.build("lama", True)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("raises", "no weights here"),
        ("number", "int"),
        ("absent", "AttributeError"),
        ("alone", "--input SHAPE"),
        ("nothing", "nothing in Sequential"),
    ],
)
def test_factories_that_give_no_model_are_named(factory: str, said: str) -> None:
    with pytest.raises((ArgumentError, PortError), match=said):
        built = trial.build(f"{HERE}:{factory}", False, None, torch.float32, ["2,3"] if factory == "nothing" else [])
        ferryman.port(built.model)


def test_inputs_come_from_shapes_dictionaries_and_tuples_in_the_models_dtype() -> None:
    for factory, inputs in (("alone", ["2,5,16"]), ("named", []), ("decoder", []), ("with_a_tensor", [])):
        built = trial.build(f"{HERE}:{factory}", False, None, torch.bfloat16, inputs)
        assert built.run(built.model).dtype is torch.bfloat16
    with pytest.raises(ArgumentError, match="sizes separated by commas"):
        trial.build(f"{HERE}:alone", False, None, torch.float32, ["2xs"])


# The command


def test_the_command_ports_a_factory_and_writes_its_documents(tmp_path: Path) -> None:
    done = command("port", f"{HERE}:decoder", "--device", "mi300x", "--out", str(tmp_path), "--json")
    said = json.loads(done.out)
    assert done.code == 0 and said["verdict"] == "PASS" and said["restored"]
    assert said["ported"] == {"add_layer_norm": 1, "attention": 1, "linear": 5, "rms_norm": 1, "silu_mul": 1}
    assert said["accounted_for"] == "mi300x" and {x["what"] for x in said["account"]} == {"served", "left"}
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text()) == said


def test_the_command_takes_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64, "vocab_size": 97}))
    done = command("port", str(tmp_path), "--tiny", "--forward-only", "--json")
    said = json.loads(done.out)
    assert done.code == 0 and said["verdict"] == "PASS" and said["ported"]["attention"] == 2
    assert said["dtype"] == "float32" and {m["what"] for m in said["parity"]} == {"output"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "no_such"}', "no_such"),
        ("[1]", "model_type"),
        ("{", "not JSON"),
        ('{"model_type": "llama", "auto_map": {"AutoModel": "x.y"}}', "auto_map"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config"),
    ],
)
def test_bad_config_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = command("port", str(tmp_path), "--tiny", "--json")
    assert done.code == 2 and said in done.err and "Traceback" not in done.err


def test_the_command_exits_with_one_where_parity_fails(wrong_norm: Any, tmp_path: Path) -> None:
    wrong_norm(1 + 2.0**-8)
    done = command("port", f"{__name__}:normed", "--out", str(tmp_path))
    assert done.code == 1 and "FAIL" in done.out and "first divergent module: second" in done.out
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())["first_divergence"] == "second"


def test_check_model_takes_a_family_that_it_has_no_widths_for() -> None:
    done = command("check", "--model", "bert", "--tiny", "--layers", "2", "--device", "cpu", "--json")
    said = json.loads(done.out)
    assert done.code == 0 and said["verdict"] == "PASS" and said["model"] == "bert" and said["ported"]["linear"] > 10
    refused = command("check", "--model", "berd", "--tiny", "--device", "cpu")
    assert refused.code == 2 and "bert" in refused.err

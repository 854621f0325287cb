"""What other people's code does with a model, before porting and after: it keeps working, and is counted exactly.

Packages that are no part of the tests' environment (accelerate, bitsandbytes, gptqmodel, kernels, peft, torchao,
quanto) skip their tests.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import ferryman
from ferryman.integrations.transformers import is_ported, port, unport
from ferryman.porting.graph.aten import decompositions
from ferryman.porting.model import classes, leaf, parts, rewrite
from ferryman.porting.model.measure import relative

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": 0,
}
IDS = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(0))
NEAR = 2.0**-18  # float32: some hundred sums in other orders
WHOLE = {"add_rms_norm": 2, "attention": 2, "embedding": 1, "linear": 15, "rms_norm": 3, "rope": 2, "silu_mul": 2}


def build(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(SMALL | changes)), dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any, **more: Any) -> Tensor:
    scores: Tensor = model(IDS, **more).logits
    return scores


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    with ferryman.trace() as traced:
        output = run()
    calls: dict[str, int] = {}
    for (op, _), n in traced.calls.items():
        calls[op] = calls.get(op, 0) + n
    return output, dict(sorted(calls.items()))


def slopes(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    whole = {
        n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    return {n.replace("module.", ""): g.clone() for n, g in whole.items()}


def alike(gradients: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return gradients.keys() == wanted.keys() and all(relative(gradients[n], wanted[n]) <= NEAR for n in wanted)


# Files ------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_an_unported_model_saves(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "before")
    wanted, report = logits(model), port(model)
    model.save_pretrained(tmp_path / "after")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "after", attn_implementation="ferryman").eval()
    output, calls = counted(lambda: logits(again))
    assert calls == {"attention": 2} and relative(output, wanted) <= NEAR
    report = port(again)  # attention is ours already: it is counted all the same
    assert counted(lambda: logits(again))[1] == report.calls(gradients=False) == WHOLE and not report.unsupported
    unport(again)
    assert again.config._attn_implementation == "ferryman" and counted(lambda: logits(again))[1] == calls


_ABSENT = """
import sys, torch
try:
    torch.export.load("kept.pt2")
except RuntimeError as error:
    torch.save(torch.export.load("own.pt2").module()(torch.load("ids.pt")), "found.pt")
assert "ferryman" not in sys.modules
"""


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids, use_cache=False).logits


@pytest.mark.slow
def test_an_exported_program_says_what_it_needs_or_runs_where_ferryman_is_absent(tmp_path: Path) -> None:
    model = build(num_hidden_layers=1)
    wanted = logits(model, use_cache=False)
    port(model)
    program = torch.export.export(Logits(model), (IDS,), strict=False)
    assert "ferryman.attention" in str(program.graph)
    own = program.run_decompositions(decompositions())
    assert "ferryman" not in str(own.graph)
    torch.save(IDS, tmp_path / "ids.pt")
    torch.export.save(program, tmp_path / "kept.pt2")
    torch.export.save(own, tmp_path / "own.pt2")
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    there = subprocess.run(
        [sys.executable, "-c", _ABSENT], env=clean, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert there.returncode == 0 and "torch.ops.ferryman.rms_norm.default" in there.stderr, there.stderr
    assert relative(torch.load(tmp_path / "found.pt"), wanted) <= NEAR


# Tensors that are no plain ones -----------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if started:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("first", ["port", "shard"])
def test_fully_sharded(first: str) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = build()
    wanted, slope = logits(model), slopes(model)
    steps = [lambda: port(model), lambda: [fully_shard(m) for m in (*model.model.layers, model)]]
    report = next(
        r for r in [step() for step in (steps if first == "port" else steps[::-1])] if not isinstance(r, list)
    )
    output, calls = counted(lambda: logits(model))
    assert relative(output, wanted) <= NEAR and calls == report.calls(gradients=False)
    assert alike(slopes(model), slope)
    if first == "port":
        assert calls == WHOLE
    else:
        assert {left.reason for left in report.unsupported} == {"its weight is a DTensor, not a plain tensor"}
    unport(model)
    assert all(isinstance(m, FSDPModule) for m in model.model.layers)
    assert not any(is_ported(m) for m in model.modules())
    output, calls = counted(lambda: logits(model))
    assert relative(output, wanted) <= NEAR and not calls


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("first", ["port", "shard"])
def test_tensor_parallel(first: str) -> None:
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = build()
    wanted, slope = logits(model), slopes(model)
    plan: Any = {
        "mlp.up_proj": ColwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }

    def shard() -> None:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)
        parallelize_module(model.model, mesh, {"norm": SequenceParallel(use_local_output=True)})

    done = [step() for step in ([lambda: port(model), shard] if first == "port" else [shard, lambda: port(model)])]
    report = next(r for r in done if r is not None)
    output, calls = counted(lambda: logits(model))
    assert relative(output, wanted) <= NEAR
    assert calls == WHOLE | {"linear": 15 - 6, "rms_norm": 3 - 1}
    assert alike(slopes(model), slope)
    if first == "shard":
        assert calls == report.calls(gradients=False)
        reasons = {left.path.rpartition(".")[2]: left.reason for left in report.unsupported}
        assert set(reasons) == {"up_proj", "gate_proj", "down_proj", "norm"} and "DTensor" in reasons["norm"]


@pytest.mark.usefixtures("alone")
def test_data_parallel() -> None:
    model = build()
    slope = slopes(model)
    whole = nn.parallel.DistributedDataParallel(model)
    report = port(whole)
    assert counted(lambda: logits(whole))[1] == report.calls(gradients=False) == WHOLE
    assert alike(slopes(whole), slope)


class Int8(Tensor):
    """A weight in 8 bits with a scale, which knows `linear` alone, as quantisers' tensors do."""

    @staticmethod
    def __new__(cls, weight: Tensor) -> Int8:
        wrapper: Int8 = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        return wrapper

    def __init__(self, weight: Tensor) -> None:
        self.scale = weight.detach().abs().amax(-1, keepdim=True) / 127
        self.codes = (weight.detach() / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].codes.float() * args[1].scale, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(f"{func}")


class Packed(nn.Module):
    """A product whose weight is packed in int32, four bits each, as GPTQ's layers have it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(-1, keepdim=True) / 7
        codes = ((linear.weight.detach() / scale).round() + 8).to(torch.int32).unflatten(-1, (-1, 8))
        self.register_buffer("qweight", (codes << torch.arange(0, 32, 4)).sum(-1, dtype=torch.int32))
        self.register_buffer("scales", scale)

    def forward(self, x: Tensor) -> Tensor:
        codes = (self.qweight.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        return x @ ((codes - 8).flatten(-2) * self.scales).t()


def bitsandbytes_8(own: nn.Linear) -> nn.Module:
    library: Any = pytest.importorskip("bitsandbytes")
    layer = library.nn.Linear8bitLt(own.in_features, own.out_features, bias=False, has_fp16_weights=False)
    layer.weight = library.nn.Int8Params(own.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
    return layer.to("cpu")  # which quantises


def bitsandbytes_4(own: nn.Linear) -> nn.Module:
    library: Any = pytest.importorskip("bitsandbytes")
    layer = library.nn.Linear4bit(own.in_features, own.out_features, bias=False, compute_dtype=torch.float32)
    layer.weight = library.nn.Params4bit(own.weight.detach().clone(), requires_grad=False, quant_type="nf4")
    return layer.to("cpu")


def gptq(own: nn.Linear) -> nn.Module:
    library: Any = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    layer = library.TorchLinear(4, 32, True, False, own.in_features, own.out_features)
    scales = own.weight.detach().unflatten(-1, (-1, 32)).abs().amax(-1) / 7
    layer.pack_original(own, scales, torch.full_like(scales, 8), torch.arange(own.in_features, dtype=torch.int32) // 32)
    layer.optimized = True  # it would compile itself
    layer.eval().post_init()
    return layer


SUBSTITUTES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "packed": Packed,
    "bitsandbytes 8": bitsandbytes_8,
    "bitsandbytes 4": bitsandbytes_4,
    "gptq": gptq,
}


def quantise(model: Any, kind: str) -> None:
    for layer in model.model.layers:
        for name in ("up_proj", "down_proj"):
            own = getattr(layer.mlp, name)
            if kind == "subclass":
                own.weight = nn.Parameter(Int8(own.weight), requires_grad=False)
            elif kind in SUBSTITUTES:
                setattr(layer.mlp, name, SUBSTITUTES[kind](own))
            else:
                quantization = pytest.importorskip("torchao.quantization")
                quantization.quantize_(own, quantization.Int8WeightOnlyConfig())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["subclass", "torchao", *SUBSTITUTES])
def test_quantised_layers_are_left_and_named(kind: str) -> None:
    model, late = build(), build()
    quantise(model, kind)
    wanted = logits(model)
    report = port(model)
    output, calls = counted(lambda: logits(model))
    assert relative(output, wanted) <= NEAR and calls == report.calls(gradients=False) == WHOLE | {"linear": 11}
    assert len(report.unsupported) == 4
    assert {left.path.rpartition(".")[2] for left in report.unsupported} == {"up_proj", "down_proj"}
    said = "no op of the day computes it" if kind in ("packed", "gptq") else "not a plain tensor"
    assert all(said in left.reason for left in report.unsupported)
    port(late)
    quantise(late, kind)
    output, calls = counted(lambda: logits(late))
    assert relative(output, wanted) <= NEAR and calls == WHOLE | {"linear": 11}


# What stands around a module --------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_run_whenever_they_are_registered(register: str) -> None:
    seen: list[str] = []

    def watch(model: Any) -> None:
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.ModuleList) and name not in ("model", "model.rotary_emb"):
                getattr(module, f"register_{register}_hook")(lambda *_, name=name: seen.append(name))

    before, after, plain = build(), build(), build()
    watch(plain)
    watch(before)
    report = port(before)
    port(after)
    watch(after)
    fired = []
    for model in (plain, before, after):
        seen.clear()
        slopes(model)
        fired.append(sorted(seen))
    assert fired[0] == fired[1] == fired[2] and len(fired[0]) > 20
    if "backward" not in register:
        assert counted(lambda: logits(before))[1] == report.calls(gradients=False)


def test_a_forward_replaced_after_porting_is_what_runs() -> None:
    model = build()
    report = port(model)
    mlp = model.model.layers[0].mlp
    before = logits(model)
    mlp.act_fn.forward = lambda x: x * 0.0  # as kernelize and accelerate do
    mlp.down_proj.forward = lambda x: x.new_ones(*x.shape[:-1], 64) if not x.any() else x.new_zeros(1)
    after, calls = counted(lambda: logits(model))
    assert relative(after, before) > 0.01 and calls == report.calls(gradients=False) | {"linear": 14, "silu_mul": 1}
    del mlp.act_fn.forward, mlp.down_proj.forward
    assert torch.equal(logits(model), before)


class Hub:
    """What the `kernels` package does, as it documents it, where it is not installed: a function becomes a module, and
    `kernelize` binds a forward to each instance, another class's or its own."""

    def layer(self, name: str) -> Any:
        def decorator(decorated: Any) -> Any:
            if not isinstance(decorated, type):

                class Func(nn.Module):
                    def forward(self, *args: Any, **kwargs: Any) -> Any:
                        return decorated(*args, **kwargs)

                Func.kernel_layer_name = name
                return Func()
            decorated.kernel_layer_name = name  # type: ignore[attr-defined]
            return decorated

        return decorator

    def kernelize(self, model: nn.Module, functions: list[Any], mapping: dict[str, Any]) -> None:
        for module in (*model.modules(), *functions):
            name = getattr(type(module), "kernel_layer_name", None)
            if name is not None:
                kind: Any = mapping.get(name, type(module))
                module.forward = types.MethodType(kind.forward, module)


class Installed(Hub):
    def __init__(self) -> None:
        self.kernels = pytest.importorskip("kernels")

    def layer(self, name: str) -> Any:
        return self.kernels.use_kernel_forward_from_hub(name)

    def kernelize(self, model: nn.Module, functions: list[Any], mapping: dict[str, Any]) -> None:
        class Repository:
            def __init__(self, kind: Any) -> None:
                self.kind = kind

            def load(self) -> Any:
                return self.kind

        with self.kernels.use_kernel_mapping({n: {"cpu": Repository(k)} for n, k in mapping.items()}):
            for part in (model, *functions):
                self.kernels.kernelize(part, mode=self.kernels.Mode.INFERENCE, device="cpu")


def turn_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turn_half(q) * sin, k * cos + turn_half(k) * sin


class ZeroNorm(nn.Module):
    """A kernel that is not what it replaces."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0


class ZeroRotary(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * 0, k * 0


def hub_model(hub: Hub) -> Any:
    rotated = hub.layer("rotary")(rotate)

    @hub.layer("norm")
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))

        def forward(self, x: Tensor) -> Tensor:
            h = x.float()
            return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix, self.rotary = Norm(), nn.Linear(32, 32), [rotated]

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q = self.mix(self.norm(x)).unflatten(-1, (2, 16)).transpose(1, 2)
            q, k = rotated(q, q, cos, sin)
            return (q + k).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    return Block().eval()


@pytest.mark.parametrize("hub", [Hub, Installed])
def test_layers_of_the_kernels_hub(hub: type[Hub]) -> None:
    own = hub()
    x, angles = torch.randn(2, 5, 32), torch.randn(2, 5, 8).repeat(1, 1, 2)
    whole = {"linear": 1, "rms_norm": 1, "rope": 1}

    def passed(model: Any) -> tuple[Tensor, dict[str, int]]:
        with torch.no_grad():
            return counted(lambda: model(x, angles.cos(), angles.sin()))

    # no kernel of the hub for this device: each forward is its class's own, bound to the instance
    model = hub_model(own)
    wanted, _ = passed(model)
    own.kernelize(model, model.rotary, {})
    report = port(model)
    output, calls = passed(model)
    assert (
        calls == report.calls(gradients=False) == whole and not report.unsupported and relative(output, wanted) <= NEAR
    )
    unport(model)
    assert model.norm.forward.__func__ is type(model.norm).forward and not passed(model)[1]
    # after porting: what is bound is ours, and unport leaves what was there before us
    model = hub_model(own)
    port(model)
    own.kernelize(model, model.rotary, {})
    assert passed(model)[1] == whole
    unport(model)
    output, calls = passed(model)
    assert not calls and torch.equal(output, wanted)
    # a kernel of the hub: it runs, whenever it was put there, and is named if that was before
    for first in (True, False):
        model = hub_model(own)
        report = None if first else port(model)
        own.kernelize(model, model.rotary, {"norm": ZeroNorm, "rotary": ZeroRotary})
        replaced, _ = passed(model) if first else (torch.zeros_like(wanted), {})
        report = port(model) if report is None else report
        output, calls = passed(model)
        assert torch.equal(output, replaced) and not output.any() and calls == {"linear": 1}
        if first:
            assert report.calls(gradients=False) == calls
            assert {left.path: "forward was replaced" in left.reason for left in report.unsupported} == {
                "": True,
                "norm": True,
            }
        unport(model)
        assert torch.equal(passed(model)[0], replaced)


def test_a_ported_model_is_freed_with_all_its_tensors() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMALL, "hidden_size": 80, "vocab_size": 103})  # sizes of no other test: proven here
    model = AutoModelForCausalLM.from_config(config).eval()
    port(model)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    kept = {name: weakref.ref(part) for name, part in (*model.named_modules(), *model.named_parameters())}
    del model
    gc.collect()
    assert not [name for name, reference in kept.items() if reference() is not None]


def test_a_ported_model_is_freed_and_with_its_class_what_stands_in_its_code() -> None:
    model = hub_model(Hub())
    port(model)
    kept, function = weakref.ref(model), weakref.ref(model.rotary[0])
    del model
    gc.collect()
    assert kept() is None
    for kept_by_class in (rewrite._cache, parts._of_class, parts._of_function):  # and so what its forward reads
        kept_by_class.clear()
    for cached in (f for m in (classes, leaf) for f in vars(m).values() if hasattr(f, "cache_clear")):
        cached.cache_clear()
    gc.collect()
    assert function() is None


@pytest.mark.filterwarnings("ignore")
def test_a_function_of_the_kernels_hub_compiles_whole() -> None:
    torch._dynamo.reset()
    model = hub_model(Hub())
    x, angles = torch.randn(2, 5, 32), torch.randn(2, 5, 8).repeat(1, 1, 2)
    wanted = model(x, angles.cos(), angles.sin())
    port(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative(compiled(x, angles.cos(), angles.sin()), wanted) <= NEAR


def test_structure_that_changes_after_porting() -> None:
    model = build()
    port(model)
    layers = model.model.layers
    nn.utils.parametrizations.weight_norm(layers[0].mlp.up_proj)
    layers[1].mlp.gate_proj = nn.Linear(64, 96, bias=False)
    layers.append(copy.deepcopy(layers[0]))
    layers[2].self_attn.config = model.config
    layers[2].self_attn.layer_idx, model.config.num_hidden_layers = 2, 3
    output, calls = counted(lambda: logits(model))
    assert calls["linear"] == 3 * 7 + 1 - 1
    unport(model)
    unported, calls = counted(lambda: logits(model))
    assert not calls and relative(unported, output) <= NEAR
    assert not any(is_ported(m) for m in model.modules()) and type(layers[0].mlp.up_proj) is not nn.Linear


def test_a_model_on_meta_is_ported_before_it_has_memory() -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval()
    source = build()
    report = port(model)
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    model.model.rotary_emb = source.model.rotary_emb
    output, calls = counted(lambda: logits(model))
    assert calls == report.calls(gradients=False) == WHOLE and relative(output, logits(source)) <= NEAR


def test_a_class_without_heirs_is_named_and_an_error_leaves_nothing_half_ported() -> None:
    class Final(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise TypeError("Final has no heirs")

    class Still(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise RuntimeError("it stays what it is")
            super().__setattr__(name, value)

    model = build()
    model.model.layers[0].mlp.up_proj = Final(64, 96, bias=False)
    wanted, report = logits(model), port(model)
    assert ["Final has no heirs" in left.reason for left in report.unsupported] == [True]
    output, calls = counted(lambda: logits(model))
    assert relative(output, wanted) <= NEAR and calls == report.calls(gradients=False) == WHOLE | {"linear": 14}
    unport(model)
    model.lm_head = Still(64, 97, bias=False)
    kinds = {path: type(m) for path, m in model.named_modules()}
    with pytest.raises(RuntimeError, match="it stays what it is"):
        port(model)
    assert {path: type(m) for path, m in model.named_modules()} == kinds
    assert model.config._attn_implementation == "sdpa" and not counted(lambda: logits(model))[1]


def test_modules_of_several_devices() -> None:
    """Some on meta, as an offloaded model's are before they are loaded."""
    model = build()
    layer = copy.deepcopy(model.model.layers[1])
    model.model.layers[1].to("meta")
    report = port(model)
    assert report.calls(gradients=False) == WHOLE and not report.unsupported
    model.model.layers[1].to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert counted(lambda: logits(model))[1] == WHOLE and relative(logits(model), logits(build())) <= NEAR


def test_shared_weights_and_modules() -> None:
    model = build(tie_word_embeddings=True)
    slope, wanted = slopes(model), logits(model)
    report = port(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    output, calls = counted(lambda: logits(model))
    assert calls == report.calls(gradients=False) == WHOLE and relative(output, wanted) <= NEAR
    assert alike(slopes(model), slope)


def test_layers_compiled_by_themselves() -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    model, before = build(), graphs["unique_graphs"]
    wanted = logits(model, use_cache=False)
    port(model)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert relative(logits(model, use_cache=False), wanted) <= NEAR
    assert graphs["unique_graphs"] - before == 1
    torch._dynamo.reset()


def test_assisted_decoding() -> None:
    model, helper = build(), build(3, num_hidden_layers=1)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(IDS[:1], **options)
    port(model)
    assert torch.equal(model.generate(IDS[:1], **options, prompt_lookup_num_tokens=3), wanted)
    for _ in range(2):
        assert torch.equal(model.generate(IDS[:1], **options, assistant_model=helper), wanted)
        port(helper)


# Packages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["port", "peft"])
def test_peft(first: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, copy.deepcopy(config)).eval()

    plain = adapted(build())
    wanted, slope = logits(plain), slopes(plain)
    model = build()
    if first == "port":
        port(model)
        model = adapted(model)
        calls = WHOLE
    else:
        model = adapted(model)
        calls = port(model).calls(gradients=False)
        assert calls == WHOLE | {"linear": 15 + 2 * 6}
    output, counts = counted(lambda: logits(model))
    assert counts == calls and relative(output, wanted) <= NEAR and alike(slopes(model), slope)
    with model.disable_adapter():
        assert relative(logits(model), logits(build())) <= NEAR
    merged = model.merge_and_unload()
    output, counts = counted(lambda: logits(merged))
    assert counts == WHOLE and relative(output, wanted) <= NEAR


@pytest.mark.parametrize("first", ["port", "offload"])
@pytest.mark.parametrize("way", ["cpu", "device_map"])
def test_accelerate(first: str, way: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build()
    wanted = logits(model)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")

    def offload() -> None:
        if way == "cpu":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            accelerate.dispatch_model(model, places | {"model.layers.1": "disk"}, "cpu", offload_dir=str(tmp_path))

    done = [step() for step in ([lambda: port(model), offload] if first == "port" else [offload, lambda: port(model)])]
    report = next(r for r in done if r is not None)
    output, calls = counted(lambda: logits(model))
    assert relative(output, wanted) <= NEAR
    if first == "port":
        assert calls.items() >= {"attention": 2, "linear": 15, "rope": 2}.items() and calls.get("add_rms_norm", 0) == 0
    else:
        assert calls == report.calls(gradients=False)
        assert all("replaced on the instance" in left.reason for left in report.unsupported)


def test_a_quantised_cache() -> None:
    pytest.importorskip("optimum.quanto")
    model = build()
    cache = {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 8}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "quantized"}
    wanted = model.generate(IDS, **options, cache_config=dict(cache))
    port(model)
    assert torch.equal(model.generate(IDS, **options, cache_config=dict(cache)), wanted)


def test_trainer_with_checkpoints_and_autocast(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in IDS]
    said = []
    for ported in (False, True):
        model = build().train()
        if ported:
            port(model)
        options = TrainingArguments(
            str(tmp_path / str(ported)),
            per_device_train_batch_size=2,
            max_steps=3,
            bf16=True,
            use_cpu=True,
            save_steps=3,
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            learning_rate=1e-3,
            gradient_checkpointing=True,
        )
        trainer = Trainer(model, options, train_dataset=data)
        _, calls = counted(trainer.train)
        said.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert bool(calls) is ported and calls.keys() >= ({"linear_backward", "silu_mul_backward"} if ported else set())
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(ported) / "checkpoint-3")
        assert relative(logits(again), logits(model.eval())) <= 2.0**-7
    assert len(said[0]) == 3 and max(abs(a - b) for a, b in zip(*said, strict=True)) < 4 * 2.0**-8


def test_repeated_blocks_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=0,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    given = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }
    with torch.no_grad():
        wanted = model(**given)[0]
        port(model)
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        assert relative(model(**given)[0], wanted) <= NEAR
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ported_model_runs_on_meta_tensors(dtype: torch.dtype) -> None:
    """As those do that count operations or memory. Autocast does not know this device."""
    model = build().to(dtype)
    model.lm_head, model.loss = nn.Linear(64, 97, bias=False, dtype=dtype), Losses()
    port(model)
    ids = IDS.to("meta")
    model.to("meta")
    output, calls = counted(lambda: model(ids, labels=ids))
    assert calls["attention"] == 2 and output.logits.shape == (*IDS.shape, 97) and output.loss.is_meta
    (output.loss + model.loss(output.logits[0], ids[0])).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


class Losses(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x, target)

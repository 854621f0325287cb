"""Porting transformers models: same results, same modules back, and which op ran how often."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import PortError
from ferryman.integrations.transformers import port, unport
from ferryman.integrations.transformers_modules import ALL_ATTENTION_FUNCTIONS, attention_forward, attention_mask
from ferryman.ops.attention.scores import visible_in
from ferryman.porting.judging.metrics import UNIT
from ferryman.porting.model import activations, blocks, recognise
from ferryman.porting.model.exact import Widened
from ferryman.porting.model.measure import observe, relative
from ferryman.porting.model.results import AMPLITUDE

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=32),
    "qwen3_window": lambda: Qwen3Config(
        **SMALL, head_dim=32, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2_window": lambda: Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "mistral_window": lambda: MistralConfig(**SMALL, sliding_window=6),
    "gemma": lambda: GemmaConfig(**SMALL, head_dim=32, hidden_act="gelu_pytorch_tanh"),
}


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tokens(batch: int = 2, length: int = 19, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, prompt: Tensor, **more: Any) -> Tensor:
    scores: Tensor = model(prompt, **more).logits
    return scores


@torch.no_grad()
def greedy(model: Any, prompt: Tensor, **more: Any) -> Tensor:
    sequence: Tensor = model.generate(prompt, max_new_tokens=9, do_sample=False, **more)
    return sequence


def served(traced: Any, op: str) -> int:
    """Calls of an op by PyTorch's own lines, whatever follows the dot in their names."""
    return sum(n for (o, line), n in traced.calls.items() if o == op and line.split(".")[0] == "torch")


def floor(model: Any, prompt: Tensor) -> float:
    plain = observe(model, prompt).logits
    return max(relative(observe(model, prompt, seed=s).logits, plain) for s in (1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_ported_model_is_the_same_within_twice_its_one_ulp_floor(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    limit = 2 * floor(model, tokens())
    before, said = logits(model, tokens()), greedy(model, tokens()) if dtype == torch.float32 else None
    report = port(model)
    with ferryman.trace() as traced:
        after = logits(model, tokens())
    assert relative(after, before) <= limit
    if said is not None:
        assert torch.equal(greedy(model, tokens()), said)
    assert not report.unsupported
    counted = {op: sum(n for (o, _), n in traced.calls.items() if o == op) for op, _ in traced.calls}
    padded = model.model.embed_tokens.padding_idx is not None
    assert counted == report.calls(1, gradients=False) and report.maybe() - {"embedding"} == {"cross_entropy"}
    assert ("embedding" in report.maybe()) is padded
    assert ("embedding" in report.calls(1)) is not padded  # a row of padding learns nothing, which the op does not know
    gated = "gelu_mul" if name == "gemma" else "silu_mul"
    norms = 2 * 2 + 1 + (4 if name.startswith("qwen3") else 0)
    added = {"add_rms_norm": 2, "rms_norm": norms - 2}  # a layer's second norm takes the addition before it
    assert counted == {**added, "rope": 2, "attention": 2, gated: 2, "linear": 7 * 2 + 1, "embedding": 1}


@pytest.mark.parametrize("name", CONFIGS)
def test_unport_gives_back_the_same_instances_bit_for_bit(name: str) -> None:
    model = build(name)
    calls: list[str] = []
    model.model.norm.register_forward_hook(lambda *_: calls.append("norm"))
    model.model.layers[0].mlp.train()
    modules = dict(model.named_modules())
    classes = {path: type(m) for path, m in modules.items()}
    parameters = {k: (id(p), p.data_ptr()) for k, p in model.named_parameters()}
    modes = {path: m.training for path, m in modules.items()}
    keys, before = list(model.state_dict()), logits(model, tokens())
    report = port(model)
    assert port(model) is report
    assert all(dict(model.named_modules())[p] is m for p, m in modules.items())
    assert all(isinstance(m, classes[p]) for p, m in modules.items())
    assert {k: (id(p), p.data_ptr()) for k, p in model.named_parameters()} == parameters
    assert list(model.state_dict()) == keys
    assert {path: m.training for path, m in model.named_modules()} == modes
    assert model.config._attn_implementation == "ferryman"
    calls.clear()
    logits(model, tokens())
    assert calls == ["norm"]
    unport(model)
    unport(model)
    assert {path: type(m) for path, m in model.named_modules()} == classes
    assert model.config._attn_implementation == "sdpa"
    assert not [name for name in vars(model) if "ferryman" in name]
    with ferryman.trace() as traced:
        assert torch.equal(logits(model, tokens()), before)
    assert not traced.calls


def test_no_module_global_is_rebound() -> None:
    names = ("llama", "qwen2", "qwen3", "mistral", "gemma")
    homes = [importlib.import_module(f"transformers.models.{n}.modeling_{n}") for n in names]
    before = [dict(vars(home)) for home in homes]
    classes = [c for home in homes for c in vars(home).values() if isinstance(c, type) and hasattr(c, "forward")]
    forwards = {c: c.forward for c in classes}
    for name in CONFIGS:
        port(build(name))
    assert [dict(vars(home)) for home in homes] == before
    assert all(c.forward is forward for c, forward in forwards.items())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3_window", "mistral_window"])
def test_padding(name: str, side: str) -> None:
    model = build(name)
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[0, slice(0, 7) if side == "left" else slice(12, 19)] = 0
    before = logits(model, tokens(), attention_mask=mask)
    said = greedy(model, tokens(), attention_mask=mask) if side == "left" else None
    limit = 2 * floor(model, tokens())
    port(model)
    after = logits(model, tokens(), attention_mask=mask)
    assert relative(after[mask.bool()], before[mask.bool()]) <= limit
    if said is not None:
        assert torch.equal(greedy(model, tokens(), attention_mask=mask), said)


@pytest.mark.parametrize("name", ["llama", "qwen3_window", "mistral_window"])
def test_appending_several_tokens_to_a_cache_reads_all_of_it(name: str) -> None:
    from transformers import DynamicCache

    model = build(name)
    whole = logits(model, tokens())
    limit = 2 * floor(model, tokens())
    port(model)
    cache = DynamicCache(config=model.config)
    parts = [logits(model, part, past_key_values=cache) for part in tokens().split([8, 5, 1, 5], 1)]
    assert relative(torch.cat(parts, 1), whole) <= limit


def test_a_static_cache_and_packed_sequences_get_a_mask() -> None:
    model = build("llama")
    positions = torch.cat([torch.arange(8), torch.arange(11)]).unsqueeze(0).expand(2, -1)
    said, packed = greedy(model, tokens(), cache_implementation="static", disable_compile=True), None
    packed = logits(model, tokens(), position_ids=positions, use_cache=False)
    limit = 2 * floor(model, tokens())
    port(model)
    assert torch.equal(greedy(model, tokens(), cache_implementation="static", disable_compile=True), said)
    after = logits(model, tokens(), position_ids=positions, use_cache=False)
    assert relative(after, packed) <= limit
    assert relative(after, logits(model, tokens(), use_cache=False)) > 0.1  # the boundary mattered


def test_the_mask_is_left_out_only_where_causality_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int | None, bool]] = []
    real = ops.attention

    def spy(*args: Any, **kw: Any) -> Any:
        seen.append((kw["causal"], kw["window"], kw["mask"] is not None))
        return real(*args, **kw)

    monkeypatch.setattr(ops, "attention", spy)
    model = build("mistral_window")
    port(model)
    logits(model, tokens(length=6))
    logits(model, tokens(length=7))
    logits(model, tokens(length=7), attention_mask=torch.ones(2, 7))
    padded = torch.ones(2, 7)
    padded[0, 0] = 0
    logits(model, tokens(length=7), attention_mask=padded)
    wanted = [(True, None, False), (True, 6, False), (True, 6, False), (True, 6, True)]
    assert seen == [call for call in wanted for _ in range(2)]  # two layers


def _drawn_mask(draw: random.Random, kind: str) -> tuple[dict[str, Any], int, int, int]:
    """(what transformers gives to a mask function, batch, queries, keys) of one drawn causal mask."""
    batch, rows, before = draw.randint(1, 3), draw.choice([1, 1, draw.randint(2, 9)]), draw.randint(0, 12)
    static = draw.random() < 0.5
    size, offset = draw.randint(1, 8), 0
    keys = before + rows + (draw.randint(0, 9) if static else 0)
    if kind == "window" and not static:  # a cache that keeps the window alone
        offset = max(0, before - size + 1)
        keys -= offset
    padding = None
    if draw.random() < 0.7:
        padding = torch.ones(batch, before + rows, dtype=torch.bool)
        for row in padding:
            row[: draw.randint(0, before + rows)] = False
            if draw.random() < 0.3:
                row[draw.randrange(before + rows)] ^= True  # a hole, or a key alone
    options: dict[str, Any] = {"mask_function": causal_mask_function, "config": SimpleNamespace()}
    if kind == "window":
        options |= {"mask_function": sliding_window_causal_mask_function(size), "local_size": size}
        options["config"] = SimpleNamespace(sliding_window=size)
    if kind == "chunk":
        hidden = torch.zeros(batch, dtype=torch.long) if padding is None else (padding.cumsum(-1) == 0).sum(-1)
        options |= {"mask_function": chunked_causal_mask_function(size, hidden), "local_size": size}
        options["config"] = SimpleNamespace(attention_chunk_size=size)
    options |= {
        "batch_size": batch,
        "q_length": rows,
        "kv_length": keys,
        "q_offset": torch.tensor(before) if static else before,
        "kv_offset": offset,
        "attention_mask": padding,
    }
    return options, batch, rows, keys


@pytest.mark.parametrize("kind", ["all", "window", "chunk"])
def test_what_stands_on_a_mask_says_what_the_mask_says(kind: str) -> None:
    draw, said = random.Random(f"{kind}-{date.today()}"), 0
    for _ in range(300):
        given, batch, rows, keys = _drawn_mask(draw, kind)
        mask = attention_mask(**given)
        if mask is None:
            continue
        causal = mask.ferryman_causal
        said += 1
        q, k = torch.empty(batch, 1, rows, 1), torch.empty(batch, 1, keys, 1)
        seen = visible_in(q, k, True, causal.window, causal.key_range, causal.chunk)
        assert seen is not None
        seen = seen if causal.keys is None else seen & causal.keys
        assert torch.equal(seen.expand(mask.shape), mask), given
        assert not hasattr(mask[..., :keys], "ferryman_causal") and not hasattr(~mask, "ferryman_causal")
    assert said > 100


def test_a_mask_that_is_not_causal_says_nothing_more() -> None:
    both = or_masks(causal_mask_function, lambda b, h, q, k: k < 3)
    pairs = and_masks(sliding_window_causal_mask_function(4), lambda b, h, q, k: q < 9)
    for function, size in ((both, None), (pairs, 4), (sliding_window_causal_mask_function(5), 4)):
        mask = attention_mask(2, 5, 5, mask_function=function, local_size=size, allow_is_causal_skip=False)
        assert mask is not None and not hasattr(mask, "ferryman_causal")
    own = attention_mask(
        2,
        1,
        9,
        torch.tensor(3),
        mask_function=sliding_window_causal_mask_function(4),
        local_size=4,
        allow_is_causal_skip=False,
        config=SimpleNamespace(sliding_window=4),
    )
    assert own.ferryman_causal.window == 4 and own.ferryman_causal.key_range.tolist() == [[0, 4]] * 2


@pytest.mark.parametrize("name", ["llama", "mistral_window", "compiled"])
def test_a_static_cache_is_read_as_far_as_it_is_filled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded on the left: every call says its key range; compiled in one graph, too."""
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[0, :7] = 0
    model = build("llama" if name == "compiled" else name)
    options: dict[str, Any] = {
        "attention_mask": mask,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    wanted = greedy(model, tokens(), **options)
    port(model)
    ranges: list[Any] = []
    real = ops.attention

    def spy(*args: Any, **kw: Any) -> Any:
        ranges.append(kw["key_range"])
        return real(*args, **kw)

    def looking(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and "ferryman.attention" in str(node.target):
                ranges.append(node.args[9])  # key_range, by the op's schema
        return graph.forward

    if name == "compiled":
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, fullgraph=True, backend=looking)
    else:
        monkeypatch.setattr(ops, "attention", spy)
    assert torch.equal(greedy(model, tokens(), **options), wanted)
    assert ranges and all(r is not None for r in ranges)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("attention_mask", "called"),
    [
        (None, 0),  # Inductor's
        (torch.tensor([[0] * 5 + [1] * 19, [1] * 24]), 2),  # padding: rows that see nothing are the op's own
    ],
    ids=["packed", "padded"],
)
def test_whose_the_attention_of_a_compiled_model_is(attention_mask: torch.Tensor | None, called: int) -> None:
    model = build("qwen3")
    given: dict[str, Any] = {"use_cache": False, "attention_mask": attention_mask}
    wanted = logits(model, tokens(length=24), **given)
    port(model)
    targets: list[str] = []

    def looking(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=looking)
    seen = torch.ones(2, 24, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    assert relative(logits(compiled, tokens(length=24), **given)[seen], wanted[seen]) < 1e-6
    assert sum("ferryman.attention" in name for name in targets) == called
    assert sum("scaled_dot_product" in name for name in targets) == 2 - called
    with ferryman.use("torch"):  # a request is kept
        torch._dynamo.reset()
        targets.clear()
        logits(torch.compile(model, fullgraph=True, backend=looking), tokens(length=24), **given)
        assert sum("ferryman.attention" in name for name in targets) == 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_encoder_without_padding_has_no_mask() -> None:
    from ferryman.porting.model import bundled

    model = bundled.build("bert", True)
    ids = tokens(length=24)
    with torch.no_grad():
        wanted = model(input_ids=ids).last_hidden_state
    port(model)
    masks: list[Any] = []

    def looking(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and "ferryman.attention" in str(node.target):
                masks.append(node.args[7])
            if node.op == "call_function" and "scaled_dot_product" in str(node.target):
                assert "flash_attention_for_cpu" in str(node.target)
                masks.append(node.kwargs.get("attn_mask"))
        return graph.forward

    with torch.no_grad():
        hidden = torch.compile(model, fullgraph=True, backend=looking)(input_ids=ids).last_hidden_state
    assert masks == [None, None] and relative(hidden, wanted) < 1e-6


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["qwen3", pytest.param("mistral_window", marks=pytest.mark.slow)])
def test_compiled_in_one_graph_for_all_lengths(name: str) -> None:
    model = build(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    logits(compiled, tokens(length=24), use_cache=False)
    unported = counters["stats"]["unique_graphs"]
    port(model)  # after compiling: the compiled model must notice
    with ferryman.trace() as traced:
        logits(compiled, tokens(length=24), use_cache=False)
    assert counters["stats"]["unique_graphs"] > unported
    # whether sequences are packed is known to the device only: their mask, by which each query sees itself, is
    # Inductor's; the other ops were lowered
    assert not traced.calls
    before = counters["stats"]["unique_graphs"]
    for length in (25, 31, 40, 8, 57):
        output = logits(compiled, tokens(length=length), use_cache=False)
        assert relative(output, logits(model, tokens(length=length), use_cache=False)) < 1e-6
    assert counters["stats"]["unique_graphs"] - before <= (name == "mistral_window")  # shorter than the window, once


def test_training_with_checkpointing_counts_every_backward() -> None:
    model = build("qwen3").train()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    twin = copy.deepcopy(model).double()
    twin(tokens(), labels=tokens(), use_cache=False).loss.backward()
    exact = {n: p.grad for n, p in twin.named_parameters()}
    own = {n: relative(p.grad, exact[n]) for n, p in model.named_parameters()}  # the unported model's distance
    usual = sorted(own.values())[len(own) // 2]
    report = port(model)
    # the last norm and the head stand outside the checkpointed layers
    again = Counter(op for site in report.ported if "layers" in site.path.split(".") for op in site.ops)
    assert sum(report.calls(1).values()) == again.total() + 2
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        with ferryman.trace() as traced:
            model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        for name, p in model.named_parameters():
            assert relative(p.grad, exact[name]) <= AMPLITUDE * max(own[name], usual)
        for op, n in report.calls(1).items():
            assert served(traced, op) == n + again[op] * checkpointing
            assert served(traced, f"{op}_backward") == n
    unport(model)
    assert model.is_gradient_checkpointing and model.training


def test_copies_and_pickles_stay_ported_and_can_be_unported() -> None:
    model = build("llama")
    plain = logits(model, tokens())
    port(model)
    output = logits(model, tokens())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, tokens()), output)
        unport(twin)
        assert torch.equal(logits(twin, tokens()), plain)
        assert twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "ferryman"
    fresh = build("llama")
    fresh.load_state_dict(model.state_dict())


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_promotes_dtypes_as_transformers_does(weight: torch.dtype, x: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm: Any = LlamaRMSNorm(48, eps=1e-5).to(weight)
    nn.init.normal_(norm.weight)
    given = torch.randn(5, 48).to(x)
    wanted = norm(given)
    report = port(norm)
    normed = norm(given)
    assert report.calls() == {"rms_norm": 1}
    assert normed.dtype == wanted.dtype
    op, args = registry.primitive("rms_norm"), (given.double(), None, 1e-5, False)
    alone = op.body(*args)  # rounded to x's dtype before the weight
    exact, by = alone * norm.weight.double(), norm.weight.double().abs()
    room = by * (2.0**-24 * op.limits.bound(args, (alone,))[0]["accumulate"] + UNIT[x] * alone.abs())
    room = room + UNIT[normed.dtype] * (exact.abs() + room)
    for result in (normed, wanted):
        assert bool(((result.double() - exact).abs() <= room).all())


def test_under_autocast() -> None:
    model = build("qwen3")
    exact = logits(model, tokens())
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model, tokens())
        port(model)
        after = logits(model, tokens())
    assert after.dtype == before.dtype
    assert relative(after, before) <= 2 * relative(before, exact)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "inference": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "widened": lambda: Widened(torch.float64),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_of_the_caller_changes_what_is_proven(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in (recognise, blocks):
        monkeypatch.setattr(kept, "_roles", {})
    monkeypatch.setattr(activations, "_gates", {})
    model, other = build("qwen3"), build("qwen3")
    with MODES[mode]():
        report = port(model)
        assert torch.is_autocast_enabled("cpu") is (mode == "autocast")
        assert torch.empty(1).device.type == ("meta" if mode == "meta" else "cpu")
    assert report.calls() == port(other).calls() and not report.unsupported
    assert torch.equal(logits(model, tokens()), logits(other, tokens()))


def test_what_cannot_be_ported_is_listed_and_left_whole() -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = build("qwen3", attention_dropout=0.1)
    layers = model.model.layers
    layers[0].mlp.act_fn = nn.ReLU()
    layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    layers[0].input_layernorm.forward = functools.partial(layers[0].input_layernorm.forward)
    layers[1].post_attention_layernorm = type("OwnNorm", (type(model.model.norm),), {})(64)
    model.extra_norm = type("ExtraNorm", (Mine,), {})()
    for layer in layers:
        layer.self_attn.attention_dropout = 0.1
        layer.self_attn.train()
    classes = {path: type(m) for path, m in model.named_modules()}
    report = port(model)
    reasons = {left.path: left.reason for left in report.unsupported}
    assert "ReLU" in reasons["model.layers.0.mlp"]
    assert "hook" in reasons["model.layers.1.mlp"]
    assert "replaced" in reasons["model.layers.0.input_layernorm"]
    assert "dropout" in reasons["model.layers.0.self_attn"]
    assert set(reasons) == {
        "model.layers.0.mlp",
        "model.layers.1.mlp",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    }, reasons
    for path in set(reasons) - {"model.layers.0.self_attn", "model.layers.1.self_attn"}:
        assert type(model.get_submodule(path)) is classes[path]
    assert type(model.extra_norm) is classes["extra_norm"]  # it computes nothing that an op does
    assert model.config._attn_implementation == "sdpa"  # attention_dropout: attention stays, rotary is ported
    with ferryman.trace() as traced:
        logits(model, tokens())
    # a subclass that computes the same is ported like its parent; one norm is left
    wanted = {"linear": 15, "rms_norm": 2 + 1 + 4 - 1, "add_rms_norm": 2, "rope": 2, "bias_act": 2}
    assert report.calls(1) == wanted  # activations that no gated op takes are ops of their own; the hook still runs
    assert (
        {op: n for (op, _), n in traced.calls.items()} == report.calls(1, gradients=False) == wanted | {"embedding": 1}
    )


def test_attention_that_one_forward_calls_twice_is_not_counted_as_one() -> None:
    from transformers import DiffLlamaConfig

    model = AutoModelForCausalLM.from_config(DiffLlamaConfig(**SMALL)).eval()
    wanted, report = logits(model, tokens()), port(model)
    with ferryman.trace() as traced:
        output = logits(model, tokens())
    assert served(traced, "attention") == 4 and "attention" in report.maybe() and "attention" not in report.calls()
    assert relative(output, wanted) <= 2.0**-18


def test_refusals_name_what_to_do() -> None:
    with pytest.raises(PortError, match="nothing in Sequential can be ported"):
        port(nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU6()))
    with pytest.raises(PortError, match=r"required: a torch\.nn\.Module"):
        port("qwen3")  # type: ignore[arg-type]
    model = build("llama")
    port(model.model.layers[0].mlp)
    with pytest.raises(PortError, match=r"layers\.0\.mlp: ported already"):
        port(model)
    unport(model.model.layers[0].mlp)
    port(model)
    with pytest.raises(PortError, match="its config belongs to another ported model"):
        port(type(model)(model.config))
    unport(model)
    port(type(model)(model.config))


def test_what_the_op_cannot_express_is_transformers_own() -> None:
    """Dropout, a bias that learns, values wider than keys: sdpa's result, and no call of ours."""
    module = nn.Identity()
    q = torch.randn(1, 2, 3, 16)
    learns = torch.randn(1, 2, 3, 3, requires_grad=True)
    wide = torch.randn(1, 2, 3, 24)
    for value, given in ((q, {"position_bias": learns}), (wide, {}), (q, {"dropout": 1.0})):
        with ferryman.trace() as traced:
            output, _ = attention_forward(module, q, q, value, None, **given)
        wanted, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, q, value, None, **given)
        assert torch.equal(output, wanted)
        assert not traced.calls


def test_values_narrower_than_keys_and_a_fixed_bias_are_served() -> None:
    module, q, narrow = nn.Identity(), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 8)
    for value, given in ((narrow, {}), (q, {"position_bias": torch.randn(1, 2, 3, 3)})):
        given["is_causal"] = False
        with ferryman.trace() as traced:
            output, _ = attention_forward(module, q, q, value, None, **given)
        wanted, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, q, value, None, **given)
        assert relative(output, wanted) < 16 * torch.finfo(torch.float32).eps  # sums of 16 products, in another order
        assert served(traced, "attention") == sum(traced.calls.values()) == 1


def test_sinks_are_served_where_the_models_own_function_is_the_op() -> None:
    """gpt-oss has no sdpa: its eager function is shown to be the op before it is switched, and stays if it is not."""
    import transformers.models.gpt_oss.modeling_gpt_oss as own

    model = build_of("gpt_oss")
    plain = logits(model, tokens())
    report = port(model)
    assert model.config._attn_implementation == "ferryman"
    with ferryman.trace() as traced:
        output = logits(model, tokens())
    assert served(traced, "attention") == report.calls(1)["attention"] == model.config.num_hidden_layers
    assert relative(output, plain) < 2.0**-15
    unport(model)
    assert model.config._attn_implementation == "eager"

    right = own.eager_attention_forward
    planted = {
        "the sink is scaled": lambda m, *args, scaling, **kw: right(scaled(m, scaling), *args, scaling=scaling, **kw),
        "no mask": lambda m, q, k, v, mask, **kw: right(m, q, k, v, None, **kw),
        "no sink": lambda m, *args, **kw: right(scaled(m, 0.0), *args, **kw),
    }
    for what, function in planted.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own, "eager_attention_forward", function)
            left = {item.module: item.reason for item in port(model).unsupported}
        assert "gives other results than ops.attention with sinks" in left["GptOssAttention"], what
        assert model.config._attn_implementation == "eager"
        unport(model)


def scaled(module: Any, factor: float) -> Any:
    changed = copy.copy(module)
    changed.sinks = module.sinks * factor
    return changed


def build_of(name: str) -> Any:
    from ferryman.porting.model import bundled

    return bundled.build(name, True, torch.float32)


@pytest.mark.parametrize("masked", [False, True])
def test_sinks_with_dropout_are_a_key_more_of_transformers_own(masked: bool) -> None:
    """What the op cannot (dropout) goes to sdpa with the sink as a key; here so little of it that nothing drops."""
    module: Any = nn.Module()
    q, k, v, sinks = torch.randn(2, 4, 6, 16), *torch.randn(2, 2, 2, 9, 16), torch.randn(4)
    mask = torch.rand(2, 1, 6, 9) < 0.7 if masked else None
    if mask is not None:
        mask[..., 0] = True
    module.num_key_value_groups = 2
    with ferryman.trace() as traced:
        output, _ = attention_forward(module, q, k, v, mask, dropout=1e-30, scaling=0.3, s_aux=sinks, is_causal=True)
    assert not traced.calls
    wanted = ops.attention(q, k, v, causal=mask is None, scale=0.3, mask=mask, sinks=sinks).transpose(1, 2)
    assert relative(output, wanted) < 64 * torch.finfo(torch.float32).eps  # sums of 10 products in other orders

"""What a server and a trainer do with a decoder of Qwen3-8B's widths: the steps that `whole_models.py` times by name.

    python benchmarks/whole_models.py --jobs 6 qwen3_8b/prefill qwen3_8b/padded qwen3_8b/static_32    # all: NAMES

prefill: 2048 tokens. padded: 4 sequences of up to 2048 tokens, padding on the left. dynamic_B, static_B: a token of
each of B sequences that follows 2048 others, with transformers' DynamicCache or a StaticCache of 4096 places.
graphed_B: the latter replayed as a CUDA graph. training: forward and backward of 2048 tokens with the loss. A dynamic
cache is cut back after each step, and a static one is written at the same place again, so that all calls are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTHS = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
TINY = {**WIDTHS, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
PREFIX = "qwen3_8b/"
NAMES = tuple(
    PREFIX + step
    for step in ("prefill", "padded", "dynamic_1", "dynamic_32", "static_1", "static_32", "graphed_1", "training")
)
LAYERS = 4
Step = Callable[[Any, nn.Module], Callable[[], Any]]  # of (what is called, the model) -> one call


def build(tiny: bool, layers: int | None, device: torch.device) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    widths = dict(TINY, head_dim=16, vocab_size=256) if tiny else WIDTHS
    config = Qwen3Config(
        **widths, num_hidden_layers=layers or LAYERS, tie_word_embeddings=True, max_position_embeddings=40960
    )
    torch.manual_seed(0)
    with device:
        return Qwen3ForCausalLM(config).to(device, torch.bfloat16).eval()


def step_of(name: str, model: nn.Module, tiny: bool) -> Step:
    """Raises ValueError for a name that is not among NAMES."""
    if name not in NAMES:
        raise ValueError(f"{name!r}; required: one of {', '.join(NAMES)}")
    kind, _, batch = name.removeprefix(PREFIX).partition("_")
    long = 32 if tiny else 2048
    if kind in ("prefill", "padded"):
        return _prefill(model, 4 if kind == "padded" else 1, long, kind == "padded")
    if kind == "training":
        return _training(model, long)
    return _decoding(model, int(batch), long, kind)


def _tokens(model: Any, batch: int, length: int) -> torch.Tensor:
    draw, device = torch.Generator().manual_seed(batch * length), next(model.parameters()).device
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=draw).to(device)


def _prefill(model: nn.Module, batch: int, length: int, padded: bool) -> Step:
    given: dict[str, Any] = {"input_ids": _tokens(model, batch, length), "use_cache": False, "logits_to_keep": 1}
    if padded:
        place = torch.arange(length, device=given["input_ids"].device)
        first = torch.arange(batch, device=place.device) * length // (2 * batch)
        given["attention_mask"] = (place >= first[:, None]).long()

    def step(called: Any, owner: nn.Module) -> Callable[[], Any]:
        return torch.no_grad()(lambda: called(**given))

    return step


def _training(model: nn.Module, length: int) -> Step:
    tokens = _tokens(model, 1, length)

    def step(called: Any, owner: nn.Module) -> Callable[[], Any]:
        def call() -> None:
            owner.zero_grad(set_to_none=True)
            called(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

        return call

    return step


def _decoding(model: nn.Module, batch: int, length: int, kind: str) -> Step:
    from transformers import DynamicCache, StaticCache

    token = _tokens(model, batch, 1)

    def step(called: Any, owner: Any) -> Callable[[], Any]:
        cache: Any = (
            DynamicCache(config=owner.config)
            if kind == "dynamic"
            else StaticCache(config=owner.config, max_cache_len=2 * length)
        )
        _fill(cache, owner.config, batch, length, token.device)
        given: dict[str, Any] = {"input_ids": token, "past_key_values": cache, "use_cache": True}
        at = torch.tensor([length], device=token.device)
        if kind != "dynamic":
            given |= {"cache_position": at, "position_ids": at[None].expand(batch, 1)}
        written = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "cumulative_length")]

        @torch.no_grad()
        def call() -> None:
            called(**given)
            for count in written:  # newer versions count on the device
                count.copy_(at[0])
            if kind == "dynamic":
                cache.crop(-1)

        return _graphed(call, owner) if kind == "graphed" else call

    return step


def _fill(cache: Any, config: Any, batch: int, length: int, device: torch.device) -> None:
    """Drawn keys and values: the prompt's forward is no part of a step."""
    shape = (batch, config.num_key_value_heads, length, config.head_dim)
    draw = torch.Generator().manual_seed(length)
    for layer in range(config.num_hidden_layers):
        key, value = (torch.randn(shape, generator=draw).to(device, torch.bfloat16) for _ in range(2))
        cache.update(key, value, layer, {"cache_position": torch.arange(length, device=device)})


def _graphed(call: Callable[[], Any], owner: nn.Module) -> Callable[[], Any]:
    """A replay of the call, captured anew where the weights have moved."""
    at: list[int] = []
    graph: list[torch.cuda.CUDAGraph] = []

    def replay() -> None:
        places = [weight.data_ptr() for weight in owner.parameters()]  # the first alone may come to its old place again
        if at != places:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(side)
            graph[:] = [torch.cuda.CUDAGraph()]
            with torch.cuda.graph(graph[0]):
                call()
            at[:] = places
        graph[0].replay()

    return replay

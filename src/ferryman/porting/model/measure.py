"""What is measured on a model: its layers teacher-forced, its logits, its greedy tokens, its gradients.

The floor of every measure is the same measure on the unported model with each element of the embedding (or, layer by
layer, of the layer's input) moved by one unit in the last place, in a random direction: the smallest disturbance that
the dtype can express. What a port changes is of that size per op, so what it does to a model should be too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
HALF_SCALE = 2.0**10
ROWS = 64  # of logits in float64 at a time: 64 x 152k x 8 bytes = 74 MiB


def one_ulp(x: Tensor, generator: torch.Generator) -> Tensor:
    """x with each element moved one unit in the last place, up or down in magnitude at random.

    Zeros stay, and so does what is not finite or would overflow. Gradients pass through unchanged.
    """
    with torch.no_grad():
        bits = x.detach().contiguous().view(_BITS[x.element_size()])
        step = torch.randint(0, 2, x.shape, generator=generator, device=x.device, dtype=bits.dtype)
        moved = (bits + 2 * step - 1).view(x.dtype)
        moved = torch.where((x == 0) | ~x.isfinite() | ~moved.isfinite(), x, moved)
    return x + (moved - x).detach() if x.requires_grad else moved  # exact: the difference is one ulp of x


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


@contextlib.contextmanager
def _hooks() -> Iterator[list[Any]]:
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def perturbed(model: Any, seed: int | None) -> Iterator[None]:
    """The model with its embedding moved by one ulp (nothing changes when ``seed`` is None)."""
    with _hooks() as handles:
        if seed is not None:
            embedding = model.get_input_embeddings()
            generator = _generator(embedding.weight.device, seed)
            handles.append(embedding.register_forward_hook(lambda module, args, out: one_ulp(out, generator)))
        yield


@dataclass
class Observation:
    """One forward pass: each decoder layer's input and output, and the logits."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


def layers_of(model: Any) -> nn.ModuleList:
    layers: nn.ModuleList = model.base_model.layers
    return layers


@torch.no_grad()
def observe(model: Any, tokens: Tensor, feed: list[Tensor] | None = None, seed: int | None = None) -> Observation:
    """Run the model on the tokens. With ``feed``, every layer is given that input instead of the one before's output.

    ``seed`` moves the embedding by one ulp, or, with ``feed``, each layer's input.
    """
    seen = Observation()
    layers = layers_of(model)
    generator = None if seed is None else _generator(tokens.device, seed)

    def before(index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if feed is None:
                seen.inputs.append(args[0])
                return None
            given = feed[index] if generator is None else one_ulp(feed[index], generator)
            return (given, *args[1:]), kwargs

        return hook

    with _hooks() as handles, perturbed(model, seed if feed is None else None):
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(before(index), with_kwargs=True))
            handles.append(layer.register_forward_hook(lambda module, args, out: seen.outputs.append(_first(out))))
        seen.logits = model(input_ids=tokens, use_cache=False).logits
    return seen


def _first(out: Any) -> Tensor:
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def relative(actual: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm, in float64."""
    difference = torch.linalg.vector_norm(actual.double() - wanted.double())
    return float(difference / torch.linalg.vector_norm(wanted.double()).clamp_min(1e-300))


def worst_row(actual: Tensor, wanted: Tensor) -> float:
    """The largest relative error of one token, which the norm over all tokens hides."""
    difference = torch.linalg.vector_norm(actual.double() - wanted.double(), dim=-1)
    return float((difference / torch.linalg.vector_norm(wanted.double(), dim=-1).clamp_min(1e-300)).max())


def slope(actual: Tensor, wanted: Tensor) -> float:
    """How much of the difference is the result itself, scaled: rounding averages out, a systematic error does not."""
    w = wanted.double()
    return float(((actual.double() - w) * w).sum() / w.square().sum().clamp_min(1e-300))


@dataclass(frozen=True)
class LogitDistance:
    """Between two sets of logits over the same tokens; KL in nats, from the first to the second, mean over tokens."""

    kl: float
    disagreements: int
    largest: float  # of any logit


def logit_distance(reference: Tensor, actual: Tensor) -> LogitDistance:
    a, b = reference.reshape(-1, reference.shape[-1]), actual.reshape(-1, actual.shape[-1])
    total, differing, largest = 0.0, 0, 0.0
    for x, y in zip(torch.split(a, ROWS), torch.split(b, ROWS), strict=True):
        p, q = torch.log_softmax(x.double(), -1), torch.log_softmax(y.double(), -1)
        total += (p.exp() * (p - q)).sum().item()
        differing += int((x.argmax(-1) != y.argmax(-1)).sum())
        largest = max(largest, (x.double() - y.double()).abs().max().item())
    return LogitDistance(max(total, 0.0) / a.shape[0], differing, largest)


@dataclass
class Generated:
    """Greedy decoding with a key/value cache: the new tokens, each step's logits, and how often the model ran."""

    tokens: Tensor  # (batch, steps)
    logits: list[Tensor]
    passes: int


@torch.no_grad()
def generate(model: Any, tokens: Tensor, steps: int, seed: int | None = None) -> Generated:
    passes = 0

    def count(module: nn.Module, args: Any) -> None:
        nonlocal passes
        passes += 1

    with _hooks() as handles, perturbed(model, seed):
        handles.append(model.base_model.register_forward_pre_hook(count))
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return Generated(out.sequences[:, tokens.shape[1] :], list(out.logits), passes)


@dataclass(frozen=True)
class Divergence:
    """Where greedy decoding first differs. ``gap``: how much more the reference prefers its own token there."""

    sequence: int
    step: int
    gap: float


def divergences(reference: Generated, actual: Generated) -> list[Divergence]:
    """The first difference of each sequence; beyond it the two read different text."""
    parted = []
    for row, differs in enumerate((reference.tokens != actual.tokens).tolist()):
        if True in differs:
            step = differs.index(True)
            logits = reference.logits[step][row].double()
            gap = logits[reference.tokens[row, step]] - logits[actual.tokens[row, step]]
            parted.append(Divergence(row, step, gap.item()))
    return parted


def gradients(model: Any, tokens: Tensor, seed: int | None = None) -> dict[str, Tensor]:
    """The next-token loss's gradient of every parameter; in float16 scaled by a power of two, as in training.

    Unscaled, the gradients of a mean over a few hundred tokens are subnormal in float16.
    """
    model.zero_grad(set_to_none=True)
    with perturbed(model, seed):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    (loss * (HALF_SCALE if model.dtype == torch.float16 else 1.0)).backward()
    slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return slopes


def gradient_errors(reference: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, float]:
    """Relative error by group of parameters: "embedding", "layer 0", ..., "head"."""
    squares: dict[str, list[float]] = {}
    for name, wanted in reference.items():
        parts = name.split(".")
        if "layers" in parts:
            group = f"layer {parts[parts.index('layers') + 1]}"
        else:
            group = "embedding" if "embed_tokens" in parts else "head"
        sums = squares.setdefault(group, [0.0, 0.0])
        given = actual.get(name)
        difference = wanted if given is None else given.float() - wanted.float()
        sums[0] += float(torch.linalg.vector_norm(difference.float())) ** 2
        sums[1] += float(torch.linalg.vector_norm(wanted.float())) ** 2
    return {group: (a / b) ** 0.5 if b else (0.0 if a == 0 else float("inf")) for group, (a, b) in squares.items()}

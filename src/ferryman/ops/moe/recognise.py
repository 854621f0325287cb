"""Layers of experts in models: two weights of three dimensions and a forward of (x, ids, weights). With a gate, and
perhaps a bias for each, they are one op; without, rows are sorted by expert, two products with an activation between
them, and summed. Gates with a bound go by proof like the others: what cuts elsewhere than the op stays.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.bias_act.definition import UNCAPPED as UNGATED
from ferryman.ops.moe.definition import ACTIVATIONS, MAX_EXPERTS
from ferryman.ops.recognition import Block, Definitions, Layer, compiled

_TOKENS, _CHOSEN = 9, 2
_EXPERTS, _INNER, _WIDTH = 5, 16, 24  # short sides, rows of 16 bytes in 16 bits; none is another's double
_SEEDS, _BEYOND = 10, 2
_BESIDE = ("moe_permute", "bias_act", "grouped_linear", "moe_combine")


@dataclass(frozen=True)
class _Experts:
    """A module's weights in the order of their use, and then its biases; the number of experts, the width of what they
    are given, and the rows that an expert's second weight is of. turned: the weights have inputs before outputs."""

    names: tuple[str, ...]
    experts: int
    width: int
    inner: int
    turned: bool
    gated: bool

    @property
    def given(self) -> list[str]:
        return [f"self.{name}{'.mT' * self.turned}" for name in self.names[:2]]

    def sides(self) -> tuple[int, ...]:
        """Of an expert, shortened as one."""
        return (self.inner, 2 * self.inner) if self.gated else (self.inner,)

    def named(self) -> str:
        """A guard: weights of these sides."""
        first, second = (f" and self.{n}.shape[0] == {self.experts} and {self.width} in " for n in self.names[:2])
        up, down = (f"self.{n}.shape" for n in self.names[:2])
        return f"{first}{up} and {self.inner} * {1 + self.gated} in {up}{second}{down} and {self.inner} in {down}"

    def forms(self, ids: str, shares: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(an op, an expression, the other ops that it calls)."""
        up, down = self.given
        if self.gated:
            biases = ", ".join(f"self.{name}" for name in self.names[2:])
            bias = f", torch.cat(({biases}), 1)" if biases else ""
            for activation in ACTIVATIONS:
                yield "moe_experts", f"ops.moe_experts(a0, {up}, {down}, {ids}, {shares}, {activation!r}{bias})", ()
            return
        for activation in UNGATED:
            inner = f"ops.bias_act(ops.grouped_linear(p[0], {up}, p[1]), None, {activation!r})"
            summed = f"ops.moe_combine(ops.grouped_linear({inner}, {down}, p[1]), p[2], {shares})"
            sort = f"ops.moe_permute(a0, {ids}, self.{self.names[0]}.shape[0])"
            yield "grouped_linear", f"(lambda p: {summed})({sort})", _BESIDE


def blocks(block: Block) -> Iterator[Layer]:
    weights = [n for n, s in block.tensors.items() if len(s) == 3]
    biases = [n for n, s in block.tensors.items() if len(s) == 2]
    if len(weights) != 2 or len(biases) not in (0, 2) or len(block.tensors) != 2 + len(biases) or block.inputs != 3:
        return
    for first, second in (tuple(weights), tuple(weights)[::-1]):
        up, down = block.tensors[first], block.tensors[second]
        for turned in (False, True):
            (experts, rows, width), (others, back, inner) = ((x[0], x[2], x[1]) if turned else x for x in (up, down))
            gated = rows == 2 * inner
            if not (experts == others <= MAX_EXPERTS and back == width and (gated or (rows == inner and not biases))):
                continue
            for pair in (tuple(biases), tuple(biases)[::-1]) if biases else ((),):
                if [block.tensors[n] for n in pair] == [(experts, rows), (experts, width)][: len(pair)]:
                    yield from _layers(block, _Experts((first, second, *pair), experts, width, inner, turned, gated))


def _layers(block: Block, of: _Experts) -> Iterator[Layer]:
    sizes = {side: side // of.inner * _INNER for side in of.sides()}
    for side, short in ((of.experts, _EXPERTS), (of.width, _WIDTH)):
        sizes.setdefault(side, short)
    yield from _of_sizes(block, of, sizes, "")
    if of.experts * of.width * of.inner <= _SMALL:  # its code may name sides
        same = {side: side for side in (*of.sides(), of.experts, of.width)}
        if any(_reads_chosen(block, same, of.experts, of.width, first_ids) for first_ids in (True, False)):
            yield from _of_sizes(block, of, same, of.named())


_SMALL = 1 << 16


def _reads_chosen(block: Block, sizes: dict[int, int], experts: int, width: int, ids_first: bool) -> bool:
    """Whether what an expert has that no token chose is not read: 0 times what is not finite is not 0."""
    x, *rest = _draw(experts, width, ids_first, 0)
    ids = rest[0 if ids_first else 1]
    rest[0 if ids_first else 1] = ids.clamp(min=1)
    outcome = None if block.run is None else block.run(sizes, (x, *rest), 0)
    return outcome is not None and isinstance(outcome[0], Tensor) and bool(outcome[0].isfinite().all())


def _takes_any(block: Block, draw: Callable[[int], tuple[Tensor, ...]], sizes: dict[int, int]) -> bool:
    """Whether numbers of no expert are no error, as `torch.take_along_dim` takes them round and round."""
    return block.run is not None and block.run(sizes, draw(_SEEDS - 1)) is not None


def _of_sizes(block: Block, of: _Experts, sizes: dict[int, int], sided: str) -> Iterator[Layer]:
    short = sizes[of.experts], sizes[of.width]
    for ids, shares in ((1, 2), (2, 1)):
        draw = functools.partial(_draw, *short, ids == 1)
        outcome = None if block.run is None else block.run(sizes, draw(0))
        if outcome is None:
            continue
        takes = _takes_any(block, draw, sizes)
        whole = functools.partial(_draw, of.experts, short[1], ids == 1)
        if not takes and short[0] != of.experts and _takes_any(block, whole, {**sizes, of.experts: of.experts}):
            continue  # its code names how many there are, and brings numbers among them
        numbers = [(f"a{ids}", "")]
        if takes:  # numbers of no expert give nothing, or come round: `torch.take_along_dim` takes one dtype
            around = f"torch.remainder(a{ids}, self.{of.names[0]}.shape[0])"
            numbers += [(around, f" and a{ids}.dtype is torch.int64")]
        for number, kind in numbers:
            forms = list(of.forms(number, f"a{shares}"))
            for op, expression, beside in forms if of.gated else [_nearest(forms, draw(0), outcome)]:
                yield Layer(
                    op,
                    expression,
                    sizes,
                    draw,
                    _SEEDS,
                    f"a0.dim() == 2 and a0.shape[0] > 0 and a{ids}.dim() == 2 and a{shares}.shape == a{ids}.shape"
                    f" and a{ids}.shape[0] == a0.shape[0]"
                    f"{''.join(f' and a0.dtype is self.{n}.dtype' for n in of.names)}"
                    f" and a0.dtype.itemsize < 8 and (a{ids}.dtype is torch.int64 or a{ids}.dtype is torch.int32)"
                    f" and a{shares}.dtype.is_floating_point and a{shares}.dtype.itemsize < 8{kind}{sided}",
                    beside=beside,
                    refused=_BEYOND,
                    numbers=ids,
                    between=not of.gated,
                )


def _nearest(
    forms: Sequence[tuple[str, str, tuple[str, ...]]], given: tuple[Tensor, ...], outcome: tuple[Any, dict[str, Tensor]]
) -> tuple[str, str, tuple[str, ...]]:
    """The form whose result is nearest to the module's, of the same inputs and weights."""
    result, weights = outcome
    module = types.SimpleNamespace(**weights)

    def distance(form: tuple[str, str, tuple[str, ...]]) -> float:
        computed = compiled(form[1], ("self", "a0", "a1", "a2"), ops=Definitions())(module, *given)
        alike = isinstance(result, Tensor) and result.shape == computed.shape
        return float((computed - result).abs().max().nan_to_num(torch.inf)) if alike else torch.inf

    return min(forms, key=distance)


def _draw(experts: int, width: int, ids_first: bool, seed: int) -> tuple[Tensor, ...]:
    """Seeds 0 to 2: every token has two experts. Later: numbers so large and small that a clamp shows, an expert that
    is chosen twice, no tokens, one token; last, ids one beyond the experts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = {6: 0, 7: 1}.get(seed, _TOKENS)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    if seed in (1, 3):
        x = x * (30.0 if seed == 1 else 3e4)
    if seed in (5, 9):
        x = x * torch.exp2(torch.linspace(-40, 40, tokens, dtype=torch.float64))[:, None]
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:_CHOSEN] for _ in range(max(tokens, 1))])
    ids = chosen[:tokens]
    if seed >= 4 and tokens:
        ids = torch.randint(experts, (tokens, _CHOSEN), generator=generator)
        ids[0] = ids[0, 0]
    if seed >= _SEEDS - _BEYOND:
        ids[1, 0] = ids[2] = experts
    shares = torch.randn(tokens, _CHOSEN, generator=generator, dtype=torch.float64)
    return (x, ids, shares) if ids_first else (x, shares, ids)

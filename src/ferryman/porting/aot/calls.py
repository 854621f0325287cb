"""Calls that models make, for a folder of artefacts to serve: every op on the bench's shapes, and beside them rows of
many lengths, tokens, heads and vocabularies.

What they launch is found by the launchers themselves, on tensors without data, for every implementation that serves the
call: which one dispatch would choose may change with a lockfile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ferryman.backends import redirect
from ferryman.backends.base import Target
from ferryman.backends.simt.rows import SPREADS
from ferryman.device_profiles import Profile
from ferryman.dispatch import registry, select
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.bench import grid
from ferryman.porting.cases import forward_of

# Lengths of rows: multiples of 64 up to 4096, of 256 up to 16,384, of 1024 up to 32,768, and the bench's beyond.
WIDTHS = (*range(64, 4097, 64), *range(4352, 16_385, 256), *range(17_408, 32_769, 1024), 65_536, 131_072)
HEAD_DIMS = (64, 80, 128, 256)
_VOCABULARIES = (32_000, 32_064, 50_257, 50_304, 51_200, 64_000, 100_352, 128_000, 128_256, 129_280, 151_643, 151_936,
                 152_064, 201_088, 202_048, 256_000, 262_144)  # fmt: skip
_TOKENS = (1, 2, 7, 16, 33, 64, 100, 512, 2048)
_WEIGHTS = ((4096, 4096), (6144, 4096), (1024, 2048), (14_336, 4096), (4096, 14_336), (8960, 1536), (128_256, 4096))
_HEADS = ((32, 8), (32, 32), (8, 1), (28, 4), (48, 16))  # multiples of 16 or not: Triton's rope is compiled for either
_LENGTHS = (1, 16, 100, 1000, 4096)
_MANY = 2**26  # elements: rows enough that no launcher takes them for few


def launched(
    ops: Iterable[Primitive], backend: str, known: Profile, target: Target, dtype: torch.dtype, widths: Iterable[int],
    head_dims: Iterable[int],
) -> dict[str, Any]:  # fmt: skip
    """What the calls launch with a backend on a device: Triton's specialisations by their text, SIMT units by name."""
    ops = tuple(ops)
    lines = {op.name: [x for x in registry.implementations(op.name) if x.backend == backend] for op in ops}
    launchers = {line: registry.launcher(line) for own in lines.values() for line in own}
    collector = _Collector(target)
    before = redirect.to(cast(redirect.Route, collector))  # of a route, only the launches are met
    try:
        for op in ops:
            for case in _cases(op, target, tuple(widths), tuple(head_dims)):
                args = grid.on_meta(op, case, dtype)
                view = select.View.of(op, args, known)
                for line in lines[op.name]:
                    if not select.refusals(line, view, known, absent=True):
                        launchers[line](*args, target)
    finally:
        redirect.back(before)
    return collector.found


class _Collector:
    """A route that keeps what is launched."""

    profile = None
    on_device = True

    def __init__(self, target: Target) -> None:
        self.target = target
        self.found: dict[str, Any] = {}

    def launch(self, unit: Any, *_: Any) -> None:
        self.found[unit.name] = unit

    def launch_triton(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
        from ferryman.backends.triton import specialise

        one = specialise(kernel, args, meta)
        self.found[repr(one)] = one


def _cases(op: Primitive, target: Target, widths: Sequence[int], head_dims: Sequence[int]) -> Iterator[Case]:
    forward = (forward_of(op) or op).name
    yield from grid.cases(op, "full", torch.device("cuda"))
    made: Iterable[dict[str, Any]] = ()
    if forward in _OF_ROWS:
        made = (args for width in widths for rows in _rows(target, width) for args in _OF_ROWS[forward](rows, width))
    elif forward in ("cross_entropy", "cross_entropy_inplace_grad"):
        made = itertools.starmap(_loss, itertools.product((1, 512, 8192), _VOCABULARIES, (0.0, 0.1)))
    elif forward in ("rope", "rope_"):
        made = itertools.starmap(_rope, itertools.product(_LENGTHS, _HEADS, head_dims, (False, True)))
    elif forward == "linear":
        made = itertools.starmap(_linear, itertools.product(_TOKENS, _WEIGHTS, (False, True)))
    elif forward == "attention":
        made = itertools.starmap(_attention, itertools.product(_LENGTHS, _HEADS, head_dims, _MASKING))
    for args in made:
        yield Case("of a model", args)


def _rows(target: Target, width: int) -> list[int]:
    """One for each way in which launchers tell few rows from many."""
    units = max(1, target.units)
    return sorted({1, *(max(1, units * 1024 // spread) for spread in SPREADS), max(8192, _MANY // width)})


def _rms(rows: int, width: int, **more: Any) -> Iterator[dict[str, Any]]:
    for weight, before in ((True, False), (True, True), (False, False)):
        line = TensorSpec((width,), fill="weight") if weight else None
        yield {"x": TensorSpec((rows, width)), **more, "weight": line, "eps": 1e-6, "cast_before_weight": before}


def _add_rms(rows: int, width: int) -> Iterator[dict[str, Any]]:
    return _rms(rows, width, residual=TensorSpec((rows, width)))


def _layer(rows: int, width: int) -> Iterator[dict[str, Any]]:
    line = TensorSpec((width,))
    for weight, bias in ((line, line), (line, None), (None, None)):
        yield {"x": TensorSpec((rows, width)), "weight": weight, "bias": bias, "eps": 1e-5}


def _softmax(rows: int, width: int) -> Iterator[dict[str, Any]]:
    yield {"x": TensorSpec((rows, width))}


def _silu(rows: int, width: int) -> Iterator[dict[str, Any]]:
    yield {"gate": TensorSpec((rows, width)), "up": TensorSpec((rows, width))}


def _gelu(rows: int, width: int) -> Iterator[dict[str, Any]]:
    for approximate in ("tanh", "none"):
        yield {"gate": TensorSpec((rows, width)), "up": TensorSpec((rows, width)), "approximate": approximate}


_OF_ROWS: dict[str, Callable[[int, int], Iterator[dict[str, Any]]]] = {
    "rms_norm": _rms, "add_rms_norm": _add_rms, "layer_norm": _layer, "softmax": _softmax, "silu_mul": _silu,
    "gelu_mul": _gelu,
}  # fmt: skip


def _loss(rows: int, width: int, smoothing: float) -> dict[str, Any]:
    labels = TensorSpec((rows,), dtype="int64", low=0, high=width)
    return {"logits": TensorSpec((rows, width)), "target": labels, "ignore_index": -100, "label_smoothing": smoothing}


def _rope(tokens: int, heads: tuple[int, int], dim: int, interleaved: bool) -> dict[str, Any]:
    angle = TensorSpec((1, tokens, dim), fill="angles")
    q, k = (TensorSpec((1, count, tokens, dim), layout="heads") for count in heads)
    return {"q": q, "k": k, "cos": angle, "sin": angle, "interleaved": interleaved}


def _linear(tokens: int, weight: tuple[int, int], biased: bool) -> dict[str, Any]:
    bias = TensorSpec((weight[0],)) if biased else None
    return {"x": TensorSpec((tokens, weight[1])), "weight": TensorSpec(weight), "bias": bias}


# causal, window, softcap, whether there is a mask
_MASKING = ((True, None, 0.0, False), (False, None, 0.0, False), (True, 512, 0.0, False), (True, None, 50.0, False),
            (True, 512, 50.0, False), (False, None, 0.0, True))  # fmt: skip


def _attention(
    queries: int, heads: tuple[int, int], dim: int, masking: tuple[bool, int | None, float, bool]
) -> dict[str, Any]:  # fmt: skip
    causal, window, softcap, masked = masking
    q = TensorSpec((1, heads[0], queries, dim), layout="heads")
    k = TensorSpec((1, heads[1], max(queries, 4096 if queries < 64 else 0), dim), layout="heads")
    mask = TensorSpec((1, 1, queries, k.shape[2]), dtype="bool") if masked else None
    return {"q": q, "k": k, "v": k, "causal": causal, "scale": None, "window": window, "softcap": softcap, "mask": mask}

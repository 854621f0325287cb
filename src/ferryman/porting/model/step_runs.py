"""Runs of parts whose scores are masked in several steps (`part_steps`), on drawn values and masks, in float64."""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.porting.model import source
from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part import plain_function
from ferryman.porting.model.trace import Unproven

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_WANTED, _MOST, _NEAR = 24, 500, 36  # runs that agree, those that are tried, and those like one that agrees
_SHAPES = ("qk", "11qk", "b11k", "b1qk", "bhqk", "hqk", "bk", "bqk", "h11", "nqk", "1qk")
_KINDS = ("bool", "truth", "bias", "far", "low", "whole")
_CLOSE = 1e-9
_WIDTH = 16
_HEADS, _MOST_HEADS = 3, 6
_LIKE = {"device": torch.device("cpu"), "dtype": torch.float64}
_LAYOUTS = ("bhsd", "bshd", "nsd", "bhds", "nds")  # n: heads are in the batch


def number_of(proving: Any, node: Node, path: frozenset[Node], spelled: ast.expr, own: dict[str, Node]) -> Any:
    """What a number that hides is in each dtype of scores. Raises Unproven where it may become another."""
    for inner in node.inside(path):
        if inner.kind == "leaf" or isinstance(inner.value, Tensor):
            raise Unproven("a number that is given")
        if inner.kind == "op" and inner.counts():
            raise Unproven("a number of sizes")
        root = inner.tree
        while isinstance(root, ast.Attribute):
            root = root.value
        if inner.kind == "constant" and isinstance(root, ast.Name):
            known = source.resolve(root, proving.function)
            if not isinstance(known, types.ModuleType | type | types.BuiltinFunctionType | types.FunctionType):
                raise Unproven("a number of a file's")
    function = _function("ferryman_number", ["ferryman_like", *own], f"return {ast.unparse(spelled)}", proving)
    given = [n.value for n in own.values()]
    known_as = []
    for dtype in _DTYPES:
        try:
            known_as.append(float(function(torch.zeros(1, 1, 1, 1, dtype=dtype), *given)))
        except Exception as error:  # foreign code ran: what it raises is the reason
            raise Unproven(f"{type(error).__name__}: {error}") from error
    return tuple(known_as)


def _function(name: str, arguments: Sequence[str], body: str, proving: Any) -> types.FunctionType:
    tree = ast.parse(f"def {name}({', '.join(arguments)}):\n    {body}\n").body[0]
    assert isinstance(tree, ast.FunctionDef)
    return plain_function(proving.function, tree)


@dataclass(frozen=True)
class Way:
    """What a run is given: numbers, shapes of masks, and of what kind each is."""

    seed: int
    numbers: dict[Node, int]
    shapes: dict[Node, str]
    kinds: tuple[str, ...]

    def near(self) -> Iterator[Way]:
        """The same with masks of other kinds."""
        kinds = [*itertools.product(_KINDS, repeat=len(self.kinds))]
        for i in range(_NEAR):
            yield replace(self, seed=i + i // len(kinds), kinds=kinds[i % len(kinds)])


class Runs:
    """Runs of one part. ``leaves``: its values."""

    def __init__(self, proving: Any, root: Node, leaves: tuple[Node, ...]) -> None:
        self.proving, self.root, self.leaves = proving, root, leaves
        _, own = proving.function_of(root, leaves, True)
        whole = {n.value for n in own.values() if type(n.value) is int and 1 < n.value <= 64}
        whole |= {s for n in own.values() if isinstance(n.value, Tensor) for s in n.value.shape if 1 < s <= 64}
        code, home = proving.function.__code__, proving.function.__globals__
        constants = (*code.co_consts, *(home.get(n) for n in code.co_names))
        named = sorted(n for n in constants if type(n) is int and 1 < n <= 64)
        self.heads = tuple(dict.fromkeys((_HEADS, *sorted(whole), *named)))[:_MOST_HEADS]

    def _code(self, root: Node, leaves: tuple[Node, ...]) -> nn.Module:
        """A part as a module, whose tensors are copies in float64."""
        tree, own = self.proving.function_of(root, leaves, True)
        module: nn.Module | None = self.proving.module_of(tree, own, tuple(range(len(leaves))))
        if module is None:
            raise Unproven("no module")
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = copied(value)  # type: ignore[assignment]
        return module

    # Scores

    def scores(self, before: Node, pair: list[Node]) -> tuple[Node, list[str], tuple[int, ...]] | None:
        """(the queries, what says each side of the scores' shape, which axis of it each of the queries' is)."""
        reached = {child for n in before.inside(frozenset(self.leaves)) for child in n.children}
        values = tuple(n for n in self.leaves if n in reached)
        counted = [n for n in values if n not in pair]
        if any(not n.counts() for n in counted) or len(counted) > 2:
            return None
        code = self._code(before, values)
        for heads, square in itertools.product(self.heads, (False, True)):
            batch, queries, keys = [n for n in (2, 5, 7, 11, 13) if n != heads][:3]
            keys = queries if square else keys
            for (q, k), one, other in itertools.product((pair, pair[::-1]), _LAYOUTS[:3], _LAYOUTS):
                self.sizes = {"b": batch, "h": heads, "q": queries, "k": keys, "d": _WIDTH, "n": batch * heads}
                given = {q: self.shaped(one, "q"), k: self.shaped(other, "k")}
                result = self._scores(code, values, counted, given, (q, k), (one, other))
                if result is not None:
                    self.layouts = {q: (one, "q"), k: (other, "k")}
                    return result
        return None

    def _scores(
        self,
        code: nn.Module,
        values: tuple[Node, ...],
        counted: list[Node],
        given: dict[Node, tuple[int, ...]],
        pair: tuple[Node, Node],
        layouts: tuple[str, str],
    ) -> tuple[Node, list[str], tuple[int, ...]] | None:
        (q, k), sizes = pair, self.sizes
        rows = "nq" if "n" in layouts[0] else "bhq"
        wanted = tuple(sizes[side] for side in (*rows, "k"))
        for numbers in itertools.product(sorted(set(sizes.values())), repeat=len(counted)):
            known = {**{n: torch.zeros(s) for n, s in given.items()}, **dict(zip(counted, numbers, strict=True))}
            narrow = {n: x.bfloat16() if isinstance(x, Tensor) else x for n, x in known.items()}
            try:
                with torch.no_grad():
                    result, low = (code(*(values_of[n] for n in values)) for values_of in (known, narrow))
            except Exception:  # noqa: BLE001 - foreign code ran on what it may not take
                continue
            if not isinstance(result, Tensor) or tuple(result.shape) != wanted or low.dtype is not torch.bfloat16:
                continue
            letters = layouts[0].replace("s", "q")
            texts = [f"{{{0}}}.shape[{letters.index(side)}]" for side in rows]
            texts.append(f"{{{1}}}.shape[{layouts[1].index('s')}]")
            turned = tuple(rows.index(side) if side in rows else len(rows) for side in letters)
            names = [f"ferryman_m{self.leaves.index(n)}" for n in (q, k)]
            return q, [text.format(*names) for text in texts], turned
        return None

    def shaped(self, layout: str, rows: str) -> tuple[int, ...]:
        return tuple(self.sizes[side if side != "s" else rows] for side in layout)

    # Runs that agree

    def agree(
        self,
        whole: Node,
        one: tuple[Node, ...],
        function: types.FunctionType,
        given: list[str],
        own: dict[str, Node],
        mask: Node,
        query: Node,
        gradient: bool,
    ) -> bool:
        """Whether the part gives what the part of one step gives of the value that ``function`` makes."""
        original, served = self._code(self.root, self.leaves), self._code(whole, one)
        mine = {a: copied(n.value) if isinstance(n.value, Tensor) else n.value for a, n in own.items()}
        draw = torch.Generator().manual_seed(17)

        def agrees(way: Way) -> bool | None:
            """None where the part does not take such values."""
            known = self._drawn(draw, way, mask, one)
            try:
                wanted = original(*(known[n] for n in self.leaves))
            except Exception:  # noqa: BLE001 - foreign code ran on what it may not take
                return None
            if not isinstance(wanted, Tensor) or wanted.dtype is not torch.float64:
                return None
            names = {f"ferryman_m{i}": known[leaf] for i, leaf in enumerate(self.leaves)} | mine
            try:
                queries, mask_value = function(*(names[n] for n in given))
                actual = served(*(mask_value if n is mask else queries if n is query else known[n] for n in one))
            except Exception:  # noqa: BLE001 - what the part takes, it takes
                return False
            if actual.shape != wanted.shape or not _near(actual, wanted):
                return False
            return not gradient or self._slopes(actual, wanted, [known[n] for n in one if n in self.layouts])

        def agreeing(most: int) -> int | None:
            """How many runs agree; None where one does not."""
            agreed = 0
            for way in self._ways(mask, one, most):
                if (outcome := agrees(way)) is None:
                    continue
                further = [agrees(near) for near in way.near()] if outcome else []
                if not outcome or False in further:
                    return None
                agreed += 1 + sum(map(bool, further))
                if agreed >= _WANTED:
                    break
            return agreed

        rows = self.sizes
        for heads in dict.fromkeys((rows["h"], *self.heads)):
            self.sizes = rows | {"h": heads, "n": rows["b"] * heads, "k": rows["q"]}
            square = agreeing(_MOST)
            if square is None or square >= _WANTED // 2:
                self.sizes = self.sizes | {"k": rows["k"]}
                return square is not None and agreeing(_MOST // 4) is not None
        return False

    def _slopes(self, actual: Tensor, wanted: Tensor, values: list[Tensor]) -> bool:
        weights = torch.cos(torch.arange(wanted.numel(), dtype=torch.float64)).view(wanted.shape)
        weights = torch.where(wanted.isfinite(), weights, 0.0)
        both = []
        for result in (actual, wanted):
            loss = (torch.where(wanted.isfinite(), result, 0.0) * weights).sum()
            both.append(torch.autograd.grad(loss, values, allow_unused=True))
        for a, w in zip(*both, strict=True):
            if (a is None) != (w is None) or (a is not None and not _near(a, w)):
                return False
        return True

    def _ways(self, mask: Node, one: tuple[Node, ...], most: int) -> Iterator[Way]:
        """Numbers, and shapes and kinds of masks, in an order of no order."""
        rest = [n for n in self.leaves if n not in self.layouts and (n not in one or n.fact())]
        numbers, masks = ([n for n in rest if n.fact() is fact] for fact in (True, False))
        numbers = [n for n in numbers if n.counts()]
        sizes = sorted({n for side, n in self.sizes.items() if side != "d"})
        ways = itertools.product(
            itertools.product(sizes, repeat=len(numbers)),
            itertools.product(_SHAPES, repeat=len(masks)),
            itertools.product(_KINDS[:3], repeat=len(masks)),
        )
        known = [*itertools.islice(ways, 200_000)]
        for i in torch.randperm(len(known), generator=torch.Generator().manual_seed(3)).tolist()[:most]:
            counted, shapes, kinds = known[i]
            yield Way(i, dict(zip(numbers, counted, strict=True)), dict(zip(masks, shapes, strict=True)), kinds)

    def _drawn(self, draw: torch.Generator, way: Way, mask: Node, one: tuple[Node, ...]) -> dict[Node, Any]:
        """Values for all leaves."""
        base = next(layout for layout, rows in self.layouts.values() if rows == "q")
        third = {n: (base, "k") for n in one if n is not mask and n not in self.layouts and not n.fact()}
        known: dict[Node, Any] = dict(way.numbers)
        known |= {n: _LIKE[n.tree.attr] for n in self.leaves if n.fact() and not n.counts()}  # type: ignore[attr-defined]
        for n, (layout, rows) in (self.layouts | third).items():
            x = (1.0, 30.0, 1e-2)[way.seed % 3] * torch.randn(
                self.shaped(layout, rows), generator=draw, dtype=torch.float64
            )
            known[n] = x.requires_grad_()
        for (n, sides), kind in zip(way.shapes.items(), way.kinds, strict=True):
            known[n] = _mask(kind, tuple(self.sizes.get(side, 1) for side in sides), draw)
        return known


def _mask(kind: str, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    seen = torch.rand(shape, generator=draw) < 0.6
    if len(shape) > 1 and shape[-2] > 2:
        seen[..., 0, :], seen[..., 1, :] = True, False
    if kind == "bool":
        return seen
    if kind in ("truth", "whole"):
        return seen.double() if kind == "truth" else seen.long()
    bias = torch.randn(shape, generator=draw, dtype=torch.float64)
    if kind == "bias":
        return bias
    return bias.masked_fill(seen, -torch.inf if kind == "far" else torch.finfo(torch.float32).min)


def _near(actual: Tensor, wanted: Tensor) -> bool:
    same = torch.equal(actual.isnan(), wanted.isnan())
    a, w = actual.detach().nan_to_num(0.0), wanted.detach().nan_to_num(0.0)
    return same and bool(((a - w).abs() <= _CLOSE * w.abs().amax().clamp_min(1.0)).all())


def copied(value: Tensor) -> Tensor:
    """On the host, in float64 where it floats."""
    if value.is_meta:
        raise Unproven("a tensor without numbers")
    x = value.detach().cpu()
    return x.double() if x.is_floating_point() else x.clone()

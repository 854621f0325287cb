"""How an op says what it may stand for in a model: the words of ``ops/<family>/recognise.py``.

Such a file may define ``modules(leaf)``, ``blocks(block)``, ``helpers()``, ``routines(signature)``,
``recurrences()``, ``cuts(tensors)``, ``functions()``, ``followed()`` (functions of PyTorch in Python whose own code
calls such), ``methods()`` (of tensors, by name) and ``gates()``; for graphs ``traced()``, ``foldings()`` and
``rules()``. What they yield are proposals: porting proves them before anything is replaced. Expressions are Python over
``ops`` and the names given with each.

``parts()`` names ops whose modules, in a ported block, are judged with it and not alone. ``rules()`` maps the plain
name of a function of PyTorch to what it computes in the normal form of graphs: (`porting.graph.normal.Normal`, node,
the function's arguments) -> a term, or None for a call beyond it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

import ferryman.ops as ops


@dataclass(frozen=True)
class Leaf:
    """A module without children, seen from outside. ``vectors`` and ``matrices`` are its parameters' and floating
    buffers' shapes by name, ``scalars`` the names of those without dimensions; ``numbers`` its float attributes,
    ``constants`` the floats in its forward's code; ``widths`` are its one-element shapes, for modules that hold no
    tensor; ``integers`` its int attributes; ``inputs`` how many tensors its forward may take; ``rows`` vectors with
    sides of one before them, such as (1, 1, D): how many such sides, and D; ``columns`` those with sides of one after
    them, such as (1, C, 1, 1): their shape; ``whole_constants`` the ints above 1 in its forward's code."""

    vectors: Mapping[str, int]
    matrices: Mapping[str, tuple[int, int]]
    numbers: Mapping[str, float]
    constants: tuple[float, ...]
    widths: tuple[int, ...] = ()
    scalars: tuple[str, ...] = ()
    integers: Mapping[str, int] = field(default_factory=dict)
    inputs: int = 1
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    whole_constants: tuple[int, ...] = ()

    @property
    def wholes(self) -> Mapping[str, tuple[int, int]]:
        """``matrices`` of more than one row and more than one column."""
        return {n: shape for n, shape in self.matrices.items() if n not in self.rows and n not in self.columns}

    @property
    def lines(self) -> Mapping[str, tuple[int, str]]:
        """``vectors``, ``rows`` and ``columns``: the length of each, and an expression of it as a vector. A tensor that
        gets another shape later is no vector in it, which ops refuse."""
        known = {n: (size, f"self.{n}") for n, size in self.vectors.items()}
        known |= {n: (size, f"self.{n}.squeeze({tuple(range(before))})") for n, (before, size) in self.rows.items()}
        for n, shape in self.columns.items():
            ones = tuple(axis for axis, size in enumerate(shape) if size == 1)
            known[n] = max(shape), f"self.{n}.squeeze({ones})"
        return known


@dataclass(frozen=True)
class Candidate:
    """What a leaf module may compute of its input ``x``, an expression over ``self``, ``x``, ``ops`` and ``torch``.

    width: the size of x's last dimension. uses: the attributes that must have x's dtype for the expression to hold.
    rows: a matrix, where x is integers that number its rows; ``uses`` must have one dtype then. gradient: False where
    the expression holds for results only; it is proven without gradients, and serves where none is needed.
    added, added_op: an expression over ``addend`` too, which gives (the module's result of x + addend, that sum),
    and the op that it calls; "" where no op takes an addition before it. gate: it reads a second input ``gate`` of
    x's shape, too. axis: 1 where the width is that of channels, before their places: it serves x of three dimensions
    and more.
    """

    op: str
    expression: str
    width: int
    uses: tuple[str, ...] = ()
    rows: str = ""
    gradient: bool = True
    added: str = ""
    added_op: str = ""
    gate: bool = False
    axis: int = -1

    @property
    def kind(self) -> tuple[bool, int]:
        """What it takes: candidates of one kind are proven with the same inputs."""
        return bool(self.rows), self.axis


@dataclass(frozen=True)
class Block:
    """A module with tensors whose children, if any, are proven activations, and that is no leaf with a role, seen from
    outside.

    tensors: its parameters' and floating buffers' shapes by name. inputs: how many tensors its forward requires, or
    takes with those that it says may be left out.
    integers, numbers: its int and float attributes. run: (sizes, inputs) to (what its forward gives in float64 with
    drawn tensors whose sides are changed so, these by name), or None where it raises; ``spoilt``, a third: a place in
    each of these tensors that is NaN. shape: inputs to the shape of a
    result that is a tensor, in less time; None for others. ordered: it is a part with two products, whose inputs are
    those of the first, in either order, then the second's other one, then what is left.
    """

    tensors: Mapping[str, tuple[int, ...]]
    inputs: int
    integers: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    run: Callable[..., tuple[Any, dict[str, Tensor]] | None] | None = None
    shape: Callable[[tuple[Tensor, ...]], tuple[int, ...] | None] | None = None
    ordered: bool = False


@dataclass(frozen=True)
class Layer:
    """What a block may compute of its inputs ``a0``, ``a1`` and on: an expression over these, ``self`` and ``ops``.

    sizes: sides of its tensors -> the short ones that it is proven with. draw: float64 inputs of a seed, for short
    sides: those of seeds 0 to 2 are in every implementation's domain, later ones may be in the definition's only.
    guard: an expression over self and the inputs that must hold; else the original is called. gradient: as a
    candidate's. beside: ops that the expression calls once beside ``op``. chosen: of a result, the numbers that it
    chose, (T, k), where the module's own calls may leave open which of equal ones they choose: the module is run with
    that choice then, wherever it may make it. level: so many seeds past ``seeds`` draw equal, saturated and not finite
    numbers; no gradient is compared of these, and in no draw the module may choose others. across: the least and the
    most length of an input's last axis, where it may have any between them. refused: how many of the seeds, the last
    ones, the block may refuse: an error is no result. numbers: the input of whole numbers that a block goes over one by
    one, if it does, with a number in those last seeds that the others never have. axis: of its inputs, along which they
    may be of any length; longer: inputs of a length, and of one of ``widths``, where that is along others. width: an
    expression that must be one of ``widths``, all of which are tried, where the code computes with it. fills: its code
    may hide scores by a number that a narrow dtype lacks, and raise there; that dtype is then left to it. Elsewhere
    such a number is a bound that no draw reaches, and the block is not the layer. single: code that rounds narrower
    dtypes at other places keeps these, and float32 is served. between: what the expression's ops round between them an
    implementation of a whole op may round, too: the proof in narrower dtypes may be without these roundings.
    """

    op: str
    expression: str
    sizes: Mapping[int, int]
    draw: Callable[[int], tuple[Tensor, ...]]
    seeds: int
    guard: str
    gradient: bool = True
    beside: tuple[str, ...] = ()
    chosen: Callable[[Any], Tensor] | None = None
    level: int = 0
    across: tuple[int, int] | None = None
    refused: int = 0
    numbers: int | None = None
    axis: int = 0
    longer: Callable[[int, int], tuple[Tensor, ...]] | None = None
    widths: tuple[int, ...] = ()
    width: str = ""
    fills: bool = False
    single: bool = False
    between: bool = False


@dataclass(frozen=True)
class Helper:
    """What a function that modules call may compute.

    parameters: how many of its first arguments are tensors, ``a0`` and on, which the expression reads. draw: float64
    arguments of a seed. guard: an expression over them that must hold; else the original is called. strict: one more,
    which is left out where the proof also holds for first arguments of a storage dtype beside float32 ones. joined: the
    last argument is "complex", or has "pairs" in its last dimension; the draw, and ``proof``, the expression to prove,
    have its two parts. A draw that takes
    a ``width`` gives arguments of that, for functions whose code names it; one that takes ``turned``, of which so many
    numbers of a head are turned and others are not, as the expression ``turned`` says of them. never: names of
    PyTorch's functions of which none has one in it.
    """

    op: str
    expression: str
    parameters: int
    draw: Callable[[int], tuple[Tensor, ...]]
    guard: str
    strict: str = "True"
    joined: str = ""
    proof: str = ""
    never: frozenset[str] = frozenset()
    turned: str = ""


@dataclass(frozen=True)
class Signature:
    """A function that modules call, seen from outside: how many arguments it requires, and the others' defaults."""

    required: int
    defaults: tuple[Any, ...]


@dataclass(frozen=True)
class Routine:
    """What a function with options may compute: an expression over its parameters ``a0`` and on, ``ops`` and ``torch``.

    draw: values for all parameters of a seed, floating tensors in float64; the first has all that may be given. guard:
    an expression over the parameters that must hold; else the original is called. fixed: parameters that every draw
    keeps, and their values, which a call must have. writes: the parameter that the function writes over; the expression
    gives a pair then, the result and what the parameter becomes. wide: parameters that models also keep in float32
    where the others are narrower. gradient: False where it serves only what needs no gradient. refused: how many of the
    seeds, the last ones, the function may refuse: an error is no result. entered: its guard asks for a token at least,
    and draws have no more than one, so that a loop over tokens or chunks of them, which was entered then, always is.
    apart: its guard asks that those of ``wide`` are float32, whatever the others are.
    """

    op: str
    expression: str
    draw: Callable[[int], tuple[Any, ...]]
    seeds: int
    guard: str
    fixed: Mapping[int, Any] = field(default_factory=dict)
    writes: int | None = None
    wide: frozenset[int] = frozenset()
    gradient: bool = True
    refused: int = 0
    entered: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Recurrence:
    """What a loop over tokens may compute, which carries a state that is zeros before the first and keeps a result of
    each token: one of the expressions over values ``a0`` and on, each a tensor.

    axes: of each value, one letter an axis, of which "L" are the tokens; result: those of the result. Code may have the
    tokens elsewhere. states: ways in which code may lay out the state. draw: (a size for each letter, a seed) to the
    values in float64; sizes: those of each seed. finite: how many of the seeds, the first ones, give finite values.
    steady: (an expression over the values, the least and the most it may be), for an op that takes many tokens at once:
    where the code's values are so, and finite, it gives what one token after another gives. A call asks that of the
    values that it has; drawn ones are so.
    """

    op: str
    expressions: tuple[str, ...]
    axes: tuple[str, ...]
    result: str
    states: tuple[str, ...]
    draw: Callable[[Mapping[str, int], int], tuple[Tensor, ...]]
    sizes: tuple[Mapping[str, int], ...]
    finite: int
    steady: tuple[tuple[str, float, float], ...] = ()


_OF_HEADS = (
    "2 7 3 5 4, 1 6 2 4 7, 3 2 4 6 2, 2 1 2 4 5, 1 5 3 6 3, 1 9 1 3 4, 2 8 2 4 3, 1 19 2 3 2, 2 5 3 4 5, 1 4 2 4 3"
)


def sizes_of_heads(letters: str) -> tuple[dict[str, int], ...]:
    """Sizes of ten seeds for a loop with heads. letters: sequences, tokens, heads, the state's two sides."""
    return tuple(dict(zip(letters, map(int, one.split()), strict=True)) for one in _OF_HEADS.split(","))


def normal(words: Sequence[str], sizes: Mapping[str, int], seed: int) -> list[Tensor]:
    """A value of each word, whose letters are its axes, in float64: normal numbers of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn([sizes[axis] for axis in word], generator=generator, dtype=torch.float64) for word in words]


@dataclass(frozen=True)
class Cut:
    """What a module's result, cut to as many of its last dimension as the input ``x`` has, may be: an expression over
    ``self``, ``x`` and ``ops``.

    shapes: of the inputs that it is proven with. guard: an expression over ``self`` and ``x`` that must hold.
    """

    op: str
    expression: str
    shapes: tuple[tuple[int, ...], ...]
    guard: str


@dataclass(frozen=True)
class Served:
    """``replacement`` takes the arguments of a function of PyTorch, serves the calls that ``op`` can express, and hands
    the others to that function. ``narrowed`` takes a dtype before them, to which the program casts the result at once:
    it serves a call that says a wider dtype than its input's only to come back to that. ``fixed``: the name and place
    of an argument with which it serves only where no gradient of it is needed."""

    op: str
    replacement: Callable[..., Any]
    narrowed: Callable[..., Any] | None = None
    fixed: tuple[str, int] | None = None


@dataclass(frozen=True)
class Gate:
    """``op(gate, up, *extra)`` is ``function(gate) * up``, of an activation."""

    op: str
    function: Callable[[Tensor], Tensor]
    extra: tuple[Any, ...] = ()


class Graph(Protocol):
    """How a proposal reads a graph that PyTorch traced. Its tensors are nodes."""

    def example(self, item: Any) -> Any:
        """A node's tensor without data; what is no node as it is."""

    def name(self, node: fx.Node) -> str:
        """The plain name of a node's function: "mul" for ``a * b``, ``torch.mul`` and ``a.mul(b)``."""

    def number(self, item: Any) -> float | None:
        """A number, also of one that is an argument of the compiled function."""

    def narrow(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """What a value was widened from, and the casts between."""

    def same_size(self, a: Any, b: Any) -> bool:
        """Whether two sizes are equal whatever the dynamic ones are."""

    def view(self, node: fx.Node, kind: str) -> Any:
        """An argument that is a view of a node. kind: "rows", all dimensions but the last as one; "t", a transpose."""


@dataclass(frozen=True)
class Traced:
    """A function of PyTorch in a graph that is an op, or a mode of one.

    arguments: (`Graph`, the function's arguments) -> (the op's in the schema's order, the nodes between these and the
    call that the op computes as well), or None where the op has no such call. casts: the op's result is cast to the
    dtype that the graph has.
    """

    op: str
    arguments: Callable[..., tuple[tuple[Any, ...], tuple[fx.Node, ...]] | None]
    casts: bool = False


@dataclass(frozen=True)
class Folding:
    """A tensor argument that others of an op may say instead, where it follows from sizes alone.

    sizes: (argument, axis) of those that it follows from. readings: (the op's other arguments, the whole numbers
    in what computes it) -> ({argument: value}, the same in words), the likeliest first. says: (tensor, ``sizes``, a
    reading's arguments) -> whether these say what it does. plain: (the op's arguments) -> keyword
    arguments of the function that was traced, which say it too where that call stays; None where it has none.
    """

    op: str
    argument: str
    sizes: tuple[tuple[str, int], ...]
    readings: Callable[[Mapping[str, Any], Set[int]], Iterator[tuple[dict[str, Any], str]]]
    says: Callable[[Tensor, tuple[int, ...], Mapping[str, Any]], bool]
    plain: Callable[[Mapping[str, Any]], dict[str, Any] | None] = lambda options: None


_FACES = {name: getattr(ops, name) for name in ops.__all__}


def name_op(name: str, face: Callable[..., Any]) -> None:
    """Let expressions say ``ops.NAME`` of an op of another package. Raises ValueError where that is something else."""
    if getattr(ops, name, face) is not face:
        raise ValueError(f"ferryman.ops.{name} is something else already; required: an op of another name")
    setattr(ops, name, face)
    _FACES[name] = face


class Definitions:
    """`ferryman.ops` as definitions: they take float64, and nothing is dispatched."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        face = _FACES[name]
        known = face.primitive
        one = _signature(face).return_annotation in ("Tensor", Tensor)
        alone = len(known.outputs) > 1 and (one or "return_lse" in (getattr(face, "__kwdefaults__", None) or {}))

        def run(*args: Any, **kwargs: Any) -> Any:
            bound = _signature(face).bind(*args, **kwargs)  # the public call's defaults, not the schema's
            bound.apply_defaults()
            outputs = known.body(*(bound.arguments[n] for n in known.names))
            return outputs[0] if alone and not bound.arguments.get("return_lse") else outputs

        return run


@functools.cache
def _signature(face: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(face)


def compiled(expression: str, names: tuple[str, ...], **known: Any) -> Callable[..., Any]:
    """A function of ``names`` that returns an expression of our own over them, ``torch`` and what is given."""
    function: Callable[..., Any] = eval(  # noqa: S307 - expressions are written in this package
        _code(f"lambda {', '.join(names)}: {expression}"), {"torch": torch, "nn": nn, **known}
    )
    return function


@functools.lru_cache(4096)
def _code(text: str) -> types.CodeType:
    return compile(text, "<ferryman candidate>", "eval")

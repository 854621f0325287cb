"""Conditions as data: a clause can be evaluated on a call, printed as a reason, and listed by docs and tests.

A clause names the facts that it reads. Facts that follow from a tensor's metadata or from a scalar argument are always
in the cache key; the rest (`EXTRA_FACTS`) are added to an op's key when one of its clauses reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any, Protocol

import torch

_PATH = re.compile(r"(?P<arg>[a-z_0-9]+)(\.(?P<attr>shape|stride|dtype|dim|aligned)(\[(?P<index>-?\d+)\])?)?")
EXTRA_FACTS = ("aligned", "tf32", "deterministic")
PREPARED = "prepared"  # the fact of the clause that an implementation's `prepare` makes hold
REQUIRED = "; required: "  # between the actual value and the condition in a reason


class View(Protocol):
    """What a clause may look at: the call's arguments, the device's profile facts, and process flags."""

    @property
    def args(self) -> Mapping[str, Any]: ...
    @property
    def features(self) -> frozenset[str]: ...
    @property
    def shared_memory(self) -> int: ...
    @property
    def max_threads(self) -> int: ...
    @property
    def vendor(self) -> str: ...
    @property
    def thresholds(self) -> Mapping[str, int]: ...
    @property
    def flags(self) -> Mapping[str, Any]: ...
    @property
    def known(self) -> dict[int, bool]:
        """Which clauses hold, by `id`, of those that were asked: many lines of a menu share them."""


@dataclass(frozen=True)
class Clause:
    """One condition. ``text`` states what is required; ``measure`` gives the actual value; ``test`` decides on it.

    args: the op's arguments that ``measure`` reads. The registry refuses a menu whose op lacks one of them.
    """

    text: str
    facts: tuple[str, ...]
    measure: Callable[[View], Any]
    test: Callable[[Any], bool]
    args: tuple[str, ...] = field(default=(), kw_only=True)

    def holds(self, view: View) -> bool:
        answer = view.known.get(id(self))
        if answer is None:
            answer = view.known[id(self)] = self.answer(view)
        return answer

    def answer(self, view: View) -> bool:
        return self.test(self.measure(view))

    def reason(self, view: View) -> str | None:
        """None when the clause holds; otherwise actual against required."""
        actual = self.measure(view)
        return None if self.test(actual) else f"{', '.join(self.facts)} is {_show(actual)}{REQUIRED}{self.text}"

    def __str__(self) -> str:
        return self.text


def _argument(path: str) -> str:
    """The argument that a fact path begins with."""
    return path.partition(".")[0]


def _show(value: Any) -> str:
    return str(value).removeprefix("torch.")


def read(path: str) -> Callable[[View], Any]:
    """A reader of ``x.shape[-1]``, ``x.stride[-1]``, ``x.dtype``, ``x.dim``, ``x.aligned`` or a scalar argument.

    An absent optional tensor reads as None.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        raise ValueError(f"fact path {path!r} is not of the form arg, arg.dtype, arg.shape[i] or arg.stride[i]")
    arg, attr, index = match["arg"], match["attr"], match["index"]

    def measure(view: View) -> Any:
        value = view.args[arg]
        if attr is None or value is None:
            return value
        if attr == "aligned":
            return value.data_ptr() % 16 == 0
        if attr == "dim":
            return value.dim()
        got = value.stride() if attr == "stride" else getattr(value, attr)
        return got if index is None else got[int(index)]

    return measure


def dtypes(arg: str, *allowed: torch.dtype) -> Clause:
    names = ", ".join(_show(d) for d in allowed)
    path = f"{arg}.dtype"
    return Clause(f"{arg} in {names}", (path,), read(path), lambda d: d is None or d in allowed, args=(arg,))


def same_dtype(arg: str, other: str) -> Clause:
    both = read(f"{arg}.dtype"), read(f"{other}.dtype")
    return Clause(
        f"{arg} of {other}'s dtype",
        (f"{arg}.dtype", f"{other}.dtype"),
        lambda view: tuple(_show(of(view)) for of in both),
        lambda d: d[0] == d[1],
        args=(arg, other),
    )


def unit_stride(arg: str) -> Clause:
    """The last dimension is contiguous (or has at most one element)."""

    def measure(view: View) -> Any:
        x = view.args[arg]
        return 1 if x is None or x.dim() == 0 or x.shape[-1] <= 1 else x.stride(-1)

    facts = (f"{arg}.stride[-1]",)
    return Clause(f"{arg} contiguous in its last dimension", facts, measure, lambda s: s == 1, args=(arg,))


def contiguous(arg: str) -> Clause:
    """Its elements lie in order, without gaps."""
    return Clause(
        f"{arg} without gaps",
        (f"{arg}.stride",),
        lambda view: view.args[arg].is_contiguous(),
        lambda dense: dense,
        args=(arg,),
    )


def threshold(
    name: str, what: str, facts: tuple[str, ...], measure: Callable[[View], float], *, most: bool = False
) -> Clause:
    """``what`` is at least (``most``: at most) the number that the device's profile has under ``name``; a device
    without one refuses."""

    def both(view: View) -> tuple[float, int | None]:
        return measure(view), view.thresholds.get(name)

    def test(values: tuple[float, int | None]) -> bool:
        actual, limit = values
        return limit is not None and (actual <= limit if most else actual >= limit)

    return Clause(f"{what}, at {'most' if most else 'least'} the profile's thresholds.{name}", facts, both, test)


def either(*clauses: Clause) -> Clause:
    return _Joined.of(", or ", any, clauses)


def both(*clauses: Clause) -> Clause:
    """All of them."""
    return _Joined.of(", and ", all, clauses)


@dataclass(frozen=True)
class _Joined(Clause):
    """Several in one: what holds asks them in order, and no further than it must."""

    quantifier: Callable[[Iterable[bool]], bool] = all
    clauses: tuple[Clause, ...] = ()

    @classmethod
    def of(cls, word: str, quantifier: Callable[[Iterable[bool]], bool], clauses: tuple[Clause, ...]) -> Clause:
        return cls(
            word.join(map(str, clauses)),
            tuple(dict.fromkeys(fact for clause in clauses for fact in clause.facts)),
            lambda view: tuple(clause.measure(view) for clause in clauses),
            lambda values: quantifier(clause.test(value) for clause, value in zip(clauses, values, strict=True)),
            quantifier,
            clauses,
            args=tuple(dict.fromkeys(name for clause in clauses for name in clause.args)),
        )

    def answer(self, view: View) -> bool:
        return self.quantifier(clause.holds(view) for clause in self.clauses)


@dataclass(frozen=True)
class _Not(Clause):
    clause: Clause

    def answer(self, view: View) -> bool:
        return not self.clause.holds(view)


def unless(clause: Clause) -> Clause:
    return _Not(
        f"not: {clause}", clause.facts, clause.measure, lambda value: not clause.test(value), clause, args=clause.args
    )


def at_most(path: str, limit: int) -> Clause:
    return _of_path(path, f"<= {limit}", lambda v: v is None or v <= limit)


def at_least(path: str, limit: int) -> Clause:
    return _of_path(path, f">= {limit}", lambda v: v is None or v >= limit)


def one_of(path: str, *allowed: Any) -> Clause:
    return _of_path(path, f"in {', '.join(map(str, allowed))}", lambda v: v in allowed)


def multiple_of(path: str, factor: int) -> Clause:
    return _of_path(path, f"a multiple of {factor}", lambda v: v % factor == 0)


def not_multiple_of(path: str, factor: int) -> Clause:
    return _of_path(path, f"not a multiple of {factor}", lambda v: v % factor != 0)


def _of_path(path: str, required: str, test: Callable[[Any], bool]) -> Clause:
    return Clause(f"{path} {required}", (path,), read(path), test, args=(_argument(path),))


def absent(arg: str) -> Clause:
    return Clause(
        f"no {arg}", (arg,), lambda view: view.args[arg] is not None, lambda present: not present, args=(arg,)
    )


def not_empty(arg: str) -> Clause:
    facts = (f"{arg}.shape",)
    return Clause(f"elements in {arg}", facts, lambda view: view.args[arg].numel(), lambda n: n > 0, args=(arg,))


def feature(name: str) -> Clause:
    """The device's profile lists the feature (``wgmma``, ``mfma``, ``tma`` and so on)."""
    return Clause(
        f"a device with {name}", ("profile.features",), lambda view: sorted(view.features), lambda have: name in have
    )


def lacking(name: str) -> Clause:
    """The device's profile does not list the feature."""
    return Clause(
        f"a device without {name}",
        ("profile.features",),
        lambda view: sorted(view.features),
        lambda have: name not in have,
    )


def vendor(*allowed: str) -> Clause:
    """The device is of one of these vendors ("nvidia", "amd", "cpu")."""
    return Clause(
        f"a device of {' or '.join(allowed)}",
        ("profile.vendor",),
        lambda view: view.vendor,
        lambda have: have in allowed,
    )


def positive(path: str) -> Clause:
    return _of_path(path, "> 0, or None", lambda v: v is None or v > 0)


def compiled() -> Clause:
    """Triton compiles kernels in this process, and does not interpret them."""
    return Clause("compiled Triton", ("interpreted",), lambda view: not view.flags["interpreted"], bool)


def release(package: str, version: str) -> Clause:
    """A package's release begins with these numbers: what is made of its experimental parts fits no other."""

    def measure(view: View) -> str:
        return _installed(package)

    return Clause(f"{package} {version}", (package,), measure, lambda have: f"{have}.".startswith(f"{version}."))


@lru_cache(maxsize=None)
def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def prepared(has: Callable[[View], bool]) -> Clause:
    """It was compiled for calls like this, by `ferryman.prepare` or `ferryman tune`: none waits for that."""
    return Clause(
        "compiled for such calls before (ferryman.prepare)",
        (PREPARED,),
        lambda view: "compiled" if has(view) else "not compiled",
        lambda state: state == "compiled",
    )


def shared_memory(required: int) -> Clause:
    return Clause(
        f"{required} bytes of shared memory per block",
        ("profile.shared_memory",),
        lambda view: view.shared_memory,
        lambda have: have >= required,
    )


def row_in_registers(
    arg: str, arrays: int = 1, size: str | None = None, beside: tuple[str, ...] = (), most: int | None = None
) -> Clause:
    """A block's registers hold ``arrays`` rows at once, padded to a power of two: 64 bytes a thread in all.

    size: an argument that has the length of a row where ``arg``'s rows are groups of them, or None. beside: other
    tensors; the widest elements of all count. most: elements of a padded row, whatever fits.
    """
    tensors = (arg, *beside)

    def measure(view: View) -> tuple[int, int, int]:
        group = None if size is None else view.args[size]
        width = int(view.args[arg].shape[-1] if group is None else group)
        itemsize = max(view.args[name].element_size() for name in tensors)
        block = 1 << max(width - 1, 0).bit_length()
        return block, block * itemsize, 64 * view.max_threads // arrays

    facts = (f"{arg}.shape[-1]", *(() if size is None else (size,)), *(f"{name}.dtype" for name in tensors))
    limit = "" if most is None else f", and have at most {most} elements"
    return Clause(
        f"rows that fit registers, {arrays} at once{limit} (elements, bytes, the most bytes)",
        (*facts, "profile.max_threads"),
        measure,
        lambda m: m[1] <= m[2] and (most is None or m[0] <= most),
        args=(*tensors, *(() if size is None else (size,))),
    )


def when_interpreted(clause: Clause) -> Clause:
    """The clause binds only where Triton interprets kernels on the CPU."""

    class _Compiled:
        """Stands for any value: compiled Triton is not asked."""

        def __str__(self) -> str:
            return "compiled"

    compiled = _Compiled()

    def measure(view: View) -> Any:
        return clause.measure(view) if view.flags["interpreted"] else compiled

    return Clause(
        f"{clause.text} (Triton's interpreter)",
        clause.facts,
        measure,
        lambda got: got is compiled or clause.test(got),
        args=clause.args,
    )

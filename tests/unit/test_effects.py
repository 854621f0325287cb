"""What stands between the values of a part may write, draw or raise under any name: then nothing goes past it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ferryman
from ferryman.porting.model import effects

WIDTH = 16


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return noisy(F.linear(x, self.weight, self.bias))


class Over(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        x.mul_(0.5)
        return y


class Log:
    def add(self, x: Tensor) -> Tensor:
        return noisy(x)

    @property
    def rate(self) -> Tensor:
        return torch.rand(1)

    def __matmul__(self, x: Tensor) -> Tensor:
        return noisy(x)


class Table(dict[str, Tensor]):
    def __missing__(self, key: str) -> Tensor:
        return torch.rand(1)


class Partial(functools.partial):
    def __call__(self, *given: Any) -> Any:
        return noisy(super().__call__(*given))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu = Noisy(WIDTH, WIDTH), nn.ReLU(inplace=True)

    @property
    def noise(self) -> Tensor:
        return torch.rand(1)


class Twice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return noisy(w)


class Context:
    def __enter__(self) -> None:
        torch.rand(1)

    def __exit__(self, *given: object) -> None:
        pass


class InContext(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with CONTEXT:
            return F.linear(x, self.weight, self.bias)


LOG, TABLE, CONTEXT = Log(), Table(), Context()


def through(module: Any, x: Tensor) -> Tensor:
    return module.norm(x)


def put(x: Tensor) -> Tensor:
    x.mul_(3.0)
    return F.relu(x)


def ping(x: Tensor, n: int) -> Tensor:
    return pong(x, n - 1) if n > 0 else torch.rand_like(x)


def pong(x: Tensor, n: int) -> Tensor:
    return ping(x, n - 1) if n > 0 else x


def counted() -> Callable[[Tensor], Tensor]:
    calls = [0]

    def act(x: Tensor) -> Tensor:
        calls[0] += 1
        return noisy(x)

    return act


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.log, self.inner, self.other = Log(), Inner(), self.another()
        self.over, self.writes = nn.ReLU(inplace=True), Over(WIDTH, WIDTH)
        self.acts()

    def another(self) -> nn.Module:
        return Noisy(WIDTH, WIDTH)

    def acts(self) -> None:
        self.act: Any = functools.partial(noisy)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        p = F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.5, self.training)
        n = self.act(v)
        return p @ n


class DropoutKept(Heads):
    def acts(self) -> None:
        self.act = functools.partial(F.dropout, p=0.3)


class DropoutModuleKept(Heads):
    def acts(self) -> None:
        self.act = functools.partial(nn.Dropout(0.3))


class OtherPartial(Heads):
    def acts(self) -> None:
        self.act = Partial(F.relu)


class Bound(Heads):
    def acts(self) -> None:
        self.act = types.MethodType(lambda self, x: noisy(x), self)


class Counted(Heads):
    def acts(self) -> None:
        self.act = counted()


def between(line: str, first: str = "") -> type[Heads]:
    """A module with a line between a part that draws and what reads it."""
    text = "q, k, v = self.q(x), self.k(x), self.v(x)\n" + first
    text += "\np = F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.5, self.training)"
    return _of(f"{text}\n{line}\nreturn p @ n")


def over(line: str, first: str = "") -> type[Heads]:
    """A module with a line between what reads ``h`` and the softmax."""
    text = f"q, h = self.q(x), self.k(x)\n{first}\nw = q @ h.mT * 0.25"
    return _of(f"{text}\n{line}\nreturn torch.softmax(w, -1) @ n")


def _of(text: str) -> type[Heads]:
    lines = "".join(f"    {line}\n" for line in text.split("\n") if line)
    return _written(f"def forward(self, x, flag=False):\n{lines}")


_names: Iterator[int] = iter(range(1000))


def _written(text: str) -> type[Heads]:
    import linecache

    file, known = f"<look-alike {next(_names)}>", dict(globals())
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), known)  # noqa: S102 - our own text
    return type("Alike", (Heads,), {"forward": known["forward"]})


class OwnClone(Heads):
    def clone(self, x: Tensor) -> Tensor:
        return x

    def less(self, x: Tensor) -> Tensor:
        h = self.clone(x)
        h.mul_(0.5)
        return F.relu(h)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        w = q @ k.mT * 0.25
        v = self.less(k)
        return torch.softmax(w, -1) @ v


class OfAnothersMemory(OwnClone):
    def less(self, x: Tensor) -> Tensor:
        h = torch.empty(0)
        h.set_(x)
        h.mul_(0.5)
        return F.relu(h)


class Kept(OwnClone):
    def less(self, x: Tensor) -> Tensor:
        return self.act(x)

    def acts(self) -> None:
        self.act = functools.partial(F.relu, inplace=True)


class Drawn(Heads):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.other, "weight", Twice())

    def another(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        p = F.dropout(torch.softmax(self.q(x) @ self.k(x).mT * 0.25, -1), 0.5, self.training)
        n = F.linear(x, self.other.weight)
        return p @ n


class WithAContext(Heads):
    def another(self) -> nn.Module:
        return InContext(WIDTH, WIDTH)

    def acts(self) -> None:
        self.act = self.other


class Yields(Heads):
    def draws(self, x: Tensor) -> Iterator[Tensor]:
        yield noisy(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        later = self.draws(v)
        p = F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.5, self.training)
        n = torch.stack(tuple(later))[0]
        return p @ n


EQUAL = "h, q = x.clone(), self.q(x)\na = h * 2.0\nv = {}\nreturn torch.softmax(q @ (h * 2.0).mT, -1) @ v + a.sum()"
SOMETIMES = "q, v = self.q(x), self.v(x)\nw = {}\nreturn {} + torch.rand_like(v)"
ALIKE: dict[str, type[Heads]] = {
    **{kind.__name__: kind for kind in (Heads, DropoutKept, DropoutModuleKept, OtherPartial, Bound, Counted)},
    **{kind.__name__: kind for kind in (OwnClone, OfAnothersMemory, Kept, Drawn, WithAContext, Yields)},
    "a generator": between("n = torch.stack(tuple(g))[0]", "g = (noisy(t) for t in (v,))"),
    "a generator, unpacked": between("n, m = g", "g = (noisy(t) for t in (v, v))"),
    "a generator of generators, unpacked": between(
        "n = torch.stack(tuple(g))[0]", "g, h = ((noisy(t) for t in (v,)) for _ in range(2))"
    ),
    "a method with a tensor's name": between("n = self.log.add(v)"),
    "one of the file's": between("n = LOG.add(v)"),
    "one by another name": between("n = log.add(v)", "log = LOG"),
    "one that is new": between("n = Log().add(v)"),
    "a property": between("n = v + LOG.rate"),
    "a child's property": between("n = v + self.inner.noise"),
    "an operator": between("n = LOG @ v"),
    "a table": between("n = v + TABLE['rate']"),
    "a child's child by another name": between("n = inner.norm(v)", "inner = self.inner"),
    "a child that a function gets": between("n = through(self.inner, v)"),
    "children that are gone over": between("n = [m.norm(v) for m in (self.inner,)][0]"),
    "a child in a table": between("n = (lambda d: d['m'].norm(v))({'m': self.inner})"),
    "functions that call each other": between("n = pong(v, 1) + z", "z = ping(v, 0)"),
    "a key": between("n = max((v,), key=lambda t: 0.0) + max((v, v), key=lambda t: float(torch.rand(1)))"),
    "a default": between("m = lambda t, r=torch.rand(1): t + r\nn = m(v)"),
    "a function by its name": between("n = v + getattr(torch, 'rand')(1)"),
    "a child in place by another name": over("n = inner.relu(h)", "inner = self.inner"),
    "equal expressions around a child in place": _of(EQUAL.format("self.over(h)")),
    "equal expressions around a child that writes": _of(EQUAL.format("self.writes(h)")),
    "equal expressions around a function in place": _of(EQUAL.format("put(h)")),
    "a child in a side": _of(
        SOMETIMES.format("q @ self.other(x).mT * 0.25", "(flag and torch.softmax(w, -1) @ v) + v")
    ),
    "numbers in a side": _of(
        SOMETIMES.format("F.dropout(q @ v.mT * 0.25, 0.5, self.training)", "(torch.softmax(w, -1) @ v if flag else v)")
    ),
}


def _run(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        return module(x.clone()), torch.random.get_rng_state()


def _as_it_was(module: nn.Module, before: nn.Module) -> bool:
    x = torch.linspace(-1, 1, 2 * 8 * WIDTH).sin().reshape(2, 8, WIDTH)
    (actual, drawn), (expected, drawn_before) = _run(module, x), _run(before, x)
    return bool((actual - expected).abs().max() < 1e-5) and torch.equal(drawn, drawn_before)


def _two(kind: type[nn.Module], training: bool) -> list[nn.Module]:
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(kind().train(training))
    return modules


@pytest.mark.daily(7)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ALIKE)
def test_nothing_goes_past_what_has_effects(name: str, training: bool) -> None:
    before, module = _two(ALIKE[name], training)
    ferryman.port(module)
    assert _as_it_was(module, before)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(WIDTH, WIDTH), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.a(x))


class Free(nn.Module):
    """A part goes past a child without effects."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = Small()
        self.act: Any = functools.partial(F.gelu)

    def keep(self, x: Tensor) -> Tensor:
        return self.act(x)

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        w = self.q(h) @ self.k(h).mT * 0.25
        n = self.other(h)
        return torch.softmax(w, -1) @ n + h


class Kind(Free):
    def forward(self, x: Tensor) -> Tensor:
        w = F.dropout(self.q(x) @ self.k(x).mT * 0.25, 0.5, self.training)
        n = self.keep(x)
        return torch.softmax(w, -1) @ n


def _inside(module: Any) -> None:
    module.other.a, module.other.act = nn.Identity(), nn.ReLU(inplace=True)


def _setting(module: Any) -> None:
    module.other.a, module.other.act.inplace = nn.Identity(), True


def _hook(module: Any) -> None:
    module.other.a.register_forward_pre_hook(lambda child, given: (given[0].mul_(0.5),))


def _weight(module: Any) -> None:
    for child in (module.k, module.other.a):
        nn.utils.parametrize.register_parametrization(child, "weight", Twice())


def _attribute(module: Any) -> None:
    module.__dict__["other"] = nn.ReLU(inplace=True)


def _function(module: Any) -> None:
    module.act = functools.partial(noisy)


def _method(module: Any) -> None:
    module.keep = noisy


AFTER = [(Free, change) for change in (_inside, _setting, _hook, _weight, _attribute)]


@pytest.mark.parametrize(("kind", "change"), [*AFTER, (Kind, _function), (Kind, _method)])
def test_what_changes_after_the_port_is_asked_for(kind: type[nn.Module], change: Callable[[Any], None]) -> None:
    before, module = _two(kind, kind is Kind)
    ferryman.port(module)
    with ferryman.trace() as trace:
        assert _as_it_was(module, before)
    assert kind is Kind or "attention" in {op for op, _ in trace.calls}
    change(before)
    change(module)
    assert _as_it_was(module, before)


def test_names_say_of_every_function_that_draws() -> None:
    """Of PyTorch's own list."""
    names = {s.name.partition("::")[2] for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}
    packets = [(n, getattr(torch.ops.aten, n)) for n in sorted(names) if n[0] != "_" and hasattr(torch.ops.aten, n)]
    overloads = [(n, getattr(p, o)) for n, p in packets if hasattr(p, "overloads") for o in p.overloads()]
    drawing = {n for n, o in overloads if torch.Tag.nondeterministic_seeded in o.tags}
    asked = {n for n in drawing if hasattr(torch, n) or hasattr(Tensor, n)} - effects._FILLED
    asked -= {"scaled_dot_product_attention"}  # by its probability
    assert len(asked) > 20 and {n for n in asked if not effects._draws(n.rstrip("_"))} == set()

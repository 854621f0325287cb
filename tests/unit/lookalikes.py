"""Modules in nobody's library, generated: right ones in disguise, and look-alikes that compute something else.

A seed draws names, spellings and order of operations. ``right`` differ from an op in nothing but how they are written;
a look-alike has one planted difference, which ``shows`` names, and an input on which it shows.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

WORDS = ("alder", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "larch")


@dataclass(frozen=True)
class Specimen:
    """``source`` defines class ``name``; ``op`` is what it computes or resembles; ``fault`` is "" where it is right."""

    name: str
    op: str
    source: str
    fault: str


def _names(draw: random.Random) -> dict[str, str]:
    words = draw.sample(WORDS, 8)
    return dict(zip(("cls", "w", "b", "eps", "x", "h", "s", "n"), words, strict=True))


def _square(draw: random.Random, x: str) -> str:
    return draw.choice((f"{x}.pow(2)", f"({x} * {x})", f"{x}.square()", f"torch.square({x})", f"({x} ** 2)"))


def _inverse_root(draw: random.Random, v: str) -> str:
    return draw.choice((f"torch.rsqrt({v})", f"({v}).rsqrt()", f"1.0 / torch.sqrt({v})", f"({v}).pow(-0.5)"))


def _wide(draw: random.Random, x: str) -> str:
    return draw.choice((f"{x}.float()", f"{x}.to(torch.float32)", f"{x}.to(dtype=torch.float32)"))


NORM_FAULTS = {
    "eps outside the root": "root_eps",
    "subtracts the mean": "mean",
    "sums, not averages": "sum",
    "divides by N - 1": "n1",
    "mean of magnitudes": "abs",
    "weight squared": "w2",
    "two added to the weight": "w+2",
    "the scale is detached": "detach",
    "clamps its input": "clamp",
    "another sum for large batches": "batch",
    "another result for one sign of the sum": "sign",
    "another result in float32": "dtype",
    "counts its calls": "count",
    "over the wrong dimension": "dim",
    "one more factor while training": "training",
    "rounds to a grid": "grid",
    "adds a constant": "shift",
}


def _rms(draw: random.Random, fault: str) -> str:
    n = _names(draw)
    eps = draw.choice((1e-5, 1e-6, 1e-3))
    fixed = draw.random() < 0.3
    e = repr(eps) if fixed else f"self.{n['eps']}"
    base = draw.choice(("nn.Module", "Root"))
    offset = draw.random() < 0.25
    body = [f"{n['h']} = {_wide(draw, n['x'])}"]
    h = n["h"]
    reduced = f"{_square(draw, h)}.mean(-1, keepdim=True)"
    reduced = reduced if draw.random() < 0.7 else f"torch.mean({_square(draw, h)}, dim=-1, keepdim=True)"
    if fault == "mean":
        body.append(f"{h} = {h} - {h}.mean(-1, keepdim=True)")
    if fault == "sum":
        reduced = f"{_square(draw, h)}.sum(-1, keepdim=True)"
    if fault == "n1":
        reduced = f"{_square(draw, h)}.sum(-1, keepdim=True) / ({h}.shape[-1] - 1)"
    if fault == "abs":
        reduced = f"{h}.abs().mean(-1, keepdim=True).square()"
    if fault == "dim":
        reduced = f"{_square(draw, h)}.mean(0, keepdim=True)"
    if fault == "clamp":
        body.append(f"{h} = {h}.clamp(-50.0, 50.0)")
    if fault == "grid":
        body.append(f"{h} = ({h} * 1024).round() / 1024")
    body.append(f"{n['s']} = {reduced}")
    factor = _inverse_root(draw, f"{n['s']} + {e}") if draw.random() < 0.7 else _inverse_root(draw, f"{e} + {n['s']}")
    if fault == "root_eps":
        factor = f"1.0 / (torch.sqrt({n['s']}) + {e})"
    if fault == "detach":
        factor = f"({factor}).detach()"
    body.append(f"{n['n']} = {h} * ({factor})" if draw.random() < 0.5 else f"{n['n']} = ({factor}) * {h}")
    weight = f"self.{n['w']}"
    if fault == "w2":
        weight = f"{weight} * {weight}"
    if fault == "w+2":
        weight = f"(2.0 + {weight})"
    product = draw.random() < 0.5
    if offset and fault not in ("w2", "w+2"):
        body.append(f"{n['n']} = {n['n']} * (1.0 + {weight}.float())")
        last = f"{n['n']}.to({n['x']}.dtype)"
    elif product:
        last = draw.choice((f"{weight} * {n['n']}.to({n['x']}.dtype)", f"{n['n']}.to({n['x']}.dtype) * {weight}"))
    else:
        last = draw.choice((f"({weight} * {n['n']}).to({n['x']}.dtype)", f"({n['n']} * {weight}).type_as({n['x']})"))
    ahead = {
        "batch": [f"if {n['h']}.shape[0] > 64:", f"    return {n['x']}"],
        "sign": [f"if bool({n['h']}.sum() > 0) and bool({n['h']}.abs().max() > 1e6):", f"    return {n['x']}"],
        "dtype": [f"if {n['x']}.dtype == torch.float32 and {n['h']}.shape[-1] > 3:", f"    {n['n']} = {n['n']} * 1.5"],
        "count": ["self.steps = self.steps + 1"],
        "training": ["if self.training:", f"    {n['n']} = {n['n']} * 1.01"],
        "shift": [f"{n['n']} = {n['n']} + 0.001"],
    }.get(fault, [])
    lines = [*body, *ahead, f"return {last}"]
    indented = "\n".join(f"        {line}" for line in lines)
    keep = "" if fixed else f"        self.{n['eps']} = {eps!r}\n"
    keep += "        self.steps = 0\n" if fault == "count" else ""
    start = "torch.zeros(width)" if offset else "torch.ones(width)"
    return (
        f"class Root(nn.Module):\n    pass\n\n\nclass {n['cls'].title()}({base}):\n    def __init__(self, width):\n"
        f"        super().__init__()\n        self.{n['w']} = nn.Parameter({start})\n{keep}\n"
        f"    def forward(self, {n['x']}):\n{indented}\n"
    )


LINEAR_FAULTS = {
    "a scale": "scale",
    "the bias twice": "bias2",
    "a clamp after": "clamp",
    "rows of the weight summed": "sum",
    "no bias while training": "training",
    "its input rounded": "grid",
    "squares its input": "square",
    "another result for many rows": "batch",
}


def _linear(draw: random.Random, fault: str) -> str:
    n = _names(draw)
    transposed = draw.random() < 0.4
    x, w, b = n["x"], f"self.{n['w']}", f"self.{n['b']}"
    shape = "width, width + 8" if transposed else "width + 8, width"
    matrix = w if transposed else draw.choice((f"{w}.t()", f"{w}.T", f"{w}.transpose(0, 1)"))
    given = {"grid": f"(({x} * 256).round() / 256)", "square": f"({x} * {x})"}.get(fault, x)
    product = draw.choice((f"torch.matmul({given}, {matrix})", f"{given} @ {matrix}", f"{given}.matmul({matrix})"))
    added = draw.choice((f"{product} + {b}", f"{b} + {product}", f"torch.add({product}, {b})"))
    if fault == "bias2":
        added = f"{product} + 2 * {b}"
    lines = [f"{n['h']} = {added}"]
    lines += {
        "scale": [f"{n['h']} = {n['h']} * 0.5"],
        "clamp": [f"{n['h']} = {n['h']}.clamp(-20, 20)"],
        "sum": [f"{n['h']} = {n['h']} + {w}.sum() * 1e-3"],
        "training": ["if self.training:", f"    {n['h']} = {product}"],
        "batch": [f"if {x}.shape[0] >= 64:", f"    {n['h']} = {n['h']} * 2"],
    }.get(fault, [])
    lines.append(f"return {n['h']}")
    indented = "\n".join(f"        {line}" for line in lines)
    return (
        f"class {n['cls'].title()}(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n"
        f"        self.{n['w']} = nn.Parameter(torch.randn({shape}) * 0.2)\n"
        f"        self.{n['b']} = nn.Parameter(torch.randn(width + 8))\n\n"
        f"    def forward(self, {x}):\n{indented}\n"
    )


LAYER_FAULTS = {
    "unbiased variance": "n1",
    "eps outside the root": "root_eps",
    "no mean in the variance": "raw",
    "the median for the mean": "median",
    "the bias first": "bias",
    "clamps": "clamp",
}


def _layer(draw: random.Random, fault: str) -> str:
    n = _names(draw)
    x, h, s = n["x"], n["h"], n["s"]
    mean = f"{x}.mean(-1, keepdim=True)" if fault != "median" else f"{x}.median(-1, keepdim=True).values"
    variance = draw.choice(
        (
            f"{h}.square().mean(-1, keepdim=True)",
            f"({h} * {h}).mean(dim=-1, keepdim=True)",
            f"{x}.var(-1, keepdim=True, unbiased=False)",
        )
    )
    if fault == "n1":
        variance = f"{x}.var(-1, keepdim=True)"
    if fault == "raw":
        variance = f"{x}.square().mean(-1, keepdim=True)"
    factor = _inverse_root(draw, f"{s} + self.{n['eps']}")
    if fault == "root_eps":
        factor = f"1.0 / (torch.sqrt({s}) + self.{n['eps']})"
    last = f"({h} * ({factor})) * self.{n['w']} + self.{n['b']}"
    if fault == "bias":
        last = f"({h} * ({factor}) + self.{n['b']}) * self.{n['w']}"
    if fault == "clamp":
        last = f"({last}).clamp(-3, 3)"
    lines = [
        f"{n['n']} = {x}.dtype",
        f"{x} = {_wide(draw, x)}",
        f"{h} = {x} - {mean}",
        f"{s} = {variance}",
        f"return ({last}).to({n['n']})",
    ]
    indented = "\n".join(f"        {line}" for line in lines)
    return (
        f"class {n['cls'].title()}(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n"
        f"        self.{n['w']} = nn.Parameter(torch.ones(width))\n"
        f"        self.{n['b']} = nn.Parameter(torch.zeros(width))\n"
        f"        self.{n['eps']} = {draw.choice((1e-5, 1e-3))!r}\n\n    def forward(self, {x}):\n{indented}\n"
    )


MAKERS = {"rms_norm": (_rms, NORM_FAULTS), "linear": (_linear, LINEAR_FAULTS), "layer_norm": (_layer, LAYER_FAULTS)}


def specimens(count: int, seed: int, right: bool) -> list[Specimen]:
    """``count`` modules: right ones, or one fault after the other."""
    draw = random.Random(seed)
    kinds = list(MAKERS)
    faults = [(op, text, key) for op, (_, known) in MAKERS.items() for text, key in known.items()]
    drawn = []
    for i in range(count):
        op, text, key = (kinds[i % len(kinds)], "", "") if right else faults[i % len(faults)]
        source = MAKERS[op][0](draw, key)
        name = source.rsplit("class ", 1)[1].split("(", 1)[0]
        drawn.append(Specimen(name, op, source, text))
    return drawn


def load(given: Sequence[Specimen], folder: Path) -> list[ModuleType]:
    """Each in a file of its own, imported."""
    modules = []
    folder.mkdir(exist_ok=True)
    for i, specimen in enumerate(given):
        name = f"specimen_{abs(hash(str(folder))) % 10**8}_{i}"
        path = folder / f"{name}.py"
        path.write_text(f"import torch\nfrom torch import nn\n\n\n{specimen.source}", encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules.append(module)
    return modules

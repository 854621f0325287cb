"""An op is one folder: outside `ops/` and `integrations/`, nothing that only one op has decides what happens.

What is looked for in the syntax trees: an op's or a family's name, or a parameter that one family alone has, as a whole
string, as an attribute, as a keyword, or as a function's parameter; an import of a family or an op; and an op's name in
a list of names, or in a path. Docstrings, examples in help texts and data files say what they like.

A parameter may have a name that Python, NumPy or a tensor has, too, such as ``values`` or ``reduce``. Such a word
counts only where it decides about an op: a string that is compared, or that reads arguments.
"""

from __future__ import annotations

import ast
import builtins
import functools
import operator
import re
from collections.abc import Iterable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from ferryman.dispatch import registry

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src" / "ferryman"
OURS = ("ops", "integrations")
PYTORCH = (functional, torch, torch.Tensor, torch.cuda)
# What has attributes that any code calls, whatever ops have.
_EVERYWHERE = (str, bytes, list, dict, set, tuple, int, float, slice, np.ndarray, np.ufunc, torch.Tensor)
LANGUAGE = {word for one in (*_EVERYWHERE, builtins, functools, operator, np) for word in dir(one)}
ARGUMENTS = re.compile("arg|param|given|call")  # what an op's arguments are called, where they are read by name
READERS = ("get", "pop", "setdefault", "getattr", "hasattr")
# Words of one family that mean something else in a file or a folder: in its code, or, in quotes, as a string.
OTHERWISE = {
    "backends/precision.py": {"'matmul'"},  # PyTorch's switch for float32 products
    "backends/simt/__init__.py": {"lengths"},  # of rows
    "backends/simulator": {"'mask'", "'z'"},  # lanes; the third dimension of a grid
    "cli/calls.py": {"'rows'"},  # a layout
    "cli/ci.py": {"'ids'"},
    "cli/devices.py": {"'source'"},
    "cli/fingerprint.py": {"'down'", "'up'"},  # directions of rounding
    "device_profiles/parse.py": {"'source'"},
    "device_profiles/schema.py": {"'down'", "'up'"},
    "dispatch/explanation.py": {"'rows'", "'source'"},
    "dispatch/kernel_code.py": {"'rows'"},  # a file
    "porting/aot": {"'group'", "'rows'", "'source'"},  # of kernels; sizes of models; Triton's
    "porting/ci/matrix.py": {"'rows'"},
    "porting/fingerprint": {"'down'", "'up'", "window"},  # of an accumulator
    "porting/fingerprint/routes.py": {"matmul", "'matmul'"},  # PyTorch's
    "porting/fingerprint/tree.py": {"'interleaved'"},
    "porting/graph": {"alpha", "'chunk'", "'norm'", "'rows'"},  # PyTorch's functions and a view
    "porting/inputs/cases.py": {"'mask'", "'rows'"},  # the fill of booleans; a layout
    "porting/inputs/fills.py": {"'mask'", "'rows'"},
    "porting/judging/gates.py": {"'down'", "'up'"},
    "porting/judging/reading.py": {"'rows'"},
    "porting/model/spelling.py": {"'alpha'", "'beta'"},  # of PyTorch's sums
    "porting/model/account.py": {"'embedding'"},  # ATen's
    "porting/model/diffusion.py": {"'rms_norm'"},  # fields of other libraries' configs, as data
    "porting/model/families.py": {"'n_group'", "'topk_group'"},
    "porting/model/family.py": {"'num_experts'"},
    "porting/model/measure.py": {"'embedding'"},  # the first group of parameters
    "porting/mutate/python.py": {"'mask'", "'rows'"},  # of Triton's loads; how names end
    "porting/report/markdown.py": {"'rows'"},
    "porting/report/plots.py": {"alpha"},  # matplotlib's
}
# Parameters of any op that makes a tensor: as strings, too, they are nobody's.
EVERY_TENSORS = {"dtype", "device", "layout", "shape"}
# In how many files a word is an identifier before it is everybody's.
EVERYBODYS = 6


@cache
def identifiers() -> dict[str, int]:
    """In how many files outside a word is a variable's, a parameter's or an attribute's name. ``mask`` and ``rows`` are
    everybody's words; ``window`` is an op's. As a string, none is everybody's: that is how arguments are read."""
    counts: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in OURS:
            read = {ast.Name: attrgetter("id"), ast.arg: attrgetter("arg"), ast.Attribute: attrgetter("attr")}
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in {read[type(n)](n) for n in nodes if type(n) in read}:
                counts[name] = counts.get(name, 0) + 1
    return counts


@cache
def names() -> set[str]:
    """Of ops and of families."""
    return {*registry.primitives(), *(family.name for family in registry.families())}


@cache
def owners() -> dict[str, set[str]]:
    """What families have: names, and ops' parameters and outputs -> the families."""
    known = {family.name: {family.name} for family in registry.families()}
    for op in registry.primitives().values():
        family = registry.family_of(op).name
        for word in {op.name, *op.names, *op.outputs}:
            known.setdefault(word, set()).add(family)
    return known


@cache
def words() -> dict[str, str]:
    """What only one family has -> the family; a string as it is written."""
    ordinary = {word for word, count in identifiers().items() if count >= EVERYBODYS}
    alone = {word: next(iter(own)) for word, own in owners().items() if len(own) == 1}
    spoken = {word: own for word, own in alone.items() if word in names() or word not in ordinary | LANGUAGE}
    return spoken | {f"'{word}'": own for word, own in alone.items() if word not in EVERY_TENSORS}


def docstrings(nodes: list[ast.AST]) -> set[int]:
    """Constants that stand alone as a statement; and what says how an f-string shows a number."""
    alone = {id(n.value) for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    shown = [n.format_spec for n in nodes if isinstance(n, ast.FormattedValue) and n.format_spec is not None]
    return alone | {id(part) for spec in shown for part in ast.walk(spec)}


def last_name(node: ast.AST) -> str:
    """What stands last of ``op.args``, ``args`` or ``call()``."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def deciding(nodes: list[ast.AST]) -> set[int]:
    """Constants that are compared, alone or in a list, and those that read arguments by name."""
    places: list[ast.AST] = []
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            places += [part for side in sides for part in (getattr(side, "elts", None) or [side])]
        elif isinstance(node, ast.MatchValue):
            places.append(node.value)
        elif isinstance(node, ast.Subscript) and ARGUMENTS.search(last_name(node.value)):
            places.append(node.slice)
        elif isinstance(node, ast.Call) and last_name(node.func) in READERS:
            read = node.func.value if isinstance(node.func, ast.Attribute) else next(iter(node.args), node)
            if ARGUMENTS.search(last_name(read)):
                places += node.args
    return {id(place) for place in places if isinstance(place, ast.Constant)}


def named(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, word) of every string, in quotes, attribute, keyword and parameter; and of each word in a list of ops, or
    in a path that has one. Another string with a space is prose. A parameter's name that the language has, too,
    counts where it decides."""
    prose, decides = docstrings(nodes), deciding(nodes)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            parts = set(re.findall(r"\w+", node.value))
            counted = parts <= names() or (" " not in node.value and parts & names())
            for part in {node.value, *(parts if counted else ())}:
                if part in names() or part not in LANGUAGE or id(node) in decides:
                    yield node.lineno, f"'{part}'"
        elif isinstance(node, ast.Attribute):
            plain = isinstance(node.value, ast.Name) and node.value.id != "ops"
            if not (plain or isinstance(node.value, ast.Attribute)) or not any(hasattr(x, node.attr) for x in PYTORCH):
                yield node.lineno, node.attr  # PyTorch has a softmax, too
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def imported(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of every import of a family's module, or of a family or an op from `ferryman.ops`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[:2] == ["ferryman", "ops"] and len(parts) > 2 and parts[2] in names():
                yield node.lineno, parts[2]


def faults(relative: str, source: str) -> list[str]:
    """What a file names of one family."""
    known = words()
    other = {word for place, known in OTHERWISE.items() if f"{relative}/".startswith(f"{place}/") for word in known}
    nodes = list(ast.walk(ast.parse(source)))
    said = [
        f"{relative}:{line} names {word}, which {known[word]} alone has: ask the op for it, or call it otherwise here; "
        f"where it means something else, add it to OTHERWISE"
        for line, word in named(nodes)
        if word in known and word not in other
    ]
    return [*said, *(f"{relative}:{line} imports {name} from ferryman.ops" for line, name in imported(nodes))]


def files() -> list[str]:
    every = (path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    return sorted(f for f in every if f.split("/")[0] not in OURS)


@pytest.mark.parametrize("file", files())
def test_no_file_outside_decides_by_what_one_op_has(file: str) -> None:
    assert faults(file, (SOURCE / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        'if op == "rms_norm": pass',
        'if op.startswith("rope"): pass',
        'FAMILIES = ("norm",)',
        'x = {"paged_attention": 1}',
        "ops.cross_entropy(x)",
        'args["norm_before_gate"] = 1',
        'args["window"] = 1',
        'args["mask"] = 1',  # as a string no word is everybody's
        "f(window=1)",
        'for op in "softmax rms_norm".split(): pass',
        'importlib.import_module("ferryman.ops.norm.definition")',
        'f"torch.ops.ferryman.rope_({x:g})"',
        "f(softcap=1.0)",
        "from ferryman.ops.norm.definition import rms_norm",
        "from ferryman.ops import attention",
        "from ferryman.ops import rms_norm as norm_of_rows",
        "from ferryman.ops.matmul import definition",
        "import ferryman.ops.norm",
        "import ferryman.ops.norm.definition as definition",
        "def f(norm_before_gate): pass",
        "g = lambda *, softcap: softcap",
    ],
)
def test_what_decides_is_found(source: str) -> None:
    assert faults("porting/some.py", source)


def test_what_does_not_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults("porting/some.py", '"""An op such as rms_norm."""\nhelp = "such as rms_norm or softmax"') == []
    assert (
        faults("porting/some.py", 'f"{x:g} rows of a mask"') == []
        and faults("porting/some.py", "f(mask, rows=1)") == []
    )
    assert faults("porting/some.py", "import ferryman.ops\nfrom ferryman.ops import menu") == []
    # a parameter that has the name of something of PyTorch's
    known = words() | {"temperature": "softmax"}
    monkeypatch.setitem(globals(), "words", lambda: known)
    assert faults("porting/some.py", "torch.cuda.temperature(device)") == []
    assert faults("porting/some.py", "f(temperature=1.0)")


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose parameters have names that Python, NumPy and tensors have, too."""
    known = {**owners(), "values": {"pooled"}, "reduce": {"pooled"}}
    monkeypatch.setitem(globals(), "owners", lambda: known)
    monkeypatch.setitem(globals(), "words", cache(words.__wrapped__))


@pytest.mark.parametrize(
    "source",
    [
        'if name == "values": pass',
        'if name in ("x", "reduce"): pass',
        'if "reduce" in op.names: pass',
        'op.args["values"] = 1',
        'x = case.args.get("reduce", "sum")',
        'x = arguments.pop("values")',
        'x = getattr(args, "reduce")',
        'x = call(x).given["reduce"]',
        'match name:\n    case "values":\n        pass',
    ],
)
def test_a_parameter_with_a_name_that_everything_has_is_found_where_it_decides(source: str, pooled: None) -> None:
    assert faults("porting/some.py", source)


@pytest.mark.parametrize(
    "source",
    [
        "x = np.bitwise_or.reduce(offset.reshape(-1))",
        "for x in f(y).values(): pass",
        "x = f(y).sort().values",
        'x = {"values": 1}',
        '_GO_OVER = {"items", "values"}',
        'x = document["values"]',
        'x = document.get("values")',
        "def f(reduce, length): pass",
        "f(values=1)",
        "x = get()",
    ],
)
def test_a_parameter_with_a_name_that_everything_has_is_left_elsewhere(source: str, pooled: None) -> None:
    assert faults("porting/some.py", source) == []


@pytest.mark.parametrize(
    ("place", "word"), [(place, word) for place, some in OTHERWISE.items() for word in sorted(some)]
)
def test_every_word_with_another_meaning_is_still_there(place: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(owners().get(word.strip("'"), ())) > 1:
        return  # a further op has it, too: it is no longer one family's
    monkeypatch.setitem(OTHERWISE, place, OTHERWISE[place] - {word})
    here = [f for f in files() if f"{f}/".startswith(f"{place}/")]
    said = [fault for f in here for fault in faults(f, (SOURCE / f).read_text(encoding="utf-8"))]
    assert any(f" names {word}, " in fault for fault in said), f"strike {word} of {place} off"


def of_one_op(files: Iterable[Path]) -> list[Path]:
    """Test files that are named after an op or a family."""
    return [path for path in files if any(f"_{name}_" in f"_{path.stem}_" for name in names())]


def test_the_tests_of_one_op_stand_in_its_folder() -> None:
    inside = sorted((TESTS / "ops").rglob("test_*.py"))
    assert of_one_op(set(TESTS.rglob("*.py")) - set((TESTS / "ops").rglob("*.py"))) == []
    named = [Path("test_triton_attention.py"), Path("test_rope_plan.py"), Path("test_rank.py")]
    assert of_one_op(named) == named[:2]
    assert {path.parts[-2] for path in inside} <= {family.name for family in registry.families()}

"""A digest of kernels depends on what their local variables are, not on what they are called."""

from __future__ import annotations

import ast
import re

import pytest

from ferryman.dispatch import kernel_code, local_names

KERNEL = """
@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    scale = n * 2
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < n
        total += tl.load(x + at, mask, other=0.0)
    if scale > LIMIT:
        total = total * scale - start
    tl.store(out, total.to(scale.dtype))
"""
SCOPES = """
def launch(x, sizes, *rest, key=None):
    rows = [size for size in sizes if size]
    pairs = {row: last for row in rows for last in row}
    most = max((best := row) for row in rows)
    def inner(y, scale=rows):
        part = y + scale
        return [part + rows + key for y in sizes]
    with opened(x) as file, locked() as (one, two):
        import numpy as np
        try:
            total = best
        except ValueError as error:
            raise Failed(error) from error
    del pairs
    match x:
        case [first, *others]:
            return first, others
        case {"a": chosen, **more} as whole:
            return chosen, more, whole
    return sorted(rows, key=lambda z: z + total), most, inner, np, file, one, two
"""


def code(text: str, module: tuple[str, ...] = ()) -> str:
    (node,) = ast.parse(text).body
    return kernel_code._code(node, local_names.variables(node, module), {})


def renamed(text: str, before: str, after: str = "another") -> str:
    changed = re.sub(rf"\b{before}\b", after, text)
    assert changed != text
    return changed


@pytest.mark.parametrize("name", ["total", "scale", "start", "at", "mask"])
def test_a_kernels_variable_may_be_called_otherwise(name: str) -> None:
    assert code(renamed(KERNEL, name)) == code(KERNEL)


@pytest.mark.parametrize(
    "name", ["x", "out", "BLOCK", "LIMIT", "triton", "kernel", "load", "float32", "other", "range"]
)
def test_parameters_globals_attributes_and_keywords_are_named(name: str) -> None:
    assert code(renamed(KERNEL, name)) != code(KERNEL)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("n * 2", "n * 3"),
        ("n * 2", "n + 2"),
        ("n * 2", "2 * n"),
        ("at < n", "at <= n"),
        ("total * scale - start", "scale * total - start"),
        ("total * scale - start", "total * start - scale"),
        ("tl.store(out, total.to(scale.dtype))", "tl.store(out, scale.to(total.dtype))"),
        ("x + at, mask", "x + mask, at"),
        ("at = start +", "start = start +"),
        ("LIMIT", "mask"),
        ("total += ", "total -= "),
    ],
)
def test_every_edit_of_a_kernel_counts(before: str, after: str) -> None:
    assert KERNEL.count(before) == 1
    assert code(KERNEL.replace(before, after)) != code(KERNEL)


def test_two_statements_in_another_order_count() -> None:
    first, second = (line + "\n" for line in KERNEL.splitlines() if "zeros" in line or "n * 2" in line)
    assert code(KERNEL.replace(first + second, second + first)) != code(KERNEL)


def test_every_two_variables_that_change_places_count() -> None:
    """In one use of each."""
    names = ("total", "scale", "start", "at", "mask")
    places = [match for match in re.finditer(r"\b\w+\b", KERNEL) if match[0] in names]
    pairs = [(a, b) for a in places for b in places if a.start() < b.start() and a[0] != b[0]]
    assert len(pairs) > 50
    for a, b in pairs:
        swapped = KERNEL[: a.start()] + b[0] + KERNEL[a.end() : b.start()] + a[0] + KERNEL[b.end() :]
        assert code(swapped) != code(KERNEL), (a, b)


@pytest.mark.parametrize(
    "name",
    [
        *("rows", "size", "pairs", "row", "last", "most", "best", "part", "file", "one", "two", "total", "error"),
        *("first", "others", "chosen", "more", "whole"),
    ],
)
def test_variables_of_every_scope_may_be_called_otherwise(name: str) -> None:
    assert code(renamed(SCOPES, name)) == code(SCOPES)


@pytest.mark.parametrize("name", ["sizes", "rest", "key", "inner", "y", "scale", "z", "np", "opened", "Failed"])
def test_what_else_a_function_binds_is_named(name: str) -> None:
    assert code(renamed(SCOPES, name)) != code(SCOPES)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # a global, or a variable of a scope around it
        ("def f(y):\n    return [BLOCK for BLOCK in y], BLOCK", "def f(y):\n    return [SIZE for SIZE in y], SIZE"),
        ("def f(y):\n    a = 1\n    return [a for a in y]", "def f(y):\n    a = 1\n    return [a for b in y]"),
        (
            "def f(y):\n    a = y\n    return [a for a in a]",
            "def f(y):\n    a = y\n    return [b for a in a for b in a]",
        ),
        ("def f():\n    def g():\n        x = 1\n    return x", "def f():\n    def g():\n        y = 1\n    return y"),
        (
            "def f():\n    x = 1\n    def g():\n        x = 2\n    return x",
            "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n    return x",
        ),
        ("def f():\n    global x\n    x = 1", "def f():\n    global y\n    y = 1"),
        ("def f():\n    x = 1", "def f():\n    global x\n    x = 1"),
        ("def f(y):\n    (x := y)\n    return x", "def f(y):\n    return x"),
        # what reads a variable by its name
        ("def f():\n    x = 1\n    return locals()", "def f():\n    y = 1\n    return locals()"),
        ("def f():\n    class A:\n        x = 1\n    return A", "def f():\n    class A:\n        y = 1\n    return A"),
        ("class A:\n    x = 1", "class A:\n    y = 1"),
        ("x = 1", "y = 1"),
    ],
)
def test_programs_that_differ_have_other_codes(first: str, second: str) -> None:
    assert code(first) != code(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("def f(y):\n    x = 1\n    return [x for x in y]", "def f(y):\n    a = 1\n    return [b for b in y]"),
        (
            "def f(y):\n    (x for x in y if (z := x))\n    return z",
            "def f(y):\n    (a for a in y if (b := a))\n    return b",
        ),
        (
            "class A:\n    def f(self):\n        x = 1\n        return x",
            "class A:\n    def f(self):\n        y = 1\n        return y",
        ),
        ("T = {a: b for a, b in PAIRS}", "T = {x: y for x, y in PAIRS}"),
    ],
)
def test_programs_that_differ_in_names_alone_have_one(first: str, second: str) -> None:
    assert code(first) == code(second)


def test_a_variable_that_hides_a_global_of_its_file_is_named() -> None:
    """Triton reads the global before the variable is assigned."""
    text = "def f(y):\n    z = BLOCK\n    BLOCK = 2\n    return z"
    assert code(text, ("BLOCK",)) != code(renamed(text, "BLOCK"), ("BLOCK",))
    assert code(text, ("BLOCK",)) == code(renamed(text, "z"), ("BLOCK",))


@pytest.mark.parametrize(("first", "second"), [("max", "min"), ("float", "int"), ("range", "list")])
def test_a_variable_that_hides_a_builtin_of_tritons_is_named(first: str, second: str) -> None:
    """Triton reads the builtin before the variable is assigned."""
    text = f"def f(a, b):\n    c = {first}(a, b)\n    {first} = c\n    return {first}"
    assert code(text) != code(renamed(text, first, second))
    assert code(text) == code(renamed(text, "c"))

"""What `ferryman mutate` plants, refuses, and says of a survivor, without running a user's tests."""

from __future__ import annotations

import ast
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferryman.errors import ArgumentError
from ferryman.porting.mutate import hook, indexes, python, reveal, survivors, targets, users
from ferryman.porting.mutate.edits import Edit, spread
from tests.cli.run import ferryman

USER = Path(__file__).with_name("user_kernel.py")
replays = pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter, as on Linux")


def _target(file: Path, function: str = "softmax") -> targets.Target:
    return targets.target_of(f"{file}:{function}")


def _edit(old: str, new: str) -> Edit:
    text = USER.read_text()
    assert text.count(old) == 1
    return Edit(USER.name, text.index(old), old, new, "by hand", "_rows", 1, 1)


def _replayed(folder: Path, x: torch.Tensor, edit: Edit) -> dict[str, Any]:
    """The answer for one recorded launch of the user's softmax."""
    pytest.importorskip("triton")
    record = folder / "record"
    record.mkdir()
    args = {"x": x, "out": torch.zeros_like(x), "n": x.shape[1], "BLOCK": 16}
    torch.save({"grid": [x.shape[0]], "args": args}, record / "_rows.1.pt")
    return survivors.revealed(_target(USER), record, edit, folder / "answers")


X = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
WITHOUT_MAXIMUM = _edit("values - tl.max(values, 0)", "values - (tl.max(values, 0) * 0.0)")


@replays
def test_an_input_that_shows_more_than_the_last_bits_is_looked_for(tmp_path: Path) -> None:
    """A softmax without its maximum differs by last bits as recorded, and overflows for large numbers."""
    answer = _replayed(tmp_path, X, WITHOUT_MAXIMUM)
    assert answer["plain"] and answer["what"] == "values times 100" and answer["runs"] >= 10
    said = survivors.words(answer)
    assert " is nan; without the bug " in said and "last bits" not in said


@replays
def test_an_input_as_recorded_that_shows_the_bug_is_kept(tmp_path: Path) -> None:
    answer = _replayed(tmp_path, X + 100, WITHOUT_MAXIMUM)
    assert answer["plain"] and answer["what"] == reveal.AS_RECORDED and answer["runs"] == 1


@replays
def test_a_bug_of_last_bits_alone_is_called_so(tmp_path: Path) -> None:
    answer = _replayed(tmp_path, X, _edit("powers / tl.sum(powers, 0)", "powers * (1.0 / tl.sum(powers, 0))"))
    assert not answer["plain"] and answer["runs"] >= 10
    said = survivors.words(answer)
    assert said.startswith(f"only the last bits differ on each of the {answer['runs']} inputs tried")
    right, wrong = (float(part.split()[0]) for part in said.split(" is ")[1].split("; without the bug "))
    assert right != wrong


def _difference(right: torch.Tensor, wrong: torch.Tensor, before: torch.Tensor | None = None) -> reveal.Difference:
    one = reveal.difference({"y": right}, {"y": wrong}, {"y": torch.zeros_like(right) if before is None else before})
    assert one is not None
    return one


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_bit_is_rounding_and_its_two_numbers_differ_in_print(dtype: torch.dtype) -> None:
    right = torch.tensor([1.0, 0.0705841], dtype=dtype)
    wrong = right.clone()
    wrong[1] *= 1 + 2 * torch.finfo(dtype).eps
    one = _difference(right, wrong)
    assert not one.plain
    mine, without = one.words.partition(" (")[0].removeprefix("y[1] is ").split("; without the bug ")
    assert mine != without
    assert torch.equal(torch.tensor([float(mine), float(without)], dtype=dtype), torch.stack([wrong[1], right[1]]))


def test_the_largest_difference_is_beside_what_was_written() -> None:
    right = torch.tensor([1.0, 2.0])
    assert reveal.difference({"y": right}, {"y": right.clone()}, {"y": right}) is None
    assert _difference(right, torch.tensor([1.0, math.nan])).size == math.inf
    assert _difference(torch.tensor([math.nan, 2.0]), right).size == math.inf
    assert _difference(torch.tensor([math.nan, 2.0]), torch.tensor([math.inf, 2.0])).size == 1
    one = _difference(right, torch.tensor([1.5, 2.0]))
    assert one.plain and one.size == 0.25 and "1 of 2 elements differ, at most by 0.25 of the largest" in one.words
    old = torch.tensor([1e38, 0.0])  # of an empty tensor
    assert _difference(torch.tensor([1e38, 2.0]), torch.tensor([1e38, 3.0]), old).size == 0.5
    assert _difference(torch.tensor([1000, 7]), torch.tensor([1000, 8])).plain
    assert "y[1] is 8; without the bug 7" in _difference(torch.tensor([1000, 7]), torch.tensor([1000, 8])).words
    two = reveal.difference(
        {"a": right, "b": right}, {"a": right + 1e-7, "b": right + 1}, {"a": right * 0, "b": right * 0}
    )
    assert two is not None and two.words.startswith("b[0]")


def test_a_small_number_that_is_wrong_as_a_whole_is_plain() -> None:
    one = _difference(torch.tensor([1e6, 1.0]), torch.tensor([1e6, 5.0]))
    assert one.plain and "y[1] is 5; without the bug 1" in one.words
    assert not _difference(torch.tensor([1e6, 1.0]), torch.tensor([1e6, 1.0 + 1e-6])).plain
    assert not _difference(torch.tensor([1e6, 1e-3]), torch.tensor([1e6, 2e-3])).plain  # a sum of the largest rounds so
    assert _difference(torch.tensor([2**60]), torch.tensor([2**60 + 7])).plain


def _note(where: str, error: float, name: str = "allclose", **tolerance: float) -> dict[str, Any]:
    return {"compared": name, "where": where, "error": error, "tolerance": tolerance, "dtype": "torch.float32"}


def test_the_comparison_that_let_a_bug_through_is_always_named() -> None:
    same = [_note("t.py:5", 6e-8, atol=1.0)]
    assert survivors.tolerances(same, same) == [
        "t.py:5: allclose with atol=1.0 let an error of 6e-08 through (6e-08 without the bug)"
    ]
    more = [*same, _note("t.py:9", 0.25, "assert_close")]
    assert survivors.tolerances([*same, _note("t.py:9", 1e-7, "assert_close")], more) == [
        "t.py:9: assert_close with its defaults (rtol=1.3e-6, atol=1e-5) let an error of 0.25 through "
        "(1e-07 without the bug)"
    ]
    many = [_note(f"t.py:{n}", n * 1e-8) for n in range(9)]
    lines = survivors.tolerances(many, many)
    assert [line.partition(": ")[0] for line in lines[:-1]] == ["t.py:8", "t.py:7", "t.py:6"]
    assert "allclose with its defaults (rtol=1e-5, atol=1e-8)" in lines[0] and lines[-1].startswith("6 more ")
    assert survivors.tolerances([], []) == []
    pair = [_note("t.py:5", 0.25, atol=1.0), _note("t.py:5", 0.5, atol=2.0), _note("t.py:5", 0.0, "isclose")]
    first, second, third = survivors.tolerances([], [*pair])[:2] + survivors.tolerances(pair, pair)[2:]
    assert "atol=2.0 let an error of 0.5" in first and "atol=1.0 let an error of 0.25" in second
    assert third == "t.py:5: isclose with its defaults (rtol=1e-5, atol=1e-8) met no error, with the bug and without"


def test_comparisons_are_seen_in_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By keywords, of NumPy's arrays, as a method."""
    monkeypatch.setattr(hook, "JOB", {"log": str(tmp_path / "log")})
    a, b = torch.ones(3), torch.ones(3) + 0.25
    assert hook._compared("allclose", torch.allclose)(input=a, other=b, atol=1.0)
    assert hook._compared("allclose", torch.Tensor.allclose)(a, b, 0.5)
    hook._compared("assert_allclose", np.testing.assert_allclose)(a.numpy(), desired=b.numpy(), rtol=1)
    hook._compared("assert_almost_equal", np.testing.assert_almost_equal)(a.numpy(), b.numpy(), 0)
    assert not hook._compared("allclose", torch.allclose)(a, b)  # what it catches
    assert not np.any(hook._compared("isclose", np.isclose)(a.numpy(), a.numpy() + 1))
    far = torch.stack([a[0], a[1] + 1, a[2]])
    assert hook._compared("isclose", torch.isclose)(a, far).tolist() == [True, False, True]  # an error of 0
    notes = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [n["tolerance"] for n in notes] == [{"atol": 1.0}, {"rtol": 0.5}, {"rtol": 1}, {"decimal": 0}, {}]
    assert [n["error"] for n in notes] == [0.25] * 4 + [0.0]
    assert all(n["where"].startswith(Path(__file__).name) for n in notes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"def f(:\n", "has a syntax error in line 1"),
        (b'x = "\xff"\n', "is not UTF-8: byte 0xff at 5"),
        (b"x = 1\0\n", ""),
        (None, "is a folder"),
    ],
)
def test_a_file_that_is_no_python_is_bad_use(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "mine.py"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    done = ferryman("mutate", f"{file}:f", "--test", "pytest")
    assert done.code == 2 and done.out == "" and "Traceback" not in done.err
    assert str(file) in done.err and reason in done.err and "required: " in done.err


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(b"\xef\xbb\xbf" + USER.read_bytes())
    assert targets.edits_of(_target(tmp_path / "mine.py"))[0]


@pytest.mark.parametrize("command", ['pytest "unclosed', "", "  ", "''"])
def test_a_command_that_is_none_is_bad_use(command: str) -> None:
    done = ferryman("mutate", f"{USER}:softmax", "--test", command)
    assert done.code == 2 and "Traceback" not in done.err
    assert f"--test is {command!r}" in done.err and "required: a command, as in 'pytest" in done.err


@pytest.mark.parametrize("name", [".", "..mine", "no/such", "no.such.module", "__main__", "sys"])
def test_a_module_without_a_file_is_bad_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__spec__", raising=False)
    with pytest.raises(ArgumentError, match="file.py:kernel or module:kernel"):
        targets.target_of(f"{name}:f")


def test_a_package_whose_import_raises_is_bad_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="whose import raised ZeroDivisionError"):
        targets.target_of("broken.inner:f")


HEAD = "import contextlib\n"
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def k(x, y):
    tl.store(y, tl.load(x) * {factor})
"""


def _block(line: str, text: str) -> str:
    return f"{line}\n" + "".join(f"    {one}\n" for one in text.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        _block("try:", KERNEL) + "except ImportError:\n    pass\n",
        _block("if True:", KERNEL),
        _block("if False:", "pass") + _block("else:", KERNEL),
        _block("with contextlib.suppress(ImportError):", KERNEL),
        _block("if True:", _block("try:", "pass") + _block("finally:", KERNEL)),
    ],
)
def test_kernels_in_a_block_of_the_module_are_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(HEAD + text.format(factor="2.0"))
    edits, kernels = targets.edits_of(_target(tmp_path / "mine.py", "k"))
    assert kernels == ["k"] and any(e.old == "2.0" for e in edits)
    for edit in edits:
        ast.parse(edit.apply((tmp_path / "mine.py").read_text()))


def test_both_sides_of_a_choice_are_edited_where_both_are_kernels(tmp_path: Path) -> None:
    both = _block("if True:", KERNEL.format(factor="2.0")) + _block("else:", KERNEL.format(factor="3.0"))
    fallback = "def k(x, y):\n    y.copy_(x * 3.0)\n"
    one = _block("try:", KERNEL.format(factor="2.0")) + _block("except ImportError:", fallback)
    for text, expected in ((both, {"2.0", "3.0"}), (one, {"2.0"})):
        (tmp_path / "mine.py").write_text(text)
        edits, _ = targets.edits_of(_target(tmp_path / "mine.py", "k"))
        assert {e.old for e in edits} & {"2.0", "3.0"} == expected


def _rounded(text: str, function: str, folder: Path) -> list[str]:
    (folder / "mine.py").write_text(text)
    edits, _ = targets.edits_of(_target(folder / "mine.py", function))
    return [e.old for e in edits if e.operator in python.ROUNDINGS]


def test_no_offset_is_rounded(tmp_path: Path) -> None:
    assert _rounded(USER.read_text(), "softmax", tmp_path) == ["powers / tl.sum(powers, 0)", "tl.sum(powers, 0)"]
    text = """
@triton.jit
def offset(row, n):
    return row * n

@triton.jit
def read(p, at):
    return tl.load(p + at)

@triton.jit
def k(x, y, n, s):
    row = tl.program_id(0)
    at = offset(row, n) + row * s
    total = read(x, row * n) * s
    for i in range(0, n * s):
        at += i * s
        total += read(x, at=i * n) / n
    tl.store(y + at, total * s)
"""
    places = _rounded(text, "k", tmp_path)
    assert [" ".join(one.split()) for one in places] == [
        "read(x, row * n) * s",
        "total += read(x, at=i * n) / n",
        "total * s",
    ]


def test_the_self_tests_edits_stay_as_they_are() -> None:
    """It draws from all of them by seed, and its published results name them."""
    edits = python.edits(USER.read_text(), USER.name)
    assert [e.old for e in edits if e.operator == "cast early"].count("row * n") == 2
    assert indexes.place(ast.Module([], [])) is None


class _Stub:
    """Tests that pass as they are. An edit of one operator raises, and every other one is caught."""

    raises = ""

    def __init__(self, *rest: Any) -> None:
        pass

    def run(self, edit: Edit | None, limit: float | None, record: bool = False) -> users._Run:
        if edit is None:
            return users._Run(0, 0.1, "", {"t": "passed"}, [{"loaded": "mine"}])
        message = "ValueError" if edit.operator == self.raises or self.raises == "all" else "AssertionError"
        return users._Run(1, 0.1, "", {"t": message}, [])


def test_what_only_raises_gives_its_place_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "_Tests", _Stub)
    possible, _ = targets.edits_of(_target(USER))
    order = spread(possible, len(possible), 0)
    monkeypatch.setattr(_Stub, "raises", order[1].operator)
    steps: list[tuple[int, int]] = []

    def mutate(sample: int | None) -> users.Outcome:
        return users.mutate(f"{USER}:softmax", "t", sample, progress=lambda done, total, _: steps.append((done, total)))

    outcome = mutate(4)
    assert (outcome.caught, outcome.raised, outcome.ran) == (4, 1, 5) and steps[-1] == (4, 4)
    assert [m["line"] for m in outcome.mutants] == [e.line for e in order[:5]]
    assert mutate(None).ran == len(possible) == steps[-1][0]
    monkeypatch.setattr(_Stub, "raises", "all")
    outcome = mutate(4)
    assert (outcome.caught, outcome.raised) == (0, len(possible)), "there are no more"

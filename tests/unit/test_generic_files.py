"""Benchmarks and generic tests treat every op alike: no branch of theirs asks for one op or family by name.

A test may have an op as its example, and may read that op's rows. What it does must not depend on which op of many is
at hand; where it does, the place stands below with the reason. What one op alone has stands in ``tests/ops/<family>/``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_one_folder import names

ROOT = Path(__file__).resolve().parents[2]
# (file, op or family) -> why its branch may ask for it
PLANT = "a fault or a line is planted in this op alone"
ROWS = "rows of a kernel that only this op of several has"
SIZES = "what this op's kernel takes beside the others'"
EXCEPT: dict[tuple[str, str], str] = {
    ("benchmarks/peers/_functions.py", "softmax"): "a way to score that gate_topk has as an argument",
    ("tests/bounded.py", "add_rms_norm"): "its second result is the sum that the first is judged by",
    ("tests/cli/test_fuzz.py", "softmax"): PLANT,
    ("tests/cli/test_kernel.py", "attention"): "the kernel under test rounds p, which the others have not",
    ("tests/cli/test_robust.py", "softmax"): PLANT,
    ("tests/gpu/test_cost_gpu.py", "rms_norm"): "the example of an op whose costs are shipped",
    ("tests/parity/test_ops.py", "cross_entropy"): "two gates need more outputs than its small cases have",
    ("tests/parity/test_ops.py", "silu_mul"): "the alternative formula gives NaN where the definition gives 0",
    ("tests/unit/lookalikes_whole.py", "moe_experts"): "its lookalikes are blocks, the others' leaf modules",
    ("tests/unit/test_bench.py", "rms_norm"): "one of the ops of rows, whose grid has a long row",
    ("tests/unit/test_bench.py", "silu_mul"): PLANT,
    ("tests/unit/test_bench.py", "softmax"): PLANT,
    ("tests/unit/test_dispatch.py", "rms_norm"): "the example of an op that threads call",
    ("tests/unit/test_dispatch_robust.py", "rms_norm"): PLANT,
    ("tests/unit/test_lookalikes.py", "moe_experts"): "its lookalikes are blocks, the others' leaf modules",
    ("tests/unit/test_reach_threads.py", "rms_norm"): PLANT,
    ("tests/unit/test_replay.py", "rms_norm"): PLANT,
    ("tests/unit/test_simt_backends.py", "layer_norm"): ROWS,
    ("tests/unit/test_simt_backends.py", "rms_norm"): ROWS,
    ("tests/unit/test_simt_backends.py", "softmax"): ROWS,
    ("tests/unit/test_simt_compile.py", "norm"): SIZES,
    ("tests/unit/test_simt_compile.py", "rope_backward"): SIZES,
    ("tests/unit/test_simt_hiprtc.py", "embedding"): SIZES,
    ("tests/unit/test_simt_hiprtc.py", "norm"): SIZES,
    ("tests/unit/test_transformers.py", "embedding"): "one of its modules stands outside the checkpointed layers",
    ("tests/unit/test_transformers.py", "linear"): "one of its modules stands outside the checkpointed layers",
    ("tests/unit/test_transformers.py", "rms_norm"): "one of its modules stands outside the checkpointed layers",
    ("tests/unit/test_tune.py", "silu_mul"): PLANT,
    ("tests/unit/tune_planted.py", "silu_mul"): PLANT,
}


def branches(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each op or family that the test of an ``if`` or ``while`` has as a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Constant) and part.value in names():
                    yield part.lineno, str(part.value)


def files() -> list[str]:
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path.relative_to(ROOT).parts[1] != "ops")
    return sorted(path.relative_to(ROOT).as_posix() for path in (*(ROOT / "benchmarks").rglob("*.py"), *tests))


def asked(file: str) -> list[tuple[int, str]]:
    return list(branches((ROOT / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", files())
def test_no_branch_asks_for_one_op(file: str) -> None:
    places = [f"{file}:{line} asks for {name}" for line, name in asked(file) if (file, name) not in EXCEPT]
    assert not places, f"{places}; required: the op's own evidence, or a test in tests/ops/<family>/"


@pytest.mark.parametrize(("file", "name"), EXCEPT)
def test_every_exception_is_still_there(file: str, name: str) -> None:
    assert name in {one for _, one in asked(file)}, f"strike {name} of {file} off"


@pytest.mark.parametrize(
    "source",
    [
        'if op == "softmax": pass',
        'x = 1 if op in ("rope", "rope_") else 2',
        'if op.startswith("attention"): pass',
        'while name != "linear": pass',
    ],
)
def test_a_branch_is_found(source: str) -> None:
    assert list(branches(source))


def test_an_example_is_none() -> None:
    assert not list(branches('rows = [r for r in rows if r.op == "softmax"]\ncheck("softmax")\nassert op == "softmax"'))

"""Cases that nobody thought of, on the device here, through every implementation that runs on it.

Few shapes, strides and dtypes for each op (a compiler specialises kernels on them), each with many contents.
`pytest -m gpu -n 8 tests/gpu/test_fuzz_gpu.py`: compiling is most of the time, and is spread over the processes.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from ferryman.device_profiles import detect
from ferryman.dispatch import registry, select
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import grid
from ferryman.porting.inputs import fuzz
from ferryman.porting.judging.parity import SEED
from ferryman.porting.running.cells import check_case
from ferryman.porting.running.drawn import fault, is_wrong

pytestmark = pytest.mark.gpu

TEMPLATES, EACH = 8, 33
OPS = fuzz.known()
ALIGNED = fuzz.Sizes(rows=(8, 16), width=(16, 64, 128), depth=(16, 64, 96), padding=(0, 8), offset=(0, 8))
LONG = fuzz.Sizes(rows=(1, 2, 3), width=(8200, 16_392, 20_016), batch=(1, 2), padding=(0, 8), offset=(0, 8))
TILES = fuzz.Sizes(queries=(64, 128, 257), keys=(128, 300), head_dim=(64, 128), padding=(0, 8), offset=(0, 8))
WIDE = fuzz.Sizes(rows=(1, 2, 3), width=(16_385, 20_011, 50_257), batch=(1, 2))
CHUNKS = fuzz.Sizes(batch=(1, 2), lengths=(128, 130, 257), queries=(16, 64, 128), padding=(0, 8), offset=(0, 8))
CUDA = torch.device("cuda", 0)


def test_there_are_enough() -> None:
    assert TEMPLATES * EACH * len(OPS) >= 5_000


def _taken(op: Primitive, line: Implementation, *sizes: fuzz.Sizes) -> list[tuple[Case, torch.dtype]]:
    """Up to 24 drawn cases that a line does not refuse, by their shapes, strides and dtypes."""
    profile = detect(CUDA)
    accepted_cases: list[tuple[Case, torch.dtype]] = []
    for case, dtype in itertools.chain.from_iterable(fuzz.cases(op, 20_000, 0, own) for own in sizes):
        view = select.View.of(op, grid.on_meta(op, case, dtype), profile)
        if not select.refusals(line, view, profile):
            accepted_cases.append((case, dtype))
        if len(accepted_cases) == 24:
            break
    return accepted_cases


def _likely(op: Primitive) -> fuzz.Sizes:
    """Sizes at which what random ones seldom reach serves an op: many chunks, long rows, aligned rows."""
    domain = fuzz.domain_of(op)
    if domain is not None and "lengths" in domain.symbols.values():
        return CHUNKS
    return WIDE if "logits" in op.names else LONG if "norm_backward" in op.name else ALIGNED


def _of_another(op: Primitive, line: Implementation) -> bool:
    """Whether what its clauses ask of the device alone, such as another vendor, does not hold here."""
    case, dtype = next(iter(fuzz.variants(op, 1, 1)))
    view = select.View.of(op, grid.on_meta(op, case, dtype), detect(CUDA))
    device = [c for c in line.when if all(fact.startswith("profile.") for fact in c.facts)]
    return not all(clause.holds(view) for clause in device)


@pytest.mark.parametrize("name", OPS)
def test_every_implementation_holds(name: str) -> None:
    op, profile = registry.primitive(name), detect(CUDA)
    backends = registry.backends()
    lines = [
        line
        for line in registry.implementations(name)
        if profile.vendor in backends[line.backend].vendors and not registry.probe(line.backend, profile.vendor)
    ]
    assert {"torch", "triton", "definition"} <= {line.backend for line in lines}
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for case, dtype in fuzz.variants(op, TEMPLATES, EACH):
        for cell in check_case(op, lines, case, dtype, CUDA, profile):
            counts[cell.implementation, cell.verdict] += 1
            if is_wrong(cell) or cell.verdict == "NOT_RUN":
                wrong.append(fault(cell, case, dtype, SEED))
    assert not wrong, f"{len(wrong)} of {sum(counts.values())}, for example\n" + "\n".join(wrong[:5])
    for line in lines:
        if _of_another(op, line):
            assert not counts[line.name, "PASS"]
            continue
        if not counts[line.name, "PASS"]:  # alignment that random sizes seldom have, or long rows
            taken = _taken(op, line, _likely(op), TILES)
            cells = [cell for c, dtype in taken for cell in check_case(op, [line], c, dtype, CUDA, profile)]
            wrong = [f"{c.verdict} {c.reason}" for c in cells if is_wrong(c) or c.verdict == "NOT_RUN"]
            assert not wrong and any(cell.verdict == "PASS" for cell in cells), (line.name, wrong[:5])
            continue
        cases = TEMPLATES * EACH
        assert counts[line.name, "PASS"] + counts[line.name, "UNIMPLEMENTED"] == cases
        # only a menu line with conditions may refuse, and never everything
        assert counts[line.name, "PASS"] == cases or (line.when and counts[line.name, "PASS"] > 0), counts

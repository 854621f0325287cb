"""Few queries whose heads share tiles, and whose keys are divided: where they are chosen, and that they are right."""

from __future__ import annotations

import pytest
import torch

from ferryman.device_profiles import profile
from ferryman.dispatch import registry, select
from ferryman.ops.attention import packed_kernels
from ferryman.porting.bench import grid
from tests.interpreter import Interpreter

OP = registry.primitive("attention")


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("B12 H28/4 Q5 K15585 D40 causal", True),
        ("B4 H14/2 Q3 K15396 D192 causal dropout", True),
        ("B1 H4/2 Q9 K8234 D80 causal bias", True),
        ("B5 H8/8 Q25 K4237 D256 dropout", True),
        ("B3 H8/2 Q55 K702 D192 mask", True),
        ("B24 H16/1 Q3 K98 D112 causal range", True),
        ("B12 H8/2 Q23 K595 D160 causal bias", True),
        ("B12 H28/4 Q1 K15585 D40 causal", False),  # of one tile
        ("B1 H128/16 Q31 K8182 D128 keys", False),
        ("B3 H56/8 Q4 K5259 D128 keys", True),
        ("B3 H56/8 Q4 K52590 D128 keys", False),  # of a large cache the mask may hide nearly all
        ("B19 H32/16 Q25 K1812 D64 causal bias", False),
        ("B4 H2/1 Q34 K68 D96 causal window64", False),
        ("B1 H7/1 Q304 K1180 D160 causal range", False),
        ("B2 H32/8 Q4096 K4096 D128 causal", False),
        ("B28 H32/4 Q130 K130 D64 causal sinks", True),  # of a head's three tiles the last has two rows
        ("B28 H32/4 Q190 K190 D64 causal sinks", False),
        ("B6 H128/8 Q131 K131 D128 padding", False),
        ("B21 H8/2 Q450 K380 D128 dropout", True),
        ("B2 H1/1 Q362 K362 D128 causal dropout", False),  # of few tiles
        ("B1 H12/12 Q197 K197 D64", True),  # an image's patches
        ("B61 H4/4 Q32 K32 D64", True),
        ("B1 H12/12 Q197 K197 D72", False),
        ("B13 H24/24 Q41 K41 D88 causal", True),
        ("B59 H6/6 Q122 K122 D64", False),  # two full tiles of 128 rows
        ("B20 H24/24 Q154 K154 D64 causal", True),  # a second one half empty
        ("B1 H12/12 Q849 K849 D64", False),
        ("B1 H24/24 Q142 K142 D128", True),
        ("B70 H10/10 Q118 K118 D128 causal", False),
        ("B1 H12/6 Q197 K197 D64", False),  # heads of a group share tiles from 4 on
    ],
)
def test_the_choice_on_an_h200(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the cells stand in benchmarks/results/h200. A device that has none does not choose them."""
    monkeypatch.setenv("FERRYMAN_LOCKFILE", "none")
    monkeypatch.setattr(select.cost, "knows", lambda op, here: False)
    args = grid.on_meta(OP, registry.evidence(OP).named(name), torch.bfloat16)
    chosen = {
        device: select.select(OP, args, profile(device), select.State({}, False), absent=True).implementation.name
        for device in ("h200", "a100-sxm-80", "mi300x")
    }
    assert (chosen.pop("h200") == "triton.packed") is packed
    assert "triton.packed" not in chosen.values()


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "batch", "rows", "split"),
    [
        (5, 8192, 28, 1, 64, True),
        (5, 8192, 16, 1, 32, True),
        (40, 8192, 28, 64, 64, False),
        (5, 200, 28, 1, 64, False),
        (683, 683, 28, 1, 64, False),
        (683, 683, 4, 1, 64, True),
    ],
)
def test_tiles_and_pieces(queries: int, keys: int, heads: int, batch: int, rows: int, split: bool) -> None:
    """On tensors without data. Pieces are merged by a second kernel."""
    from ferryman.backends.triton import recorded

    target = select.target_of(profile("h200"))
    q = torch.empty(batch, heads, queries, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, 4, keys, 128, dtype=torch.bfloat16, device="meta")
    given = {**OP.added, "q": q, "k": k, "v": k, "window": None, "mask": None, "scale": None, "softcap": 0.0}
    args = [{**given, "causal": True}[name] for name in OP.names]
    launched = recorded([lambda: packed_kernels.attention(*args, target)])
    assert [one.name for one in launched] == ["attention_forward", *["attention_merge"] * split]
    assert {**launched[0].constexprs}["BLOCK_M"] == rows and {**launched[0].constexprs}["PACK"]


INTERPRETED = """
import json
import torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.ops.attention import triton_kernels
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell

known, line = registry.primitive("attention"), registry.implementation("attention", "triton.packed")
launched, results = [], {}
plain = triton_kernels.launch

def noted(kernel, *args, **options):
    launched.append(getattr(kernel, "__name__", str(kernel)))
    return plain(kernel, *args, **options)

triton_kernels.launch = noted
for case in cases_of(known):
    if case.name in NAMES:
        launched.clear()
        cell = check_cell(known, line, case, torch.float16, simulate=profile("h200"), times=1)
        results[case.name] = (cell.verdict, cell.reason, "attention_merge" in launched)
print(json.dumps(results))
"""
WHOLE = ("causal", "gqa", "bool_mask", "all_options", "dropout_causal")
DIVIDED = ("shared_divided", "shared_sinks", "shared_options")


@pytest.mark.slow
def test_they_are_within_their_bounds_interpreted_with_a_hoppers_tiles(interpreter: Interpreter) -> None:
    results = interpreter.run(f"NAMES = {(*WHOLE, *DIVIDED)!r}\n{INTERPRETED}")
    assert {verdict for verdict, _, _ in results.values()} == {"SIMULATED"}, results
    assert {name: merged for name, (_, _, merged) in results.items()} == {
        **dict.fromkeys(WHOLE, False),
        **dict.fromkeys(DIVIDED, True),
    }

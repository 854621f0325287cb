"""Attention over the blocks that a mask leaves: any mask is right, hidden blocks are not visited, and grids, memory and
choice follow from metadata alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.device_profiles import profile
from ferryman.dispatch import registry, select
from ferryman.ops.primitive import Case
from tests.interpreter import Interpreter

OP = registry.primitive("attention")
TILED, DECODE = "triton.masked", "triton.masked_decode"


def _seen(*shape: int, of: float = 0.6, seed: int = 3) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < of


def _position(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(queries).unsqueeze(1) + (keys - queries), torch.arange(keys)


def _left_padded(batch: int, queries: int, keys: int) -> Tensor:
    i, j = _position(queries, keys)
    first = torch.arange(batch).view(-1, 1, 1, 1) * keys // (batch + 1)
    return (j >= first) & (j <= i)


def _static_cache(batch: int, queries: int, keys: int, filled: int) -> Tensor:
    """The queries stand at the end of what is filled; nothing behind is seen."""
    i = torch.arange(queries).unsqueeze(1) + filled - queries
    return (torch.arange(keys) <= i).expand(batch, 1, queries, keys)


def _holes(batch: int, queries: int, keys: int) -> Tensor:
    """Whole blocks of keys that nobody sees, single keys, and rows that see nothing."""
    mask = _seen(batch, 1, queries, keys, of=0.95)
    mask[..., 40:110], mask[..., 130:131] = False, False
    mask[:, :, queries // 2 : queries // 2 + 3] = False
    mask[0, :, :, keys // 2 :] = True
    return mask


def _bias(*shape: int) -> Tensor:
    """Blocks of zeros, blocks of -inf, and numbers between."""
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    bias[..., : shape[-1] // 2], bias[..., shape[-1] - 50 :] = 0.0, -math.inf
    bias[..., shape[-2] // 3, :] = -math.inf
    return bias


# name: (batch, heads, key heads, queries, keys, head_dim, value width), mask, options
MaskCase = tuple[tuple[int, ...], Callable[[], Tensor], dict[str, Any]]
MASKS: dict[str, MaskCase] = {
    "random": ((2, 4, 2, 77, 201, 32, 32), lambda: _seen(2, 4, 77, 201), {}),
    "holes": ((2, 2, 1, 70, 200, 32, 48), lambda: _holes(2, 70, 200), {}),
    "holes, causal, window": ((2, 2, 1, 70, 200, 32, 32), lambda: _holes(2, 70, 200), {"causal": True, "window": 60}),
    "nothing is seen": ((1, 2, 2, 40, 70, 16, 16), lambda: torch.zeros(1, 1, 40, 70, dtype=torch.bool), {}),
    "all is seen": ((2, 2, 2, 40, 70, 16, 16), lambda: torch.ones(40, 70, dtype=torch.bool), {}),
    "of keys": ((3, 4, 2, 33, 130, 32, 32), lambda: _seen(3, 1, 1, 130), {"causal": True}),
    "of queries": ((2, 2, 2, 67, 64, 32, 32), lambda: _seen(1, 1, 67, 1), {}),
    "of heads": ((2, 4, 2, 35, 64, 32, 32), lambda: _seen(4, 1, 1, of=0.5), {}),
    "expanded": ((3, 4, 2, 35, 65, 32, 32), lambda: _seen(1, 1, 35, 65).expand(3, 4, 35, 65), {}),
    "turned": ((2, 2, 1, 65, 97, 32, 32), lambda: _seen(2, 1, 97, 130)[..., ::2].transpose(-1, -2), {}),
    "left padding": ((4, 4, 1, 97, 97, 64, 64), lambda: _left_padded(4, 97, 97), {}),
    "static cache": ((2, 4, 2, 33, 300, 32, 32), lambda: _static_cache(2, 33, 300, 120), {}),
    "bias": ((2, 4, 2, 40, 170, 32, 32), lambda: _bias(1, 4, 40, 170), {}),
    "bias of everything": (
        (2, 4, 2, 40, 170, 32, 32),
        lambda: _bias(2, 4, 40, 170),
        {"causal": True, "window": 90, "softcap": 9.0, "chunk": 64, "scale": -0.2},
    ),
    "ranges and sinks": (
        (3, 4, 2, 40, 170, 32, 32),
        lambda: _seen(3, 1, 40, 170, of=0.9),
        {
            "causal": True,
            "key_range": torch.tensor([[0, 170], [30, 111], [60, 60]], dtype=torch.int32),
            "sinks": torch.tensor([0.5, -1.0, 2.0, -math.inf]),
        },
    ),
    "dropout": (
        (2, 2, 1, 40, 130, 32, 32),
        lambda: _holes(2, 40, 130),
        {"dropout_p": 0.3, "dropout_seed": torch.tensor([5, -7])},
    ),
    "decode": ((3, 8, 2, 1, 300, 64, 64), lambda: _left_padded(3, 1, 300), {}),
    "decode, static cache": ((4, 4, 2, 1, 1200, 32, 32), lambda: _static_cache(4, 1, 1200, 130), {}),
    "decode, of heads": ((2, 8, 2, 2, 700, 32, 32), lambda: _seen(2, 8, 2, 700), {"causal": True}),
    "decode, nothing": ((1, 4, 2, 1, 900, 32, 32), lambda: torch.zeros(1, 1, 1, 900, dtype=torch.bool), {}),
    "decode, bias and sinks": ((2, 4, 2, 3, 800, 40, 24), lambda: _bias(2, 1, 3, 800), {"sinks": torch.randn(4)}),
}


def _arguments(name: str, dtype: torch.dtype) -> dict[str, Any]:
    (batch, heads, kv, queries, keys, dim, width), make, options = MASKS[name]
    draw = torch.Generator().manual_seed(11)
    sizes = {"q": (heads, queries, dim), "k": (kv, keys, dim), "v": (kv, keys, width)}
    given: dict[str, Any] = {n: torch.randn(batch, *s, generator=draw).to(dtype) for n, s in sizes.items()}
    mask = make()
    given["mask"] = mask if mask.dtype == torch.bool else mask.to(dtype)
    return given | {n: x.to(dtype) if n == "sinks" else x for n, x in options.items()}


def _positional(given: dict[str, Any]) -> tuple[Any, ...]:
    defaults = {"causal": False, "scale": None, "window": None, "softcap": 0.0, **OP.added}
    return tuple({**defaults, **given}[name] for name in OP.names)


def _lines(name: str) -> tuple[str, ...]:
    (_, heads, kv, queries, *_), _, _ = MASKS[name]
    return (TILED, DECODE) if queries * heads // kv <= 16 else (TILED,)


# ----------------------------------------------------------------------------------------------------------- the worker


def _judge(first: int) -> dict[str, str]:
    """Every fourth mask by all gates, in the dtypes that are interpreted in turns."""
    from ferryman.testing import assert_parity

    verdicts = {}
    for number, name in enumerate(MASKS):
        if number % 4 == first:
            for line in _lines(name):
                dtype = (torch.float16, torch.float32)[number // 4 % 2]
                (cell,) = assert_parity("attention", line, _arguments(name, dtype))
                verdicts[f"{name} {line}"] = cell.verdict
    return verdicts


def _masked_cases() -> list[Case]:
    from ferryman.porting.inputs.cases import cases_of

    return [case for case in cases_of(OP) if case.tier == "small" and case.args.get("mask") is not None]


def _tiles() -> dict[str, str]:
    """The op's own cases with a mask, with the tiles and the folded bounds of devices."""
    from ferryman.porting.judging.parity import check_cell

    verdicts = {}
    for case in _masked_cases():
        for device in ("mi300x", "h200"):
            one = registry.implementation("attention", TILED)
            cell = check_cell(OP, one, case, torch.float16, simulate=profile(device), times=1)
            verdicts[f"{case.name} {device}"] = cell.verdict
    return verdicts


def _unseen() -> dict[str, bool]:
    """A block that no row of a tile sees is not visited: NaN there reaches nobody."""
    unaffected = {}
    for line, queries, filled in ((TILED, 33, 64), (DECODE, 1, 192)):
        given = _arguments("decode, static cache", torch.float32)
        given["q"], given["mask"] = torch.randn(4, 4, queries, 32), _static_cache(4, queries, 1200, filled)
        launcher = registry.launcher(registry.implementation("attention", line))
        target = select.target_of(profile("cpu"))
        clean = launcher(*_positional(given), target)
        given["k"][:, :, filled:], given["v"][:, :, filled:] = math.nan, math.nan
        poisoned = launcher(*_positional(given), target)
        unaffected[line] = all(
            torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(clean, poisoned, strict=True)
        )
    return unaffected


def _listed() -> dict[str, bool]:
    """The lists are those that a loop over the definition's visible keys finds, in order."""
    from ferryman.ops.attention import masked_kernels

    kept: dict[str, Any] = {}
    lists_of = masked_kernels._lists

    def keeping(*args: Any) -> Any:
        kept["lists"] = lists_of(*args)
        return kept["lists"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked_kernels, "_lists", keeping)
        return _compared(kept)


def _compared(kept: dict[str, Any]) -> dict[str, bool]:
    from ferryman.ops.attention import masked_kernels
    from ferryman.ops.attention.scores import visible_in

    correct = {}
    target = select.target_of(profile("cpu"))
    for name in (name for name in MASKS if not name.startswith("decode")):
        given = _arguments(name, torch.float32)
        args = _positional(given)
        registry.launcher(registry.implementation("attention", TILED))(*args, target)
        lists, counts, of_batch, of_head = kept["lists"]
        (batch, heads, _, queries, keys, *_), mask = MASKS[name][0], given["mask"]
        structure = visible_in(
            given["q"],
            given["k"],
            given.get("causal", False),
            given.get("window"),
            given.get("key_range"),
            given.get("chunk"),
        )
        shape = (batch, heads, queries, keys)
        seen = torch.ones(shape, dtype=torch.bool) if structure is None else structure.expand(shape)
        plain = seen & mask if mask.dtype == torch.bool else seen & (mask == 0)
        seen = plain if mask.dtype == torch.bool else seen
        config = masked_kernels._tiles(target, torch.float32, 32, pack=False)
        right = True
        for b in range(batch):
            for h in range(heads):
                for tile in range(-(-queries // config.block_m)):
                    rows = slice(tile * config.block_m, (tile + 1) * config.block_m)
                    wanted: tuple[list[int], list[int]] = ([], [])
                    for block in range(-(-keys // config.block_n)):
                        columns = slice(block * config.block_n, (block + 1) * config.block_n)
                        full = columns.stop <= keys and bool(plain[b, h, rows, columns].all())
                        if bool(seen[b, h, rows, columns].any()):
                            wanted[full].append(block)
                    table = b * of_batch + h * of_head + tile
                    for kind in (0, 1):
                        got = lists[table, kind, : int(counts[table, kind])].tolist()
                        right = right and got == wanted[kind]
        correct[name] = right
    return correct


def _interpreted(interpreter: Interpreter, call: str) -> Any:
    return interpreter.run(f"import json; import {__name__} as mine; print(json.dumps(mine.{call}))", timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_any_mask_is_right(first: int, interpreter: Interpreter) -> None:
    verdicts = _interpreted(interpreter, f"_judge({first})")
    assert len(verdicts) == sum(len(_lines(name)) for name in list(MASKS)[first::4])
    assert set(verdicts.values()) == {"SIMULATED"}, verdicts


@pytest.mark.slow
def test_the_ops_cases_are_right_with_devices_tiles(interpreter: Interpreter) -> None:
    verdicts = _interpreted(interpreter, "_tiles()")
    assert len(verdicts) == 2 * len(_masked_cases()) >= 12 and set(verdicts.values()) == {"SIMULATED"}, verdicts


@pytest.mark.slow
def test_blocks_that_nobody_sees_are_not_visited(interpreter: Interpreter) -> None:
    assert _interpreted(interpreter, "_unseen()") == {TILED: True, DECODE: True}


@pytest.mark.slow
def test_lists_are_what_the_definition_leaves(interpreter: Interpreter) -> None:
    correct = _interpreted(interpreter, "_listed()")
    assert len(correct) >= 15 and all(correct.values()), correct


# -------------------------------------------------------------------------------------------------- choice and launches


def _on_meta(queries: int, mask: tuple[int, ...] | None) -> tuple[Any, ...]:
    q = torch.empty(2, 8, queries, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 512, 64, dtype=torch.bfloat16, device="meta")
    given = None if mask is None else torch.empty(mask, dtype=torch.bool, device="meta")
    return _positional({"q": q, "k": k, "v": k, "mask": given})


@pytest.mark.parametrize("device", ["h100", "h200", "a100", "mi300x"])
def test_it_is_chosen_where_it_is_asked_for_and_only_with_a_mask(device: str) -> None:
    here = profile(device)
    for queries, names in ((200, (TILED,)), (1, (TILED, DECODE))):
        args = _on_meta(queries, (2, 1, queries, 512))
        untuned = select.explain_rows(OP, args, here, select.State({}, False), absent=True)[1]
        assert untuned is not None and "masked" not in untuned.implementation.name
        assert not untuned.implementation.composed
        for name in names:
            asked = select.State({"attention": (name,)}, False)
            decision = select.explain_rows(OP, args, here, asked, absent=True)[1]
            assert decision is not None and decision.implementation.name == name
    view = select.View.of(OP, _on_meta(200, None), here)
    for name in (TILED, DECODE):
        reasons = select.refusals(registry.implementation("attention", name), view, here, absent=True)
        assert any("required: a mask" in why for why in reasons)


def test_launches_follow_from_metadata_alone() -> None:
    """On tensors without data: the grids and the kernels' forms are all known before a mask is read."""
    from ferryman.backends.triton import recorded
    from ferryman.ops.attention import masked_kernels

    target = select.target_of(profile("h100"))
    tiled = recorded([lambda: masked_kernels.attention(*_on_meta(200, (2, 1, 200, 512)), target)])
    assert [one.name for one in tiled] == ["attention_mask_states", "attention_mask_lists", "attention_masked"]
    decode = recorded([lambda: masked_kernels.attention_decode(*_on_meta(1, (2, 1, 1, 512)), target)])
    assert [one.name for one in decode] == [*(one.name for one in tiled), "attention_merge"]


def test_kernels_of_calls_without_a_mask_are_untouched() -> None:
    """The masked line has kernels of its own: no code that other lines reach is its, but what they had before."""
    source = Path(ops.__file__).parent / "attention"
    others = [source / f"{name}.py" for name in ("forward_kernels", "triton_kernels", "tile_kernels", "hopper_kernels")]
    for file in (*others, *source.glob("hopper_*_kernels.py")):
        assert "masked_kernels" not in file.read_text(encoding="utf-8")


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("device", "batch", "queries", "keys", "dim", "first"),
    [
        ("h100", 32, 1, 4096, 128, "triton.masked_decode"),
        ("h200", 32, 1, 4096, 64, "triton.masked_decode"),
        ("h200", 32, 1, 4096, 256, "triton.decode"),  # not timed
        ("h100", 1, 1, 128, 128, "triton.decode"),  # lists cost more than what they leave out
        ("h100", 8, 17, 4096, 128, "triton.masked"),
        ("h100", 8, 17, 4096, 256, "torch.cudnn"),
        ("h100", 8, 65, 4096, 128, "triton.hopper"),
        ("mi300x", 32, 1, 4096, 128, "triton.decode"),  # nothing was measured there
    ],
)
def test_few_queries_on_a_long_cache_go_by_lists_on_hopper(
    device: str, batch: int, queries: int, keys: int, dim: int, first: str
) -> None:
    q, k = _meta(batch, 32, queries, dim), _meta(batch, 8, keys, dim)
    hidden = _meta(batch, 1, queries, keys, dtype=torch.bool)
    explanation = ferryman.explain("attention", q, k, k, mask=hidden, device=device)
    assert explanation.chosen == first
    assert explanation.source == ("menu" if "masked" in first else "profile")
    bias = _meta(batch, 1, queries, keys)  # a float mask rarely hides
    assert "masked" not in str(ferryman.explain("attention", q, k, k, mask=bias, device=device).chosen)


@pytest.mark.parametrize(
    ("device", "queries", "first"),
    [("h100", 2048, "torch.cudnn_masked"), ("h100", 300, "torch.cudnn_masked"), ("mi300x", 2048, "triton.tiled")],
)
def test_the_backward_of_many_masked_queries_is_pytorchs_on_hopper(device: str, queries: int, first: str) -> None:
    q, k, lse = _meta(4, 32, queries, 128), _meta(4, 8, 2048, 128), _meta(4, 32, queries, dtype=torch.float32)
    hidden = _meta(4, 1, queries, 2048, dtype=torch.bool)
    given = (q, None, q, k, k, q, lse, False, None, None, 0.0, hidden)
    assert ferryman.explain("attention_backward", *given, device=device).chosen == first

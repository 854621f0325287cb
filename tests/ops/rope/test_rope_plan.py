"""How blocks of `rope_packs` go over the work: what `RopeWalk` of rope.cuh says, followed in Python."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from ferryman.backends.base import Target
from ferryman.backends.simt_offline import target_for
from ferryman.ops.rope import simt_kernels as rope

H200 = target_for("sm_90")
ONE = Target("sm_90", "nvidia", 32, 232_448, 1024, 1, 0)


def chosen(
    heads: tuple[int, int],
    batch: int,
    tokens: int,
    dim: int,
    target: Target = H200,
    way: str = rope._FORWARD,
    rotary: int | None = None,
    table: torch.dtype = torch.bfloat16,
) -> rope._Walk:
    sizes = (*heads, batch, tokens, dim, rotary or dim)
    return rope._choose(torch.bfloat16, table, False, True, True, way, sizes, target)


def form_of(walk: rope._Walk) -> tuple[int, int]:
    """Tokens and heads of a thread."""
    *_, tokens, heads = walk.unit.name.split("_")
    return int(tokens), int(heads)


@pytest.mark.parametrize("target", [H200, ONE], ids=["132", "1"])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize(("heads", "batch"), [((1, 0), 1), ((1, 1), 3), ((5, 2), 2), ((9, 9), 1), ((32, 8), 2)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 37, 130])
@pytest.mark.parametrize("way", [rope._FORWARD, rope._OVER])
def test_every_head_of_every_token_is_taken_once(
    heads: tuple[int, int], batch: int, tokens: int, dim: int, target: Target, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in (("_KEPT", 0), ("_STRETCH", 40), ("_STRETCH_OVER", 40), ("_FEW", 900), ("_SOME", 3000)):
        monkeypatch.setattr(rope, name, most * dim * 4 if "STRETCH" in name else most)  # several stretches
    rope._choose.cache_clear()
    walk = chosen(heads, batch, tokens, dim, target, way)
    rope._choose.cache_clear()
    lane_bits, token_bits, at_once, stretch, groups, *inverses = walk.arguments
    mine, of_thread = form_of(walk)
    assert walk.threads == at_once << lane_bits + token_bits and walk.threads <= rope._PACKS_THREADS
    assert walk.threads % target.wave == 0, "a shuffle names a whole wave"
    seen: Counter[tuple[int, int, int]] = Counter()
    for item in range(walk.blocks):
        heads_item = item * inverses[0] >> 32
        rest = heads_item * inverses[1] >> 32
        far = rest * inverses[2] >> 32
        b, group, tile = rest - far * batch, heads_item - rest * groups, far * stretch + item - heads_item * stretch
        assert 0 <= b < batch and 0 <= group < groups and 0 <= item - heads_item * stretch < stretch
        for slot, t, j in itertools.product(range(at_once << token_bits), range(mine), range(of_thread)):
            s = (tile * mine << token_bits) + (slot & ((1 << token_bits) - 1)) + (t << token_bits)
            head = group * of_thread * at_once + (slot >> token_bits) + j * at_once
            if s < tokens and head < sum(heads):
                seen[b, head, s] += 1
    assert set(seen.values()) == {1} and len(seen) == batch * sum(heads) * tokens


def test_quotients_are_right_up_to_the_last_block_of_what_is_taken() -> None:
    for heads, tokens, batch in itertools.product(
        ((1, 1), (32, 8), (64, 8), (7, 5)), (4096, 5003, 131_072), (1, 3, 64)
    ):
        walk = chosen(heads, batch, tokens, 128)
        if "packs" not in walk.unit.name:
            continue
        *_, stretch, groups, a, b, c = walk.arguments
        for n, inverse in ((stretch, a), (groups, b), (batch, c)):
            ends = {k * n + d for k in (1, 2, walk.blocks // n // 2, walk.blocks // n) for d in (-1, 0)}
            for value in (e for e in ends if 0 <= e < walk.blocks):
                assert value * inverse >> 32 == value // n


def test_what_a_launch_cannot_hold_goes_the_other_way() -> None:
    assert "packs" in chosen((32, 8), 4, 4096, 128).unit.name
    assert "packs" not in chosen((64, 64), 4096, 131_072, 128).unit.name, "2^32 blocks"
    assert "packs" not in chosen((1, 1), 1, 2**24, 128).unit.name, "a head of 2^31 elements"
    sizes = (32, 8, 4, 4096, 128, 128)
    for vector, narrow in ((False, True), (True, False)):  # off alignment; strides of 2^31
        walk = rope._choose(torch.bfloat16, torch.bfloat16, False, vector, narrow, rope._FORWARD, sizes, H200)
        assert "packs" not in walk.unit.name


def test_few_packs_are_spread_over_the_device_and_many_share_their_angles() -> None:
    assert form_of(chosen((32, 8), 32, 1, 128)) == form_of(chosen((32, 8), 4096, 1, 128)) == (1, 1), "one token"
    assert form_of(chosen((1, 1), 1, 461, 64)) == (1, 1)
    assert form_of(chosen((32, 8), 1, 512, 128)) == form_of(chosen((32, 8), 1, 512, 128, way=rope._OVER)) == (1, 2)
    for way, form in ((rope._FORWARD, (2, 2)), (rope._BACKWARD, (2, 2)), (rope._OVER, (1, 4))):
        walk = chosen((32, 8), 4, 4096, 128, way=way)
        assert form_of(walk) == form and walk.unit.overlapping


def test_over_its_input_a_block_takes_whole_tokens() -> None:
    for heads, dim, at_once in (((32, 8), 128, 10), ((9, 9), 128, 5), ((16, 16), 64, 8), ((4, 4), 64, 2)):
        walk = chosen(heads, 64, 4096, dim, way=rope._OVER)
        assert walk.arguments[2] == at_once and walk.arguments[4] == 1 and walk.threads >= 64


def test_the_angles_of_a_stretch_stay_in_l2() -> None:
    for table, tokens in ((torch.bfloat16, 4096), (torch.float32, 32_768), (torch.bfloat16, 131_072)):
        for way, most in ((rope._FORWARD, rope._STRETCH), (rope._OVER, rope._STRETCH_OVER)):
            walk = chosen((32, 8), 1, tokens, 128, table=table, way=way)
            _, token_bits, _, stretch, *_ = walk.arguments
            covered = (stretch * form_of(walk)[0] << token_bits) * 128 * table.itemsize * 2
            whole = way != rope._OVER and tokens * 128 * table.itemsize * 2 < rope._KEPT
            assert covered >= tokens * 128 * table.itemsize * 2 if whole else covered <= most * 1.1


def test_units_cover_every_combination_of_dtypes() -> None:
    names, nvidia = ([u.name for u in rope.units(target_for(arch))] for arch in ("gfx942", "sm_80"))
    packed = {"rope": 6, "rope_over": 6, "rope_backward": 4}  # on NVIDIA: they spill on AMD
    for x, table in itertools.product(("f32", "f16", "bf16"), repeat=2):
        for way, forms in packed.items():
            assert sum(n.startswith(f"{way}_{x}_{table}_") for n in names) == 4
            packs = [sum(n.startswith(f"{way}_packs_{x}_{table}_") for n in of) for of in (names, nvidia)]
            assert packs == [0, forms]

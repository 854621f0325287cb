"""How the tiles of attention's backward pass on Hopper are dealt to programs."""

from __future__ import annotations

import pytest

from ferryman.ops.attention.hopper_backward_kernels import _last_end, deal

UNITS, L2 = 132, 60 << 20
CAUSAL = [True, False]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim", [64, 128])
def test_few_tiles_share_the_query_heads_of_a_group(dim: int, causal: bool) -> None:
    assert deal(1, 1, 8, 256, 256, dim, causal, UNITS, L2)[0] == 8  # 2 tiles for 132 programs
    assert deal(1, 1, 1, 256, 256, dim, causal, UNITS, L2)[0] == 1  # nobody to share with
    assert deal(64, 8, 4, 4096, 4096, dim, causal, UNITS, L2)[0] == 1  # 16384 tiles end evenly as they are


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("group", [1, 4, 6, 7])
@pytest.mark.parametrize(("queries", "keys"), [(128, 1), (1000, 333), (300, 2000), (5000, 5000)])
def test_any_shape_has_whole_shares_that_end_no_later_than_one(
    group: int, queries: int, keys: int, causal: bool
) -> None:
    shares, together = deal(2, 3, group, queries, keys, 128, causal, UNITS, L2)
    assert group % shares == 0 and 1 <= together <= 6
    one, chosen = (_last_end(6, group, n, together, queries, keys, 128, causal, UNITS) for n in (1, shares))
    assert chosen <= one


@pytest.mark.parametrize(("group", "keys"), [(16, 65_536), (128, 65_536), (128, 2048), (8, 1 << 20)])
def test_parts_of_long_sequences_stay_small(group: int, keys: int) -> None:
    shares, _ = deal(1, 1, group, 4096, keys, 128, True, UNITS, L2)
    assert shares == 1 or shares * keys * 128 * 2 * 4 <= 512 << 20
    assert shares > 1 or keys == 1 << 20


def test_a_program_takes_the_next_tile_as_it_is_done() -> None:
    """Four full tiles of 8 turns and 2 to begin and end: one program, two, and one for each."""
    ends = [_last_end(1, 1, 1, 1, 512, 512, 128, False, units) for units in (1, 2, 4, 9)]
    assert ends == [40.0, 20.0, 10.0, 10.0]
    assert _last_end(1, 1, 1, 1, 512, 512, 128, True, 4) == 10.0  # the first keys are seen by all queries
    assert _last_end(1, 1, 1, 1, 512, 512, 128, True, 1) == 8 + 6 + 4 + 2 + 4 * 2


def test_heads_are_together_as_far_as_the_l2_holds_them() -> None:
    most = [deal(8, 8, 4, s, s, 128, True, UNITS, L2)[1] for s in (512, 2048, 8192, 65_536)]
    assert most == sorted(most, reverse=True) and most[0] > 16 and most[-1] == 1
    assert deal(1, 8, 4, 4096, 4096, 128, True, UNITS, 0)[1] == 4  # an L2 that nobody measured

"""What is drawn by date: every test is in one share, and a share that is none is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import keep_share


def test_every_test_is_in_one_share() -> None:
    made: list[Any] = [SimpleNamespace(nodeid=f"tests/unit/test_x.py::test_{i}") for i in range(400)]
    shares = []
    for turn in range(4):
        items = list(made)
        keep_share(items, f"{turn}/4")
        shares.append(items)
    assert sorted(i.nodeid for share in shares for i in share) == sorted(i.nodeid for i in made)
    assert all(60 < len(share) < 140 for share in shares)


@pytest.mark.parametrize("share", ["4/4", "-1/4"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="required: K/N"):
        keep_share([], share)

"""Philox-4x32-10 in Python's own integers, and what attention's docstring makes of it: one pair after another."""

from __future__ import annotations

WORD = 2**32


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (second // WORD) ^ counter[1] ^ key[0],
            second % WORD,
            (first // WORD) ^ counter[3] ^ key[1],
            first % WORD,
        )
        key = (key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD
    return counter


def is_dropped(dropout_p: float, seed: int, head: int, query: int, key: int) -> bool:
    words = philox((key // 4, query, head, 0), (seed % WORD, seed // WORD % WORD))
    return words[key % 4] < int(dropout_p * WORD)

"""Calls of these SIMT launchers, every kind of plan, dtype, layout and special value: tests/unit/test_simt_kernels.py
judges each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ferryman.ops.rope import simt_kernels as rope
from tests.unit.simt_cases import BF16, F16, F32, Case, Inputs, Launch, misaligned, random


def _rope_cases() -> Iterator[Case]:
    def make(
        b: int,
        hq: int,
        hk: int,
        s: int,
        d: int,
        r: int,
        x: torch.dtype,
        c: torch.dtype,
        tables: int,
        interleaved: bool,
        layout: str,
    ) -> Inputs:
        q, k = random(b, s, hq, d, dtype=x), random(b, s, hk, d, dtype=x, scale=2.0)
        if layout == "heads_inside":  # transformers: (B, S, H, D) storage, (B, H, S, D) view
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        elif layout == "fused":
            q, k = torch.cat((q, k), 2).transpose(1, 2).split((hq, hk), 1)
        elif layout == "misaligned":
            q, k = misaligned(q.transpose(1, 2).contiguous()), k.transpose(1, 2).contiguous()
        else:
            q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        return q, k, random(tables, s, r, dtype=c), random(tables, s, r, dtype=c, scale=0.7), interleaved

    for interleaved in (False, True):
        for x, c in itertools.product((F32, F16, BF16), (F32, F16, BF16)):
            args = (2, 4, 2, 3, 64, 64, x, c, 1, interleaved, "heads_inside")
            yield Case(
                f"rope_{x}_{c}_{interleaved}".replace("torch.", ""),
                rope.rope,
                lambda a=args: make(*a),
                "_4_" if x == F32 else "_8_",
            )
        shapes = {
            "decode": (1, 32, 8, 1, 128, 128, 1),
            "d80": (2, 3, 1, 5, 80, 80, 2),
            "partial": (1, 2, 2, 7, 96, 32, 1),
            "odd_rest": (1, 2, 1, 3, 67, 32, 1),
            "tiny": (1, 1, 1, 40, 2, 2, 1),
            "d600": (1, 2, 1, 2, 1200, 1200, 1),
            "half_off": (1, 2, 1, 3, 64, 20, 1),
            "partial_packs": (2, 9, 2, 19, 128, 64, 1),
        }
        for name, (b, hq, hk, s, d, r, tables) in shapes.items():
            for layout in ("contiguous", "heads_inside", "fused", "misaligned"):
                args = (b, hq, hk, s, d, r, BF16, F32, tables, interleaved, layout)
                yield Case(
                    f"rope_{name}_{layout}_{interleaved}",
                    rope.rope,
                    lambda a=args: make(*a),
                    "_1_" if layout == "misaligned" else "",
                )
                yield Case(
                    f"rope_backward_{name}_{layout}_{interleaved}",
                    rope.rope_backward,
                    lambda a=args: make(*a),
                    "_1_" if layout == "misaligned" else "",
                )
        # heads and tokens that no block of them divides: 9 are 5 and 4, 37 tokens two blocks of 16 and one of 5
        for kernel in (rope.rope, rope.rope_backward):
            for x in (F32, BF16):
                args = (2, 9, 3, 37, 128, 128, x, x, 2, interleaved, "heads_inside")
                yield Case(
                    f"{kernel.__name__}_shares_{x}_{interleaved}".replace("torch.", ""),
                    kernel,
                    lambda a=args: make(*a),
                    "packs",
                )


CASES = list(_rope_cases())


def launches(dtype: torch.dtype) -> Iterator[Launch]:
    q, table = torch.zeros(2, 4, 3, 64, dtype=dtype), torch.zeros(1, 3, 64, dtype=dtype)
    for interleaved in (False, True):
        yield rope.rope, (q, q[:, :2], table, table, interleaved)


def compiled(x: str) -> Iterator[str]:
    """How names of kernels for a dtype begin."""
    yield from (f"{op}_{x}_" for op in ("rope", "rope_backward"))

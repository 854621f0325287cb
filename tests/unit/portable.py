"""Models written by hand, in nobody's library, for tests of `ferryman.port`; and factories of good and bad kinds."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Vault(nn.Module):
    """A root-mean-square norm under another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.copper = nn.Parameter(torch.ones(width))

    def forward(self, tide: Tensor) -> Tensor:
        wide = tide.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.copper * wide.to(tide.dtype)


class Forge(nn.Module):
    """A gated block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.silu(self.left(x)) * self.right(x))


class Choir(nn.Module):
    """Causal attention over heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.all, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.all(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before, self.mix = Vault(width), Choir(width, 4)
        self.between, self.spread = nn.LayerNorm(width), Forge(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.before(x))
        return x + self.spread(self.between(x))


class Scores(nn.Module):
    """A plain classifier, with attention composed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.norm, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2) / math.sqrt(16), -1)
        return self.out(self.norm(weights @ x))


class Twice(nn.Module):
    """One block that a pass runs three times, and one that it does not run."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.step, self.spare = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.step(self.norm(x))
        return x


def decoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(), (torch.randn(2, 7, 32),)


def alone() -> nn.Module:
    return Scores()


def with_a_tensor() -> tuple[nn.Module, Tensor]:
    return Scores(), torch.randn(2, 5, 16)


def named() -> tuple[nn.Module, dict[str, Tensor]]:
    return Scores(), {"x": torch.randn(2, 5, 16)}


def nothing() -> nn.Module:
    return nn.Sequential(nn.ReLU6())


def raises() -> nn.Module:
    raise RuntimeError("no weights here")


def number() -> int:
    return 3

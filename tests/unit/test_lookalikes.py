"""Nothing is replaced by something else, and a right module in disguise is recognised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model.classes import is_ported
from ferryman.porting.model.recognise import Refusal, Role, role_of
from tests.unit.lookalikes import load, specimens

WIDTH = 24


def _wrong(count: int, seed: int, folder: Path) -> list[str]:
    """Look-alikes that were taken for the op, or were not named."""
    given = specimens(count, seed, right=False)
    missed = []
    for specimen, home in zip(given, load(given, folder), strict=True):
        module = getattr(home, specimen.name)(WIDTH)
        found = role_of(module)
        if isinstance(found, Role):
            # a guard may keep what is wrong away: then every input must still give the module's own result
            if any(not _unchanged(module, x) for x in _shows()):
                missed.append(f"{specimen.op}, {specimen.fault}: {found.expression}\n{specimen.source}")
            continue
        if not isinstance(found, Refusal) or not found.reason:
            missed.append(f"{specimen.op}, {specimen.fault}: not named\n{specimen.source}")
    return missed


def _shows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(80, WIDTH, generator=generator)
    return [x, x[:3], x * 1e4, x.abs() * 1e7, x * 1e-3]


def _unchanged(module: nn.Module, x: torch.Tensor) -> bool:
    with torch.no_grad():
        results = []
        for training in (False, True):
            module.train(training)
            before = module(x)
            ferryman.port(module)
            after = module(x)
            ferryman.unport(module)
            limit = 64 * torch.finfo(x.dtype).eps * float(before.abs().max())  # sums of 24 terms in another order
            results.append(before.shape == after.shape and float((before - after).abs().max()) <= limit)
    return all(results)


def _recognised(count: int, seed: int, folder: Path) -> list[str]:
    """Right modules that were not recognised, with the reason."""
    given = specimens(count, seed, right=True)
    missed = []
    for specimen, home in zip(given, load(given, folder), strict=True):
        module = getattr(home, specimen.name)(WIDTH)
        found = role_of(module)
        if not isinstance(found, Role) or found.op != specimen.op:
            missed.append(f"{specimen.op}: {found}\n{specimen.source}")
        elif any(not _unchanged(module, x) for x in _shows()[:1]):
            missed.append(f"{specimen.op}: another result\n{specimen.source}")
    return missed


def test_a_sample_of_look_alikes_is_left_and_named(tmp_path: Path) -> None:
    missed = _wrong(62, 0, tmp_path)
    assert not missed, "\n".join(missed)


def test_a_sample_in_disguise_is_ported(tmp_path: Path) -> None:
    missed = _recognised(40, 1, tmp_path)
    assert len(missed) <= 2, "\n".join(missed)


@pytest.mark.slow
def test_500_look_alikes(tmp_path: Path) -> None:
    missed = _wrong(520, 2, tmp_path)
    assert not missed, "\n".join(missed[:5])


@pytest.mark.slow
def test_500_in_disguise(tmp_path: Path) -> None:
    missed = _recognised(520, 3, tmp_path)
    assert len(missed) <= 26, "\n".join(missed[:5])


def test_a_module_that_is_left_keeps_its_class() -> None:
    module = nn.Sequential(nn.ReLU6(), nn.Embedding(3, 4, max_norm=1.0))
    with pytest.raises(PortError, match="nothing in Sequential"):
        ferryman.port(module)
    assert not any(is_ported(m) for m in module.modules())

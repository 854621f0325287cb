"""Nothing is replaced by something else, and a right module in disguise is recognised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model import blocks
from ferryman.porting.model.classes import is_ported
from ferryman.porting.model.recognise import Refusal, Role, role_of
from tests.unit.lookalikes import Specimen, load, specimens
from tests.unit.lookalikes_whole import EXPRESSIBLE, KINDS, wholes

WIDTH = 24


def _wrong(count: int, seed: int, folder: Path) -> list[str]:
    """Look-alikes that were taken for the op, or were not named."""
    given = specimens(count, seed, right=False)
    missed = []
    for specimen, home in zip(given, load(given, folder), strict=True):
        module = getattr(home, specimen.name)(WIDTH)
        recognition = role_of(module)
        if isinstance(recognition, Role):
            # a guard may keep what is wrong away: then every input must still give the module's own result
            if any(not _unchanged(module, x) for x in _shows()):
                missed.append(f"{specimen.op}, {specimen.fault}: {recognition.expression}\n{specimen.source}")
            continue
        if not isinstance(recognition, Refusal) or not recognition.reason:
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
        recognition = role_of(module)
        if not isinstance(recognition, Role) or recognition.op != specimen.op:
            missed.append(f"{specimen.op}: {recognition}\n{specimen.source}")
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


def _passed(module: nn.Module, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The result and the gradients, 0 where there is none."""
    inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    output = module(*inputs)
    leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    slopes = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)
    return [output.detach(), *(torch.zeros_like(x) if s is None else s for s, x in zip(slopes, leaves, strict=True))]


def _whole(specimen: Specimen, module: nn.Module) -> tuple[bool, bool]:
    """(whether porting leaves results and gradients as they are, whether the op that it resembles was called)."""
    same, called = True, False
    for training in (False, True):
        module.train(training)
        inputs = list(KINDS[specimen.op].inputs(module, WIDTH))
        before = [_passed(module, given) for given in inputs]
        try:
            ferryman.port(module)
        except PortError:
            continue
        with ferryman.trace() as traced:
            after = [_passed(module, given) for given in inputs]
        ferryman.unport(module)
        called = called or any(op in KINDS[specimen.op].ops for op, _ in traced.calls)
        # sums of 160 tokens of sums of 32 terms, in another order
        limit = 2048 * torch.finfo(torch.float32).eps
        for mine, theirs in zip(after, before, strict=True):
            pairs = zip(mine, theirs, strict=True)
            same = same and all(float((a - b).abs().max()) <= limit * float(b.abs().max()) for a, b in pairs)
    return same, called


def _wrongly(count: int, seed: int, folder: Path) -> list[str]:
    """Whole look-alikes that compute something else once they are ported, or call the op that they resemble."""
    given, missed = wholes(count, seed, right=False), []
    for specimen, home in zip(given, load(given, folder), strict=True):
        torch.manual_seed(1)
        module = getattr(home, specimen.name)(WIDTH)
        same, called = _whole(specimen, module)
        if not same or (called and specimen.fault not in EXPRESSIBLE):
            missed.append(f"{specimen.op}, {specimen.fault}: same {same}, served {called}\n{specimen.source}")
        refusal = blocks.role_of(module) if KINDS[specimen.op].block else None
        if KINDS[specimen.op].block and not (isinstance(refusal, Refusal) and refusal.reason):
            missed.append(f"{specimen.op}, {specimen.fault}: not named\n{specimen.source}")
    return missed


def _unserved(count: int, seed: int, folder: Path) -> list[str]:
    given, missed = wholes(count, seed, right=True), []
    for specimen, home in zip(given, load(given, folder), strict=True):
        torch.manual_seed(1)
        same, called = _whole(specimen, getattr(home, specimen.name)(WIDTH))
        if not (same and called):
            missed.append(f"{specimen.op}: same {same}, served {called}\n{specimen.source}")
    return missed


def test_a_few_whole_look_alikes_and_right_ones(tmp_path: Path) -> None:
    assert not _wrongly(3, 1, tmp_path) and not _unserved(3, 2, tmp_path / "right")


@pytest.mark.slow
def test_whole_look_alikes(tmp_path: Path) -> None:
    missed = _wrongly(128, 4, tmp_path)
    assert not missed, "\n".join(missed[:5])


@pytest.mark.slow
def test_whole_modules_in_disguise(tmp_path: Path) -> None:
    missed = _unserved(128, 5, tmp_path)
    assert len(missed) <= 6, "\n".join(missed[:5])


def test_a_module_that_is_left_keeps_its_class() -> None:
    module = nn.Sequential(nn.ReLU6(), nn.Embedding(3, 4, max_norm=1.0))
    with pytest.raises(PortError, match="nothing in Sequential"):
        ferryman.port(module)
    assert not any(is_ported(m) for m in module.modules())

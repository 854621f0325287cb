"""The loss that a model of transformers holds is served where it is proven, and as it was elsewhere."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman

transformers = pytest.importorskip("transformers")

from ferryman.integrations import transformers_losses  # noqa: E402 - transformers first


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=57))


def tokens(ignored: bool = True) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 57, (2, 11), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100 if ignored else labels[0, :4]
    return ids, labels


def passed(model: nn.Module, **more: Any) -> tuple[Tensor, list[Tensor], list[str]]:
    """(loss, gradients, ops that were called)."""
    ids, labels = tokens()
    model.zero_grad()
    with ferryman.trace() as trace:
        loss = model(input_ids=ids, labels=labels, **more).loss
        loss.backward()
    return (
        loss.detach(),
        [p.grad.clone() for p in model.parameters() if p.grad is not None],
        [op for op, _ in trace.calls],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(9)}])
def test_a_ported_models_loss_is_ours(more: dict[str, Any], dtype: torch.dtype) -> None:
    model, twin = llama().to(dtype), llama().to(dtype)
    report = ferryman.port(model)
    assert "cross_entropy" in report.maybe() and "cross_entropy" not in report.calls()
    loss, gradients, called = passed(model, **more)
    wanted, slopes, _ = passed(twin, **more)
    assert "cross_entropy" in called and "cross_entropy_backward" in called
    room = 1e-5 if dtype == torch.float32 else 0.02
    assert loss.dtype == wanted.dtype == torch.float32 and (loss - wanted).abs() <= room * wanted
    for mine, slope in zip(gradients, slopes, strict=True):
        assert (mine.double() - slope.double()).norm() <= room * slope.double().norm() + 1e-12
    ferryman.unport(model)
    assert "_loss_function" not in model.__dict__ and "cross_entropy" not in passed(model)[2]


def test_rows_that_do_not_count_give_what_they_gave() -> None:
    ids, labels = tokens()
    labels = torch.full_like(labels, -100)
    model, twin = llama(), llama()
    ferryman.port(model)
    for more in ({}, {"num_items_in_batch": 4}):
        loss, wanted = (m(input_ids=ids, labels=labels, **more).loss for m in (model, twin))
        assert torch.equal(loss.isnan(), wanted.isnan()) and (
            more == {} or float(loss.detach()) == float(wanted.detach()) == 0
        )


def test_what_the_proof_did_not_draw_is_the_function_before() -> None:
    seen: list[dict[str, Any]] = []

    def before(logits: Tensor, labels: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.append(more)
        return logits.sum()

    loss = transformers_losses.TokenLoss(before, True)
    logits, labels = torch.randn(2, 4, 5), torch.zeros(2, 4, dtype=torch.int64)
    loss(logits, labels, 5, weight=torch.ones(5))
    loss(logits.double(), labels, 5)
    loss(logits, labels.int(), 5)
    loss(logits, labels[:1], 5)
    loss(logits.reshape(2, 2, 10), labels, 5)
    loss(logits[:0], labels[:0], 5)
    assert len(seen) == 6 and [*seen[0]] == ["weight"]
    transformers_losses.TokenLoss(before, False)(logits, labels, 5, shift_labels=labels)
    assert len(seen) == 7 and [*seen[6]] == ["shift_labels"]
    with ferryman.trace() as trace:
        loss(logits, labels, 5)
    assert len(seen) == 7 and [op for op, _ in trace.calls] == ["cross_entropy"]


def test_copies_and_files_of_a_ported_model_keep_it() -> None:
    model = llama()
    ferryman.port(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss, _, called = passed(other)
        assert "cross_entropy" in called and torch.equal(loss, passed(model)[0])
        ferryman.unport(other)
        assert "_loss_function" not in other.__dict__


def smoothed(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100
) -> Tensor:
    labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].reshape(-1)
    logits = logits.float().view(-1, vocab_size)
    return functional.cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=1e-3)


def with_z(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100
) -> Tensor:
    plain = transformers.loss.loss_utils.ForMaskedLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index)
    return plain + 1e-4 * logits.float().logsumexp(-1).square().mean()


def of_every_row(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100
) -> Tensor:
    plain = functional.cross_entropy(
        logits.float().view(-1, vocab_size), labels.reshape(-1), ignore_index=ignore_index, reduction="sum"
    )
    return plain / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def two_ahead(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100
) -> Tensor:
    labels = functional.pad(labels, (0, 2), value=ignore_index)[..., 2:].reshape(-1)
    return functional.cross_entropy(logits.float().view(-1, vocab_size), labels, ignore_index=ignore_index)


def in_its_dtype(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100
) -> Tensor:
    reduction = "mean" if num_items_in_batch is None else "sum"
    logits = logits.view(-1, vocab_size)
    loss = functional.cross_entropy(logits, labels.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def one_item(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100
) -> Tensor:
    return transformers.loss.loss_utils.ForMaskedLMLoss(logits, labels, vocab_size, None, ignore_index)


@pytest.mark.parametrize("alike", [smoothed, with_z, of_every_row, two_ahead, in_its_dtype, one_item])
def test_a_loss_that_only_looks_alike_stays(alike: Any) -> None:
    assert transformers_losses.proven(alike) is None
    model, twin = llama(), llama()
    model.loss_function = twin.loss_function = alike
    ferryman.port(model)
    assert model.loss_function is alike
    loss, _, called = passed(model)
    assert "cross_entropy" not in called and (loss - passed(twin)[0]).abs() <= 1e-5
    ferryman.unport(model)
    assert model.loss_function is alike


def test_a_callable_object_stays() -> None:
    """It may have numbers that change, and may be no key of a dictionary."""

    class Scaled:
        __hash__ = None  # type: ignore[assignment]
        scale = 1.0

        def __call__(
            self, logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100
        ) -> Tensor:
            masked = transformers.loss.loss_utils.ForMaskedLMLoss
            return self.scale * masked(logits, labels, vocab_size, num_items_in_batch, ignore_index)

    model, loss = llama(), Scaled()
    model.loss_function = loss
    ferryman.port(model)
    loss.scale = 3.0
    assert model.loss_function is loss and "cross_entropy" not in passed(model)[2]


def test_a_loss_that_is_set_before_or_after_is_kept() -> None:
    masked = transformers.loss.loss_utils.ForMaskedLMLoss
    assert transformers_losses.proven(masked) is False
    model = llama()
    model.loss_function = masked
    ferryman.port(model)
    assert isinstance(model.loss_function, transformers_losses.TokenLoss) and not model.loss_function.shifted
    ferryman.unport(model)
    assert model.loss_function is masked
    ferryman.port(model)
    model.loss_function = with_z
    ferryman.unport(model)
    assert model.loss_function is with_z

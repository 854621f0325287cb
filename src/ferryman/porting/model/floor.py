"""The floor of a model check: what moving the inputs by one unit in the last place does to the unported model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ferryman.porting.model import measure
from ferryman.porting.model.results import AMPLITUDE, SEEDS, Measure, limited


class Floor:
    """What one ulp does to the unported model, in every measure."""

    def __init__(
        self,
        model: Any,
        prompt: Tensor,
        steps: int,
        free: measure.Observation,
        alone: measure.Observation,
        reference: dict[str, Tensor] | None,
    ) -> None:
        self.accumulated = [0.0] * len(free.outputs)
        self.alone = [0.0] * len(free.outputs)
        self.worst = [0.0] * len(free.outputs)
        biases: list[list[float]] = []
        self.kl, self.disagreements, self.largest = 0.0, 0, 0.0
        self.slopes: dict[str, float] = {}
        self.reference = reference
        for seed in SEEDS:
            seen = measure.observe(model, prompt, seed=seed)
            fed = measure.observe(model, prompt, feed=free.inputs, seed=seed)
            self.accumulated = _larger(measure.relative, self.accumulated, seen.outputs, free.outputs)
            self.alone = _larger(measure.relative, self.alone, fed.outputs, alone.outputs)
            self.worst = _larger(measure.worst_row, self.worst, fed.outputs, alone.outputs)
            biases.append([measure.slope(f, w) for f, w in zip(fed.outputs, alone.outputs, strict=True)])
            distance = measure.logit_distance(free.logits, seen.logits)
            self.kl = max(self.kl, distance.kl)
            self.disagreements = max(self.disagreements, distance.disagreements)
            self.largest = max(self.largest, distance.largest)
            if reference is not None:
                slopes = measure.gradients(model, prompt, seed=seed)
                for group, error in measure.gradient_errors(reference, slopes).items():
                    self.slopes[group] = max(self.slopes.get(group, 0.0), error)
        # Three draws alone would underestimate it now and then; independent errors give the other.
        self.bias = [
            max(math.sqrt(sum(b * b for b in drawn) / len(drawn)), error / math.sqrt(out.numel()))
            for drawn, error, out in zip(zip(*biases, strict=True), self.alone, alone.outputs, strict=True)
        ]
        self.spoken = measure.generate(model, prompt, steps, seed=SEEDS[0])

    def logit_measures(
        self, distance: measure.LogitDistance, tokens: int, own: measure.LogitDistance | None = None
    ) -> list[Measure]:
        """``own``: the unported model's distance from what is compared with, if that is not the unported model."""
        baseline = own or measure.LogitDistance(0.0, 0, 0.0)
        differing = max(self.disagreements, baseline.disagreements)
        expected = AMPLITUDE * differing
        allowed = expected + 3 * math.sqrt(expected + 1)
        return [
            limited("KL divergence", distance.kl, max(self.kl, baseline.kl), AMPLITUDE**2),
            Measure(
                name="top-1 disagreement",
                value=distance.disagreements / tokens,
                floor=differing / tokens,
                limit=allowed / tokens,
                ok=distance.disagreements <= allowed,
            ),
            limited("largest logit change", distance.largest, max(self.largest, baseline.largest)),
        ]

    def gradient_measures(self, slopes: dict[str, Tensor]) -> list[Measure]:
        if self.reference is None:
            return []
        errors = measure.gradient_errors(self.reference, slopes)
        return [limited(group, error, self.slopes[group]) for group, error in errors.items()]


def _larger(
    error: Callable[[Tensor, Tensor], float], before: list[float], actual: list[Tensor], wanted: list[Tensor]
) -> list[float]:
    return [max(b, error(f, w)) for b, f, w in zip(before, actual, wanted, strict=True)]

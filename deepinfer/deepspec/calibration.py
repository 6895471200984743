"""Temperatures of a trained draft: of its confidences by position (DSpark, section 3.2), and of what it draws from.

Scheduling uses survival, the product of the confidences up to a draft. One temperature a position is fitted from left
to right: each makes the survival of its position, given the temperatures before it, most likely. It divides the raw
score, so the order of drafts of one position stays as it was.

The draft temperature divides the logits that drafts are drawn from. Training may leave them too flat or too peaked at
temperature 1: what greedy drafts live on says little about it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.deepspec.acceptance import Judged
from deepinfer.models.draft_calibration import DraftCalibration

NUM_BINS = 15
DRAFT_HEATS = tuple(2 ** (k / 4) for k in range(-8, 5))
COARSE = torch.logspace(-1, 1.3, 70, dtype=torch.float64)


@dataclass(frozen=True)
class Observations:
    """M blocks whose B drafts could all be judged."""

    scores: Tensor  # float64 [M, B]
    survived: Tensor  # float64 [M, B], 1 where all drafts up to this one were accepted

    @classmethod
    def of(cls, judged: list[Judged]) -> Observations:
        """Every position of every answer, not only those at which rounds started.

        Raises:
            ValueError: the draft has no confidence head, or no block is complete.
        """
        scores, survived = [], []
        for one in judged:
            if one.scores is None:
                raise ValueError("draft: it has no confidence head, allowed: an algorithm with one (dspark)")
            whole = one.remaining >= one.accepted.shape[1]
            scores.append(one.scores[whole].double())
            survived.append(one.accepted[whole].long().cumprod(1).double())
        if not sum(map(len, scores)):
            raise ValueError("answers: none is long enough for a whole block")
        return cls(torch.cat(scores), torch.cat(survived))


def survival(scores: Tensor, temperatures: list[float]) -> Tensor:
    """[M, B]: product of the calibrated confidences up to each draft."""
    heat = torch.tensor(temperatures, dtype=scores.dtype)
    return torch.sigmoid(scores / heat).cumprod(1)


def _likelihood(probability: Tensor, happened: Tensor) -> float:
    p = probability.clamp(1e-6, 1 - 1e-6)
    return float((happened * p.log() + (1 - happened) * (1 - p).log()).mean())


def fit_temperatures(observations: Observations) -> list[float]:
    """One temperature a position, by a coarse and a fine search over 0.1 to 20."""
    behind = torch.ones(len(observations.scores), dtype=torch.float64)
    temperatures = []
    for k in range(observations.scores.shape[1]):
        score, happened = observations.scores[:, k], observations.survived[:, k]

        def quality(heat: float, score: Tensor = score, happened: Tensor = happened, behind: Tensor = behind) -> float:
            return _likelihood(behind * torch.sigmoid(score / heat), happened)

        best = max(COARSE.tolist(), key=quality)
        best = max((best * f for f in torch.linspace(0.94, 1.06, 25, dtype=torch.float64).tolist()), key=quality)
        temperatures.append(round(best, 4))
        behind = behind * torch.sigmoid(score / best)
    return temperatures


def drawn_lengths(judged: list[Judged]) -> Tensor | None:
    """float64 [H]: mean accepted length, bonus included, of drafts drawn at each of the draft temperatures that
    `judged` was asked for, over every position with a whole block; None if no answer was drawn."""
    drawn = [one.overlaps[one.remaining >= one.overlaps.shape[1]] for one in judged if one.overlaps is not None]
    if not sum(map(len, drawn)):
        return None
    return 1 + torch.cat(drawn).double().cumprod(1).sum(1).mean(0)


@dataclass(frozen=True)
class Fit:
    """What was fitted on every other answer, and how good it is on the rest."""

    calibration: DraftCalibration
    num_blocks: int  # of the rest
    curves: dict[str, tuple[Tensor, Tensor]]  # "as trained" and "calibrated": `survival`, and what survived
    drawn: dict[str, float] | None  # likewise: `drawn_lengths`; None: no answer was drawn

    @property
    def errors(self) -> dict[str, float]:
        """Expected calibration error of each curve."""
        return {name: expected_calibration_error(*curve) for name, curve in self.curves.items()}


def fit(judged: list[Judged]) -> Fit:
    """Both kinds of temperatures, from answers that were judged with DRAFT_HEATS."""
    fitted, held = (Observations.of(judged[start::2]) for start in (0, 1))
    temperatures = fit_temperatures(fitted)
    lengths, held_lengths = (drawn_lengths(judged[start::2]) for start in (0, 1))
    plain = DRAFT_HEATS.index(1.0)
    best = plain if lengths is None else int(lengths.argmax())
    as_trained = [1.0] * held.scores.shape[1]
    curves = {
        name: (survival(held.scores, heat), held.survived)
        for name, heat in (("as trained", as_trained), ("calibrated", temperatures))
    }
    drawn = None
    if held_lengths is not None:
        drawn = {"as trained": float(held_lengths[plain]), "calibrated": float(held_lengths[best])}
    return Fit(DraftCalibration(temperatures, DRAFT_HEATS[best]), len(held.scores), curves, drawn)


def expected_calibration_error(probability: Tensor, happened: Tensor) -> float:
    """Mean over bins of equal width of |mean probability - share that happened|, weighted by their counts."""
    error = 0.0
    for _, predicted, share, count in reliability(probability, happened):
        error += abs(predicted - share) * count / probability.numel()
    return error


def reliability(probability: Tensor, happened: Tensor) -> list[tuple[int, float, float, int]]:
    """(bin, mean probability, share that happened, count) of the bins that have any. Tensors of one shape."""
    p, y = probability.flatten(), happened.flatten()
    bins = (p * NUM_BINS).long().clamp_max(NUM_BINS - 1)
    rows = []
    for b in range(NUM_BINS):
        inside = bins == b
        if inside.any():
            rows.append((b, float(p[inside].mean()), float(y[inside].mean()), int(inside.sum())))
    return rows

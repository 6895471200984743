"""What a draft is trained for: to be accepted, and to know whether it will be (DSpark; spec: field, section 3.5).

A draft token from p_d is accepted under the target p_t with probability sum min(p_d, p_t) = 1 - TV(p_d, p_t). So TV is
the loss that counts, cross entropy makes its gradient useful at the start, and the confidence learns 1 - TV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """What a draft says of N blocks of B tokens, each given the true tokens before it."""

    logits: Tensor  # float32 [N, B, V]
    scores: Tensor | None  # float32 [N, B] raw confidences; None: the draft has none


@dataclass(frozen=True)
class LossWeights:
    """Of the three terms, and how fast later positions of a block lose weight: exp(-k / gamma).

    Both distributions are compared at a temperature that is drawn for each block: 1 for the share `at_one`, the others
    between `coldest` and 1, evenly in its logarithm. The colder it is, the more counts whether the most likely tokens
    agree, and the less what the draft says of the others: without blocks at 1 its distribution there becomes flat.
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    gamma: float = 4.0
    coldest: float = 1.0
    at_one: float = 0.5


@dataclass(frozen=True)
class BlockLosses:
    """loss is to be minimised; the others are for the log, float32 [B] averaged over the blocks."""

    loss: Tensor  # []
    weight: Tensor  # [], what the blocks of this loss count together
    acceptance: Tensor  # 1 - TV
    confidence_error: Tensor  # mean |sigmoid(score) - (1 - TV)|
    accepted_length: Tensor  # [], bonus included: 1 + sum over k of the product of acceptances up to k


def draw_heat(weights: LossWeights, draws: Tensor) -> Tensor | None:
    """A temperature [N] for each block from even draws [2, N] in 0..1; None if all are 1."""
    if weights.coldest == 1:
        return None
    share, cold = draws
    return (weights.coldest**cold).masked_fill(share < weights.at_one, 1.0)


def block_losses(
    draft_logits: Tensor,
    target_logits: Tensor,
    scores: Tensor | None,
    counted: Tensor,
    weights: LossWeights,
    heat: Tensor | None = None,
) -> BlockLosses:
    """Losses of N blocks of B drafts.

    Args:
        draft_logits: float32 [N, B, V], row k drafts the token that target_logits[:, k] [N, B, V] judges.
        scores: raw confidences [N, B]; None: the draft has no confidence head.
        counted: float32 [N, B], 1 where a position of a block counts, 0 from the first that does not.
        heat: [N], temperatures of `draw_heat` at which the two are compared; None: 1.
    """
    if heat is not None:
        draft_logits, target_logits = (logits / heat.view(-1, 1, 1) for logits in (draft_logits, target_logits))
    log_d = torch.log_softmax(draft_logits, dim=-1)
    with torch.no_grad():
        p_t = torch.softmax(target_logits, dim=-1)
    variation = 0.5 * (log_d.exp() - p_t).abs().sum(-1)
    entropy = -(p_t * log_d).sum(-1)
    total = weights.cross_entropy * entropy + weights.total_variation * variation
    acceptance = 1 - variation.detach()
    error = torch.zeros_like(acceptance)
    if scores is not None:
        total = total + weights.confidence * F.binary_cross_entropy_with_logits(scores, acceptance, reduction="none")
        error = (torch.sigmoid(scores.detach()) - acceptance).abs()
    steps = torch.arange(counted.shape[1], device=counted.device, dtype=torch.float32)
    weighted = counted * torch.exp(-steps / weights.gamma)
    weight = weighted.sum().clamp_min(1e-6)
    loss = (total * weighted).sum() / weight
    blocks = counted.sum(0).clamp_min(1e-6)
    survival = (acceptance * counted).cumprod(1).sum(1)
    return BlockLosses(
        loss,
        weight,
        (acceptance * counted).sum(0) / blocks,
        (error * counted).sum(0) / blocks,
        1 + (survival * counted[:, 0]).sum() / blocks[0],
    )

"""How many drafts the target would accept, measured along answers that it wrote itself.

Speculative sampling outputs y and accepts it with joint probability min(p(y), q(y)), whatever happens at a rejection.
So given that the target's answer continues with y, its draft was accepted with probability min(1, q(y) / p(y)). Where
the draft is not drawn but the most likely token (the engine's way), q is one-hot: it was accepted if it is the same
token, at any temperature. That makes the measurement exact without an engine: read each answer once, draft at every
position, and walk through it in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.deepspec.losses import Blocks
from deepinfer.deepspec.targets import Target
from deepinfer.kernels import ops

DraftBlocks = Callable[[Tensor, Tensor, Tensor], Blocks]  # taps, tokens, anchors -> blocks


@dataclass(frozen=True)
class Answer:
    """What a target wrote: the last `num_answer` ids; `temperature` it was drawn at."""

    token_ids: list[int]
    num_answer: int
    temperature: float

    @property
    def prompt(self) -> list[int]:
        """Token ids that the target was asked."""
        return self.token_ids[: len(self.token_ids) - self.num_answer]


@dataclass(frozen=True)
class Judged:
    """Every position of one answer at which a round may start. P positions, B drafts each."""

    accepted: Tensor  # bool [P, B], whether draft k is accepted if all before it are; False past the answer's end
    remaining: Tensor  # int64 [P], tokens of the answer behind the sampled one
    scores: Tensor | None  # float32 [P, B] raw confidences
    overlaps: Tensor | None = None  # float32 [P, B, H], acceptance of a draft drawn at each of H draft temperatures

    def rounds(self) -> list[tuple[int, int]]:
        """(position, accepted drafts) of each round: the next one starts behind the token that the target adds."""
        found, at = [], 0
        runs = self.accepted.long().cumprod(1).sum(1).tolist()
        while at < len(runs):
            found.append((at, runs[at]))
            at += runs[at] + 1
        return found


@dataclass(frozen=True)
class Acceptance:
    """Over all answers. `mean_length` counts the bonus token, but at the end of an answer, where there is none."""

    rounds: int
    tokens: int
    mean_length: float
    by_position: list[float]  # share of accepted drafts among those whose predecessors were accepted


@torch.no_grad()
def judge(
    target: Target,
    draft: DraftBlocks,
    answer: Answer,
    length: int,
    block_size: int,
    *,
    is_drawn: bool = False,
    draft_temperature: float = 1.0,
    heats: Sequence[float] = (),
    seed: int = 0,
) -> Judged:
    """Draft at every position of an answer.

    Args:
        length: tokens of the rows that the target reads; the answer is padded to it.
        is_drawn: drafts are drawn at the answer's temperature; else they are the most likely tokens.
        draft_temperature: the draft's logits are divided by it beforehand.
        heats: draft temperatures to compare; needs an answer that was drawn.

    Raises:
        ValueError: the answer does not fit, or there is no position to draft at.
    """
    ids = answer.token_ids
    first = len(ids) - answer.num_answer - 1  # the prompt's last token, when the answer's first was sampled
    starts = len(ids) - 2 - first
    if first < 0 or starts < 1:
        raise ValueError(f"answer: {answer.num_answer} tokens of {len(ids)}, allowed: a prompt and at least 2 of them")
    if len(ids) + block_size + 1 > length:
        raise ValueError(f"answer: {len(ids)} tokens, allowed: at most {length - block_size - 1} (length - block - 1)")
    device = target.embed.device
    row = torch.zeros(1, length + 1, dtype=torch.int64, device=device)
    row[0, : len(ids)] = torch.tensor(ids, device=device)
    taps, hidden = target(row[:, :-1])
    anchors = torch.arange(first, first + starts, device=device)
    accepted, scores, overlaps = [], [], []
    uniform = torch.rand(starts, block_size, generator=torch.Generator().manual_seed(seed)).to(device)
    steps = torch.arange(block_size, device=device)
    for part in anchors.split(64):
        blocks = draft(taps, row, part.unsqueeze(0))
        at = part.unsqueeze(1) + 1 + steps
        wanted = F.linear(hidden[0, at].float(), target.head)
        truth = row[0, at + 1]
        if not is_drawn or answer.temperature == 0:
            accepted.append(blocks.logits.argmax(-1) == truth)
        else:
            log_ratio = sum(
                sign * torch.log_softmax(logits / answer.temperature, -1).gather(-1, truth.unsqueeze(-1)).squeeze(-1)
                for sign, logits in ((1, blocks.logits / draft_temperature), (-1, wanted))
            )
            accepted.append(uniform[part - first] < torch.as_tensor(log_ratio).exp())
        if blocks.scores is not None:
            scores.append(blocks.scores)
        if heats and answer.temperature > 0:
            p = torch.softmax(wanted / answer.temperature, -1)
            drawn = (torch.softmax(blocks.logits / (answer.temperature * heat), -1) for heat in heats)
            overlaps.append(torch.stack([torch.minimum(p, q).sum(-1) for q in drawn], dim=-1))
    remaining = len(ids) - 2 - anchors
    fits = steps < remaining.unsqueeze(1)
    joined = (torch.cat(parts).cpu() if parts else None for parts in (scores, overlaps))
    return Judged((torch.cat(accepted) & fits).cpu(), remaining.cpu(), *joined)


def judge_lookup(answer: Answer, block_size: int, min_match: int = 2, max_match: int = 4) -> Judged:
    """The same for drafts by prompt lookup, with the engine's own operation; the answer has at least two tokens."""
    ids = torch.tensor(answer.token_ids, dtype=torch.int32)
    anchors = torch.arange(len(ids) - answer.num_answer - 1, len(ids) - 2)
    slots = torch.arange(len(anchors))
    known = anchors + 2  # positions 0..p, and the token that was sampled at p
    drafts, _ = ops.lookup_drafts(
        ids.expand(len(anchors), -1).contiguous(), slots, known, len(ids), block_size, min_match, max_match
    )
    remaining = len(ids) - known
    behind = known.unsqueeze(1) + torch.arange(block_size)
    agrees = drafts == ids[behind.clamp_max(len(ids) - 1)]
    return Judged(agrees & (behind < len(ids)), remaining, None)


def acceptance_of(judged: list[Judged]) -> Acceptance:
    """Walk through all answers in rounds."""
    if not judged:
        raise ValueError("answers: none, allowed: at least one")
    size = judged[0].accepted.shape[1]
    tried, kept = [0] * size, [0] * size
    rounds = tokens = 0
    for one in judged:
        for at, run in one.rounds():
            rounds += 1
            remaining = int(one.remaining[at])
            tokens += run + (run < remaining)
            for k in range(min(run + 1, remaining, size)):
                tried[k] += 1
                kept[k] += k < run
    by_position = [k / t if t else 0.0 for k, t in zip(kept, tried, strict=True)]
    return Acceptance(rounds, tokens, tokens / rounds, by_position)

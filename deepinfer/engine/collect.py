"""What a step means: for its sequences, for their requests, and for the statistics."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.graph_pool import CaptureCost
from deepinfer.engine.model_inputs import decoder_start
from deepinfer.engine.output_pool import NewOutputs
from deepinfer.engine.scheduler import ScheduledBatch, Scheduler
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.step import LaunchedStep, StepTokens
from deepinfer.observability.flops import FlopsEstimator
from deepinfer.observability.stats import StepStats
from deepinfer.outputs import EngineStats, RequestOutput
from deepinfer.structured.matcher import STRUCTURED_OUTPUT


@dataclass(slots=True)
class DraftCounts:
    """What became of the drafts of a step. Those behind the token that ended a sequence are not accepted."""

    verified: list[int] = field(default_factory=list)  # of each sequence with drafts
    accepted: list[int] = field(default_factory=list)

    def accepted_at(self) -> list[int]:
        """How often the first draft of a sequence was accepted, the second, ..."""
        counts = [0] * max(self.verified, default=0)
        for accepted in self.accepted:
            if accepted:
                counts[accepted - 1] += 1
        return list(accumulate(reversed(counts)))[::-1]


@dataclass(slots=True)
class News:
    """What a step brought. `invalid`: unfinished sequences whose next token means nothing."""

    outputs: dict[str, RequestOutput]  # by request
    invalid: list[Sequence]
    finished: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


def collect(
    step: LaunchedStep,
    sampled: StepTokens,
    requests: dict[str, Request],
    make: NewOutputs,
    scheduler: Scheduler,
    eos_token_ids: Set[int],
) -> News:
    """Append the new tokens, apply the stop conditions and collect the news per request."""
    now, sequences, num_expected = time.monotonic(), step.sequences, step.num_expected
    news = News({}, [])
    for i, (seq, token_ids, logprobs) in enumerate(zip(sequences, sampled.token_ids, sampled.logprobs, strict=True)):
        if seq.finish_reason is not None:
            continue  # it ended before these tokens were read
        num_accepted, num_valid = len(token_ids) - 1, sampled.num_valid.get(i)
        if num_valid is not None:
            token_ids, logprobs = token_ids[:num_valid], None if logprobs is None else logprobs[:num_valid]
        count = seq.extend(token_ids, eos_token_ids)
        if count < len(token_ids):  # what was accepted behind the token that ended it is void
            token_ids, logprobs = token_ids[:count], None if logprobs is None else logprobs[:count]
        if num_expected is not None:
            scheduler.settle(seq, num_expected[i], len(token_ids))
        if sampled.num_verified is not None and sampled.num_verified[i]:
            news.drafts.verified.append(sampled.num_verified[i])
            news.drafts.accepted.append(min(num_accepted, len(token_ids)))
        if num_valid is not None and seq.finish_reason is None:
            news.invalid.append(seq)
            if not token_ids:
                continue
        news.num_tokens += len(token_ids)
        if seq.metrics.first_token_time is None:
            seq.metrics.first_token_time = now
        completion = make.completion(seq.index, token_ids, logprobs, seq.finish_reason, seq.stop_reason)
        output = news.outputs.get(seq.request_id)
        if output is None:
            prompt = requests[seq.request_id].prompt_token_ids
            news.outputs[seq.request_id] = make.output(seq.request_id, prompt, completion, seq.metrics)
        else:
            output.outputs.append(completion)
        if seq.prompt_logprobs is not None:
            news.outputs[seq.request_id].prompt_logprobs = seq.prompt_logprobs
            seq.prompt_logprobs = None
        if seq.finish_reason is not None:
            news.finished.append(seq)
    return news


def record_scheduled(batch: ScheduledBatch) -> None:
    """Note when prompts are first worked on."""
    if not batch.is_prefill:
        return
    now = time.monotonic()
    for seq in batch.sequences:
        if seq.metrics.first_scheduled_time is None:
            seq.metrics.first_scheduled_time = now


def why_invalid(seq: Sequence) -> str:
    """What to say of a sequence whose row had no finite largest logit."""
    if seq.constraint is None:
        return "the model returned logits that are not finite"
    none_left = f"{STRUCTURED_OUTPUT}no token is left that the grammar and the other settings allow"
    return seq.constraint.failed or none_left


def engine_stats(
    scheduler: Scheduler, num_prompt_tokens: int, num_output_tokens: int, capture_cost: CaptureCost
) -> EngineStats:
    """The engine's state now; tokens since the start."""
    return EngineStats(
        num_waiting=len(scheduler.waiting),
        num_running=scheduler.slots.num_slots - scheduler.slots.num_free,
        num_blocks=scheduler.blocks.num_blocks - 1,
        num_free_blocks=scheduler.blocks.num_free,
        num_preemptions=scheduler.num_preemptions,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        cuda_graph_seconds=capture_cost.seconds,
        cuda_graph_bytes=capture_cost.num_bytes,
    )


def step_stats(
    now: EngineStats,
    step: LaunchedStep,
    news: News,
    config: EngineConfig,
    flops: FlopsEstimator | None,
    expert_counts: np.ndarray | None,
) -> StepStats:
    """What a step did, and the engine's state `now` after it."""
    count = None
    if flops is not None:
        counts, keep_from = np.array(step.batch.num_tokens), decoder_start(step.batch, config)
        count = float(flops.step(step.starts, counts, step.num_logits_rows, keep_from).total)
    speculates, drafts = config.speculative_config is not None, news.drafts
    return StepStats(
        num_prompt_tokens=sum(step.batch.num_tokens) if step.batch.is_prefill else 0,
        num_output_tokens=news.num_tokens,
        num_running=now.num_running,
        num_waiting=now.num_waiting,
        cache_usage=1 - now.num_free_blocks / now.num_blocks,
        num_preemptions=now.num_preemptions,
        flops=count,
        drafts=len(drafts.verified) if speculates else None,
        draft_tokens=sum(drafts.verified) if speculates else None,
        accepted_tokens=sum(drafts.accepted) if speculates else None,
        accepted_at=drafts.accepted_at(),
        expert_counts=expert_counts,
    )

"""What one step of an engine consists of: the model side that runs it, and what is known of it on its way."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from deepinfer.engine.prompt_logprobs import LaunchedPromptLogprobs
from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.sequence_metadata import SequenceMetadataPool
from deepinfer.engine.swap import CacheRows
from deepinfer.models.inputs import ModelInputs
from deepinfer.outputs import RequestOutput, TokenLogprob
from deepinfer.sampling.sampler import LaunchedSample, launch_sample
from deepinfer.sampling.transfer import upload
from deepinfer.speculation.slot_tokens import SlotTokens


class Runner(Protocol):
    """The model side: holds weights and caches, runs one step.

    `num_blocks` counts the null block. The state of a sequence is reset when a step starts it at position 0.
    For statistics a runner may also have `flops`, a FlopsEstimator, and `expert_counts`, int [layers, experts]: the
    tokens of each expert in the latest step. A runner for prompts with images has `image_token_id`. One that replays
    decode steps has `graphs`, DecodeGraphs, whose buffers their inputs are written to.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int

    def run(self, inputs: ModelInputs) -> Tensor:
        """Logits float32 [R, vocab_size] of inputs.logits_rows."""
        ...

    def cache_rows(self) -> CacheRows:
        """The caches, for preemption_mode "swap" and for handing sequences over."""
        ...


@dataclass(slots=True)
class StepTokens:
    """What a step brought, an entry a sequence."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob] | None]
    num_valid: dict[int, int]  # of sequences whose other tokens mean nothing
    num_verified: list[int] | None = None  # drafts that were verified; all tokens but the last were among them


class Sampling(Protocol):
    """Tokens that the device is choosing."""

    def read(self) -> StepTokens:
        """Waits for them."""
        ...


@dataclass(slots=True)
class PlainSampling:
    """One token a sequence."""

    sampled: LaunchedSample

    @classmethod
    def launch(
        cls,
        step: LaunchedStep,
        metadata: SequenceMetadataPool,
        eos_token_ids: Collection[int],
        slot_tokens: SlotTokens,
    ) -> PlainSampling:
        """Start drawing; the tokens also go where the next step takes them from."""
        sequences = step.sequences
        if not sequences:  # a chunk that ends no prompt
            return cls(launch_sample(step.logits, sequences, eos_token_ids))
        counters = np.array([seq.num_output_tokens for seq in sequences], np.int64)
        parameters = metadata.parameters(step.slots, counters, sequences)
        sampled = launch_sample(step.logits, sequences, eos_token_ids, None, parameters, step.bitmask)
        slots = step.device_slots
        if slots is None:
            slots = upload(step.slots, step.logits.device)
        slot_tokens.tokens[:, 0].scatter_(0, slots.long(), sampled.token_ids)
        return cls(sampled)

    def read(self) -> StepTokens:
        """Wait for the tokens, one of each sequence."""
        got = self.sampled.read()
        logprobs = [None if each is None else [each] for each in got.logprobs]
        return StepTokens([[token_id] for token_id in got.token_ids], logprobs, dict.fromkeys(got.invalid_rows, 0))


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way. `sequences` get tokens, row by row of `logits`."""

    batch: ScheduledBatch
    sequences: list[Sequence]
    slots: np.ndarray  # int64, the state slots of `sequences`
    device_slots: Tensor | None  # the same on the device; None: they are not there
    logits: Tensor
    starts: np.ndarray  # int64 [S], tokens of each sequence that were in the cache before
    launch_time: tuple[float, float]  # before and after the launch of the model, seconds
    num_logits_rows: int  # of the model, prompt tokens included
    prompt_logprobs: LaunchedPromptLogprobs | None = None
    bitmask: Future[np.ndarray] | None = None  # what grammars allow, if that is being found out already
    sampled: Sampling | None = None  # once sampling is launched

    @property
    def num_expected(self) -> list[int] | None:
        """Most tokens that each sequence may get; None: one each."""
        return None if self.batch.is_prefill or not self.batch.has_drafts else self.batch.num_tokens


def merged(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """One output a request."""
    news: dict[str, RequestOutput] = {}
    for output in outputs:
        if output.request_id in news:
            news[output.request_id].merge(output)
        else:
            news[output.request_id] = output
    return list(news.values())

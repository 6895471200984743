"""What one step of an engine consists of: the model side that runs it, and what is known of it on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.swap import CacheRows
from deepinfer.models.inputs import ModelInputs
from deepinfer.outputs import RequestOutput
from deepinfer.sampling.sampler import LaunchedSample


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
class LaunchedStep:
    """A step on its way. `sequences` get a token each, row by row of `logits`; `token_slots` are their state slots."""

    batch: ScheduledBatch
    sequences: list[Sequence]
    token_slots: Tensor
    logits: Tensor
    starts: np.ndarray  # int64 [S], tokens of each sequence that were in the cache before
    launch_time: tuple[float, float]  # before and after the launch of the model, seconds
    sampled: LaunchedSample | None = None  # once sampling is launched


def merged(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """One output a request."""
    news: dict[str, RequestOutput] = {}
    for output in outputs:
        if output.request_id in news:
            news[output.request_id].merge(output)
        else:
            news[output.request_id] = output
    return list(news.values())

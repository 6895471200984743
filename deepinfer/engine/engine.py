"""Engine: token ids in, token ids out. One step is schedule, run, sample, postprocess."""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer import envs
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.checks import check_request
from deepinfer.engine.model_inputs import build_model_inputs, decoder_start
from deepinfer.engine.scheduler import ScheduledBatch, Scheduler
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.models.inputs import ModelInputs
from deepinfer.observability.observer import Observer
from deepinfer.observability.stats import StepStats
from deepinfer.outputs import CompletionOutput, EngineStats, FinishReason, RequestMetrics, RequestOutput
from deepinfer.params import MAX_SEED, SamplingParams
from deepinfer.sampling.random import completion_seed
from deepinfer.sampling.sampler import SamplerOutput, sample

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """The model side: holds weights and caches, runs one step.

    `num_blocks` counts the null block. The state of a sequence is reset when a step starts it at position 0.
    For statistics a runner may also have `flops`, a FlopsEstimator, and `expert_counts`, int [layers, experts]: the
    tokens of each expert in the latest step.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int

    def run(self, inputs: ModelInputs) -> Tensor:
        """Logits float32 [R, vocab_size] of inputs.logits_rows."""
        ...


class Engine:
    """Runs requests over a runner. Not thread-safe: AsyncEngine owns it from one thread.

    Args:
        runner: the model side.
        config: sizes; max_model_len is cut to what the block cache holds.
        eos_token_ids: tokens that end a sequence unless ignore_eos.
    """

    def __init__(self, runner: Runner, config: EngineConfig, eos_token_ids: Iterable[int] = ()):
        self.runner = runner
        self.config = config
        self.eos_token_ids: Collection[int] = frozenset(eos_token_ids)
        cache_tokens = (runner.num_blocks - 1) * config.block_size
        longest = min(config.max_model_len or runner.max_model_len, runner.max_model_len)
        self.max_model_len = min(longest, cache_tokens)
        if cache_tokens < longest:
            logger.warning("max_model_len is cut from %d to %d tokens, which the cache holds", longest, cache_tokens)
        self.scheduler = Scheduler(config, runner.num_blocks)
        self.requests: dict[str, Request] = {}
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._num_arrived = 0
        self._seeds = np.random.default_rng(config.seed)
        self.observer = Observer(config.device, getattr(runner, "flops", None))
        self._observing = True
        self._check_integrity = envs.get("DEEPINFER_CHECK_INTEGRITY")

    def validate(self, prompt_token_ids: SequenceOf[int], params: SamplingParams) -> None:
        """Raise ValueError naming the field if the request can never run. Changes nothing; any thread may call it."""
        check_request(prompt_token_ids, params, self.max_model_len, self.runner.vocab_size, self.eos_token_ids)

    def add_request(
        self, request_id: str, prompt_token_ids: SequenceOf[int], sampling_params: SamplingParams | None = None
    ) -> None:
        """Queue a request. Raises ValueError naming the field if it is invalid or its id is in use."""
        params = sampling_params or SamplingParams()
        self.validate(prompt_token_ids, params)
        if request_id in self.requests:
            raise ValueError(f"request_id {request_id!r} is already in use")
        seed = int(self._seeds.integers(MAX_SEED)) if params.seed is None else params.seed
        metrics = RequestMetrics(arrival_time=time.monotonic())
        request = Request(request_id, list(prompt_token_ids), metrics)
        for index in range(params.n):
            seq = Sequence(
                request_id, index, self._num_arrived, prompt_token_ids, params, completion_seed(seed, index), metrics
            )
            self._num_arrived += 1
            request.sequences.append(seq)
            self.scheduler.add(seq)
        if not self.requests:
            self._observe(self.observer.work_began)
        self.requests[request_id] = request

    def abort_request(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """Stop a request, or only its completion `index`, at once and free what it holds.

        Returns None if the request or the completion is unknown or finished already.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        sequences = [s for s in request.sequences if s.finish_reason is None and index in (None, s.index)]
        return self._close(request, sequences, "abort") if sequences else None

    def before_step(self) -> None:
        """Start or end traces. `step` calls it; an idle engine's owner calls it when the observer wakes it."""
        self._observe(self.observer.before_step)

    def _observe(self, hook: Callable[[], None]) -> None:
        """A fault of the observer costs observations, not requests: it is logged, and the observer left alone."""
        if self._observing:
            try:
                hook()
            except Exception:
                logger.exception("an observer failed; statistics and traces are off from here on")
                self._observing = False

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step and return the news of every request it touched; an exception fails only those requests."""
        self.before_step()
        scope = self.observer.timer.scope
        with scope("schedule"):
            batch = self.scheduler.schedule()
            if batch is None:
                return []
            self._record_scheduled(batch)
        try:
            with scope("inputs"):
                inputs = build_model_inputs(batch, self.config)
            with scope("forward"):
                logits = self.runner.run(inputs)
            with scope("sample"):
                sampled = sample(logits, batch.sampled, self.eos_token_ids)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(batch.sequences))
            return self._fail(batch.sequences, f"{type(error).__name__}: {error}")
        with scope("postprocess"):
            sequences = batch.sampled
            if batch.is_prefill:  # those with output were counted before they were preempted
                self.num_prompt_tokens += sum(s.num_prompt_tokens for s in sequences if s.num_output_tokens == 0)
            self.scheduler.advance(batch)
            outputs = self._postprocess(sequences, sampled)
        with scope("observe"):
            self._observe(lambda: self.observer.after_step(self._step_stats(batch, len(sequences))))
        if self._check_integrity:
            self.scheduler.check_integrity()
        return outputs

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            num_waiting=len(scheduler.waiting),
            num_running=scheduler.slots.num_slots - scheduler.slots.num_free,
            num_blocks=scheduler.blocks.num_blocks - 1,
            num_free_blocks=scheduler.blocks.num_free,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
        )

    def _step_stats(self, batch: ScheduledBatch, num_sampled: int) -> StepStats:
        """What the step that just ended did."""
        now = self.stats()
        num_tokens = sum(batch.num_tokens)
        flops = None
        if self.observer.flops is not None:
            counts = np.array(batch.num_tokens)
            starts = np.array([seq.num_computed for seq in batch.sequences]) - counts
            keep_from = decoder_start(batch, self.config)
            flops = float(self.observer.flops.step(starts, counts, num_sampled, keep_from).total)
        return StepStats(
            num_prompt_tokens=num_tokens if batch.is_prefill else 0,
            num_output_tokens=num_sampled,
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            cache_usage=1 - now.num_free_blocks / now.num_blocks,
            num_preemptions=now.num_preemptions,
            flops=flops,
            expert_counts=getattr(self.runner, "expert_counts", None),
        )

    def _forget(self, request_id: str, now: float) -> None:
        """The request is finished."""
        self.requests.pop(request_id).metrics.finished_time = now
        if not self.requests:
            self._observe(self.observer.work_ended)

    def _record_scheduled(self, batch: ScheduledBatch) -> None:
        if not batch.is_prefill:
            return
        now = time.monotonic()
        for seq in batch.sequences:
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = now

    def _postprocess(self, sequences: list[Sequence], sampled: SamplerOutput) -> list[RequestOutput]:
        """Append the new tokens, apply the stop conditions and collect the news per request."""
        now = time.monotonic()
        news: dict[str, RequestOutput] = {}
        finished: list[Sequence] = []
        invalid = [sequences[row] for row in sampled.invalid_rows]
        self.num_output_tokens += len(sequences) - len(invalid)
        for seq, token_id, logprob in zip(sequences, sampled.token_ids, sampled.logprobs, strict=True):
            if invalid and seq in invalid:
                continue
            seq.append(token_id, self.eos_token_ids, self.max_model_len)
            if seq.metrics.first_token_time is None:
                seq.metrics.first_token_time = now
            completion = CompletionOutput(
                seq.index, [token_id], None if logprob is None else [logprob], seq.finish_reason, seq.stop_reason
            )
            output = news.get(seq.request_id)
            if output is None:
                prompt = self.requests[seq.request_id].prompt_token_ids
                news[seq.request_id] = RequestOutput(seq.request_id, prompt, [completion], False, seq.metrics)
            else:
                output.outputs.append(completion)
            if seq.finish_reason is not None:
                finished.append(seq)
        if finished:
            self.scheduler.remove(finished)
            for request_id in {seq.request_id for seq in finished}:
                if self.requests[request_id].finished:
                    self._forget(request_id, now)
                    news[request_id].finished = True
        for failure in self._fail(invalid, "the model returned logits that are not finite"):
            if failure.request_id in news:
                news[failure.request_id].merge(failure)
            else:
                news[failure.request_id] = failure
        return list(news.values())

    def _fail(self, sequences: list[Sequence], error: str) -> list[RequestOutput]:
        """Finish every request that owns one of the sequences with reason "error"."""
        requests = [self.requests[request_id] for request_id in dict.fromkeys(seq.request_id for seq in sequences)]
        return [
            self._close(request, [s for s in request.sequences if s.finish_reason is None], "error", error)
            for request in requests
        ]

    def _close(
        self, request: Request, sequences: list[Sequence], reason: FinishReason, error: str | None = None
    ) -> RequestOutput:
        """Finish these unfinished sequences of a request now."""
        for seq in sequences:
            seq.finish_reason = reason
        self.scheduler.remove(sequences)
        outputs = [CompletionOutput(seq.index, finish_reason=reason) for seq in sequences]
        if request.finished:
            self._forget(request.request_id, time.monotonic())
        return RequestOutput(
            request.request_id, request.prompt_token_ids, outputs, request.finished, request.metrics, error
        )

"""Engine: token ids in, token ids out. One step is schedule, run, sample, postprocess.

Overlapped scheduling (the idea of NanoFlow and SGLang): a step is scheduled and launched before the tokens of the step
in front of it are read. So the device has work while the host reads, post-processes and schedules:

    host    schedule N+1 | launch forward N+1 | read N | postprocess N | launch sampling N+1 | schedule N+2 ...
    device  ... forward N, sampling N         | forward N+1                                  | sampling N+1 ...

Everything in front of a launched forward is in stream order, so blocks freed by `postprocess N` may be handed out at
once. Sampling N+1 is launched with all tokens up to N known: penalties and masks need no special case.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer import envs
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.checks import check_request
from deepinfer.engine.chunking import image_spans, most_asked
from deepinfer.engine.collect import News, collect, engine_stats, record_scheduled, step_stats
from deepinfer.engine.cuda_graph import DecodeGraphs
from deepinfer.engine.drafters import make_speculation
from deepinfer.engine.graph_pool import capture_cost
from deepinfer.engine.model_inputs import build_model_inputs
from deepinfer.engine.output_pool import NewOutputs
from deepinfer.engine.prompt_logprobs import split_logits
from deepinfer.engine.request_book import RequestBook
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.sequence_metadata import SequenceMetadataPool
from deepinfer.engine.step import LaunchedStep, PlainSampling, Runner, merged
from deepinfer.engine.swap import HostSwap
from deepinfer.engine.voting import Lockstep
from deepinfer.observability.block_lifetimes import BlockLifetimes
from deepinfer.observability.observer import Observer
from deepinfer.observability.stats import StepStats
from deepinfer.outputs import EngineStats, RequestMetrics, RequestOutput, TokenLogprob
from deepinfer.params import MAX_SEED, SamplingParams
from deepinfer.sampling.bitmask import start_token_bitmask
from deepinfer.sampling.random import completion_seed
from deepinfer.speculation.drafter import Drafter
from deepinfer.speculation.slot_tokens import SlotTokens
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.matcher import Grammar

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests over a runner. Not thread-safe: AsyncEngine owns it from one thread.

    Args:
        runner: the model side.
        config: sizes; max_model_len is cut to what the block cache holds.
        eos_token_ids: tokens that end a sequence unless ignore_eos.
        lockstep: this rank's side of a data-parallel group, whose engines call `step` equally often.
        drafter: drafts tokens for speculation; None: what config.speculative_config asks for.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        eos_token_ids: Iterable[int] = (),
        lockstep: Lockstep | None = None,
        drafter: Drafter | None = None,
    ):
        self.runner = runner
        self.config = config
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids)
        cache_tokens = (runner.num_blocks - 1) * config.block_size
        longest = min(config.max_model_len or runner.max_model_len, runner.max_model_len)
        self.max_model_len = min(longest, cache_tokens)
        if cache_tokens < longest:
            logger.warning("max_model_len is cut from %d to %d tokens, which the cache holds", longest, cache_tokens)
        swap = None
        if config.preemption_mode == "swap":
            swap = HostSwap(runner.cache_rows(), config.block_size, config.swap_memory_bytes)
        self.observer = Observer.of(runner, config)
        lifetimes = BlockLifetimes(self.observer.stats.totals)
        self.scheduler = Scheduler(config, runner.num_blocks, swap, lockstep, lifetimes)
        self.scheduler.max_asked = most_asked(runner.vocab_size)
        self._book = RequestBook(self.scheduler, self.observer)
        self.requests = self._book.requests  # in progress, by id
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.overlaps = config.overlaps_steps
        self._in_flight: LaunchedStep | None = None  # launched and not read
        self._graphs: DecodeGraphs | None = getattr(runner, "graphs", None)
        self.speculation = make_speculation(runner, config, self.max_model_len, drafter)
        drafts = None if self.speculation is None else getattr(self.speculation.drafter, "run", None)
        self._capture_cost = capture_cost((self._graphs, getattr(runner, "prefill_graphs", None), drafts))
        if self.speculation is not None:
            self._slot_tokens = self.speculation.state
            self.scheduler.draft_lengths = self.speculation.draft_lengths
        elif self._graphs is not None:
            self._slot_tokens = self._graphs.buffers.slot_tokens
        else:
            self._slot_tokens = SlotTokens.allocate(config.max_num_seqs + 1, 0, config.device)
        self.outputs = NewOutputs()  # an owner that is done with outputs a step later may set a RequestOutputPool
        self._num_arrived = 0
        # Of what steps take. What other processes take of a CPU says nothing of a step.
        self._clock = time.thread_time if config.device == "cpu" else time.monotonic
        self._last_read = 0.0  # when the tokens of the latest step were read
        self._read_prefill = False  # whether it was a prefill step
        self._seeds = np.random.default_rng(config.seed)
        self.grammars: GrammarCompiler | None = None  # whoever knows the vocabulary sets it
        self._check_integrity = envs.get("DEEPINFER_CHECK_INTEGRITY")
        self.metadata = SequenceMetadataPool(config.max_num_seqs + 1, runner.vocab_size, self._check_integrity)

    def validate(self, prompt_token_ids: SequenceOf[int], params: SamplingParams) -> None:
        """Raise ValueError naming the field if the request can never run. Changes nothing; any thread may call it."""
        check_request(prompt_token_ids, params, self.max_model_len, self.runner.vocab_size, self.eos_token_ids)
        if params.so_args is not None and self.grammars is None:
            raise ValueError("so_args needs a tokenizer, this model has none")

    def compile(self, so_args: Mapping[str, Any]) -> Future[Grammar]:
        """The grammar of structured output, for a caller that must not wait for it in `add_request`.

        Any thread may call it. It, or the future, raises ValueError naming the field.
        """
        if self.grammars is None:
            raise ValueError("so_args needs a tokenizer, this model has none")
        return self.grammars.compile(so_args)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        sampling_params: SamplingParams | None = None,
        grammar: Future[Grammar] | None = None,
    ) -> None:
        """Queue a request. Raises ValueError naming the field if it is invalid or its id is in use.

        `grammar`: of its structured output, from `compile`; without it, it is compiled here. Waits for it.
        """
        params = sampling_params or SamplingParams()
        self.validate(prompt_token_ids, params)
        self._book.check_new(request_id)
        if self.config.kind == "decode":
            raise ValueError("kind must not be decode: such an engine goes on with the sequences of a prefill engine")
        if params.so_args is not None and grammar is None:
            grammar = self.compile(params.so_args)
        compiled = None if grammar is None else grammar.result()
        seed = int(self._seeds.integers(MAX_SEED)) if params.seed is None else params.seed
        metrics = RequestMetrics(arrival_time=time.monotonic())
        request = Request(request_id, list(prompt_token_ids), metrics)
        spans = image_spans(request.prompt_token_ids, getattr(self.runner, "image_token_id", -1))
        for index in range(params.n):
            seq = Sequence(
                request_id, index, self._num_arrived, prompt_token_ids, params, completion_seed(seed, index), metrics,
                self.max_model_len, spans, None if compiled is None else compiled.matcher(),
            )  # fmt: skip
            self._num_arrived += 1
            if params.prompt_logprobs is not None and index == 0:
                seq.want_prompt_logprobs()
            request.sequences.append(seq)
        for seq in request.sequences:  # once all of them exist: an error leaves none behind
            self.scheduler.add(seq)
        self._book.add(request, params)

    def take_prefilled(self) -> list[Sequence]:
        """Sequences of a prefill engine that have their first token: this engine is done with them.

        Their blocks and slots stay theirs until `scheduler.release_taken`, for the caller to copy (swap.copy_sequence).
        """
        taken = self.scheduler.take_prefilled()
        for seq in taken:
            request = self.requests[seq.request_id]
            request.sequences.remove(seq)
            if request.finished:
                self._book.forget(seq.request_id)
        self._drop_step_of_nobody()
        return taken

    def add_prefilled(self, request_id: str, taken: Sequence) -> Sequence | None:
        """Go on with a sequence that another engine has prefilled, as a request of its own.

        Returns it as it is here: before the next step the caller fills its blocks and its slot with the cache of
        `taken`. None if there is no room for it now. Raises ValueError if the id is in use.
        """
        self._book.check_new(request_id)
        prompt = taken.token_ids[: taken.num_prompt_tokens]
        seq = Sequence(
            request_id, taken.index, self._num_arrived, prompt, taken.params, taken.seed, taken.metrics,
            self.max_model_len, taken.image_spans, taken.constraint,
        )  # fmt: skip
        seq.token_ids = taken.token_ids[:]
        if not self.scheduler.add_prefilled(seq):
            return None
        self._num_arrived += 1
        self._book.add(Request(request_id, prompt.tolist(), taken.metrics, [seq]), taken.params)
        return seq

    def abort_request(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """Stop a request, or only its completion `index`, at once and free what it holds.

        Returns None if the request or the completion is unknown or finished already.
        """
        output = self._book.abort(request_id, index)
        self._drop_step_of_nobody()
        return output

    def take_prompt_logprobs(self) -> list[tuple[str, list[TokenLogprob | None]]]:
        """What is known so far of long prompts, by request; the output with its first token then holds only the rest.

        For an owner that passes it on: it may be megabytes.
        """
        taken = []
        for seq in self.scheduler.prefilling:
            if seq.prompt_logprobs:
                taken.append((seq.request_id, seq.prompt_logprobs))
                seq.prompt_logprobs = []
        return taken

    def before_step(self) -> None:
        """Start or end traces. `step` calls it; an idle engine's owner calls it when the observer wakes it."""
        self.observer.guard(self.observer.before_step)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to `step` for."""
        return bool(self.requests)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Launch a step, read the one in front of it (or this one, without overlap) and return its news.

        An exception fails only the requests of the step that raised it.
        """
        self.before_step()
        self.outputs.next_round()
        self.metadata.next_round()
        outputs = self._book.end_expired()
        self._drop_step_of_nobody()
        launched, failed = self._launch_forward()
        outputs += failed
        outputs += self._finish(self._in_flight)
        self._in_flight, failed = self._launch_sampling(launched)
        outputs += failed
        if not self.overlaps:
            outputs += self._finish(self._in_flight)
        if not (self.overlaps and self.requests):
            self._in_flight = None
        if self._check_integrity:
            self.scheduler.check_integrity()
        return merged(outputs)

    def _drop_step_of_nobody(self) -> None:
        """Nobody waits for the tokens of the step in flight, and its time would include the engine's idle time."""
        if not self.requests:
            self._in_flight = None

    def _launch_forward(self) -> tuple[LaunchedStep | None, list[RequestOutput]]:
        """Schedule the next step and start the model on it. None if there is nothing to do before tokens are read."""
        scope = self.observer.timer.scope
        with scope("schedule"):
            batch = self.scheduler.schedule()
            if batch is None or not batch.sequences:  # the second: other ranks of the group have work
                return None, []
            record_scheduled(batch)
            sequences = batch.sampled
        try:
            with scope("inputs"):
                if self.speculation is not None and not batch.is_prefill:
                    self.speculation.before_decode(batch)
                slots = self.metadata.take(batch.sequences)
                inputs = build_model_inputs(batch, slots, self.metadata, self.config, self._slot_tokens, self._graphs)
            start = self._clock()
            bitmask = None
            if not self.overlaps:  # the tokens are known: masks are filled while the model runs
                num_rows = batch.num_tokens if batch.has_drafts else [1] * len(sequences)
                bitmask = start_token_bitmask(sequences, num_rows, self.runner.vocab_size)
            with scope("forward"):
                logits = self.runner.run(inputs)
            num_logits_rows, prompt_logprobs = len(logits), None
            if batch.is_prefill:
                logits, prompt_logprobs = split_logits(batch, logits)
                if self.speculation is not None:
                    self.speculation.prefilled(batch, inputs)
        except Exception as error:
            return None, self._failed_step(batch.sequences, error)
        if batch.is_prefill:  # those with output were counted before they were preempted
            self.num_prompt_tokens += sum(s.num_prompt_tokens for s in sequences if s.num_output_tokens == 0)
        device_slots: Tensor | None = inputs.state_slots
        if len(sequences) < len(batch.sequences):
            slots, device_slots = np.array([s.state_slot for s in sequences], np.int64), None
        starts = np.array([seq.num_computed for seq in batch.sequences])
        self.scheduler.advance(batch)
        step = LaunchedStep(
            batch,
            sequences,
            slots,
            device_slots,
            logits,
            starts,
            launch_time=(start, self._clock()),
            num_logits_rows=num_logits_rows,
            prompt_logprobs=prompt_logprobs,
            bitmask=bitmask,
        )
        return step, []

    def _launch_sampling(self, step: LaunchedStep | None) -> tuple[LaunchedStep | None, list[RequestOutput]]:
        """Start drawing the step's tokens. Sequences that ended meanwhile keep their rows, which are never read."""
        if step is None:
            return None, []
        try:
            with self.observer.timer.scope("sample"):
                if self.speculation is not None:
                    step.sampled = self.speculation.launch(step, self.metadata, self.eos_token_ids)
                else:
                    step.sampled = PlainSampling.launch(step, self.metadata, self.eos_token_ids, self._slot_tokens)
        except Exception as error:
            return None, self._failed_step(step.batch.sequences, error)
        return step, []

    def _finish(self, step: LaunchedStep | None) -> list[RequestOutput]:
        """Wait for the tokens of a step and return its news."""
        if step is None or step.sampled is None:
            return []
        scope = self.observer.timer.scope
        try:
            with scope("read"):
                sampled = step.sampled.read()
                if step.prompt_logprobs is not None:
                    step.prompt_logprobs.read()
        except Exception as error:
            return self._failed_step(step.batch.sequences, error)
        self._learn_cost(step)
        with scope("postprocess"):
            news = collect(step, sampled, self.requests, self.outputs, self.scheduler, self.eos_token_ids)
            self.num_output_tokens += news.num_tokens
            outputs = self._book.finish(news)
        with scope("observe"):
            self.observer.guard(lambda: self.observer.after_step(self._step_stats(step, news)))
        return outputs

    def _step_stats(self, step: LaunchedStep, news: News) -> StepStats:
        counts = getattr(self.runner, "expert_counts", None)
        return step_stats(self.stats(), step, news, self.config, self.observer.flops, counts)

    def _learn_cost(self, step: LaunchedStep) -> None:
        """Tell whoever plans with it how long a step took. Call when its tokens are read."""
        last_read, self._last_read = self._last_read, self._clock()
        start, end = step.launch_time
        behind_prefill, self._read_prefill = self._read_prefill, step.batch.is_prefill
        if not step.batch.is_prefill:
            if self.speculation is not None:  # the first step behind a prefill step is like no other
                self.speculation.observe(
                    step, None if behind_prefill else 1e3 * (self._last_read - max(start, last_read))
                )
            return
        if self.config.prefill_step_ms is None:
            return
        if self.config.device != "cpu":  # it began when the step in front of it ended; on a CPU the launch is the step
            start, end = max(start, last_read), self._last_read
        self.scheduler.prefill_cost.observe(step.starts.tolist(), step.batch.num_tokens, 1e3 * (end - start))

    def stats(self) -> EngineStats:
        """A snapshot: sequences and blocks now, tokens and preemptions since the start."""
        return engine_stats(self.scheduler, self.num_prompt_tokens, self.num_output_tokens, self._capture_cost)

    def _failed_step(self, sequences: list[Sequence], error: Exception) -> list[RequestOutput]:
        logger.error("a step of %d sequences failed", len(sequences), exc_info=error)
        return self._book.fail(sequences, f"{type(error).__name__}: {error}")

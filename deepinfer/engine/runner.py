"""ModelRunner: the model with its caches; runs one step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer import envs
from deepinfer.config.engine import EngineConfig
from deepinfer.config.reading import read_model_config
from deepinfer.engine.cuda_graph import DecodeGraphs
from deepinfer.engine.decode_curve import DecodeCurve, curve_key, load_or_measure
from deepinfer.engine.memory import check_caches_fit, default_cache_bytes
from deepinfer.engine.prefill_graphs import PrefillGraphs
from deepinfer.engine.step_buffers import StepShape
from deepinfer.engine.swap import CacheRows
from deepinfer.kernels.registry import keep_from_compiler
from deepinfer.models.caches import CACHE_DTYPES
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.draft_head import DraftHead
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.registry import Model, load_model
from deepinfer.observability.expert_counts import ExpertCounts
from deepinfer.observability.flops import FlopsEstimator
from deepinfer.observability.timers import CUDATimer, ScopeTime
from deepinfer.speculation.draft_context import DraftContext
from deepinfer.speculation.limits import draft_bytes, num_drafts
from deepinfer.speculation.slot_tokens import SlotTokens

logger = logging.getLogger(__name__)

CURVE_CONTEXT_LEN = 1024  # tokens of the sequences that the decode curve is measured with

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """Arithmetic of the model: "auto" is BF16 on a GPU, and FP32 on a CPU, whose BF16 is several times slower."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.bfloat16 if torch.device(config.device).type == "cuda" else torch.float32


def check_truncation(model: Model, config: EngineConfig, backtracking: int = 0) -> None:
    """Raise ValueError if YoCo truncation is asked of a model without it, or keeps too little to decode from.

    A decode step reads a window that ends up to `backtracking` tokens, or what the model needs, before the end of the
    prompt.
    """
    mode, keep = config.yoco_prefill_truncation_mode, config.yoco_prefill_keep_tokens
    if mode == "off":
        return
    if model.yoco_window is None:
        raise ValueError(f"yoco_prefill_truncation_mode must be off for this model, got {mode!r}")
    window, needed = model.yoco_window
    backtracking = max(needed, backtracking)
    if keep is None or keep < window + backtracking:
        raise ValueError(
            f"yoco_prefill_keep_tokens must be at least {window + backtracking} (sliding_window {window} + "
            f"max_backtracking_tokens {backtracking}) in mode {mode!r}, got {keep}"
        )


def check_max_model_len(config: EngineConfig, limit: int) -> None:
    """Raise ValueError if longer sequences are asked for than the model has positions for."""
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len must be at most {limit}, the model's own limit, got {config.max_model_len}")


class ModelRunner:
    """Owns the caches. `num_blocks` counts the null block.

    `graphs` runs the decode steps in padded, captured shapes; None: they run eagerly, as they come.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model = model
        self.draft_head: DraftHead | None = getattr(model, "draft_head", None)
        self.num_drafts = num_drafts(config, model)
        backtracking = max(config.max_backtracking_tokens or 0, self.num_drafts + 1 if self.num_drafts else 0)
        check_truncation(model, config, backtracking)
        self.flops = FlopsEstimator(model.config) if isinstance(model, DeepseekV41) else None
        self._expert_counts = ExpertCounts()
        on_gpu = torch.device(config.device).type == "cuda"
        self._step_timer = CUDATimer(enabled=on_gpu and envs.get("DEEPINFER_TIMERS"))  # of steps that are not replayed
        self._chosen_experts: dict[StepShape, list[Tensor]] = {}  # a replay writes them where its capture did
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_position_embeddings
        self.eos_token_ids = model.eos_token_ids
        self.image_token_id: int = getattr(model.config, "image_token_id", -1)
        automatic = config.kv_cache_dtype == "auto"
        cache_dtype = model.default_cache_dtype if automatic else CACHE_DTYPES[config.kv_cache_dtype]
        check_max_model_len(config, self.max_model_len)
        longest = config.max_model_len or self.max_model_len
        block_bytes = model.block_bytes(config.block_size, cache_dtype)
        slot_bytes = model.slot_bytes(cache_dtype, backtracking)
        slot_bytes += draft_bytes(config, self.num_drafts, self.vocab_size)
        self.num_blocks = config.resolve_num_blocks(block_bytes, longest, default_cache_bytes(config, slot_bytes))
        check_caches_fit(config, self.num_blocks, block_bytes, slot_bytes)
        self.caches = model.allocate_caches(
            self.num_blocks,
            config.block_size,
            config.max_num_seqs + 1,
            cache_dtype,
            backtracking,
        )
        self.draft_context = None if self.draft_head is None else DraftContext(self.draft_head, self.caches)
        self.config = config
        self.max_context_len = min(longest, (self.num_blocks - 1) * config.block_size)
        self.graphs = self._captured_graphs()
        self.prefill_graphs = self._captured_chunks()
        self._decode_curve: DecodeCurve | None = None
        if self.graphs is not None and self.graphs.is_captured:
            self.decode_curve()

    @classmethod
    def from_checkpoint(cls, path: str | Path, config: EngineConfig) -> ModelRunner:
        """Load the checkpoint folder at `path`. Raises ValueError naming what is wrong with it."""
        check_max_model_len(config, read_model_config(path).max_position_embeddings)  # before minutes of loading
        speculative = config.speculative_config
        with_head = speculative is not None and speculative.method == "dspark"
        model = load_model(path, compute_dtype(config), config.device, config.quantize_activations, with_head)
        return cls(model, config)

    def _captured_graphs(self) -> DecodeGraphs | None:
        """Padded decode steps, captured where they can be, as the configuration asks for them.

        Without a word from it, a step that cannot be captured is no error: kernels may be missing (no Triton).
        """
        config, on_gpu = self.config, torch.device(self.config.device).type == "cuda"
        if not (on_gpu if config.cuda_graphs is None else config.cuda_graphs) and not config.torch_compile:
            return None
        if config.torch_compile:
            keep_from_compiler("cpu")
        graphs = self._new_graphs(torch.compile(self.forward, dynamic=False) if config.torch_compile else self.forward)
        if not on_gpu or config.cuda_graphs is False:
            return graphs
        try:
            graphs.capture()
        except RuntimeError as error:
            if config.cuda_graphs:
                raise ValueError(f"cuda_graphs must be false or unset here: {error}") from error
            logger.warning("decode steps run without CUDA graphs: %s", error)
            return None
        return graphs

    def _new_graphs(self, forward: Callable[[ModelInputs], Tensor]) -> DecodeGraphs:
        def forward_padded(inputs: ModelInputs) -> Tensor:
            logits = forward(inputs)
            self._chosen_experts[StepShape(*inputs.block_tables.shape)] = self.model.chosen_experts
            return logits

        config = self.config
        return DecodeGraphs(
            forward_padded,
            config.max_num_seqs,
            config.cudagraph_batch_size_interval,
            -(-self.max_context_len // config.block_size),
            config.device,
            self._set_mark if envs.get("DEEPINFER_TIMERS") else None,
            SlotTokens.allocate(config.max_num_seqs + 1, self.num_drafts, config.device),
        )

    def _captured_chunks(self) -> PrefillGraphs | None:
        """Full chunks of long prompts, captured where decode steps are; None where that cannot be."""
        config, model = self.config, self.model
        if self.graphs is None or not self.graphs.is_captured or not isinstance(model, DeepseekV41):
            return None
        mode = config.yoco_prefill_truncation_mode
        if mode == "mask":
            return None
        graphs = PrefillGraphs(
            self._forward_chunk,
            min(config.chunk_tokens, config.step_tokens),
            model.config.sliding_window,
            -(-self.max_context_len // config.block_size),
            config.block_size,
            config.yoco_prefill_keep_tokens if mode == "compact" else None,
            config.device,
        )
        try:
            graphs.capture()
        except RuntimeError as error:  # no room for it, for example
            logger.warning("prefill runs without CUDA graphs: %s", str(error).partition("\n")[0])
            return None
        return graphs

    def _forward_chunk(self, inputs: ModelInputs) -> tuple[Tensor, list[Tensor]]:
        return self.forward(inputs), self.model.chosen_experts

    def decode_curve(self) -> DecodeCurve:
        """Milliseconds of a decode step by batch size. Measured at start-up where steps are captured, else on request.

        The first call writes into the caches unless the curve is on disk: no sequence may run.
        """
        if self._decode_curve is None:
            graphs = self.graphs or self._new_graphs(self.forward)
            context_len = min(self.max_context_len, CURVE_CONTEXT_LEN)
            key = curve_key(self.model.config, self.config) | {
                "arithmetic": str(compute_dtype(self.config)),
                "context_len": context_len,
                "max_blocks": graphs.shapes[-1].blocks,
                "captured": graphs.is_captured,
                "timed": graphs.is_timed,
                "clock": "thread" if self.config.device == "cpu" else "device",
                "num_drafts": self.num_drafts,
                "draft_head": self.draft_head is not None,  # a step then stores its context rows, too
            }
            sizes = (context_len, self.config.block_size, self.num_blocks, self.vocab_size)
            quick = not graphs.is_captured  # such a step may take long
            self._decode_curve = load_or_measure(
                key, lambda: graphs.step_times(*sizes, repeats=3 if quick else 5, powers_only=quick)
            )
        return self._decode_curve

    def part_times(self) -> dict[str, ScopeTime]:
        """Device times of prefill steps and of the parts of replayed decode steps, where DEEPINFER_TIMERS is on.

        Never waits.
        """
        times = self._step_timer.summary()
        if self.graphs is not None:
            parts = self.graphs.read_part_times().summary()
            times |= {f"decode {name}": time for name, time in parts.items()}
        return times

    def _set_mark(self, mark: Callable[[str], None] | None) -> None:
        self.model.mark = mark

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Logits float32 [R, vocab_size] of inputs.logits_rows, eagerly; the draft head sees what it needs."""
        logits = self.model.forward(inputs, self.caches).float()
        if self.draft_context is not None:
            assert isinstance(self.model, DeepseekV41) and self.model.taps is not None
            self.draft_context.add(self.model.taps, inputs.is_prefill)
        return logits

    def cache_rows(self) -> CacheRows:
        """The caches as rows of bytes."""
        return CacheRows.of(self.caches)

    def run(self, inputs: ModelInputs) -> Tensor:
        """The same, through a graph where there is one for the step."""
        if inputs.is_prefill or self.graphs is None:
            chunks = self.prefill_graphs if inputs.is_prefill else None
            shape = None if chunks is None else chunks.shape_of(inputs)
            with self._step_timer.scope("prefill" if inputs.is_prefill else "decode"):
                logits, chosen = (
                    self._forward_chunk(inputs) if chunks is None or shape is None else chunks.run(inputs, shape)
                )
        else:
            logits = self.graphs.run(inputs)
            chosen = self._chosen_experts[self.graphs.shape_of(*inputs.block_tables.shape)]
        config = self.model.config
        self._expert_counts.offer(chosen, len(inputs.token_ids), config.num_hidden_layers, config.n_routed_experts)
        return logits

    @property
    def expert_counts(self) -> np.ndarray | None:
        """int64 [layers, experts]: tokens of each expert in a recent step; None unless there is news."""
        return self._expert_counts.take()

"""DeepSeek-V4.1 as the engine runs it: flattened rows of many sequences against paged and state caches.

The equations are those of `models/reference.py`; this file says in which order, and the layers say how. Weights are
taken out of the loaded dict one by one, so that fusing them does not hold two copies of the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels import ops
from deepinfer.kernels.reference.engram import BOUNDARY
from deepinfer.models.caches import BlockCache, Caches, StateCache, block_bytes
from deepinfer.models.draft_head import DraftHead, Taps
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.layers.block import build_layer
from deepinfer.models.layers.decode_step import decode_metadata
from deepinfer.models.layers.engram import advance_history
from deepinfer.models.layers.hyper_connection import HCLazyPostData, hc_enter
from deepinfer.models.layers.indexer import Sharing
from deepinfer.models.layers.linear import wide_linear, widened
from deepinfer.models.layers.rope import rope_frequencies
from deepinfer.models.layers.step import StepMetadata
from deepinfer.models.layers.yoco import decoder_half
from deepinfer.models.loader import StoredTensor


class DeepseekV41:
    """The text model. `forward` reads and writes the caches that `allocate_caches` makes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        token_map: Tensor | None = None,
        quantize_activations: bool = False,
        stored_experts: dict[str, StoredTensor] | None = None,
        draft_head: bool = False,
    ) -> None:
        """Take over `weights` (emptied on return: the model holds the only copy).

        Args:
            weights: in-memory weights (see models/loader.py); embed.weight's dtype is the dtype of the computation.
            token_map: int64 [vocab], the Engram compressed token map; needed when the config has Engram layers.
            quantize_activations: round the activations of FP8 and FP4 linears to FP8, as the released model does.
            stored_experts: routed experts in FP4 (also taken over); None: they are among `weights`.
            draft_head: build the draft head from the mtp.* tensors, and leave `taps` for it at every step.
        """
        if config.engram_layer_ids and token_map is None:
            raise ValueError("token_map: needed, the config has engram_layer_ids")
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids: tuple[int, ...] = (config.eos_token_id,)
        self.default_cache_dtype = torch.uint8  # the released FP8 and FP4 rows
        self.yoco_window: tuple[int, int] | None = (config.sliding_window, config.max_backtracking_tokens)
        self.quantize_activations = quantize_activations
        self.mark: Callable[[str], None] | None = None  # called with the name of the part that has just ended
        self.chosen_experts: list[Tensor] = []  # int32 [N, k] of every layer that the latest step ran
        self.embed = weights.pop("embed.weight")
        self.norm = weights.pop("norm.weight")
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.head = widened(weights.pop("head.weight"))
        self.frequencies = {kind: rope_frequencies(config, kind).to(self.device) for kind in (False, True)}
        self.token_map = None if token_map is None else token_map.to(self.device, torch.int64)
        if self.token_map is not None and config.image_token_id >= 0:
            self.token_map = self.token_map.clone()
            self.token_map[config.image_token_id] = BOUNDARY
        self.layers = [build_layer(weights, plan, config, self.token_map, stored_experts) for plan in config.layers]
        self.taps: Taps | None = None  # of the latest step, if there is a draft head
        self.draft_head = None
        if draft_head:
            self.draft_head = DraftHead(
                config, weights, self.embed, self.head, self.frequencies[False], quantize_activations, stored_experts
            )
        weights.clear()

    def block_bytes(self, block_size: int, cache_dtype: torch.dtype) -> int:
        """Bytes that one cache block takes in all layers."""
        return block_bytes(self.config, block_size, cache_dtype)

    def slot_bytes(self, cache_dtype: torch.dtype, max_backtracking_tokens: int = 0) -> int:
        """Bytes of the state of one sequence: measured on tensors without memory."""
        ring_size = self._ring_size(max_backtracking_tokens)
        state = StateCache.allocate(self.config, 1, cache_dtype, self.wide, "meta", ring_size, self._num_draft_rings)
        return state.storage.nbytes

    @property
    def _num_draft_rings(self) -> int:
        return 0 if self.draft_head is None else len(self.draft_head.layers)

    def _ring_size(self, max_backtracking_tokens: int) -> int:
        return max(self.config.ring_size, self.config.sliding_window + max_backtracking_tokens)

    def allocate_caches(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        cache_dtype: torch.dtype,
        max_backtracking_tokens: int = 0,
    ) -> Caches:
        """Zeroed caches; `num_blocks` and `num_slots` include the null block and the null slot.

        Rings have room for `max_backtracking_tokens` beside the window, and for what the draft head needs.
        """
        ring_size = self._ring_size(max_backtracking_tokens)
        return Caches(
            BlockCache.allocate(self.config, num_blocks, block_size, cache_dtype, self.device),
            StateCache.allocate(
                self.config, num_slots, cache_dtype, self.wide, self.device, ring_size, self._num_draft_rings
            ),
        )

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, caches: Caches) -> Tensor:
        """One step -> logits, at least float32 [R, vocab], of `inputs.logits_rows`."""
        config = self.config
        plan = StepMetadata.build if inputs.is_prefill else decode_metadata
        step = plan(inputs, config, self.frequencies, caches.blocks.block_size, self.wide, caches.state.ring_size)
        sharing = Sharing()
        # Known beforehand where the host knows the lengths: then the decoder layers' part of the plan is not made.
        ends_early = inputs.drop_rows and inputs.lengths is not None and not inputs.lengths.kept.any()
        decoder = None if inputs.keep_from is None or ends_early else decoder_half(step, config)
        ngrams = None if self.token_map is None else advance_history(self.token_map, step, caches)
        e = F.embedding(inputs.token_ids, self.embed)
        lazy = HCLazyPostData(e.unsqueeze(1).expand(-1, config.hc_mult, -1).contiguous())
        p_prev = torch.zeros(e.shape[0], config.hc_mult, dtype=self.wide, device=self.device)
        p_prev[:, 0] = 1.0
        is_image = None
        if config.image_token_id >= 0:  # every position of an image span carries this id
            is_image = (inputs.token_ids == config.image_token_id).unsqueeze(1)
        chosen: list[Tensor] = []
        self.chosen_experts = chosen
        tapped = () if self.draft_head is None else config.dspark_target_layer_ids
        taps: list[Tensor] = []
        for layer in self.layers:
            if layer.engram is not None and ngrams is not None:
                lazy = HCLazyPostData(
                    layer.engram.forward(lazy.materialize(), ngrams, config, self.quantize_activations)
                )
            x, pre, lazy = hc_enter(lazy, p_prev, layer.attention_hc, config)
            self._mark("rest")
            if layer.attention.compressor is not None:
                layer.attention.compressor.forward(x, step, caches)
            if ends_early and layer.plan.layer_id == config.num_encoder_layers:
                break  # no row of this chunk goes on
            if decoder is not None and layer.plan.layer_id == config.num_encoder_layers:
                rows, step = decoder.rows, decoder.step
                x, pre, lazy = x[rows], pre[rows], lazy.rows(rows)
                ngrams = None if ngrams is None else ngrams[rows]
                is_image = None if is_image is None else is_image[rows]
                taps = [tap[rows] for tap in taps]
                if not len(rows):
                    break
            if layer.plan.layer_id in tapped:  # the streams in front of the layer, which hc_enter has just completed
                taps.append(lazy.h.mean(1, dtype=self.wide).to(self.dtype))
            y = layer.attention.forward(x, config, step, caches, sharing, self.quantize_activations)
            self._mark("attention")
            x, p_prev, lazy = hc_enter(lazy.with_output(y), pre, layer.ffn_hc, config)
            self._mark("rest")
            lazy = lazy.with_output(layer.ffn.forward(x, is_image, config, self.quantize_activations, chosen))
            self._mark("moe")
        if tapped:
            self.taps = self._taps(taps, step)
        if inputs.is_prefill:  # every row of a decode step wants logits
            rows = step.inputs.logits_rows
            if not len(rows):  # a chunk that ends no prompt
                return torch.empty(0, self.vocab_size, dtype=self.wide, device=self.device)
            lazy, p_prev = lazy.rows(rows), p_prev[rows]
        return self._logits(lazy, p_prev)

    def _taps(self, taps: list[Tensor], step: StepMetadata) -> Taps:
        """Of the rows that ran the decoder layers: none where no row of a chunk is kept."""
        num_rows = len(step.inputs.positions) if len(taps) == len(self.config.dspark_target_layer_ids) else 0
        hidden = torch.cat([tap[:num_rows] for tap in taps], dim=-1) if num_rows else self.embed[:0]
        states = step.state_slots.to(torch.int32)[step.sequence_of_row[:num_rows].long()]
        return Taps(hidden, step.inputs.positions[:num_rows], states)

    def _mark(self, part: str) -> None:
        if self.mark is not None:
            self.mark(part)

    def _logits(self, lazy: HCLazyPostData, p_prev: Tensor) -> Tensor:
        h = lazy.materialize().to(self.wide)
        y = ops.rms_norm((p_prev.unsqueeze(-1) * h).sum(1).to(self.dtype), self.norm, self.config.rms_norm_eps)
        return wide_linear(y, self.head)

"""FlopsEstimator: floating-point operations of a step, by component, from the config and the context lengths.

Counted are matrix products at 2 operations a multiply-add, what torch.utils.flop_counter counts too: projections,
attention over the keys that a query may see, index scores, chosen experts, mHC, Engram, head. Norms, RoPE, softmax,
gates, hashing and rounding are element-wise and not counted. Padding, masked keys and the draft model are not useful
work of the target model and not counted either, so the figure suits MFU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerPlan


@dataclass
class StepFlops:
    """Floating-point operations of one step by component."""

    projections: int = 0  # queries, window KV, output
    attention: int = 0  # scores and weighted sums over window and selected keys
    indexer: int = 0  # index queries and scores
    compressor: int = 0  # compressed KV and index keys
    experts: int = 0  # gate, routed and shared experts
    hyper_connections: int = 0
    engram: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        """Floating-point operations of the step, a multiply-add as two."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class LayerGroup:
    """Layers that run for the same rows, summed up once: all, the encoder or the decoder layers."""

    num_layers: int
    num_engram: int
    num_index_sources: int
    by_ratio: dict[int, tuple[int, int, int]]  # layers, index sources over all entries, over the candidates only

    @classmethod
    def of(cls, layers: tuple[LayerPlan, ...]) -> LayerGroup:
        """Sum these layers up."""
        by_ratio = {}
        for ratio in {layer.compress_ratio for layer in layers if layer.compress_ratio}:
            alike = [layer for layer in layers if layer.compress_ratio == ratio]
            readers = sum(layer.reads_candidates for layer in alike)
            by_ratio[ratio] = len(alike), sum(layer.is_index_source for layer in alike) - readers, readers
        return cls(
            len(layers),
            sum(layer.has_engram for layer in layers),
            sum(layer.is_index_source for layer in layers),
            by_ratio,
        )


class FlopsEstimator:
    """Counts for one model. Cheap enough for every step: a few operations on arrays of the step's rows."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        depth = config.num_encoder_layers
        self._all = LayerGroup.of(config.layers)
        self._encoder, self._decoder = LayerGroup.of(config.layers[:depth]), LayerGroup.of(config.layers[depth:])
        self._sources_by_ratio = Counter(config.compress_ratios[layer_id] for layer_id in config.kv_source_layer_ids)

    def step(
        self, starts: np.ndarray, counts: np.ndarray, num_logits_rows: int, keep_from: np.ndarray | None = None
    ) -> StepFlops:
        """Useful operations of a prefill chunk or a decode step of S sequences.

        Args:
            starts: int [S], tokens of each sequence in the cache before the step.
            counts: int [S], tokens of each sequence in the step (1 each when decoding).
            num_logits_rows: rows that go through the head.
            keep_from: int [S], position from which rows run the decoder layers (YoCo truncation); None: all do.
        """
        config, flops = self.config, StepFlops()
        starts = np.asarray(starts, np.int64)
        ends = starts + counts
        num_rows = num_kept = int(counts.sum())
        positions = _positions(starts, counts, num_rows)
        if keep_from is None:
            self._add_layers(flops, self._all, positions, positions + 1)
        else:
            self._add_layers(flops, self._encoder, positions, positions + 1)
            kept_starts = np.clip(keep_from, starts, ends)
            kept_counts = ends - kept_starts
            num_kept = int(kept_counts.sum())
            kept = _positions(kept_starts, kept_counts, num_kept)
            # A kept row's window does not reach behind keep_from.
            self._add_layers(flops, self._decoder, kept, kept + 1 - np.repeat(keep_from, kept_counts))
        self._add_hyper_connections(flops, num_rows, num_kept, num_logits_rows)
        for ratio, num_sources in self._sources_by_ratio.items():
            num_groups = int((ends // ratio - starts // ratio).sum())
            self._add_compressors(flops, ratio, num_sources, num_rows, num_groups)
        flops.head = 2 * num_logits_rows * config.vocab_size * config.hidden_size
        return flops

    def _add_layers(self, flops: StepFlops, group: LayerGroup, positions: np.ndarray, in_window: np.ndarray) -> None:
        """What the layers do for each row; in_window int64 [N]: tokens up to the row that its window may hold."""
        config, num_rows = self.config, len(positions)
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        projection = (
            hidden * (config.q_lora_rank + dim)
            + config.q_lora_rank * heads * dim
            + heads * dim * config.o_lora_rank
            + config.o_groups * config.o_lora_rank * hidden
        )
        expert = 3 * hidden * config.moe_intermediate_size
        feed_forward = hidden * config.n_routed_experts + (config.num_experts_per_tok + 1) * expert
        index_query = config.q_lora_rank * config.index_n_heads * config.index_head_dim + hidden * config.index_n_heads
        lookup = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
        engram = lookup * (config.hc_mult + 1) * hidden
        flops.projections += 2 * projection * group.num_layers * num_rows
        flops.experts += 2 * feed_forward * group.num_layers * num_rows
        flops.indexer += 2 * index_query * group.num_index_sources * num_rows
        flops.engram += 2 * engram * group.num_engram * num_rows

        keys = group.num_layers * int(np.minimum(in_window, config.sliding_window).sum())
        entries = 0
        for ratio, (num_layers, num_sources, num_readers) in group.by_ratio.items():
            visible = (positions + 1) // ratio
            keys += num_layers * int(np.minimum(visible, config.index_topk).sum())
            entries += num_sources * int(visible.sum())
            if num_readers:
                entries += num_readers * int(self._in_candidate_blocks(visible).sum())
        flops.indexer += 2 * entries * config.index_n_heads * (config.index_head_dim + 1)
        flops.attention += 4 * keys * heads * dim

    def _in_candidate_blocks(self, visible: np.ndarray) -> np.ndarray:
        """Positions inside the kept blocks, of which the newest may be partly filled."""
        size, limit = self.config.candidate_block_size, self.config.candidate_topk_blocks
        return np.where(visible > size * limit, size * limit - (-visible) % size, visible)

    def _add_hyper_connections(self, flops: StepFlops, num_rows: int, num_kept: int, num_logits_rows: int) -> None:
        """Coefficients in front of a sub-layer, and the mix of the streams behind it."""
        config = self.config
        before = config.hc_mix_size * config.hc_mult * config.hidden_size
        behind = config.hc_mult**2 * config.hidden_size
        num_encoder, num_decoder = 2 * self._encoder.num_layers, 2 * self._decoder.num_layers
        # The first decoder layer is entered with all rows, because its compressor takes them all.
        entered = (num_encoder + 1) * num_rows + (num_decoder - 1) * num_kept
        # The last sub-layer's output is mixed in only where logits are wanted.
        mixed = num_encoder * num_rows + (num_decoder - 1) * num_kept + num_logits_rows
        flops.hyper_connections += 2 * (before * entered + behind * mixed)

    def _add_compressors(self, flops: StepFlops, ratio: int, num_sources: int, num_rows: int, num_groups: int) -> None:
        """Value and, where groups are pooled, gate of every row; an index key of every group that became full."""
        config = self.config
        outputs = config.head_dim * (1 if ratio == 1 else 2)
        row = config.hidden_size * outputs
        group = config.head_dim * config.index_head_dim
        flops.compressor += 2 * num_sources * (row * num_rows + group * num_groups)


def _positions(starts: np.ndarray, counts: np.ndarray, num_rows: int) -> np.ndarray:
    """int64 [num_rows]: starts[i], starts[i] + 1, ... of every sequence."""
    if num_rows == len(counts) and counts.min() == 1:  # a decode step
        return starts
    first = counts.cumsum() - counts
    return np.arange(num_rows) + np.repeat(starts - first, counts)

"""FlopsEstimator: floating-point operations of a step, by component, from the config and the context lengths.

Counted are matrix products at 2 operations a multiply-add, what torch.utils.flop_counter counts too: projections,
attention over the keys that a query may see, index scores, chosen experts, mHC, Engram, head. Norms, RoPE, softmax,
gates, hashing and rounding are element-wise and not counted. Padding, masked keys and the draft model are not useful
work of the target model and not counted either, so the figure suits MFU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Rows:
    """Query rows of a step: sequence i contributes positions [starts[i], ends[i])."""

    starts: np.ndarray  # int64 [S]
    ends: np.ndarray  # int64 [S]

    @property
    def counts(self) -> np.ndarray:
        return self.ends - self.starts

    @property
    def positions(self) -> np.ndarray:
        """int64 [N], of all rows."""
        counts = self.counts
        first = counts.cumsum() - counts
        return np.arange(counts.sum()) + np.repeat(self.starts - first, counts)


@dataclass(frozen=True)
class Half:
    """Layers that run for the same rows, counted once: the encoder or the decoder layers."""

    num_layers: int
    num_engram: int
    num_index_sources: int
    by_ratio: dict[int, tuple[int, int, int]]  # layers, index sources over all entries, over the candidates only

    @classmethod
    def of(cls, layers: tuple[LayerPlan, ...]) -> Half:
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
        self._encoder, self._decoder = Half.of(config.layers[:depth]), Half.of(config.layers[depth:])

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
        rows = Rows(np.asarray(starts, np.int64), np.asarray(starts, np.int64) + counts)
        kept, replayed = rows, rows.positions + 1
        if keep_from is not None:
            kept = Rows(np.clip(keep_from, rows.starts, rows.ends), rows.ends)
            # A kept row's window does not reach behind keep_from.
            replayed = kept.positions + 1 - np.repeat(np.asarray(keep_from, np.int64), kept.counts)
        self._add_layers(flops, self._encoder, rows.positions, rows.positions + 1)
        self._add_layers(flops, self._decoder, kept.positions, replayed)
        num_rows, num_kept = int(rows.counts.sum()), int(kept.counts.sum())
        self._add_hyper_connections(flops, num_rows, num_kept, num_logits_rows)
        for layer_id in config.kv_source_layer_ids:
            self._add_compressor(flops, config.layers[layer_id].compress_ratio, rows)
        flops.head = 2 * num_logits_rows * config.vocab_size * config.hidden_size
        return flops

    def _add_layers(self, flops: StepFlops, half: Half, positions: np.ndarray, in_window: np.ndarray) -> None:
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
        flops.projections += 2 * projection * half.num_layers * num_rows
        flops.experts += 2 * feed_forward * half.num_layers * num_rows
        flops.indexer += 2 * index_query * half.num_index_sources * num_rows
        flops.engram += 2 * engram * half.num_engram * num_rows

        keys = half.num_layers * int(np.minimum(in_window, config.sliding_window).sum())
        entries = 0
        for ratio, (num_layers, num_sources, num_readers) in half.by_ratio.items():
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

    def _add_compressor(self, flops: StepFlops, ratio: int, rows: Rows) -> None:
        """One KV source: value and, where groups are pooled, gate of every row; an index key for every full group."""
        config = self.config
        outputs = config.head_dim * (1 if ratio == 1 else 2)
        num_groups = int((rows.ends // ratio - rows.starts // ratio).sum())
        flops.compressor += 2 * int(rows.counts.sum()) * config.hidden_size * outputs
        flops.compressor += 2 * num_groups * config.head_dim * config.index_head_dim

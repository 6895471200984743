"""Engram: an n-gram hash memory gated into the streams (spec: model, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm.linear import Fp8Weight
from deepinfer.kernels.ops import RowFormat
from deepinfer.models.caches import Caches
from deepinfer.models.layers.engram_map import engram_multipliers
from deepinfer.models.layers.linear import quantized_linear
from deepinfer.models.layers.step import StepMetadata


@dataclass(frozen=True)
class EngramHash:
    """Constants of one Engram layer's hash."""

    multipliers: Tensor  # int64 [n]
    primes: Tensor  # int64 [n - 1, heads]
    offsets: Tensor  # int64 [n - 1, heads]
    pad: int

    @classmethod
    def build(cls, config: ModelConfig, layer_id: int, pad: int, device: torch.device | str) -> EngramHash:
        """`pad` is the compressed id of engram_pad_token_id."""
        multipliers = engram_multipliers(layer_id, config.engram_compressed_vocab_size)
        primes = torch.tensor(config.engram_primes[config.engram_layer_ids.index(layer_id)])
        shape = (config.engram_max_ngram_size - 1, config.engram_n_heads)
        return cls(
            torch.tensor([int(m) for m in multipliers[: config.engram_max_ngram_size]], device=device),
            primes.view(shape).to(device),
            (primes.cumsum(0) - primes).view(shape).to(device),
            pad,
        )


@dataclass(frozen=True)
class Engram:
    """Weights of one Engram layer."""

    hash: EngramHash
    table: Tensor  # [rows, engram_head_dim], or packed FP8 rows uint8 [1, rows, engram_head_dim * 33 / 32]
    wkv: Tensor | Fp8Weight  # [(hc + 1) * D, heads * engram_head_dim]
    weight: Tensor  # [hc, D] = q_weight * k_weight

    def forward(self, h: Tensor, ngrams: Tensor, config: ModelConfig, quantize_activations: bool) -> Tensor:
        """h [N, hc, D], ngrams int64 [N, n] compressed ids (token itself first) -> [N, hc, D]."""
        ids = ops.engram_hash(ngrams, self.hash.multipliers, self.hash.primes, self.hash.offsets, self.hash.pad)
        if self.table.dtype == torch.uint8:
            rows = ops.load_rows(self.table, ids, RowFormat.FP8, config.engram_head_dim, h.dtype).flatten(1)
        else:
            rows = F.embedding(ids, self.table).flatten(1).to(h.dtype)
        kv = quantized_linear(rows, self.wkv, quantize_activations)
        alive = ngrams[:, 0] >= 0 if config.image_token_id >= 0 else None  # nothing is read inside an image span
        return ops.engram_gate(h, kv, self.weight, alive, config.rms_norm_eps)


def advance_history(token_map: Tensor, step: StepMetadata, caches: Caches) -> Tensor:
    """Compressed ids that each row's n-grams are made of; the state's history moves past this step.

    token_map int64 [vocab] -> int64 [N, n], BOUNDARY before the first token of a sequence.
    """
    kept = step.history
    return ops.ngram_ids(
        step.inputs.token_ids,
        token_map,
        caches.state.history,
        step.state_slots,
        step.ngram_source,
        kept.rows,
        kept.slots,
        kept.places,
    )

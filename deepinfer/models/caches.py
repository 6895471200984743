"""The two caches of a model: paged blocks and per-sequence state (system spec; spec: model, section 7).

*Block cache*: compressed KV and index keys, which grow with the context. One tensor a KV source layer,
[num_blocks, block_size / ratio, row]; all layers share one block table.

*State cache*: everything of fixed size per sequence, one slot each, as one byte row

    [ stored region: SWA rings of the encoder layers | dropped: decoder rings | draft rings | compressor carry |
      Engram history ]

so that persisting a sequence is a length truncation to `stored_bytes`. Slot 0 and block 0 take padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels.ops import RowFormat

CACHE_DTYPES = {"fp8": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def row_width(row_format: RowFormat, dim: int, dtype: torch.dtype) -> int:
    """Last dimension of a cache of `dtype`: packed bytes, or `dim` plain values."""
    return row_format.row_bytes(dim) if dtype == torch.uint8 else dim


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of tokens takes in all layers (V4.1-Flash, packed, 128 tokens: 113,920)."""
    entry = row_width(RowFormat.NVFP4, config.head_dim, dtype) + row_width(
        RowFormat.MXFP4, config.index_head_dim, dtype
    )
    entries = sum(block_size // config.compress_ratios[layer] for layer in config.kv_source_layer_ids)
    return entries * entry * dtype.itemsize


@dataclass
class BlockCache:
    """Paged cache. `latents[l]` and `index_keys[l]`: [num_blocks, block_size / ratio, row] of KV source layer l."""

    block_size: int
    latents: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> BlockCache:
        cache = cls(block_size)
        for layer in config.kv_source_layer_ids:
            ratio = config.compress_ratios[layer]
            if block_size % ratio:
                raise ValueError(
                    f"block_size is {block_size}, allowed: a multiple of compress_ratios[{layer}] = {ratio}"
                )
            shape = (num_blocks, block_size // ratio)
            latent = row_width(RowFormat.NVFP4, config.head_dim, dtype)
            index = row_width(RowFormat.MXFP4, config.index_head_dim, dtype)
            cache.latents[layer] = torch.zeros(*shape, latent, dtype=dtype, device=device)
            cache.index_keys[layer] = torch.zeros(*shape, index, dtype=dtype, device=device)
        return cache


def carry_size(ratio: int, backtracking: int) -> int:
    """Tokens that a compressor's carry has room for: a step of `backtracking` tokens overwrites none it must keep."""
    return max(-(-backtracking // ratio), 1) * ratio


def history_size(ngram: int, backtracking: int) -> int:
    """Compressed ids that the Engram history has room for."""
    return max(ngram - 1, 1) + max(backtracking, 0)


@dataclass
class StateCache:
    """Views into one byte tensor [num_slots, slot_bytes].

    rings[l]: [num_slots, ring_size, row] of every layer; carry[l]: [num_slots, carry_size, 2, head_dim], compressor
    inputs (a, b) of ratio-2 KV sources; history: int64 [num_slots, history_size], the latest compressed ids. All three
    are rings, a token at position % size, with room for the tokens that a step may take back beside those that are
    looked up: positions behind the last accepted one are overwritten, and nothing has to be restored.
    """

    storage: Tensor
    stored_bytes: int
    rings: list[Tensor]
    carry: dict[int, Tensor]
    history: Tensor
    draft_rings: list[Tensor] = field(default_factory=list)  # as `rings`, of each stage of a draft head that is loaded

    @property
    def ring_size(self) -> int:
        """Tokens that a ring holds."""
        return self.rings[0].shape[1]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_slots: int,
        dtype: torch.dtype,
        compute: torch.dtype,
        device: torch.device | str,
        ring_size: int | None = None,
        num_draft_rings: int = 0,
    ) -> StateCache:
        """Zeroed; `ring_size` slots a ring, by default what the window and the draft head need."""
        ring_size = ring_size or config.ring_size
        row = row_width(RowFormat.FP8, config.head_dim, dtype)
        ring_bytes = ring_size * row * dtype.itemsize
        ratios = {layer: config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
        carry_layers = [layer for layer, ratio in ratios.items() if ratio > 1]
        backtracking = ring_size - config.sliding_window
        num_history = history_size(config.engram_max_ngram_size, backtracking)
        carry_rows = {layer: carry_size(ratios[layer], backtracking) for layer in carry_layers}
        sizes = [ring_bytes] * (config.num_hidden_layers + num_draft_rings)
        sizes += [carry_rows[layer] * 2 * config.head_dim * compute.itemsize for layer in carry_layers]
        sizes += [num_history * 8]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 16) * 16)  # attention on a GPU loads 16 bytes at once
        storage = torch.zeros(num_slots, offsets[-1], dtype=torch.uint8, device=device)

        def view(index: int, view_dtype: torch.dtype, *shape: int) -> Tensor:
            region = storage[:, offsets[index] : offsets[index] + sizes[index]]
            return region.view(view_dtype).unflatten(1, shape)

        layers, num_rings = config.num_hidden_layers, config.num_hidden_layers + num_draft_rings
        return cls(
            storage,
            stored_bytes=offsets[config.num_encoder_layers],
            rings=[view(layer, dtype, ring_size, row) for layer in range(layers)],
            carry={
                layer: view(num_rings + i, compute, carry_rows[layer], 2, config.head_dim)
                for i, layer in enumerate(carry_layers)
            },
            history=view(len(sizes) - 1, torch.int64, num_history),
            draft_rings=[view(ring, dtype, ring_size, row) for ring in range(layers, num_rings)],
        )


@dataclass
class Caches:
    """Both caches of one model instance."""

    blocks: BlockCache
    state: StateCache

"""Names, shapes and storage of the public checkpoint (spec: model, section 2).

Two views of the same list:
  - `parameter_specs`: the model in memory, scales folded in, the routed experts of a layer stacked in one tensor;
  - `expected_tensors`: what the safetensors files hold, one entry a tensor, scales beside their weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerMode, VisionConfig

Weights = dict[str, torch.Tensor]
Storage = Literal["bf16", "f32", "fp8", "fp4", "fp8_rows", "e8m0"]
Shape = tuple[int, ...]

BLOCK = 32  # FP8: 32 x 32 values a scale; FP4 and Engram rows: 32 values of one row a scale
ELEMENT_BYTES: dict[Storage, int] = {"bf16": 2, "f32": 4, "fp8": 1, "fp4": 1, "fp8_rows": 1, "e8m0": 1}

# safetensors dtype names a reader accepts for each storage; the first one is what the writer writes.
FILE_DTYPES: dict[Storage, tuple[str, ...]] = {
    "bf16": ("BF16",),
    "f32": ("F32",),
    "fp8": ("F8_E4M3",),
    "fp8_rows": ("F8_E4M3",),
    "fp4": ("I8", "U8"),
    "e8m0": ("F8_E8M0", "U8"),
}


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One tensor of the in-memory model.

    `shape` is the logical shape (values, not bytes); stacked routed experts have a leading expert dimension.
    """

    name: str
    shape: Shape
    storage: Storage

    @property
    def is_expert_stack(self) -> bool:
        return ".ffn.experts." in self.name


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the safetensors files; `shape` is the stored shape (FP4: two values a byte)."""

    name: str
    shape: Shape
    storage: Storage  # "e8m0": a scale
    parameter: str  # the in-memory tensor that it is part of
    expert: int | None = None  # its row there, for a routed expert

    @property
    def num_bytes(self) -> int:
        size = ELEMENT_BYTES[self.storage]
        for dim in self.shape:
            size *= dim
        return size


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shapes of the in-memory model, in file order."""
    return {name: spec.shape for name, spec in parameter_specs(config).items()}


def parameter_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Every tensor of the in-memory model, in file order (vision, embed, layers, head, draft, Engram tables last)."""
    return {name: ParameterSpec(name, shape, storage) for name, shape, storage in _parameters(config)}


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the public files; 96,085 for DeepSeek-V4.1-Flash."""
    return {tensor.name: tensor for spec in parameter_specs(config).values() for tensor in stored_tensors(spec)}


def stored_tensors(spec: ParameterSpec) -> Iterator[TensorSpec]:
    """The file tensors of one parameter: weight then scale, expert by expert."""
    if not spec.is_expert_stack:
        yield from _weight_and_scale(spec.name, spec.shape, spec.storage, spec.name, None)
        return
    prefix, matrix = spec.name.split(".ffn.experts.")
    for expert in range(spec.shape[0]):
        name = f"{prefix}.ffn.experts.{expert}.{matrix}"
        yield from _weight_and_scale(name, spec.shape[1:], spec.storage, spec.name, expert)


def in_memory_dtype(storage: Storage, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, except that FP32 tensors of the file never get narrower (mHC, sinks, gate biases)."""
    return torch.float32 if storage == "f32" and dtype.itemsize < 4 else dtype


def _weight_and_scale(
    name: str, shape: Shape, storage: Storage, parameter: str, expert: int | None
) -> Iterator[TensorSpec]:
    stored = (*shape[:-1], shape[-1] // 2) if storage == "fp4" else shape
    yield TensorSpec(name, stored, storage, parameter, expert)
    if storage in ("fp8", "fp4", "fp8_rows"):
        rows = -(-shape[0] // BLOCK) if storage == "fp8" else shape[0]
        yield TensorSpec(name.removesuffix("weight") + "scale", (rows, shape[1] // BLOCK), "e8m0", parameter, expert)


_Item = tuple[str, Shape, Storage]


def _parameters(config: ModelConfig) -> Iterator[_Item]:
    hidden, vocab = config.hidden_size, config.vocab_size
    if config.vision is not None:
        yield from _vision(config.vision, hidden)
    yield "embed.weight", (vocab, hidden), "bf16"
    for layer in config.layers:
        prefix = f"layers.{layer.layer_id}"
        yield from _block(config, prefix, config.n_routed_experts)
        if layer.is_kv_source:
            yield from _compressor(config, f"{prefix}.attn.compressor", layer.compress_ratio)
        if layer.is_index_source:
            yield from _indexer(config, f"{prefix}.attn.indexer", owns_keys=layer.mode is LayerMode.FULL)
    yield "norm.weight", (hidden,), "bf16"
    yield "head.weight", (vocab, hidden), "bf16"
    for stage in range(config.num_nextn_predict_layers):
        yield from _draft_stage(config, stage)
    for layer_id, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        yield from _engram(config, f"layers.{layer_id}.engram", rows)


def _block(config: ModelConfig, prefix: str, num_experts: int) -> Iterator[_Item]:
    """Attention, mHC, gate, shared and routed experts: what every backbone and draft layer has."""
    hidden, inter, heads = config.hidden_size, config.moe_intermediate_size, config.num_attention_heads
    out_rows = config.o_groups * config.o_lora_rank
    yield f"{prefix}.attn_norm.weight", (hidden,), "bf16"
    yield f"{prefix}.ffn_norm.weight", (hidden,), "bf16"
    yield f"{prefix}.attn.wq_a.weight", (config.q_lora_rank, hidden), "fp8"
    yield f"{prefix}.attn.q_norm.weight", (config.q_lora_rank,), "bf16"
    yield f"{prefix}.attn.wq_b.weight", (heads * config.head_dim, config.q_lora_rank), "fp8"
    yield f"{prefix}.attn.wkv.weight", (config.head_dim, hidden), "fp8"
    yield f"{prefix}.attn.kv_norm.weight", (config.head_dim,), "bf16"
    yield f"{prefix}.attn.attn_sink", (heads,), "f32"
    yield f"{prefix}.attn.wo_a.weight", (out_rows, heads // config.o_groups * config.head_dim), "fp8"
    yield f"{prefix}.attn.wo_b.weight", (hidden, out_rows), "fp8"
    for part in ("attn", "ffn"):
        yield f"{prefix}.hc_{part}_fn", (config.hc_mix_size, config.hc_mult * hidden), "f32"
        yield f"{prefix}.hc_{part}_base", (config.hc_mix_size,), "f32"
        yield f"{prefix}.hc_{part}_scale", (3,), "f32"
    yield f"{prefix}.ffn.gate.weight", (num_experts, hidden), "bf16"
    yield f"{prefix}.ffn.gate.bias", (num_experts,), "f32"
    yield f"{prefix}.ffn.gate.bias_vl", (num_experts,), "f32"
    for matrix, shape in (("w1", (inter, hidden)), ("w2", (hidden, inter)), ("w3", (inter, hidden))):
        yield f"{prefix}.ffn.shared_experts.{matrix}.weight", shape, "fp8"
        yield f"{prefix}.ffn.experts.{matrix}.weight", (num_experts, *shape), "fp4"


def _compressor(config: ModelConfig, prefix: str, ratio: int) -> Iterator[_Item]:
    yield f"{prefix}.wkv.weight", (config.head_dim, config.hidden_size), "bf16"
    if ratio > 1:  # one token a group needs no pooling weights
        yield f"{prefix}.wgate.weight", (config.head_dim, config.hidden_size), "bf16"
    yield f"{prefix}.norm.weight", (config.head_dim,), "bf16"


def _indexer(config: ModelConfig, prefix: str, owns_keys: bool) -> Iterator[_Item]:
    yield f"{prefix}.wq_b.weight", (config.index_n_heads * config.index_head_dim, config.q_lora_rank), "fp8"
    yield f"{prefix}.weights_proj.weight", (config.index_n_heads, config.hidden_size), "bf16"
    if owns_keys:
        yield f"{prefix}.wk.weight", (config.index_head_dim, config.head_dim), "bf16"
        yield f"{prefix}.k_norm.weight", (config.index_head_dim,), "bf16"


def _engram(config: ModelConfig, prefix: str, rows: int) -> Iterator[_Item]:
    hidden, hc = config.hidden_size, config.hc_mult
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
    yield f"{prefix}.embed.weight", (rows, config.engram_head_dim), "fp8_rows"
    yield f"{prefix}.wkv.weight", ((hc + 1) * hidden, columns), "fp8"
    yield f"{prefix}.q_weight", (hc, hidden), "bf16"
    yield f"{prefix}.k_weight", (hc, hidden), "bf16"


def _draft_stage(config: ModelConfig, stage: int) -> Iterator[_Item]:
    hidden, rank, prefix = config.hidden_size, config.dspark_markov_rank, f"mtp.{stage}"
    yield from _block(config, prefix, config.dspark_n_routed_experts)
    if stage == 0:
        yield f"{prefix}.main_proj.weight", (hidden, len(config.dspark_target_layer_ids) * hidden), "fp8"
        yield f"{prefix}.main_norm.weight", (hidden,), "bf16"
    if stage == config.num_nextn_predict_layers - 1:
        yield f"{prefix}.markov_head.embed.weight", (config.vocab_size, rank), "bf16"
        yield f"{prefix}.markov_head.head.weight", (config.vocab_size, rank), "bf16"
        yield f"{prefix}.confidence_head.proj.weight", (1, hidden + rank), "bf16"
        yield f"{prefix}.norm.weight", (hidden,), "bf16"


def _vision(vision: VisionConfig, hidden: int) -> Iterator[_Item]:
    width, inter = vision.hidden_size, vision.intermediate_size
    yield "vision.patch_embed.proj.weight", (width, 3 * vision.patch_size**2), "bf16"
    yield "vision.patch_embed.proj.bias", (width,), "bf16"
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        yield f"{prefix}.norm1.weight", (width,), "bf16"
        yield f"{prefix}.norm2.weight", (width,), "bf16"
        yield f"{prefix}.attn.wqkv.weight", (3 * width, width), "bf16"
        yield f"{prefix}.attn.wqkv.bias", (3 * width,), "bf16"
        yield f"{prefix}.attn.wo.weight", (width, width), "bf16"
        yield f"{prefix}.attn.wo.bias", (width,), "bf16"
        yield f"{prefix}.mlp.w1.weight", (2 * inter, width), "bf16"
        yield f"{prefix}.mlp.w2.weight", (width, inter), "bf16"
    yield "vision.norm.weight", (width,), "bf16"
    yield "aligner.w1.weight", (hidden, width * vision.downsample_ratio**2), "bf16"
    yield "aligner.w1.bias", (hidden,), "bf16"
    yield "aligner.w2.weight", (hidden, hidden), "bf16"
    yield "aligner.w2.bias", (hidden,), "bf16"
    for name in ("image_start", "image_end", "image_newline"):
        yield name, (hidden,), "bf16"

"""DeepSeek-V4 weights in memory: names, shapes, and how the tensors of a checkpoint map to them.

In memory a tensor has its public name (`layers.0.attn.wq_a.weight`), except that the routed experts of a layer are one
stack and w1 and w3 one matrix (`w13`). Three spellings are accepted: the public files, the files that `transformers`
saves (public names with a few of its own) and its state dict. Float tensors only: the released FP8 / FP4 storage of V4
is refused. Draft blocks (`mtp.*`) are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.config.model_v4 import AttentionKind, ModelConfigV4
from deepinfer.models.loader import check_finite, open_shard, shard_names

Shape = tuple[int, ...]

# transformers' spelling -> the public one, applied in this order
RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.compressor\.indexer\.(?=kv_|gate_|position_bias)", ".indexer.compressor."),
        (r"\.compressor\.indexer\.(scorer\.)?", ".indexer."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.(q_a|q_b|o_a|o_b)_proj\.", r".w\1."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.e_score_correction_bias$", ".bias"),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.experts\.gate_up_proj$", ".experts.w13.weight"),
        (r"\.experts\.down_proj$", ".experts.w2.weight"),
    )
]
EXPERT = re.compile(r"\.experts\.(\d+)\.")
HALF = re.compile(r"experts\.(w1|w3)\.weight$")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
WIDE = re.compile(r"(hc_\w+|attn_sink|ape|gate\.bias|norm\.weight)$")  # never narrower than float32


def parameter_shapes(config: ModelConfigV4) -> dict[str, Shape]:
    """Every tensor of the in-memory model."""
    hidden, vocab, hc = config.hidden_size, config.vocab_size, config.hc_mult
    shapes: dict[str, Shape] = {
        "embed.weight": (vocab, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocab, hidden),
        "hc_head_fn": (hc, hc * hidden),
        "hc_head_base": (hc,),
        "hc_head_scale": (1,),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config, layer)}
    return shapes


def _layer_shapes(config: ModelConfigV4, layer: int) -> Iterator[tuple[str, Shape]]:
    plan = config.layers[layer]
    hidden, inter, heads, dim = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_attention_heads,
        config.head_dim,
    )
    experts, out_rows = config.n_routed_experts, config.o_groups * config.o_lora_rank
    yield "attn_norm.weight", (hidden,)
    yield "ffn_norm.weight", (hidden,)
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn", (config.hc_mix_size, config.hc_mult * hidden)
        yield f"hc_{part}_base", (config.hc_mix_size,)
        yield f"hc_{part}_scale", (3,)
    yield "attn.wq_a.weight", (config.q_lora_rank, hidden)
    yield "attn.q_norm.weight", (config.q_lora_rank,)
    yield "attn.wq_b.weight", (heads * dim, config.q_lora_rank)
    yield "attn.wkv.weight", (dim, hidden)
    yield "attn.kv_norm.weight", (dim,)
    yield "attn.attn_sink", (heads,)
    yield "attn.wo_a.weight", (out_rows, heads // config.o_groups * dim)
    yield "attn.wo_b.weight", (hidden, out_rows)
    compressors = {}
    if plan.compress_ratio:
        compressors["attn.compressor"] = dim
    if plan.kind is AttentionKind.SPARSE:
        compressors["attn.indexer.compressor"] = config.index_head_dim
        yield "attn.indexer.wq_b.weight", (config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        yield "attn.indexer.weights_proj.weight", (config.index_n_heads, hidden)
    for name, width in compressors.items():
        yield f"{name}.wkv.weight", (plan.num_series * width, hidden)
        yield f"{name}.wgate.weight", (plan.num_series * width, hidden)
        yield f"{name}.ape", (plan.compress_ratio, plan.num_series * width)
        yield f"{name}.norm.weight", (width,)
    yield "ffn.gate.weight", (experts, hidden)
    if plan.hash_routing:
        yield "ffn.gate.tid2eid", (config.vocab_size, config.num_experts_per_tok)
    else:
        yield "ffn.gate.bias", (experts,)
    yield "ffn.experts.w13.weight", (experts, 2 * inter, hidden)
    yield "ffn.experts.w2.weight", (experts, hidden, inter)
    yield "ffn.shared_experts.w13.weight", (2 * inter, hidden)
    yield "ffn.shared_experts.w2.weight", (hidden, inter)


def place_of(name: str, config: ModelConfigV4) -> tuple[str, tuple[int | slice, ...]]:
    """In-memory tensor that a checkpoint tensor is part of, and its place there."""
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    place: tuple[int | slice, ...] = ()
    expert = EXPERT.search(name)
    if expert:
        place = (int(expert[1]),)
        name = name.replace(expert[0], ".experts.")
    half = HALF.search(name)
    if half:
        inter = config.moe_intermediate_size
        place += (slice(0, inter) if half[1] == "w1" else slice(inter, None),)
        name = name.replace(half[0], "experts.w13.weight")
    return name, place


def collect_weights(
    tensors: Iterable[tuple[str, Tensor]], config: ModelConfigV4, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """In-memory weights from named tensors in any accepted spelling (e.g. `state_dict().items()`).

    Small tensors that steer mixing, norms and gates stay at least float32; routing tables are int64.

    Raises:
        ValueError: names the first extra, misshapen, quantised, repeated or infinite tensor, or the first missing one.
    """
    shapes = parameter_shapes(config)
    missing = {name: prod(shape) for name, shape in shapes.items()}
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.removeprefix("model.").startswith("mtp."):
            continue
        parameter, place = place_of(name, config)
        _check_tensor(name, tensor, parameter, parameter in shapes)
        if place and isinstance(place[0], int) and place[0] >= config.n_routed_experts:
            raise ValueError(f"model: tensor {name!r}: expert {place[0]}, allowed: 0..{config.n_routed_experts - 1}")
        expected = torch.empty(shapes[parameter], device="meta")[place].shape
        if expected != tensor.shape:
            raise ValueError(f"model: tensor {name!r} has shape {list(tensor.shape)}, expected {list(expected)}")
        if parameter not in weights:
            weights[parameter] = _allocate(parameter, shapes[parameter], dtype, device)
        weights[parameter][place].copy_(tensor)
        missing[parameter] -= tensor.numel()
        if missing[parameter] < 0:
            raise ValueError(f"model: tensor {name!r} is in the checkpoint twice, under two spellings")
    for name, count in missing.items():
        if count:
            raise ValueError(f"model: tensor {name!r} is missing from the checkpoint or incomplete")
    for name, table in weights.items():
        if name.endswith("tid2eid") and not 0 <= int(table.min()) <= int(table.max()) < config.n_routed_experts:
            raise ValueError(f"model: tensor {name!r} names experts outside 0..{config.n_routed_experts - 1}")
    return weights


def _allocate(parameter: str, shape: Shape, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    kept = in_memory_dtype(parameter, dtype)
    try:
        return torch.empty(shape, dtype=kept, device=device)
    except RuntimeError:  # a stack of more experts than the checkpoint has
        size = prod(shape) * kept.itemsize
        raise ValueError(f"model: {parameter!r} of {list(shape)} needs {size:,} bytes, more than there are") from None


def in_memory_dtype(parameter: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype that a parameter of a `dtype` model has."""
    if parameter.endswith("tid2eid"):
        return torch.int64
    return torch.promote_types(dtype, torch.float32) if WIDE.search(parameter) else dtype


def _check_tensor(name: str, tensor: Tensor, parameter: str, is_known: bool) -> None:
    if not is_known:
        if name.endswith((".scale", "scale_inv")):
            raise ValueError(f"model: tensor {name!r} is a quantisation scale, allowed for deepseek_v4: float weights")
        raise ValueError(f"model: tensor {name!r} is in the checkpoint but not in the model that config.json describes")
    allowed = INTEGERS if parameter.endswith("tid2eid") else FLOATS
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"model: tensor {name!r} has dtype {tensor.dtype}, allowed for deepseek_v4: {names}")
    check_finite(name, tensor)


def load_weights(
    path: str | Path, config: ModelConfigV4, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """`collect_weights` over the safetensors files of a checkpoint folder, one tensor at a time."""
    if config.quantized:
        raise ValueError(
            "config: quantization_config is set, allowed for deepseek_v4: float weights (FP8 / FP4 is not read)"
        )
    return collect_weights(_stream(Path(path)), config, dtype, device)


def _stream(path: Path) -> Iterator[tuple[str, Tensor]]:
    for file in shard_names(path):
        with open_shard(path / file) as shard:
            for name in shard.keys():
                yield name, shard.get_tensor(name)

"""Which model class serves which checkpoint: `model_type` of config.json -> loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.config.model_v4 import ModelConfigV4
from deepinfer.config.spelling import model_type, read_config
from deepinfer.kernels import ops
from deepinfer.models.deepseek_v4 import DeepseekV4
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.draft_calibration import read_calibration
from deepinfer.models.fp8 import keep_fp8_bytes, use_fp8_kernels
from deepinfer.models.inputs import ModelInputs


class Model(Protocol):
    """What the engine needs of a model; it passes the caches on without looking inside."""

    config: Any
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    default_cache_dtype: torch.dtype
    yoco_window: tuple[int, int] | None  # (sliding window, backtracking tokens); None: no YoCo truncation
    chosen_experts: list[Tensor]  # int32 [N, k] of every layer in the latest step; empty: not kept
    mark: Callable[[str], None] | None  # forward calls it with the part that has just ended: attention, moe or rest

    def block_bytes(self, block_size: int, cache_dtype: torch.dtype) -> int:
        """Bytes that one block of tokens takes in all layers."""
        ...

    def slot_bytes(self, cache_dtype: torch.dtype, max_backtracking_tokens: int = 0) -> int:
        """Bytes that one sequence takes beside its blocks."""
        ...

    def allocate_caches(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        cache_dtype: torch.dtype,
        max_backtracking_tokens: int = 0,
    ) -> Any:
        """Caches for `num_blocks` blocks and `num_slots` sequences, null block and null slot included.

        Windows keep at least `max_backtracking_tokens` tokens more than they show. Raises ValueError where they cannot.
        """
        ...

    def forward(self, inputs: ModelInputs, caches: Any) -> Tensor:
        """Logits, at least float32 [R, vocab_size], of inputs.logits_rows."""
        ...


def load_deepseek_v41(
    path: Path, dtype: torch.dtype, device: torch.device | str, draft_head: bool = False
) -> DeepseekV41:
    """DeepSeek-V4.1: weights from the public checkpoint format, Engram's token map from tokenizer.json."""
    from tokenizers import Tokenizer

    from deepinfer.models.layers.engram_map import compressed_token_map

    config = ModelConfig.from_file(path)
    token_map = None
    if config.engram_layer_ids:
        tokenizer_file = path / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ValueError(
                f"model: no tokenizer.json in {path}; engram_layer_ids need it for the compressed token map"
            )
        try:
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer: {tokenizer_file}: cannot be read: {error}") from None
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= config.vocab_size:
            raise ValueError(
                f"tokenizer: {tokenizer_file}: a token has ID {largest}, but the model's vocab_size is "
                f"{config.vocab_size}"
            )
        compressed = compressed_token_map(tokenizer)
        if not len(compressed):
            raise ValueError(f"tokenizer: {tokenizer_file}: has no tokens")
        if int(compressed.max()) + 1 != config.engram_compressed_vocab_size:
            raise ValueError(
                f"config: engram_compressed_vocab_size is {config.engram_compressed_vocab_size}, "
                f"the tokenizer's map has {int(compressed.max()) + 1} ids"
            )
        token_map = torch.zeros(config.vocab_size, dtype=torch.int64)
        token_map[: len(compressed)] = torch.from_numpy(compressed).long()
    return build_deepseek_v41(path, config, token_map, dtype, device, draft_head)


def build_deepseek_v41(
    path: Path,
    config: ModelConfig,
    token_map: Tensor | None,
    dtype: torch.dtype,
    device: torch.device | str,
    draft_head: bool = False,
) -> DeepseekV41:
    """Text weights of `path` in `dtype`; Engram tables stay in FP8, routed experts in FP4 where the kernels read it.

    With `draft_head` also the draft head's, and its calibration.
    """
    from deepinfer.models.loader import (
        is_draft,
        is_engram_table,
        is_routed_expert,
        is_text,
        load_packed_tables,
        load_quantized,
        load_weights,
    )

    if draft_head and not config.num_nextn_predict_layers:
        raise ValueError("config: num_nextn_predict_layers is 0, this checkpoint has no draft head")

    def is_wanted(name: str) -> bool:
        return is_text(name) or (draft_head and is_draft(name))

    experts = None
    if ops.reads_fp4_experts(dtype, device):
        experts = load_quantized(path, config, device, include=lambda name: is_wanted(name) and is_routed_expert(name))

    def is_dense(name: str) -> bool:
        return is_wanted(name) and not is_engram_table(name) and not (experts is not None and is_routed_expert(name))

    weights = load_weights(path, config, dtype, device, include=is_dense)
    weights |= load_packed_tables(path, config, device)
    model = DeepseekV41(config, weights, token_map, stored_experts=experts, draft_head=draft_head)
    if model.draft_head is not None:
        model.draft_head.calibrate(read_calibration(path, config.dspark_block_size))
    return model


def load_deepseek_v4(path: Path, dtype: torch.dtype, device: torch.device | str) -> DeepseekV4:
    """DeepSeek-V4: float weights, in the public names or as `transformers` saves them."""
    from deepinfer.models.deepseek_v4_weights import load_weights

    config = ModelConfigV4.from_file(path)
    return DeepseekV4(config, load_weights(path, config, dtype, device))


LOADERS: dict[str, Callable[[Path, torch.dtype, torch.device | str], Model]] = {
    "deepseek_v4": load_deepseek_v4,
    "deepseek_v41": load_deepseek_v41,
}


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantize_activations: bool | None = False,
    draft_head: bool = False,
) -> Model:
    """Load the checkpoint folder at `path`.

    `quantize_activations` rounds the activations of FP8 and FP4 linears to FP8, as the released model does on a GPU;
    None: where there are kernels that multiply in FP8.
    `draft_head` loads the checkpoint's draft head with it (models/draft_head.py).

    Raises:
        ValueError: unknown model_type, or anything wrong with config or weights; the message names it.
    """
    path = Path(path)
    kind = model_type(read_config(path))
    if kind not in LOADERS:
        raise ValueError(f"config: model_type is {kind!r}, allowed: {', '.join(sorted(LOADERS))}")
    if draft_head and kind != "deepseek_v41":
        raise ValueError(f"draft_head must be false for a {kind} model")
    model = load_deepseek_v41(path, dtype, device, True) if draft_head else LOADERS[kind](path, dtype, device)
    if isinstance(model, DeepseekV41):
        round_activations(model, quantize_activations)
    elif quantize_activations:
        raise ValueError(f"quantize_activations must be false for a {kind} model")
    return model


def round_activations(model: DeepseekV41, quantize_activations: bool | None) -> None:
    """Set the switch of a model that was just built; weights then take the form of the FP8 kernels, where those run."""
    multiplies_fp8 = ops.multiplies_fp8(model.dtype, model.device)
    if ops.reads_narrow_weights(model.dtype, model.device):
        keep_fp8_bytes(model.layers)
        if model.draft_head is not None:
            keep_fp8_bytes(model.draft_head.layers)
            model.draft_head.keep_fp8_bytes()
    if model.draft_head is not None and ops.multiplies_int8(model.dtype, model.device):
        model.draft_head.use_int8_logits()
    if not (multiplies_fp8 if quantize_activations is None else quantize_activations):
        return
    model.quantize_activations = True
    if multiplies_fp8:
        use_fp8_kernels(model.layers)
    if model.draft_head is not None:
        model.draft_head.quantize_activations = True
        if multiplies_fp8:
            use_fp8_kernels(model.draft_head.layers)

"""DeepSeek-V4 as the engine runs it against the `transformers` implementation, with the same random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.config.model_v4 import ModelConfigV4
from deepinfer.models.deepseek_v4 import DeepseekV4
from deepinfer.models.deepseek_v4_weights import collect_weights
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.layers.v4_caches import CachesV4

transformers = pytest.importorskip("transformers")

BLOCK_SIZE = 128
VOCAB = 512
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LAYER_TYPES = [SLIDING, SPARSE, HEAVY, SPARSE, HEAVY, SLIDING]
TOLERANCE = 1e-4  # of the largest logit


def oracle_model(seed: int = 0, **overrides: Any) -> Any:
    """A small `transformers` model: every kind of layer, and weights with which every mechanism bites."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": LAYER_TYPES,
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
        "num_attention_heads": 4,
        "head_dim": 64,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,  # fewer than the entries from 36 tokens on
        "sliding_window": 16,
        "swiglu_limit": 1.5,  # clamps
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
    }
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**{**values, **overrides})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("tid2eid"):
                tensor.random_(0, model.config.n_routed_experts, generator=generator)
            elif name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("scale", "hc_scale")):
                tensor.uniform_(0.8, 1.2, generator=generator)
            else:
                spread = 1.0 if tensor.dim() == 1 or "embed" in name else tensor.shape[-1] ** -0.5
                spread = 0.2 if name.endswith("correction_bias") else 1.0 if name.endswith("position_bias") else spread
                tensor.normal_(0, spread, generator=generator)
    return model


def our_model(oracle: Any, dtype: torch.dtype = torch.float32) -> DeepseekV4:
    config = ModelConfigV4.from_dict(oracle.config.to_dict())
    return DeepseekV4(config, collect_weights(oracle.state_dict().items(), config, dtype))


@pytest.fixture(scope="module")
def oracle() -> Any:
    return oracle_model()


@pytest.fixture(scope="module")
def model(oracle: Any) -> DeepseekV4:
    return our_model(oracle)


def random_tokens(length: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def oracle_logits(oracle: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, vocab] of one whole sequence, without a cache."""
    return oracle(tokens.unsqueeze(0), use_cache=False).logits[0]


class Driver:
    """Runs steps over several sequences with shuffled physical blocks and slots, and stale caches."""

    def __init__(self, model: DeepseekV4, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = model
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        order = (torch.randperm(sum(blocks), generator=generator) + 1).int()
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, part in zip(self.tables, order.split(blocks), strict=True):
            row[: len(part)] = part
        self.slots = (torch.randperm(len(lengths), generator=generator) + 1).int()
        self.caches: CachesV4 = model.allocate_caches(sum(blocks) + 1, BLOCK_SIZE, len(lengths) + 1, model.dtype)
        state, paged = self.caches.state, self.caches.blocks
        for stale in (*state.rings, *state.carry.values(), *state.index_carry.values()):
            stale.fill_(float("nan"))  # what an earlier sequence left must never show
        for stale in (*paged.latents.values(), *paged.index_keys.values()):
            stale.fill_(float("nan"))
        self.computed = [0] * len(lengths)

    def step(self, sequences: list[torch.Tensor], chunk: dict[int, int], is_prefill: bool) -> dict[int, torch.Tensor]:
        """chunk[i] more tokens of each sequence i -> their logits [chunk[i], vocab]."""
        spans = {i: torch.arange(self.computed[i], self.computed[i] + n) for i, n in chunk.items()}
        for i, n in chunk.items():
            self.computed[i] += n
        counts = torch.tensor([0, *chunk.values()])
        picked = list(chunk)
        logits = self.model.forward(
            ModelInputs(
                is_prefill=is_prefill,
                token_ids=torch.cat([sequences[i][span] for i, span in spans.items()]),
                positions=torch.cat(list(spans.values())),
                query_start=counts.cumsum(0).int(),
                context_lens=torch.tensor([self.computed[i] for i in picked], dtype=torch.int32),
                block_tables=self.tables[picked],
                state_slots=self.slots[picked],
                logits_rows=torch.arange(int(counts.sum())),
            ),
            self.caches,
        )
        return dict(zip(picked, logits.split(list(chunk.values())), strict=True))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("length", [1, 3, 5, 16, 17, 127, 128, 131, 700])
def test_prefill_agrees(oracle: Any, model: DeepseekV4, length: int) -> None:
    tokens = random_tokens(length, seed=length)
    ours = Driver(model, [length]).step([tokens], {0: length}, True)[0]
    assert relative_error(ours, oracle_logits(oracle, tokens)) < TOLERANCE

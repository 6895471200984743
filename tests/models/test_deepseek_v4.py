"""DeepSeek-V4 as the engine runs it against the `transformers` implementation, with the same random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.fixture(scope="module")
def wide_model(oracle: Any) -> DeepseekV4:
    return our_model(oracle, torch.float64)


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


@pytest.mark.parametrize("prompt_length", [1, 20, 126, 300])
def test_64_decoded_tokens_agree(oracle: Any, model: DeepseekV4, prompt_length: int) -> None:
    """One token at a time against the caches of both implementations."""
    tokens = random_tokens(prompt_length + 64, seed=prompt_length)
    driver = Driver(model, [len(tokens)])
    ours = [driver.step([tokens], {0: prompt_length}, True)[0]]
    with torch.inference_mode():
        theirs = [oracle(tokens[None, :prompt_length], use_cache=True)]
        for position in range(prompt_length, len(tokens)):
            ours.append(driver.step([tokens], {0: 1}, False)[0])
            token = tokens[None, position : position + 1]
            theirs.append(oracle(token, use_cache=True, cache=theirs[-1].cache))
    for position, (mine, output) in enumerate(zip(ours, theirs, strict=True)):
        error = relative_error(mine, output.logits[0])
        assert error < TOLERANCE, f"decoded token {position}: {error:.1e}"


def run_in_steps(
    model: DeepseekV4, sequences: list[torch.Tensor], chunks: list[int], decode: int, seed: int = 0
) -> list[torch.Tensor]:
    """Prefill in steps of chunks[0], chunks[1], ... tokens a sequence, the last `decode` tokens one by one."""
    lengths = [len(tokens) for tokens in sequences]
    prompts = [max(length - decode, 1) for length in lengths]
    driver, outputs, step = Driver(model, lengths, seed), [[] for _ in lengths], 0
    while driver.computed != lengths:
        left = {i: prompt - driver.computed[i] for i, prompt in enumerate(prompts) if driver.computed[i] < prompt}
        chunk = {i: min(n, chunks[step % len(chunks)]) for i, n in left.items()}
        if not left:
            chunk = {i: 1 for i, length in enumerate(lengths) if driver.computed[i] < length}
        for i, logits in driver.step(sequences, chunk, bool(left)).items():
            outputs[i].append(logits)
        step += 1
    return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("chunks", [[7, 37], [1, 2, 3, 60], [127], [128], [250, 3]], ids=str)
def test_odd_chunks_of_two_sequences_agree(oracle: Any, model: DeepseekV4, chunks: list[int]) -> None:
    """Chunk boundaries fall inside groups of both ratios; both sequences share every step."""
    sequences = [random_tokens(389, seed=1), random_tokens(150, seed=2)]
    for tokens, logits in zip(sequences, run_in_steps(model, sequences, chunks, decode=12), strict=True):
        assert relative_error(logits, oracle_logits(oracle, tokens)) < TOLERANCE


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 280), min_size=1, max_size=3),
    chunks=st.lists(st.integers(10, 200), min_size=1, max_size=3),
    decode=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_steps_and_batches_do_not_change_logits(
    wide_model: DeepseekV4, lengths: list[int], chunks: list[int], decode: int, seed: int
) -> None:
    """In float64 any way of cutting equals one prefill step of the sequence alone."""
    sequences = [random_tokens(length, seed + i) for i, length in enumerate(lengths)]
    for tokens, logits in zip(sequences, run_in_steps(wide_model, sequences, chunks, decode, seed), strict=True):
        alone = Driver(wide_model, [len(tokens)]).step([tokens], {0: len(tokens)}, True)[0]
        assert relative_error(logits, alone) < 1e-10


def test_bf16_runs_close_to_fp32(oracle: Any, model: DeepseekV4) -> None:
    tokens = random_tokens(200, seed=5)
    narrow = run_in_steps(our_model(oracle, torch.bfloat16), [tokens], [64], decode=4)[0]
    exact = oracle_logits(oracle, tokens)
    assert float(torch.nn.functional.cosine_similarity(narrow, exact, dim=-1).mean()) > 0.9


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_types": [SLIDING] * 6, "mlp_layer_types": ["moe"] * 6},
        {"layer_types": [HEAVY] * 6, "mlp_layer_types": ["hash_moe"] * 6},
        {"compress_rates": {SPARSE: 8, HEAVY: 32}},
        {"rope_scaling": None, "hc_mult": 2, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-3},
        {"sliding_window": 200, "index_topk": 64, "o_groups": 4},
    ],
    ids=["sliding", "heavy-hash", "rates", "no-yarn", "wide-window"],
)
def test_other_configurations_agree(overrides: dict[str, Any]) -> None:
    oracle = oracle_model(seed=3, **overrides)
    tokens = random_tokens(290, seed=7)
    logits = run_in_steps(our_model(oracle), [tokens], [101], decode=5)[0]
    assert relative_error(logits, oracle_logits(oracle, tokens)) < TOLERANCE


def test_every_weight_matters(oracle: Any) -> None:
    """With any single tensor disturbed the logits leave the tolerance: no mechanism is idle in these tests."""
    config = ModelConfigV4.from_dict(oracle.config.to_dict())
    weights = collect_weights(oracle.state_dict().items(), config, torch.float32)
    tokens = random_tokens(200, seed=9)
    expected = oracle_logits(oracle, tokens)
    for name, tensor in weights.items():
        if name.startswith(("layers.3.", "layers.4.", "layers.5.")):
            continue  # of the same kinds as the layers before
        disturbed = {**weights, name: tensor.roll(1, 0) if tensor.dtype == torch.int64 else tensor * 0.7 + 0.03}
        ours = Driver(DeepseekV4(config, disturbed), [200]).step([tokens], {0: 200}, True)[0]
        assert relative_error(ours, expected) > 10 * TOLERANCE, name

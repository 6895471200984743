"""Deployment arithmetic against the published figures and against counting (spec: model, sections 2, 5 and 7)."""

import json
from dataclasses import replace

import pytest

from deepinfer.models.checkpoint_format import expected_tensors
from deepinfer.models.plan import BUILT_IN_CONFIGS, load_plan_config, plan_deployment
from deepinfer.models.random_weights import random_weights
from deepinfer.models.writer import write_checkpoint
from tests.configs import TINY_VISION, tiny_config

FLASH = load_plan_config("DeepSeek-V4.1-Flash")
GB = 10**9


@pytest.fixture(scope="module")
def flash():
    return plan_deployment(FLASH, num_gpus=8, gpu_memory_bytes=141 * GB, context_len=32768)


def test_published_sizes(flash):
    assert flash.weight_bytes == 510_286_023_000
    assert flash.kv_bytes_per_token == 890
    assert flash.kv_bytes_per_block == 113_920
    assert flash.stored_state_bytes_per_sequence == 1_415_040
    # 40 rings, 6 pairs (a, b) of three ratio-2 compressors in FP32, 9 compressed ids; regions start at multiples of 16.
    assert flash.state_bytes_per_sequence == 2_830_080 + 3 * 6 * 2 * 512 * 4 + 80
    assert flash.cache_bytes_per_sequence == 256 * 113_920 + flash.state_bytes_per_sequence


def test_published_parameter_counts(flash):
    """763.2B in all, 8B active a prefill token, 16B a decode token."""
    assert round(flash.parameters / 1e8) == 7632
    assert round(flash.active_parameters_per_decode_token / 1e9) == 16
    assert round(flash.active_parameters_per_prefill_token / 1e9) == 8


def test_kinds_add_up_and_match_the_files(flash):
    kinds = {
        "attention": flash.attention_weight_bytes,
        "experts": flash.routed_expert_weight_bytes,
        "engram": flash.engram_table_weight_bytes,
        "embedding": flash.embedding_weight_bytes,
        "draft": flash.draft_weight_bytes,
        "vision": flash.vision_weight_bytes,
    }
    assert sum(kinds.values()) + flash.other_weight_bytes == flash.weight_bytes
    one_expert = 3 * (2304 * 5120 // 2 + 2304 * 5120 // 32)
    assert kinds["experts"] == 40 * 384 * one_expert
    assert kinds["engram"] == (384006168 + 384016682) * 264
    assert kinds["embedding"] == 2 * 129280 * 5120 * 2
    files = expected_tensors(FLASH)
    for kind, prefixes in {"draft": ("mtp.",), "vision": ("vision.", "aligner.", "image_")}.items():
        assert kinds[kind] == sum(t.num_bytes for name, t in files.items() if name.startswith(prefixes))


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8, 512])
def test_sharding_counts_the_fullest_gpu(num_gpus):
    """Independent count: rank 0 gets every num_gpus-th expert and table row, and everything else."""
    config = tiny_config(2, vision=TINY_VISION)
    total = 0
    for name, tensor in expected_tensors(config).items():
        if ".experts." in name:
            total += tensor.num_bytes if int(name.split(".experts.")[1].split(".")[0]) % num_gpus == 0 else 0
        elif ".engram.embed." in name:
            rows = len(range(0, tensor.shape[0], num_gpus))
            total += tensor.num_bytes // tensor.shape[0] * rows
        else:
            total += tensor.num_bytes
    plan = plan_deployment(config, num_gpus, GB, 128)
    assert plan.weight_bytes_per_gpu == total
    if num_gpus == 1:
        assert plan.weight_bytes_per_gpu == plan.weight_bytes


def test_sequences_appear_exactly_when_the_memory_does():
    config = tiny_config()
    roomy = plan_deployment(config, 2, 10**9, 1000, memory_utilization=1.0)
    sequence = 8 * roomy.kv_bytes_per_block + roomy.state_bytes_per_sequence  # 1,000 tokens: 8 blocks
    null = roomy.kv_bytes_per_block + roomy.state_bytes_per_sequence
    for count in (0, 1, 2, 57):
        exact = roomy.weight_bytes_per_gpu + null + count * sequence
        plan = plan_deployment(config, 2, exact, 1000, memory_utilization=1.0)
        assert (plan.sequences_per_gpu, plan.sequences, plan.fits) == (count, 2 * count, count > 0)
        less = plan_deployment(config, 2, exact - 1, 1000, memory_utilization=1.0)
        assert less.sequences_per_gpu == max(count - 1, 0)


def test_longest_sequence_is_the_longest_that_fits():
    config = tiny_config()
    sizes = plan_deployment(config, 1, 10**9, 1, memory_utilization=1.0)
    assert sizes.longest_sequence_tokens == 1024  # max_position_embeddings
    null = sizes.kv_bytes_per_block + sizes.state_bytes_per_sequence
    memory = sizes.weight_bytes_per_gpu + null + 3 * sizes.kv_bytes_per_block + sizes.state_bytes_per_sequence
    assert plan_deployment(config, 1, memory, 1, memory_utilization=1.0).longest_sequence_tokens == 3 * 128
    assert plan_deployment(config, 1, memory, 384, memory_utilization=1.0).sequences_per_gpu == 1
    assert plan_deployment(config, 1, memory, 385, memory_utilization=1.0).sequences_per_gpu == 0


def test_the_tiny_model_s_published_cache_sizes():
    plan = plan_deployment(tiny_config(2), 1, GB, 512)
    assert plan.kv_bytes_per_token == 106
    assert plan.stored_state_bytes_per_sequence == 5 * 1328  # 20 rows of 66 bytes, up to 16 bytes
    parts = [tiny_config(), tiny_config(2), tiny_config(2, vision=TINY_VISION)]
    text, draft, vision = (plan_deployment(config, 1, GB, 512).parameters for config in parts)
    assert [round(n / 1e6, 2) for n in (text, draft - text, vision - draft)] == [3.35, 0.44, 0.16]


def test_unquantised_caches(flash):
    bf16 = plan_deployment(FLASH, 8, 141 * GB, 32768, kv_dtype="bf16")
    assert bf16.kv_bytes_per_block == 320 * (1024 + 256)
    assert bf16.stored_state_bytes_per_sequence == 20 * 134 * 1024
    assert bf16.sequences < flash.sequences


def test_flops_of_a_decode_token(flash):
    matrices = 2 * flash.active_parameters_per_decode_token
    keys = 38 * (128 + 512) + 2 * 128
    attention = 4 * keys * 64 * 512
    # Ratio 2: 16,384 entries at three layers; ratio 1: 32,768 at layer 20, at most 2048 x 8 candidates at four more.
    indexer = 2 * (3 * 16384 + 32768 + 4 * 16384) * 32 * 128
    assert flash.flops_per_decode_token == matrices + attention + indexer
    short = plan_deployment(FLASH, 8, 141 * GB, 100)
    keys = 2 * 100 + 18 * (100 + 50) + 20 * (100 + 100)
    indexer = 2 * (3 * 50 + 5 * 100) * 32 * 128
    assert short.flops_per_decode_token == matrices + 4 * keys * 64 * 512 + indexer


def test_active_parameters_by_counting_one_layer_more():
    """One decoder layer more adds its dense part and 2 of 8 experts to a decoded token, nothing to a prompt token."""
    base = tiny_config()
    deeper = replace(base, num_hidden_layers=11, compress_ratios=(*base.compress_ratios, 1))
    a, b = plan_deployment(base, 1, GB, 64), plan_deployment(deeper, 1, GB, 64)
    weights = random_weights(deeper, 0)
    added = {name: w.numel() for name, w in weights.items() if name.startswith("layers.10.")}
    experts = sum(n for name, n in added.items() if ".ffn.experts." in name)
    want = sum(added.values()) - experts + experts * 2 // 8
    assert b.active_parameters_per_decode_token - a.active_parameters_per_decode_token == want
    assert b.active_parameters_per_prefill_token == a.active_parameters_per_prefill_token
    assert b.weight_bytes_read_per_decode_token > a.weight_bytes_read_per_decode_token


def test_a_decode_token_reads_the_active_weights_only(flash):
    dense = flash.attention_weight_bytes + flash.other_weight_bytes + 129280 * 5120 * 2
    assert flash.weight_bytes_read_per_decode_token == dense + flash.routed_expert_weight_bytes * 6 // 384


def test_config_by_name_folder_or_file(tmp_path):
    config = tiny_config()
    write_checkpoint(tmp_path, config, random_weights(config, 0), 1 << 30)
    assert load_plan_config(tmp_path) == load_plan_config(tmp_path / "config.json") == config
    assert FLASH.num_hidden_layers == 40
    assert json.loads(BUILT_IN_CONFIGS["DeepSeek-V4.1-Flash"].read_text())["model_type"] == "deepseek_v41"
    with pytest.raises(ValueError, match="model: 'gpt-9' is neither a path nor one of nano, DeepSeek-V4.1-Flash"):
        load_plan_config("gpt-9")
    with pytest.raises(ValueError, match="no config.json"):
        (tmp_path / "empty").mkdir()
        load_plan_config(tmp_path / "empty")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_gpus", 0),
        ("gpu_memory_bytes", 0),
        ("context_len", 0),
        ("context_len", 1025),
        ("kv_dtype", "int3"),
        ("memory_utilization", 0.0),
        ("memory_utilization", 1.5),
    ],
)
def test_refused_arguments(argument, value):
    arguments = {"num_gpus": 1, "gpu_memory_bytes": GB, "context_len": 100, argument: value}
    with pytest.raises(ValueError, match=rf"plan: {argument} is {value!r}, allowed: "):
        plan_deployment(tiny_config(), **arguments)

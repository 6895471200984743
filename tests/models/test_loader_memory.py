"""Loading V4.1-Flash's real per-layer shapes, and the memory that it takes (spec: model, section 2).

Reduced from the public model, so that it fits a test machine; every other dimension is the real one:
  - 7 layers, one of each kind, instead of 40: SWA, SWA + Engram, Full (ratio 2) + Engram, Reuse, Full (ratio 1),
    Reindex, draft;
  - 8 routed experts (2 in the draft layer) of real shape instead of 384 (128);
  - vocabulary 2,048, Engram tables of about 24 x 1,000 rows, one vision block.
A small model is measured in the default suite; the real shapes are marked slow.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerMode
from deepinfer.models.checkpoint_format import expected_tensors
from deepinfer.models.writer import write_synthetic
from tests.configs import tiny_config

FLASH = Path(__file__).parents[2] / "deepinfer" / "config" / "deepseek_v41_flash.json"

MEASURE = """
import json, re, sys, torch
from deepinfer.config.model import ModelConfig
from deepinfer.models.loader import load_quantized, load_weights
path, how = sys.argv[1:]

def status(key):  # getrusage would count the parent's memory from before exec
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

config = ModelConfig.from_file(path)
torch.empty(1 << 20).normal_()  # start the thread pool before the baseline
baseline = status("VmRSS")
if how == "stored":
    tensors = load_quantized(path, config)
    model = sum(t.num_bytes for t in tensors.values())
else:
    weights = load_weights(path, config, dtype=getattr(torch, how))
    model = sum(t.nbytes for t in weights.values())
peak = status("VmHWM")
if how != "stored":
    assert all(bool(t.isfinite().all()) for t in weights.values())
print(json.dumps({"peak": peak - baseline, "model": model}))
"""


def primes_of(start: int, count: int, seen: set[int]) -> int:
    """Sum of the next `count` primes from `start` that are not in `seen`, by trial division."""
    total, n = 0, start
    while count:
        if n not in seen and all(n % d for d in range(2, int(n**0.5) + 1)):
            seen.add(n)
            total, count = total + n, count - 1
        n += 1
    return total


def reduced_flash() -> ModelConfig:
    full = ModelConfig.from_file(FLASH)
    seen: set[int] = set()
    rows = tuple(sum(primes_of(1000, 8, seen) for _ in range(3)) for _ in range(2))
    assert full.vision is not None
    return replace(
        full,
        num_hidden_layers=6,
        compress_ratios=(0, 0, 2, 2, 1, 1, 0),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 5),
        candidate_source_layer_id=4,
        n_routed_experts=8,
        num_nextn_predict_layers=1,
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=2,
        dspark_target_layer_ids=(3, 4, 5),
        dspark_noise_token_id=2047,
        vocab_size=2048,
        image_token_id=2046,
        engram_compressed_vocab_size=1500,
        engram_layer_ids=(1, 2),
        engram_vocab_size=1000,
        engram_num_embeddings=rows,
        vision=replace(full.vision, num_hidden_layers=1),
    )


def small() -> ModelConfig:
    return tiny_config(hidden_size=1024, moe_intermediate_size=512, q_lora_rank=512)


def peak_memory(path: Path, how: str) -> tuple[int, int, int]:
    """(peak above the process's baseline, bytes of the loaded model, largest shard), measured in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # one memory arena
    command = [sys.executable, "-c", MEASURE, str(path), how]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result = json.loads(run.stdout)
    return result["peak"], result["model"], max(p.stat().st_size for p in path.glob("*.safetensors"))


@pytest.mark.parametrize("how", ["float32", "bfloat16", "stored"])
def test_peak_is_within_the_model_and_a_fifth_more_than_a_shard(how, small_checkpoint):
    peak, model, shard = peak_memory(small_checkpoint, how)
    assert model < peak <= model + 1.2 * shard


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_synthetic(path, small(), seed=0, max_shard_bytes=40 << 20)
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_layer_shapes_load_within_the_bound(tmp_path):
    config, full = reduced_flash(), expected_tensors(ModelConfig.from_file(FLASH))
    assert {(p.mode, p.compress_ratio, p.has_engram) for p in config.layers} == {
        (LayerMode.SWA, 0, False),
        (LayerMode.SWA, 0, True),
        (LayerMode.FULL, 2, True),
        (LayerMode.REUSE, 2, False),
        (LayerMode.FULL, 1, False),
        (LayerMode.REINDEX, 1, False),
    }
    same_kind = {0: 0, 1: 1, 2: 14, 3: 3, 4: 20, 5: 24}
    reduced = ("ffn.gate.", "engram.embed.")
    for name, spec in expected_tensors(config).items():
        if name.startswith("layers.") and not any(part in name for part in reduced):
            layer, rest = name.removeprefix("layers.").split(".", 1)
            assert spec.shape == full[f"layers.{same_kind[int(layer)]}.{rest}"].shape, name
    write_synthetic(tmp_path, config, seed=0, max_shard_bytes=512 << 20)
    for how in ("bfloat16", "stored"):
        peak, model, shard = peak_memory(tmp_path, how)
        assert model < peak <= model + 1.2 * shard, (how, peak, model, shard)

"""The tensor list of DeepSeek-V4.1-Flash against the published totals and shapes (spec: model, section 2)."""

from pathlib import Path

import pytest

from deepinfer.config.model import ModelConfig
from deepinfer.models.checkpoint_format import expected_tensors, parameter_shapes
from tests.configs import TINY_VISION, tiny_config

FLASH = ModelConfig.from_file(Path(__file__).parents[2] / "deepinfer" / "config" / "deepseek_v41_flash.json")


@pytest.fixture(scope="module")
def flash():
    return expected_tensors(FLASH)


def test_published_number_of_tensors_and_bytes(flash):
    assert len(flash) == 96_085
    assert sum(tensor.num_bytes for tensor in flash.values()) == 510_286_023_000


@pytest.mark.parametrize(
    ("prefix", "count"),
    [
        *((f"layers.{layer}", 2334) for layer in (0, 3, 13, 19, 21, 39)),
        *((f"layers.{layer}", 2337) for layer in (24, 28, 32, 36)),
        *((f"layers.{layer}", 2342) for layer in (2, 8)),
        ("layers.20", 2341),
        ("layers.1", 2340),
        ("layers.14", 2348),
        ("mtp.0", 30 + 768 + 3),
        ("mtp.1", 30 + 768),
        ("mtp.2", 30 + 768 + 4),
        ("vision", 266 - 4 - 3),
        ("aligner", 4),
    ],
)
def test_published_counts_a_layer(flash, prefix, count):
    assert sum(name.startswith(prefix + ".") for name in flash) == count


# name -> (shape, storage), as the published table lists them
TABLE = {
    "embed.weight": ((129280, 5120), "bf16"),
    "head.weight": ((129280, 5120), "bf16"),
    "layers.0.attn.wq_a.weight": ((1280, 5120), "fp8"),
    "layers.0.attn.wq_a.scale": ((40, 160), "e8m0"),
    "layers.0.attn.q_norm.weight": ((1280,), "bf16"),
    "layers.0.attn.wq_b.weight": ((32768, 1280), "fp8"),
    "layers.0.attn.wq_b.scale": ((1024, 40), "e8m0"),
    "layers.0.attn.wkv.weight": ((512, 5120), "fp8"),
    "layers.0.attn.wkv.scale": ((16, 160), "e8m0"),
    "layers.0.attn.attn_sink": ((64,), "f32"),
    "layers.0.attn.wo_a.weight": ((8192, 4096), "fp8"),
    "layers.0.attn.wo_a.scale": ((256, 128), "e8m0"),
    "layers.0.attn.wo_b.weight": ((5120, 8192), "fp8"),
    "layers.0.attn.wo_b.scale": ((160, 256), "e8m0"),
    "layers.14.attn.compressor.wgate.weight": ((512, 5120), "bf16"),
    "layers.20.attn.compressor.wkv.weight": ((512, 5120), "bf16"),
    "layers.36.attn.indexer.wq_b.weight": ((4096, 1280), "fp8"),
    "layers.36.attn.indexer.wq_b.scale": ((128, 40), "e8m0"),
    "layers.36.attn.indexer.weights_proj.weight": ((32, 5120), "bf16"),
    "layers.20.attn.indexer.wk.weight": ((128, 512), "bf16"),
    "layers.20.attn.indexer.k_norm.weight": ((128,), "bf16"),
    "layers.9.hc_attn_fn": ((24, 20480), "f32"),
    "layers.9.hc_ffn_scale": ((3,), "f32"),
    "layers.9.ffn.gate.weight": ((384, 5120), "bf16"),
    "layers.9.ffn.gate.bias_vl": ((384,), "f32"),
    "layers.9.ffn.experts.383.w1.weight": ((2304, 2560), "fp4"),
    "layers.9.ffn.experts.383.w1.scale": ((2304, 160), "e8m0"),
    "layers.9.ffn.experts.0.w2.weight": ((5120, 1152), "fp4"),
    "layers.9.ffn.experts.0.w2.scale": ((5120, 72), "e8m0"),
    "layers.9.ffn.shared_experts.w3.scale": ((72, 160), "e8m0"),
    "layers.9.ffn.shared_experts.w2.scale": ((160, 72), "e8m0"),
    "layers.1.engram.embed.weight": ((384006168, 256), "fp8_rows"),
    "layers.14.engram.embed.scale": ((384016682, 8), "e8m0"),
    "layers.14.engram.wkv.weight": ((25600, 6144), "fp8"),
    "layers.14.engram.wkv.scale": ((800, 192), "e8m0"),
    "layers.14.engram.k_weight": ((4, 5120), "bf16"),
    "mtp.1.ffn.gate.weight": ((128, 5120), "bf16"),
    "mtp.2.ffn.experts.127.w3.weight": ((2304, 2560), "fp4"),
    "mtp.0.main_proj.scale": ((160, 480), "e8m0"),
    "mtp.0.main_norm.weight": ((5120,), "bf16"),
    "mtp.2.markov_head.head.weight": ((129280, 256), "bf16"),
    "mtp.2.confidence_head.proj.weight": ((1, 5376), "bf16"),
    "vision.patch_embed.proj.weight": ((1024, 588), "bf16"),
    "vision.blocks.31.attn.wqkv.bias": ((3072,), "bf16"),
    "vision.blocks.31.mlp.w1.weight": ((5632, 1024), "bf16"),
    "vision.blocks.31.mlp.w2.weight": ((1024, 2816), "bf16"),
    "aligner.w1.weight": ((5120, 9216), "bf16"),
    "image_newline": ((5120,), "bf16"),
}


@pytest.mark.parametrize("name", TABLE)
def test_published_shape(flash, name):
    assert (flash[name].shape, flash[name].storage) == TABLE[name]


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 pools nothing
        "layers.24.attn.indexer.wk.weight",  # a Reindex layer borrows the index keys
        "layers.21.attn.indexer.wq_b.weight",  # a Reuse layer selects nothing
        "layers.0.attn.compressor.wkv.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
    ],
)
def test_absent(flash, name):
    assert name not in flash


def test_in_memory_form_stacks_the_experts_and_drops_the_scales():
    shapes = parameter_shapes(FLASH)
    assert shapes["layers.3.ffn.experts.w1.weight"] == (384, 2304, 5120)
    assert shapes["layers.3.ffn.experts.w2.weight"] == (384, 5120, 2304)
    assert shapes["mtp.2.ffn.experts.w3.weight"] == (128, 2304, 5120)
    assert not any(name.endswith("scale") and "hc_" not in name for name in shapes)


def test_vision_and_draft_tensors_come_with_their_config_only():
    plain, full = expected_tensors(tiny_config()), expected_tensors(tiny_config(2, vision=TINY_VISION))
    extra = full.keys() - plain.keys()
    assert plain.keys() < full.keys()
    assert {name.split(".")[0] for name in extra} == {
        "mtp", "vision", "aligner", "image_start", "image_end", "image_newline",
    }  # fmt: skip
    assert full["mtp.0.main_proj.weight"].shape == (128, 256)
    assert full["mtp.1.confidence_head.proj.weight"].shape == (1, 144)

"""Models of `transformers` as targets: what they give is what the model itself computes."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from deepinfer.deepspec.targets import HuggingFaceTarget, load_target
from tests.deepspec.tiny_qwen import write_tiny_qwen

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def write_llama(folder):
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("write", [write_tiny_qwen, write_llama])
def test_taps_and_states_are_the_models_own(tmp_path, write):
    """Taps by hooks on the layers, logits by the model."""
    target = load_target(write(tmp_path), 64, "cpu")
    seen = {}
    for index, layer in enumerate(target.model.model.layers):
        layer.register_forward_hook(lambda _, __, out, index=index: seen.update({index: out}))
    tokens = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    taps, hidden = target(tokens)
    assert target.shape.num_taps == len(target.tap_layers) == taps.shape[-1] // 64
    expected = [seen[i][0] if isinstance(seen[i], tuple) else seen[i] for i in target.tap_layers]
    torch.testing.assert_close(taps, torch.cat(expected, dim=-1))
    torch.testing.assert_close(hidden @ target.head.T, target.model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_a_model_that_caps_its_logits_is_refused(tmp_path):
    torch.manual_seed(2)
    Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.5)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does more than multiply"):
        load_target(tmp_path, 64, "cpu")


def test_tap_layers_of_ones_own(tmp_path):
    write_llama(tmp_path)
    assert HuggingFaceTarget(tmp_path, "cpu", (0, 2)).shape.num_taps == 2
    with pytest.raises(ValueError, match=r"tap_layers: 5, allowed: 0\.\.4"):
        HuggingFaceTarget(tmp_path, "cpu", (0, 5))

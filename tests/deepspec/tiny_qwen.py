"""A Qwen3-style model with random weights and a tokenizer, as `transformers` saves them."""

from pathlib import Path

from tests.checkpoints import write_tokenizer


def write_tiny_qwen(folder: Path, vocab_size: int = 512) -> Path:
    """4 layers of 64; nothing is downloaded."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,  # so that answers depend on what was said
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json", vocab_size)
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).save_pretrained(folder)
    return folder

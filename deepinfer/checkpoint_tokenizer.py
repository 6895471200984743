"""The tokenizer of a checkpoint folder, checked against its config.json; without torch: a server needs none."""

from pathlib import Path

from deepinfer.config.model_v4 import ModelConfigV4
from deepinfer.config.reading import control_ids, read_model_config
from deepinfer.recipe import Tokenizer
from deepinfer.recipe.conversation import ModelVersion


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the checkpoint folder at `path`. Raises ValueError if it is bad or contradicts config.json."""
    config = read_model_config(path)
    version: ModelVersion = "v4" if isinstance(config, ModelConfigV4) else "v4.1"
    tokenizer = Tokenizer.from_file(path / "tokenizer.json", version)
    tokenizer.check_model(config.vocab_size, control_ids(config))
    return tokenizer

"""The config of a checkpoint, whichever model it is of."""

from __future__ import annotations

from pathlib import Path

from deepinfer.config.model import ModelConfig
from deepinfer.config.model_v4 import ModelConfigV4
from deepinfer.config.spelling import model_type, read_config

CONFIGS: dict[str, type[ModelConfig] | type[ModelConfigV4]] = {
    "deepseek_v4": ModelConfigV4,
    "deepseek_v41": ModelConfig,
}


def read_model_config(path: str | Path) -> ModelConfig | ModelConfigV4:
    """The config of the checkpoint folder at `path`.

    Raises:
        ValueError: config.json is not readable, of an unknown model_type or inconsistent; the message names what.
    """
    raw = read_config(path)
    kind = model_type(raw)
    if kind not in CONFIGS:
        raise ValueError(f"config: model_type is {kind!r}, allowed: {', '.join(sorted(CONFIGS))}")
    return CONFIGS[kind].from_dict(raw)


def control_ids(config: ModelConfig | ModelConfigV4) -> dict[str, tuple[int, ...]]:
    """Token ids by role that a tokenizer of this model must agree with."""
    if isinstance(config, ModelConfigV4):
        return {"bos": (config.bos_token_id,), "eos": config.eos_token_ids}
    return {"bos": (config.bos_token_id,), "eos": (config.eos_token_id,), "pad": (config.pad_token_id,)}

"""From a model's name or folder to a running Engine."""

from dataclasses import replace
from pathlib import Path

import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.model_path import PACKAGED_MODELS, resolve_model
from deepinfer.engine.runner import ModelRunner
from deepinfer.structured.loading import grammar_compiler

__all__ = ["PACKAGED_MODELS", "check_device", "load_engine", "resolve_model"]


def check_device(device: str) -> None:
    """Raise ValueError unless this machine and this PyTorch have the device."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return
    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available, this machine has: cpu (see `deepinfer doctor`)")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise ValueError(f"device {device!r} does not exist, allowed: cpu, cuda:0..cuda:{count - 1}")


def load_engine(model: str | Path, config: EngineConfig | None = None) -> Engine:
    """Load weights, size the caches and make an engine that answers requests by itself.

    Raises ValueError for a bad model, config or checkpoint.
    """
    config = config or EngineConfig(device="auto")
    if config.device == "auto":
        config = replace(config, device="cuda" if torch.cuda.is_available() else "cpu")
    if config.kind not in ("normal", "completion"):
        raise ValueError(
            f"kind (DEEPINFER_ENGINE_KIND) must be normal or completion, got {config.kind!r}: such an engine needs "
            "another one beside it, and nothing moves sequences between processes yet"
        )
    check_device(config.device)
    path = resolve_model(model)
    runner = ModelRunner.from_checkpoint(path, config)
    engine = Engine(runner, config, runner.eos_token_ids)
    engine.grammars = grammar_compiler(path, runner.vocab_size, runner.eos_token_ids)
    return engine

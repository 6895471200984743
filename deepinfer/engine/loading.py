"""From a model's name or folder to a running Engine."""

from pathlib import Path

import torch

import deepinfer
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner

PACKAGED_MODELS = ("nano",)


def resolve_model(model: str | Path) -> Path:
    """Folder of a checkpoint: a packaged model by name, anything else is a path.

    Raises ValueError if there is no folder with a config.json.
    """
    packaged = Path(deepinfer.__file__).parent / "checkpoints"
    path = None
    if isinstance(model, str | Path):
        path = packaged / model if str(model) in PACKAGED_MODELS else Path(model)
    try:
        if path is not None and (path / "config.json").is_file():
            return path
    except OSError:  # a name that no file may have
        pass
    names = ", ".join(map(repr, PACKAGED_MODELS))
    raise ValueError(f"model must be {names} or a local folder with a config.json and weights, got {str(model)!r}")


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
    """Load weights, size the caches and make the engine. Raises ValueError for a bad model, config or checkpoint."""
    config = config or EngineConfig()
    check_device(config.device)
    runner = ModelRunner.from_checkpoint(resolve_model(model), config)
    return Engine(runner, config, runner.eos_token_ids)

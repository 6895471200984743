"""Where a model's files are; without torch, because a server asks for an engine in another process."""

from pathlib import Path

import deepinfer

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

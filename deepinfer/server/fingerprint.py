"""`system_fingerprint` of OpenAI's protocols: with the same one, the same seed is meant to give the same answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer import __version__
from deepinfer.engine.model_path import resolve_model


def system_fingerprint(model: str | Path, engine_config: Mapping[str, Any]) -> str:
    """A name for what answers: this version, the checkpoint's configuration and weight files, the engine's settings.

    Of weights their names and sizes count. Raises ValueError if there is no such model.
    """
    digest = hashlib.sha256(f"{__version__} {json.dumps(engine_config, sort_keys=True)}".encode())
    folder = resolve_model(model)
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        digest.update(path.name.encode() + b"\0")
        digest.update(path.read_bytes() if path.suffix == ".json" else str(path.stat().st_size).encode())
    return f"fp_{digest.hexdigest()[:12]}"

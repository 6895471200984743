"""From a checkpoint folder to a text engine."""

import json
import shutil
from pathlib import Path

from deepinfer.config.engine import EngineConfig
from deepinfer.server.text_engine import load_text_engine


def test_the_prompt_format_follows_model_type_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A V4.1 model that mentions V4 elsewhere in its config is prompted as V4.1."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "finetuned"))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "base_model": "deepseek_v4"}))
    engine = load_text_engine(str(folder), EngineConfig(num_blocks=4, max_num_seqs=1))
    try:
        assert engine.model_version == "v4.1" and engine.name == "finetuned"
    finally:
        engine.engine.close()

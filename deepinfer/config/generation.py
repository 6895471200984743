"""generation_config.json: the sampling parameters that a model's makers recommend."""

import json
from pathlib import Path
from typing import Any

# Fields that are sampling parameters, under the same name.
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Fields of SamplingParams to use where a request says nothing; none without the file.

    Raises ValueError naming a file that cannot be read.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
        if config.get("do_sample") is False:
            return {"temperature": 0.0}
        return {name: config[name] for name in FIELDS if config.get(name) is not None}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None

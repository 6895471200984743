"""What all files of deepspec have in common: they are seen as a whole or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.files import replacing


def save_whole(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, written beside `path` and put in its place; readable by those who can read the folder.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    with replacing(path) as part:
        try:
            save_file(tensors, part, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None
        part.chmod(0o644)


def replace_text(path: Path, text: str) -> None:
    """The same of a text file."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def check_output_folder(folder: Path) -> None:
    """Make `folder`, before hours are spent on what goes into it.

    Raises:
        ValueError: it is a file, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"out: {folder} is no folder that can be written to ({error.strerror})") from None

"""deepinfer: a small inference engine for DeepSeek-V4.1-class models.

    from deepinfer import LLM, SamplingParams

Both names are imported on first use, so `import deepinfer` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.llm import LLM
    from deepinfer.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_LAZY = {"LLM": "deepinfer.llm", "SamplingParams": "deepinfer.params"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")

"""deepinfer: a small inference engine for DeepSeek-V4.1-class models.

    from deepinfer import LLM, SamplingParams

Both names are imported on first use, so `import deepinfer` loads no torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.llm import LLM
    from deepinfer.params import SamplingParams

# OpenMP's default is to spin while waiting, which costs tens of times the work when anything else uses the CPU. It is
# read when torch is loaded; a setting of the user's own wins.
if "GOMP_SPINCOUNT" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_LAZY = {"LLM": "deepinfer.llm", "SamplingParams": "deepinfer.params"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")

"""Operations as TileLang kernels: one language for NVIDIA GPUs (`cuda`) and Ascend NPUs (`asc`).

Each module of a backend has factories whose names end in `_tl`: sizes that are fixed in a model -> a TileLang function,
for `tilelang.compile` or `source`. Importing this package needs TileLang and takes the factories of the platform's
backend (those of `cuda` on a machine with neither, for `source`). On Hopper the operations run in Triton or CUDA C++;
these are the portable ones (docs/kernels/overview.md).
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import tilelang

from deepinfer.kernels.platform import PLATFORM

TARGETS: dict[str, Any] = {"cuda": {"kind": "cuda", "arch": "sm_90"}, "asc": "ascend"}
PASS_CONFIGS: dict[str, dict[str, Any]] = {
    "cuda": {},
    "asc": {"tirx.disable_vectorize": True},  # vectors of bytes have no type in its SIMT code
}

BACKEND = "asc" if PLATFORM.tilelang_ops_backend == "asc" else "cuda"
_package = importlib.import_module(f"{__package__}.{BACKEND}")
for _info in pkgutil.iter_modules(_package.__path__):
    _module = importlib.import_module(f"{_package.__name__}.{_info.name}")
    for _name, _factory in vars(_module).items():
        if _name.endswith("_tl"):
            globals()[_name] = _factory


def compiled(function: Any) -> Any:
    """What a factory made, compiled for the platform's device: a callable of tensors, outputs last."""
    target = "ascend" if BACKEND == "asc" else "cuda"  # of the card that is there
    return tilelang.compile(function, target=target, pass_configs=PASS_CONFIGS[BACKEND])


def source(function: Any, backend: str = BACKEND) -> str:
    """CUDA C++ or AscendC of what a factory made; needs neither a device nor its compiler."""
    target = tilelang.tvm.target.Target(TARGETS[backend])
    with tilelang.tvm.transform.PassContext(config=PASS_CONFIGS[backend]), target:
        lowered = tilelang.lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
    return lowered.kernel_source

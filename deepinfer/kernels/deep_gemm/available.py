"""Whether the kernels of this directory run, and their compilation before the first request."""

from __future__ import annotations

import logging
import os
import time
from functools import cache

import torch

from deepinfer.kernels import registry
from deepinfer.kernels.deep_gemm import activations, fp8_few_rows, fp8_variants, indexer, moe, moe_gemm, mqa_logits
from deepinfer.kernels.deep_jit import CompileError
from deepinfer.kernels.deep_jit.driver import DriverError
from deepinfer.kernels.deep_jit.warmup import compile_all

logger = logging.getLogger(__name__)


def is_available(device: torch.device) -> bool:
    """On a Hopper GPU where CUDA C++ can be compiled and loaded, unless DEEPINFER_KERNELS asks for others."""
    return device.type == "cuda" and registry.USES_CUDA_CPP and _runs_on(device.index or 0)


@cache
def compile_kernels() -> None:
    """Compile what a model may launch, so that no request waits for it; from the disk cache after the first time.

    Raises CompileError with the compiler's log.
    """
    start = time.perf_counter()
    modules = (fp8_few_rows, fp8_variants, indexer, moe, moe_gemm)
    builds = [build for module in modules for build in module.builds() if build.defines.get("B_ROW_SCALES", 1)]
    builds += [activations.build(False, ordered) for ordered in (False, True)]
    builds += mqa_logits.engine_builds()
    for compiled in compile_all(builds, os.cpu_count() or 1):
        if compiled.error is not None:
            raise CompileError(compiled.error)
    seconds = time.perf_counter() - start
    if seconds > 1:
        logger.info("compiled %d matrix product kernels in %.1f s", len(builds), seconds)


@cache
def _runs_on(index: int) -> bool:
    if torch.cuda.get_device_capability(index) != (9, 0):
        return False
    try:
        with torch.cuda.device(index):
            moe.load()
    except (CompileError, DriverError) as error:
        logger.warning("Triton kernels instead of deep_gemm: %s", error)
        return False
    return True

"""Compiling kernels ahead of time: no request waits for a compiler, a machine without a GPU can check them all."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from deepinfer.kernels.deep_jit.compilers import CompileError
from deepinfer.kernels.deep_jit.kernel import Build

# Modules with a function builds() -> list[Build]: what the engine launches at V4.1-Flash's shapes.
MODULES = (
    "deepinfer.kernels.flash_mla.variants",
    "deepinfer.kernels.deep_gemm.fp8_variants",
    "deepinfer.kernels.deep_gemm.group_gemm",
    "deepinfer.kernels.deep_gemm.fp8_few_rows",
    "deepinfer.kernels.deep_gemm.moe",
    "deepinfer.kernels.deep_gemm.moe_gemm",
    "deepinfer.kernels.deep_gemm.activations",
    "deepinfer.kernels.deep_gemm.indexer",
    "deepinfer.kernels.deep_gemm.mqa_logits",
    "deepinfer.kernels.deep_select.top_k",
    "deepinfer.kernels.deep_select.gate",
    "deepinfer.kernels.tile_kernels.hyper_connection",
    "deepinfer.kernels.tile_kernels.mix_streams",
    "deepinfer.kernels.tile_kernels.casts",
    "deepinfer.kernels.tile_kernels.gather_rows",
)


@dataclass(frozen=True)
class Compiled:
    """One finished build: seconds it took (near 0 from the cache), and the compiler's log if it failed."""

    build: Build
    seconds: float
    error: str | None


def all_builds(modules: Sequence[str] = MODULES) -> list[Build]:
    """Every build of the repository, in a stable order."""
    return [build for module in modules for build in importlib.import_module(module).builds()]


def compile_all(builds: Sequence[Build], workers: int) -> Iterator[Compiled]:
    """Compile side by side, in `workers` threads; yields each as it finishes, failures too. Closed, it begins no more.

    The order in which they begin is that of `builds`.
    """

    def compile_one(build: Build) -> Compiled:
        start = time.perf_counter()
        try:
            build.cubin()
        except CompileError as error:
            return Compiled(build, time.perf_counter() - start, str(error))
        return Compiled(build, time.perf_counter() - start, None)

    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(compile_one, build) for build in builds]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)

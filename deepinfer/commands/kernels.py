"""`deepinfer kernels`: compile the GPU kernels ahead of time."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from typing import Annotated

import typer

from deepinfer.commands import options

app = typer.Typer(help="GPU kernels that are compiled at run time.", no_args_is_help=True)

EXAMPLES = (
    "deepinfer kernels warmup",
    "deepinfer kernels warmup sparse_attention fp8_gemm --workers 4",
    "deepinfer kernels warmup --no-triton",
)


@app.command(epilog=options.examples(*EXAMPLES))
def warmup(
    names: Annotated[list[str] | None, typer.Argument(help="CUDA C++ kernels by name; default: all.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Compilations at once.")] = min(8, os.cpu_count() or 1),
    triton: Annotated[bool, typer.Option(help="On a GPU, compile the Triton kernels too, if no name is given.")] = True,
) -> int:
    """Compile the GPU kernels into the cache (minutes the first time), so that no request waits for a compiler.

    CUDA C++ needs a compiler (NVRTC or nvcc), but no GPU. Triton kernels are compiled on a GPU, by a few steps of a
    small model of V4.1-Flash's shapes; elsewhere at first use.
    """
    failed = compile_cuda_cpp(names or [], workers)
    if triton and not names:
        compile_triton()
    return 1 if failed else 0


def compile_cuda_cpp(names: list[str], workers: int) -> int:
    """Compile what the engine may launch of these kernels (none: of all); returns how many failed or were not kept.

    The first that cannot be kept ends it: what is compiled behind it would be thrown away.
    """
    from deepinfer.kernels.cpu.build import BuildError
    from deepinfer.kernels.deep_jit.cache import check_writable, not_kept
    from deepinfer.kernels.deep_jit.compilers import CompileError, find_compiler
    from deepinfer.kernels.deep_jit.warmup import all_builds, compile_all

    try:
        compiler = find_compiler()
    except CompileError as error:
        raise ValueError(str(error)) from None
    builds = all_builds()
    known = sorted({build.name for build in builds})
    for name in names:
        if name not in known:
            raise ValueError(f"kernel is {name!r}, allowed: {', '.join(known)}")
    builds, failed = [build for build in builds if not names or build.name in names], 0
    missing = sum(not build.is_kept for build in builds)
    print(f"{len(builds)} kernels with {compiler.version}, {missing} of them to be compiled")
    try:
        if missing:
            check_writable()
    except (BuildError, OSError) as error:
        print(f"error: nothing is compiled, the cache cannot be written: {error}")
        return missing
    for result in compile_all(builds, workers):
        macros = " ".join(f"{name}={value}" for name, value in result.build.defines.items())
        print(f"{result.seconds:6.1f} s  {result.build.name}  {macros}")
        if result.error:
            failed += 1
            print(result.error)
        if not_kept:
            print(f"error: {next(iter(not_kept))} could not be written to the cache, no more are compiled")
            break
    return failed + len(not_kept)


def compile_triton() -> None:
    """Prefill and decode a batch with random weights, which compiles every Triton kernel on the way."""
    from deepinfer.kernels.platform import PLATFORM

    if PLATFORM.name != "cuda" or find_spec("triton") is None:
        print("Triton kernels: at first use, there is no GPU here or no Triton")
        return
    from deepinfer.bench.decode import measure_batch
    from deepinfer.bench.synthetic import benchmark_engine, benchmark_model
    from deepinfer.config.engine import EngineConfig

    start = time.perf_counter()
    model = benchmark_model("nano", "cuda", synthetic="v41", num_layers=4, num_experts=16)
    engine = benchmark_engine(model, EngineConfig(max_num_seqs=16, max_model_len=1200, watermark=0.0, device="cuda"))
    measure_batch(engine, batch=16, prompt_len=1024, num_steps=4, seed=0)
    print(f"{time.perf_counter() - start:6.1f} s  Triton kernels")

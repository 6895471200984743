"""`deepinfer kernels`: compile the GPU kernels ahead of time."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from deepinfer.commands import options

app = typer.Typer(help="GPU kernels that are compiled at run time.", no_args_is_help=True)


@app.command(epilog=options.examples("deepinfer kernels warmup", "deepinfer kernels warmup --workers 4"))
def warmup(
    workers: Annotated[int, typer.Option(min=1, help="Compilations at once.")] = min(8, os.cpu_count() or 1),
) -> int:
    """Compile the CUDA C++ kernels into the cache (minutes). Needs a CUDA compiler (NVRTC or nvcc), but no GPU.

    Triton kernels are compiled at first use.
    """
    from deepinfer.kernels.deep_jit.compilers import CompileError, find_compiler
    from deepinfer.kernels.deep_jit.warmup import all_builds, compile_all

    try:
        compiler = find_compiler()
    except CompileError as error:
        raise ValueError(str(error)) from None
    builds, failed = all_builds(), 0
    print(f"{len(builds)} kernels with {compiler.version}")
    for result in compile_all(builds, workers):
        macros = " ".join(f"{name}={value}" for name, value in result.build.defines.items())
        print(f"{result.seconds:6.1f} s  {result.build.name}  {macros}")
        if result.error:
            failed += 1
            print(result.error)
    return 1 if failed else 0

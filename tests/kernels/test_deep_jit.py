"""Run-time compilation: all GPU kernels compile without a GPU, errors are readable, launches and tensor maps."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from deepinfer.kernels.deep_jit import Build, CompileError, Kernel
from deepinfer.kernels.deep_jit.compilers import options
from deepinfer.kernels.deep_jit.tensor_map import tensor_map
from deepinfer.kernels.deep_jit.warmup import MODULES, all_builds, compile_all
from tests.kernels.small_kernel import SCALE, has_compiler, needs_compiler, write_scale

PACKAGE = Path(__file__).parents[2] / "deepinfer"


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """A small kernel with a header, and an empty cache."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    return write_scale(tmp_path)


# ------------------------------------------------------------------ the repository's kernels


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="no wheels of the compilers")
def test_the_compilers_of_gpu_kernels_are_here():
    """`pip install deepinfer[dev]` brings them: no test that compiles kernels may be skipped without notice."""
    assert find_spec("triton") is not None
    assert torch.cuda.is_available() or find_spec("tilelang") is not None
    assert has_compiler()


def kernels_in(source: Path) -> set[str]:
    text = re.sub(r"__\w+__\((?:[^()]|\([^()]*\))*\)", "", source.read_text())  # launch bounds and the like
    return set(re.findall(r"(?:__global__|^KERNEL\([^)]*\))[^(]*?(\w+)\s*\(", text, re.MULTILINE))


def test_no_cuda_kernel_can_be_forgotten():
    """Each kernel of each source is built ahead of time, and each module that knows builds is asked for them."""
    sources = list(PACKAGE.rglob("*.cu"))
    assert {(source, name) for source in sources for name in kernels_in(source)} == {
        (build.source, build.name) for build in all_builds()
    }
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path, text in texts.items()
        if "def builds(" in text
    }
    assert modules == set(MODULES)
    assert not [path for path, text in texts.items() if "__global__" in text or "RawKernel" in text]


def test_the_cuda_kernels_of_a_source_are_told_from_its_other_functions():
    assert kernels_in(PACKAGE / "kernels/deep_gemm/mqa_queries.cu") == {"mqa_queries", "mqa_keys"}
    assert kernels_in(PACKAGE / "kernels/deep_gemm/fp8_gemm.cu") == {"fp8_gemm"}
    assert kernels_in(PACKAGE / "kernels/deep_select/gate.cu") == {"gate"}


@needs_compiler
def test_one_build_of_every_kernel_compiles_for_hopper(tmp_path, monkeypatch):
    """All specialisations together take minutes: `deepinfer kernels warmup` and the slow test compile them."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    widest = {(build.source, build.name): build for build in all_builds()}
    for result in compile_all(list(widest.values()), workers=2):
        assert result.error is None, result.error
        compiled = re.findall(rb"\.text\.(\w+)", result.build.cubin())
        assert compiled, result.build
        assert {(result.build.source, name.decode()) for name in compiled} <= set(widest)


@needs_compiler
@pytest.mark.slow
def test_every_build_compiles_for_hopper(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    builds = all_builds()
    results = list(compile_all(builds, workers=2))
    assert len(results) == len(builds)
    assert [result.error for result in results if result.error] == []


# ------------------------------------------------------------------ errors


@needs_compiler
def test_an_error_names_file_and_line_and_leaves_no_file(source, tmp_path):
    source.write_text(SCALE + "\n__device__ int broken() { return missing_name; }\n")
    line = source.read_text().splitlines().index("__device__ int broken() { return missing_name; }") + 1
    with pytest.raises(CompileError) as caught:
        Build("scale", source, {"WIDTH": 128}).cubin()
    assert f"scale.cu({line}): error" in str(caught.value)
    assert "missing_name" in str(caught.value)
    assert not list(tmp_path.glob("cache/cuda/*.cubin"))


def test_without_a_compiler_the_error_says_what_to_install(source, tmp_path):
    """A file that is called nvcc in the working directory is none."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\necho V1.2.3\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    program = (
        "import sys\nfrom pathlib import Path\nfrom deepinfer.kernels.deep_jit import Build\n"
        "sys.path.clear()  # where wheels are\nBuild('scale', Path(sys.argv[1]), {'WIDTH': 128}).cubin()"
    )
    environment = os.environ | {"PATH": "/nonexistent", "LD_LIBRARY_PATH": "", "PYTHONPATH": str(PACKAGE.parent)}
    environment.pop("CUDA_HOME", None)
    command = [sys.executable, "-c", program, str(source)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    if answer.returncode == 0:
        pytest.skip("NVRTC is among the system's libraries: nothing hides it")
    assert "nvidia-cuda-nvrtc" in answer.stderr


def test_options_are_sorted_and_name_the_target(tmp_path):
    assert options({"B": 2, "A": 1}, "sm_90a", tmp_path) == [
        "-std=c++17",
        "-arch=sm_90a",
        f"-I{tmp_path}",
        "-DA=1",
        "-DB=2",
    ]


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launches_on_the_current_stream(source):
    source.write_text(SCALE.replace("float* x", "float* x, float by").replace("FACTOR", "by"))
    kernel = Kernel(Build("scale", source, {"WIDTH": 128}))
    x = torch.ones(4, 128, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.add_(1)
        kernel.launch((4, 1, 1), (128, 1, 1), ctypes.c_void_p(x.data_ptr()), ctypes.c_float(3.0))
    stream.synchronize()
    assert (x == 6).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_tensor_map_copies_swizzled_boxes_and_zeros_outside(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    row = 128 // dtype.itemsize  # 128 bytes
    x = torch.randn(50, 3 * row, device="cuda").to(dtype)[:, : 2 * row]
    kernel = Kernel(Build("copy_box", Path(__file__).parent / "tensor_map_copy.cu"), shared_bytes=16 * 128)
    out = torch.empty(16, 8, 16, dtype=torch.uint8, device="cuda")  # rows of 8 chunks of 16 bytes
    arguments = [ctypes.c_void_p(out.data_ptr()), ctypes.c_int(row), ctypes.c_int(40), ctypes.c_int(16 * 128)]
    kernel.launch((1, 1, 1), (128, 1, 1), tensor_map(x, (16, row)), *arguments)
    rows, chunks = torch.arange(16).unsqueeze(1), torch.arange(8)
    straight = out.cpu()[rows, chunks ^ (rows % 8)].view(torch.uint8).flatten(1).view(dtype)
    expected = torch.zeros(16, row, dtype=dtype)
    expected[:10] = x[40:, row:].cpu()
    assert torch.equal(straight, expected)


@pytest.mark.parametrize(
    ("tensor", "box", "message"),
    [
        (torch.zeros(4, 8).t(), (1, 1), "last dimension"),
        (torch.zeros(4, 8, dtype=torch.int64), (1, 1), "int64"),
        (torch.zeros(4, 9), (1, 1), "16 bytes"),
        (torch.zeros(4, 8), (1,), "box"),
    ],
)
def test_what_no_tensor_map_describes(tensor, box, message):
    with pytest.raises(ValueError, match=message):
        tensor_map(tensor, box)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_kernel_that_does_not_compile_is_a_warning_that_says_what_runs(compiles, caplog):
    class Loaded(Kernel):
        def load(self):
            if not compiles:
                raise CompileError("line 3")
            return ctypes.c_void_p(1)

    assert Loaded(Build("nothing", Path("nothing.cu"))).try_load("rows run in Triton") is compiles
    assert caplog.messages == ([] if compiles else ["rows run in Triton: line 3"])

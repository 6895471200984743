"""`deepinfer kernels warmup` fills the cache, says what it does, and names what it does not know."""

from __future__ import annotations

from pathlib import Path

from tests.cli.command import Run
from tests.kernels.small_kernel import needs_compiler


def test_help_has_examples(run: Run):
    answer = run("kernels", "warmup", "--help")
    assert answer.returncode == 0
    assert "deepinfer kernels warmup sparse_attention" in answer.stdout
    assert "--workers" in answer.stdout and "--no-triton" in answer.stdout


@needs_compiler
def test_compiles_into_the_cache_once(run_process: Run, tmp_path: Path):
    for _ in range(2):
        answer = run_process("kernels", "warmup", "moe_sum", DEEPINFER_CACHE_DIR=str(tmp_path))
        assert answer.returncode == 0, answer.stderr
        assert "moe_sum" in answer.stdout
        (cubin,) = (tmp_path / "cuda").glob("*.cubin")
    assert f"{0.0:6.1f} s  moe_sum" in answer.stdout  # read, not compiled again


def test_an_unknown_kernel_is_one_line(run: Run):
    answer = run("kernels", "warmup", "sparse_atention")
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: ") and "sparse_attention" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_cache_that_cannot_be_written_is_a_failure(run_process: Run, tmp_path: Path):
    """The engine would go on, each process with a compiler of its own; whoever asks for a warm cache has none."""
    (tmp_path / "file").write_text("")
    answer = run_process("kernels", "warmup", "moe_sum", DEEPINFER_CACHE_DIR=str(tmp_path / "file"))
    assert answer.returncode == 1
    assert "1 kernels could not be written to the cache" in answer.stdout
    assert "not kept" in answer.stderr and str(tmp_path) in answer.stderr
    assert "Traceback" not in answer.stderr

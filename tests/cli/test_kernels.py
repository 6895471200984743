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
    answer = run_process("kernels", "warmup", DEEPINFER_CACHE_DIR=str(tmp_path / "file"))
    assert answer.returncode == 1
    assert "nothing is compiled" in answer.stdout and str(tmp_path / "file") in answer.stdout
    assert " s  " not in answer.stdout  # at once: not one kernel was compiled
    assert "Traceback" not in answer.stderr


@needs_compiler
def test_a_cache_that_fails_later_ends_it(run_process: Run, tmp_path: Path):
    """A folder in the place of the file: the first kernel cannot be written, and the others are not begun."""
    filled = tmp_path / "filled"
    assert run_process("kernels", "warmup", "moe_sum", DEEPINFER_CACHE_DIR=str(filled)).returncode == 0
    (name,) = (path.name for path in (filled / "cuda").glob("*.cubin"))
    (tmp_path / "bad" / "cuda" / name / "in the way").mkdir(parents=True)
    names = ("moe_sum", "mqa_logits", "top_k")  # in the order of compilation
    answer = run_process("kernels", "warmup", *names, "--workers", "1", DEEPINFER_CACHE_DIR=str(tmp_path / "bad"))
    assert answer.returncode == 1 and "no more are compiled" in answer.stdout
    assert f"{name.removesuffix('.cubin')} could not be written" in answer.stdout and "top_k" not in answer.stdout
    assert "Traceback" not in answer.stderr


@needs_compiler
def test_a_full_cache_need_not_be_writable(run_process: Run, tmp_path: Path):
    assert run_process("kernels", "warmup", "moe_sum", DEEPINFER_CACHE_DIR=str(tmp_path)).returncode == 0
    (tmp_path / "cuda").chmod(0o500)
    try:
        answer = run_process("kernels", "warmup", "moe_sum", DEEPINFER_CACHE_DIR=str(tmp_path))
    finally:
        (tmp_path / "cuda").chmod(0o700)
    assert answer.returncode == 0 and ", 0 of them to be compiled" in answer.stdout

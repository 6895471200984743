"""Which device "auto" is, and what the cache may take where nobody says."""

from pathlib import Path

import pytest
import torch

from deepinfer import LLM
from deepinfer.commands.options import make_engine_config
from deepinfer.config.engine import DEFAULT_CACHE_BYTES, EngineConfig
from deepinfer.engine import loading
from deepinfer.engine.loading import load_engine
from deepinfer.engine.memory import default_cache_bytes
from tests.checkpoints import write_tiny_checkpoint

GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def test_auto_is_the_cpu_where_there_is_no_gpu(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_engine(checkpoint).config.device == "cpu"
    assert load_engine(checkpoint, EngineConfig(device="auto")).config.device == "cpu"
    assert LLM(checkpoint, num_blocks=8).engine.config.device == "cpu"
    assert make_engine_config().device == "auto" and make_engine_config(device="cpu").device == "cpu"
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N"):
        EngineConfig(device="tpu")


def test_auto_is_the_gpu_where_there_is_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this goes without one: the model is loaded for it."""
    asked: list[str] = []

    def load(path: Path, config: EngineConfig) -> None:
        asked.append(config.device)
        raise ValueError("no further")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(loading.ModelRunner, "from_checkpoint", load)
    for config in (None, EngineConfig(device="auto"), EngineConfig(device="cpu")):
        with pytest.raises(ValueError, match="no further"):
            load_engine(checkpoint, config)
    assert asked == ["cuda", "cuda", "cpu"]


def test_the_cache_takes_a_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which the weights hold 30: 0.9 leaves 42, less the slots of 7 sequences and the null slot."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    config = EngineConfig(device="cuda", max_num_seqs=7)
    assert default_cache_bytes(config, GIB // 4) == 40 * GIB
    half = EngineConfig(device="cuda", max_num_seqs=7, gpu_memory_utilization=0.5)
    assert default_cache_bytes(half, GIB // 4) == 8 * GIB
    little = EngineConfig(device="cuda", gpu_memory_utilization=0.3)
    with pytest.raises(ValueError, match="gpu_memory_utilization is 0.3: .* leaves nothing for cache blocks"):
        default_cache_bytes(little, GIB // 4)
    # Whoever says how much does not need the share.
    assert default_cache_bytes(EngineConfig(device="cuda", gpu_memory_utilization=0.3, num_blocks=9), GIB) == 0
    assert default_cache_bytes(EngineConfig(), GIB) == DEFAULT_CACHE_BYTES


@pytest.mark.parametrize("share", [0, -0.1, 1.5, float("nan"), "0.9", True, None])
def test_a_share_that_is_none_is_refused(share: object) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be a number in \(0, 1\]"):
        EngineConfig(gpu_memory_utilization=share)  # type: ignore[arg-type]

"""The head of a V4.1 checkpoint from training to a checkpoint that the engine's model loads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from deepinfer.cli import main
from deepinfer.config.model import ModelConfig
from deepinfer.deepspec import v41_train
from deepinfer.deepspec.targets import V41Target
from deepinfer.deepspec.v41_blocks import draft_kinds, initial_masters
from deepinfer.deepspec.v41_checkpoint import HEAD_NAME, attach_head, head_weights, write_head
from deepinfer.models import reference
from deepinfer.models.checkpoint_format import expected_tensors
from deepinfer.models.draft_calibration import DraftCalibration
from deepinfer.models.layers.engram_map import compressed_token_map
from deepinfer.models.loader import is_draft, load_weights
from deepinfer.models.random_weights import random_weights
from deepinfer.models.registry import load_model
from deepinfer.models.writer import write_checkpoint
from deepinfer.train.batches import Rows
from tests.checkpoints import write_tokenizer
from tests.configs import tiny_config

LENGTH = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A target without a head, with the layers that one would read."""
    folder = tmp_path_factory.mktemp("v41")
    write_tokenizer(folder / "tokenizer.json")
    token_map = compressed_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    config = tiny_config(0, engram_compressed_vocab_size=int(token_map.max()) + 1, dspark_target_layer_ids=(8, 9))
    write_checkpoint(folder, config, random_weights(config, 0), 1 << 20, folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """A few steps of the training program."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("out")
    rng = np.random.default_rng(0)
    np.save(data / "train-0.npy", rng.integers(3, 500, (6, LENGTH + 1)).astype(np.uint16))
    np.save(data / "targets-0.npy", np.packbits(np.ones((6, LENGTH + 1), np.uint8), axis=1))
    arguments = ["train-head", "--target", checkpoint, "--data", data, "--out", out, "--length", LENGTH, "--batch", 2]
    arguments += ["--reads", 2, "--anchors", 4, "--minutes", 0.03, "--coldest", 0.2, "--plot", out / "curve.svg"]
    with pytest.raises(SystemExit) as ended:
        main(["deepspec", *map(str, arguments)])
    assert ended.value.code == 0
    return out


def test_training_writes_the_public_tensors(checkpoint, trained):
    record = json.loads((trained / "training.json").read_text())
    assert record["losses"]["coldest"] == 0.2 and "<svg" in (trained / "curve.svg").read_text()
    assert record["step"] >= 1 and record["stages"] == 2
    config = ModelConfig.from_file(checkpoint).with_draft_layers(2)
    expected = {name for name in expected_tensors(config) if is_draft(name)}
    assert set(load_file(trained / HEAD_NAME)) == expected


def test_attached_heads_load_and_the_rest_stays(checkpoint, trained, tmp_path):
    attach_head(checkpoint, trained / HEAD_NAME, tmp_path)
    DraftCalibration([1.5, 1.0, 0.5]).write(tmp_path)
    model = load_model(tmp_path, torch.float32, draft_head=True)
    assert model.draft_head.temperatures.tolist() == [1.5, 1.0, 0.5]
    plain = load_model(tmp_path, torch.float32)
    assert torch.equal(plain.embed, load_model(checkpoint, torch.float32).embed)
    for file in checkpoint.glob("model-*-of-*"):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = [t.nbytes for file in tmp_path.glob("*.safetensors") for t in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    # Once more in place, with another head: nothing is counted twice.
    config = ModelConfig.from_file(checkpoint).with_draft_layers(1)
    write_head(tmp_path / "new.safetensors", config, head_weights(config, initial_masters(config, 3)))
    attach_head(tmp_path, tmp_path / "new.safetensors", tmp_path)
    (tmp_path / "new.safetensors").unlink()
    assert not (tmp_path / "draft_calibration.json").exists()
    assert len(load_model(tmp_path, torch.float32, draft_head=True).draft_head.layers) == 1
    sizes = [t.nbytes for file in tmp_path.glob("*.safetensors") for t in load_file(file).values()]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)


def test_attach_from_the_command_line(checkpoint, trained, tmp_path, capsys):
    def attach(head):
        with pytest.raises(SystemExit) as ended:
            main(
                ["deepspec", "attach", "--target", str(checkpoint), "--head", str(head), "--out", str(tmp_path / "new")]
            )
        return ended.value.code

    assert attach(trained / HEAD_NAME) == 0
    assert "2 draft layers" in capsys.readouterr().out
    assert len(load_model(tmp_path / "new", torch.float32, draft_head=True).draft_head.layers) == 2
    (tmp_path / "bad").write_bytes(b"no safetensors")
    assert attach(tmp_path / "bad") == 2 and "cannot be read" in capsys.readouterr().err
    tensors = load_file(trained / HEAD_NAME)
    save_file({name: value for name, value in tensors.items() if "kv_norm" not in name}, tmp_path / "part")
    assert attach(tmp_path / "part") == 2 and "does not fit" in capsys.readouterr().err


def test_a_released_head_is_not_replaced(checkpoint, trained, tmp_path):
    config = ModelConfig.from_file(checkpoint).with_draft_layers(1)
    write_checkpoint(tmp_path, config, random_weights(config, 0), 1 << 20)
    with pytest.raises(ValueError, match="which stays"):
        attach_head(tmp_path, trained / HEAD_NAME, tmp_path)


def test_what_is_written_is_what_training_saw(checkpoint, tmp_path):
    """Masters through the file and back are the rounded values of a training step."""
    config = ModelConfig.from_file(checkpoint).with_draft_layers(2)
    masters = initial_masters(config, 1)
    seen = head_weights(config, masters)
    write_head(tmp_path / "head.safetensors", config, seen)
    attach_head(checkpoint, tmp_path / "head.safetensors", tmp_path)
    stored = load_weights(tmp_path, config, include=is_draft)
    assert stored.keys() == seen.keys()
    again = head_weights(config, v41_train.stored_masters(config, tmp_path))  # and what a run that goes on starts from
    assert all(torch.equal(again[name], seen[name]) for name in seen)
    for name, value in stored.items():
        assert torch.equal(value, seen[name]), name
    assert {k.rule for k in draft_kinds(config)} == {"balance", "head", "matrix", "router", "vector"}


def test_the_target_gives_taps_and_hidden_states(checkpoint):
    target = V41Target(checkpoint, LENGTH, "cpu")
    tokens = torch.randint(3, 500, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    taps, hidden = target(tokens)
    trace: dict[str, torch.Tensor] = {}
    numerics = reference.Numerics(quantize_kv=True)
    expected = reference.forward(
        target.weights,
        target.config,
        tokens,
        target.token_map,
        numerics=numerics,
        trace=trace,
        return_hidden=True,
    )
    close = torch.isclose(hidden, expected, atol=5e-3, rtol=5e-3).float().mean()
    assert close > 0.97  # a selection or an expert may fall the other way on a tie of rounding
    near = torch.isclose(taps, torch.cat([trace[f"layers.{i}.tap"] for i in (8, 9)], -1), atol=5e-3, rtol=5e-3)
    assert near.float().mean() > 0.97


def test_the_target_reads_several_batches_at_a_time(checkpoint):
    """The batches are those of a target that reads one at a time, and every row comes once an epoch."""
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(3, 500, (8, LENGTH + 1)).astype(np.int16))
    rows = Rows(ids, torch.full((8, -(-(LENGTH + 1) // 8)), 255, dtype=torch.uint8))
    target = V41Target(checkpoint, LENGTH, "cpu")
    batches = v41_train.TargetBatches(rows, target, batch=2, reads=2, seed=0)
    assert batches.per_epoch == 4
    seen = []
    for _, (tokens, states, counted) in zip(range(4), batches.from_step(0), strict=False):
        taps, hidden = target(tokens[:, :-1])
        torch.testing.assert_close(states, torch.cat((taps, hidden), dim=-1), atol=1e-4, rtol=1e-3)
        assert counted.shape == (2, LENGTH) and counted.all()
        seen += tokens.tolist()
    assert sorted(seen) == sorted(ids.long().tolist())

"""Held-out scoring against a direct count, and the dense baseline's training step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import deepinfer
from deepinfer.train.dense_baseline import DenseConfig, DenseModel, dense_gradient_step, dense_kinds, dense_masters
from deepinfer.train.evaluate import held_out_scores, load_held_out, main
from deepinfer.train.optimizer import Optimizer, Rates
from deepinfer.train.parameters import Parameters


def write_held_out(folder, length: int):
    generator = np.random.default_rng(0)
    text, talk = generator.integers(0, 100, 5 * length + 7), generator.integers(0, 100, 2 * length)
    spoken = generator.random(2 * length) < 0.4
    whole = np.ones(len(text), bool)
    np.savez(
        folder / "heldout.npz",
        **{
            "text.ids": text.astype(np.uint16),
            "text.targets": np.packbits(whole),
            "text.bytes": 4 * len(text),
            "talk.ids": talk.astype(np.uint16),
            "talk.targets": np.packbits(spoken),
            "talk.bytes": 999,
        },
    )
    return text, talk, spoken


@pytest.mark.parametrize("batch", [3, 64])
def test_scores_count_every_target_once(tmp_path, batch):
    length = 16
    text, talk, spoken = write_held_out(tmp_path, length)
    scores = held_out_scores(
        lambda inputs, targets: targets.double() + 100.0 * inputs, load_held_out([tmp_path], length), batch, "cpu"
    )
    nats = float((text[1:] + 100.0 * text[:-1]).sum())
    assert scores["text"]["targets"] == len(text) - 1
    assert scores["text"]["loss"] == pytest.approx(nats / (len(text) - 1))
    assert scores["text"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / (4 * len(text)))
    said = float(((talk[1:] + 100.0 * talk[:-1]) * spoken[1:]).sum())
    assert scores["talk"]["loss"] == pytest.approx(said / spoken[1:].sum())
    assert "bits_per_byte" not in scores["talk"]
    assert scores["all"]["targets"] == len(text) - 1 + spoken[1:].sum()
    assert scores["all text"]["bits_per_byte"] == pytest.approx(scores["text"]["bits_per_byte"])


def test_missing_data_is_one_line(tmp_path, capsys):
    model = str(Path(deepinfer.__file__).parent / "checkpoints" / "nano")
    for given, needle in (([], "--data"), (["--data", str(tmp_path)], "heldout.npz")):
        with pytest.raises(SystemExit) as ended:
            main(["--model", model, "--out", str(tmp_path), *given])
        err = capsys.readouterr().err
        assert ended.value.code == 2 and needle in err and err.startswith("error: ") and err.count("\n") == 1


def test_dense_baseline_learns():
    config = DenseConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    parameters = Parameters(dense_kinds(config), dense_masters(config), "cpu", torch.float32)
    model, optimizer = DenseModel(config, 16, "cpu", compiled=False), Optimizer(parameters, Rates())
    tokens = (torch.arange(17) + torch.arange(8)[:, None]) % 50
    counted = torch.ones(8, 16)
    losses = []
    for _ in range(20):
        result = dense_gradient_step(model, parameters, tokens[:, :-1], tokens[:, 1:], counted, False)
        optimizer.step(result.gradients, 1.0)
        losses.append(float(result.figures["loss"]))
    assert losses[0] == pytest.approx(math.log(64), rel=0.05) and losses[-1] < 3.0
    ahead = model.losses(parameters.compute_weights(), tokens[:, :-1], tokens[:, 1:])
    changed = tokens.clone()
    changed[:, 10] = 63
    changed_losses = model.losses(parameters.compute_weights(), changed[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(ahead[:, :10], changed_losses[:, :10])  # causal
    assert float((ahead[:, 10:] - changed_losses[:, 10:]).detach().abs().max()) > 1e-3


def test_dense_baseline_has_nanos_active_size():
    size = sum(master.numel() for name, master in dense_masters(DenseConfig()).items() if name != "embed")
    assert 17.5e6 < size < 19e6

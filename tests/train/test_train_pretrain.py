"""Training on the CPU: the loss falls, a stopped run goes on where it was, an exported checkpoint is what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.models import reference
from deepinfer.models.loader import load_weights
from deepinfer.train.batches import Batches, load_rows, tokens_of
from deepinfer.train.export import export
from deepinfer.train.optimizer import Rates, orthogonalize
from deepinfer.train.parameters import (
    initial_masters,
    masters_from_weights,
    parameter_counts,
    parameter_kinds,
    stored_values,
)
from deepinfer.train.pretrain import Run, Schedule, build, load_state, save_state, step_loss, train
from tests.configs import tiny_config, tiny_token_map

LENGTH = 32


def counting_rows(rows: int = 64) -> torch.Tensor:
    """Rows that a model can learn: each counts up from a random start, modulo 50."""
    start = torch.randint(0, 50, (rows, 1), generator=torch.Generator().manual_seed(1))
    return ((start + torch.arange(LENGTH + 1)) % 50).to(torch.int16)


def start(seed: int = 0, batch: int = 8):
    config = tiny_config()
    token_map = torch.from_numpy(tiny_token_map()).long()
    built = build(config, token_map, initial_masters(config, seed), LENGTH, "cpu", Rates())
    return config, built, Batches(counting_rows(), batch, seed)


def run_steps(built, batches, run, steps, total=60):
    model, parameters, optimizer = built
    until = run.step + steps
    torch.manual_seed(run.step)
    train(
        model,
        parameters,
        optimizer,
        batches,
        run,
        Schedule(),
        progress_of=lambda r: r.step / total,
        stop=lambda r: r.step >= until,
    )


def test_loss_falls_in_dense_and_sparse_phases():
    _, (model, parameters, optimizer), batches = start()
    inputs, targets = next(batches.from_step(0))
    schedule = Schedule()
    before = float(step_loss(model, parameters, schedule, inputs, targets, dense=False)[2]["loss"])
    run_steps((model, parameters, optimizer), batches, Run(), 24, total=24)
    after = float(step_loss(model, parameters, schedule, inputs, targets, dense=False)[2]["loss"])
    assert before > 5.5 and after < 0.7 * before


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    _, whole, batches = start()
    run = Run()
    run_steps(whole, batches, run, 4)
    run_steps(whole, batches, run, 3)
    _, first, batches = start()
    half = Run()
    run_steps(first, batches, half, 4)
    save_state(tmp_path / "state.pt", half, first[1], first[2])
    _, second, batches = start(seed=5)
    batches.seed = 0
    resumed = load_state(tmp_path / "state.pt", second[1], second[2])
    run_steps(second, batches, resumed, 3)
    assert resumed.step == run.step == 7 and resumed.tokens == run.tokens
    for name, value in whole[1].masters.items():
        torch.testing.assert_close(second[1].masters[name], value, rtol=0, atol=0)


def test_exported_checkpoint_holds_the_trained_values(tmp_path):
    config, built, batches = start()
    run_steps(built, batches, Run(), 3)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    export(tmp_path / "out", config, built[1].masters, tokenizer)
    loaded = load_weights(tmp_path / "out", config, torch.float32)
    expected = stored_values(config, built[1].masters)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    again = stored_values(config, masters_from_weights(config, loaded))
    for name, value in expected.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_kinds_cover_the_whole_text_model():
    config = tiny_config()
    names = [name for kind in parameter_kinds(config) for name in kind.names]
    assert len(names) == len(set(names))
    weights = stored_values(config, initial_masters(config))
    tokens = torch.randint(0, 500, (1, 16))
    logits = reference.forward(weights, config, tokens, torch.from_numpy(tiny_token_map()).long())
    assert bool(torch.isfinite(logits).all())
    total, active = parameter_counts(config)
    assert total == sum(w.numel() for n, w in weights.items() if not n.endswith("bias_vl")) and 0 < active < total


def test_orthogonalize_moves_singular_values_near_one():
    matrices = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    for m in (matrices, matrices.transpose(1, 2)):
        singular = torch.linalg.svdvals(orthogonalize(m))
        assert float(singular.min()) > 0.5 and float(singular.max()) < 1.3


def test_balance_raises_idle_experts():
    _, (_, parameters, optimizer), _ = start()
    counts = {layer: torch.tensor([0, 20, 10, 10, 10, 10, 10, 10]) for layer in range(10)}
    optimizer.balance(counts, 1.0)
    bias = parameters.masters["layers.*.ffn.gate.bias"]
    assert bool((bias[:, 0] > 0).all()) and bool((bias[:, 1] < 0).all()) and bool((bias[:, 2:] == 0).all())


def test_schedule_warms_up_holds_and_decays_to_zero():
    schedule = Schedule(warm_up=0.1, decay=0.25)
    factors = [schedule.factor(p) for p in (0.0, 0.05, 0.1, 0.7, 0.875, 1.0)]
    assert factors == pytest.approx([0.02, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_batches_visit_every_row_once_an_epoch_and_resume():
    batches = Batches(torch.arange(40, dtype=torch.int16).view(10, 4), 2, seed=3)
    stream = batches.from_step(0)
    seen = [next(stream)[0][:, 0].tolist() for _ in range(15)]
    for epoch in range(3):
        assert sorted(sum(seen[5 * epoch : 5 * epoch + 5], [])) == list(range(0, 40, 4))
    assert seen[:5] != seen[5:10]
    resumed = batches.from_step(7)
    assert [next(resumed)[0][:, 0].tolist() for _ in range(4)] == seen[7:11]


def test_rows_keep_large_token_ids(tmp_path):
    import numpy as np

    path: Path = tmp_path / "train.bin"
    np.array([0, 1, 65535, 40000], dtype=np.uint16).tofile(path)
    assert tokens_of(load_rows(path, 1)).tolist() == [[0, 1], [65535, 40000]]
    with pytest.raises(ValueError, match="multiple of 3"):
        load_rows(path, 2)

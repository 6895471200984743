"""Training on the CPU: the loss falls, a stopped run goes on, an exported checkpoint is what was trained."""

from __future__ import annotations

import lzma
from functools import partial

import numpy as np
import pytest
import torch

from deepinfer.models import reference
from deepinfer.models.loader import load_weights
from deepinfer.train.batches import Batches, Rows, load_rows
from deepinfer.train.export import export
from deepinfer.train.optimizer import Rates, orthogonalize
from deepinfer.train.parameters import (
    initial_masters,
    masters_from_weights,
    parameter_counts,
    parameter_kinds,
    stored_values,
)
from deepinfer.train.pretrain import Run, Schedule, build, gradient_step, load_state, save_state, train
from tests.configs import tiny_config, tiny_token_map

LENGTH = 32


def small_config():
    """Four layers, one of each mode: window only, ratio 2, ratio 1 with candidates, reindexing."""
    return tiny_config(
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        engram_layer_ids=(1,),
        engram_num_embeddings=(272,),
    )


def all_targets(ids: torch.Tensor) -> Rows:
    return Rows(ids.to(torch.int16), torch.full((ids.shape[0], -(-ids.shape[1] // 8)), 255, dtype=torch.uint8))


def counting_rows(rows: int = 64) -> Rows:
    """Rows that a model can learn: each counts up from a random start, modulo 50."""
    start = torch.randint(0, 50, (rows, 1), generator=torch.Generator().manual_seed(1))
    return all_targets((start + torch.arange(LENGTH + 1)) % 50)


def start(seed: int = 0, batch: int = 8):
    config = small_config()
    token_map = torch.from_numpy(tiny_token_map()).long()
    built = build(config, token_map, initial_masters(config, seed), LENGTH, "cpu", Rates())
    return config, built, Batches(counting_rows(), batch, seed)


def run_steps(built, batches, run, steps, total=60):
    model, parameters, optimizer = built
    until = run.step + steps
    torch.manual_seed(run.step)
    train(
        partial(gradient_step, model, parameters, Schedule()),
        optimizer,
        batches,
        run,
        Schedule(),
        progress_of=lambda r: r.step / total,
        stop=lambda r: r.step >= until,
    )


def test_loss_falls_in_dense_and_sparse_phases():
    _, (model, parameters, optimizer), batches = start()
    batch = next(batches.from_step(0))
    before = float(gradient_step(model, parameters, Schedule(), *batch, dense=False).figures["loss"])
    run_steps((model, parameters, optimizer), batches, Run(), 20, total=20)
    after = float(gradient_step(model, parameters, Schedule(), *batch, dense=False).figures["loss"])
    assert before > 5.5 and after < 0.75 * before


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
    config = small_config()
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
    counts = {layer: torch.tensor([0, 20, 10, 10, 10, 10, 10, 10]) for layer in range(4)}
    optimizer.balance(counts, 1.0)
    bias = parameters.masters["layers.*.ffn.gate.bias"]
    assert bool((bias[:, 0] > 0).all()) and bool((bias[:, 1] < 0).all()) and bool((bias[:, 2:] == 0).all())


def test_schedule_warms_up_holds_and_decays_to_zero():
    schedule = Schedule(warm_up=0.1, decay=0.25)
    factors = [schedule.factor(p) for p in (0.0, 0.05, 0.1, 0.7, 0.875, 1.0)]
    assert factors == pytest.approx([0.02, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_batches_visit_every_row_once_an_epoch_and_resume():
    batches = Batches(all_targets(torch.arange(40).view(10, 4)), 2, seed=3)
    stream = batches.from_step(0)
    seen = [next(stream)[0][:, 0].tolist() for _ in range(15)]
    for epoch in range(3):
        assert sorted(sum(seen[5 * epoch : 5 * epoch + 5], [])) == list(range(0, 40, 4))
    assert seen[:5] != seen[5:10]
    resumed = batches.from_step(7)
    assert [next(resumed)[0][:, 0].tolist() for _ in range(4)] == seen[7:11]


def test_rows_keep_large_ids_and_target_bits(tmp_path):
    ids = np.array([[0, 1, 65535, 40000, 5, 6, 7, 8, 9]], dtype=np.uint16)
    flags = np.array([[0, 0, 1, 1, 0, 1, 0, 0, 1]], dtype=bool)
    np.save(tmp_path / "train-0.npy", ids)
    np.save(tmp_path / "targets-0.npy", np.packbits(flags, axis=1))
    with lzma.open(tmp_path / "train-1.npy.xz", "wb") as file:
        np.save(file, ids + 1)
    with lzma.open(tmp_path / "targets-1.npy.xz", "wb") as file:
        np.save(file, np.packbits(~flags, axis=1))
    rows = load_rows([tmp_path])
    inputs, targets, counted = rows.take(torch.tensor([0, 1]))
    assert inputs[0].tolist() == ids[0, :-1].tolist() and targets[0].tolist() == ids[0, 1:].tolist()
    assert counted[0].tolist() == flags[0, 1:].tolist() and counted[1].tolist() == (~flags)[0, 1:].tolist()
    with pytest.raises(ValueError, match="no train-N"):
        load_rows([tmp_path / "absent"])


def test_only_counted_targets_give_gradients():
    _, (model, parameters, _), batches = start()
    inputs, targets, counted = next(batches.from_step(0))
    counted = counted.clone()
    counted[:, LENGTH // 2 :] = 0
    first = gradient_step(model, parameters, Schedule(), inputs, targets, counted, dense=False)
    changed = targets.clone()
    changed[:, LENGTH // 2 :] = 7
    second = gradient_step(model, parameters, Schedule(), inputs, changed, counted, dense=False)
    torch.testing.assert_close(first.gradients["head.weight"], second.gradients["head.weight"])
    assert float(first.figures["loss"]) == float(second.figures["loss"])

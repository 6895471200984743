"""Train the DSpark head of a V4.1 checkpoint on packed rows; the target's hidden states are computed on the fly.

    python -m deepinfer.deepspec.v41_train --target deepinfer/checkpoints/nano --data DATA --out OUT --minutes 4

DATA was written by `deepinfer deepspec prepare` (the target's own answers), or holds train-N.npy and targets-N.npy of
other text (see `deepinfer/train/data`). The target reads whole rows (teacher forcing);
at every step `--anchors` positions of each row get a block of drafts. The head is written in the public format every
minute and at the end (`model-draft.safetensors`); `attach_head` puts it into the checkpoint. The optimiser, the
rounding of masters and the schedule are those of `deepinfer/train`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.deepspec.losses import LossWeights, block_losses
from deepinfer.deepspec.pack import training_rows
from deepinfer.deepspec.targets import V41Target
from deepinfer.deepspec.train import blocks_of, pick_anchors
from deepinfer.deepspec.v41_blocks import BlockModel, draft_kinds, initial_masters
from deepinfer.deepspec.v41_checkpoint import HEAD_NAME, head_weights, write_head
from deepinfer.models.loader import is_draft, load_weights
from deepinfer.train.batches import Batches, Rows
from deepinfer.train.optimizer import Optimizer, Rates
from deepinfer.train.parameters import Parameters
from deepinfer.train.pretrain import Run, Schedule, StepResult, train


class TargetBatches:
    """Like `train.batches.Batches`, of rows that the target has read: it reads `reads` batches of them at a time.

    Yields (tokens int64 [R, T + 1], taps and final states side by side [R, T, (n + 1) * D], counted float32 [R, T]).
    """

    def __init__(self, rows: Rows, target: V41Target, batch: int, reads: int, seed: int) -> None:
        self.batches, self.target, self.batch, self.reads = Batches(rows, batch * reads, seed), target, batch, reads
        self.per_epoch = self.batches.per_epoch * reads

    def from_step(self, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Batches from number `step` on."""
        for inputs, targets, counted in self.batches.from_step(step // self.reads):
            states = torch.cat(self.target(inputs), dim=-1)
            tokens = torch.cat((inputs, targets[:, -1:]), dim=1)
            yield from zip(*(part.split(self.batch) for part in (tokens, states, counted)), strict=True)


def gradient_step(
    model: BlockModel,
    parameters: Parameters,
    loss_weights: LossWeights,
    num_anchors: int,
    tokens: Tensor,
    states: Tensor,
    counted: Tensor,
    _key: bool = False,
) -> StepResult:
    """One batch of TargetBatches, differentiated; expert biases are balanced on the way."""
    size, dim = model.size, model.embed.shape[1]
    taps, hidden = states[..., :-dim], states[..., -dim:]
    anchors = pick_anchors(counted, num_anchors, size)
    with torch.no_grad():
        wanted = F.linear(blocks_of(hidden, anchors, size).float(), model.head)
    counts = blocks_of(counted, anchors, size).cumprod(1)
    weights = parameters.compute_weights()
    blocks = model(weights, taps, tokens, anchors)
    losses = block_losses(blocks.logits, wanted, blocks.scores, counts, loss_weights)
    (losses.loss + 1e-3 * blocks.balance_loss).backward()
    with torch.no_grad():
        load = blocks.expert_counts.float()
        parameters.masters["mtp.*.ffn.gate.bias"].add_(torch.sign(load.mean(-1, keepdim=True) - load), alpha=5e-4)
    figures = {
        "loss": losses.loss.detach(),
        "accepted_length": losses.accepted_length,
        "confidence_error": losses.confidence_error.mean(),
        "busiest_expert": (load.amax(-1) / load.mean(-1)).max(),
    }
    figures |= {f"acceptance_{k + 1}": value for k, value in enumerate(losses.acceptance.unbind())}
    return StepResult(parameters.gradients(), {}, figures)


def stored_masters(config: ModelConfig, checkpoint: Path) -> dict[str, Tensor]:
    """The values of a trained head as masters."""
    weights = load_weights(checkpoint, config, torch.float32, include=is_draft)
    return {kind.name: torch.stack([weights[name] for name in kind.names]) for kind in draft_kinds(config)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of `prepare` or with train-N.npy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="go on from the head of this checkpoint: give a lower --peak then")
    parser.add_argument("--stages", type=int, default=2, help="draft layers (num_nextn_predict_layers)")
    parser.add_argument("--minutes", type=float, required=True, help="length of the schedule")
    parser.add_argument("--batch", type=int, default=16, help="rows a step")
    parser.add_argument("--reads", type=int, default=4, help="batches that the target reads at a time")
    parser.add_argument("--anchors", type=int, default=192, help="blocks a row")
    parser.add_argument("--gamma", type=float, default=LossWeights.gamma)
    parser.add_argument("--coldest", type=float, default=LossWeights.coldest, help="lowest temperature drafted for")
    parser.add_argument("--peak", type=float, default=Schedule.peak)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="launch kernels one by one instead of replaying a graph")
    options = parser.parse_args(arguments)

    config = ModelConfig.from_file(options.target).with_draft_layers(options.stages)
    on_gpu = options.device != "cpu"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    target = V41Target(options.target, options.length, options.device)
    model = BlockModel(config, target.embed, target.head, options.length)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    masters = initial_masters(config, options.seed) if options.init is None else stored_masters(config, options.init)
    parameters = Parameters(draft_kinds(config), masters, options.device, dtype)
    optimizer = Optimizer(parameters, Rates())
    rows = training_rows(options.data, options.length, options.seed).to(options.device)
    batches = TargetBatches(rows, target, options.batch, options.reads, options.seed)
    loss_weights, schedule = (
        LossWeights(gamma=options.gamma, coldest=options.coldest),
        Schedule(peak=options.peak, dense=0.0),
    )
    run = Run(seed=options.seed)
    print(f"rows {len(rows)}, set up in {time.perf_counter() - started:.1f} s", flush=True)

    def save(run: Run) -> None:
        write_head(options.out / HEAD_NAME, config, head_weights(config, parameters.masters))
        record: dict[str, Any] = {
            "loss_weights": asdict(loss_weights),
            "stages": options.stages,
            "batch": options.batch,
            "anchors": options.anchors,
            "rows": len(rows),
            "epochs": run.step / batches.per_epoch,
            "minutes": options.minutes,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
            **asdict(run),
        }
        (options.out / "training.json").write_text(json.dumps(record) + "\n")

    options.out.mkdir(parents=True, exist_ok=True)
    train(
        partial(gradient_step, model, parameters, loss_weights, options.anchors),
        optimizer,
        batches,
        run,
        schedule,
        progress_of=lambda run: run.seconds / (60 * options.minutes),
        stop=lambda run: False,
        save=save,
        save_seconds=60.0,
        use_graphs=not options.eager,
    )
    took = time.perf_counter() - started
    print(f"step {run.step}, {run.tokens} tokens, {took:.0f} s in this call", flush=True)


if __name__ == "__main__":
    main()

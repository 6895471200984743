"""Train the DSpark head of a V4.1 checkpoint on packed rows; the target's hidden states are computed on the fly.

The target reads whole rows (teacher forcing); at every step some positions of each row get a block of drafts. The head
is written in the public format every minute and at the end (`model-draft.safetensors`); `attach_head` puts it into the
checkpoint. The optimiser, the rounding of masters and the schedule are those of `deepinfer/train`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.deepspec.answers import check_tokens
from deepinfer.deepspec.files import replace_text
from deepinfer.deepspec.losses import LossWeights, block_losses, draw_heat
from deepinfer.deepspec.pack import training_rows
from deepinfer.deepspec.targets import V41Target, fingerprint
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
    heat = draw_heat(loss_weights, torch.rand(2, len(wanted), device=wanted.device))
    losses = block_losses(blocks.logits, wanted, blocks.scores, counts, loss_weights, heat)
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


@dataclass(frozen=True)
class HeadOptions:
    """A run. `minutes` of training; `batch` rows of `length` tokens a step; `peak` times all learning rates."""

    minutes: float
    stages: int = 2  # draft layers (num_nextn_predict_layers)
    batch: int = 16
    reads: int = 4  # batches that the target reads at a time
    anchors: int = 192  # blocks a row
    length: int = 1024
    peak: float = Schedule.peak
    seed: int = 0
    losses: LossWeights = field(default_factory=LossWeights)


def train_head(
    folder: Path,
    data: list[Path],
    out: Path,
    options: HeadOptions,
    device: str,
    init: Path | None = None,
    use_graphs: bool = True,
) -> Run:
    """Train a head for the checkpoint in `folder` and write it to `out`, with the log of the run.

    Args:
        data: folders that `deepspec prepare` wrote, or with train-N.npy and targets-N.npy (see `deepinfer/train/data`).
        init: go on from the head of this checkpoint; a lower `peak` is wanted then.
        use_graphs: replay the steps as a CUDA graph.
    """
    config = ModelConfig.from_file(folder).with_draft_layers(options.stages)
    on_gpu = device != "cpu"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    rows = training_rows(data, options.length, options.seed, fingerprint(folder)).to(device)
    check_tokens(int(rows.ids.to(torch.int32).bitwise_and(0xFFFF).max()), config.vocab_size)
    target = V41Target(folder, options.length, device)
    model = BlockModel(config, target.embed, target.head, options.length)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    masters = initial_masters(config, options.seed) if init is None else stored_masters(config, init)
    parameters = Parameters(draft_kinds(config), masters, device, dtype)
    optimizer = Optimizer(parameters, Rates())
    batches = TargetBatches(rows, target, options.batch, options.reads, options.seed)
    run = Run(seed=options.seed)
    print(f"rows {len(rows)}, set up in {time.perf_counter() - started:.1f} s", flush=True)

    def save(run: Run) -> None:
        if run.log and not math.isfinite(run.log[-1]["loss"]):
            raise ValueError(
                f"peak: the loss of step {run.log[-1]['step']} is no number, allowed: a lower --peak; "
                "the head that was saved last is whole"
            )
        write_head(out / HEAD_NAME, config, head_weights(config, parameters.masters))
        record: dict[str, Any] = {
            **asdict(options),
            "rows": len(rows),
            "epochs": run.step / batches.per_epoch,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
            **asdict(run),
        }
        replace_text(out / "training.json", json.dumps(record) + "\n")

    out.mkdir(parents=True, exist_ok=True)
    train(
        partial(gradient_step, model, parameters, options.losses, options.anchors),
        optimizer,
        batches,
        run,
        Schedule(peak=options.peak, dense=0.0),
        progress_of=lambda run: run.seconds / (60 * options.minutes),
        stop=lambda run: False,
        save=save,
        save_seconds=60.0,
        use_graphs=use_graphs,
    )
    print(f"step {run.step}, {run.tokens} tokens, {time.perf_counter() - started:.0f} s in this call", flush=True)
    return run

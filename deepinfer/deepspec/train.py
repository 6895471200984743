"""Train a draft of `drafts.py` on one device or, under `torchrun`, on several.

Every process takes its share of each batch and the gradients are averaged, so that N processes with batch b do the same
step as one with batch N * b. The draft is saved as safetensors with its config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepinfer.deepspec.drafts import BlockDraft, DraftConfig, Eagle3Draft, build_draft
from deepinfer.deepspec.losses import LossWeights, block_losses
from deepinfer.deepspec.rows import Batch
from deepinfer.deepspec.targets import Target

CONFIG_NAME, WEIGHTS_NAME = "draft_config.json", "draft.safetensors"
WARM_UP, DECAY = 0.04, 0.3  # shares of the run


@dataclass(frozen=True)
class TrainingOptions:
    """Length and rates of a run; `batch` rows a process."""

    steps: int
    batch: int = 8
    anchors: int = 64  # blocks a row
    learning_rate: float = 6e-4
    clip: float = 1.0
    seed: int = 0
    losses: LossWeights = field(default_factory=LossWeights)

    def rate(self, step: int) -> float:
        """Linear warm-up, constant, linear decay to zero."""
        progress = step / self.steps
        return self.learning_rate * min(1.0, (step + 1) / (WARM_UP * self.steps + 1), (1 - progress) / DECAY)


@contextmanager
def processes(device: str) -> Iterator[tuple[int, int]]:
    """(rank, number) of this process; joins the group that torchrun's environment describes, if there is one."""
    number = int(os.environ.get("WORLD_SIZE", "1"))
    if number == 1:
        yield 0, 1
        return
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        yield dist.get_rank(), number
    finally:
        dist.destroy_process_group()


def average_gradients(parameters: list[nn.Parameter], ranks: int) -> None:
    """The mean over all processes, in place."""
    if ranks == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


def pick_anchors(
    counted: Tensor, num_anchors: int, block_size: int, generator: torch.Generator | None = None
) -> Tensor:
    """int64 [R, A] random positions, those first whose first draft counts. counted [R, T]: target of each position.

    Raises:
        ValueError: no block fits into a row.
    """
    last = counted.shape[1] - block_size
    if last < 1:
        raise ValueError(f"block_size: {block_size}, allowed: at most {counted.shape[1] - 1} (length - 1)")
    order = torch.rand(counted.shape[0], last, device=counted.device, generator=generator)
    return (order + counted[:, 1 : last + 1]).topk(min(num_anchors, last), dim=-1).indices


def blocks_of(x: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """x [R, T, ...] at the block positions p + 1 ... p + B of anchors [R, A] -> [R * A, B, ...]."""
    positions = (anchors.unsqueeze(-1) + 1 + torch.arange(block_size, device=anchors.device)).flatten(1)
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    return x[rows, positions].reshape(-1, block_size, *x.shape[2:])


def train(
    draft: BlockDraft | Eagle3Draft,
    target: Target,
    batches: Iterator[Batch],
    options: TrainingOptions,
    ranks: int = 1,
    report: Callable[[int, dict[str, float]], None] = lambda step, figures: None,
) -> dict[str, float]:
    """Run `options.steps` steps; `report(step, figures)` after each. Returns the last figures."""
    parameters = list(draft.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    size, figures = draft.config.block_size, {}
    generator = torch.Generator(target.embed.device).manual_seed(options.seed)
    for step in range(options.steps):
        batch = next(batches)
        anchors = pick_anchors(batch.counted, options.anchors, size, generator)
        with torch.no_grad():
            wanted = F.linear(blocks_of(batch.hidden, anchors, size).float(), target.head)
        blocks = draft(target, batch.taps, batch.tokens, anchors)
        counts = blocks_of(batch.counted, anchors, size).cumprod(1)
        losses = block_losses(blocks.logits, wanted, blocks.scores, counts, options.losses)
        optimizer.zero_grad(set_to_none=True)
        losses.loss.backward()
        average_gradients(parameters, ranks)
        nn.utils.clip_grad_norm_(parameters, options.clip)
        for group in optimizer.param_groups:
            group["lr"] = options.rate(step)
        optimizer.step()
        figures = {"loss": float(losses.loss.detach()), "accepted_length": float(losses.accepted_length)}
        report(step, figures)
    return figures


def save_draft(folder: Path, draft: BlockDraft | Eagle3Draft, record: dict[str, Any]) -> None:
    """Weights in float32, and the config with a record of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in draft.state_dict().items()}, folder / WEIGHTS_NAME
    )
    raw = {"draft": draft.config.to_dict(), "training": record}
    (folder / CONFIG_NAME).write_text(json.dumps(raw, indent=2) + "\n")


def load_draft(folder: Path, device: str = "cpu") -> BlockDraft | Eagle3Draft:
    """A saved draft.

    Raises:
        ValueError: the folder does not hold one.
    """
    try:
        config = DraftConfig.from_dict(json.loads((folder / CONFIG_NAME).read_text())["draft"])
        draft = build_draft(config)
        draft.load_state_dict(load_file(folder / WEIGHTS_NAME))
    except (OSError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"draft: {folder} cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    return draft.to(device)


def record_of(options: TrainingOptions, ranks: int, figures: dict[str, float]) -> dict[str, Any]:
    """What is kept of a run."""
    return {**asdict(options), "processes": ranks, "torch": torch.__version__, **figures}

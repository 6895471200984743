"""Train a draft of `drafts.py` on one device or, under `torchrun`, on several.

Every process takes its share of each batch and the gradients are averaged, so that N processes with batch b do the same
step as one with batch N * b. The draft is saved as safetensors with its config; beside it, as the run goes, stands what
is needed to go on: moments of the optimiser and the number of the step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from deepinfer.deepspec.drafts import BlockDraft, DraftConfig, Eagle3Draft, build_draft
from deepinfer.deepspec.files import replace_text, save_whole
from deepinfer.deepspec.losses import LossWeights, block_losses, draw_heat
from deepinfer.deepspec.rows import Batch
from deepinfer.deepspec.targets import Target

CONFIG_NAME, WEIGHTS_NAME, STATE_NAME = "draft_config.json", "draft.safetensors", "optimizer.safetensors"
LOGGED = 200  # points of a run that are kept
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


def check_device(device: str, local_rank: int = 0) -> None:
    """That process `local_rank` of this host has a `device` ("cpu", "cuda" or "cuda:N").

    Raises:
        ValueError: it has not.
    """
    kind, _, index = device.partition(":")
    found = torch.cuda.device_count()
    if device == "cpu" or (kind == "cuda" and (int(index) if index.isdigit() else local_rank) < found):
        return
    raise ValueError(f"device: {device!r} for process {local_rank}, allowed: cpu, or cuda ({found} GPUs here)")


@contextmanager
def processes(device: str) -> Iterator[tuple[int, int, str]]:
    """(rank, number, device) of this process; joins the group that torchrun's environment describes, if there is one.

    `device` "cuda" is a GPU of its own for every process of a host.

    Raises:
        ValueError: there is no such device.
    """
    number = int(os.environ.get("WORLD_SIZE", "1"))
    check_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if number == 1:
        yield 0, 1, device
        return
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    # A process may write answers for hours while others wait.
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(days=7))
    try:
        yield dist.get_rank(), number, device
    finally:
        dist.destroy_process_group()


def wait_for_all(ranks: int) -> None:
    """Until every process is here."""
    if ranks > 1:
        dist.barrier()


def share_of(weight: Tensor, ranks: int) -> Tensor:
    """What the blocks of this process count, as a multiple of the mean over all processes."""
    mean = weight.detach().clone()
    if ranks > 1:
        dist.all_reduce(mean)
    return weight.detach() * ranks / mean


def average_gradients(parameters: list[nn.Parameter], ranks: int) -> None:
    """The mean over all processes, in place; one exchange for all of them."""
    if ranks == 1:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= ranks
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


def pick_anchors(
    counted: Tensor, num_anchors: int, block_size: int, draw: Callable[..., Tensor] = torch.rand
) -> Tensor:
    """int64 [R, A] random positions, those first whose first draft counts. counted [R, T]: target of each position.

    Raises:
        ValueError: no block fits into a row.
    """
    last = counted.shape[1] - block_size
    if last < 1:
        raise ValueError(f"block_size: {block_size}, allowed: at most {counted.shape[1] - 1} (length - 1)")
    order = draw(counted.shape[0], last, device=counted.device)
    return (order + counted[:, 1 : last + 1]).topk(min(num_anchors, last), dim=-1).indices


def blocks_of(x: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """x [R, T, ...] at the block positions p + 1 ... p + B of anchors [R, A] -> [R * A, B, ...]."""
    positions = (anchors.unsqueeze(-1) + 1 + torch.arange(block_size, device=anchors.device)).flatten(1)
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    return x[rows, positions].reshape(-1, block_size, *x.shape[2:])


class Trainer:
    """A draft, its optimiser, and how far they have come; process `rank` of `ranks`."""

    def __init__(
        self,
        draft: BlockDraft | Eagle3Draft,
        target: Target,
        options: TrainingOptions,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        self.draft, self.target, self.options, self.ranks, self.rank = draft, target, options, ranks, rank
        self.parameters = list(draft.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
        self.step, self.log = 0, list[dict[str, float]]()

    def train(self, batches: Iterator[Batch], advance: Callable[[Trainer], None] = lambda trainer: None) -> None:
        """Steps up to `options.steps`; `batches` begin with number `self.step`. `advance` is called after each.

        Raises:
            ValueError: a gradient is no number; the draft is as it was before that step.
        """
        size, options = self.draft.config.block_size, self.options
        generator = torch.Generator()

        def draw(rows: int, *shape: int, device: torch.device) -> Tensor:
            """Even draws for this process's rows, those that one process with all rows would draw for them."""
            every = torch.rand(rows * self.ranks, *shape, generator=generator)
            return every[self.rank :: self.ranks].to(device)

        while self.step < options.steps:
            batch = next(batches)
            generator.manual_seed(options.seed * 1_000_003 + self.step)
            anchors = pick_anchors(batch.counted, options.anchors, size, draw)
            draws = draw(*anchors.shape, 2, device=anchors.device).flatten(0, 1).T
            with torch.no_grad():
                wanted = F.linear(blocks_of(batch.hidden, anchors, size).float(), self.target.head)
            blocks = self.draft(self.target, batch.taps, batch.tokens, anchors)
            counts = blocks_of(batch.counted, anchors, size).cumprod(1)
            losses = block_losses(
                blocks.logits, wanted, blocks.scores, counts, options.losses, draw_heat(options.losses, draws)
            )
            self.optimizer.zero_grad(set_to_none=True)
            share = share_of(losses.weight, self.ranks)
            (losses.loss * share).backward()
            average_gradients(self.parameters, self.ranks)
            norm = nn.utils.clip_grad_norm_(self.parameters, options.clip)
            if not torch.isfinite(norm):  # averaged gradients: every process finds this at the same step
                raise ValueError(
                    f"learning_rate: the gradients of step {self.step + 1} are no numbers, allowed: a lower rate, or "
                    "data whose hidden states are numbers; the checkpoint that was saved last is whole"
                )
            for group in self.optimizer.param_groups:
                group["lr"] = options.rate(self.step)
            self.optimizer.step()
            self.step += 1
            if self.step % max(options.steps // LOGGED, 1) == 0 or self.step == options.steps:
                figures = torch.stack((losses.loss.detach(), losses.accepted_length)) * share
                if self.ranks > 1:
                    dist.all_reduce(figures)
                loss, accepted = (figures / self.ranks).tolist()
                self.log.append({"step": self.step, "loss": loss, "accepted_length": accepted})
            advance(self)

    def save(self, folder: Path) -> None:
        """The draft with a record of the run; before that the state to go on from, all of it in one file."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {**asdict(self.options), "processes": self.ranks, "torch": torch.__version__, "log": self.log}
        state = {f"draft.{name}": value.cpu().contiguous() for name, value in self.draft.state_dict().items()}
        for i, parameter in enumerate(self.parameters):
            moments = self.optimizer.state[parameter]
            state |= {f"{i}.{name}": moments[name].cpu().contiguous() for name in ("exp_avg", "exp_avg_sq", "step")}
        about = {"step": self.step, "draft": self.draft.config.to_dict(), "training": record}
        save_whole(folder / STATE_NAME, state, {"run": json.dumps(about)})
        save_draft(folder, self.draft, record)

    def resume(self, folder: Path) -> None:
        """Go on from `save`, if there is such a state in `folder`.

        Raises:
            ValueError: it is of a run with other options or another kind of draft, or cannot be read.
        """
        if not (folder / STATE_NAME).is_file():
            return
        try:
            state = load_file(folder / STATE_NAME)
            with safe_open(folder / STATE_NAME, framework="pt") as file:
                saved = json.loads(file.metadata()["run"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            what = " ".join(str(error).split())[:200]
            raise ValueError(f"out: {folder / STATE_NAME} cannot be read ({what}), allowed: a new folder") from None
        ours = {**json.loads(json.dumps(asdict(self.options))), "processes": self.ranks}
        differ = [name for name, value in ours.items() if saved["training"].get(name) != value]
        if differ or saved["draft"] != self.draft.config.to_dict():
            what = ", ".join(differ) or "draft"
            raise ValueError(f"out: {folder} holds a run with another {what}, allowed: a new folder, or the same run")
        self.draft.load_state_dict({name: state[f"draft.{name}"] for name in self.draft.state_dict()})
        for i, parameter in enumerate(self.parameters):
            moments = {name: state[f"{i}.{name}"] for name in ("exp_avg", "exp_avg_sq", "step")}
            moments |= {name: moments[name].to(parameter.device) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = moments
        self.step, self.log = saved["step"], saved["training"]["log"]


def save_draft(folder: Path, draft: BlockDraft | Eagle3Draft, record: dict[str, Any]) -> None:
    """Weights in float32, and the config with a record of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in draft.state_dict().items()}
    save_whole(folder / WEIGHTS_NAME, weights, {"format": "pt"})
    raw = {"draft": draft.config.to_dict(), "training": record}
    replace_text(folder / CONFIG_NAME, json.dumps(raw, indent=1) + "\n")


def load_draft(folder: Path, device: str = "cpu") -> BlockDraft | Eagle3Draft:
    """A saved draft.

    Raises:
        ValueError: the folder does not hold one.
    """
    try:
        config = DraftConfig.from_dict(json.loads((folder / CONFIG_NAME).read_text())["draft"])
        draft = build_draft(config)
        draft.load_state_dict(load_file(folder / WEIGHTS_NAME))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"draft: {folder} cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    if not all(bool(torch.isfinite(value).all()) for value in draft.state_dict().values()):
        raise ValueError(f"draft: {folder} holds weights that are no numbers, allowed: a draft that was trained")
    return draft.to(device)

"""Train a model of `config.json` from packed rows on one CUDA device, in the numerics of the stored checkpoint.

    python -m deepinfer.train.pretrain --config deepinfer/checkpoints/nano --data DATA --out OUT --minutes 16

The schedule follows the clock, so a run always ends with decayed weights: linear warm-up, a constant rate, a linear
tail to zero. `--call-minutes` ends a call early with its state saved under `--state`; the next call with the same state
goes on. `--init` starts from an exported checkpoint instead of from noise: give a lower `--peak` and `--dense 0` then,
the indexer is trained already. DATA holds train-N.npy and targets-N.npy
(see `deepinfer/train/data`) and heldout.npz.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.files import replacing
from deepinfer.models.reference import Weights
from deepinfer.train.batches import Batches, load_rows
from deepinfer.train.evaluate import held_out_scores, load_held_out
from deepinfer.train.export import export, starting_masters, token_map_of
from deepinfer.train.fast_model import FastModel
from deepinfer.train.graphs import GraphedStep, Throttle
from deepinfer.train.optimizer import Optimizer, Rates
from deepinfer.train.parameters import Parameters, parameter_kinds

LOG_EVERY = 20
SLOWEST_COUNTED_STEP = 2.0  # seconds; a step that compiles is longer and counts as this


@dataclass(frozen=True)
class Schedule:
    """Shares of the run, and loss weights."""

    warm_up: float = 0.02
    decay: float = 0.3
    dense: float = 0.25  # at first every compressed position is read and the indexer learns from the whole row
    index_loss: float = 0.2
    balance_loss: float = 1e-3
    z_loss: float = 1e-4
    peak: float = 1.0  # times all rates; a run that starts from trained weights wants less

    def factor(self, progress: float) -> float:
        """Learning-rate factor at `progress` in 0..1."""
        if progress < self.warm_up:
            return self.peak * max(progress / self.warm_up, 0.02)
        return self.peak * min(1.0, max(0.0, (1.0 - progress) / self.decay))


@dataclass
class Run:
    """Where a run stands; saved with the weights."""

    seed: int = 0
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    log: list[dict[str, float]] = field(default_factory=list)


def save_state(path: Path, run: Run, parameters: Parameters, optimizer: Optimizer) -> None:
    """Everything needed to go on, in one file that is replaced as a whole."""
    state = {"run": asdict(run), "masters": parameters.masters, "optimizer": optimizer.state_dict()}
    with replacing(path) as part:
        torch.save(state, part)


def load_state(path: Path, parameters: Parameters, optimizer: Optimizer) -> Run:
    """Take over what `save_state` kept."""
    state = torch.load(path, map_location=next(iter(parameters.masters.values())).device)
    for name, value in state["masters"].items():
        parameters.masters[name].copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    return Run(**state["run"])


@dataclass
class StepResult:
    """Tensors of one forward and backward pass."""

    gradients: dict[str, Tensor]  # by kind
    expert_counts: dict[int, Tensor]
    figures: dict[str, Tensor]  # for the log


def gradient_step(
    model: FastModel,
    parameters: Parameters,
    schedule: Schedule,
    inputs: Tensor,
    targets: Tensor,
    counted: Tensor,
    dense: bool,
) -> StepResult:
    """Loss over the counted targets plus the auxiliary losses, differentiated. All tensors [B, T]."""
    weights = parameters.compute_weights()
    y, info = model.hidden(weights, inputs, dense=dense)
    ce, z = model.losses(weights, y, targets)
    share = counted / counted.sum()
    index = torch.stack(info.index_losses).sum()
    loss = ((ce + schedule.z_loss * z) * share).sum() + schedule.index_loss * index
    loss = loss + schedule.balance_loss * torch.stack(info.balance_losses).mean()
    loss.backward()
    load = torch.stack(list(info.expert_counts.values())).float()
    figures = {
        "loss": (ce.detach() * share).sum(),
        "index_loss": index.detach() / len(info.index_losses),
        "busiest_expert": (load.amax(-1) / load.mean(-1)).max(),
    }
    return StepResult(parameters.gradients(), info.expert_counts, figures)


class BatchSource(Protocol):
    """Endless batches, three tensors each, from step number `step` on."""

    def from_step(self, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]: ...


def train(
    compute: Callable[..., StepResult],
    optimizer: Optimizer,
    batches: BatchSource,
    run: Run,
    schedule: Schedule,
    *,
    progress_of: Callable[[Run], float],
    stop: Callable[[Run], bool],
    save: Callable[[Run], None] = lambda run: None,
    save_seconds: float = 200.0,
    use_graphs: bool = True,
) -> None:
    """Steps until `progress_of(run)` reaches 1 or `stop(run)` says so; `run` is updated in place.

    `compute(inputs, targets, counted, dense)` gives the gradients of a batch.
    """
    graphed = GraphedStep(compute) if use_graphs else compute
    throttle = Throttle()
    last = saved = time.perf_counter()
    for inputs, targets, counted in batches.from_step(run.step):
        progress = progress_of(run)
        if progress >= 1.0 or stop(run):
            break
        factor = schedule.factor(progress)
        dense = progress < schedule.dense
        result: StepResult = graphed(inputs, targets, counted, dense)
        norm = optimizer.step(result.gradients, factor)
        if result.expert_counts:
            optimizer.balance(result.expert_counts, min(1.0, 2 * factor))
        throttle.step(inputs.is_cuda)
        run.step += 1
        run.tokens += inputs.numel()
        if run.step % LOG_EVERY == 0 or run.step <= 3:
            values = {name: float(value) for name, value in {**result.figures, "gradient_norm": norm}.items()}
            run.log.append(
                {"step": run.step, "tokens": run.tokens, "seconds": round(run.seconds, 2), "factor": factor, **values}
            )
            if run.step % (5 * LOG_EVERY) == 0 or run.step <= 3:
                shown = {name: round(value, 4) for name, value in run.log[-1].items()}
                print(json.dumps({**shown, "dense": dense, "progress": round(progress, 4)}), flush=True)
        now = time.perf_counter()
        run.seconds += min(now - last, SLOWEST_COUNTED_STEP)
        last = now
        if now - saved > save_seconds:
            save(run)
            last = saved = time.perf_counter()
    save(run)


def build(
    config: ModelConfig, token_map: Tensor, masters: dict[str, Tensor], length: int, device: str, rates: Rates
) -> tuple[FastModel, Parameters, Optimizer]:
    """Model, parameters and optimiser on one device; BF16 and compiled on CUDA, float32 and eager on the CPU."""
    on_gpu = device != "cpu"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.recompile_limit = 64
    model = FastModel(config, token_map, length, device, compiled=on_gpu)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    parameters = Parameters(parameter_kinds(config), masters, device, dtype, compiled=on_gpu)
    return model, parameters, Optimizer(parameters, rates)


def _losses(model: FastModel, weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    y, _ = model.hidden(weights, inputs)
    return model.losses(weights, y, targets)[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="folder with config.json and tokenizer.json")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="folders with train-N.npy and targets-N.npy"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the exported checkpoint and the log go")
    parser.add_argument("--state", type=Path, help="resume file: read if it exists, written as the run goes")
    parser.add_argument("--init", type=Path, help="start from this exported checkpoint")
    parser.add_argument("--minutes", type=float, required=True, help="training time of the whole run")
    parser.add_argument("--call-minutes", type=float, help="stop this call earlier, keeping the state")
    parser.add_argument("--peak", type=float, default=Schedule.peak, help="factor on all learning rates")
    parser.add_argument("--dense", type=float, default=Schedule.dense, help="share of the run before sparse selection")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="launch kernels one by one instead of replaying a graph")
    options = parser.parse_args(arguments)
    if options.call_minutes is not None and options.state is None:
        parser.error("--call-minutes needs --state, or the rest of the run is lost")

    started = time.perf_counter()
    config = ModelConfig.from_file(options.config)
    rates, schedule = Rates(), Schedule(peak=options.peak, dense=options.dense)
    masters = starting_masters(config, options.init, options.seed)
    model, parameters, optimizer = build(
        config, token_map_of(options.config, config), masters, options.length, options.device, rates
    )
    rows = load_rows(options.data).to(options.device)
    batches = Batches(rows, options.batch, options.seed)
    run = Run(seed=options.seed)
    if options.state is not None and options.state.exists():
        run = load_state(options.state, parameters, optimizer)
    print(f"rows {len(rows)}, step {run.step}, {run.seconds:.0f} s done", flush=True)

    def save(run: Run) -> None:
        if options.state is not None:
            save_state(options.state, run, parameters, optimizer)

    def stop(run: Run) -> bool:
        return options.call_minutes is not None and time.perf_counter() - started > 60 * options.call_minutes

    train(
        partial(gradient_step, model, parameters, schedule),
        optimizer,
        batches,
        run,
        schedule,
        progress_of=lambda run: run.seconds / (60 * options.minutes),
        stop=stop,
        save=save,
        use_graphs=not options.eager,
    )
    record: dict[str, Any] = {
        "rates": asdict(rates),
        "schedule": asdict(schedule),
        "batch": options.batch,
        "length": options.length,
        "rows": int(len(rows)),
        "epochs": run.step / batches.per_epoch,
        "minutes": options.minutes,
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "torch": torch.__version__,
        **asdict(run),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    export(options.out, config, parameters.masters, options.config)
    if run.seconds >= 60 * options.minutes:
        record["held_out"] = held_out_scores(
            partial(_losses, model, parameters.compute_weights()),
            load_held_out(options.data, options.length),
            options.batch,
            options.device,
        )
        print(json.dumps(record["held_out"]), flush=True)
    (options.out / "training.json").write_text(json.dumps(record) + "\n")
    took = time.perf_counter() - started
    print(f"exported step {run.step}, {run.tokens} tokens, {took:.0f} s in this call", flush=True)


if __name__ == "__main__":
    main()

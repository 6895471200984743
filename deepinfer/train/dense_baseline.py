"""A plain dense transformer with nano's active size, trained on the same rows with the same optimiser: the comparison.

    python -m deepinfer.train.dense_baseline --data DATA --out OUT --tokens 300000000

RMSNorm, RoPE, full causal attention, SwiGLU, untied head; BF16 weights over FP32 masters. It is scored, not shipped.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.models.layers.rope import apply_rope, rope_table
from deepinfer.models.reference import Weights
from deepinfer.train.batches import Batches, load_rows
from deepinfer.train.evaluate import held_out_scores, load_held_out
from deepinfer.train.fast_model import norm, token_losses
from deepinfer.train.fast_ops import lookup
from deepinfer.train.optimizer import Optimizer, Rates
from deepinfer.train.parameters import Kind, Parameters
from deepinfer.train.pretrain import Run, Schedule, StepResult, train


@dataclass(frozen=True)
class DenseConfig:
    """18.4M parameters besides the embedding: what one token of nano uses."""

    vocab_size: int = 8192
    hidden_size: int = 384
    num_layers: int = 9
    num_heads: int = 6
    intermediate_size: int = 960


def dense_kinds(config: DenseConfig) -> list[Kind]:
    """The stacks of the baseline, with the rules and starts of `parameters`."""
    dim, inter, layers = config.hidden_size, config.intermediate_size, config.num_layers

    def stack(name: str, shape: tuple[int, ...], rule: str, gain: float | None) -> Kind:
        return Kind(name, tuple(f"layers.{i}.{name}" for i in range(layers)), shape, "bf16", rule, gain)

    return [
        Kind("embed", ("embed",), (config.vocab_size, dim), "bf16", "embed", dim**0.5),  # gain / sqrt(columns) = 1
        Kind("head", ("head",), (config.vocab_size, dim), "bf16", "head", 0.1),
        Kind("norm", ("norm",), (dim,), "bf16", "vector", None),
        stack("attn_norm", (dim,), "vector", None),
        stack("ffn_norm", (dim,), "vector", None),
        stack("wq", (dim, dim), "matrix", 0.5),
        stack("wk", (dim, dim), "matrix", 0.5),
        stack("wv", (dim, dim), "matrix", 0.5),
        stack("wo", (dim, dim), "matrix", 0.1),
        stack("w1", (inter, dim), "matrix", 0.5),
        stack("w3", (inter, dim), "matrix", 0.5),
        stack("w2", (dim, inter), "matrix", 0.1),
    ]


def dense_masters(config: DenseConfig, seed: int = 0) -> dict[str, Tensor]:
    """FP32 stacks by kind name, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    masters = {}
    for kind in dense_kinds(config):
        shape = (len(kind.names), *kind.shape)
        noise = torch.randn(shape, generator=generator)
        masters[kind.name] = torch.ones(shape) if kind.gain is None else noise * kind.gain * kind.shape[-1] ** -0.5
    return masters


def dense_block(x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """One pre-norm block. x [B, T, D], cos and sin [T, 1, d / 2]."""
    y = norm(x, w["attn_norm"], 1e-6)
    q, k, v = (F.linear(y, w[name]).unflatten(-1, (heads, -1)) for name in ("wq", "wk", "wv"))
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(o.transpose(1, 2).flatten(-2), w["wo"])
    y = norm(x, w["ffn_norm"], 1e-6)
    return x + F.linear(F.silu(F.linear(y, w["w1"])) * F.linear(y, w["w3"]), w["w2"])


class DenseModel:
    """Hidden states and losses, as `FastModel` has them."""

    def __init__(self, config: DenseConfig, length: int, device: str, compiled: bool) -> None:
        self.config = config
        dim = config.hidden_size // config.num_heads
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        self.cos, self.sin = rope_table(frequencies, length).to(device, torch.float32).unsqueeze(2).unbind(1)
        block = partial(dense_block, heads=config.num_heads)
        self._block = torch.compile(block, dynamic=False) if compiled else block
        self._losses = torch.compile(token_losses, dynamic=False) if compiled else token_losses
        self._names = ["attn_norm", "ffn_norm", "wq", "wk", "wv", "wo", "w1", "w3", "w2"]

    def losses(self, w: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy per token [B, T]."""
        x = lookup(w["embed"], inputs)
        for layer in range(self.config.num_layers):
            x = self._block(x, {name: w[f"layers.{layer}.{name}"] for name in self._names}, self.cos, self.sin)
        y = norm(x, w["norm"], 1e-6).flatten(0, 1)
        return self._losses(y, w["head"], targets.flatten())[0].view_as(targets)


def dense_gradient_step(
    model: DenseModel, parameters: Parameters, inputs: Tensor, targets: Tensor, counted: Tensor, dense: bool
) -> StepResult:
    """As `pretrain.gradient_step`; `dense` is the phase of nano's schedule and means nothing here."""
    ce = model.losses(parameters.compute_weights(), inputs, targets)
    loss = (ce * counted).sum() / counted.sum()
    loss.backward()
    return StepResult(parameters.gradients(), {}, {"loss": loss.detach()})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders with train-N.npy, heldout.npz")
    parser.add_argument("--out", type=Path, required=True, help="dense_baseline.json is written here")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after this long; the record says so")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)

    on_gpu = options.device != "cpu"
    torch.set_float32_matmul_precision("high")
    config, schedule, rates = DenseConfig(), Schedule(dense=0.0), Rates()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    parameters = Parameters(dense_kinds(config), dense_masters(config), options.device, dtype)
    model = DenseModel(config, options.length, options.device, compiled=on_gpu)
    batches = Batches(load_rows(options.data).to(options.device), options.batch, 0)
    run, started = Run(), time.perf_counter()

    def progress(run: Run) -> float:
        return max(run.tokens / options.tokens, (time.perf_counter() - started) / (60 * options.minutes))

    compute = partial(dense_gradient_step, model, parameters)
    train(compute, Optimizer(parameters, rates), batches, run, schedule, progress_of=progress, stop=lambda run: False)
    weights = parameters.compute_weights()
    held_out = load_held_out(options.data, options.length)
    scores = held_out_scores(partial(model.losses, weights), held_out, options.batch, options.device)
    size = sum(master.numel() for name, master in parameters.masters.items() if name != "embed")
    record = {"config": asdict(config), "active_parameters": size, "held_out": scores, **asdict(run)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "dense_baseline.json").write_text(json.dumps(record) + "\n")
    print(json.dumps({"tokens": run.tokens, "seconds": run.seconds, "held_out": scores}))


if __name__ == "__main__":
    main()

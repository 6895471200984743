"""Master weights of a training run: FP32, one stack per kind of tensor, rounded to the stored format for every step.

A stack holds the same tensor of all layers that have it ("layers.*.attn.wq_a.weight" [10, 192, 384]), so that the
optimiser and the rounding run once per kind. `compute_weights` gives what a reader of the checkpoint would see: the
rounded values are the leaves of autograd, their gradients are used as the masters' own (a straight-through estimator).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.models.checkpoint_format import Storage, parameter_specs
from deepinfer.models.reference import Weights
from deepinfer.train.fast_quant import fp8_blocks, fp8_rows, mxfp4_rows

ROUNDING: dict[Storage, Callable[[Tensor], Tensor]] = {
    "fp8": fp8_blocks,
    "fp4": mxfp4_rows,
    "fp8_rows": fp8_rows,
    "bf16": lambda x: x.to(torch.bfloat16),
    "f32": lambda x: x,
}

# First match wins: which rule moves a tensor, and its starting deviation times sqrt(columns) (None: a constant).
_RULES: tuple[tuple[str, str, float | None], ...] = (
    (r"gate\.bias$", "balance", None),  # moved by the load balancer alone
    (r"^embed\.", "embed", None),
    (r"^head\.", "head", 0.1),
    (r"engram\.embed\.", "table", None),
    (r"ffn\.gate\.weight|hc_\w+_fn$", "router", 0.5),
    (r"weights_proj", "router", 1.0),
    (r"norm\.weight$|attn_sink|hc_\w+_(base|scale)$|engram\.[qk]_weight", "vector", None),
    (r"wo_b|w2\.weight|wgate|engram\.wkv", "matrix", 0.1),  # sub-layers start close to writing nothing
    (r"", "matrix", 0.5),
)
_START_STD = {"embed": 1.0, "table": 0.3}


@dataclass(frozen=True)
class Kind:
    """One stack: the public names it holds, the shape of one tensor, its storage and its rule of `_RULES`."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    storage: Storage
    rule: str
    gain: float | None


def parameter_kinds(config: ModelConfig) -> list[Kind]:
    """The text model's tensors by kind; `gate.bias_vl` (a copy of `gate.bias`), draft head and vision are left out."""
    stacks: dict[str, list[str]] = {}
    specs = parameter_specs(config)
    for name in specs:
        if name.startswith(("mtp.", "vision.", "aligner.", "image_")) or name.endswith("bias_vl"):
            continue
        table = "engram.embed" in name  # every table has its own number of rows
        stacks.setdefault(name if table else re.sub(r"^layers\.\d+", "layers.*", name), []).append(name)
    kinds = []
    for kind, names in stacks.items():
        rule, gain = next((rule, gain) for pattern, rule, gain in _RULES if re.search(pattern, kind))
        spec = specs[names[0]]
        kinds.append(Kind(kind, tuple(names), spec.shape, spec.storage, rule, gain))
    return kinds


def residual_base(sub_layer: int, hc: int) -> Tensor:
    """hc_*_base that starts near an ordinary residual net: read mostly one stream, write all, carry each stream on."""
    pre, post = torch.full((hc,), -1.5), torch.zeros(hc)
    pre[(sub_layer + 1) % hc] = 1.5  # `pre` is used by the next sub-layer
    post[sub_layer % hc] = 0.5
    return torch.cat((pre, post, (4.0 * torch.eye(hc)).flatten()))


def initial_masters(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """FP32 stacks by kind name, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    masters = {}
    for kind in parameter_kinds(config):
        shape = (len(kind.names), *kind.shape)
        std = _START_STD.get(kind.rule) if kind.gain is None else kind.gain * kind.shape[-1] ** -0.5
        if std is not None:
            masters[kind.name] = torch.randn(shape, generator=generator) * std
        elif kind.name.endswith(("attn_sink", "bias")):
            masters[kind.name] = torch.zeros(shape)
        elif kind.name.endswith("_base"):
            part = int("ffn" in kind.name)
            rows = [residual_base(2 * plan.layer_id + part, config.hc_mult) for plan in config.layers]
            masters[kind.name] = torch.stack(rows)
        else:
            masters[kind.name] = torch.full(shape, 0.1 if kind.name.endswith("_scale") else 1.0)
    return masters


def masters_from_weights(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Start from a loaded checkpoint: the stored values become the masters."""
    return {kind.name: torch.stack([weights[name].float() for name in kind.names]) for kind in parameter_kinds(config)}


def stored_values(config: ModelConfig, masters: dict[str, Tensor]) -> Weights:
    """What a reader of the exported checkpoint sees, float32 by public name (`gate.bias_vl` copies `gate.bias`)."""
    weights: Weights = {}
    for kind in parameter_kinds(config):
        rounded = ROUNDING[kind.storage](masters[kind.name]).float()
        weights.update(zip(kind.names, rounded.unbind(0), strict=True))
    return with_image_biases(weights)


def with_image_biases(weights: Weights) -> Weights:
    """`weights` plus gate.bias_vl: a text model routes image tokens as it routes text."""
    copies = {f"{name}_vl": value.clone() for name, value in weights.items() if name.endswith("gate.bias")}
    return {**weights, **copies}


class Parameters:
    """Masters on a device and the rounded leaves of the current step."""

    def __init__(
        self,
        kinds: list[Kind],
        masters: dict[str, Tensor],
        device: str,
        dtype: torch.dtype,
        compiled: bool = False,
    ) -> None:
        self.kinds, self.dtype = kinds, dtype
        self.masters = {name: tensor.to(device, torch.float32).contiguous() for name, tensor in masters.items()}
        self.leaves: dict[str, Tensor] = {}
        self._rounding = {
            storage: torch.compile(f, dynamic=False) if compiled and storage == "fp4" else f  # the rest is small
            for storage, f in ROUNDING.items()
        }

    @torch.no_grad()
    def compute_weights(self) -> Weights:
        """Round the masters; the result's tensors are views of fresh autograd leaves."""
        weights: Weights = {}
        for kind in self.kinds:
            value = self._rounding[kind.storage](self.masters[kind.name])
            leaf = value.to(torch.float32 if kind.storage == "f32" else self.dtype).detach()
            self.leaves[kind.name] = leaf.requires_grad_(kind.rule != "balance")
            with torch.enable_grad():
                weights.update(zip(kind.names, leaf.unbind(0), strict=True))
        return weights

    def gradients(self) -> dict[str, Tensor]:
        """Gradient of each stack that has one."""
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """(all parameters, parameters that one token uses): k of E experts, the looked-up rows of tables and embedding."""
    total = active = 0
    for kind in parameter_kinds(config):
        size = len(kind.names) * torch.Size(kind.shape).numel()
        total += size
        if ".experts." in kind.name:
            size = size * config.num_experts_per_tok // config.n_routed_experts
        elif kind.rule == "table":
            size = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
        elif kind.rule == "embed":
            size = config.hidden_size
        active += size
    return total, active

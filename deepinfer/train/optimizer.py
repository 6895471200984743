"""Muon for matrices, AdamW for everything else, over the stacks of `parameters.Parameters`.

Muon (Jordan et al., 2024) moves a matrix by its momentum with all singular values set near one (Newton-Schulz); the
update is scaled by 0.2 sqrt(max(rows, columns)) as in Moonlight: its size matches AdamW's and one rate fits all shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.train.parameters import Parameters

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates by rule (see `parameters`), decay and clipping."""

    matrix: float = 2.5e-3
    embed: float = 2e-2
    head: float = 3e-3
    table: float = 1e-2
    router: float = 5e-4
    vector: float = 3e-3
    balance: float = 1e-3  # step of the expert biases
    weight_decay: float = 0.1  # matrices only, times their rate
    momentum: float = 0.95
    clip: float = 1.0


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Matrices [N, R, C] with singular values moved near 1, by Newton-Schulz in BF16 (FP32 on the CPU)."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.transpose(-2, -1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)
    for _ in range(steps):
        s = x @ x.transpose(-2, -1)
        x = a * x + (b * s + c * (s @ s)) @ x
    return x if wide else x.transpose(-2, -1)


class Optimizer:
    """One step for all stacks; `factor` scales every peak rate (the schedule)."""

    def __init__(self, parameters: Parameters, rates: Rates) -> None:
        self.parameters, self.rates = parameters, rates
        masters = parameters.masters
        self.momentum = {k.name: torch.zeros_like(masters[k.name]) for k in parameters.kinds if k.rule == "matrix"}
        groups: list[dict[str, Any]] = []
        for rule in ("embed", "head", "table", "router", "vector"):
            tensors = [masters[k.name] for k in parameters.kinds if k.rule == rule]
            if tensors:
                groups.append({"params": tensors, "peak": getattr(rates, rule)})
        on_gpu = next(iter(masters.values())).is_cuda
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=on_gpu)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], factor: float) -> Tensor:
        """Move the masters by `gradients` (by kind); returns the gradient norm before clipping."""
        rates = self.rates
        norm = torch.stack(torch._foreach_norm([g.float() for g in gradients.values()])).norm()
        shrink = (rates.clip / (norm + 1e-6)).clamp(max=1.0)
        for name, gradient in gradients.items():
            if name not in self.momentum:
                self.parameters.masters[name].grad = gradient.float() * shrink
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for name, momentum in self.momentum.items():
            gradient = gradients[name].float() * shrink
            momentum.lerp_(gradient, 1 - rates.momentum)
            update = torch.lerp(gradient, momentum, rates.momentum)  # Nesterov
            shape = update.shape
            update = orthogonalize(update.reshape(-1, *shape[-2:])).reshape(shape)
            master, rate = self.parameters.masters[name], rates.matrix * factor
            master.mul_(1 - rate * rates.weight_decay)
            master.add_(update.to(master.dtype), alpha=-rate * 0.2 * max(shape[-2:]) ** 0.5)
        return norm

    @torch.no_grad()
    def balance(self, counts: dict[int, Tensor], factor: float) -> None:
        """Raise the bias of experts with less than the mean load, lower the others (auxiliary-loss-free balancing)."""
        load = torch.stack([counts[layer] for layer in sorted(counts)]).float()
        bias = self.parameters.masters["layers.*.ffn.gate.bias"]
        bias.add_(torch.sign(load.mean(-1, keepdim=True) - load), alpha=self.rates.balance * factor)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes to go on."""
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the optimiser of `state_dict` was."""
        for name, value in state["momentum"].items():
            self.momentum[name].copy_(value)
        self.adam.load_state_dict(state["adam"])

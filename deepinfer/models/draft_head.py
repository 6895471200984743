"""The DSpark draft head: a block of tokens a round from the target's hidden states (spec: model, section 8).

`store` turns the taps of a target step (the mean of the residual streams in front of a few layers) into context rows,
one window ring a stage. `draft` runs all stages once over the block [token just sampled, noise, noise, ...], without a
causal mask inside it; then a low-rank Markov term chains the drafted tokens, and a linear head says how likely each is
to be accepted. Shapes follow from the number of sequences alone and nothing waits for the device, so both can be
captured in a CUDA graph. `models/reference_draft.py` is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerMode, LayerPlan
from deepinfer.kernels import ops
from deepinfer.models.caches import Caches
from deepinfer.models.draft_calibration import DraftCalibration
from deepinfer.models.layers.block import build_layer
from deepinfer.models.layers.draft_attention import BlockPlan, draft_attention, store_context
from deepinfer.models.layers.hyper_connection import HCLazyPostData, hc_enter
from deepinfer.models.layers.linear import Int8Weight, StoredFp8, quantized_linear, wide_linear, widened
from deepinfer.models.layers.step import Rotation
from deepinfer.models.loader import StoredTensor

DRAFT_PLAN = LayerPlan(-1, LayerMode.SWA, 0, -1, -1, False, False, False)


@dataclass(frozen=True)
class Taps:
    """What a target step leaves for the draft head: M rows, those of one sequence contiguous and ascending."""

    hidden: Tensor  # [M, len(dspark_target_layer_ids) * D]
    positions: Tensor  # int64 [M]
    state_slots: Tensor  # int32 [M]


@dataclass(frozen=True)
class DraftSampling:
    """How to draw drafts: arguments of `ops.draw_tokens`, one entry a sequence. Draft i uses counters + i."""

    temperature: Tensor  # float64 [S]
    num_candidates: Tensor  # int64 [S]
    most_candidates: int
    top_p: Tensor  # float64 [S]
    min_p: Tensor  # float64 [S]
    seeds: Tensor  # int64 [S]
    counters: Tensor  # int64 [S]


@dataclass(frozen=True)
class Draft:
    """B drafts of each of S sequences. Draft i follows the token that was given by i + 1 positions."""

    tokens: Tensor  # int64 [S, B]
    confidences: Tensor  # float32 [S, B], probability that a draft is accepted if all before it are
    logits: Tensor | None  # float32 [S, B, V] that the drafts were drawn from; None: all are argmaxes


class DraftHead:
    """The stages `mtp.*`. Embedding and output head are the target's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        embed: Tensor,
        head: Tensor,
        frequencies: Tensor,
        quantize_activations: bool = False,
        stored_experts: dict[str, StoredTensor] | None = None,
    ) -> None:
        """Take the mtp.* tensors out of `weights` (and their experts out of `stored_experts`).

        Args:
            embed, head: the target's, [V, D]; embed's dtype is that of the computation.
            frequencies: float64 [pairs], plain RoPE.

        Raises:
            ValueError: the config has no draft layers.
        """
        stages = config.num_nextn_predict_layers
        if not stages:
            raise ValueError("config: num_nextn_predict_layers is 0, a draft head needs at least 1")
        self.config = replace(
            config,
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        self.block_size = config.dspark_block_size
        self.quantize_activations = quantize_activations
        self.embed, self.frequencies = embed, frequencies
        self.head: Tensor | Int8Weight = head
        self.dtype, self.device = embed.dtype, embed.device
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.main_proj: Tensor | StoredFp8 = weights.pop("mtp.0.main_proj.weight")
        self.main_norm = weights.pop("mtp.0.main_norm.weight")
        last = f"mtp.{stages - 1}"
        self.norm = weights.pop(f"{last}.norm.weight")
        self.markov_embed = weights.pop(f"{last}.markov_head.embed.weight")
        self.markov_head: Tensor | Int8Weight = widened(weights.pop(f"{last}.markov_head.head.weight"))
        self.confidence = weights.pop(f"{last}.confidence_head.proj.weight")[0].to(self.wide)
        # Context rows need this part alone of a weight that build_layer fuses.
        self.context_wkv: list[Tensor | StoredFp8] = [
            weights[f"mtp.{stage}.attn.wkv.weight"] for stage in range(stages)
        ]
        self.layers = [
            build_layer(weights, DRAFT_PLAN, config, None, stored_experts, name=f"mtp.{stage}")
            for stage in range(stages)
        ]
        self.temperatures = torch.ones(self.block_size, dtype=torch.float32, device=self.device)
        self.draft_temperature = 1.0

    def calibrate(self, calibration: DraftCalibration) -> None:
        """Take over what was fitted for this head."""
        self.temperatures.copy_(torch.tensor(calibration.temperatures))
        self.draft_temperature = calibration.draft_temperature

    def keep_fp8_bytes(self) -> None:
        """Read the weights of `store` as checkpoints have them, where they are exactly that."""
        if isinstance(self.main_proj, Tensor):
            self.main_proj = StoredFp8.of(self.main_proj)
        self.context_wkv = [StoredFp8.of(wkv) if isinstance(wkv, Tensor) else wkv for wkv in self.context_wkv]

    def use_int8_logits(self) -> None:
        """Round what makes logits to INT8, in copies of the head's own: the target's output head stays as it is."""
        self.head, self.markov_head = (
            Int8Weight.of(weight) if isinstance(weight, Tensor) else weight for weight in (self.head, self.markov_head)
        )

    def store(self, taps: Taps, caches: Caches) -> None:
        """Write the context rows of a target step, rejected drafts and padding included (see draft_attention.py)."""
        if not len(taps.positions):
            return
        rings, qa = caches.state.draft_rings, self.quantize_activations
        ring_size = caches.state.ring_size
        states = taps.state_slots.long()
        slots = states * ring_size + taps.positions % ring_size
        if len(states) > ring_size:  # a later row of the same sequence takes the same place: this one goes nowhere
            replaced = states[:-ring_size] == states[ring_size:]
            slots = slots.masked_fill(F.pad(replaced, (0, ring_size)), 0)
        main_x = quantized_linear(taps.hidden, self.main_proj, qa)
        main_x = ops.rms_norm(main_x, self.main_norm, self.config.rms_norm_eps)
        rotation = Rotation.at(taps.positions, self.frequencies, self.wide)
        for layer, wkv, ring in zip(self.layers, self.context_wkv, rings, strict=True):
            store_context(layer.attention, wkv, main_x, self.config, ring, slots, rotation, qa)

    @torch.inference_mode()
    def draft(
        self,
        last_positions: Tensor,
        tokens: Tensor,
        state_slots: Tensor,
        caches: Caches,
        sampling: DraftSampling | None = None,
    ) -> Draft:
        """Drafts behind `tokens` int64 [S], which were just sampled and come at last_positions + 1.

        last_positions int64 [S]: the last position of each sequence that `store` has seen; state_slots int32 [S].
        sampling None: every draft is the most likely token.
        """
        base, u = self._base(last_positions, tokens, state_slots, caches)
        drafts, logits = self._chain(base, tokens, sampling)
        before = torch.cat((tokens.unsqueeze(1), drafts[:, :-1]), dim=1)
        features = torch.cat((u, F.embedding(before, self.markov_embed)), dim=-1).to(self.wide)
        scores = (features * self.confidence).sum(-1).float()
        return Draft(drafts, torch.sigmoid(scores / self.temperatures), logits)

    def _chain(self, base: Tensor, tokens: Tensor, sampling: DraftSampling | None) -> tuple[Tensor, Tensor | None]:
        """Drafts int64 [S, B] behind `tokens`, one after the other, and the logits that they were drawn from."""
        if sampling is None and isinstance(self.markov_head, Int8Weight):
            weight = self.markov_head
            return ops.chain_drafts(base, self.markov_embed, weight.values, weight.scales, tokens), None
        drafts, logits = [], []
        for i in range(self.block_size):
            row = (base[:, i] + wide_linear(F.embedding(tokens, self.markov_embed), self.markov_head)).float()
            if sampling is None:  # the draft temperature makes no difference
                tokens = row.argmax(-1)
            else:
                row /= self.draft_temperature
                tokens = self._draw(row, sampling, i)
            drafts.append(tokens)
            logits.append(row)
        return torch.stack(drafts, dim=1), None if sampling is None else torch.stack(logits, dim=1)

    def _base(
        self, last_positions: Tensor, tokens: Tensor, state_slots: Tensor, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """Logits without the Markov term, at least float32 [S, B, V], and what they were made of, [S, B, D]."""
        config, size = self.config, self.block_size
        ring_size = caches.state.ring_size
        plan = BlockPlan.of(
            last_positions, state_slots, size, config.sliding_window, ring_size, self.frequencies, self.wide
        )
        block = tokens.unsqueeze(1).expand(-1, size).clone()
        block[:, 1:] = config.dspark_noise_token_id
        h = F.embedding(block.flatten(), self.embed)
        lazy = HCLazyPostData(h.unsqueeze(1).expand(-1, config.hc_mult, -1).contiguous())
        p_prev = torch.zeros(len(h), config.hc_mult, dtype=self.wide, device=self.device)
        p_prev[:, 0] = 1.0
        for layer, ring in zip(self.layers, caches.state.draft_rings, strict=True):
            x, pre, lazy = hc_enter(lazy, p_prev, layer.attention_hc, config)
            y = draft_attention(layer.attention, x, config, ring, plan, self.quantize_activations)
            x, p_prev, lazy = hc_enter(lazy.with_output(y), pre, layer.ffn_hc, config)
            lazy = lazy.with_output(layer.ffn.forward(x, None, config, self.quantize_activations))
        mixed = (p_prev.unsqueeze(-1) * lazy.materialize().to(self.wide)).sum(1).to(self.dtype)
        base = wide_linear(ops.rms_norm(mixed, self.norm, config.rms_norm_eps), self.head)
        return base.unflatten(0, (-1, size)), mixed.unflatten(0, (-1, size))

    def _draw(self, logits: Tensor, sampling: DraftSampling, index: int) -> Tensor:
        s = sampling
        counters = s.counters + index
        filters = s.temperature, s.num_candidates, s.most_candidates, s.top_p, s.min_p
        return ops.draw_tokens(logits, *filters, s.seeds, counters)[0]

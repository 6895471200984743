"""The layers of a model in the formats of the Hopper kernels: FP8 and FP4 linears keep eight and four bits a weight.

Those kernels round the activations to FP8, as the released model does (spec: model, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm.available import compile_kernels
from deepinfer.kernels.deep_gemm.fp4_weights import arrange
from deepinfer.kernels.deep_gemm.fp8_few_rows import workspace
from deepinfer.kernels.deep_gemm.linear import Fp8Weight
from deepinfer.models.layers.block import Layer
from deepinfer.models.layers.linear import StoredFp8
from deepinfer.models.layers.moe import ArrangedExperts, StoredExperts


def use_fp8_kernels(layers: list[Layer]) -> None:
    """Convert `layers` in place, one at a time: weights of FP8 linears to `Fp8Weight`, stored experts to tiles."""
    if ops.multiplies_fp8(torch.bfloat16, layers[0].ffn.gate.device):
        compile_kernels()
        workspace(layers[0].ffn.gate.device)
    for index, layer in enumerate(layers):
        layers[index] = _converted(layer)


def keep_fp8_bytes(layers: list[Layer]) -> None:
    """Convert `layers` in place to read the weights of FP8 linears as they are stored (`StoredFp8`)."""
    for index, layer in enumerate(layers):
        layer, wo_a = with_linears(layer, StoredFp8.of), layer.attention.wo_a
        stored = StoredFp8.of(wo_a.flatten(0, 1)) if isinstance(wo_a, Tensor) else wo_a
        if isinstance(stored, StoredFp8):
            layer = replace(layer, attention=replace(layer.attention, wo_a=stored))
        layers[index] = layer


def _converted(layer: Layer) -> Layer:
    layer, experts = with_linears(layer, _fp8), layer.ffn.experts
    if isinstance(experts, StoredExperts) and not experts.w2.shape[1] % 8:
        experts = ArrangedExperts(arrange(experts.w13, experts.w13_scale, True), arrange(experts.w2, experts.w2_scale))
    return replace(layer, ffn=replace(layer.ffn, experts=experts))


def with_linears(layer: Layer, form: Callable[[Any], Any]) -> Layer:
    """The layer with `form` of the weight of each of its FP8 linears."""
    attention, ffn, engram = layer.attention, layer.ffn, layer.engram
    if attention.indexer is not None:
        attention = replace(attention, indexer=replace(attention.indexer, wq_b=form(attention.indexer.wq_b)))
    wq_a_wkv, wq_b, wo_b = map(form, (attention.wq_a_wkv, attention.wq_b, attention.wo_b))
    return replace(
        layer,
        engram=None if engram is None else replace(engram, wkv=form(engram.wkv)),
        attention=replace(attention, wq_a_wkv=wq_a_wkv, wq_b=wq_b, wo_b=wo_b),
        ffn=replace(ffn, shared_w13=form(ffn.shared_w13), shared_w2=form(ffn.shared_w2)),
    )


def _fp8(weight: Tensor | Fp8Weight) -> Tensor | Fp8Weight:
    """The kernel's form of a weight, where it takes its shape."""
    if isinstance(weight, Fp8Weight) or weight.shape[0] % 8 or weight.shape[1] % 32:
        return weight
    return Fp8Weight.of(weight)

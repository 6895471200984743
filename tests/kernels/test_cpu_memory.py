"""The C kernels and memory: any alignment, and weights that stay as small as they are stored."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer.checkpoints
from deepinfer.kernels.cpu import cpu_backend_status
from deepinfer.kernels.registry import FORCE_REFERENCE, OPERATIONS
from deepinfer.models.registry import load_model
from tests.kernels.cases import CASES
from tests.kernels.test_ops_backends import compare, compare_exactly, copied

pytestmark = pytest.mark.skipif(FORCE_REFERENCE or not cpu_backend_status().active, reason="no C kernels here")
NAMES = sorted(name for name, op in OPERATIONS.items() if "cpu" in op.backends)
NANO = Path(deepinfer.checkpoints.__path__[0]) / "nano"


def shifted(argument: Any) -> Any:
    """A contiguous tensor at an address that is no multiple of anything but its element's size."""
    if not isinstance(argument, Tensor) or not argument.is_contiguous() or argument.numel() == 0:
        return copied(argument)
    base = torch.zeros(argument.numel() + 1, dtype=argument.dtype)
    return base[1:].view(argument.shape).copy_(argument)


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_alignment(name: str):
    for case in CASES[name](torch.Generator().manual_seed(2)):
        usual, moved = [copied(a) for a in case], [shifted(a) for a in case]
        one, other = (OPERATIONS[name].backends["cpu"](*arguments) for arguments in (usual, moved))
        if one is NotImplemented:
            assert other is NotImplemented
        else:
            compare(name, other, one)
        for a, b in zip(usual, moved, strict=True):  # what was written in place
            if isinstance(a, Tensor):
                compare_exactly(b, a)


def tensors_of(part: Any) -> dict[int, int]:
    """Bytes of every storage below `part`, by address."""
    if isinstance(part, Tensor):
        return {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()}
    if is_dataclass(part) and not isinstance(part, type):
        inner = [getattr(part, field.name) for field in fields(part)]
    elif isinstance(part, (list, tuple)):
        inner = list(part)
    elif isinstance(part, dict):
        inner = list(part.values())
    elif type(part).__module__.startswith("deepinfer.models"):
        inner = list(vars(part).values())
    else:
        return {}
    return {address: size for one in inner for address, size in tensors_of(one).items()}


def test_a_model_takes_little_more_than_its_checkpoint():
    """Experts stay in FP4, linears in FP8, the head in BF16; the embedding is float32."""
    model = load_model(NANO, torch.float32, "cpu", None, True)
    stored = sum(path.stat().st_size for path in NANO.glob("*.safetensors"))
    assert sum(tensors_of(model).values()) < 1.2 * stored
    experts = model.layers[0].ffn.experts
    assert experts.w13.dtype is experts.w2.dtype is torch.uint8

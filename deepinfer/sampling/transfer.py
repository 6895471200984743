"""Small copies between host and device that never make the host wait, except in `Download.read`.

A copy from pageable memory waits for the device; these go through pinned memory, which PyTorch keeps for reuse and
hands out again only when the copies out of it are done.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device. On a CPU it shares memory with the array."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host, in stream order after whatever makes them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event = None
        self._tensors = tensors
        if any(t.is_cuda for t in tensors):
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for copy, tensor in zip(self._tensors, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Tensor]:
        """The tensors on the CPU; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors

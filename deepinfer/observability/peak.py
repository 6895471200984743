"""Peak FLOP/s of a device, the denominator of MFU: dense BF16 matrix arithmetic, from the makers' data sheets."""

from __future__ import annotations

import time

from deepinfer import envs

# Part of the device's name -> FLOP/s; the first match counts, so longer names come first.
PEAK_FLOPS = (
    ("GB300", 2.5e15),
    ("GB200", 2.5e15),
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("RTX 5090", 209e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


def peak_flops(device: str, device_name: str = "") -> float | None:
    """FLOP/s of a torch device; None if it is not in the table. DEEPINFER_PEAK_FLOPS overrides.

    Args:
        device: "cuda", "cpu", ...; a CPU is measured, which takes some 0.02 s.
        device_name: e.g. "NVIDIA H200".
    """
    given = envs.get("DEEPINFER_PEAK_FLOPS")
    if given is not None:
        return given
    if device.split(":")[0] == "cpu":
        return measured_cpu_flops()
    return next((flops for name, flops in PEAK_FLOPS if name in device_name), None)


def measured_cpu_flops(size: int = 512) -> float:
    """FLOP/s of the best of four FP32 products of square matrices, with the threads that PyTorch uses now."""
    import torch

    matrix = torch.ones(size, size)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)

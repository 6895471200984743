"""Whether the caches fit into the machine, asked before they are allocated: afterwards it is too late to say so."""

from __future__ import annotations

from pathlib import Path

from deepinfer.config.engine import DEFAULT_CACHE_BYTES, EngineConfig


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, container limit included; None where it cannot be told."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return min(available, limit - used)
    except (OSError, ValueError):  # no cgroup, or the limit is "max"
        return available


def available_on(device: str) -> int | None:
    """`available_memory`, or the free memory of a GPU."""
    if device == "cpu":
        return available_memory()
    import torch

    return torch.cuda.mem_get_info(torch.device(device))[0]


def default_cache_bytes(config: EngineConfig, slot_bytes: int) -> int:
    """What the cache blocks may take where the configuration does not say; call when the weights are loaded.

    On a GPU: gpu_memory_utilization of its memory, less what is in use and the sequences' slots of `slot_bytes` each.
    Raises ValueError if nothing is left of it.
    """
    if config.device == "cpu":
        return DEFAULT_CACHE_BYTES
    import torch

    torch.cuda.empty_cache()  # what loading left in PyTorch's cache is not in use
    free, total = torch.cuda.mem_get_info(torch.device(config.device))
    left = int(total * config.gpu_memory_utilization) - (total - free) - (config.max_num_seqs + 1) * slot_bytes
    if left <= 0 and config.num_blocks is None and config.cache_memory_bytes is None:
        raise ValueError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization}: {total - free:,} of {total:,} bytes of "
            f"{config.device} are in use and {config.max_num_seqs} sequences take {slot_bytes:,} each, which leaves "
            "nothing for cache blocks"
        )
    return max(left, 0)


def check_caches_fit(config: EngineConfig, num_blocks: int, block_bytes: int, slot_bytes: int) -> None:
    """Raise ValueError unless the device has room for the caches, naming the option that asks for most of it.

    Args:
        num_blocks: blocks, null block included, of `block_bytes` bytes each.
        slot_bytes: what one sequence takes beside its blocks.
    """
    blocks, slots = num_blocks * block_bytes, (config.max_num_seqs + 1) * slot_bytes
    available = available_on(config.device)
    if available is None or blocks + slots <= available:
        return
    if slots > blocks:
        option = "max_num_seqs"
        if config.max_backtracking_tokens is not None:
            option += f" with max_backtracking_tokens {config.max_backtracking_tokens}"
        value = config.max_num_seqs
    elif config.num_blocks is not None:
        option, value = "num_blocks", config.num_blocks
    else:
        option, value = "cache_memory_bytes", blocks
    raise ValueError(
        f"{option} is {value}: the caches need {blocks + slots:,} bytes (blocks {blocks:,}, sequences {slots:,}), "
        f"{config.device} has {available:,} available"
    )

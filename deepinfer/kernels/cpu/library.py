"""The compiled kernels as ctypes functions, built on first use; says why when there are none."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deepinfer.kernels.cpu import build

logger = logging.getLogger(__name__)

_CODES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
# One letter an argument (pointer, int64, int, float); a leading "!" marks functions that return 1 when out of memory,
# "?" those whose result is an int.
SIGNATURES = {
    "apply_token_bitmask": "plplllp",
    "linear": "!plippllllp",
    "widen": "ippllp",
    "rms_norm": "plpfllp",
    "rope": "pppillllp",
    "norm_rope": "plpfpplllp",
    "swiglu": "pfllp",
    "hc_post": "pppplllp",
    "hc_post_pre": "pppppppppllliffppppp",
    "store_rows": "plllipipll",
    "load_rows": "plllipipll",
    "round_trip_rows": "ipllp",
    "sparse_attention": "!plllpllliplpllliplpfp",
    "index_scores": "!pplllpllliplpplp",
    "top_k_positions": "plllp",
    "candidate_blocks": "!ppllllp",
    "mask_to_candidates": "pplllp",
    "engram_hash": "ppppllllp",
    "engram_gate": "ppppflllp",
    "entry_slots": "pllplplp",
    "decode_plan": "ppplllllllllppppp",
    "pool_groups": "plpllplpllppplp",
    "lookup_drafts": "plppllllpp",
    "moe_gate": "!ppllllifpp",
    "moe_experts": "!ppplllllppppfip",
    "multiplies_int8": "?",
    "linear_int8": "!plpplllp",
    "chain_drafts": "!pppppllllp",
}


@dataclass(frozen=True)
class Status:
    """Whether compiled kernels run on this machine; `detail` is the library's path, or why there is none."""

    active: bool
    detail: str


@cache
def _open() -> tuple[ctypes.CDLL | None, Status]:
    reason = ""
    try:
        for index, path in enumerate(build.libraries()):
            try:
                if not path.exists():
                    build.build(index, path)
                return ctypes.CDLL(str(path)), Status(True, str(path))
            except (build.BuildError, OSError) as error:
                reason = reason or str(error)
    except build.BuildError as error:
        reason = str(error)
    logger.warning("CPU kernels run in PyTorch, slower: %s", reason)
    return None, Status(False, reason)


def cpu_backend_status() -> Status:
    """Builds the kernels if they are not cached yet."""
    return _open()[1]


@cache
def functions() -> dict[str, ctypes._CFuncPtr] | None:  # type: ignore[name-defined]
    """Name -> function; None when no library could be built."""
    library = _open()[0]
    if library is None:
        return None
    table = {}
    for name, signature in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_CODES[code] for code in signature.lstrip("!?")]
        function.restype = ctypes.c_int if signature[0] in "!?" else None
        if signature[0] == "!":
            function.errcheck = _check
        table[name] = function
    return table


def _check(failed: int, function: object, arguments: object) -> None:
    if failed:
        raise MemoryError("CPU kernels: out of memory")


def ready(*tensors: Tensor) -> bool:
    """All are contiguous float32: the case that the kernels cover."""
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            return False
    return True

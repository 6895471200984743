"""EngineConfig: sizes and formats of the engine, validated when made."""

import math
import re
from dataclasses import dataclass, field
from functools import partial

from deepinfer import envs
from deepinfer.config.speculative import SpeculativeConfig
from deepinfer.errors import shown

KV_CACHE_DTYPES = ("auto", "fp32", "bf16", "fp8", "fp64")
DTYPES = ("auto", "fp32", "bf16", "fp64")
YOCO_MODES = ("off", "mask", "compact")
ENGINE_KINDS = ("normal", "prefill", "decode", "completion")
PREEMPTION_MODES = ("recompute", "swap")
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
DEFAULT_CACHE_BYTES = 2 << 30
INT32_MAX = 2**31 - 1  # counts of blocks, sequences and tokens are int32 on the device
INT64_MAX = 2**63 - 1
MAX_STEP_MS = 1e9  # far beyond any step; the cost model's arithmetic stays finite


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything about the engine that is not the model.

    Attributes:
        block_size: tokens in one cache block.
        num_blocks: cache blocks, block 0 (the null block) included; None derives it from cache_memory_bytes.
        cache_memory_bytes: memory for the block cache in bytes; None is the smaller of 2 GiB and what
            max_num_seqs sequences of full length can use.
        max_num_seqs: most sequences holding cache at once (= state slots without the null slot).
        max_num_batched_tokens: most tokens in one prefill step; None: 2,048, on a GPU 4,096.
        prefill_chunk_size: most tokens of one sequence in one prefill step; None: 512, on a GPU 2,048, which has too
            little to do with fewer. The indexer's scores take 4 bytes for each of them and each position before.
        max_model_len: most tokens (prompt + output) of a sequence; None takes the model's own limit.
        watermark: share of the blocks kept free when a new sequence is admitted beside running ones,
            so that those can grow before anything is preempted.
        kv_cache_dtype: "fp8" is the released format (FP8 and FP4 with scales); "auto" follows the checkpoint;
            "fp64" is for exactness tests.
        dtype: arithmetic of the model.
        quantize_activations: round activations to FP8 in front of FP8 and FP4 weights, as the released model does;
            off is closer to exact arithmetic. None: on where the kernels multiply in FP8 (Hopper GPUs).
        gpu_memory_utilization: share of a GPU's memory that weights and caches may take together, where neither
            num_blocks nor cache_memory_bytes is given.
        device: "cpu", "cuda" or "cuda:N"; whether the machine has it is checked when the model is loaded, and "auto"
            is replaced: by "cuda" where there is one, else by "cpu".
        seed: where the draws of requests without a seed start; None starts somewhere else in every process.
        yoco_prefill_truncation_mode: "off" runs every prompt token through all layers; "mask" and "compact" run only
            the last yoco_prefill_keep_tokens of a prompt through the decoder layers, and agree with each other: the
            first computes the other rows and hides them, the second drops them.
        yoco_prefill_keep_tokens: at least window + max_backtracking_tokens of the model.
        speculative_config: a SpeculativeConfig or its fields in a dict, e.g. {"method": "ngram"}; None: each step
            decodes one token of a sequence.
        max_backtracking_tokens: tokens of a sequence that speculation may take back, which the sliding-window caches
            keep beside the window; None is what speculation needs, its draft tokens + 1. Whatever is less than what
            the model's own draft head needs is that.
        kind: "normal" runs prompts and answers in turn; "completion" too, with more prefill steps for each decode step
            (throughput before latency); "prefill" runs prompts only and hands sequences over after their first token;
            "decode" goes on with such sequences.
        preemption_mode: what becomes of a sequence when the cache is full: "recompute" drops its cache, "swap" moves it
            to host memory and back (and recomputes if there is no room).
        swap_memory_bytes: host memory for that, pinned if the device is a GPU.
        prefill_step_ms: most time for one prefill step, by a cost model fitted to the steps that ran; None: no limit
            but that of tokens.
        zero_overhead_scheduling: schedule and launch a step before the tokens of the last one are read; None: where the
            device runs beside the host (on a CPU there is nothing to hide, and tokens would come a step later), if
            the kind is "normal" or "completion": the caches of the others are copied by whoever stands between two
            engines, who need not keep to the order of this device's stream.
        cuda_graphs: pad decode steps to a ladder of shapes and capture each as a CUDA graph; None: on a GPU, if its
            kernels can be captured. On a CPU the padded steps run as they are: for tests.
        cudagraph_batch_size_interval: distance between the captured batch sizes above the first powers of two.
        torch_compile: run the decode steps, padded, through torch.compile: minutes of compiling for each shape.

    The last seven default to the environment variables DEEPINFER_<NAME>, kind to DEEPINFER_ENGINE_KIND.

    Raises:
        ValueError: naming the field and the allowed values.
    """

    block_size: int = 128
    num_blocks: int | None = None
    cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    prefill_chunk_size: int | None = None
    max_model_len: int | None = None
    watermark: float = 0.01
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    quantize_activations: bool | None = None
    device: str = "cpu"
    seed: int | None = None
    kind: str = field(default_factory=partial(envs.get, "DEEPINFER_ENGINE_KIND"))
    preemption_mode: str = "recompute"
    swap_memory_bytes: int = 1 << 30
    prefill_step_ms: float | None = None
    yoco_prefill_truncation_mode: str = field(
        default_factory=partial(envs.get, "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE")
    )
    yoco_prefill_keep_tokens: int | None = field(
        default_factory=partial(envs.get, "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS")
    )
    speculative_config: SpeculativeConfig | None = None
    max_backtracking_tokens: int | None = field(default_factory=partial(envs.get, "DEEPINFER_MAX_BACKTRACKING_TOKENS"))
    zero_overhead_scheduling: bool | None = field(
        default_factory=partial(envs.get, "DEEPINFER_ZERO_OVERHEAD_SCHEDULING")
    )
    cuda_graphs: bool | None = field(default_factory=partial(envs.get, "DEEPINFER_CUDA_GRAPHS"))
    cudagraph_batch_size_interval: int = field(
        default_factory=partial(envs.get, "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL")
    )
    torch_compile: bool = field(default_factory=partial(envs.get, "DEEPINFER_TORCH_COMPILE"))

    @property
    def overlaps_steps(self) -> bool:
        """What zero_overhead_scheduling comes to on this device."""
        if self.zero_overhead_scheduling is not None:
            return self.zero_overhead_scheduling
        return self.device != "cpu" and self.kind in ("normal", "completion")

    @property
    def step_tokens(self) -> int:
        """What max_num_batched_tokens comes to on this device."""
        return self.max_num_batched_tokens or (2048 if self.device == "cpu" else 4096)

    @property
    def chunk_tokens(self) -> int:
        """What prefill_chunk_size comes to on this device."""
        return self.prefill_chunk_size or (512 if self.device == "cpu" else 2048)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        minimum = {"block_size": 1, "num_blocks": 2, "cache_memory_bytes": 1, "max_num_seqs": 1,
                   "max_num_batched_tokens": 1, "prefill_chunk_size": 1, "max_model_len": 2, "seed": 0,
                   "yoco_prefill_keep_tokens": 1, "max_backtracking_tokens": 1,
                   "cudagraph_batch_size_interval": 1, "swap_memory_bytes": 1}  # fmt: skip
        optional = ("num_blocks", "cache_memory_bytes", "max_num_batched_tokens", "prefill_chunk_size", "max_model_len",
                    "seed", "yoco_prefill_keep_tokens", "max_backtracking_tokens")  # fmt: skip
        for name, low in minimum.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            high = INT64_MAX if name in ("cache_memory_bytes", "swap_memory_bytes", "seed") else INT32_MAX
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be an integer >= {low} and <= {high}, got {shown(value)}")
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, int | float):
            raise ValueError(f"watermark must be a number in [0, 1), got {shown(self.watermark)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be a number in [0, 1), got {shown(self.watermark)}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be a number in (0, 1], got {shown(share)}")
        step_ms = self.prefill_step_ms
        is_number = isinstance(step_ms, int | float) and not isinstance(step_ms, bool)
        if step_ms is not None and not (is_number and 0 < step_ms <= MAX_STEP_MS):
            allowed = f"a number > 0 and <= {MAX_STEP_MS:g}, or null"
            raise ValueError(f"prefill_step_ms must be {allowed}, got {shown(step_ms)}")
        if self.kind not in ENGINE_KINDS:
            raise ValueError(f"kind must be one of {', '.join(ENGINE_KINDS)}, got {shown(self.kind)}")
        if self.preemption_mode not in PREEMPTION_MODES:
            allowed = ", ".join(PREEMPTION_MODES)
            raise ValueError(f"preemption_mode must be one of {allowed}, got {shown(self.preemption_mode)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            allowed = ", ".join(KV_CACHE_DTYPES)
            raise ValueError(f"kv_cache_dtype must be one of {allowed}, got {shown(self.kv_cache_dtype)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(self.dtype)}")
        if not isinstance(self.device, str) or not DEVICE.fullmatch(self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {shown(self.device)}")
        for name in ("quantize_activations", "zero_overhead_scheduling", "cuda_graphs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name} must be true, false or null, got {shown(value)}")
        if not isinstance(self.torch_compile, bool):
            raise ValueError(f"torch_compile must be true or false, got {shown(self.torch_compile)}")
        if self.yoco_prefill_truncation_mode not in YOCO_MODES:
            allowed = ", ".join(YOCO_MODES)
            got = shown(self.yoco_prefill_truncation_mode)
            raise ValueError(f"yoco_prefill_truncation_mode must be one of {allowed}, got {got}")

    def resolve_num_blocks(
        self, bytes_per_block: int, max_model_len: int, default_bytes: int = DEFAULT_CACHE_BYTES
    ) -> int:
        """Number of blocks, null block included, for a model whose block takes bytes_per_block in all layers.

        `default_bytes` is the memory budget where none is configured.

        Raises ValueError when the memory budget does not hold even one block of tokens.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        wanted = 1 + self.max_num_seqs * math.ceil(max_model_len / self.block_size)
        if bytes_per_block == 0:  # sliding-window layers only: sequences keep all they need in their state slots
            return wanted
        fitting = (self.cache_memory_bytes or default_bytes) // bytes_per_block
        if fitting < 2:
            raise ValueError(f"cache_memory_bytes must hold at least 2 blocks of {bytes_per_block} bytes")
        return min(wanted, fitting)

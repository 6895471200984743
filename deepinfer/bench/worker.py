"""One system of the throughput benchmark in its own process, so that peak memories compare.

Reads JSON lines {"workload": name, "variant": name} and answers {"seconds", "cpu_seconds", "peak_bytes"} each.

    python -m deepinfer.bench.worker deepinfer
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from deepinfer.bench.workloads import COMPRESSED_VOCAB_SIZE, VOCAB_SIZE, Workload, deepinfer_config, workload

Run = Callable[[Workload, str], None]
SUB_BATCH = 8
SHARD_BYTES = 16 << 20


def deepinfer_system() -> Run:
    """The engine with its default settings (continuous batching, FP8 and FP4 caches, FP4 experts)."""
    from deepinfer.config.engine import EngineConfig
    from deepinfer.engine.engine import Engine
    from deepinfer.engine.runner import ModelRunner
    from deepinfer.llm import LLM
    from deepinfer.models.registry import build_deepseek_v41
    from deepinfer.models.writer import write_synthetic
    from deepinfer.params import SamplingParams

    config = deepinfer_config()
    token_map = torch.arange(VOCAB_SIZE) % COMPRESSED_VOCAB_SIZE
    engine_config = EngineConfig()
    with TemporaryDirectory() as folder:
        write_synthetic(folder, config, seed=0, max_shard_bytes=SHARD_BYTES)
        model = build_deepseek_v41(Path(folder), config, token_map, torch.float32, "cpu")
    runner = ModelRunner(model, engine_config)
    llm = LLM.from_engine(Engine(runner, engine_config))

    def run(work: Workload, variant: str) -> None:
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in work.output_lens]
        outputs = llm.generate(work.prompts, params)
        assert [len(o.outputs[0].token_ids) for o in outputs] == work.output_lens

    return run


def transformers_system() -> Run:
    """`generate()`; a variant is "<experts implementation>/<batching>"."""
    from transformers import DeepseekV4ForCausalLM, set_seed
    from transformers.utils import logging

    from deepinfer.bench.workloads import transformers_config

    logging.set_verbosity_error()
    set_seed(0)
    model: Any = DeepseekV4ForCausalLM(transformers_config()).eval()

    def generate(prompts: list[list[int]], output_len: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), model.config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # left-padded
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=output_len, min_new_tokens=output_len, do_sample=False
        )
        assert out.shape[1] == longest + output_len

    @torch.inference_mode()
    def run(work: Workload, variant: str) -> None:
        experts, batching = variant.split("/")
        model.set_experts_implementation(experts)
        size = {"one-batch": len(work.prompts), "sub-batches": SUB_BATCH}[batching]
        order = sorted(range(len(work.prompts)), key=lambda i: work.output_lens[i])
        for start in range(0, len(order), size):
            part = order[start : start + size]
            generate([work.prompts[i] for i in part], max(work.output_lens[i] for i in part))

    return run


SYSTEMS = {"deepinfer": deepinfer_system, "transformers": transformers_system}


def peak_bytes() -> int:
    """Peak resident memory of this process so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; only answers belong on the pipe
    run = SYSTEMS[sys.argv[1]]()
    for line in sys.stdin:
        request = json.loads(line)
        work = workload(request["workload"])
        started, cpu_started = time.perf_counter(), time.process_time()
        run(work, request["variant"])
        answer = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
            "peak_bytes": peak_bytes(),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

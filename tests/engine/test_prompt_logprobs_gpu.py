"""Log-probabilities of prompt tokens on a GPU are those of a CPU."""

from __future__ import annotations

import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.loading import load_engine
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_those_of_the_cpu() -> None:
    """Whole chunks that would have a captured graph among them, and a short prompt beside."""
    prompts = {"long": [5 + i * 7919 % 4000 for i in range(5000)], "short": [5, 9, 700]}
    got: dict[str, dict[str, RequestOutput]] = {}
    for device in ("cpu", "cuda"):
        config = EngineConfig(device=device, dtype="fp32", kv_cache_dtype="fp32", max_model_len=8192, max_num_seqs=2)
        engine = load_engine("nano", config)
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1))
        got[device] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None, output.error
                if output.prompt_logprobs is not None:
                    got[device][output.request_id] = output
    for name, prompt in prompts.items():
        here, there = (got[device][name].prompt_logprobs for device in ("cpu", "cuda"))
        assert here is not None and there is not None and len(here) == len(there) == len(prompt)
        far = [
            abs(a.logprob - b.logprob) > 2e-3 * (1 + abs(a.logprob))
            for a, b in zip(here[1:], there[1:], strict=True)
            if a is not None and b is not None
        ]
        assert len(far) == len(prompt) - 1 and sum(far) <= 0.005 * len(far)  # a tie of experts may go either way

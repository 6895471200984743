"""The engine with Hopper attention against the engine with attention in float32: logits and greedy tokens.

A few layers of V4.1's attention (64 heads of 512, window, both compression ratios, top-k 512), everything else small.
The other runs are fed the tokens of the first, so that all steps can be compared.

Tolerance: the kernel multiplies and adds in FP32 and differs from float32 attention by one rounding of probabilities to
BF16, 0.15% of a result's norm (tests/kernels/test_flash_mla.py). What a model makes of that, in later layers and where
a last bit decides about a cache's code or a selected position, no formula says: a third run measures it, float32
attention with noise of that size on its results. Logits may differ by one and a half times what the noise does (largest
of 96 rows against largest of 96), and by MOST of their norm. Tokens must be the same where the reference is surer than
that; elsewhere noise changes some too, and attention may change as many, within three standard deviations of the
difference of two such counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.bench.synthetic import small_config, synthetic_model
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.kernels import ops
from deepinfer.kernels.flash_mla import attention as flash_mla
from deepinfer.kernels.reference.basic import rope
from deepinfer.models.inputs import ModelInputs
from deepinfer.params import SamplingParams

MOST = {"bf16": 0.06, "fp8": 0.15}
ROUNDING = 2**-8 / (3 * 2.16) ** 0.5  # of a norm, by rounding its values to BF16
PROMPTS = (900, 300, 40, 1500)  # beyond the window, beyond top-k at ratio 1 and 2, and within both
STEPS = 24


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode curves of tests are not those of the machine."""
    monkeypatch.setattr("deepinfer.engine.decode_curve.cache_dir", lambda: tmp_path)


def new_runner(device: str, **options: object) -> ModelRunner:
    config = replace(
        small_config(8, 8),
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_topk=512,
        num_experts_per_tok=8,  # all: a token that changes its expert would tell nothing about attention
        max_position_embeddings=4096,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = synthetic_model(config, dtype, device, quantize_activations=False)
    return ModelRunner(model, EngineConfig(device=device, max_num_seqs=4, max_model_len=2048, **options))  # type: ignore[arg-type]


def float32_attention(noise: float) -> Callable[..., Tensor]:
    """`sparse_attention` in float32 over what the caches hold; noise relative to each value on its result."""
    g = torch.Generator("cuda").manual_seed(0)

    def attention(q: Tensor, *rest: object) -> Tensor:
        result = ops.sparse_attention.reference(q.float(), *rest)
        if noise:
            result *= 1 + noise * torch.randn(result.shape, generator=g, device=result.device)
        return result.to(q.dtype)

    return attention


def float32_rotated(noise: float) -> Callable[..., Tensor]:
    """`rotated_attention` likewise; the rotated query is BF16, as tensor cores read it."""
    attention = float32_attention(noise)

    def rotated(q: Tensor, cos: Tensor, sin: Tensor, *rest: object) -> Tensor:
        turned = rope.reference(q.float(), cos, sin, False).to(q.dtype)
        return rope.reference(attention(turned.float(), *rest), cos, sin, True).to(q.dtype)

    return rotated


def run(runner: ModelRunner, choose: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """Logits of every step of four greedy requests; `choose(step, logits)` gives those that tokens are taken from."""
    logits: list[Tensor] = []
    forward = runner.run

    def run_and_keep(inputs: ModelInputs) -> Tensor:
        logits.append(forward(inputs).clone())
        return choose(len(logits) - 1, logits[-1])

    runner.run = run_and_keep  # type: ignore[method-assign]
    engine = Engine(runner, runner.config)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    g = torch.Generator().manual_seed(0)
    for number, length in enumerate(PROMPTS):
        prompt = torch.randint(3, runner.vocab_size, (length,), generator=g).tolist()
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
    return logits


def compare(result: list[Tensor], expected: list[Tensor], tolerance: float) -> tuple[float, int, int]:
    """Largest relative error of a row's logits, rows with another token, and those of them where the reference's best
    logit is four times the tolerance above its second."""
    assert [len(rows) for rows in result] == [len(rows) for rows in expected]
    ours, theirs = torch.cat(result).double(), torch.cat(expected).double()
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    best = theirs.topk(2).values
    sure = best[:, 0] - best[:, 1] > 4 * tolerance * theirs.square().mean(-1).sqrt()
    other = ours.argmax(-1) != theirs.argmax(-1)
    return error.max().item(), int(other.sum()), int((sure & other).sum())


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "bf16"])
def test_the_engine_gives_the_reference_s_tokens(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    launch = flash_mla.launch

    def counted(*args: object, **options: object) -> None:
        launches.append(1)
        launch(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(flash_mla, "launch", counted)
    options = {"kv_cache_dtype": kv_cache_dtype, "zero_overhead_scheduling": False}
    ours = run(new_runner("cuda", **options), lambda step, logits: logits)
    assert len(launches) >= 4 * 8  # eight layers: of a prefill step, and of the three decode steps that are captured
    launches.clear()
    exact, noisy = (reference_run(noise, ours, options, monkeypatch) for noise in (0.0, ROUNDING))
    assert not launches
    assert sum(map(len, ours)) == len(PROMPTS) * STEPS
    noise, by_noise, _ = compare(noisy, exact, 1.0)
    allowed = min(1.5 * noise, MOST[kv_cache_dtype])
    error, changed, wrong = compare(ours, exact, allowed)
    print(f"{kv_cache_dtype}: {error:.4f} of the logits' norm, noise {noise:.4f}")
    print(f"{changed} of {len(PROMPTS) * STEPS} tokens changed, by noise {by_noise}, of sure ones {wrong}")
    assert error < allowed
    assert wrong == 0
    assert changed <= by_noise + 3 * (2 * max(by_noise, 1)) ** 0.5


def reference_run(
    noise: float, tokens_of: list[Tensor], options: dict, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Logits with attention in float32, of the tokens that another run's logits gave."""
    torch.cuda.empty_cache()
    monkeypatch.setitem(ops.sparse_attention.backends, "cuda", float32_attention(noise))
    monkeypatch.setitem(ops.rotated_attention.backends, "cuda", float32_rotated(noise))
    return run(new_runner("cuda", cuda_graphs=False, **options), lambda step, logits: tokens_of[step])

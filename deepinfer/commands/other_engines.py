"""What to do about an option of vLLM's or SGLang's `serve` that does not exist here."""

from __future__ import annotations

_ONE_DEVICE = "an engine runs on one device so far: start one server per GPU behind a load balancer"
_NO_PREFIX_CACHE = "prompts are computed afresh so far: there is no prefix cache to switch on or off"
_ANSWERS: dict[str, str] = {
    **dict.fromkeys(("--tensor-parallel-size", "--tp", "--tp-size"), _ONE_DEVICE),
    **dict.fromkeys(("--data-parallel-size", "--dp", "--dp-size"), _ONE_DEVICE),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp-size"), _ONE_DEVICE),
    **dict.fromkeys(("--enable-expert-parallel", "--ep-size"), _ONE_DEVICE),
    **dict.fromkeys(
        ("--enable-prefix-caching", "--no-enable-prefix-caching", "--disable-radix-cache"), _NO_PREFIX_CACHE
    ),
    "--block-size": "a block holds as many tokens as the model's kernels are written for",
    "--page-size": "a block holds as many tokens as the model's kernels are written for",
    "--quantization": "the checkpoint's own formats are used; config.json names them",
    "--attention-backend": "kernels are chosen by platform; `deepinfer doctor` shows which",
    "--trust-remote-code": "no code of a checkpoint is ever run, so there is nothing to trust",
    **dict.fromkeys(("--enforce-eager", "--disable-cuda-graph"), "set DEEPINFER_CUDA_GRAPHS=0"),
}


def advice(option: str) -> str | None:
    """What to do instead of `option`, if it is one of another engine's."""
    return _ANSWERS.get(option.partition("=")[0])

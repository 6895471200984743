"""A batch with a seed for each prompt, and log-probabilities: python examples/offline.py"""

from deepinfer import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The lighthouse keeper", "In the garden"]

llm = LLM(model="nano", max_num_seqs=len(PROMPTS))
params = [SamplingParams(temperature=0.7, top_p=0.95, max_tokens=24, seed=seed, logprobs=1) for seed in range(3)]
for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
    completion = output.outputs[0]
    print(f"{prompt} ->{completion.text!r} ({completion.finish_reason})")
    assert completion.logprobs is not None
    mean = sum(item.logprob for item in completion.logprobs) / len(completion.logprobs)
    print(f"  mean log-probability of a token: {mean:.3f}")

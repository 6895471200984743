"""What the sampler needs to know of a sequence."""

from array import array
from typing import Protocol

from deepinfer.params import SamplingParams


class SampledSequence(Protocol):
    """`token_ids` is an int64 array of prompt and output tokens; `seed` is below 2**64."""

    params: SamplingParams
    seed: int
    token_ids: array
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int: ...

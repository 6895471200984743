"""What the sampler needs to know of a sequence."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from deepinfer.params import SamplingParams
from deepinfer.structured.matcher import Matcher


class SampledSequence(Protocol):
    """`token_ids` is an int64 array of prompt and output tokens; `seed` is below 2**64.

    `constraint` is the grammar that its tokens obey. `drafts` are proposed tokens; the rows
    behind this one verify them.
    """

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    constraint: Matcher | None
    drafts: Sequence[int]

    @property
    def token_ids(self) -> array: ...

    @property
    def num_output_tokens(self) -> int: ...

"""SpeculativeConfig: what drafts tokens, and how many; the keys are vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from deepinfer import envs
from deepinfer.errors import shown

METHODS = ("ngram", "dspark")
REJECTION_SAMPLE_METHODS = ("standard",)  # vLLM's "block" and "synthetic" are not here
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
MAX_DRAFTS = 32
DEFAULT_NGRAM_DRAFTS = 5


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: drafts of the next tokens, verified by the model in one step.

    Attributes:
        method: "ngram" looks the next tokens up in the prompt and the output so far (any model); "dspark" is the draft
            head of the checkpoint.
        num_speculative_tokens: most drafts of a sequence in a step; None: 5, or what the draft head makes. A draft head
            always makes its whole block, of which fewer may be verified.
        prompt_lookup_max: most tokens that are matched (ngram).
        prompt_lookup_min: fewest; shorter matches draft nothing (ngram).
        draft_sample_method: "greedy" drafts the most likely tokens, and a draft is accepted if the target draws the
            same: the output is that of no speculation, token for token, at every temperature. "probabilistic" draws
            the drafts like the target and accepts them by rejection sampling: more are accepted at high temperatures,
            and the output has the same distribution, but is another draw (dspark).
        variable_length: verify as many drafts as pay by the decode curve and their chance of being accepted; false:
            always all of them. Default: DEEPINFER_ENABLE_MTP_VARLEN.

    Raises:
        ValueError: naming the field and the allowed values.
    """

    method: str
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    draft_sample_method: str = "greedy"
    variable_length: bool = field(default_factory=partial(envs.get, "DEEPINFER_ENABLE_MTP_VARLEN"))

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"speculative method must be one of {', '.join(METHODS)}, got {shown(self.method)}")
        if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
            allowed = ", ".join(DRAFT_SAMPLE_METHODS)
            raise ValueError(f"draft_sample_method must be one of {allowed}, got {shown(self.draft_sample_method)}")
        if self.method == "ngram" and self.draft_sample_method != "greedy":
            raise ValueError("draft_sample_method must be greedy with method ngram, whose drafts are not drawn")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is None and name == "num_speculative_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DRAFTS:
                raise ValueError(f"{name} must be an integer >= 1 and <= {MAX_DRAFTS}, got {shown(value)}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )
        if not isinstance(self.variable_length, bool):
            raise ValueError(f"variable_length must be true or false, got {shown(self.variable_length)}")

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn, with the probabilities that rejection sampling needs."""
        return self.draft_sample_method == "probabilistic"

    @classmethod
    def of(cls, value: Any) -> SpeculativeConfig | None:
        """From None, a SpeculativeConfig or a mapping of its fields. Raises ValueError naming what is wrong.

        Two more keys of vLLM are taken: `enable_adaptive_verification`, which is `variable_length`, and
        `rejection_sample_method`, which must be "standard".
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"speculative_config must be an object with at least a method, got {shown(value)}")
        value = dict(value)
        known = [each.name for each in fields(cls)] + ["rejection_sample_method", "enable_adaptive_verification"]
        unknown = [str(name) for name in value if name not in known]
        if unknown:
            raise ValueError(
                f"speculative_config: unknown key {', '.join(sorted(unknown))}; known are {', '.join(known)}"
            )
        if "method" not in value:
            raise ValueError(f"speculative_config must name a method: {', '.join(METHODS)}")
        rejection = value.pop("rejection_sample_method", None)
        if rejection not in (None, *REJECTION_SAMPLE_METHODS):
            allowed = ", ".join(REJECTION_SAMPLE_METHODS)
            raise ValueError(
                f"rejection_sample_method must be {allowed}, one draft after the other, got {shown(rejection)}"
            )
        adaptive = value.pop("enable_adaptive_verification", None)
        if adaptive is not None:
            if not isinstance(adaptive, bool):
                raise ValueError(f"enable_adaptive_verification must be true or false, got {shown(adaptive)}")
            if value.setdefault("variable_length", adaptive) != adaptive:
                raise ValueError("enable_adaptive_verification and variable_length are the same and must not differ")
        return cls(**value)

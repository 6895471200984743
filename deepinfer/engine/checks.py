"""What a request must be like; without torch, because a server checks requests for an engine in another process."""

from collections.abc import Iterable, Sequence

from deepinfer.params import SamplingParams


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
) -> None:
    """Raise ValueError naming the field if an engine of these sizes can never run the request."""
    if isinstance(prompt_token_ids, str | bytes) or not isinstance(prompt_token_ids, Sequence):
        raise ValueError(f"prompt_token_ids must be a list of token ids, got {type(prompt_token_ids).__name__}")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    if not prompt_token_ids:
        raise ValueError("prompt_token_ids must not be empty")
    if len(prompt_token_ids) > max_model_len - (params.max_tokens != 0):
        raise ValueError(
            f"prompt_token_ids has {len(prompt_token_ids)} tokens, at most {max_model_len - 1} "
            f"leave room for an answer in the context of {max_model_len}"
        )
    # Whole-list checks: a loop in Python would cost milliseconds on a long prompt.
    if set(map(type, prompt_token_ids)) != {int} or min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
        wrong = next(t for t in prompt_token_ids if type(t) is not int or not 0 <= t < vocab_size)
        raise ValueError(f"prompt_token_ids must be integers in [0, {vocab_size}), got {wrong!r}")
    params.check_vocabulary(vocab_size)
    if params.allowed_token_ids is not None:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)} if params.min_tokens else set()
        if (
            not set(params.allowed_token_ids)
            - ends
            - {word[0] for word in params.bad_words_token_ids if len(word) == 1}
        ):
            raise ValueError(
                "allowed_token_ids must leave a token to generate beside bad words and what min_tokens bans"
            )
    if params.min_tokens and params.golden_token_ids is None:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        if len(ends) >= vocab_size:
            raise ValueError(
                f"stop_token_ids must leave a token to generate before min_tokens = {params.min_tokens}, "
                f"but with end-of-sequence they are all {vocab_size}"
            )

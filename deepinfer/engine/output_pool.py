"""RequestOutputPool: outputs that are used again, for an owner of the engine that is done with them a step later.

The engine process encodes a step's outputs before it starts the next one, so making new ones would be garbage of
hundreds of objects a step. Whoever else runs an engine gets ordinary objects, which stay valid.
"""

from __future__ import annotations

from deepinfer.observability.memory import DeferredRelease, retire, revive
from deepinfer.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprob


class NewOutputs:
    """Makes outputs that stay valid for ever."""

    def next_round(self) -> None:
        """Call when a step begins."""

    def completion(
        self,
        index: int,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> CompletionOutput:
        """A completion with these new tokens."""
        return CompletionOutput(index, token_ids, logprobs, finish_reason, stop_reason)

    def output(
        self, request_id: str, prompt_token_ids: list[int], completion: CompletionOutput, metrics: RequestMetrics
    ) -> RequestOutput:
        """An unfinished output of one completion."""
        return RequestOutput(request_id, prompt_token_ids, [completion], False, metrics)


class RequestOutputPool(NewOutputs):
    """What is taken in one round stays valid through the next one; `next_round` begins a round.

    Args:
        debug: reading or writing an output after that raises StaleReadError.
    """

    def __init__(self, debug: bool = False) -> None:
        self._debug = debug
        self._outputs: list[RequestOutput] = []  # free ones
        self._completions: list[CompletionOutput] = []
        self._taken: list[RequestOutput] = []  # in this round
        self._taken_completions: list[CompletionOutput] = []
        self._rounds = DeferredRelease(self._take_back)

    def next_round(self) -> None:
        self._rounds.defer((self._taken, self._taken_completions))
        self._taken, self._taken_completions = [], []
        self._rounds.next_round()

    def _take_back(self, taken: tuple[list[RequestOutput], list[CompletionOutput]]) -> None:
        outputs, completions = taken
        if self._debug:
            for resource in (*outputs, *completions):
                retire(resource)
        self._outputs += outputs
        self._completions += completions

    def completion(
        self,
        index: int,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> CompletionOutput:
        if self._completions:
            completion = self._completions.pop()
            if self._debug:
                revive(completion)
            completion.index, completion.token_ids, completion.logprobs = index, token_ids, logprobs
            completion.finish_reason, completion.stop_reason = finish_reason, stop_reason
        else:
            completion = super().completion(index, token_ids, logprobs, finish_reason, stop_reason)
        self._taken_completions.append(completion)
        return completion

    def output(
        self, request_id: str, prompt_token_ids: list[int], completion: CompletionOutput, metrics: RequestMetrics
    ) -> RequestOutput:
        if self._outputs:
            output = self._outputs.pop()
            if self._debug:
                revive(output)
            output.request_id, output.prompt_token_ids, output.metrics = request_id, prompt_token_ids, metrics
            output.outputs[:] = (completion,)
            output.finished, output.error, output.prompt_logprobs = False, None, None
        else:
            output = super().output(request_id, prompt_token_ids, completion, metrics)
        self._taken.append(output)
        return output

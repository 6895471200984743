"""LLM: the offline API. Prompts in, finished outputs out, in order.

from deepinfer import LLM, SamplingParams
outputs = LLM(model="nano").generate("Once upon a time", SamplingParams(max_tokens=64))
print(outputs[0].outputs[0].text)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from deepinfer.beam_search import Beam, BeamSearchParams, beam_search
from deepinfer.checkpoint_tokenizer import load_tokenizer
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import load_engine, resolve_model
from deepinfer.outputs import CompletionOutput, RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.recipe import Detokenizer, StopStrings, Tokenizer, encode_prompt, render_chat
from deepinfer.structured.matcher import Grammar

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    Args:
        model: "nano" or a checkpoint folder (config.json, safetensors, tokenizer.json).
        config: engine settings; or give its fields as keywords, e.g. LLM("nano", max_num_seqs=8). Without a config or a
            device the model runs on a GPU if there is one.

    Raises:
        ValueError: unknown model, bad checkpoint or bad setting, naming it.
    """

    def __init__(self, model: str | Path = "nano", config: EngineConfig | None = None, **engine_options: Any):
        if config is not None and engine_options:
            raise ValueError(f"give either config or engine options, got both (options: {', '.join(engine_options)})")
        unknown = engine_options.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ValueError(f"unknown engine option {', '.join(sorted(unknown))}; known are {known}")
        config = config or EngineConfig(**{"device": "auto"} | engine_options)
        path = resolve_model(model)
        tokenizer = load_tokenizer(path) if (path / "tokenizer.json").is_file() else None
        self._setup(load_engine(model, config), tokenizer)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer | None = None) -> "LLM":
        """An LLM over an idle engine; without a tokenizer it takes token ids only and gives no text."""
        llm = cls.__new__(cls)
        llm._setup(engine, tokenizer)
        return llm

    def _setup(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._request_ids = map(str, count())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for every prompt, batched; returns finished outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list; a prompt is text (begin-of-sequence is added) or a list of token ids.
            sampling_params: one for all prompts, or one for each.
            progress: show a progress bar.

        Raises:
            ValueError: naming the field and the prompt's number; then nothing has been run.
        """
        prompt_list = _prompt_list(prompts)
        params = sampling_params if sampling_params is not None else SamplingParams()
        params_list = (
            [params] * len(prompt_list)
            if isinstance(params, SamplingParams)
            else _listed("sampling_params", params, "SamplingParams")
        )
        if len(params_list) != len(prompt_list):
            raise ValueError(f"sampling_params must be one or {len(prompt_list)}, got {len(params_list)}")
        token_ids = self._checked(prompt_list, params_list)
        results = [_Result(next(self._request_ids), each, self.tokenizer) for each in params_list]
        by_id = {result.request_id: result for result in results}
        try:
            for result, prompt, each in zip(results, token_ids, params_list, strict=True):
                self.engine.add_request(result.request_id, prompt, each)
            with _progress_bar(len(results), progress) as advance:
                while self.engine.has_unfinished_requests():
                    for delta in self.engine.step():
                        if by_id[delta.request_id].add(delta, self.engine):
                            advance()
        finally:
            for request_id in by_id:  # only an exception leaves any
                self.engine.abort_request(request_id)
        return [result.output for result in results]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; otherwise as `generate`.

        Args:
            messages: Chat Completions messages of one conversation, or a list of conversations.
            options: of the prompt, for all of them: tools, thinking, reasoning_effort, tool_choice (see
                `recipe.render_chat`). The text of an output is what the model wrote: reasoning before `</think>`,
                tool calls as markup; `recipe.StreamParser` takes it apart.

        Raises:
            ValueError: naming the field and the conversation's number; then nothing has been run.
        """
        if self.tokenizer is None:
            raise ValueError("messages need a tokenizer, this model has none")
        several = _listed("messages", messages, "messages of a conversation")
        conversations = [several] if several and isinstance(several[0], Mapping) else several
        prompts = []
        for number, conversation in enumerate(conversations):
            try:
                prompt = render_chat(conversation, model_version=self.tokenizer.model_version, **options)
                prompts.append(encode_prompt(prompt, self.tokenizer))
            except ValueError as error:
                where = f"conversation {number}: " if len(conversations) > 1 else ""
                raise ValueError(f"{where}{getattr(error, 'param', None) or 'messages'}: {error}") from None
        return self.generate(prompts, sampling_params, progress)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[list[Beam]]:
        """The likeliest continuations of every prompt, best first.

        Args:
            prompts: as of `generate`.

        Raises:
            ValueError: naming the field and the prompt's number; then nothing has been run.
        """
        prompt_list = _prompt_list(prompts)
        first = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True)
        token_ids = self._checked(prompt_list, [first] * len(prompt_list))

        def likeliest(sequences: list[list[int]], count: int) -> list[list[tuple[int, float]]]:
            tops = []
            for output in self.generate(sequences, replace(first, logprobs=count)):
                if output.error is not None:
                    raise RuntimeError(output.error)
                [entry] = output.outputs[0].logprobs or []
                tops.append(entry.top)
            return tops

        found = beam_search(token_ids, params, self.engine.eos_token_ids, self.engine.max_model_len, likeliest)
        return [[replace(beam, text=self._text_of(beam)) for beam in beams] for beams in found]

    def _text_of(self, beam: Beam) -> str:
        if self.tokenizer is None:
            return ""
        whole = CompletionOutput(0, list(beam.token_ids), finish_reason=beam.finish_reason)
        _Text(self.tokenizer, ()).add(whole)
        return whole.text

    def _checked(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Sequence[int]]:
        """Token ids of prompts that can run. Raises ValueError naming the prompt's number."""
        token_ids = []
        grammars = [_compiled(self.engine, each) for each in params]  # side by side
        for number, (prompt, each, grammar) in enumerate(zip(prompts, params, grammars, strict=True)):
            try:
                token_ids.append(self._encode(prompt))
                self.engine.validate(token_ids[-1], each)
                if each.stop and self.tokenizer is None:
                    raise ValueError("stop needs a tokenizer, this model has none")
                if grammar is not None:
                    grammar.result()
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        return token_ids

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError("prompts must be token ids, this model has no tokenizer")
        if not prompt:
            raise ValueError("prompts must not be empty")
        try:
            return [self.tokenizer.control_id("bos"), *self.tokenizer.encode_text(prompt)]
        except ValueError as error:
            raise ValueError(f"prompts: {error}") from None


def _compiled(engine: Engine, params: Any) -> Future[Grammar] | None:
    """The grammar of structured output, once it is there."""
    if not isinstance(params, SamplingParams) or params.so_args is None or engine.grammars is None:
        return None
    return engine.compile(params.so_args)


def _prompt_list(prompts: Any) -> list[Any]:
    """One prompt, text or token ids, as a list of it."""
    is_ids = isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    return [prompts] if isinstance(prompts, str) or is_ids else _listed("prompts", prompts, "text, token ids")


def _listed(field: str, value: Any, one: str) -> list[Any]:
    """`value` as a list. Raises ValueError naming the field if it is neither one nor several."""
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise ValueError(f"{field} must be {one} or a list of them, got {type(value).__name__}")
    return list(value)


class _Result:
    """Deltas of one request joined into its final output, with text and stop strings."""

    def __init__(self, request_id: str, params: SamplingParams, tokenizer: Tokenizer | None):
        self.request_id = request_id
        self.output: RequestOutput = None  # type: ignore[assignment]  # the first delta
        self._texts = [_Text(tokenizer, params.stop) for _ in range(params.n)] if tokenizer else []

    def add(self, delta: RequestOutput, engine: Engine) -> bool:
        """Take a delta in; ends a completion in the engine when its text meets a stop string. True when finished."""
        stopped = [c for c in delta.outputs if self._texts and self._texts[c.index].add(c)]
        if self.output is None:
            self.output = delta
        else:
            self.output.merge(delta)
        for completion in stopped:
            aborted = engine.abort_request(self.request_id, completion.index)
            if aborted is not None:
                self.output.finished = aborted.finished
        self.output.outputs.sort(key=lambda completion: completion.index)
        return self.output.finished


class _Text:
    """Text of one completion as its tokens come."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._vocab_size = tokenizer.vocab_size
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(list(stop))

    def add(self, completion: CompletionOutput) -> bool:
        """Fill in the text of a delta; True if a stop string ends it here, before the engine ended it."""
        # A model's vocabulary may be padded beyond the tokenizer's: such tokens have no text.
        token_ids = [token_id for token_id in completion.token_ids if token_id < self._vocab_size]
        if self._push(completion, self._detokenizer.push(token_ids)):
            return True
        if completion.finish_reason is not None and not self._push(completion, self._detokenizer.finish()):
            completion.text += self._stops.finish()
        return False

    def _push(self, completion: CompletionOutput, text: str) -> bool:
        visible, matched = self._stops.push(text)
        completion.text += visible
        if matched is not None:
            completion.finish_reason, completion.stop_reason = "stop", matched
        return matched is not None


@contextmanager
def _progress_bar(total: int, visible: bool) -> Iterator[Any]:
    if not visible:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("generate", total=total)
        yield lambda: bar.advance(task)

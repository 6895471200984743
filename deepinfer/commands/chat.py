"""`deepinfer chat`: talk to a model in the terminal."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.commands import options

if TYPE_CHECKING:
    from deepinfer.outputs import TokenLogprob
    from deepinfer.params import SamplingParams
    from deepinfer.recipe import Event, ParsingOptions
    from deepinfer.server.text_engine import TextEngine

HELP = "/reset forgets the conversation, /exit leaves (so does Ctrl-D), Ctrl-C stops an answer"


def register(app: typer.Typer) -> None:
    app.command(
        epilog=options.examples(
            "deepinfer chat",
            "deepinfer chat --quick 'hi' --stats",
            "deepinfer chat --system 'Answer in one sentence.' --thinking",
        ),
    )(chat)


def chat(
    model: options.Model = "nano",
    quick: Annotated[str | None, typer.Option("--quick", "-q", help="Ask this one question and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model think before it answers.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print TTFT and tokens a second after each answer.")] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    device: options.Device = None,
) -> None:
    """Chat with a model in the terminal, or ask one question with --quick."""
    if quick is not None and not quick.strip():
        raise ValueError("--quick must not be empty")
    from deepinfer.recipe.tokenizer import check_unicode

    for option, text in (("--quick", quick), ("--system", system)):
        try:
            check_unicode([text or ""])
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
    params = options.make_sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    config = options.make_engine_config(max_model_len=max_model_len, kv_cache_dtype=kv_cache_dtype, device=device)
    with options.running_engine(model, config) as engine:
        session = Session(engine, params, thinking, stats, system)
        if quick is not None:
            session.ask(quick)
        else:
            session.loop()


@dataclass
class Session:
    """One conversation: `messages` are Chat Completions messages."""

    engine: TextEngine
    params: SamplingParams
    thinking: bool
    stats: bool
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def loop(self) -> None:
        try:
            import readline  # noqa: F401  line editing and history for input()
        except ImportError:
            pass
        print(f"{self.engine.name}: {HELP}")
        while True:
            try:
                line = input("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line == "/exit":
                return
            if line == "/reset":
                self.reset()
                print("(a new conversation)")
            elif line.startswith("/"):
                print(HELP)
            elif line:
                try:
                    self.ask(line)
                except ValueError as error:
                    print(f"error: {error} (/reset starts anew)", file=sys.stderr)

    def ask(self, question: str) -> None:
        """Print the answer as it comes and remember both.  Raises ValueError if the conversation no longer fits."""
        self.messages.append({"role": "user", "content": question})
        try:
            answer = asyncio.run(self._answer())
        except (ValueError, KeyboardInterrupt) as error:
            self.messages.pop()
            if isinstance(error, ValueError):
                raise
            print("\n(stopped)")
            return
        self.messages.append({"role": "assistant", "content": answer})

    async def _answer(self) -> str:
        from deepinfer.recipe import AnswerText, ParsingOptions, ReasoningText, encode_prompt, render_chat

        start = time.monotonic()
        version = self.engine.model_version
        prompt = encode_prompt(
            render_chat(self.messages, thinking=self.thinking, model_version=version), self.engine.tokenizer
        )
        parsing = ParsingOptions(thinking_initial_stage="ReasoningStart" if self.thinking else None)
        reader = EventReader(self.engine, parsing)
        answer, first, count, thought = "", 0.0, 0, False
        async for delta in self.engine.stream(prompt, self.params, reader):
            first = first or time.monotonic()
            count += len(delta.token_ids)
            for event in itertools.chain(*delta.pieces):
                if isinstance(event, ReasoningText):
                    thought = True
                    print(_dim(event.text), end="", flush=True)
                elif isinstance(event, AnswerText):
                    print(("\n\n" if thought and not answer else "") + event.text, end="", flush=True)
                    answer += event.text
        print()
        if self.stats:
            print(_dim(_stats_line(len(prompt), count, first - start, time.monotonic() - first)))
        return answer


class EventReader:
    """Recipe's events of one answer, as a Reader of text_engine."""

    def __init__(self, engine: TextEngine, parsing: ParsingOptions):
        from deepinfer.recipe import OutputReader

        self.output = OutputReader(parsing, engine.tokenizer)

    def push(self, token_id: int, logprob: TokenLogprob | None) -> tuple[list[Event], str | None]:
        return self.output.push_tokens([token_id]), self.output.parser.stop_string

    def finish(self, reason: str) -> list[Event]:
        return self.output.finish(reason)


def _stats_line(prompt: int, count: int, time_to_first: float, decode_seconds: float) -> str:
    """Tokens a second are those of decoding: the first token belongs to TTFT."""
    rate = f"{(count - 1) / decode_seconds:.1f} tok/s" if count > 1 and decode_seconds > 0 else "one token"
    return f"[{prompt} prompt tokens, {count} generated, TTFT {time_to_first * 1000:.0f} ms, {rate}]"


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text

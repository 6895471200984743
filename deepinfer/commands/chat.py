"""`deepinfer chat`: talk to a model in the terminal."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from deepinfer.commands import options
from deepinfer.commands.parsing import OptionCommand

if TYPE_CHECKING:
    from deepinfer.outputs import TokenLogprob
    from deepinfer.params import SamplingParams
    from deepinfer.recipe import Event, ParsingOptions
    from deepinfer.server.text_engine import TextEngine

HELP = "/reset forgets the conversation, /exit leaves (so does Ctrl-D), Ctrl-C stops an answer"


def register(app: typer.Typer) -> None:
    app.command(
        cls=OptionCommand,
        epilog=options.examples(
            "deepinfer chat",
            "deepinfer chat --quick 'hi' --stats",
            "deepinfer chat --system 'Answer in one sentence.' --thinking",
            "deepinfer chat --url http://localhost:8000/v1",
        ),
    )(chat)


@options.takes(sampling=options.SAMPLING, engine=options.ENGINE)
def chat(
    model: options.Model = "nano",
    url: Annotated[
        str | None, typer.Option(help="Talk to the server there instead, e.g. http://localhost:8000/v1.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["DEEPINFER_API_KEY", "OPENAI_API_KEY"], help="Key for --url.")
    ] = None,
    quick: Annotated[str | None, typer.Option("--quick", "-q", help="Ask this one question and leave.")] = None,
    system: Annotated[str | None, typer.Option("--system", "--system-prompt", help="System message.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model think before it answers.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print TTFT and tokens a second after each answer.")] = False,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
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
    if url is not None:
        from deepinfer.commands.remote import RemoteModel

        params = options.make_sampling_params(**sampling)
        with RemoteModel(url, api_key, params, thinking) as remote:
            talk(Session(remote, stats, system), quick)
        return
    params = options.make_sampling_params(**options.with_defaults(sampling, model))
    with options.running_engine(model, options.make_engine_config(**engine)) as text_engine:
        talk(Session(LocalModel(text_engine, params, thinking), stats, system), quick)


def talk(session: Session, quick: str | None) -> None:
    """One question, or as many as the user has."""
    if quick is not None:
        session.ask(quick)
    else:
        session.loop()


@dataclass
class Said:
    """A piece of an answer; `tokens` that it brought.  The first has the number of prompt tokens if it is known."""

    text: str
    is_reasoning: bool = False
    tokens: int = 0
    prompt_tokens: int = 0


class ChatModel(Protocol):
    """What answers: LocalModel, or a server (remote.py)."""

    name: str

    def answer(self, messages: list[dict[str, Any]]) -> AsyncIterator[Said]:
        """The answer to Chat Completions messages, as it comes.  Raises ValueError for what is refused."""
        ...


@dataclass
class Session:
    """One conversation: `messages` are Chat Completions messages."""

    model: ChatModel
    stats: bool
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def loop(self) -> None:
        """Ask for lines and answer them, until the input ends."""
        try:
            import readline  # noqa: F401  line editing and history for input()
        except ImportError:
            pass
        print(f"{self.model.name}: {HELP}")
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
        start = time.monotonic()
        answer, first, prompt, count, thought = "", 0.0, 0, 0, False
        async for said in self.model.answer(self.messages):
            prompt = prompt or said.prompt_tokens
            count += said.tokens
            if said.tokens or said.text:
                first = first or time.monotonic()
            if said.is_reasoning:
                thought = True
                print(_dim(said.text), end="", flush=True)
            elif said.text:
                print(("\n\n" if thought and not answer else "") + said.text, end="", flush=True)
                answer += said.text
        print()
        if self.stats:
            print(_dim(_stats_line(prompt, count, first - start, time.monotonic() - first)))
        return answer


class LocalModel:
    """An engine in this process."""

    def __init__(self, engine: TextEngine, params: SamplingParams, thinking: bool):
        self.engine, self.params, self.thinking = engine, params, thinking
        self.name = engine.name

    async def answer(self, messages: list[dict[str, Any]]) -> AsyncIterator[Said]:
        from deepinfer.recipe import AnswerText, ParsingOptions, ReasoningText, encode_prompt, render_chat

        version = self.engine.model_version
        prompt = encode_prompt(
            render_chat(messages, thinking=self.thinking, model_version=version), self.engine.tokenizer
        )
        parsing = ParsingOptions(thinking_initial_stage="ReasoningStart" if self.thinking else None)
        async for delta in self.engine.stream(prompt, self.params, EventReader(self.engine, parsing)):
            yield Said("", tokens=len(delta.token_ids), prompt_tokens=len(prompt))
            for event in itertools.chain(*delta.pieces):
                if isinstance(event, AnswerText | ReasoningText):
                    yield Said(event.text, isinstance(event, ReasoningText))


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

"""`deepinfer generate`: raw continuation of a text, streamed to the terminal."""

from __future__ import annotations

import asyncio
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.commands import options
from deepinfer.commands.parsing import OptionCommand

if TYPE_CHECKING:
    from deepinfer.outputs import TokenLogprob
    from deepinfer.params import SamplingParams
    from deepinfer.server.text_engine import TextEngine


def register(app: typer.Typer) -> None:
    app.command(
        cls=OptionCommand,
        epilog=options.examples(
            "deepinfer generate 'Once upon a time'",
            "echo 'The lighthouse' | deepinfer generate - -t 0 --max-tokens 50",
            "deepinfer generate --ids 'One, two,'",
            "deepinfer generate --logprobs 3 --max-tokens 5 'One, two,'",
            "deepinfer generate --regex '[A-Z]{2}-[0-9]{3}' 'The number plate is '",
        ),
    )(generate)
    help_text = "The same as `generate`, under vLLM's name."
    app.command(
        "complete", cls=OptionCommand, help=help_text, epilog=options.examples("deepinfer complete 'Once upon a time'")
    )(generate)


@options.takes(
    sampling=options.SAMPLING
    | {
        "max_tokens": (options.MaxTokens, 200),
        "stop": (options.Stop, None),
        "logprobs": (options.Logprobs, None),
        "golden_token_ids": (options.GoldenTokenIds, None),
        "n": (options.N, 1),
        "json_schema": (options.JsonSchema, None),
        "regex": (options.Regex, None),
        "grammar": (options.Grammar, None),
    },
    engine=options.ENGINE,
)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; `-` reads it from standard input.")],
    model: options.Model = "nano",
    ids: Annotated[bool, typer.Option("--ids", help="Print token IDs instead of text.")] = False,
    prompt_ids: Annotated[bool, typer.Option("--prompt-ids", help="The prompt is token IDs, comma-separated.")] = False,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Continue a text, without a chat prompt around it.  Streams to the terminal."""
    from deepinfer.recipe.tokenizer import check_unicode

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        check_unicode([text])
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from None
    if not text.strip():
        raise ValueError("prompt must not be empty")
    params = options.make_sampling_params(**options.with_defaults(sampling, model))
    with options.running_engine(model, options.make_engine_config(**engine)) as text_engine:
        token_ids = options.parse_numbers(text, "prompt") if prompt_ids else text_engine.encode(text)
        with options.naming_options(sampling):
            asyncio.run(_print_answers(text_engine, token_ids, params, ids))


async def _print_answers(engine: TextEngine, prompt: list[int], params: SamplingParams, ids: bool) -> None:
    """The answers one after another, each as it is generated."""
    from dataclasses import replace

    from deepinfer.sampling.random import completion_seed
    from deepinfer.server.text_engine import TextReader

    for number in range(params.n):
        if params.n > 1:
            print(f"{'' if number == 0 else chr(10)}--- {number + 1} of {params.n}")
        seed = None if params.seed is None else completion_seed(params.seed, number)
        reader = TextReader(engine.tokenizer, params.stop)
        async for delta in engine.stream(prompt, replace(params, n=1, seed=seed), reader):
            if params.logprobs is not None:
                for item in delta.logprobs:
                    print(_logprob_line(engine, item))
            elif ids:
                print("".join(f"{token_id} " for token_id in delta.token_ids), end="", flush=True)
            else:
                print("".join(delta.pieces), end="", flush=True)
        print()


def _logprob_line(engine: TextEngine, item: TokenLogprob) -> str:
    def show(token_id: int, logprob: float) -> str:
        text = engine.tokenizer.decode([token_id])
        return f"{token_id} {text!r} {logprob:.4f} ({math.exp(logprob):.1%})"

    return "  |  ".join([show(item.token_id, item.logprob), *(show(*candidate) for candidate in item.top)])

"""One training dialogue: chat messages, rendered by the recipe into a prompt and the completion to learn."""

import random
from dataclasses import dataclass

from deepinfer.recipe.conversation import Conversation, Effort, Message, ToolCall, ToolDefinition
from deepinfer.recipe.dsml import DSML_STYLES, write_tool_calls
from deepinfer.recipe.encoding import encode_prompt
from deepinfer.recipe.prompt import Prompt, PromptWriter
from deepinfer.recipe.render import render
from deepinfer.recipe.tokenizer import Tokenizer

EFFORTS: tuple[Effort | None, ...] = (None, None, None, "low", "max")


@dataclass(frozen=True)
class Dialogue:
    """`messages` ends with the assistant turn to learn; `expected` is its answer as an evaluator reads it."""

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    thinking: bool = False
    effort: Effort | None = None
    json_object: bool = False
    expected: str = ""

    def prompt(self) -> Prompt:
        """Everything before the last assistant turn, with that turn opened."""
        return render(
            Conversation(
                messages=self.messages[:-1],
                thinking=self.thinking,
                tools=self.tools,
                reasoning_effort=self.effort,
                json_object=self.json_object,
            )
        )

    def completion(self) -> Prompt:
        """The last assistant turn after `<think>` or `</think>`, up to and including EOS."""
        last = self.messages[-1]
        writer = PromptWriter()
        if self.thinking:
            writer.text(last.reasoning_content or "")
            writer.control("think_end")
        writer.text(str(last.content))
        if last.tool_calls:
            write_tool_calls(writer, last.tool_calls, DSML_STYLES["v4.1"])
        writer.control("eos")
        return writer.finish()

    def token_ids(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """(prompt ids, completion ids)."""
        return encode_prompt(self.prompt(), tokenizer), encode_prompt(self.completion(), tokenizer)


def chat(
    kind: str, r: random.Random, user: str, answer: str, reasoning: str = "", system: str = "",
    before: tuple[Message, ...] = (), think: float = 0.25, json_object: bool = False, expected: str = "",
) -> Dialogue:  # fmt: skip
    """A dialogue that ends in a plain answer; with probability `think` in thinking mode, if there is a reasoning."""
    thinking = bool(reasoning) and r.random() < think
    messages = [Message("system", system)] if system else []
    messages += [*before, Message("user", user)]
    messages.append(Message("assistant", answer, reasoning_content=reasoning if thinking else None))
    effort = r.choice(EFFORTS) if thinking else None
    return Dialogue(kind, tuple(messages), (), thinking, effort, json_object, expected or answer)


def call(name: str, arguments: str, index: int = 0) -> ToolCall:
    return ToolCall(f"call_{index:02d}", name, arguments)

"""What a converted request is made of, whatever its protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer.recipe.conversation import Conversation, ModelVersion
from deepinfer.recipe.detokenizer import SILENT_ROLES
from deepinfer.recipe.errors import ConversionError

MAX_TOKENS_BOUND = 393216

# Where the output begins: a new reasoning, an open reasoning (prefix), an open answer (prefix), None: not thinking.
InitialStage = Literal["ReasoningStart", "ReasoningContinuation", "ContentContinuation"]


@dataclass(frozen=True)
class ParsingOptions:
    """How to read the model's output.

    ``starts_in_tool_calls``: the prompt opened a tool block (required tool choice).  ``parse_json_output``: keep only
    the JSON of the answer, without fences and text around it.  ``include_stop_string``: the stop string that ends the
    output is part of the answer.  ``answer_open_reasoning``: reasoning that the model ended its turn in, without
    closing it, is repeated as the answer, so that no reply is empty; the public library leaves the answer empty.
    ``answer_has_format``: a grammar holds the answer to a format, so marks that are spelled inside it are its text.
    ``silent_roles``: control tokens that give no text.
    """

    parse_tool_calls: bool = False
    starts_in_tool_calls: bool = False
    parse_json_output: bool = False
    thinking_initial_stage: InitialStage | None = None
    stop_sequences: tuple[str, ...] = ()
    include_stop_string: bool = False
    answer_open_reasoning: bool = False
    answer_has_format: bool = False
    silent_roles: tuple[str, ...] = SILENT_ROLES

    @property
    def begins_with_reasoning(self) -> bool:
        """Whether the prompt leaves a reasoning open, new or begun."""
        return self.thinking_initial_stage in ("ReasoningStart", "ReasoningContinuation")


@dataclass(frozen=True)
class OutputConstraint:
    """What the output must match.  ``schema``: compact JSON Schema or tool list, a regular expression, or "" (any)."""

    kind: Literal["json", "regex", "tool_call", "tool_call_required"]
    schema: str


@dataclass(frozen=True)
class InferenceOptions:
    """Sampling settings after the model's own rules (thinking forces temperature 1, V4.1 fixes top_p).

    None means that the request did not say; a converted request always has temperature and top_p.  The fields after
    ``output_constraint`` are passed on as asked.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    seed: int | None = None
    output_constraint: OutputConstraint | None = None
    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | None = None


@dataclass(frozen=True)
class ConversionOptions:
    """Choices of the server about what it accepts.

    ``enforces_calls``: a required tool call comes, whatever the prompt says (see structure.py), so it may be required
    of a model that thinks first.
    """

    model_versions: Mapping[str, ModelVersion] = field(
        default_factory=lambda: {"DeepSeek-V4-Pro": "v4", "DeepSeek-V4.1-Flash": "v4.1"}
    )
    default_thinking: bool = True
    reject_missing_reasoning: bool = False
    responses_web_search: Literal["Drop", "Reject"] = "Drop"
    messages_web_search: Literal["Drop", "Reject"] = "Reject"
    max_tokens_bound: int = MAX_TOKENS_BOUND
    enforces_calls: bool = False

    def with_aliases(self, aliases: Mapping[str, ModelVersion]) -> "ConversionOptions":
        """The same options, accepting these model names too."""
        return ConversionOptions(**{**self.__dict__, "model_versions": {**self.model_versions, **aliases}})


@dataclass(frozen=True)
class ConversationRequest:
    """A converted request.

    ``namespaces`` maps a function name to (namespace, local name) for Responses namespace tools; ``custom_tools`` names
    the tools whose calls come back as custom tool calls; ``echo`` holds the settings that Responses objects repeat;
    ``format_schema`` is the JSON Schema of the response format as it is to be enforced.
    """

    model: str
    model_version: ModelVersion
    conversation: Conversation
    inference: InferenceOptions
    parsing: ParsingOptions
    stream: bool = False
    include_usage: bool = False
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    custom_tools: frozenset[str] = frozenset()
    echo: Mapping[str, Any] = field(default_factory=dict)
    format_schema: Any = None

    def resolve_max_tokens(self, prompt_tokens: int, context_limit: int) -> int:
        """Tokens to generate at most: what was asked, or the default cut to the room left (at least 1).

        Raises ConversionError when the prompt and the asked tokens do not fit into the context.
        """
        asked = self.inference.max_tokens
        if prompt_tokens + (asked or 0) > context_limit:
            raise ConversionError(
                f"This model's maximum context length is {context_limit} tokens. However, you requested "
                f"{prompt_tokens + (asked or 0)} tokens ({prompt_tokens} in the messages, {asked or 0} in the "
                "completion). Please reduce the length of the messages or completion.",
                "max_tokens",
            )
        if asked is not None:
            return asked
        default = 8192
        if self.conversation.thinking:
            default = 131072 if self.conversation.reasoning_effort == "max" else 65536
        return max(1, min(default, context_limit - prompt_tokens))

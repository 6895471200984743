"""One conversation, whatever the protocol it came in by: what the prompt renderer reads."""

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]
Effort = Literal["low", "high", "xhigh", "max"]
ModelVersion = Literal["v4", "v4.1"]
MODEL_VERSIONS: tuple[ModelVersion, ...] = ("v4", "v4.1")


@dataclass(frozen=True)
class ImageSource:
    """Where one image comes from.  ``path`` names its place in the request, for error messages."""

    url: str
    detail: Literal["low", "high", "original", "auto"] = "high"
    path: str = ""

    @property
    def kind(self) -> Literal["data_url", "url"]:
        return "data_url" if self.url[:5].lower() == "data:" else "url"


# Text, or text and images in order; parts are joined by a blank line in the prompt.
Content = str | tuple[str | ImageSource, ...]


@dataclass(frozen=True)
class ToolCall:
    """A call made by the assistant.  ``arguments`` is the text the model wrote: a JSON object unless it went wrong."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolDefinition:
    """A tool the model may call.  ``parameters`` is a JSON Schema, key order kept.

    ``enforced`` is the JSON Schema that its calls must satisfy (strict mode), None if nothing was promised: the prompt
    may show less of it. ``path`` is where the request says what ``parameters`` are, for errors.
    """

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None
    defer_loading: bool = False
    enforced: Any = None
    path: str = field(default="tools", compare=False)


@dataclass(frozen=True)
class Message:
    """One message.  reasoning_content, tool_calls and prefix are for assistant messages, tool_call_id for tool ones."""

    role: Role
    content: Content = ""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    prefix: bool = False
    tool_call_id: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages and what decides how they are written into the prompt.

    ``reasoning_effort`` None means the default ("high") when thinking.  ``tool_choice`` "required" opens the tool block
    in the prompt, unless the model thinks first.  At most one of ``json_object``, ``json_schema`` and ``regex`` is set;
    none of them means plain text.
    """

    messages: tuple[Message, ...]
    thinking: bool = True
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    reasoning_effort: Effort | None = None
    json_object: bool = False
    json_schema: Any = None
    regex: str | None = None

    @property
    def tools_in_force(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def opens_tool_block(self) -> bool:
        return self.tools_in_force and self.tool_choice == "required" and not self.thinking

"""Tool declarations of a Responses request: functions, namespaces, custom tools (recipe spec, 4)."""

from dataclasses import dataclass, field
from typing import Any

from deepinfer.recipe import apply_patch, fields
from deepinfer.recipe.conversation import ToolDefinition
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Json
from deepinfer.recipe.request import ConversionOptions
from deepinfer.recipe.tools import check_name

WEB_SEARCH = ("web_search", "web_search_2025_08_26")
_CHOICES = ("function", *WEB_SEARCH, "custom")


@dataclass
class ResponsesTools:
    """``definitions`` for the model, ``namespaces`` (name -> namespace, local name) and ``custom`` for the way back."""

    definitions: list[ToolDefinition] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: set[str] = field(default_factory=set)
    echo: list[Json] = field(default_factory=list)


def read_tools(entries: list[Any]) -> list[tuple[str, Json]]:
    """(type, declaration) of every tool; shape only.  Tools of unknown type stay, to be dropped later."""
    out = []
    for i, entry in enumerate(entries):
        path = f"tools[{i}]"
        obj = fields.struct("internally tagged enum ResponsesTool")(entry, path)
        kind = fields.required(obj, "type", fields.text, path)
        if kind in ("function", "custom"):
            _read_declaration(obj, path)
        elif kind == "namespace":
            fields.required(obj, "name", fields.text, path)
            fields.optional(obj, "description", fields.text, path)
            for j, inner in enumerate(fields.required(obj, "tools", fields.sequence, path)):
                inner_path = f"{path}.tools[{j}]"
                declaration = fields.struct("internally tagged enum ResponsesNamespaceTool")(inner, inner_path)
                inner_kind = fields.required(declaration, "type", fields.text, inner_path)
                if inner_kind not in ("function", "custom"):
                    fields.refuse(f"unknown variant `{inner_kind}`, expected `function` or `custom`", inner_path)
                _read_declaration(declaration, inner_path)
        out.append((kind, obj))
    return out


def _read_declaration(obj: Json, path: str) -> None:
    fields.required(obj, "name", fields.text, path)
    fields.optional(obj, "description", fields.text, path)
    fields.optional(obj, "strict", fields.boolean, path)


def convert_tools(declared: list[tuple[str, Json]], options: ConversionOptions) -> ResponsesTools:
    """Definitions for the model.  Raises ConversionError for bad names and schemas, and for refused server tools."""
    tools = ResponsesTools()
    for i, (kind, obj) in enumerate(declared):
        path = f"tools[{i}]"
        if kind == "function":
            tools.definitions.append(_function(obj, obj["name"], obj.get("description"), path))
            tools.echo.append(_echo_function(obj))
        elif kind == "namespace":
            _add_namespace(tools, obj, path)
        elif kind == "custom":
            tools.definitions.append(_custom(obj, path))
            tools.custom.add(obj["name"])
            tools.echo.append({"type": "custom", "name": obj["name"]})
        elif kind in WEB_SEARCH:
            if options.responses_web_search == "Reject":
                raise ConversionError("Server tools are not supported", path)
            tools.echo.append({"type": kind, "search_context_size": None, "user_location": None})
    return tools


def _function(obj: Json, name: str, description: str | None, path: str) -> ToolDefinition:
    check_name(obj["name"], f"{path}.name")
    return ToolDefinition(name, description, obj.get("parameters"), obj.get("strict"), path=f"{path}.parameters")


def _add_namespace(tools: ResponsesTools, obj: Json, path: str) -> None:
    space = obj["name"]
    check_name(space, f"{path}.name")
    echoed = []
    for j, inner in enumerate(obj["tools"]):
        inner_path = f"{path}.tools[{j}]"
        if inner["type"] == "custom":
            raise ConversionError(
                "Currently custom tools are not allowed inside a namespace. Found custom tool "
                f"'{inner['name']}' in {inner_path}.",
                inner_path,
            )
        name = base = f"{space}::{inner['name']}"
        count = 0
        while name in tools.namespaces:
            count += 1
            name = f"{base}_{count}"
        description = inner.get("description")
        if obj.get("description"):
            description = f"{obj['description']}\n{description or ''}"
        tools.definitions.append(_function(inner, name, description, inner_path))
        tools.namespaces[name] = (space, inner["name"])
        echoed.append(_echo_function(inner))
    tools.echo.append({"type": "namespace", "name": space, "description": obj.get("description"), "tools": echoed})


def _custom(obj: Json, path: str) -> ToolDefinition:
    """A tool with free text input: a function with one string parameter; apply_patch has words of its own."""
    name = obj["name"]
    check_name(name, f"{path}.name")
    if name == apply_patch.NAME:
        return ToolDefinition(name, apply_patch.DESCRIPTION, apply_patch.PARAMETERS)
    description = obj.get("description") or ""
    grammar = obj.get("format")
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        description += f"\nThe input must match this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}"
    parameters = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    return ToolDefinition(name, description or None, parameters)


def _echo_function(obj: Json) -> Json:
    kept = {key: obj.get(key) for key in ("description", "parameters", "strict")}
    return {"type": "function", "name": obj["name"], **kept}


def read_tool_choice(value: Any) -> tuple[str, str | None, Any]:
    """(choice, name of the tool that must be called, what the response repeats)."""
    if value is None:
        return "auto", None, "auto"
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value, None, value
    if not isinstance(value, dict) or "type" not in value:
        fields.refuse("expected one of `none`, `auto`, `required` or a tool choice object", "tool_choice")
    kind = fields.one_of(_CHOICES)(value["type"], "tool_choice.type")
    if kind in WEB_SEARCH:
        return "auto", None, {"type": kind}
    name = fields.required(value, "name", fields.text, "tool_choice")
    space = fields.optional(value, "namespace", fields.text, "tool_choice")
    return "required", f"{space}::{name}" if space else name, {"type": kind, "name": name}

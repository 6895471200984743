"""Tool declarations and tool choice, as all protocols check them."""

import re
from dataclasses import replace
from typing import Any, Literal

from deepinfer.recipe import json_text
from deepinfer.recipe.conversation import ToolDefinition
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.schema import closed_schema, schema_fault, strict_schema

_NAME_PATTERN = "^[a-zA-Z0-9_-]+$"
_MAX_NAME = 128


def check_name(name: str, path: str) -> None:
    """Raise ConversionError unless the name is 1 to 128 letters, digits, underscores and hyphens."""
    if not name:
        raise ConversionError(
            f"Invalid '{path}': empty string. Expected a string with minimum length 1, but got an empty string "
            "instead.",
            path,
        )
    if len(name) > _MAX_NAME:
        raise ConversionError(
            f"Invalid '{path}': string too long. Expected a string with maximum length {_MAX_NAME}, but got a string "
            f"with length {len(name)} instead.",
            path,
        )
    if not re.fullmatch(_NAME_PATTERN, name) or name.endswith("\n"):
        raise ConversionError(
            f"Invalid '{path}': string does not match pattern. Expected a string that matches the pattern "
            f"'{_NAME_PATTERN}'.",
            path,
        )


def check_parameters(name: str, parameters: Any, strict: bool | None) -> Any:
    """The parameters as the prompt shows them: checked, completed in strict mode.  Without any, all objects fit."""
    if parameters is None:
        empty = {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
        return empty if strict else {}
    if strict:
        return strict_schema(parameters, "Invalid tool parameters schema : ", "function parameters schema", True)
    fault = schema_fault(parameters)
    if fault is None:
        kind = parameters.get("type") if isinstance(parameters, dict) else None
        if kind == "object":
            return parameters
        shown = json_text.compact(kind)
        fault = "schema must be a JSON Schema of 'type: \"object\"', got 'type: "
        fault += f"{shown}'."
    raise ConversionError(f"Invalid schema for function '{name}': {fault}", "tools")


def _checked(tool: ToolDefinition) -> ToolDefinition:
    try:
        parameters = check_parameters(tool.name, tool.parameters, tool.strict)
    except ConversionError as error:
        raise error.at(tool.path) from None
    if not tool.strict:
        return replace(tool, parameters=parameters)
    declared = parameters if tool.parameters is None else tool.parameters
    return replace(tool, parameters=parameters, enforced=closed_schema(declared))


def check_unique(tools: list[ToolDefinition]) -> None:
    """Raises ConversionError for two tools of one name."""
    if len({tool.name for tool in tools}) != len(tools):
        raise ConversionError("Tool names must be unique.", "tools")


def choose_tools(
    tools: list[ToolDefinition], choice: str, named: str | None, must_open: bool
) -> tuple[tuple[ToolDefinition, ...], Literal["auto", "none", "required"]]:
    """Tools and choice for the prompt: ``none`` removes the tools, a name keeps that tool only and requires it.

    Without tools every choice means auto.  Tools that are not removed are checked here.  Raises ConversionError for bad
    parameters, for two tools of one name, for a name that is not declared, and for a required call when the prompt
    ``must_open`` the tool block but cannot: the model thinks first, and nothing else would make it call.
    """
    if choice == "none":
        return (), "none"
    tools = [_checked(tool) for tool in tools]
    check_unique(tools)
    if not tools:
        return (), "auto"
    if named is not None:
        tools = [tool for tool in tools if tool.name == named]
        if not tools:
            raise ConversionError(
                f"Invalid value for 'tool_call': no function named '{named}' was specified in the 'tools' parameter.",
                "tool_choice",
            )
        choice = "required"
    if choice == "required" and must_open:
        raise ConversionError("Thinking mode does not support this tool_choice", "tool_choice")
    return tuple(tools), "required" if choice == "required" else "auto"

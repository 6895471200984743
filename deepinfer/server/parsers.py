"""The output parsers by themselves (SGLang's names): text in, what the chat routes would make of it out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from deepinfer.recipe import (
    AnswerText,
    Event,
    ParsingOptions,
    ReasoningText,
    StreamParser,
    ToolCallArguments,
    ToolCallStart,
)
from deepinfer.server.body import beside_loop, read_json, request_schema, validate
from deepinfer.server.errors import ApiError

router = APIRouter()
# What other servers call the formats that V4 and V4.1 share.
KNOWN_PARSERS = ("auto", "deepinfer", "deepseek-v3", "deepseek-v4", "deepseek_v4", "deepseekv32", "deepseekv4")
END = "<｜end▁of▁sentence｜>"  # a template's decoded output may still carry some


class ParseFunctionCallRequest(BaseModel):
    """POST /parse_function_call: `tools` as in a chat request; without any, every name is taken."""

    model_config = ConfigDict(strict=True)
    text: str
    tools: list[dict[str, Any]] | None = None
    tool_call_parser: str | None = None


class SeparateReasoningRequest(BaseModel):
    """POST /separate_reasoning: output of a model that thinks, with or without the <think> it starts with."""

    model_config = ConfigDict(strict=True)
    text: str
    reasoning_parser: str | None = None


@router.post("/parse_function_call", openapi_extra=request_schema(ParseFunctionCallRequest))
async def parse_function_call(request: Request) -> dict[str, Any]:
    """{"normal_text", "calls": [{"tool_index", "name", "parameters": JSON text}]}."""
    body = validate(ParseFunctionCallRequest, await read_json(request))
    check_parser(body.tool_call_parser, "tool_call_parser")
    functions = [tool.get("function") for tool in body.tools or ()]
    known = [function.get("name") if isinstance(function, dict) else None for function in functions]
    return await beside_loop(request, tool_calls, body.text, known)


@router.post("/separate_reasoning", openapi_extra=request_schema(SeparateReasoningRequest))
async def separate_reasoning(request: Request) -> dict[str, Any]:
    """{"reasoning_text", "text"}.  What is never closed is all reasoning."""
    body = validate(SeparateReasoningRequest, await read_json(request))
    check_parser(body.reasoning_parser, "reasoning_parser")
    options = ParsingOptions(thinking_initial_stage="ReasoningStart")
    events = await beside_loop(request, parse, body.text.removeprefix("<think>"), options)
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    answer = "".join(event.text for event in events if isinstance(event, AnswerText))
    return {"reasoning_text": reasoning, "text": answer}


def check_parser(name: str | None, param: str) -> None:
    """ApiError 400 naming `param` for a parser that is not known."""
    if name is not None and name not in KNOWN_PARSERS:
        raise ApiError(f"{param} must be one of {', '.join(KNOWN_PARSERS)}, got {name[:200]!r}", param=param)


def tool_calls(text: str, known: list[str | None]) -> dict[str, Any]:
    """`known` are the tools' names; a call of another one has the index -1."""
    normal: list[str] = []
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []  # joined once: text that grows by pieces would be copied for each
    for event in parse(text, ParsingOptions(parse_tool_calls=True)):
        if isinstance(event, AnswerText):
            normal.append(event.text)
        elif isinstance(event, ToolCallStart):
            index = known.index(event.name) if event.name in known else -1
            calls.append({"tool_index": index, "name": event.name})
            arguments.append([])
        elif isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.text)
    for call, parts in zip(calls, arguments, strict=True):
        call["parameters"] = "".join(parts)
    return {"normal_text": "".join(normal), "calls": calls}


def parse(text: str, options: ParsingOptions) -> list[Event]:
    """Events of a whole output; end-of-sequence marks at its end are no text."""
    parser = StreamParser(options)
    end = len(text)
    while text.endswith(END, 0, end):
        end -= len(END)
    return [*parser.push(text[:end]), *parser.finish()]

"""What the output of a request must look like, as a format of parts that a grammar compiler can enforce.

Formats are JSON values in the words of XGrammar's structural tags: const_string, token, any_text, regex, json_schema,
sequence, or, optional, plus, star. Control tokens are parts of their own: no text can take their place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from deepinfer.recipe import json_text
from deepinfer.recipe.conversation import ModelVersion, ToolDefinition
from deepinfer.recipe.dsml import DSML_STYLES, DsmlStyle
from deepinfer.recipe.dsml_parser import CLOSING_MARK, OPENING_MARK
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.request import ConversationRequest
from deepinfer.recipe.stream_parser import THINK_END

Format = dict[str, Any]
_NOTES = {"title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated"}
_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"} | _NOTES
_MAX_REFERENCES = 16
_MAX_COPIED = 256 * 1024  # characters of a tool's schema, which goes whole into each part that refers to it


def answer_format(request: ConversationRequest) -> Format | None:
    """What the answer itself must be, by the response format of the request; None: any text."""
    conversation = request.conversation
    if conversation.json_schema is not None:
        return json_part(request.format_schema)
    if conversation.json_object:
        return json_part({"type": "object"})
    return None if conversation.regex is None else {"type": "regex", "pattern": conversation.regex}


def output_format(
    request: ConversationRequest,
    answer: Format | None,
    control_ids: Mapping[str, int],
    parallel_calls: bool = True,
) -> Format | None:
    """The format of the whole output: reasoning, answer and tool calls. None: nothing is to be enforced.

    ``answer`` is that of the answer, None for any text. Tool calls are constrained when a call is required, a tool is
    strict, there may be one call only, or the answer has a format. Raises ConversionError for a tool whose parameters
    cannot be enforced.
    """
    conversation = request.conversation
    tools = conversation.tools if conversation.tools_in_force else ()
    is_required = bool(tools) and conversation.tool_choice == "required"
    constrains_calls = is_required or not parallel_calls or any(tool.enforced is not None for tool in tools)
    if answer is None and not (tools and constrains_calls):
        return None
    body = answer or {"type": "any_text", "excludes": [OPENING_MARK] if tools else []}
    if tools:
        writer = _CallFormat(request.model_version, control_ids, is_required)
        is_open = request.parsing.starts_in_tool_calls
        calls = writer.block(tools, is_open, parallel_calls, text_before=answer is None and not is_required)
        body = calls if is_required else {"type": "or", "elements": [body, calls]}
    return behind_reasoning(body, control_ids) if request.parsing.begins_with_reasoning else body


def behind_reasoning(body: Format, control_ids: Mapping[str, int]) -> Format:
    """The format behind any reasoning, which ends with the control token, and spells neither it nor a call."""
    reasoning = {"type": "any_text", "excludes": [THINK_END, OPENING_MARK]}
    return sequence(reasoning, {"type": "token", "token": control_ids["think_end"]}, body)


def json_part(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def enforced_schema(tool: ToolDefinition, is_required: bool) -> Any:
    """The JSON Schema that calls of the tool must satisfy; None: calls of any parameters."""
    if tool.enforced is not None:
        return tool.enforced
    return tool.parameters if is_required else None


class _CallFormat:
    """Writes tool calls (recipe spec, 2: DSML)."""

    def __init__(self, version: ModelVersion, control_ids: Mapping[str, int], is_required: bool) -> None:
        self._style: DsmlStyle = DSML_STYLES[version]
        self._mark: Format = {"type": "token", "token": control_ids["dsml"]}
        self._is_required = is_required

    def _tag(self, opening: str, rest: str) -> list[Format]:
        return [text(opening), self._mark, text(self._style.space + rest)]

    def block(self, tools: Sequence[ToolDefinition], is_open: bool, parallel_calls: bool, text_before: bool) -> Format:
        """A whole block, or the rest of one that the prompt has opened."""
        name = self._style.block
        calls: Format = {"type": "or", "elements": [self._call(tool) for tool in tools]}
        if parallel_calls:
            calls = {"type": "plus", "content": calls}
        opening: list[Format] = []
        if text_before:  # newlines in front of the block are part of the text
            opening = [{"type": "any_text", "excludes": [OPENING_MARK]}, *self._tag("<", f"{name}>\n")]
        elif not is_open:
            opening = self._tag("\n\n<", f"{name}>\n")
        return sequence(*opening, calls, *self._tag("</", f"{name}>"))

    def _call(self, tool: ToolDefinition) -> Format:
        schema = enforced_schema(tool, self._is_required)
        parameters = self._any_parameters() if schema is None else self._parameters(tool.path, schema)
        head = self._tag("<", f'invoke name="{tool.name}">\n')
        return sequence(*head, *parameters, *self._tag("</", "invoke>\n"))

    def _any_parameters(self) -> list[Format]:
        one = sequence(
            *self._tag("<", 'parameter name="'),
            {"type": "regex", "pattern": '[^"<>\\n]{1,128}'},
            {"type": "or", "elements": [self._value(part, '"') for part in _any_value()]},
        )
        return [{"type": "star", "content": one}]

    def _parameters(self, path: str, root: Any) -> list[Format]:
        """`path` is that of the parameters' schema in the request."""
        try:
            return self._written_parameters(root)
        except ConversionError as error:
            raise ConversionError(f"{path}: {error}", path) from None

    def _written_parameters(self, root: Any) -> list[Format]:
        schema = _resolved(root, root)
        if schema is False:
            raise ConversionError("it is false: no value satisfies it")
        if not isinstance(schema, dict) or not schema:
            return self._any_parameters()
        unknown = [key for key in schema if key not in _OBJECT_KEYS]
        if unknown:
            raise ConversionError(f"keyword {unknown[0]!r} at #/{unknown[0]} is not supported at the top of parameters")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        extra = schema.get("additionalProperties", True)
        properties = {**properties, **{name: extra for name in required if name not in properties}}
        if not properties:
            return [text(self._style.no_parameters)] if extra is False else self._any_parameters()
        written = []
        whole = _Whole(root, _MAX_COPIED)
        for name, value in properties.items():
            if value is False:
                if name in required:
                    raise ConversionError(f"property {name!r} is required, and no value satisfies it")
                continue
            if '"' in name or OPENING_MARK in name:
                raise ConversionError(f"property {name!r} cannot be written in a call")
            options = [self._value(part, f'{name}"') for part in _value_parts(value, whole)]
            one = sequence(*self._tag("<", 'parameter name="'), {"type": "or", "elements": options})
            written.append(one if name in required else {"type": "optional", "content": one})
        return written

    def _value(self, part: tuple[bool, Format], opening: str) -> Format:
        is_string, value = part
        attribute = f'{opening} string="{"true" if is_string else "false"}">'
        return sequence(text(attribute), value, *self._tag("</", "parameter>\n"))


def _any_value() -> list[tuple[bool, Format]]:
    return [(True, _raw_string({})), (False, json_part(True))]


def _options(schema: Any, root: Any) -> list[Any]:
    """The alternatives of nested anyOf, references resolved, each once.

    A reference met again has nothing new to say: not following it ends circles, and doublings that would take for ever.
    """
    options, waiting, seen = [], [schema], set()
    while waiting:
        node = waiting.pop()
        reference = node.get("$ref") if isinstance(node, dict) else None
        if isinstance(reference, str) and node.keys() - _NOTES == {"$ref"}:
            if reference in seen:
                continue
            seen.add(reference)
        node = _resolved(node, root)
        if isinstance(node, dict) and node.keys() - _NOTES == {"anyOf"}:
            waiting += reversed(node["anyOf"])
        else:
            options.append(node)
    if not options:
        raise ConversionError("Invalid json schema: references go in a circle")
    return options


@dataclass
class _Whole:
    """A schema whose parts become formats; `left` characters of copies of it are allowed."""

    root: Any
    left: int

    def copied(self) -> Any:
        """What a part of it may refer to, with references that lead there from the part."""
        self.left -= len(json_text.compact(self.root))
        if self.left < 0:
            raise ConversionError("Invalid json schema: too many of its parts refer to others")
        return _rewritten(self.root)


def _value_parts(schema: Any, whole: _Whole) -> list[tuple[bool, Format]]:
    """Ways to write a value of the schema: (whether it is a raw string, its format)."""
    return [part for option in _options(schema, whole.root) for part in _option_parts(option, whole)]


def _option_parts(schema: Any, whole: _Whole) -> list[tuple[bool, Format]]:
    if schema is True or (isinstance(schema, dict) and not schema.keys() - _NOTES):
        return _any_value()
    if not isinstance(schema, dict):
        return [(False, json_part(schema))]
    keys = schema.keys() - _NOTES
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    kinds = schema.get("type")
    if values is not None and keys <= {"const", "enum", "type"}:
        strings = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)]
        is_string = kinds in (None, "string") or (isinstance(kinds, list) and "string" in kinds)
        parts: list[tuple[bool, Format]] = []
        if strings and is_string and not any(CLOSING_MARK in value for value in strings):
            parts.append((True, {"type": "or", "elements": [text(value) for value in strings]}))
            strings = []
        if others and kinds != "string":
            parts.append((False, json_part({**schema, "enum": others} if "enum" in schema else schema)))
        if parts and not strings:
            return parts
    elif kinds == "string" and keys <= {"type", "minLength", "maxLength"}:
        return [(True, _raw_string(schema))]
    elif isinstance(kinds, list) and "string" in kinds and keys == {"type"}:
        rest = [kind for kind in kinds if kind != "string"]
        return [(True, _raw_string({})), *([(False, json_part({"type": rest}))] if rest else [])]
    return [(False, json_part(_embedded(schema, whole)))]


def _raw_string(schema: Mapping[str, Any]) -> Format:
    """A string as the model writes it, up to the tag that closes it."""
    if "minLength" not in schema and "maxLength" not in schema:
        return {"type": "any_text", "excludes": [CLOSING_MARK]}
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    pattern = f"(?s:.){{{low},{'' if high is None else int(high)}}}"
    return {"type": "regex", "pattern": pattern, "excludes": [CLOSING_MARK]}


def _resolved(schema: Any, root: Any) -> Any:
    """The schema that a chain of references leads to."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or schema.keys() - _NOTES != {"$ref"}:
            return schema
        target = root
        for name in unquote(str(schema["$ref"])).removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise ConversionError(f"Invalid json schema: {schema['$ref']} does not exist")
        schema = target
    raise ConversionError("Invalid json schema: references go in a circle")


def _embedded(schema: Any, whole: _Whole) -> Any:
    """A part of a schema as a schema of its own, which finds what it refers to."""
    if not _has_reference(schema):
        return schema
    return {**_rewritten(schema), "$defs": {"root": whole.copied()}}


# Keywords whose values are schemas, and those that hold schemas by name. All other values are no schemas: a "$ref" in
# them, say in an enum, is text.
_SCHEMAS = {"items", "additionalItems", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}


def _subschemas(schema: Any) -> list[Any]:
    if not isinstance(schema, dict):
        return []
    found: list[Any] = []
    for key, value in schema.items():
        if key in _SCHEMAS:
            found += value if isinstance(value, list) else [value]
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            found += value.values()
    return found


def _has_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and ("$ref" in schema or any(map(_has_reference, _subschemas(schema))))


def _rewritten(schema: Any) -> Any:
    """The schema with references that lead where they led, once it is #/$defs/root of another one."""
    if not isinstance(schema, dict):
        return schema
    return {key: _rewritten_value(key, value) for key, value in schema.items()}


def _rewritten_value(key: str, value: Any) -> Any:
    if key == "$ref" and isinstance(value, str):
        return "#/$defs/root" + value.removeprefix("#")
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _rewritten(entry) for name, entry in value.items()}
    if key in _SCHEMAS:
        return [_rewritten(entry) for entry in value] if isinstance(value, list) else _rewritten(value)
    return value

"""Tool calls of the history as DSML text (recipe spec, 2: DSML)."""

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.recipe import json_text
from deepinfer.recipe.conversation import ModelVersion, ToolCall
from deepinfer.recipe.prompt import PromptWriter


@dataclass(frozen=True)
class DsmlStyle:
    """What differs between the versions: a space after the mark, the block's name, an empty call, floats."""

    space: str
    block: str
    no_parameters: str
    spell_float: Callable[[float], str]


DSML_STYLES: dict[ModelVersion, DsmlStyle] = {
    "v4": DsmlStyle(space="", block="tool_calls", no_parameters="", spell_float=json_text.rust_float),
    "v4.1": DsmlStyle(space=" ", block="calls", no_parameters="\n", spell_float=repr),
}


def open_block(style: DsmlStyle) -> str:
    return f"\n\n<｜DSML｜{style.space}{style.block}>\n"


def write_tool_calls(writer: PromptWriter, calls: tuple[ToolCall, ...], style: DsmlStyle) -> None:
    """Write a whole tool block; names and string values go out raw, as the model itself writes them."""
    space = style.space
    writer.template(open_block(style))
    for call in calls:
        writer.template(f'<｜DSML｜{space}invoke name="')
        writer.text(call.name)
        writer.text('">\n')
        parameters = call_parameters(call.arguments)
        if not parameters:
            writer.text(style.no_parameters)
        for name, value in parameters.items():
            is_string = isinstance(value, str)
            writer.template(f'<｜DSML｜{space}parameter name="')
            writer.text(name)
            writer.text(f'" string="{"true" if is_string else "false"}">')
            writer.text(value if isinstance(value, str) else json_text.dumps(value, spell_float=style.spell_float))
            writer.template(f"</｜DSML｜{space}parameter>\n")
        writer.template(f"</｜DSML｜{space}invoke>\n")
    writer.template(f"</｜DSML｜{space}{style.block}>")


def call_parameters(arguments: str) -> dict[str, object]:
    """The arguments as an object; text that is not a JSON object becomes one string parameter named ``arguments``."""
    try:
        value = json_text.loads(arguments)
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}

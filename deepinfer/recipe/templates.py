"""Fixed text of the prompts, measured on the public recipe package."""

from deepinfer.recipe.conversation import Effort, ModelVersion

_V4_HIGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_V4_MAX = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)


def _v41_effort(level: int) -> str:
    return f"Reasoning Effort: {level} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


EFFORT_HEADERS: dict[ModelVersion, dict[Effort, str]] = {
    "v4": {"low": "", "high": _V4_HIGH, "xhigh": _V4_HIGH, "max": _V4_MAX},
    "v4.1": {"low": _v41_effort(50), "high": _v41_effort(75), "xhigh": _v41_effort(75), "max": _v41_effort(100)},
}

# {s} is the space after the DSML mark (V4.1 only), {b} the name of the tool block.
TOOLS_OPENING = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜{s}{b}>" block like the following:

<｜DSML｜{s}{b}>
<｜DSML｜{s}invoke name="$TOOL_NAME">
<｜DSML｜{s}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜{s}parameter>
...
</｜DSML｜{s}invoke>
<｜DSML｜{s}invoke name="$TOOL_NAME2">
...
</｜DSML｜{s}invoke>
</｜DSML｜{s}{b}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_CLOSING = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"

FORMAT_OPENING = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
V4_JSON_OBJECT = (
    "\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
)

"""Formats that no output can violate, whatever the prompt asks for: python examples/structured_output.py"""

import json
import re

from deepinfer import LLM, SamplingParams

json_schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer", "minimum": 1}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
cases = [
    ("Please write a long story about a lighthouse.", {"schema_type": "regex", "schema": r"[A-Z]{2}-[0-9]{3}"}),
    (
        "Please ramble in natural language about Paris, no JSON.",
        {"schema_type": "json", "schema": json.dumps(json_schema)},
    ),
    (
        "Please write a long poem about the sea.",
        {"schema_type": "ebnf", "schema": 'root ::= "answer=" ("yes" | "no") ";level=" [1-3]'},
    ),
]

llm = LLM(model="nano")
outputs = llm.generate(
    prompts=[prompt for prompt, _ in cases],
    sampling_params=[SamplingParams(temperature=0, max_tokens=128, so_args=so_args) for _, so_args in cases],
)
texts = [output.outputs[0].text for output in outputs]
for (prompt, so_args), text in zip(cases, texts, strict=True):
    print(f"{prompt}\n  {so_args['schema_type']}: {text}")

assert re.fullmatch(r"[A-Z]{2}-[0-9]{3}", texts[0])
assert set(json.loads(texts[1])) == {"city", "inhabitants"}
assert re.fullmatch(r"answer=(yes|no);level=[1-3]", texts[2])

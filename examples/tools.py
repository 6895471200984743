"""A tool-call round trip with a running `deepinfer serve`: python examples/tools.py [BASE_URL]

The model asks for a function, this program runs it, and the model answers with what it returned.
"""

import json
import sys
from typing import Any

from openai import OpenAI


def get_weather(city: str) -> dict[str, Any]:
    """A made-up forecast."""
    return {"temperature": 21, "sky": "sunny"}


FUNCTIONS = {"get_weather": get_weather}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather for a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
while True:
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=128, temperature=0)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = FUNCTIONS[call.function.name](**arguments)
        print(f"{call.function.name}({arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
print(message.content)

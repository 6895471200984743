"""A conversation with a running `deepinfer serve`, streamed: python examples/chat_client.py [BASE_URL]"""

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = []
for question in ("What is the capital of Italy?", "And of France?"):
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    answer = ""
    for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            print(text, end="", flush=True)
            answer += text
        if chunk.usage:
            print(f"\n({chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens)")
    messages.append({"role": "assistant", "content": answer})

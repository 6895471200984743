"""Requests in, prompt and token IDs, stream out.  Usable alone: imports no torch and nothing of the engine.

Way in::

    tokenizer = Tokenizer.from_file("tokenizer.json")        # ValueError when a needed control token is missing
    prompt = render_chat(messages, tools, thinking=True)      # Chat Completions messages (dicts) -> Prompt
    prompt.text, prompt.control_ranges                        # str, ((start, end), ...) in code points
    token_ids = encode_prompt(prompt, tokenizer)              # list[int]; client text never becomes a control token

    request = convert_chat_request(body)                      # a whole body (dict, str or bytes) -> ConversationRequest
    prompt = render(request.conversation, request.model_version)
    request.inference                                         # InferenceOptions: max_tokens, temperature, top_p, ...
    request.parsing                                           # ParsingOptions for the way out
    request.stream                                            # bool
    # convert_responses_request(body), convert_messages_request(body): the same for the other two protocols

Way out::

    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push(token_ids)                        # never ends inside a character; BOS, EOS, pad give none
    text += detokenizer.finish()                              # what is left at the end of the sequence

    parser = StreamParser(request.parsing)                    # or StreamParser(ParsingOptions(...))
    for event in parser.push(text):
        match event:
            case ReasoningText(text): ...
            case AnswerText(text): ...
            case ToolCallStart(index, id, name): ...
            case ToolCallArguments(index, text): ...          # JSON text, in pieces
    parser.finish("length")                                   # the rest, from why the engine ended ("stop": by itself)
    parser.stopped                                            # True once a stop string matched: abort the sequence
    parser.finish_reason("stop")                              # "stop" | "length" | "tool_calls" | "content_filter"

    stream = ChatStream(request, id="chatcmpl-1", model="...", created=0, tokenizer=tokenizer)   # one choice
    chunks = stream.start(prompt_tokens=11, cached_tokens=4)  # each call returns a list of chunk dicts
    chunks = stream.push_tokens(token_ids)                    # or push_text(text, token_count)
    chunks = stream.finish("stop")                            # "stop" | "length" | "content_filter"; then stream.done
    stream.response()                                         # the body of a request that does not stream
    # ResponsesStream and MessagesStream do the same; stream.event_name(event) names the server-sent event

Stop strings alone (plain completions): ``StopStrings(["END"]).push(text) -> (text to emit, matched string or None)``.

Plain text without control tokens: ``tokenizer.encode_text(text)``, ``tokenizer.decode(token_ids)``.
Control tokens by role: ``tokenizer.control_id("eos")`` (roles: control_tokens.CONTROL_TOKENS).
Training dialogues: ``render_chat(messages, ..., add_generation_prompt=False)`` ends after the last turn (EOS).

Every refused request is a ValueError (RequestError, with ``param`` naming the field); bad input raises nothing else.
"""

from deepinfer.recipe.chat_request import convert_chat_request, render_chat
from deepinfer.recipe.chat_stream import ChatStream
from deepinfer.recipe.conversation import Conversation, ImageSource, Message, ToolCall, ToolDefinition
from deepinfer.recipe.detokenizer import Detokenizer
from deepinfer.recipe.encoding import encode_prompt
from deepinfer.recipe.errors import ConversionError, RequestError
from deepinfer.recipe.events import AnswerText, Event, ReasoningText, ToolCallArguments, ToolCallStart
from deepinfer.recipe.matching import StopStrings
from deepinfer.recipe.messages_request import convert_messages_request
from deepinfer.recipe.messages_stream import MessagesStream
from deepinfer.recipe.output_reader import OutputReader, Usage
from deepinfer.recipe.prompt import Prompt
from deepinfer.recipe.render import render
from deepinfer.recipe.request import (
    ConversationRequest,
    ConversionOptions,
    InferenceOptions,
    OutputConstraint,
    ParsingOptions,
)
from deepinfer.recipe.responses_request import convert_responses_request
from deepinfer.recipe.responses_stream import ResponsesStream
from deepinfer.recipe.stream_parser import StreamParser
from deepinfer.recipe.tokenizer import Tokenizer

__all__ = [
    "AnswerText",
    "ChatStream",
    "Conversation",
    "ConversationRequest",
    "ConversionError",
    "ConversionOptions",
    "Detokenizer",
    "Event",
    "ImageSource",
    "InferenceOptions",
    "Message",
    "MessagesStream",
    "OutputConstraint",
    "OutputReader",
    "ParsingOptions",
    "Prompt",
    "ReasoningText",
    "RequestError",
    "ResponsesStream",
    "StopStrings",
    "StreamParser",
    "Tokenizer",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolDefinition",
    "Usage",
    "convert_chat_request",
    "convert_messages_request",
    "convert_responses_request",
    "encode_prompt",
    "render",
    "render_chat",
]

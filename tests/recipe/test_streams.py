"""Streams from token IDs, beyond the vectors: log probabilities, cut characters, irregular custom tool input."""

import pytest

from deepinfer.recipe import ChatStream, ResponsesStream, Tokenizer, convert_chat_request, convert_responses_request

MODEL = {"model": "DeepSeek-V4.1-Flash", "stream": True}


def test_a_cut_character_is_not_shown_but_counted(small_tokenizer: Tokenizer) -> None:
    request = convert_chat_request({**MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": True})
    stream = ChatStream(request, id="1", model="m", created=0, tokenizer=small_tokenizer)
    token_ids = [*small_tokenizer.encode_text("ok</think>a"), *small_tokenizer.encode_text("👧")[:2]]
    stream.start(prompt_tokens=3)
    for token_id in token_ids:
        stream.push_tokens([token_id], [(-0.5, [(token_id, -0.5)])])
    last = stream.finish("length")[-1]
    assert last["usage"]["completion_tokens"] == len(token_ids)
    response = stream.response()
    assert response["choices"][0]["message"] == {"role": "assistant", "content": "a", "reasoning_content": "ok"}
    assert [entry["token"] for entry in response["choices"][0]["logprobs"]["content"]] == ["a"]
    assert stream.push_tokens(token_ids) == [] == stream.finish()


def test_a_part_of_a_character_has_its_bytes_in_the_log_probabilities(small_tokenizer: Tokenizer) -> None:
    body = {**MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": True, "thinking": {"type": "disabled"}}
    stream = ChatStream(convert_chat_request(body), id="1", model="m", created=0, tokenizer=small_tokenizer)
    token_ids = small_tokenizer.encode_text("👧")
    assert len(token_ids) > 1
    chunks = [c for token_id in token_ids for c in stream.push_tokens([token_id], [(-1.0, ())])]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["👧"]
    entries = chunks[0]["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "👧".encode()
    assert entries[0]["token"].startswith("\\xf0")
    with pytest.raises(ValueError, match="1 log probabilities for 2 token IDs"):
        stream.push_tokens(token_ids[:2], [(-1.0, ())])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('<｜DSML｜ parameter name="input" string="true">a\n"b\\</｜DSML｜ parameter></｜DSML｜ invoke>', 'a\n"b\\'),
        ('<｜DSML｜ parameter name="code" string="true">x</｜DSML｜ parameter></｜DSML｜ invoke>', '{"code": "x"}'),
        ('<｜DSML｜ parameter name="inp', '{"inp'),
        ("</｜DSML｜ invoke>", "{}"),
    ],
)
def test_custom_tool_input(call: str, expected: str) -> None:
    """The deltas always join to the input of the finished item."""
    body = {**MODEL, "input": "x", "tools": [{"type": "custom", "name": "run"}], "reasoning": {"effort": "none"}}
    stream = ResponsesStream(convert_responses_request(body), id="1", model="m", created=0)
    events = stream.start()
    for char in '<｜DSML｜ calls>\n<｜DSML｜ invoke name="run">\n' + call:
        events += stream.push_text(char, 1)
    events += stream.finish()
    assert "".join(e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta") == expected
    assert stream.response()["output"][0]["input"] == expected
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

"""Messages between server and engine process: nothing is lost or changed on the way, however the bytes arrive."""

import math
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine.messages import (
    Abort,
    AddRequest,
    Compiled,
    Connection,
    EngineMessage,
    Refused,
    ServerMessage,
    StepOutputs,
    output_from_wire,
    output_to_wire,
    params_to_wire,
)
from deepinfer.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput, TokenLogprob
from deepinfer.params import RepetitionDetection, SamplingParams

token_ids = st.integers(0, 2**31)
logprob_values = st.floats(max_value=0.0, allow_nan=False)  # -inf included


@st.composite
def completions(draw: st.DrawFn) -> CompletionOutput:
    tokens = draw(st.lists(token_ids, max_size=4))
    top = st.lists(st.tuples(token_ids, logprob_values), max_size=3)
    logprobs = None
    if draw(st.booleans()):
        logprobs = [TokenLogprob(token_id, draw(logprob_values), draw(top)) for token_id in tokens]
    reason = draw(st.sampled_from([None, "stop", "length", "abort", "error"]))
    return CompletionOutput(
        draw(st.integers(0, 127)), tokens, logprobs, reason, draw(st.none() | token_ids | st.text())
    )


times = st.none() | st.floats(0, 1e9)
outputs = st.builds(
    RequestOutput,
    st.integers(0, 2**40).map(str),
    st.lists(token_ids, max_size=3),
    st.lists(completions(), max_size=3),
    st.booleans(),
    st.builds(RequestMetrics, st.floats(0, 1e9), times, times, times, st.integers(0, 100)),
    st.none() | st.text(),
)


@given(st.lists(outputs, max_size=5))
def test_outputs_arrive_as_they_were(sent: list[RequestOutput]) -> None:
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7)
    left, right = socket.socketpair()
    with left, right:
        Connection(left, ServerMessage).send(StepOutputs([output_to_wire(output) for output in sent], stats))
        [message] = Connection(right, EngineMessage).receive()
    assert isinstance(message, StepOutputs) and message.stats == stats
    for got, want in zip(message.outputs, sent, strict=True):
        assert output_from_wire(got, want.request_id, want.prompt_token_ids) == want


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(10, 99),
        temperature=st.floats(0, 2),
        top_p=st.floats(0.1, 1),
        top_k=st.integers(-1, 50),
        seed=st.none() | st.integers(0, 2**63 - 1),
        stop_token_ids=st.lists(st.integers(0, 500)),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 10),
        logprobs=st.none() | st.integers(0, 20),
        golden_token_ids=st.none() | st.lists(st.integers(0, 500), min_size=1),
        n=st.integers(1, 8),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 500), st.floats(-100, 100)),
        stop=st.lists(st.text(min_size=1)),
        repetition_detection=st.none()
        | st.builds(RepetitionDetection, max_pattern_size=st.just(9), min_count=st.just(2)),
        thinking_end_token_ids=st.lists(st.integers(0, 500)),
    )
)
def test_sampling_params_arrive_as_they_were(params: SamplingParams) -> None:
    left, right = socket.socketpair()
    with left, right:
        Connection(left, EngineMessage).send(AddRequest(1, [1, 2], params_to_wire(params)))
        [message] = Connection(right, ServerMessage).receive()
    assert isinstance(message, AddRequest) and SamplingParams(**message.params) == params


@given(st.lists(st.integers(1, 30)), st.integers(0, 40))
def test_messages_in_pieces(pieces: list[int], lost: int) -> None:
    """Any split of the bytes; when the sender dies, what had arrived whole is delivered before EOFError."""
    sent = [Abort(0), AddRequest(1, list(range(40)), {"top_k": 3}), Abort(2**40)]
    left, right = socket.socketpair()
    with right:
        Connection(left, EngineMessage).send(*sent)
        data = right.recv(1 << 16)
        left.close()
    writer, reader = socket.socketpair()
    connection: Connection[ServerMessage] = Connection(reader, ServerMessage)
    got: list[ServerMessage] = []
    kept = data[: len(data) - lost]
    position = 0
    with reader:
        for size in [*pieces, len(data)]:
            if kept[position : position + size]:
                writer.sendall(kept[position : position + size])
                got += connection.receive()
            position += size
        writer.close()
        with pytest.raises(EOFError):
            connection.receive()
    assert got == sent[: len(got)]
    if lost == 0:
        assert got == sent


def test_a_reader_that_is_slow_gets_everything_later() -> None:
    left, right = socket.socketpair()
    sender: Connection[EngineMessage] = Connection(left, EngineMessage)
    receiver: Connection[ServerMessage] = Connection(right, ServerMessage)
    prompts = [[number] * 100_000 for number in range(1000, 1010)]
    with left, right:
        sender.send(*(AddRequest(number, prompt, {}) for number, prompt in enumerate(prompts)))
        assert sender.has_unsent
        got: list[ServerMessage] = []
        while len(got) < len(prompts):
            got += receiver.receive()
            sender.flush()
        assert not sender.has_unsent
    assert [message.prompt_token_ids for message in got if isinstance(message, AddRequest)] == prompts


def test_minus_infinity_survives() -> None:
    output = RequestOutput(
        "1", [], [CompletionOutput(0, [5], [TokenLogprob(5, -math.inf, [])])], False, RequestMetrics(0.0)
    )
    assert output_from_wire(output_to_wire(output), "1", []) == output


def test_text_that_cannot_be_encoded_arrives_as_escapes() -> None:
    """The error of a request may repeat a lone surrogate of its schema: the other messages come as they are."""
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7)
    made = RequestOutput(
        "5", [], [CompletionOutput(0, [7], None, "error", "\udc80")], True, RequestMetrics(1.0), "\ud800 é"
    )
    left, right = socket.socketpair()
    with left, right:
        sent = [Compiled(1, "no \ud800"), Refused(2, "é"), StepOutputs([output_to_wire(made)], stats)]
        Connection(left, ServerMessage).send(*sent)
        compiled, refused, step = Connection(right, EngineMessage).receive()
    assert compiled == Compiled(1, "no \\ud800") and refused == Refused(2, "é")
    assert isinstance(step, StepOutputs) and step.stats == stats
    output = output_from_wire(step.outputs[0], "5", [])
    assert output.error == "\\ud800 é" and output.outputs[0].stop_reason == "\\udc80"
    assert output.outputs[0].token_ids == [7] and output.metrics == RequestMetrics(1.0)

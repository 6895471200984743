"""Messages between a server and its engine process: msgpack structs without field names, framed by their length.

A request is known by a number that is never used twice, so that news of one that is gone cannot reach another.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Generic, Literal, TypeVar

import msgspec

from deepinfer.errors import encodable
from deepinfer.observability.expert_record import ExpertRecord
from deepinfer.observability.stats import WindowStats
from deepinfer.outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)
from deepinfer.params import SamplingParams

ExpertCommand = Literal["start", "stop", "dump"]

_LENGTH = struct.Struct("!I")
_RECEIVE_BYTES = 1 << 20


class _Message(msgspec.Struct, array_like=True, gc=False):
    pass


class Start(_Message, tag=1):
    """The first message of the server. `config` holds the fields of EngineConfig."""

    model: str
    config: dict[str, Any]
    log_level: str
    log_format: str = "text"


class AddRequest(_Message, tag=2):
    """`params` holds the fields of SamplingParams that are not at their default."""

    number: int
    prompt_token_ids: list[int]
    params: dict[str, Any]


class Abort(_Message, tag=3):
    """End a request, wherever it is. Unknown numbers are passed over."""

    number: int


class RecordExperts(_Message, tag=4):
    """Answered with an ExpertReport, whatever the command."""

    number: int
    command: ExpertCommand


class Compile(_Message, tag=5):
    """Have a grammar ready. Answered with Compiled, when it is."""

    number: int
    so_args: dict[str, Any]


class Pause(_Message, tag=6):
    """Make no step until a further Pause says so, and keep what runs. Answered with Paused."""

    number: int
    pause: bool


class CancelCompile(_Message, tag=7):
    """Nobody waits for the Compile of this number any more. Not answered, and neither is that."""

    number: int


ServerMessage = Start | AddRequest | Abort | RecordExperts | Compile | Pause | CancelCompile


class Ready(_Message, tag=1):
    """The engine is loaded and takes requests."""

    vocab_size: int
    max_model_len: int
    stats: EngineStats
    device: str


class Failed(_Message, tag=2):
    """The engine could not be started. `kind` is "value" (bad input), "os" or the name of another exception."""

    kind: str
    message: str
    filename: str | None = None


RefusalKind = Literal["value", "busy"]  # ValueError, BusyError


class Refused(_Message, tag=3):
    """A request that passed the server's checks, but not the engine's."""

    number: int
    message: str
    kind: RefusalKind = "value"


_TokenLogprob = tuple[float, list[int], list[float]]  # logprob, top token ids, top logprobs
_PromptLogprob = tuple[float, list[int], list[float], int | None]  # and the rank


class Completion(_Message):
    """CompletionOutput."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[_TokenLogprob] | None = None


class Output(_Message):
    """RequestOutput without what the server knows already."""

    number: int
    completions: list[Completion]
    finished: bool
    metrics: tuple[float, float | None, float | None, float | None, int]
    error: str | None
    prompt_logprobs: list[_PromptLogprob | None] | None = None  # behind those of the PromptPart messages


class StepOutputs(_Message, tag=4):
    """The news of all requests of one step, and the state of the engine after it."""

    outputs: list[Output]
    stats: EngineStats


class Heartbeat(_Message, tag=5):
    """Sent about once a second, busy or idle, and when the last request is done. `totals` count from the start."""

    stats: EngineStats
    window: WindowStats
    totals: dict[str, float]


class ExpertReport(_Message, tag=6):
    """The expert record of the engine's statistics; `counts` [layers][experts] only if they were asked for."""

    number: int
    is_recording: bool
    num_steps: int
    counts: list[list[int]] | None = None


class Compiled(_Message, tag=7):
    """`error` says why there is no such grammar."""

    number: int
    error: str | None = None
    kind: RefusalKind = "value"


class Paused(_Message, tag=8):
    """No step is in progress, or steps go on."""

    number: int


class PromptPart(_Message, tag=9):
    """RequestOutput.prompt_logprobs of the next tokens of a prompt, as soon as they are known."""

    number: int
    prompt_logprobs: list[_PromptLogprob | None]


EngineMessage = Ready | Failed | Refused | StepOutputs | Heartbeat | ExpertReport | Compiled | Paused | PromptPart


def record_experts(experts: ExpertRecord, command: ExpertCommand, number: int = 0) -> ExpertReport:
    """Obey the command that came under this number; in the engine's thread."""
    if command == "start":
        experts.start()
    elif command == "stop":
        experts.stop()
    counts = experts.counts if command == "dump" else None
    return ExpertReport(number, experts.is_recording, experts.num_steps, None if counts is None else counts.tolist())


_DEFAULT_PARAMS = SamplingParams()
_PARAM_NAMES = [field.name for field in fields(SamplingParams) if field.init]


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Fields of SamplingParams that are not at their default."""
    given = ((name, getattr(params, name)) for name in _PARAM_NAMES)
    return {name: value for name, value in given if value != getattr(_DEFAULT_PARAMS, name)}


def output_to_wire(output: RequestOutput) -> Output:
    """The engine's request id is the request's number."""
    times = output.metrics
    return Output(
        int(output.request_id),
        [
            Completion(
                completion.index,
                completion.token_ids,
                completion.finish_reason,
                completion.stop_reason,
                None if completion.logprobs is None else [_logprob_to_wire(item) for item in completion.logprobs],
            )
            for completion in output.outputs
        ],
        output.finished,
        (
            times.arrival_time,
            times.first_scheduled_time,
            times.first_token_time,
            times.finished_time,
            times.num_preemptions,
        ),
        output.error,
        None if output.prompt_logprobs is None else prompt_to_wire(output.prompt_logprobs),
    )


def prompt_to_wire(entries: list[TokenLogprob | None]) -> list[_PromptLogprob | None]:
    """Entries of prompt tokens; their ids are known on the other side."""
    return [None if entry is None else (*_logprob_to_wire(entry), entry.rank) for entry in entries]


def _logprob_to_wire(item: TokenLogprob) -> _TokenLogprob:
    return item.logprob, [token_id for token_id, _ in item.top], [value for _, value in item.top]


def output_from_wire(
    output: Output, request_id: str, prompt_token_ids: list[int], known: list[TokenLogprob | None] | None = None
) -> RequestOutput:
    """`known`: what PromptPart messages have brought of its prompt."""
    completions = []
    for item in output.completions:  # a loop: this runs once a token
        logprobs = None if item.logprobs is None else _logprobs_from_wire(item)
        completions.append(CompletionOutput(item.index, item.token_ids, logprobs, item.finish_reason, item.stop_reason))
    metrics = RequestMetrics(*output.metrics)
    prompt = None
    if output.prompt_logprobs is not None:
        prompt = known or []
        prompt += prompt_from_wire(output.prompt_logprobs, prompt_token_ids[len(prompt) :])
    return RequestOutput(request_id, prompt_token_ids, completions, output.finished, metrics, output.error, prompt)


def prompt_from_wire(items: list[_PromptLogprob | None], token_ids: list[int]) -> list[TokenLogprob | None]:
    """Entries of the first of these prompt tokens."""
    entries: list[TokenLogprob | None] = []
    for token_id, item in zip(token_ids, items, strict=False):
        if item is None:
            entries.append(None)
        else:
            logprob, top_ids, top_logprobs, rank = item
            entries.append(TokenLogprob(token_id, logprob, list(zip(top_ids, top_logprobs, strict=True)), rank))
    return entries


def _logprobs_from_wire(completion: Completion) -> list[TokenLogprob] | None:
    if completion.logprobs is None:
        return None
    return [
        TokenLogprob(token_id, logprob, list(zip(top_ids, top_logprobs, strict=True)))
        for token_id, (logprob, top_ids, top_logprobs) in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(entry) for key, entry in value.items()}
    return [_encodable(entry) for entry in value] if isinstance(value, list | tuple) else value


Received = TypeVar("Received")


class Connection(Generic[Received]):
    """Messages of the type `received` in, any message out, over a non-blocking stream socket. One thread uses it."""

    def __init__(self, sock: socket.socket, received: Any):
        sock.setblocking(False)
        self.sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether the other side is slow to read: call `flush` when the socket can be written to."""
        return bool(self._outgoing)

    def send(self, *messages: ServerMessage | EngineMessage) -> None:
        """Never blocks: what the socket does not take is kept for `flush`. Raises OSError if the other side is gone."""
        for message in messages:
            payload = self._encode(message)
            self._outgoing += _LENGTH.pack(len(payload)) + payload
        self.flush()

    def _encode(self, message: ServerMessage | EngineMessage) -> bytes:
        try:
            return self._encoder.encode(message)
        except UnicodeEncodeError:  # of an error that repeats a client's text, say: rare, and no reason to end
            return self._encoder.encode(_encodable(msgspec.to_builtins(message)))

    def flush(self) -> None:
        """Send what the socket takes of what is unsent; never blocks. Raises OSError if the other side is gone."""
        try:
            while self._outgoing:
                del self._outgoing[: self.sock.send(self._outgoing)]
        except BlockingIOError:
            pass

    def receive(self) -> list[Received]:
        """All messages that have arrived whole; never blocks. Raises EOFError if there are none and never will be."""
        try:
            while data := self.sock.recv(_RECEIVE_BYTES):
                self._incoming += data
                if len(data) < _RECEIVE_BYTES:
                    return list(self._take())
        except BlockingIOError:
            return list(self._take())
        except OSError:
            pass
        messages = list(self._take())
        if not messages:
            raise EOFError
        return messages

    def _take(self) -> Iterator[Received]:
        start = 0
        view = memoryview(self._incoming)
        try:
            while len(view) - start >= _LENGTH.size:
                end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
                if end > len(view):
                    break
                yield self._decoder.decode(view[start + _LENGTH.size : end])
                start = end
        finally:
            view.release()
            del self._incoming[:start]

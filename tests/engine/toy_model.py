"""A small real model with a paged cache and per-sequence state, and the same function on a whole sequence.

Logits depend on every token read back through the block table and on a running sum kept in the state slot,
so a wrong block, slot, position or reset changes the tokens.
"""

import numpy as np
import torch

from deepinfer.engine.cuda_graph import DecodeGraphs
from deepinfer.engine.step_buffers import first_rows
from deepinfer.engine.swap import CacheRows, as_bytes
from deepinfer.models.inputs import ModelInputs
from deepinfer.params import SamplingParams
from deepinfer.speculation.slot_tokens import SlotTokens

VOCAB_SIZE = 61
MAX_POSITIONS = 4096
_rng = np.random.default_rng(7)
CACHE_COEF = _rng.integers(1, 2**62, MAX_POSITIONS)
STATE_COEF = _rng.integers(1, 2**62, MAX_POSITIONS)
TOKEN_KEYS = _rng.integers(0, 2**63, 1024, dtype=np.uint64)


def logits_of(cache_hash: int, state_hash: int, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    z = TOKEN_KEYS[:vocab_size] ^ np.uint64((cache_hash * 31 + state_hash) % 2**64)
    for shift in (30, 27, 31):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((z >> np.uint64(40)).astype(np.float64) / 2**24 * 6).astype(np.float32)


def weighted_sum(token_ids: np.ndarray, coef: np.ndarray) -> int:
    return int(((token_ids + 1) * coef).sum())  # int64 arithmetic wraps around


class ToyRunner:
    """Implements deepinfer.engine.step.Runner.

    The running sum of position p lies at p % room: with `room` - 1 drafts in a step, not one entry is to spare.
    `padded`: decode steps run in padded shapes, as they would in CUDA graphs.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int = 2048,
        vocab_size: int = VOCAB_SIZE,
        room: int = 1,
        padded: bool = False,
    ):
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.vocab_size = vocab_size
        self.cache = np.full(num_blocks * block_size, -1)
        self.state = np.full((num_slots + 1, room), -1)
        self.steps: list[tuple[bool, int]] = []
        self.poison: int | None = None  # a step that sees this token fails
        self.graphs: DecodeGraphs | None = None
        if padded:
            slot_tokens = SlotTokens.allocate(num_slots + 1, room - 1, "cpu")
            self.graphs = DecodeGraphs(self.forward_padded, num_slots, 4, num_blocks, "cpu", slot_tokens=slot_tokens)

    def cache_rows(self) -> CacheRows:
        blocks, slots = torch.from_numpy(self.cache), torch.from_numpy(self.state)
        return CacheRows(as_bytes([blocks.view(self.num_blocks, -1)]), as_bytes([slots]))

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        if self.graphs is not None and not inputs.is_prefill:
            return self.graphs.run(inputs)
        return self.forward(inputs)

    def forward_padded(self, inputs: ModelInputs) -> torch.Tensor:
        num_rows = int((inputs.state_slots > 0).sum())
        logits = torch.full((len(inputs.token_ids), self.vocab_size), torch.nan)
        logits[:num_rows] = self.forward(first_rows(inputs, num_rows))
        return logits

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        check_contract(inputs)
        token_ids, positions = inputs.token_ids.numpy(), inputs.positions.numpy()
        if self.poison is not None and self.poison in token_ids:
            raise RuntimeError("poisoned token")
        self.steps.append((inputs.is_prefill, len(token_ids)))
        lengths = inputs.query_start.diff()
        tables = inputs.block_tables[torch.repeat_interleave(torch.arange(len(lengths)), lengths)].numpy()
        block, offset = np.divmod(positions, self.block_size)
        slots = tables[np.arange(len(positions)), block].astype(np.int64) * self.block_size + offset
        assert slots.min() >= self.block_size, "the null block was written"
        assert len(set(slots)) == len(slots), "two tokens share a physical slot"
        self.cache[slots] = token_ids
        logits, wanted = {}, inputs.logits_rows.tolist()
        starts, room = inputs.query_start.tolist(), self.state.shape[1]
        for i, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
            chunk, at = token_ids[begin:end], positions[begin:end]
            slot = int(inputs.state_slots[i])
            base = 0 if at[0] == 0 else self.state[slot, (at[0] - 1) % room]
            with np.errstate(over="ignore"):
                sums = base + ((chunk + 1) * STATE_COEF[at]).cumsum()  # int64 arithmetic wraps around
            self.state[slot, at[-room:] % room] = sums[-room:]
            where = np.arange(int(inputs.context_lens[i]))
            table = inputs.block_tables[i].numpy()
            history = self.cache[table[where // self.block_size] * self.block_size + where % self.block_size]
            for row in (row for row in wanted if begin <= row < end):
                context = int(positions[row]) + 1
                seen = weighted_sum(history[:context], CACHE_COEF[:context])
                logits[row] = logits_of(seen, int(sums[row - begin]), self.vocab_size)
        rows = [logits[row] for row in wanted]
        return torch.from_numpy(np.array(rows, np.float32).reshape(len(rows), self.vocab_size))


def check_contract(inputs: ModelInputs) -> None:
    int64 = (inputs.token_ids, inputs.positions, inputs.logits_rows)
    int32 = (inputs.query_start, inputs.context_lens, inputs.block_tables, inputs.state_slots)
    assert all(t.dtype == torch.int64 for t in int64) and all(t.dtype == torch.int32 for t in int32)
    slots, positions = inputs.state_slots.tolist(), inputs.positions.tolist()
    assert min(slots) > 0 and min(inputs.token_ids.tolist()) >= 0
    assert inputs.query_start[0] == 0 and inputs.query_start[-1] == len(inputs.token_ids) == len(inputs.positions)
    assert len(inputs.block_tables) == len(slots) == len(inputs.context_lens) == len(inputs.query_start) - 1
    if inputs.is_prefill:
        assert len(set(slots)) == len(slots)
        return
    assert len(inputs.token_ids) == len(slots) == len(inputs.logits_rows)
    assert [position + 1 for position in positions] == inputs.context_lens.tolist()
    seen: set[int] = set()
    for row, slot in enumerate(slots):  # rows of a sequence lie side by side, at consecutive positions
        if row and slots[row - 1] == slot:
            assert positions[row] == positions[row - 1] + 1
        else:
            assert slot not in seen
        seen.add(slot)


def full_logits(token_ids: list[int]) -> np.ndarray:
    """Next-token logits [VOCAB_SIZE] after a whole sequence: the oracle, without any cache."""
    ids = np.array(token_ids)
    return logits_of(weighted_sum(ids, CACHE_COEF[: len(ids)]), weighted_sum(ids, STATE_COEF[: len(ids)]))


def greedy_oracle(
    prompt: list[int], params: SamplingParams, eos: set[int], max_model_len: int
) -> tuple[list[int], str, int | None]:
    """(output tokens, finish reason, stop reason) of one greedy request, one token at a time."""
    output: list[int] = []
    while True:
        logits = full_logits(prompt + output)
        if len(output) < params.min_tokens:
            banned = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
            logits[list(banned)] = -np.inf
        token = int(np.argmax(logits))
        output.append(token)
        if token in params.stop_token_ids:
            return output, "stop", token
        if token in eos and not params.ignore_eos:
            return output, "stop", None
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, "length", None

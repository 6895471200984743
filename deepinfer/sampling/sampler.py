"""Choose one token a row, in two halves: `launch_sample` only asks the device, `LaunchedSample.read` waits.

On a GPU nothing in `launch_sample` makes the host wait: parameters go up in one pinned tensor, the tokens may feed the
next step on the device, and what the host wants of them is copied down behind them.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.outputs import TokenLogprob
from deepinfer.params import SamplingParams
from deepinfer.sampling.bitmask import token_bitmask
from deepinfer.sampling.logprobs import LogprobGroup, launch_logprobs, read_logprobs
from deepinfer.sampling.penalties import edit_logits
from deepinfer.sampling.transfer import Download, upload
from deepinfer.sampling.types import SampledSequence

CANDIDATES, COUNTER, GIVEN = 3, 5, 6  # rows of `pack_parameters`
NO_TOKEN = -1  # a row whose token is not given


@dataclass(slots=True)
class SamplerOutput:
    """One entry a row. `invalid_rows` had no finite largest logit: their tokens mean nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    invalid_rows: list[int]


@dataclass(slots=True)
class LaunchedSample:
    """Tokens that the device is drawing. `token_ids` int64 [R] is for the next step's input; `read` waits for them."""

    token_ids: Tensor
    groups: list[LogprobGroup]
    download: Download  # token ids, largest logits, then the tensors of each group

    def read(self) -> SamplerOutput:
        """Wait for the tokens and their log-probabilities."""
        tokens, largest, *rest = self.download.read()
        token_ids: list[int] = tokens.tolist()
        is_valid = torch.isfinite(largest)
        invalid_rows = [] if is_valid.all() else (~is_valid).nonzero().flatten().tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
        for position, group in enumerate(self.groups):
            for row, entry in read_logprobs(group, token_ids, rest[3 * position : 3 * position + 3]).items():
                logprobs[row] = entry
        return SamplerOutput(token_ids, logprobs, invalid_rows)


def sample(logits: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: Collection[int] = ()) -> SamplerOutput:
    """Next token of each sequence from logits float32 [R, V] (not modified), R = len(sequences)."""
    return launch_sample(logits, sequences, eos_token_ids).read()


class DrawParameters(NamedTuple):
    """How the tokens of R rows are drawn: arguments of ops.draw_tokens, in its order."""

    temperature: Tensor
    num_candidates: Tensor
    most_candidates: int
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    counters: Tensor


# Logits float32 [R, V] after all edits, how they are drawn from, and the tokens drawn int64 [R] -> those to take.
Choose = Callable[[Tensor, DrawParameters, Tensor], Tensor]


def launch_sample(
    logits: Tensor,
    sequences: Sequence[SampledSequence],
    eos_token_ids: Collection[int] = (),
    choose: Choose | None = None,
    parameters: np.ndarray | None = None,
    started: Future[np.ndarray] | None = None,
    are_plain: bool = False,
) -> LaunchedSample:
    """`sample` in two halves: this one asks the device for the tokens, `read` waits for them.

    choose: may take other tokens than those drawn; None: those.
    parameters: `pack_parameters` of the sequences, from whoever keeps them; None: they are packed here.
    started: `token_bitmask` of the sequences, from whoever had it started; None: they are found here.
    are_plain: each of the sequences `is_plain`, and need not be asked anything.
    """
    if not sequences:  # a chunk that ends no prompt: `read` waits for the step all the same
        none = torch.empty(0, dtype=torch.int64, device=logits.device)
        return LaunchedSample(none, [], Download([none, logits[:, 0]]))
    edited = logits if are_plain else edit_logits(logits, sequences, eos_token_ids)
    bitmask = None
    if not are_plain:
        bitmask = token_bitmask(sequences, logits.shape[1]) if started is None else started.result()
    if bitmask is not None:
        edited = ops.apply_token_bitmask(edited, upload(bitmask, logits.device))
    packed = pack_parameters(sequences, logits.shape[1]) if parameters is None else parameters
    is_forced = bool((packed[GIVEN] != NO_TOKEN).any())
    if is_forced or packed[0].any():
        drawing, given = draw_parameters(packed, logits.shape[1], logits.device)
    else:
        drawing, given = _unpacked(greedy_parameters(packed.shape[1], logits.shape[1], logits.device), 0)
    token_ids, largest = ops.draw_tokens(edited, *drawing)
    if choose is not None:
        token_ids = choose(edited, drawing, token_ids)
    if is_forced:
        token_ids = torch.where(given == NO_TOKEN, token_ids, given)
    groups = [] if are_plain else launch_logprobs(logits, token_ids, sequences)
    download = Download([token_ids, largest, *(tensor for group in groups for tensor in group.tensors)])
    return LaunchedSample(token_ids, groups, download)


def is_plain(sequence: SampledSequence) -> bool:
    """Whether a sequence asks for nothing but tokens drawn by its `pack_parameters`."""
    params = sequence.params
    wants_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
    is_edited = params.edits_logits or sequence.constraint is not None
    return not (wants_logprobs or is_edited or params.gives_tokens)


def pack_parameters(sequences: Sequence[SampledSequence], vocab_size: int) -> np.ndarray:
    """int64 [7, R]: temperature (0: greedy), top_p, min_p (float64 bits), candidates, seed, counter, given token."""
    params = [seq.params for seq in sequences]
    packed = np.empty((7, len(sequences)), np.int64)
    floats = packed[:3].view(np.float64)
    floats[0] = [0.0 if p.is_greedy else p.temperature for p in params]
    floats[1] = [p.top_p for p in params]
    floats[2] = [p.min_p for p in params]
    packed[CANDIDATES] = vocab_size
    for row, p in enumerate(params):
        if not p.is_greedy and (p.top_k or p.force_topk):
            packed[CANDIDATES, row] = _num_candidates(p, vocab_size)
    packed[4] = np.array([seq.seed for seq in sequences], np.uint64).view(np.int64)
    packed[COUNTER] = [seq.num_output_tokens for seq in sequences]
    packed[GIVEN] = NO_TOKEN
    for row, p in enumerate(params):
        if p.gives_tokens:
            packed[GIVEN, row] = given_token(sequences[row])
    return packed


def draw_parameters(packed: np.ndarray, vocab_size: int, device: torch.device) -> tuple[DrawParameters, Tensor]:
    """Of `pack_parameters`, on the device; and the given tokens int64 [R]."""
    counts = packed[CANDIDATES]
    return _unpacked(upload(packed, device), int(counts.max(where=counts < vocab_size, initial=0)))


def _unpacked(parameters: Tensor, most_candidates: int) -> tuple[DrawParameters, Tensor]:
    temperature, top_p, min_p = parameters[:3].view(torch.float64)
    num_candidates, seeds, counters, given = parameters[3:]
    return DrawParameters(temperature, num_candidates, most_candidates, top_p, min_p, seeds, counters), given


def greedy_parameters(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """`pack_parameters` of greedy rows, on the device: nothing of a greedy row changes from step to step."""
    return _greedy_parameters(1 << (num_rows - 1).bit_length(), vocab_size, device)[:, :num_rows]


@lru_cache(maxsize=64)
def _greedy_parameters(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    packed = np.zeros((7, num_rows), np.int64)
    packed[1].view(np.float64).fill(1.0)
    packed[CANDIDATES], packed[GIVEN] = vocab_size, NO_TOKEN
    return upload(packed, device)


def _num_candidates(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k or vocab_size, params.force_topk or vocab_size, vocab_size)


def given_token(seq: SampledSequence) -> int:
    """The token that is taken whatever the logits say, or NO_TOKEN; of a sequence that `gives_tokens`."""
    params, position = seq.params, seq.num_output_tokens
    golden = params.golden_token_ids
    if golden is not None:  # past its end the sequence has just ended
        return golden[position] if position < len(golden) else NO_TOKEN
    budget, ends = params.thinking_token_budget, params.thinking_end_token_ids
    if budget is None or not 0 <= position - budget < len(ends):
        return NO_TOKEN
    thoughts = seq.token_ids[seq.num_prompt_tokens : seq.num_prompt_tokens + budget]
    return NO_TOKEN if ends[-1] in thoughts else ends[position - budget]

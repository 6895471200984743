"""Prompt lookup against a search written out, and the comparison of drafts with tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels import ops
from deepinfer.kernels.reference.speculation import NO_DRAFT


def lookup(text: list[int], num_drafts: int, min_match: int, max_match: int) -> tuple[list[int], int]:
    """The longest match, then the latest; the text goes on as it did there."""
    for length in range(min(max_match, len(text)), min_match - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):  # text[:end] ends with the match
            if text[end - length : end] == text[len(text) - length :]:
                extended = text[:]
                for _ in range(num_drafts):
                    extended.append(extended[len(extended) - (len(text) - end)])
                return extended[len(text) :], length
    return [NO_DRAFT] * num_drafts, 0


@settings(deadline=None)  # the first call may compile kernels
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=5),
    num_drafts=st.integers(1, 6),
    matches=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    spare=st.integers(0, 5),
    stale=st.integers(0, 2),
)
def test_lookup_finds_the_latest_of_the_longest_matches(
    texts: list[list[int]], num_drafts: int, matches: tuple[int, int], spare: int, stale: int
) -> None:
    longest = max(map(len, texts)) + spare
    history = torch.full((len(texts) + 1, longest + 8), stale, dtype=torch.int32)  # what is behind the text is not read
    slots = torch.randperm(len(texts)) + 1
    lengths = torch.ones(len(texts) + 1, dtype=torch.int64)
    for slot, text in zip(slots.tolist(), texts, strict=True):
        history[slot, : len(text)] = torch.tensor(text)
        lengths[slot] = len(text)
    drafts, length = ops.lookup_drafts(history, slots, lengths, longest, num_drafts, min(matches), max(matches))
    for row, text in enumerate(texts):
        assert (drafts[row].tolist(), int(length[row])) == lookup(text, num_drafts, min(matches), max(matches))


@settings(deadline=None)  # the first call may compile kernels
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.booleans(), min_size=5, max_size=5)), min_size=1, max_size=6))
def test_as_many_drafts_are_accepted_as_agree_in_a_row(cases: list[tuple[int, list[bool]]]) -> None:
    num_drafts = 4
    slots = torch.randperm(len(cases)) + 2
    tokens = torch.full((len(cases) + 2, 1 + num_drafts), 99)
    lengths = torch.arange(len(cases) + 2) + 10
    before, chosen, firsts, accepted_by_hand = tokens.clone(), [], [], []
    for slot, (count, agrees) in zip(slots.tolist(), cases, strict=True):
        firsts.append(len(chosen))
        for j in range(count + 1):
            chosen.append(1000 * slot + j)
            if j < num_drafts:
                tokens[slot, 1 + j] = 1000 * slot + j if agrees[j] else NO_DRAFT
        accepted_by_hand.append(next((j for j in range(count) if not agrees[j]), count))
    drafts = tokens.clone()
    counts = torch.tensor([count for count, _ in cases])
    got, accepted = ops.verify_tokens(torch.tensor(chosen), tokens, lengths, slots, torch.tensor(firsts), counts)
    assert accepted.tolist() == accepted_by_hand
    for row, (slot, count) in enumerate(zip(slots.tolist(), accepted_by_hand, strict=True)):
        assert got[row, : count + 1].tolist() == [1000 * slot + j for j in range(count + 1)]
        assert int(tokens[slot, 0]) == 1000 * slot + count and int(lengths[slot]) == slot + 10 + count + 1
    others = [0, 1]
    assert torch.equal(tokens[others], before[others]) and lengths[others].tolist() == [10, 11]
    assert torch.equal(tokens[:, 1:], drafts[:, 1:])  # they stay for whoever asks what they were

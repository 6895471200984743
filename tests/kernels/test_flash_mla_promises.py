"""What the Hopper attention kernel promises beside its values: whose bits depend on what, and how far caches may reach.

- A launch with the same arguments gives the same bits on every run, at any split (test_flash_mla.py).
- With a given split, a token's bits depend on neither the other tokens nor on absent slots behind its own.
- The split follows the number of tokens (`choose_split`), the only place where a batch's size changes an arithmetic
  order: results of different splits differ by rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.flash_mla.attention import sparse_attention
from deepinfer.kernels.flash_mla.launch import Inputs, launch
from tests.kernels.test_flash_mla import (
    FORMATS,
    ROUNDING,
    Case,
    gpu,
    hopper,
    make_case,
    relative_error,
)

pytestmark = [gpu, hopper, pytest.mark.usefixtures("poisoned_memory")]


def attend(case: Case, split: int) -> Tensor:
    out = torch.full_like(case.q, float("nan")).contiguous()
    launch(Inputs(*case.arguments), out, split=split)
    return out


def some_tokens(case: Case, tokens: Tensor | slice, more: int = 0) -> Case:
    """A case of these tokens alone, with `more` absent slots behind each list."""

    def longer(slots: Tensor) -> Tensor:
        return torch.nn.functional.pad(slots[tokens], (0, more), value=-1)

    assert case.latent_slots is not None
    return Case(
        case.q[tokens],
        case.window_cache,
        case.window_slots[tokens],
        case.latent_cache,
        longer(case.latent_slots),
        case.sink,
    )


@pytest.mark.parametrize("split", (1, 2, 4))
@pytest.mark.parametrize("kinds", FORMATS)
def test_a_token_does_not_depend_on_its_neighbours(kinds, split):
    """150 tokens take turns on the processors, 3 have one each; the order and the company change no bit."""
    case = make_case(21, 150, 64, 128, 512, kinds=tuple(kinds.split("-")))
    together = attend(case, split)
    chosen = torch.tensor([149, 0, 77], device="cuda")
    assert torch.equal(attend(some_tokens(case, chosen), split), together[chosen])
    assert torch.equal(attend(some_tokens(case, slice(40, 41)), split), together[40:41])


@pytest.mark.parametrize("kinds", FORMATS)
def test_absent_slots_behind_the_others_change_no_bit(kinds):
    """A batch whose longest list is longer: only at split 1, since a cluster divides the tiles of a list."""
    case = make_case(22, 5, 64, 128, 200, kinds=tuple(kinds.split("-")))
    assert torch.equal(attend(some_tokens(case, slice(None), 312), 1), attend(case, 1))


@pytest.mark.parametrize("kinds", FORMATS)
def test_caches_beyond_32_bits(kinds):
    """Pages 3 GiB apart: offsets of more than 2^32 bytes, and in BF16 of more than 2^31 elements."""
    kind = tuple(kinds.split("-"))
    case = make_case(23, 6, 64, 128, 512, kinds=kind, pages=(3, 3))
    expected = case.expected()
    assert relative_error(sparse_attention(*case.arguments), expected) < ROUNDING
    apart = 3 << 30
    memory = torch.empty(2 * apart + (1 << 20), dtype=torch.uint8, device="cuda")
    for name in ("window_cache", "latent_cache"):
        near = getattr(case, name)
        strides = (apart // near.element_size(), near.shape[2], 1)
        far = memory.view(near.dtype).as_strided(
            near.shape, strides, (1 << 19) * (name == "latent_cache") // near.element_size()
        )
        far.copy_(near)
        setattr(case, name, far)
    assert relative_error(sparse_attention(*case.arguments), expected) < ROUNDING

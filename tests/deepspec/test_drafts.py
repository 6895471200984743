"""What a draft may see: nothing behind its anchor but the tokens that it is told."""

from __future__ import annotations

import pytest
import torch

from deepinfer.deepspec.drafts import ALGORITHMS, DraftConfig, build_draft
from deepinfer.deepspec.targets import Shape, spread_layers

DIM, VOCAB, LENGTH, SIZE = 32, 40, 24, 4


class Frozen:
    """Embedding and head of some target."""

    shape = Shape(DIM, VOCAB, 2)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.randn(VOCAB, DIM, generator=generator)
        self.head = torch.randn(VOCAB, DIM, generator=generator)


TARGET = Frozen()
ANCHORS = torch.tensor([[3, 10, LENGTH - 1 - SIZE]])


def make(algorithm: str):
    layers = 1 if algorithm == "eagle3" else 2
    sizes = {"num_heads": 2, "head_dim": 16, "intermediate_size": 48, "markov_rank": 8}
    config = DraftConfig(algorithm, TARGET.shape, SIZE, layers, **sizes)
    draft = build_draft(config, seed=1).eval()
    if algorithm == "dspark":
        torch.nn.init.normal_(draft.markov_head.weight, std=1.0)
    return draft


def inputs():
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(1, LENGTH, 2 * DIM, generator=generator)
    return taps, torch.randint(1, VOCAB, (1, LENGTH + 1), generator=generator)


@torch.no_grad()
def ask(draft, taps, tokens, anchors=ANCHORS):
    return draft(TARGET, taps, tokens, anchors)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shapes_and_scores(algorithm):
    blocks = ask(make(algorithm), *inputs())
    assert blocks.logits.shape == (3, SIZE, VOCAB)
    assert (blocks.scores is not None) == (algorithm == "dspark")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_anchor_is_alone_with_its_past(algorithm):
    """Other anchors beside it, taps behind it, and tokens behind its block change nothing; those before it do."""
    draft, (taps, tokens) = make(algorithm), inputs()
    expected = ask(draft, taps, tokens).logits[1]
    alone = ask(draft, taps, tokens, ANCHORS[:, 1:2]).logits[0]
    torch.testing.assert_close(alone, expected, atol=1e-4, rtol=1e-4)
    later, later_tokens = taps.clone(), tokens.clone()
    later[:, 11:] += 1.0
    later_tokens[:, 11 + SIZE :] = 0
    torch.testing.assert_close(ask(draft, later, later_tokens).logits[1], expected, atol=1e-4, rtol=1e-4)
    earlier = taps.clone()
    earlier[:, 4] += 1.0
    assert (ask(draft, earlier, tokens).logits[1] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("step", range(SIZE))
def test_a_draft_knows_the_tokens_before_it_only(algorithm, step):
    """Token p + 1 + k reaches draft k (all drafts for k = 0), later ones only where the algorithm chains them."""
    draft, (taps, tokens) = make(algorithm), inputs()
    expected = ask(draft, taps, tokens).logits[1]
    changed = tokens.clone()
    changed[0, 11 + step] = (changed[0, 11 + step] + 7) % VOCAB
    moved = (ask(draft, taps, changed).logits[1] - expected).abs().amax(-1) > 1e-4
    reached = {
        "dflash": [step == 0] * SIZE,
        "dspark": [step == 0 or k == step for k in range(SIZE)],
        "eagle3": [k >= step for k in range(SIZE)],
    }
    assert moved.tolist() == reached[algorithm]


def test_rows_do_not_mix():
    for algorithm in ALGORITHMS:
        draft, (taps, tokens) = make(algorithm), inputs()
        both = ask(
            draft,
            taps.repeat(2, 1, 1) * torch.tensor([1.0, 3.0]).view(2, 1, 1),
            tokens.repeat(2, 1),
            ANCHORS.repeat(2, 1),
        )
        torch.testing.assert_close(both.logits[:3], ask(draft, taps, tokens).logits, atol=1e-4, rtol=1e-4)


def test_configs():
    config = DraftConfig("eagle3", TARGET.shape, 7, 1)
    assert DraftConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="dflash, dspark, eagle3"):
        DraftConfig("medusa", TARGET.shape)
    with pytest.raises(ValueError, match="block_size"):
        DraftConfig("dspark", TARGET.shape, 0)
    with pytest.raises(ValueError, match="num_layers: 2, allowed: 1"):
        DraftConfig("eagle3", TARGET.shape, num_layers=2)
    with pytest.raises(ValueError, match="noise_token_id"):
        DraftConfig("dspark", TARGET.shape, noise_token_id=TARGET.shape.vocab_size)


@pytest.mark.parametrize("depth,expected", [(1, (0,)), (3, (0, 1, 2)), (4, (1, 2)), (36, (1, 17, 34))])
def test_tap_layers_are_spread(depth, expected):
    assert spread_layers(depth) == expected

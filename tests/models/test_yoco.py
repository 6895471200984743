"""YoCo truncation: mask and compact agree with each other, and both with the reference that sees no cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.models import reference
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.inputs import ModelInputs
from tests.models.test_deepseek_v41 import TOKEN_MAP, Driver, make_model

CONFIG, WEIGHTS, MODEL = make_model(torch.float64)
MIN_KEEP = CONFIG.sliding_window + CONFIG.max_backtracking_tokens


class TruncatedDriver(Driver):
    """Prefills with the decoder layers limited to positions at or after keep_from[i] of each sequence i."""

    def __init__(self, drop_rows: bool, keep_from: list[int], *args) -> None:
        super().__init__(*args)
        self.drop_rows, self.keep_from = drop_rows, keep_from

    def inputs(self, sequences: list[torch.Tensor], chunk: dict[int, int], is_prefill: bool) -> ModelInputs:
        inputs = super().inputs(sequences, chunk, is_prefill)
        if not is_prefill:
            return inputs
        keep_from = torch.tensor([self.keep_from[i] for i in chunk], dtype=torch.int32)
        of_row = keep_from.repeat_interleave(inputs.query_start.diff())
        return replace(
            inputs,
            keep_from=keep_from,
            drop_rows=self.drop_rows,
            logits_rows=torch.where(inputs.positions >= of_row)[0],
        )


def run(
    driver: Driver, sequences: list[torch.Tensor], prompt: list[int], chunks: list[int], delays: list[int]
) -> list[torch.Tensor]:
    """Logits of every row that wants them, per sequence. Sequence i joins at step delays[i]; then they decode."""
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    step = 0
    while any(c < p for c, p in zip(driver.computed, prompt, strict=True)):
        size = chunks[step % len(chunks)]
        chunk = {
            i: min(size, prompt[i] - done)
            for i, done in enumerate(driver.computed)
            if done < prompt[i] and step >= delays[i]
        }
        step += 1
        if chunk:
            for i, logits in driver.step(sequences, chunk, True).items():
                outputs[i].append(logits)
    while any(c < len(s) for c, s in zip(driver.computed, sequences, strict=True)):
        chunk = {i: 1 for i, s in enumerate(sequences) if driver.computed[i] < len(s)}
        for i, logits in driver.step(sequences, chunk, False).items():
            outputs[i].append(logits)
    return [torch.cat(parts) for parts in outputs]


def check(
    cache_dtype: str,
    prompt: list[int],
    keep: int,
    chunks: list[int],
    delays: list[int],
    decode: int,
    seed: int,
    model: DeepseekV41 = MODEL,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(3, CONFIG.vocab_size - 2, (n + decode,), generator=generator) for n in prompt]
    for tokens in sequences[1::2]:  # every other sequence holds an image span
        tokens[len(tokens) // 3 : len(tokens) // 2] = CONFIG.image_token_id
    keep_from = [max(n - keep, 0) for n in prompt]
    lengths = [len(s) for s in sequences]
    mask, compact = (
        run(TruncatedDriver(drop_rows, keep_from, model, cache_dtype, lengths, seed), sequences, prompt, chunks, delays)
        for drop_rows in (False, True)
    )
    numerics = reference.Numerics(quantize_kv=cache_dtype == "fp8")
    for i, tokens in enumerate(sequences):
        span = (tokens == CONFIG.image_token_id)[None]
        expected = reference.forward(
            WEIGHTS, CONFIG, tokens[None], TOKEN_MAP, numerics=numerics, image_span=span, keep_from=keep_from[i]
        )[0, keep_from[i] :]
        assert mask[i].shape == compact[i].shape == expected.shape
        torch.testing.assert_close(compact[i], mask[i], rtol=0, atol=1e-12 * float(expected.abs().max()))
        torch.testing.assert_close(compact[i], expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


@settings(max_examples=12, deadline=None)
@given(data=st.data(), keep=st.integers(MIN_KEEP, 40), decode=st.integers(0, 20), seed=st.integers(0, 1000))
@pytest.mark.parametrize("cache_dtype", ["fp64", "fp8"])
def test_mask_and_compact_equal_the_reference(cache_dtype, data, keep, decode, seed):
    prompt = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4), "prompt")
    chunks = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3), "chunks")
    delays = data.draw(st.lists(st.integers(0, 4), min_size=len(prompt), max_size=len(prompt)), "delays")
    check(cache_dtype, prompt, keep, chunks, delays, decode, seed)


@pytest.mark.parametrize("cache_dtype", ["fp64", "fp8"])
@pytest.mark.parametrize(
    "chunk", [70, 53, 30, 18, 1], ids=["middle of one chunk", "chunk start", "earlier chunk", "several", "single rows"]
)
def test_where_the_kept_span_starts(cache_dtype, chunk):
    check(cache_dtype, [70], MIN_KEEP, [chunk], [0], decode=20, seed=1)


def test_the_kept_span_covers_the_prompt():
    """Then nothing is truncated: the truncated reference is the plain one, so this compares with `off`."""
    check("fp64", [MIN_KEEP, 5], MIN_KEEP, [9], [0, 0], decode=10, seed=2)


def test_sequences_with_and_without_kept_rows_in_one_step():
    check("fp8", [90, 20, 60], MIN_KEEP, [20], [0, 0, 1], decode=5, seed=3)


def test_truncation_is_an_approximation_that_can_be_seen():
    """The window at the start of the kept span lost keys: a reference that ignored keep_from would fail above."""
    tokens = torch.randint(3, 500, (1, 80), generator=torch.Generator().manual_seed(4))
    full = reference.forward(WEIGHTS, CONFIG, tokens, TOKEN_MAP)
    truncated = reference.forward(WEIGHTS, CONFIG, tokens, TOKEN_MAP, keep_from=80 - MIN_KEEP)
    assert (full - truncated)[0, -1].abs().max() > 1e-3 * full.abs().max()


def test_compact_computes_only_kept_rows_in_the_decoder_layers(monkeypatch):
    """Rows that enter each layer's attention, counted where they pass."""
    from deepinfer.models.layers import attention

    counted: dict[int, int] = {}
    original = attention.Attention.forward

    def counting(self, y, *args):
        counted[self.plan.layer_id] = counted.get(self.plan.layer_id, 0) + len(y)
        return original(self, y, *args)

    monkeypatch.setattr(attention.Attention, "forward", counting)
    driver = TruncatedDriver(True, [90 - MIN_KEEP], MODEL, "fp64", [90], 0)
    tokens = torch.randint(3, 500, (90,), generator=torch.Generator().manual_seed(5))
    run(driver, [tokens], [90], [25], [0])
    encoder = CONFIG.num_encoder_layers
    assert counted == {layer: 90 if layer < encoder else MIN_KEEP for layer in range(CONFIG.num_hidden_layers)}

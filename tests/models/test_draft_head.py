"""The draft head against its naive reference: chunks, batches, roundings, padding, rejected rows, calibration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.models import reference, reference_draft
from deepinfer.models.caches import CACHE_DTYPES
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.draft_calibration import CALIBRATION_NAME, DraftCalibration
from deepinfer.models.draft_head import DraftHead, DraftSampling, Taps
from deepinfer.models.layers.linear import Int8Weight
from deepinfer.models.random_weights import random_weights
from deepinfer.models.registry import load_model
from deepinfer.models.writer import write_checkpoint
from tests.checkpoints import write_tokenizer
from tests.configs import tiny_config, tiny_token_map

TOKEN_MAP = torch.from_numpy(tiny_token_map()).long()
STAGES = 2


def make_model(dtype=torch.float64, quantize_activations=False, **overrides):
    config = tiny_config(STAGES, **overrides)
    weights = {name: w.to(dtype) for name, w in random_weights(config, seed=0).items()}
    model = DeepseekV41(config, dict(weights), TOKEN_MAP, quantize_activations, draft_head=True)
    return config, weights, model


CONFIG, WEIGHTS, MODEL = make_model()


def random_taps(lengths: list[int], seed: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = len(CONFIG.dspark_target_layer_ids) * CONFIG.hidden_size
    return [torch.randn(n, width, generator=generator).to(dtype) for n in lengths]


def stale_caches(model: DeepseekV41, num_slots: int, cache_dtype: str = "fp64"):
    caches = model.allocate_caches(2, 8, num_slots, CACHE_DTYPES[cache_dtype])
    caches.state.storage.fill_(0xA5)  # what an earlier sequence left must never show
    return caches


def store(head: DraftHead, caches, taps: list[torch.Tensor], chunk: dict[int, tuple[int, int]], slots: list[int]):
    """Rows start..end of each sequence in one step."""
    positions = [torch.arange(*span) for span in chunk.values()]
    states = [torch.full((len(p),), slots[i], dtype=torch.int32) for i, p in zip(chunk, positions, strict=True)]
    hidden = torch.cat([taps[i][p] for i, p in zip(chunk, positions, strict=True)])
    head.store(Taps(hidden, torch.cat(positions), torch.cat(states)), caches)


def check(draft, row: int, config, weights, taps, token: int, numerics=None, tolerance=1e-9):
    """Row `row` of a batch of drafts equals the reference's, given the same drafts."""
    _, scores, logits = reference_draft.draft(
        weights, config, taps, torch.tensor(token), numerics=numerics, forced=draft.tokens[row]
    )
    torch.testing.assert_close(torch.sigmoid(scores).float(), draft.confidences[row], atol=1e-5 + tolerance, rtol=0)
    if draft.logits is not None:
        torch.testing.assert_close(draft.logits[row], logits.float(), atol=1e-4 + tolerance, rtol=0)
    best = logits.gather(1, draft.tokens[row][:, None])[:, 0]
    if draft.logits is None:
        assert (best >= logits.amax(-1) - 1e-4 - tolerance).all()


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 45), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    cache_dtype=st.sampled_from(["fp64", "fp8"]),
)
def test_drafts_equal_the_reference(lengths, cuts, seed, cache_dtype):
    """However the taps arrive: one row at a time, chunks longer than the ring, several sequences a step."""
    taps = random_taps(lengths, seed)
    caches = stale_caches(MODEL, len(lengths) + 1, cache_dtype)
    slots = (torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    done, turn = [0] * len(lengths), 0
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        sizes = [cuts[(turn + i) % len(cuts)] for i in range(len(lengths))]
        chunk = {i: (done[i], min(n, done[i] + sizes[i])) for i, n in enumerate(lengths) if done[i] < n}
        store(MODEL.draft_head, caches, taps, chunk, slots)
        for i, (_, end) in chunk.items():
            done[i] = end
        turn += 1
    tokens = torch.randint(3, 500, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    last = torch.tensor(lengths) - 1
    draft = MODEL.draft_head.draft(last, tokens, torch.tensor(slots, dtype=torch.int32), caches)
    assert draft.tokens.shape == draft.confidences.shape == (len(lengths), CONFIG.dspark_block_size)
    numerics = reference.Numerics(quantize_kv=cache_dtype == "fp8")
    for row in range(len(lengths)):
        check(draft, row, CONFIG, WEIGHTS, taps[row], int(tokens[row]), numerics)


def test_drafts_in_int8_are_nearly_the_reference_s_and_leave_the_target_s_head_alone():
    config, weights, model = make_model(torch.float32)
    head, before = model.draft_head, model.head.clone()
    head.use_int8_logits()
    assert isinstance(head.head, Int8Weight) and isinstance(head.markov_head, Int8Weight)
    assert model.head.dtype == before.dtype and torch.equal(model.head, before)
    taps = random_taps([40, 7, 25], 3, torch.float32)
    caches = stale_caches(model, 4, "fp32")
    store(head, caches, taps, {i: (0, len(rows)) for i, rows in enumerate(taps)}, [1, 2, 3])
    last, slots = torch.tensor([39, 6, 24]), torch.tensor([1, 2, 3], dtype=torch.int32)
    tokens = torch.tensor([5, 77, 400])
    ones, zeros = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    drawn = DraftSampling(ones, zeros + 40, 40, ones, 0 * ones, zeros, zeros)
    for sampling in (None, drawn):
        draft = head.draft(last, tokens, slots, caches, sampling)
        for row in range(3):
            forced = draft.tokens[row]
            _, _, logits = reference_draft.draft(weights, config, taps[row], tokens[row], forced=forced)
            if draft.logits is None:
                lost = logits.amax(-1) - logits.gather(1, forced[:, None])[:, 0]
                assert bool((lost <= 0.03 * logits.abs().amax()).all())
            else:
                torch.testing.assert_close(draft.logits[row], logits, atol=0.03 * float(logits.abs().amax()), rtol=0)


def test_rejected_rows_and_earlier_drafts_leave_no_trace():
    """Rounds of draft, verify B + 1 rows, keep some: as if only the kept rows had ever been stored."""
    length, size = 90, CONFIG.dspark_block_size
    (truth,), (other,) = random_taps([length], 1), random_taps([length], 2)
    caches = stale_caches(MODEL, 2)
    store(MODEL.draft_head, caches, [truth], {0: (0, 20)}, [1])
    position, generator = 19, torch.Generator().manual_seed(0)
    slot = torch.tensor([1], dtype=torch.int32)
    while position + size + 1 < length:
        token = torch.randint(3, 500, (1,), generator=generator)
        draft = MODEL.draft_head.draft(torch.tensor([position]), token, slot, caches)
        check(draft, 0, CONFIG, WEIGHTS, truth[: position + 1], int(token))
        kept = int(torch.randint(1, size + 2, (1,), generator=generator))
        verified = truth.clone()
        verified[position + 1 + kept :] = other[position + 1 + kept :]  # what rejected drafts would have left
        store(MODEL.draft_head, caches, [verified], {0: (position + 1, position + 2 + size)}, [1])
        position += kept


@pytest.mark.parametrize("quantize_activations", [False, True])
def test_float32_and_rounded_activations(quantize_activations):
    config, weights, model = make_model(torch.float32, quantize_activations, swiglu_limit=0.5)
    taps = random_taps([40], 3, torch.float32)
    caches = stale_caches(model, 2, "fp8")
    store(model.draft_head, caches, taps, {0: (0, 40)}, [1])
    token = torch.tensor([7])
    draft = model.draft_head.draft(torch.tensor([39]), token, torch.tensor([1], dtype=torch.int32), caches)
    numerics = reference.Numerics(quantize_kv=True, quantize_activations=quantize_activations)
    check(draft, 0, config, weights, taps[0], 7, numerics, tolerance=0.03 if quantize_activations else 1e-3)


def test_every_part_of_the_head_bites():
    """Changing any of its tensors, or the block's noise, changes what the reference says."""
    (taps,) = random_taps([40], 4)
    token, forced = torch.tensor(9), torch.arange(5, 5 + CONFIG.dspark_block_size)
    _, scores, logits = reference_draft.draft(WEIGHTS, CONFIG, taps, token, forced=forced)
    for name in WEIGHTS:
        if not name.startswith("mtp.") or name.endswith("bias_vl"):  # drafts are text
            continue
        changed = {**WEIGHTS, name: WEIGHTS[name].flip(0) if WEIGHTS[name].dim() > 1 else WEIGHTS[name].roll(1)}
        if name.endswith("confidence_head.proj.weight"):
            changed[name] = -WEIGHTS[name]
        _, other_scores, other_logits = reference_draft.draft(changed, CONFIG, taps, token, forced=forced)
        differs = (other_logits - logits).abs().max() + (other_scores - scores).abs().max()
        assert differs > 1e-3, name


def test_block_has_no_causal_mask():
    """Row 0 sees the noise rows behind it, so another block size changes even the first draft's logits."""
    (taps,) = random_taps([40], 5)
    narrow = tiny_config(STAGES, dspark_block_size=1)
    _, _, wide = reference_draft.draft(WEIGHTS, CONFIG, taps, torch.tensor(9))
    _, _, alone = reference_draft.draft(WEIGHTS, narrow, taps, torch.tensor(9))
    assert (wide[0] - alone[0]).abs().max() > 1e-3


def test_padding_rows_go_to_the_null_slot():
    taps = random_taps([10, 10], 6)
    caches = stale_caches(MODEL, 3)
    store(MODEL.draft_head, caches, taps, {0: (0, 10), 1: (0, 10)}, [2, 0])
    before = caches.state.storage[1].clone()
    slots = torch.tensor([2, 0, 0], dtype=torch.int32)
    draft = MODEL.draft_head.draft(torch.tensor([9, 0, 0]), torch.tensor([5, 0, 0]), slots, caches)
    assert torch.equal(caches.state.storage[1], before)
    check(draft, 0, CONFIG, WEIGHTS, taps[0], 5)


def test_sampled_drafts_follow_the_parameters():
    """Temperature 0 rows are argmaxes, top-k 2 rows one of two, and the logits are those that were drawn from."""
    taps = random_taps([30], 7)
    caches = stale_caches(MODEL, 2)
    store(MODEL.draft_head, caches, taps, {0: (0, 30)}, [1])
    rows, vocab = 64, CONFIG.vocab_size
    width = torch.full((rows,), 2)
    width[0] = vocab
    heat = torch.ones(rows, dtype=torch.float64)
    heat[0] = 0.0
    ones, zeros = torch.ones(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    sampling = DraftSampling(heat, width, 2, ones, zeros, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    last, token = torch.full((rows,), 29), torch.full((rows,), 8)
    draft = MODEL.draft_head.draft(last, token, torch.ones(rows, dtype=torch.int32), caches, sampling)
    assert draft.logits is not None
    assert torch.equal(draft.tokens[0], draft.logits[0].argmax(-1))
    best = draft.logits.topk(2).indices
    assert (draft.tokens[..., None] == best).any(-1).all()
    assert (draft.tokens[:, 0] != best[:, 0, 0]).any() and len(draft.tokens.unique(dim=0)) > 2
    for row in (0, 1, 2):
        check(draft, row, CONFIG, WEIGHTS, taps[0], 8)


@pytest.mark.parametrize("truncated", [False, True])
def test_taps_are_the_reference_taps(truncated):
    """Mean of the streams in front of the target layers, of every row that ran the decoder layers."""
    from tests.models.test_deepseek_v41 import Driver

    tokens = torch.randint(3, 500, (50,), generator=torch.Generator().manual_seed(0))
    driver = Driver(MODEL, "fp64", [50], seed=0)
    inputs = driver.inputs([tokens], {0: 50}, True)
    keep_from = 0
    if truncated:
        keep_from = 20
        inputs.keep_from, inputs.drop_rows = torch.tensor([keep_from], dtype=torch.int32), True
        inputs.logits_rows = torch.tensor([49])
    MODEL.forward(inputs, driver.caches)
    assert MODEL.taps is not None
    trace: dict[str, torch.Tensor] = {}
    reference.forward(WEIGHTS, CONFIG, tokens[None], TOKEN_MAP, trace=trace, keep_from=keep_from)
    expected = torch.cat([trace[f"layers.{layer}.tap"][0, keep_from:] for layer in CONFIG.dspark_target_layer_ids], -1)
    assert torch.equal(MODEL.taps.positions, torch.arange(keep_from, 50))
    assert (MODEL.taps.state_slots == driver.slots[0]).all()
    torch.testing.assert_close(MODEL.taps.hidden, expected)


def test_decode_steps_leave_taps_too():
    from tests.models.test_deepseek_v41 import Driver

    tokens = [torch.randint(3, 500, (12,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    driver = Driver(MODEL, "fp64", [12, 12], seed=1)
    driver.step(tokens, {0: 11, 1: 11}, True)
    driver.step(tokens, {0: 1, 1: 1}, False)
    assert MODEL.taps is not None and MODEL.taps.positions.tolist() == [11, 11]
    for i in range(2):
        trace: dict[str, torch.Tensor] = {}
        reference.forward(WEIGHTS, CONFIG, tokens[i][None], TOKEN_MAP, trace=trace)
        expected = torch.cat([trace[f"layers.{layer}.tap"][0, 11] for layer in CONFIG.dspark_target_layer_ids])
        torch.testing.assert_close(MODEL.taps.hidden[i], expected)


def test_a_model_without_the_head_pays_nothing():
    plain = DeepseekV41(CONFIG, dict(WEIGHTS), TOKEN_MAP)
    assert plain.draft_head is None
    caches = plain.allocate_caches(2, 8, 2, torch.float64)
    assert caches.state.draft_rings == []
    ring = caches.state.rings[0][0].nbytes
    assert MODEL.slot_bytes(torch.float64) == plain.slot_bytes(torch.float64) + STAGES * ring


@pytest.mark.parametrize("with_calibration", [False, True])
def test_checkpoint_round_trip(tmp_path, with_calibration):
    """The released layout is read: the stored head gives the drafts of the in-memory one, up to its rounding."""
    config = tiny_config(STAGES, engram_layer_ids=(), engram_num_embeddings=())
    write_tokenizer(tmp_path / "tokenizer.json")
    write_checkpoint(tmp_path, config, random_weights(config, 0), 4 << 20, tmp_path / "tokenizer.json")
    if with_calibration:
        DraftCalibration([2.0, 1.0, 0.5], 0.4).write(tmp_path)
    model = load_model(tmp_path, torch.float32, draft_head=True)
    assert load_model(tmp_path, torch.float32).draft_head is None
    from deepinfer.models.loader import load_weights

    weights = load_weights(tmp_path, config)
    taps = random_taps([25], 8, torch.float32)
    caches = stale_caches(model, 2, "fp32")
    store(model.draft_head, caches, taps, {0: (0, 25)}, [1])
    ones, zeros = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    drawn = DraftSampling(ones, zeros + config.vocab_size, config.vocab_size, ones, 0 * ones, zeros, zeros)
    where = torch.tensor([24]), torch.tensor([3]), torch.tensor([1], dtype=torch.int32)
    draft = model.draft_head.draft(*where, caches, drawn)
    _, scores, logits = reference_draft.draft(weights, config, taps[0], torch.tensor(3), forced=draft.tokens[0])
    heat, draft_heat = (torch.tensor([2.0, 1.0, 0.5]), 0.4) if with_calibration else (torch.ones(3), 1.0)
    torch.testing.assert_close(draft.confidences[0], torch.sigmoid(scores / heat), atol=1e-3, rtol=0)
    rounding = 0.03 * float(logits.abs().max())  # of INT8
    torch.testing.assert_close(draft.logits[0], logits / draft_heat, atol=rounding / draft_heat, rtol=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[]", "[" * 200_000, "\x00", '{"temperatures": [1, 2]}', '{"temperatures": [1, 0, 1]}'),
        *(
            f'{{"temperatures": [1, 1, 1], "draft_temperature": {bad}}}'
            for bad in ("0", "-1", "NaN", "Infinity", "null", "1" + "0" * 400, "1e-39", "1e39")
        ),
    ],
)
def test_bad_calibrations_are_refused(tmp_path, text):
    config = tiny_config(STAGES, engram_layer_ids=(), engram_num_embeddings=())
    write_checkpoint(tmp_path, config, random_weights(config, 0), 4 << 20)
    (tmp_path / CALIBRATION_NAME).write_text(text)
    with pytest.raises(ValueError, match="draft_calibration.json"):
        load_model(tmp_path, torch.float32, draft_head=True)


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    config = tiny_config(0, engram_layer_ids=(), engram_num_embeddings=())
    write_checkpoint(tmp_path, config, random_weights(config, 0), 4 << 20)
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        load_model(tmp_path, torch.float32, draft_head=True)

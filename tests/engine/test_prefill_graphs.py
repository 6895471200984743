"""Full chunks in captured shapes: the same tokens and caches as any other step, whatever the buffers held before.

On a CPU the padded chunks run eagerly; tests/engine/test_cuda_graph_gpu.py replays them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.prefill_graphs import ChunkShape, PrefillGraphs
from deepinfer.engine.runner import ModelRunner
from deepinfer.models.inputs import HostLengths, ModelInputs
from deepinfer.params import SamplingParams
from tests.engine.test_yoco_truncation import CONFIG, MIN_KEEP, MODEL, engine_config

CHUNK, BLOCK_SIZE, MAX_BLOCKS = 20, 4, 60


def padded_chunks(runner: ModelRunner, keep_tokens: int | None) -> PrefillGraphs:
    return PrefillGraphs(
        runner._forward_chunk, CHUNK, CONFIG.sliding_window, MAX_BLOCKS, BLOCK_SIZE, keep_tokens, "cpu"
    )


@pytest.mark.parametrize("mode", ["off", "compact"])
def test_padded_chunks_change_no_token_and_no_cache(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(mode, prefill_chunk_size=CHUNK, max_num_batched_tokens=CHUNK, max_num_seqs=2)
    plain, padded = ModelRunner(MODEL, config), ModelRunner(MODEL, config)
    padded.prefill_graphs = padded_chunks(padded, MIN_KEEP if mode == "compact" else None)
    ran: list[ChunkShape] = []
    run = padded.prefill_graphs.run
    monkeypatch.setattr(padded.prefill_graphs, "run", lambda inputs, shape: (ran.append(shape), run(inputs, shape))[1])
    results = []
    for runner in (plain, padded):
        engine, tokens = Engine(runner, config), []
        for number, length in enumerate((100, 20, 63, 140)):
            prompt = torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=4))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    assert output.error is None, output.error
                    tokens += output.outputs[0].token_ids
        results.append(tokens)
    assert results[0] == results[1]
    assert {shape.is_first for shape in ran} == {True, False} and len({shape.blocks for shape in ran}) > 1
    assert {shape.kept for shape in ran} == ({CHUNK} if mode == "off" else {0, MIN_KEEP})
    for mine, theirs in ((plain, padded), (padded, plain)):
        for layer, cache in mine.caches.blocks.latents.items():
            assert torch.equal(cache[1:], theirs.caches.blocks.latents[layer][1:])
    assert torch.equal(plain.caches.state.storage[1:], padded.caches.state.storage[1:])


def step(start: int, count: int, blocks: int = 30, kept: int | None = None, sequences: int = 1) -> ModelInputs:
    keep_from = None if kept is None else torch.tensor([start + count - kept], dtype=torch.int32)
    lengths = [np.array([n] * sequences) for n in (start, count, count if kept is None else kept)]
    none = torch.zeros(0, dtype=torch.int64)
    tables = torch.zeros(sequences, blocks, dtype=torch.int32)
    inputs = ModelInputs(True, none, none, none, none, tables, none, none, keep_from, HostLengths(*lengths))
    return replace(inputs, drop_rows=kept is not None)


def test_only_full_chunks_of_one_sequence_have_a_shape() -> None:
    graphs = padded_chunks(ModelRunner(MODEL, engine_config("compact")), None)
    truncated = padded_chunks(ModelRunner(MODEL, engine_config("compact")), MIN_KEEP)
    assert graphs.widths == [4, 15, 60]
    assert graphs.shape_of(step(0, CHUNK)) == ChunkShape(60, True, CHUNK)
    assert graphs.shape_of(step(40, CHUNK, blocks=15)) == ChunkShape(15, False, CHUNK)
    assert truncated.shape_of(step(40, CHUNK, kept=0)) == ChunkShape(60, False, 0)
    assert truncated.shape_of(step(40, CHUNK, kept=MIN_KEEP)) == ChunkShape(60, False, MIN_KEEP)
    for other in (
        step(40, CHUNK - 1),
        step(41, CHUNK),  # a group is open in front of it
        step(10, CHUNK),  # less than a window in front of it
        step(40, CHUNK, sequences=2),
        step(40, CHUNK, blocks=61),
        step(40, CHUNK, kept=0),
        replace(step(40, CHUNK), lengths=None),
    ):
        assert graphs.shape_of(other) is None
    for other in (
        step(40, CHUNK, kept=5),
        step(40, CHUNK, kept=CHUNK),
        replace(step(40, CHUNK, kept=0), drop_rows=False),
    ):
        assert truncated.shape_of(other) is None

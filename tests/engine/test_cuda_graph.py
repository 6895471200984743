"""Padded decode steps and their CUDA graphs: shapes, and tokens that are those of the plain engine."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.bench.synthetic import synthetic_config, synthetic_model
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.cuda_graph import DecodeGraphs, batch_sizes, step_shapes, table_widths
from deepinfer.engine.engine import Engine
from deepinfer.engine.model_inputs import build_model_inputs
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.sequence_metadata import SequenceMetadataPool
from deepinfer.engine.step_buffers import StepBuffers, StepShape, packed_views, pad_inputs
from deepinfer.models.inputs import ModelInputs
from deepinfer.outputs import RequestMetrics
from deepinfer.params import SamplingParams
from deepinfer.speculation.slot_tokens import SlotTokens
from tests.engine.test_engine_matches_reference import Arrival, model, run, workloads


def test_the_ladder_of_batch_sizes() -> None:
    assert batch_sizes(64, 8) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert batch_sizes(20, 8) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(8, 8) == [1, 2, 4, 8]
    assert batch_sizes(5, 8) == [1, 2, 4, 5]
    assert batch_sizes(1, 8) == [1]
    assert batch_sizes(6, 1) == [1, 2, 3, 4, 5, 6]
    assert batch_sizes(12, 5) == [1, 2, 4, 5, 10, 12]


@given(max_num_seqs=st.integers(1, 600), interval=st.integers(1, 700))
def test_every_batch_has_a_size_and_none_is_padded_by_more_than_the_interval_or_double(
    max_num_seqs: int, interval: int
) -> None:
    sizes = batch_sizes(max_num_seqs, interval)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs
    for rows in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < max(min(interval, rows), 1)


def test_table_widths_up_to_a_million_tokens() -> None:
    assert table_widths(1) == [1]
    assert table_widths(128) == [128]
    assert table_widths(8192) == [128, 1024, 8192]
    assert len(step_shapes(64, 8, 8192)) == 11 + 2 * 7


def graphs_over(forward: object, max_num_seqs: int = 16, max_blocks: int = 700) -> DecodeGraphs:
    return DecodeGraphs(forward, max_num_seqs, 4, max_blocks, "cpu")  # type: ignore[arg-type]


@given(rows=st.integers(1, 16), blocks=st.integers(1, 700))
def test_a_step_gets_the_smallest_shape_that_holds_it(rows: int, blocks: int) -> None:
    graphs = graphs_over(None)
    shape = graphs.shape_of(rows, blocks)
    assert shape in graphs.shapes and shape.rows >= rows and shape.blocks >= blocks
    for other in graphs.shapes:
        if other.rows >= rows and other.blocks >= blocks:
            assert (shape.blocks, shape.rows) <= (other.blocks, other.rows)


def test_a_step_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="17 sequences"):
        graphs_over(None).shape_of(17, 1)


def test_views_of_one_buffer_do_not_overlap() -> None:
    shape = StepShape(7, 5)
    buffers = StepBuffers(StepShape(9, 6), "cpu")
    parts = packed_views(buffers.storage, shape.parts())
    for number, part in enumerate(parts):
        assert part.is_contiguous() and part.data_ptr() % 16 == 0
        part.fill_(number + 1)
    for number, part in enumerate(parts):
        assert (part == number + 1).all()


@given(rows=st.integers(1, 16), blocks=st.integers(1, 30), earlier=st.integers(1, 16))
def test_rows_behind_the_batch_are_padding_whatever_ran_before(rows: int, blocks: int, earlier: int) -> None:
    seen: list[ModelInputs] = []

    def forward(inputs: ModelInputs) -> torch.Tensor:
        fields = ("token_ids", "positions", "context_lens", "state_slots", "block_tables")
        seen.append(replace(inputs, **{name: getattr(inputs, name).clone() for name in fields}))
        return inputs.token_ids * 10

    graphs = graphs_over(forward)
    for n, width in ((earlier, 30), (rows, blocks)):
        inputs = ModelInputs(
            False,
            torch.arange(n) + 5,
            torch.arange(n) + 50,
            torch.arange(n + 1, dtype=torch.int32),
            torch.arange(n, dtype=torch.int32) + 51,
            torch.arange(1, n * width + 1, dtype=torch.int32).view(n, width),
            torch.arange(n, dtype=torch.int32) + 1,
            torch.arange(n),
        )
        assert graphs.run(inputs).tolist() == [10 * (5 + i) for i in range(n)]
    got = seen[-1]
    size = len(got.token_ids)
    assert size == graphs.shape_of(rows, blocks).rows
    assert len(got.query_start) == size + 1 and got.logits_rows.tolist() == list(range(size))
    for name in ("token_ids", "positions", "context_lens", "state_slots"):
        assert torch.equal(getattr(got, name)[:rows], getattr(inputs, name)), name
    assert torch.equal(got.block_tables[:rows, :blocks], inputs.block_tables)
    assert (got.block_tables[:rows, blocks:] == 0).all()
    assert (got.token_ids[rows:] == 0).all() and (got.positions[rows:] == 0).all()
    assert (got.state_slots[rows:] == 0).all() and (got.block_tables[rows:] == 0).all()
    assert (got.context_lens[rows:] == 1).all()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), st.integers(1, 8))
def test_padded_steps_give_the_same_tokens(workload: tuple[list[Arrival], EngineConfig], interval: int) -> None:
    """Random workloads with preemption and cancellation, in float64: padded, in stable buffers, and as they come."""
    arrivals, config = workload
    padded = replace(config, cuda_graphs=True, cudagraph_batch_size_interval=interval)
    assert ModelRunner(model(), padded).graphs is not None
    assert run(arrivals, padded) == run(arrivals, config)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_a_decode_batch_is_written_where_the_graph_reads_it(lengths: list[int], data: st.DataObject) -> None:
    """The same inputs, packed and padded in the stable buffers, as in tensors of their own."""
    config = EngineConfig(block_size=2, max_num_seqs=16)
    sequences = []
    for number, length in enumerate(lengths):
        seq = Sequence("r", 0, number, list(range(1, length + 1)), SamplingParams(), 0, RequestMetrics(0.0))
        seq.num_pending = data.draw(st.integers(0, 1))
        seq.num_computed = len(seq) + seq.num_pending - 1
        seq.state_slot = number + 1
        seq.block_table.extend(range(10 * number + 1, 10 * number + 1 + -(-seq.num_tokens // 2)))
        sequences.append(seq)
    batch = ScheduledBatch(sequences, [1] * len(sequences), is_prefill=False)
    latest = SlotTokens(torch.arange(17).unsqueeze(1) * 100, torch.ones(17, dtype=torch.int64))
    graphs = graphs_over(lambda inputs: inputs.token_ids, max_blocks=40)
    graphs.buffers.storage.fill_(0x55)
    graphs.buffers.slot_tokens.tokens.copy_(latest.tokens)
    metadata = SequenceMetadataPool(17, 100, debug=True)
    slots = metadata.take(sequences)
    alone = build_model_inputs(batch, slots, metadata, config, latest)
    stable = build_model_inputs(batch, slots, metadata, config, latest, graphs)
    assert alone.block_tables.tolist() == [
        [*s.block_table, *[0] * (alone.block_tables.shape[1] - len(s.block_table))] for s in sequences
    ]
    expected = [latest.tokens[s.state_slot, 0].item() if s.num_pending else s.token_ids[-1] for s in sequences]
    assert alone.token_ids.tolist() == expected
    assert alone.context_lens.tolist() == [s.num_tokens for s in sequences]
    pending = [-1 if s.num_pending else s.token_ids[-1] for s in sequences]
    assert stable.token_ids.tolist() == pending
    assert graphs.run(stable).tolist() == expected  # filled in where the graph begins
    width = alone.block_tables.shape[1]
    assert torch.equal(stable.block_tables[:, :width], alone.block_tables)
    for field in fields(ModelInputs):
        got = getattr(stable, field.name)
        if isinstance(got, torch.Tensor) and field.name not in ("block_tables", "token_ids"):
            assert torch.equal(got, getattr(alone, field.name)) and got.dtype == getattr(alone, field.name).dtype
    shape = graphs.shape_of(*alone.block_tables.shape)
    padded = graphs.inputs[shape]
    assert stable.block_tables.data_ptr() == padded.block_tables.data_ptr()  # graphs.run copies nothing
    again = StepBuffers(shape, "cpu").inputs(shape)
    pad_inputs(alone, again)
    for name in ("positions", "context_lens", "state_slots", "block_tables"):
        assert torch.equal(getattr(padded, name), getattr(again, name)), name


def test_graphs_are_off_on_a_cpu_unless_asked_for() -> None:
    assert ModelRunner(model(), EngineConfig(num_blocks=4, max_num_seqs=2, dtype="fp64")).graphs is None


@pytest.mark.slow
def test_compiled_steps_give_the_same_tokens() -> None:
    """torch.compile on a CPU: about a minute for a model of four layers and two shapes."""
    small = synthetic_model(synthetic_config("v41-small", 4, 8), torch.float32, "cpu")
    answers = []
    for torch_compile in (False, True):
        config = EngineConfig(num_blocks=8, max_num_seqs=2, max_model_len=256, torch_compile=torch_compile)
        engine = Engine(ModelRunner(small, config), config)
        for number in range(3):
            params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
            engine.add_request(str(number), [5 + number, 9, 20], params)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None, output.error
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        answers.append(tokens)
    assert answers[0] == answers[1] and len(answers[0]) == 3

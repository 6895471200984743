"""Rows, the hidden-state cache, and training: alone, and the same by two processes."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer.deepspec.acceptance import Answer
from deepinfer.deepspec.answers import Sampling, read_answers, read_folder, write_answers
from deepinfer.deepspec.drafts import ALGORITHMS, DraftConfig, build_draft
from deepinfer.deepspec.files import save_whole
from deepinfer.deepspec.losses import LossWeights, block_losses, draw_heat
from deepinfer.deepspec.pack import pack_answers, training_rows
from deepinfer.deepspec.rows import cache_bytes, cached_batches, computed_batches, rows_of, write_cache
from deepinfer.deepspec.targets import HEAD_NAME, Shape, fingerprint
from deepinfer.deepspec.train import STATE_NAME, Trainer, TrainingOptions, load_draft, pick_anchors, save_draft
from deepinfer.models.draft_calibration import CALIBRATION_NAME

VOCAB, DIM, LENGTH = 12, 16, 20


class CountingTarget:
    """The next token is the last one plus a step that the first token says: a draft can learn it."""

    shape = Shape(DIM, VOCAB, 1)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.randn(VOCAB, DIM, generator=generator)
        self.head = 4.0 * torch.eye(VOCAB, DIM)
        self.calls = 0

    def __call__(self, tokens):
        self.calls += 1
        following = (tokens + tokens[:, :1]) % VOCAB
        hidden = torch.nn.functional.one_hot(following, DIM).float()
        return hidden + 0.1 * self.embed[tokens], hidden


def counting_answers(count: int) -> list[Answer]:
    answers = []
    for i in range(count):
        step = 1 + i % 5
        ids = [step]
        while len(ids) < LENGTH - 2:
            ids.append((ids[-1] + step) % VOCAB)
        answers.append(Answer(ids, len(ids) - 3, 0.0))
    return answers


def small(algorithm: str) -> DraftConfig:
    return DraftConfig(
        algorithm, CountingTarget.shape, 3, 1, num_heads=2, head_dim=8, intermediate_size=32, markov_rank=4
    )


def test_rows_count_what_the_target_wrote():
    rows = rows_of([Answer([5, 6, 7, 8, 9], 2, 0.0), Answer(list(range(30)), 5, 0.0)], 6)
    assert len(rows) == 1  # the second prompt alone is longer than a row
    assert rows.tokens[0].tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert rows.counted[0].tolist() == [0, 0, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="length"):
        rows_of([Answer(list(range(30)), 5, 0.0)], 6)


def test_cache_has_its_estimated_size_and_goes_on(tmp_path):
    rows, target = rows_of(counting_answers(10), LENGTH), CountingTarget()
    paths = write_cache(tmp_path, rows, target, 4)
    assert [path.name for path in paths] == [f"shard-0000{i}-of-00003.safetensors" for i in range(3)]
    size = sum(path.stat().st_size for path in paths)
    assert size == pytest.approx(cache_bytes(10, LENGTH, target.shape), rel=0.15)
    paths[1].write_bytes(paths[1].read_bytes()[:-100])  # a run that was stopped
    advanced, before = [], target.calls
    write_cache(tmp_path, rows, target, 4, advanced.append)
    assert target.calls == before + 1 and advanced == [2, 1]
    other = rows_of(counting_answers(11)[1:], LENGTH)
    write_cache(tmp_path, other, target, 4)
    assert target.calls == before + 4  # other rows: nothing of the old cache is theirs
    paths = write_cache(tmp_path, other, target, 5)
    assert sorted(tmp_path.iterdir()) == paths and len(paths) == 2  # `train` takes all that are there


def test_a_block_longer_than_a_row_is_refused():
    assert pick_anchors(torch.ones(2, 6), 4, 5).tolist() == [[0], [0]]
    with pytest.raises(ValueError, match="block_size: 6, allowed: at most 5"):
        pick_anchors(torch.ones(2, 6), 4, 6)


def test_processes_share_an_epoch(tmp_path):
    """Two ranks see every row of an epoch once between them; the cache gives what the target computes."""
    rows, target = rows_of(counting_answers(8), LENGTH), CountingTarget()
    rows.tokens[:, LENGTH - 1] = torch.arange(8)  # tells rows apart
    paths = write_cache(tmp_path, rows, target, 8)
    for make in (
        lambda rank: cached_batches(paths, 2, 0, rank, 2, "cpu"),
        lambda rank: computed_batches(rows, target, 2, 0, rank, 2),
    ):
        seen = []
        for rank in range(2):
            batches = make(rank)
            for _ in range(2):
                batch = next(batches)
                seen += batch.tokens[:, LENGTH - 1].tolist()
                taps, hidden = target(batch.tokens[:, :-1])
                torch.testing.assert_close(batch.taps.float(), taps, atol=0.02, rtol=0.02)
                torch.testing.assert_close(batch.hidden.float(), hidden, atol=0.02, rtol=0.02)
        assert sorted(seen) == list(range(8))
    with pytest.raises(ValueError, match="batch"):
        next(computed_batches(rows, target, 5, 0, 0, 2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_drafts_learn(algorithm, tmp_path):
    target, rows = CountingTarget(), rows_of(counting_answers(40), LENGTH)
    trainer = Trainer(
        build_draft(small(algorithm)), target, TrainingOptions(60, batch=8, anchors=8, learning_rate=1e-2)
    )
    trainer.train(computed_batches(rows, target, 8, 0, 0, 1))
    assert len(trainer.log) == 60 and trainer.log[0]["accepted_length"] < 1.5
    assert trainer.log[-1]["accepted_length"] > 2.5
    save_draft(tmp_path, trainer.draft, {})
    again = load_draft(tmp_path)
    assert again.config == trainer.draft.config
    assert all(torch.equal(a, b) for a, b in zip(trainer.parameters, again.parameters(), strict=True))


class StoppedError(Exception):
    """A run that ends in the middle."""


@pytest.mark.parametrize("cached", [False, True])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path, cached):
    """The same weights, bit for bit, as those of a run in one piece, over the end of an epoch."""
    target, rows = CountingTarget(), rows_of(counting_answers(12), LENGTH)
    paths = write_cache(tmp_path / "cache", rows, target, 6)
    options = TrainingOptions(9, batch=3, anchors=4, learning_rate=1e-2, losses=LossWeights(coldest=0.3))

    def run(folder, stop_at=None):
        trainer = Trainer(build_draft(small("dspark")), target, options)
        trainer.resume(folder)
        if cached:
            batches = cached_batches(paths, 3, 0, 0, 1, "cpu", trainer.step)
        else:
            batches = computed_batches(rows, target, 3, 0, 0, 1, trainer.step)

        def after(trainer):
            if trainer.step == stop_at:
                trainer.save(folder)
                raise StoppedError

        try:
            trainer.train(batches, after)
        except StoppedError:
            return None
        return trainer

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "parts", 2) is None and run(tmp_path / "parts", 6) is None
    save_draft(tmp_path / "parts", build_draft(small("dspark"), 9), {})  # stopped while it was saving: another step's
    again = run(tmp_path / "parts")
    assert again.step == 9 and again.log == whole.log
    for name, value in whole.draft.state_dict().items():
        assert torch.equal(value, again.draft.state_dict()[name]), name
    other = Trainer(build_draft(small("dspark")), target, TrainingOptions(10, batch=3))
    with pytest.raises(ValueError, match="another steps, anchors, learning_rate"):
        other.resume(tmp_path / "parts")
    with pytest.raises(ValueError, match="another draft"):
        Trainer(build_draft(small("eagle3")), target, options).resume(tmp_path / "parts")
    state = tmp_path / "parts" / STATE_NAME
    state.write_bytes(state.read_bytes()[:300])
    with pytest.raises(ValueError, match=f"{STATE_NAME} cannot be read"):
        Trainer(build_draft(small("dspark")), target, options).resume(tmp_path / "parts")


def test_rate():
    options = TrainingOptions(100, learning_rate=1.0)
    assert options.rate(0) == pytest.approx(0.2)
    assert options.rate(50) == 1.0
    assert options.rate(85) == pytest.approx(0.5)


WORKER = """
import sys, torch
from deepinfer.deepspec.acceptance import Answer
from deepinfer.deepspec.losses import LossWeights, block_losses
from deepinfer.deepspec.pack import pack_answers, training_rows
from deepinfer.deepspec.rows import computed_batches, rows_of
from deepinfer.deepspec.drafts import build_draft
from deepinfer.deepspec.train import Trainer, TrainingOptions, processes, save_draft
from tests.deepspec.test_training import LENGTH, CountingTarget, counting_answers, small
torch.set_num_threads(1)
with processes("cpu") as (rank, ranks, device):
    assert device == "cpu"
    answers = counting_answers(16)
    short = [Answer(a.token_ids[: 5 + i], 2 + i, 0.0) for i, a in enumerate(answers[:8])]
    target, rows = CountingTarget(), rows_of(short + answers[8:], LENGTH)  # they do not count alike
    draft = build_draft(small("dspark"))
    options = TrainingOptions(3, batch=4 // ranks, anchors=5, losses=LossWeights(coldest=0.2))
    batches = computed_batches(rows, target, 4 // ranks, 0, rank, ranks)
    Trainer(draft, target, options, ranks, rank).train(batches)
    save_draft(__import__("pathlib").Path(sys.argv[1]) / str(rank), draft, {})
"""


def test_two_processes_do_what_one_does(tmp_path):
    """Gradients are averaged over gloo: the same weights on both ranks, and those of one process with all rows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}

    def start(rank: int, ranks: int, out):
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        return subprocess.Popen([sys.executable, "-c", WORKER, str(out)], env={**environment, **group})

    workers = [start(rank, 2, tmp_path / "two") for rank in range(2)] + [start(0, 1, tmp_path / "one")]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    one, first, second = (load_draft(tmp_path / name) for name in ("one/0", "two/0", "two/1"))
    fresh = build_draft(small("dspark"))
    for (name, a), b, c in zip(one.named_parameters(), first.parameters(), second.parameters(), strict=True):
        assert torch.equal(b, c), name
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4, msg=name)
    assert (one.fuse.weight - fresh.fuse.weight).abs().max() > 1e-4


def test_answers_go_on_where_they_were(tmp_path):
    path, asked = tmp_path / "answers.jsonl", []

    def write(prompts, sampling, first):
        asked.extend(range(first, first + len(prompts)))
        return [[sum(prompt), first] for prompt in prompts]

    prompts = [[i, i + 1] for i in range(5)]
    whole = write_answers(path, prompts, write, Sampling())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:10])
    asked.clear()
    again = write_answers(path, prompts, write, Sampling())
    assert asked == [3, 4] and [a.token_ids[:3] for a in again] == [a.token_ids[:3] for a in whole]
    assert read_answers(path) == again
    path.write_text("".join(lines[:4]) + lines[4][:10])
    asked.clear()
    assert len(write_answers(path, prompts, write, Sampling(), group=2)) == 5
    assert asked == [2, 3, 4]  # the third had a neighbour
    with pytest.raises(ValueError, match="other prompts"):
        write_answers(path, [[9, 9]], write, Sampling())


@pytest.mark.parametrize(
    "changed,target,named",
    [
        ({"temperature": 0.1}, "one", "temperature"),
        ({"max_tokens": 3}, "one", "max_tokens"),
        ({"seed": 5}, "one", "seed"),
        ({}, "two", "target"),
        ({"seed": 5}, "two", "target, seed"),
    ],
)
def test_answers_of_other_settings_are_not_gone_on_with(tmp_path, changed, target, named):
    path = tmp_path / "answers.jsonl"

    def write(prompts, sampling, first):
        return [[7] for _ in prompts]

    write_answers(path, [[1], [2]], write, Sampling(), target="one")
    assert len(write_answers(path, [[1], [2], [3]], write, Sampling(), target="one")) == 3
    with pytest.raises(ValueError, match=f"another {named}, allowed"):
        write_answers(path, [[1], [2]], write, Sampling(**changed), target=target)


def test_a_fingerprint_is_of_what_answers(tmp_path):
    """Weights, config and tokenizer change it; a draft head beside them does not."""
    for name in ("config.json", "model-00001-of-00001.safetensors"):
        (tmp_path / name).write_bytes(b"0" * 100)
    before = fingerprint(tmp_path)
    for name in (HEAD_NAME, CALIBRATION_NAME):
        (tmp_path / name).write_bytes(b"1")
    assert fingerprint(tmp_path) == before
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"0" * 99 + b"1")
    after = fingerprint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"{}")
    assert len({before, after, fingerprint(tmp_path)}) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "line 2: Expecting value"),
        ('{"num_answer": 1, "temperature": 0}', "'token_ids' is missing"),
        ("[1]", "line 2: not a JSON object"),
        ("[" * 200_000, "recursion"),
        (f'{{"token_ids": [1, 2], "num_answer": 1, "temperature": {10**400}}}', "too large"),
        ('{"token_ids": [1, 2], "temperature": 0}', "'num_answer' is missing"),
        ('{"token_ids": [1, "a"], "num_answer": 1, "temperature": 0}', "token ids"),
        ('{"token_ids": [1, -1], "num_answer": 1, "temperature": 0}', "token ids"),
        ('{"token_ids": [1, 2], "num_answer": 3, "temperature": 0}', "num_answer must be"),
        ('{"token_ids": [1, 2], "num_answer": 1, "temperature": NaN}', "temperature must be"),
    ],
)
def test_lines_that_are_no_answers_are_named(tmp_path, line, message):
    path = tmp_path / "answers" / "set-t0.jsonl"
    path.parent.mkdir()
    path.write_text('{"target": "me"}\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_folder(tmp_path)
    assert f"answers: {path}" in str(error.value)


def test_whose_answers_they_are(tmp_path):
    (tmp_path / "answers").mkdir()
    path = tmp_path / "answers" / "set-t0.jsonl"
    path.write_text('{"target": "me"}\n{"token_ids": [1, 2], "num_answer": 1, "temperature": 0}\n')
    assert read_folder(tmp_path, "me") == read_folder(tmp_path) == [Answer([1, 2], 1, 0.0)]
    with pytest.raises(ValueError, match="another target wrote"):
        read_folder(tmp_path, "somebody else")
    path.write_text('{"target": "me"}\n')
    with pytest.raises(ValueError, match="no answers in"):
        read_folder(tmp_path, "me")


def test_tokens_that_the_target_does_not_know_are_refused(tmp_path):
    target = CountingTarget()
    rows = rows_of([Answer([1, target.shape.vocab_size, 3], 2, 0.0)], LENGTH)
    for use in (
        lambda: write_cache(tmp_path, rows, target, 1),
        lambda: next(computed_batches(rows, target, 1, 0, 0, 1)),
    ):
        with pytest.raises(ValueError, match="the target's vocabulary"):
            use()
    with pytest.raises(ValueError, match="below 65,536"):
        pack_answers([Answer([1, 1 << 16], 1, 0.0)], 8)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    """The system lets no file of this process become longer than 1,000 bytes, as a full disk would not."""
    path = tmp_path / "draft.safetensors"
    save_whole(path, {"a": torch.ones(2)}, {})
    assert path.stat().st_mode & 0o777 == 0o644
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="draft.safetensors cannot be written"):
            save_whole(path, {"a": torch.zeros(1000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(load_file(path)["a"], torch.ones(2)) and list(tmp_path.iterdir()) == [path]


def test_packed_rows_hold_every_answer_once():
    answers = counting_answers(7)
    rows = pack_answers(answers, 40)
    inputs, targets, counted = rows.take(torch.arange(len(rows)))
    assert inputs.shape == (4, 40)  # two answers of 18 tokens a row
    found = [targets[counted.bool()].numel(), sorted(targets[counted.bool()].tolist())]
    written = sorted(token for answer in answers for token in answer.token_ids[-answer.num_answer :])
    assert found == [len(written), written]
    with pytest.raises(ValueError, match="length: 10, allowed: more"):
        pack_answers(answers, 10)


def test_training_rows_come_from_answers_and_from_packed_text(tmp_path):
    write_answers(tmp_path / "a" / "answers" / "x.jsonl", [[1, 2]] * 3, lambda p, s, f: [[3, 4]] * len(p), Sampling())
    (tmp_path / "b").mkdir()
    np.save(tmp_path / "b" / "train-0.npy", np.full((2, 9), 5, np.uint16))
    np.save(tmp_path / "b" / "targets-0.npy", np.full((2, 2), 255, np.uint8))
    both = training_rows([tmp_path / "a", tmp_path / "b"], 8)
    assert sorted(both.ids.tolist()) == sorted([[5] * 9] * 2 + [[1, 2, 3, 4, 1, 2, 3, 4, 0], [1, 2, 3, 4] + [0] * 5])
    with pytest.raises(ValueError, match="length: 10, the rows in --data have 8"):
        training_rows([tmp_path / "b"], 10)


def test_losses_at_the_temperature_that_was_drawn():
    """With a narrow range it is known; both distributions are heated alike."""
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(4, 2, 9, generator=generator), torch.randn(4, 2, 9, generator=generator)
    counted = torch.ones(4, 2)
    cold = block_losses(draft / 0.5, target / 0.5, None, counted, LossWeights())
    warm = block_losses(draft, target, None, counted, LossWeights())
    torch.manual_seed(0)
    heats = [draw_heat(LossWeights(coldest=0.5, at_one=0), torch.rand(2, 4)) for _ in range(30)]
    drawn = [block_losses(draft, target, None, counted, LossWeights(), heat).loss for heat in heats]
    same = block_losses(draft, draft, None, counted, LossWeights(), heats[0])
    torch.testing.assert_close(same.acceptance, torch.ones(2))
    assert min(cold.loss, warm.loss) < min(drawn) < max(drawn) < max(cold.loss, warm.loss)


def test_a_share_of_the_blocks_is_compared_at_temperature_one():
    """Of blocks that are all alike, their loss says the share, where the others are compared at nearly 0.05."""
    logits = torch.tensor([[[1.0, 0.9, 0.0]]]), torch.tensor([[[0.9, 1.0, 0.0]]])
    draft, target = (t.expand(4000, 1, 3) for t in logits)
    only_variation = {"cross_entropy": 0.0, "total_variation": 1.0, "confidence": 0.0}

    def loss(**heats):
        weights = LossWeights(**only_variation, **heats)
        heat = draw_heat(weights, torch.rand(2, 4000))
        return float(block_losses(draft, target, None, torch.ones(4000, 1), weights, heat).loss)

    torch.manual_seed(0)
    at_one, cold = loss(), loss(coldest=0.1, at_one=0.0)
    assert cold > 4 * at_one
    assert loss(coldest=0.1, at_one=1.0) == pytest.approx(at_one)
    assert loss(coldest=0.1, at_one=0.75) == pytest.approx(0.75 * at_one + 0.25 * cold, rel=0.05)

"""Acceptance length and projected speed-up of a draft, task set by task set."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.deepspec.acceptance import Acceptance, Answer, DraftBlocks, Judged, acceptance_of, judge, judge_lookup
from deepinfer.deepspec.drafts import BlockDraft, Eagle3Draft
from deepinfer.deepspec.losses import Blocks
from deepinfer.deepspec.targets import HuggingFaceTarget, V41Target, is_v41
from deepinfer.deepspec.train import CONFIG_NAME, load_draft
from deepinfer.deepspec.v41_blocks import BlockModel
from deepinfer.models.draft_calibration import read_calibration
from deepinfer.models.loader import is_draft, load_weights

TIMED_CONTEXT, TIMED_REPEATS = 128, 5
ROW_STEP = 64  # lengths that rows are rounded up to


@dataclass(frozen=True)
class LoadedDraft:
    """A draft ready to be asked."""

    blocks: DraftBlocks
    block_size: int
    draft_temperature: float = 1.0  # fitted by `calibrate`


def check_draft(target: Path, folder: Path) -> None:
    """That `folder` holds something that may be a draft for `target`, without loading either.

    Raises:
        ValueError: it does not.
    """
    if (folder / CONFIG_NAME).is_file():
        return
    if not is_v41(target) or not (folder / "config.json").is_file():
        raise ValueError(f"draft: neither {CONFIG_NAME} nor a checkpoint with a draft head in {folder}")
    if not ModelConfig.from_file(folder).num_nextn_predict_layers:
        raise ValueError(f"draft: the checkpoint in {folder} has no draft head (num_nextn_predict_layers is 0)")


def open_draft(target: V41Target | HuggingFaceTarget, folder: Path, length: int) -> LoadedDraft:
    """The draft in `folder`: one that `train` saved, or the head of a V4.1 checkpoint.

    Raises:
        ValueError: there is none, or it drafts for another target.
    """
    if (folder / CONFIG_NAME).is_file():
        draft = load_draft(folder, str(target.embed.device)).eval()
        if draft.config.target != target.shape:
            raise ValueError(f"draft: {folder} is for a target of {draft.config.target}, this one has {target.shape}")
        size = draft.config.block_size
        return LoadedDraft(_bound(draft, target), size, read_calibration(folder, size).draft_temperature)
    if not isinstance(target, V41Target):
        raise ValueError(f"draft: no {CONFIG_NAME} in {folder}, allowed: what `deepinfer deepspec train` wrote")
    config = ModelConfig.from_file(folder)
    if (config.hidden_size, config.vocab_size) != target.embed.shape[::-1]:
        raise ValueError(f"draft: the head in {folder} is of another model than the target")
    weights = load_weights(folder, config, target.embed.dtype, target.embed.device, include=is_draft)
    model = BlockModel(config, target.embed, target.head, length)

    def blocks(taps: Tensor, tokens: Tensor, anchors: Tensor) -> Blocks:
        return model(weights, taps, tokens, anchors)

    return LoadedDraft(blocks, model.size, read_calibration(folder, model.size).draft_temperature)


def _bound(draft: BlockDraft | Eagle3Draft, target: V41Target | HuggingFaceTarget) -> DraftBlocks:
    def blocks(taps: Tensor, tokens: Tensor, anchors: Tensor) -> Blocks:
        return draft(target, taps, tokens, anchors)

    return blocks


def usable(answers: list[Answer], block_size: int, length: int) -> list[Answer]:
    """Every answer that has a prompt, at least two tokens and room in a row of `length`."""
    return [
        answer
        for answer in answers
        if answer.num_answer >= 2
        and len(answer.token_ids) > answer.num_answer
        and len(answer.token_ids) + block_size + 1 <= length
    ]


def judge_all(
    target: V41Target | HuggingFaceTarget,
    draft: LoadedDraft,
    answers: list[Answer],
    length: int,
    is_drawn: bool = False,
    advance: Callable[[int], None] = lambda count: None,
    heats: Sequence[float] = (),
) -> list[Judged]:
    """The draft on every usable answer; `heats` as `judge` takes them."""
    judged = []
    how: dict[str, Any] = {"is_drawn": is_drawn, "draft_temperature": draft.draft_temperature, "heats": heats}
    for seed, answer in enumerate(usable(answers, draft.block_size, length)):
        needed = len(answer.token_ids) + draft.block_size + 1
        row = min(-(-needed // ROW_STEP) * ROW_STEP, length)
        judged.append(judge(target, draft.blocks, answer, row, draft.block_size, seed=seed, **how))
        advance(1)
    return judged


def lookup_all(draft: LoadedDraft, answers: list[Answer], length: int) -> list[Judged]:
    """Prompt lookup on the same answers, with as many drafts."""
    return [judge_lookup(answer, draft.block_size) for answer in usable(answers, draft.block_size, length)]


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step at batch 1."""

    decode: float  # the target on one token
    verify: float  # on block_size + 1 tokens
    draft: float  # one block

    def speed_up(self, acceptance: Acceptance) -> float:
        """Projected, against decoding token by token."""
        return acceptance.mean_length * self.decode / (self.verify + self.draft)


def step_times(
    target: V41Target | HuggingFaceTarget, target_folder: Path, folder: Path, draft: LoadedDraft
) -> StepTimes:
    """Measured on this machine: the target's steps where it is run, the engine or `transformers`, and the draft's, the
    head of a V4.1 checkpoint in the engine, any other as it was trained."""
    if isinstance(target, HuggingFaceTarget):
        decode, verify = _times_of_transformers(target, draft.block_size + 1)
    elif (folder / CONFIG_NAME).is_file():
        decode, verify, _ = _times_of_engine(target_folder, str(target.embed.device), draft.block_size + 1)
    else:
        return StepTimes(*_times_of_engine(folder, str(target.embed.device), draft.block_size + 1, with_head=True))
    return StepTimes(decode, verify, _time_of_block(target, draft))


def _milliseconds(run: Callable[[], Any], device: str) -> float:
    """The fastest of a few runs after one that does not count."""
    best = float("inf")
    for repeat in range(TIMED_REPEATS + 1):
        began = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        if repeat:
            best = min(best, time.perf_counter() - began)
    return 1e3 * best


@torch.no_grad()
def _time_of_block(target: V41Target | HuggingFaceTarget, draft: LoadedDraft) -> float:
    """A draft that `train` made, on one block behind TIMED_CONTEXT tokens, whose keys it computes as well."""
    device = target.embed.device
    tokens = torch.zeros(1, TIMED_CONTEXT + 1, dtype=torch.int64, device=device)
    taps = torch.zeros(1, TIMED_CONTEXT, target.shape.num_taps * target.shape.hidden_size, device=device)
    anchor = torch.tensor([[TIMED_CONTEXT - 1 - draft.block_size]], device=device)
    return _milliseconds(lambda: draft.blocks(taps, tokens, anchor), str(device))


@torch.no_grad()
def _times_of_transformers(target: HuggingFaceTarget, num_rows: int) -> tuple[float, float]:
    """A step of one token, and one of `num_rows`."""
    from transformers import DynamicCache

    device = str(target.embed.device)
    context = torch.zeros(1, TIMED_CONTEXT, dtype=torch.int64, device=device)

    # Releases of transformers differ in the name of this argument.
    name = "cache" if "cache" in inspect.signature(target.model.forward).parameters else "past_key_values"

    def step(count: int) -> float:
        cache = DynamicCache()
        target.model(context, use_cache=True, **{name: cache})

        def run() -> None:
            target.model(context[:, :count], use_cache=True, **{name: cache})
            cache.crop(-count)

        return _milliseconds(run, device)

    return step(1), step(num_rows)


def _times_of_engine(folder: Path, device: str, num_rows: int, with_head: bool = False) -> tuple[float, float, float]:
    """A step of the engine's model on one token, one on `num_rows`, and a block of its head (else 0), run eagerly."""
    from deepinfer.models.inputs import ModelInputs
    from deepinfer.models.registry import load_model

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = load_model(folder, dtype, device, draft_head=with_head)
    head, block = model.draft_head, 128
    caches = model.allocate_caches(2 + TIMED_CONTEXT // block, block, 2, model.default_cache_dtype)
    table = torch.arange(1, 2 + TIMED_CONTEXT // block, dtype=torch.int32, device=device).unsqueeze(0)
    slot = torch.ones(1, dtype=torch.int32, device=device)

    def inputs(start: int, count: int) -> ModelInputs:
        ends = torch.tensor([0, count], dtype=torch.int32, device=device)
        return ModelInputs(
            is_prefill=count > 1,
            token_ids=torch.zeros(count, dtype=torch.int64, device=device),
            positions=torch.arange(start, start + count, device=device),
            query_start=ends,
            context_lens=ends[1:] + start,
            block_tables=table,
            state_slots=slot,
            logits_rows=torch.arange(count, device=device),
        )

    def run(start: int, count: int) -> None:
        model.forward(inputs(start, count), caches)
        if with_head:
            head.store(model.taps, caches)

    run(0, TIMED_CONTEXT)
    last, token = torch.tensor([TIMED_CONTEXT - 1], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    return (
        _milliseconds(lambda: model.forward(inputs(TIMED_CONTEXT, 1), caches), device),
        _milliseconds(lambda: run(TIMED_CONTEXT, num_rows), device),
        _milliseconds(lambda: head.draft(last, token, slot, caches), device) if with_head else 0.0,
    )


def summary(
    judged: dict[str, list[Judged]], lookups: dict[str, list[Judged]], times: StepTimes
) -> dict[str, dict[str, Any]]:
    """Figures by task set, and of all together; `lookups` are those of prompt lookup on the same answers."""
    rows = {}
    every, every_lookup = (sum(sets.values(), list[Judged]()) for sets in (judged, lookups))
    for name, part, lookup in [*((n, judged[n], lookups[n]) for n in judged), ("all", every, every_lookup)]:
        if not part:
            continue
        acceptance = acceptance_of(part)
        rows[name] = {
            **vars(acceptance),
            "prompt_lookup": acceptance_of(lookup).mean_length,
            "speed_up": times.speed_up(acceptance),
        }
    return rows

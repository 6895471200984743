"""Which drafter an engine's settings ask for, and what is put together around it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.config.speculative import SpeculativeConfig
from deepinfer.engine.decode_curve import DecodeCurve
from deepinfer.engine.draft_graphs import DraftGraphs, draft_times
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.step import Runner
from deepinfer.engine.verification import Speculation
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.speculation.drafter import Drafter, DraftSlots
from deepinfer.speculation.head import LONG_MATCH, HeadDrafter
from deepinfer.speculation.limits import num_drafts
from deepinfer.speculation.ngram import NgramDrafter
from deepinfer.speculation.slot_tokens import SlotTokens

logger = logging.getLogger(__name__)


def make_drafter(runner: Runner, config: EngineConfig, max_model_len: int) -> Drafter | None:
    """The drafter of config.speculative_config."""
    speculative = config.speculative_config
    if speculative is None:
        return None
    if isinstance(runner, ModelRunner):
        count = runner.num_drafts
        if speculative.method == "dspark":
            assert isinstance(runner.model, DeepseekV41) and runner.model.draft_head is not None
            probabilities = None
            if speculative.draws:
                shape = config.max_num_seqs + 1, count, runner.vocab_size
                probabilities = torch.zeros(shape, dtype=torch.float32, device=config.device)
            copies = None
            if config.device == "cpu" and probabilities is None:
                lookup = SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=LONG_MATCH)
                copies = NgramDrafter(lookup, count, config.max_num_seqs + 1, max_model_len, config.device)
            return HeadDrafter(
                runner.model.draft_head, runner.caches, count, probabilities, runner.draft_context, copies
            )
    elif speculative.method == "dspark":
        raise ValueError("speculative method must not be dspark: this runner has no draft head")
    else:
        count = num_drafts(config)
    return NgramDrafter(speculative, count, config.max_num_seqs + 1, max_model_len, config.device)


def make_speculation(
    runner: Runner, config: EngineConfig, max_model_len: int, drafter: Drafter | None = None
) -> Speculation | None:
    """What an engine needs for its drafter, by default that of the configuration; None without one."""
    drafter = drafter or make_drafter(runner, config, max_model_len)
    if drafter is None:
        return None
    graphs = getattr(runner, "graphs", None)
    if graphs is not None:
        state = graphs.buffers.slot_tokens
    else:
        state = SlotTokens.allocate(config.max_num_seqs + 1, drafter.num_drafts, config.device)
    variable = config.speculative_config is None or config.speculative_config.variable_length
    step_ms, draft_ms = None, None
    if isinstance(drafter, HeadDrafter):
        if graphs is not None and graphs.is_captured:
            vocab_size = None if drafter.probabilities is None else runner.vocab_size
            drafter.run = captured(drafter.draft_slots, state, config, vocab_size)
        draft_ms = draft_times(drafter.run, state) if variable else None
    measure: Callable[[], DecodeCurve] | None = getattr(runner, "decode_curve", None)
    if variable and measure is not None:
        most = config.max_num_seqs * (1 + drafter.num_drafts)
        sizes = sorted({shape.rows for shape in graphs.shapes}) if graphs is not None else None
        step_ms = times_by_rows(measure(), most + 1, sizes)
    return Speculation(drafter, state, step_ms, draft_ms, variable, config.overlaps_steps)


def captured(draft: DraftSlots, state: SlotTokens, config: EngineConfig, vocab_size: int | None) -> DraftSlots:
    """`draft` in CUDA graphs; as it is where it cannot be captured, which is said. vocab_size: if drafts are drawn."""
    graphs = DraftGraphs(draft, state, config.cudagraph_batch_size_interval, vocab_size)
    try:
        graphs.capture()
    except RuntimeError as error:
        logger.warning("drafts are made without CUDA graphs: %s", str(error).partition("\n")[0])
        return draft
    return graphs


def times_by_rows(curve: DecodeCurve, most: int, sizes: list[int] | None = None) -> np.ndarray:
    """Milliseconds [most + 1] of decode steps of 0 to `most` rows; `sizes`: those that steps are padded to.

    A step never takes longer than one of more rows: where it did when they were timed, it was disturbed.
    """
    rows = np.arange(most + 1)
    if sizes:
        padded = np.append(np.array(sizes), rows[-1])
        rows = np.maximum(padded[np.searchsorted(np.array(sizes), rows)], rows)
    times = np.array([curve.step_ms(int(count)) for count in rows])
    return np.minimum.accumulate(times[::-1])[::-1]

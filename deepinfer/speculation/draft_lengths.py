"""How many drafts of each sequence to verify: as many as raise the tokens that a second is expected to give.

DSpark's rule (spec: model, section 8): a step with B rows takes step_ms(B) and gives Theta = tau / step_ms(B) tokens a
millisecond, where tau is a token a sequence and the chance of each draft that it and all before it are accepted. Drafts
are admitted in the order of that chance.

Drafts that are compared with the target's own draws may be chosen in any way, the output is the same: the best of all
numbers of drafts is taken, also behind a fall of Theta (a captured step costs the same up to its padded size). Drafts
that were drawn themselves are admitted until the first fall only: whether a draft is verified must not depend on what
it is, which the chances of the drafts behind it tell.
"""

from __future__ import annotations

import numpy as np


def draft_lengths(
    survival: np.ndarray, room: np.ndarray, step_ms: np.ndarray, until_first_fall: bool = False
) -> np.ndarray:
    """Drafts to verify of each of S sequences, int64 [S].

    Args:
        survival: [S, K] chance that draft i and all before it are accepted; does not rise along a row.
        room: int [S], most drafts of each.
        step_ms: [S * K + 1] milliseconds of a step by the drafts that it verifies.
        until_first_fall: of Theta, for drafts that were drawn.
    """
    num_sequences, num_drafts = survival.shape
    if room.min() < num_drafts or not survival.min() > 0:  # also where one is no number
        has_chance = (np.arange(num_drafts) < room[:, None]) & (survival > 0)
        survival = np.where(has_chance, survival, 0.0)
    ordered = np.sort(survival, axis=None)[::-1]
    tau = np.cumsum(ordered)
    theta = (tau + num_sequences) / step_ms[1 : len(tau) + 1]
    without = num_sequences / step_ms[0]
    if until_first_fall:
        falls = np.diff(theta, prepend=without) < 0
        count = int(falls.argmax()) if falls.any() else len(theta)
    else:
        most = int(theta.argmax())
        count = most + 1 if theta[most] > without else 0
    count = min(count, int(np.count_nonzero(ordered)))
    if count == 0:
        return np.zeros(num_sequences, np.int64)
    lengths = (survival >= ordered[count - 1]).sum(axis=1)
    if lengths.sum() > count:  # not all of the equal ones that come last
        lengths = np.bincount(np.argsort(-survival, axis=None)[:count] // num_drafts, minlength=num_sequences)
    return lengths


def expected_rates(survival: np.ndarray, num_sequences: int, step_ms: np.ndarray) -> tuple[float, float]:
    """Tokens a millisecond of steps of so many sequences, whose drafts have chances like these: with the best numbers
    of drafts, and with all.

    survival: [N, K], N >= 1, any drafts. They are taken for those of N // num_sequences steps, or repeated to be those
    of one. step_ms: [num_sequences * K + 1] as above.
    """
    num_steps = max(len(survival) // num_sequences, 1)
    chances = np.resize(survival, (num_steps, num_sequences * survival.shape[1]))
    gained = np.cumsum(-np.sort(-chances, axis=1), axis=1)
    tau = num_sequences + np.concatenate((np.zeros((num_steps, 1)), gained), axis=1)
    best = (tau / step_ms).argmax(axis=1)
    best_rate = tau[np.arange(num_steps), best].sum() / step_ms[best].sum()
    return float(best_rate), float(tau[:, -1].sum() / (num_steps * step_ms[-1]))

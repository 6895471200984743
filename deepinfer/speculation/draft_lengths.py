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
    has_chance = (np.arange(num_drafts) < room[:, None]) & (survival > 0)  # also not what is no number
    chances = np.where(has_chance, survival, 0.0).ravel()
    order = np.argsort(-chances)[: np.count_nonzero(chances)]  # only how many of a sequence are admitted matters
    tau = num_sequences + np.concatenate(([0.0], np.cumsum(chances[order])))
    theta = tau / step_ms[: len(tau)]
    if until_first_fall:
        falls = np.diff(theta) < 0
        best = int(falls.argmax()) if falls.any() else len(order)
    else:
        best = int(theta.argmax())
    return np.bincount(order[:best] // num_drafts, minlength=num_sequences)


def price_of_all(step_ms: np.ndarray) -> float:
    """The chance that a draft must have for each token of a step's tau so that verifying all is best; see `all_pay`.

    Theta of all N drafts is above that of any n if (the chances of the others) / tau_n > step_ms[N] / step_ms[n] - 1.
    The others are N - n and have no less than the least chance, and tau_n is at most tau.
    """
    rest = np.arange(len(step_ms) - 1, 0, -1)
    return float(((step_ms[-1] / step_ms[:-1] - 1.0) / rest).max())


def all_pay(survival: np.ndarray, price: float) -> bool:
    """Whether `draft_lengths` is sure to admit all drafts with these chances [S, K], which costs less to find out."""
    return float(survival.min()) > price * (len(survival) + float(survival.sum()))


def expected_rate(survival: np.ndarray, num_sequences: int, step_ms: np.ndarray) -> float:
    """Tokens a millisecond of steps of so many sequences, whose drafts have chances like these.

    survival: [N, K], N >= 1, any drafts. They are taken for those of N // num_sequences steps, or repeated to be those
    of one. step_ms: [num_sequences * K + 1] as above.
    """
    num_steps = max(len(survival) // num_sequences, 1)
    chances = np.resize(survival, (num_steps, num_sequences * survival.shape[1]))
    gained = np.cumsum(-np.sort(-chances, axis=1), axis=1)
    tau = num_sequences + np.concatenate((np.zeros((num_steps, 1)), gained), axis=1)
    best = (tau / step_ms).argmax(axis=1)
    return float(tau[np.arange(num_steps), best].sum() / step_ms[best].sum())

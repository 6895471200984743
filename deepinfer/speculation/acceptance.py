"""AcceptanceRates: how often drafts have been accepted lately, for drafters that have no confidence of their own."""

from __future__ import annotations

PRIOR_RATE = 0.7  # of a draft that nothing is known of
PRIOR_WEIGHT = 4.0  # drafts that this counts as
MEMORY = 400.0  # drafts after which what was seen before counts little


class AcceptanceRates:
    """Rates by kind of draft (0 to num_kinds - 1) and by position, given that all drafts before it were accepted."""

    def __init__(self, num_kinds: int, num_drafts: int) -> None:
        self._tried = [[PRIOR_WEIGHT] * num_drafts for _ in range(num_kinds)]
        self._accepted = [[PRIOR_WEIGHT * PRIOR_RATE] * num_drafts for _ in range(num_kinds)]

    def observe(self, kind: int, num_verified: int, num_accepted: int) -> None:
        """Of num_verified drafts the first num_accepted were accepted; what came after the first other says nothing."""
        tried, accepted = self._tried[kind], self._accepted[kind]
        for position in range(min(num_accepted + 1, num_verified)):
            if tried[position] > MEMORY:
                tried[position] *= 0.5
                accepted[position] *= 0.5
            tried[position] += 1.0
            accepted[position] += position < num_accepted

    def survival(self, kind: int) -> list[float]:
        """Chance that draft i and all before it are accepted."""
        result, chance = [], 1.0
        for tried, accepted in zip(self._tried[kind], self._accepted[kind], strict=True):
            chance *= accepted / tried
            result.append(chance)
        return result

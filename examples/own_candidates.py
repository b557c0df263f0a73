"""A selector that asks some clients for their loss before it chooses.

fedentopt compare --method fedavg --method own_candidates:PowerOfChoice:per_seat=3
"""

from collections.abc import Iterable

import numpy as np

from fedentopt.selection import Candidates, ClientId, Selector, setting


class PowerOfChoice(Selector):
    """Of some clients drawn at random, those on whose data the global model does worst.

    After Cho, Wang and Joshi, "Towards understanding biased client selection in federated learning", AISTATS 2022, who
    draw by numbers of samples; here everybody is drawn alike.
    """

    needs = frozenset({"candidate_loss"})
    reads_label_counts = False
    per_seat: int = setting(2, help="candidates asked for each seat in the cohort", low=1)

    def candidates(self, available: Iterable[ClientId] | None = None) -> Candidates:
        """Whom to ask; `Candidates(ids, samples=64)` would have them look at 64 samples each."""
        numbers = self.available_numbers(available)
        asked = self.rng().permutation(numbers)[: self.per_seat * self.cohort_size]
        return Candidates(tuple(self.clients[number] for number in asked))

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        """Highest loss first; who was not asked has NaN, which sorts last. None: nobody could answer."""
        known = np.full(available.size, np.nan) if losses is None else losses[available]
        return available[np.argsort(-known, kind="stable")[: self.cohort_size]].tolist()

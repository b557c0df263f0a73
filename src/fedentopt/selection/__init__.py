"""Which clients train next: NumPy only, no files, no network, no model."""

from fedentopt.selection.cohort import ClientId, Cohort, CohortWarning
from fedentopt.selection.entropy import EntropySelector
from fedentopt.selection.kl import KLSelector
from fedentopt.selection.random import RandomSelector
from fedentopt.selection.selector import Selector

__all__ = ["ClientId", "Cohort", "CohortWarning", "EntropySelector", "KLSelector", "RandomSelector", "Selector"]

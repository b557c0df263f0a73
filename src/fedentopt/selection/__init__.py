"""Which clients train next: NumPy only, no files, no network, no model. One selector per file.

A new file is imported here; its line of declaration (`@selector("name", label="Name")`) does the rest.
"""

from fedentopt.selection.cohort import ClientId, Cohort, CohortWarning
from fedentopt.selection.random import RandomSelector  # isort: split

from fedentopt.selection.entropy import EntropySelector  # isort: split

from fedentopt.selection.kl import KLSelector
from fedentopt.selection.selector import (
    NEEDS,
    SELECTORS,
    Candidates,
    Head,
    Observation,
    Selector,
    selector,
)
from fedentopt.selection.stream import cohorts
from fedentopt.settings import setting

__all__ = [
    "NEEDS",
    "SELECTORS",
    "Candidates",
    "ClientId",
    "Cohort",
    "CohortWarning",
    "EntropySelector",
    "Head",
    "KLSelector",
    "Observation",
    "RandomSelector",
    "Selector",
    "cohorts",
    "selector",
    "setting",
]

"""Balanced cohorts for federated learning under label skew.

The selection library is here; the rest (`fedentopt.partition`, `fedentopt.privacy`, `fedentopt.simulation`,
`fedentopt.flower`, ...) is imported from where it lives. Importing this package needs NumPy and nothing else.
"""

from fedentopt.selection import (
    ClientId,
    Cohort,
    CohortWarning,
    EntropySelector,
    KLSelector,
    RandomSelector,
    Selector,
    cohorts,
)
from fedentopt.tables import read_counts

__version__ = "0.1.0"

__all__ = [
    "ClientId",
    "Cohort",
    "CohortWarning",
    "EntropySelector",
    "KLSelector",
    "RandomSelector",
    "Selector",
    "__version__",
    "cohorts",
    "read_counts",
]

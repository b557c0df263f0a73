"""What a client's last layer says about its labels, and whom to believe: NumPy only."""

from fedentopt.audit.estimate import (
    FURTHEST,
    Estimates,
    LabelEstimate,
    estimates_together,
    head_change,
    label_estimate,
    label_estimates,
    travel_of,
)
from fedentopt.audit.ledger import POLICIES, Audit, Change, Suspicion, area_under_curve, change_table
from fedentopt.audit.recall import Recall, RecallSuspicion, is_without_sums

__all__ = [
    "FURTHEST",
    "POLICIES",
    "Audit",
    "Change",
    "Estimates",
    "LabelEstimate",
    "Recall",
    "RecallSuspicion",
    "Suspicion",
    "area_under_curve",
    "change_table",
    "estimates_together",
    "head_change",
    "is_without_sums",
    "label_estimate",
    "label_estimates",
    "travel_of",
]

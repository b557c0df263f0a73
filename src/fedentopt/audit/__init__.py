"""What a client's last layer says about its labels, and whom to believe: NumPy only."""

from fedentopt.audit.estimate import LabelEstimate, head_change, label_estimate, label_estimates, travel_of
from fedentopt.audit.ledger import POLICIES, Audit, Change, Suspicion, area_under_curve

__all__ = [
    "POLICIES",
    "Audit",
    "Change",
    "LabelEstimate",
    "Suspicion",
    "area_under_curve",
    "head_change",
    "label_estimate",
    "label_estimates",
    "travel_of",
]

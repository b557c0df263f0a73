"""What a client's last layer says about its labels, and whom to believe: NumPy only."""

from fedentopt.audit.estimate import LabelEstimate, head_change, label_estimate, label_estimates, travel_of
from fedentopt.audit.ledger import POLICIES, Audit, Change, Suspicion, area_under_curve
from fedentopt.audit.recall import Recall, RecallSuspicion

__all__ = [
    "POLICIES",
    "Audit",
    "Change",
    "LabelEstimate",
    "Recall",
    "RecallSuspicion",
    "Suspicion",
    "area_under_curve",
    "head_change",
    "label_estimate",
    "label_estimates",
    "travel_of",
]

"""What a selector would do for a federation, from its label counts alone: no training, no torch.

`make_plan(counts, ...)` tries every selector that needs nothing else and recommends one; `write_page` shows it.
"""

from fedentopt.pages import check_page
from fedentopt.plan.page import write_page
from fedentopt.plan.planning import Plan, make_plan
from fedentopt.plan.trying import Skipped

__all__ = ["Plan", "Skipped", "check_page", "make_plan", "write_page"]

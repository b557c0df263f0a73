"""Which clients train next: NumPy only, no files, no network, no model. One selector per file.

A new file is imported here; its line of declaration (`@selector("name", label="Name")`) does the rest.
"""

from fedentopt.selection.cohort import ClientId, Cohort, CohortWarning
from fedentopt.selection.random import RandomSelector  # isort: split

from fedentopt.selection.entropy import EntropySelector  # isort: split

from fedentopt.selection.kl import KLSelector  # isort: split

from fedentopt.selection.fed_cbs import FedCBSSelector  # isort: split

from fedentopt.selection.pow_d import PowDSelector  # isort: split

from fedentopt.selection.cpow_d import CPowDSelector  # isort: split

from fedentopt.selection.rpow_d import RPowDSelector  # isort: split

from fedentopt.selection.hics_fl import HiCSFLSelector  # isort: split

from fedentopt.selection.clustered_size import ClusteredSizeSelector  # isort: split

from fedentopt.selection.clustered_update import ClusteredUpdateSelector  # isort: split

from fedentopt.selection.clustered_label import ClusteredLabelSelector  # isort: split

from fedentopt.selection.oort import OortSelector  # isort: split

from fedentopt.selection.divfl import DivFLSelector  # isort: split

from fedentopt.selection.flips import FLIPSSelector  # isort: split

from fedentopt.selection.cycle import CycleSelector  # isort: split

from fedentopt.selection.entropy_swap import EntropySwapSelector  # isort: split

from fedentopt.selection.feedback import NEEDS, Candidates, Census, Head, Observation
from fedentopt.selection.inferred import InferredSelector
from fedentopt.selection.selector import SELECTORS, Selector, selector
from fedentopt.selection.stream import cohorts
from fedentopt.settings import setting

__all__ = [
    "NEEDS",
    "SELECTORS",
    "CPowDSelector",
    "Candidates",
    "Census",
    "ClientId",
    "ClusteredLabelSelector",
    "ClusteredSizeSelector",
    "ClusteredUpdateSelector",
    "Cohort",
    "CohortWarning",
    "CycleSelector",
    "DivFLSelector",
    "EntropySelector",
    "EntropySwapSelector",
    "FLIPSSelector",
    "FedCBSSelector",
    "Head",
    "HiCSFLSelector",
    "InferredSelector",
    "KLSelector",
    "Observation",
    "OortSelector",
    "PowDSelector",
    "RPowDSelector",
    "RandomSelector",
    "Selector",
    "cohorts",
    "selector",
    "setting",
]

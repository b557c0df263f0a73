"""The algorithms: what a client optimises, how the server combines, what both remember. One method per file.

A new file is imported here; its line of declaration (`@algorithm("name", label="Name")`) does the rest.
"""

from fedentopt.algorithms.algorithm import (
    AFTER_STEP,
    ALGORITHMS,
    IN_GRADIENT,
    Algorithm,
    Client,
    LocalTerms,
    Mixing,
    ModelSizes,
    Round,
    SecondStage,
    Vectors,
    algorithm,
    effective_steps,
    overrides,
)
from fedentopt.algorithms.fedavg import FedAvg  # isort: split

from fedentopt.algorithms.fedprox import FedProx  # isort: split

from fedentopt.algorithms.fednova import FedNova  # isort: split

from fedentopt.algorithms.scaffold import Scaffold  # isort: split

from fedentopt.algorithms.fedrs import FedRS  # isort: split

from fedentopt.algorithms.fedlc import FedLC  # isort: split

from fedentopt.algorithms.fedconcat import FedConcat, cluster_clients, concat_budget  # isort: split

from fedentopt.algorithms.fedentropy import FedEntropy  # isort: split

from fedentopt.algorithms.fedavgm import FedAvgM  # isort: split

from fedentopt.algorithms.fedadam import FedAdam  # isort: split

from fedentopt.algorithms.fedyogi import FedYogi  # isort: split

from fedentopt.algorithms.fedexp import FedExP  # isort: split

from fedentopt.algorithms.feddyn import FedDyn  # isort: split

from fedentopt.algorithms.feddisco import FedDisco  # isort: split

from fedentopt.algorithms.balanced_softmax import BalancedSoftmax  # isort: split

from fedentopt.algorithms.fedntd import FedNTD  # isort: split

from fedentopt.algorithms.local_code import Batch, LocalContext, Outputs
from fedentopt.algorithms.moon import Moon
from fedentopt.settings import setting

__all__ = [
    "AFTER_STEP",
    "ALGORITHMS",
    "IN_GRADIENT",
    "Algorithm",
    "BalancedSoftmax",
    "Batch",
    "Client",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedConcat",
    "FedDisco",
    "FedDyn",
    "FedEntropy",
    "FedExP",
    "FedLC",
    "FedNTD",
    "FedNova",
    "FedProx",
    "FedRS",
    "FedYogi",
    "LocalContext",
    "LocalTerms",
    "Mixing",
    "ModelSizes",
    "Moon",
    "Outputs",
    "Round",
    "Scaffold",
    "SecondStage",
    "Vectors",
    "algorithm",
    "cluster_clients",
    "concat_budget",
    "effective_steps",
    "overrides",
    "setting",
]

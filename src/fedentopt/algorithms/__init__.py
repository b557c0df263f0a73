"""The compared algorithms: what a client optimises, and how the server combines."""

from fedentopt.algorithms.algorithm import Algorithm, LocalTerms, Mixing, effective_steps
from fedentopt.algorithms.fedconcat import ConcatBudget, FedConcat, cluster_clients, concat_budget
from fedentopt.algorithms.fedentropy import FedEntropy, ValuedDraw
from fedentopt.algorithms.fedlc import FedLC
from fedentopt.algorithms.fednova import FedNova
from fedentopt.algorithms.fedprox import FedProx
from fedentopt.algorithms.fedrs import FedRS
from fedentopt.algorithms.scaffold import ControlVariates, Scaffold

__all__ = [
    "Algorithm",
    "ConcatBudget",
    "ControlVariates",
    "FedConcat",
    "FedEntropy",
    "FedLC",
    "FedNova",
    "FedProx",
    "FedRS",
    "LocalTerms",
    "Mixing",
    "Scaffold",
    "ValuedDraw",
    "cluster_clients",
    "concat_budget",
    "effective_steps",
]

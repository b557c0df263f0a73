"""Label-aware selection inside Flower: the strategy for the server, the reply for the client.

    from fedentopt.flower import FedEntOpt, LabelAware, start      # ServerApp
    from fedentopt.flower import discreet, label_report            # ClientApp

Needs the extra: pip install "fedentopt[flower]".
"""

from __future__ import annotations

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    raise ImportError("fedentopt.flower needs Flower; install it with: pip install 'fedentopt[flower]'") from error

from fedentopt.flower.client import client_id, discreet, label_report, owner_context
from fedentopt.flower.configured import strategy_from
from fedentopt.flower.loop import start
from fedentopt.flower.progress import SelectionResult, to_tensorboard, to_wandb
from fedentopt.flower.strategy import FedEntOpt, LabelAware, NoClientsError, RoundSelection
from fedentopt.server.local_training import LocalTraining

__all__ = [
    "FedEntOpt",
    "LabelAware",
    "LocalTraining",
    "NoClientsError",
    "RoundSelection",
    "SelectionResult",
    "client_id",
    "discreet",
    "label_report",
    "owner_context",
    "start",
    "strategy_from",
    "to_tensorboard",
    "to_wandb",
]

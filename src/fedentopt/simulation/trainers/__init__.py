"""Trainers: start models and work in, trained models out. The room's door: code outside imports from here.

`Trainer` is the contract; `choose_trainer` and `make_trainer` pick one and build it: `LoopTrainer` (CPU threads),
`StackedTrainer` (many small models as one), `StreamsTrainer` (ordinary modules side by side). FedConcat's second stage,
which trains one layer only, takes the nets themselves.
"""

from __future__ import annotations

from fedentopt.simulation.trainers.bound_model import BoundModel
from fedentopt.simulation.trainers.choice import (
    TRAINERS,
    MeanLosses,
    Trainer,
    choose_trainer,
    make_trainer,
    resolve_device,
    usable_cores,
    wants_channels_last,
)
from fedentopt.simulation.trainers.loop import LoopTrainer, Worker
from fedentopt.simulation.trainers.stacked import StackedTrainer
from fedentopt.simulation.trainers.stacked_nets import LoweredNet
from fedentopt.simulation.trainers.streams import StreamsTrainer
from fedentopt.simulation.trainers.wide_net import WideNet

__all__ = [
    "TRAINERS",
    "BoundModel",
    "LoopTrainer",
    "LoweredNet",
    "MeanLosses",
    "StackedTrainer",
    "StreamsTrainer",
    "Trainer",
    "WideNet",
    "Worker",
    "choose_trainer",
    "make_trainer",
    "resolve_device",
    "usable_cores",
    "wants_channels_last",
]

"""The work in fluke, which trains its clients one after another in one process, on OMP_NUM_THREADS cores."""

from __future__ import annotations

import torch
import work
from fluke import FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server


class Ends:
    """An observer of the server's rounds."""

    def __init__(self, clock: work.Clock) -> None:
        self.clock = clock

    def end_round(self, round: int) -> None:
        self.clock.round_ended()


def main() -> None:
    options = work.options()
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    data, clock, model = work.Data(options.data), work.Clock(), work.LeNet5()
    sgd = OptimizerConfigurator(
        {"name": "SGD", "lr": work.LR, "momentum": work.MOMENTUM, "weight_decay": work.WEIGHT_DECAY}
    )
    clients = []
    for number in range(work.CLIENTS):
        x, y = data.client(number)
        batches = FastDataLoader(x, y, num_labels=work.CLASSES, batch_size=work.BATCH, shuffle=True)
        clients.append(
            Client(number, batches, None, sgd, torch.nn.CrossEntropyLoss(), local_epochs=work.EPOCHS, persistency=False)
        )
    algorithm = FedAVG(work.CLIENTS, None, {}, clients=clients, server=Server(model, None, clients, weighted=True))
    algorithm.attach([Ends(clock)])
    algorithm.run(options.rounds, work.COHORT / work.CLIENTS, finalize=False)
    clock.write(options.out, algorithm.server.model, data, ("fluke-fl",))


if __name__ == "__main__":
    main()

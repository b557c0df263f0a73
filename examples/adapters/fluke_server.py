"""fluke (pip install fluke-fl): its server with cohorts of maximum label entropy in the place of random ones.

An algorithm takes it like any server of fluke's:

    class EntropyFedAvg(FedAVG):
        def get_server_class(self):
            return EntropyServer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fluke.client import Client
from fluke.server import Server

from fedentopt import Cohort, EntropySelector, cohorts
from fedentopt.labels import label_counts


class EntropyServer(Server):
    """Half of the clients that are not in a cohort's place are kept out for a while (`buffer_share`)."""

    def __init__(self, *args: Any, buffer_share: float = 0.5, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hyper_params.update(buffer_share=buffer_share, seed=seed)
        self._stream: Iterator[Cohort] | None = None

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        if self._stream is None:
            size = max(1, int(self.n_clients * eligible_perc))
            kept_out = int(self.hyper_params.buffer_share * (self.n_clients - size))
            labels = [client.train_set.tensors[1].numpy() for client in self.clients]
            classes = 1 + max(int(each.max()) for each in labels)
            selector = EntropySelector(size, kept_out, seed=self.hyper_params.seed)
            selector.register([label_counts(each, classes) for each in labels])
            self._stream = cohorts(selector)
        return [self.clients[place] for place in next(self._stream).clients]

"""What a run's method remembers from round to round: vectors of the server and of every client, and, where they are
asked for, every client's last model and the direction of its last update.

Beyond the server's vectors it is a row per client, gigabytes for large models. So a checkpoint reads only the rows of
clients that `changed` since the one before, and `before_change` tells it of rows that are about to change while it may
still be reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from fedentopt.algorithms import Round, Vectors
from fedentopt.results.records import ClientRow
from fedentopt.selection import Selector
from fedentopt.simulation.device import to_device
from fedentopt.simulation.feedback import KeptUpdates
from fedentopt.simulation.hooks import Hooks
from fedentopt.simulation.layout import FlatLayout

SERVER, CLIENT = "vectors.server.", "vectors.client."
MODELS, UPDATES = "vectors.models", "vectors.updates"


def keeps_updates(selector: Selector) -> bool:
    """Whether directions of updates are kept for a selector: where it takes their cosines in the place of updates."""
    return "update" in getattr(selector, "needs", ()) and bool(getattr(selector, "cosines_suffice", False))


class MethodMemory:
    """Of one run. `server` holds the algorithm's vectors (P,) by name, `client` its rows (clients, P); `models`
    (clients, width) and `updates` (clients, P) are None where nobody wants them."""

    def __init__(
        self, hooks: Hooks, selector: Selector, layout: FlatLayout, clients: int, device: torch.device,
        fresh: Callable[[], nn.Module] | None,
    ) -> None:  # fmt: skip
        """`fresh` draws another network of the same kind, for vectors that start as one."""
        algorithm, width = hooks.algorithm, layout.parameter_width
        self._hooks, self._layout, self._clients, self._device = hooks, layout, clients, device
        drawn = None
        if algorithm.vectors_start_as_network:
            assert fresh is not None
            drawn = layout.pack(fresh().state_dict())[:width].to(device)

        def initial(name: str, *rows: int) -> torch.Tensor:
            if drawn is None:
                return hooks.initial(name, *rows, width, device=device)
            return drawn.expand(*rows, width).clone()

        self.server = {name: initial(name) for name in algorithm.server_vectors}
        self.client = {name: initial(name, clients) for name in algorithm.client_vectors}
        self.models = torch.zeros(clients, layout.width, device=device) if algorithm.keeps_models else None
        self.updates = KeptUpdates(clients, width, device) if keeps_updates(selector) else None
        self.seen: set[int] = set()  # clients whose last model is kept
        self.changed: set[int] = set()  # clients of whom something else is remembered than at the last checkpoint
        self.before_change: Callable[[Iterable[int]], None] = lambda clients: None

    @property
    def learns(self) -> bool:
        """Whether a round's trained models change anything here."""
        return self._hooks.absorbs or self.models is not None

    def of(self, client: int) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """A client's own vectors by name, and its last model where one is kept: the rows themselves."""
        model = self.models[client] if self.models is not None and client in self.seen else None
        return {name: rows[client] for name, rows in self.client.items()}, model

    def pushes(self, clients: tuple[int, ...]) -> torch.Tensor:
        """The linear terms of these clients' objectives, (M, P)."""
        vectors = self._vectors(self._numbers(clients))
        return self._hooks.push(vectors, len(clients), self._layout.parameter_width)

    def absorb(self, clients: tuple[int, ...], start: torch.Tensor, trained: torch.Tensor, about: Round | None) -> None:
        """Let the algorithm learn from a round in which its clients went from `start` (width,) to `trained` (M, width);
        `about` is what it is told of the round, where it has an `absorb`."""
        width = self._layout.parameter_width
        self.before_change(clients)
        if self.models is not None:  # before own code, which may change what it is given
            self.models.index_copy_(0, self._numbers(clients), trained)
            self.seen.update(clients)
        if about is not None:
            numbers = self._numbers(clients)
            vectors = self._hooks.absorb(self._vectors(numbers), start[:width], trained[:, :width], about)
            self.server = vectors.server
            for name, rows in vectors.client.items():
                self.client[name].index_copy_(0, numbers, rows)
        self.changed.update(clients)

    def updates_of(self, clients: tuple[int, ...]) -> KeptUpdates | None:
        """Where the updates of these clients are to be kept, where the selector wants their cosines only."""
        if self.updates is not None:
            self.before_change(clients)
            self.changed.update(clients)
        return self.updates

    @property
    def client_rows(self) -> dict[str, torch.Tensor]:
        """What is remembered of every client, by the name a checkpoint gives it: (clients, width) each."""
        found = {f"{CLIENT}{name}": rows for name, rows in self.client.items()}
        if self.updates is not None:
            found[UPDATES] = self.updates.rows
        return found if self.models is None else found | {MODELS: self.models}

    @property
    def server_rows(self) -> dict[str, torch.Tensor]:
        """What is remembered beside clients, by the name a checkpoint gives it."""
        return {f"{SERVER}{name}": vector for name, vector in self.server.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor], rows: Iterable[ClientRow], seen: Iterable[int]) -> None:
        """Go on from what a checkpoint kept, of the shapes that this run has."""
        own, mine = self._layout.from_canonical, self.client_rows
        self.server = {name: own(tensors[f"{SERVER}{name}"][None])[0].to(self._device) for name in self.server}
        for name in mine.keys() & tensors.keys():  # of an older version, which wrote every client every time
            mine[name].copy_(own(tensors[name]))
            self.changed.update(range(self._clients))
        for name, client, values in rows:
            if name in mine:  # a vector that the method had before its code was changed: the recorder refuses that
                mine[name][client].copy_(own(values[None])[0])
        self.seen = set(seen)

    def _vectors(self, numbers: torch.Tensor) -> Vectors:
        return Vectors(dict(self.server), {name: rows[numbers] for name, rows in self.client.items()})

    def _numbers(self, clients: tuple[int, ...]) -> torch.Tensor:
        return to_device(torch.tensor(clients, dtype=torch.int64), self._device)

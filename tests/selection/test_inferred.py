"""Selection by inferred labels among many clients: what it does per client does not grow with their number."""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt.selection import Head, InferredSelector, Observation


def looked_through(monkeypatch: pytest.MonkeyPatch, clients: int, epochs: int) -> int:
    """How often the list of all clients is made while everybody tells something and two cohorts are chosen."""
    made: list[int] = []

    def listed(self: InferredSelector) -> tuple[object, ...]:
        made.append(1)
        return tuple(self._table.ids)

    selector = InferredSelector(2, seed=0, census_epochs=epochs)
    selector.register(np.ones((clients, 3)))
    monkeypatch.setattr(InferredSelector, "clients", property(listed))
    selector.select()
    head = Head(np.zeros((3, 2), np.float32), np.array([0.2, -0.1, -0.1], np.float32))
    selector.observe({k: Observation(5, head=head, travel=1.0) for k in range(clients - 2)})
    selector.select()
    return len(made)


@pytest.mark.parametrize("epochs", [0, 1])
def test_the_list_of_all_is_not_made_once_per_client(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_through(monkeypatch, 40, epochs) == looked_through(monkeypatch, 20, epochs)

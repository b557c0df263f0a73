"""Updates that stay on the device: cosines against updates, what has no direction, censuses, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import toy
from fedentopt.errors import InputError
from fedentopt.selection import Census, ClusteredUpdateSelector, Observation, RandomSelector, Selector
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from fedentopt.simulation.feedback import KeptUpdates
from reference_runs import HARD, cohorts

CPU = RunOptions(device="cpu")


def by_definition(latest: Mapping[int, np.ndarray], client: int, clients: int) -> np.ndarray:
    """Cosines of a client's last update with everybody's, 1 where one of the two is 0 or has none."""
    row = np.ones(clients)
    own = latest[client].astype(np.float64)
    for other, update in latest.items():
        wide = update.astype(np.float64)
        length = np.linalg.norm(own) * np.linalg.norm(wide)
        if length > 0:
            row[other] = own @ wide / length
    return row


def test_cosines_by_definition() -> None:
    rng = np.random.default_rng(0)
    kept, latest = KeptUpdates(7, 40, torch.device("cpu")), {}
    for scale in (1.0, 1e-43, 3e37, 1e-20, 1e20):  # whose squares single precision does not hold
        clients = tuple(rng.choice(7, 3, replace=False).tolist())
        changes = (rng.normal(size=(3, 40)) * scale).astype(np.float32)
        if scale == 3e37:
            changes[1] = 0
        latest |= dict(zip(clients, changes, strict=True))
        found = kept.cosines(clients, torch.from_numpy(changes.copy())).numpy()
        expected = [by_definition(latest, client, 7) for client in clients]
        np.testing.assert_allclose(found, expected, atol=0.1 if scale == 1e-43 else 1e-5)  # few bits are left of 1e-43
        if scale == 1e-43:
            latest |= {client: kept.rows[client].numpy().copy() for client in clients}


def test_an_update_that_is_not_finite_leaves_the_last_one() -> None:
    kept = KeptUpdates(3, 2, torch.device("cpu"))
    kept.cosines((0, 1), torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    for bad in (torch.nan, torch.inf):
        found = kept.cosines((1, 2), torch.tensor([[bad, 1.0], [4.0, 4.0]]))
        assert found[0].isnan().all()
        assert found[1].tolist() == pytest.approx([0.5**0.5, 0.5**0.5, 1.0])
    assert kept.rows.tolist() == [[1.0, 0.0], [0.0, 1.0], pytest.approx([0.5**0.5, 0.5**0.5])]
    assert kept.cosines((1,), torch.zeros(1, 2)).tolist() == [[1.0, 1.0, 1.0]], "nothing moved"


def listeners(*, suffice: bool, census: bool = False, **settings: Any) -> tuple[list[dict[Any, Observation]], Any]:
    """What a run tells random selection that needs updates, or takes their cosines."""

    class Listener(RandomSelector):
        name = "listener"
        needs = frozenset({"update"})
        cosines_suffice = suffice

        def census(self) -> Census | None:
            return Census() if census else None

        def observe(self, observations: Mapping[Any, Observation]) -> None:
            told.append(dict(observations))

    told: list[dict[Any, Observation]] = []

    def make(config: RunConfig) -> Selector:
        return Listener(config.cohort_size, config.seed)

    cfg = toy.config(**HARD | {"selector": f"{__name__}:listener", "rounds": 6} | settings)
    (outcome,) = run_stack([Task(cfg, toy.Memory(), selector=make)], toy.images(samples=70), CPU)
    return told, outcome


@pytest.mark.parametrize(
    "settings", [{}, {"census": True, "algorithm": "scaffold"}, {"model": "toy:wide", "rounds": 3}], ids=str
)
def test_a_run_tells_the_cosines_of_its_updates(settings: dict[str, Any]) -> None:
    (updates, plainly), (cosines, outcome) = (listeners(suffice=suffice, **settings) for suffice in (False, True))
    assert cohorts(plainly) == cohorts(outcome)
    assert len(updates) == len(cosines) >= 2
    assert not settings.get("census") or len(updates[0]) == 5, "more than a stack of one cohort takes at once"
    latest: dict[int, np.ndarray] = {}
    for told, instead in zip(updates, cosines, strict=True):
        assert tuple(told) == tuple(instead)
        for client, seen in told.items():
            assert seen.update is not None
            assert seen.cosines is None
            latest[client] = seen.update
        for client, seen in instead.items():
            assert seen.update is None
            assert seen.cosines is not None
            np.testing.assert_allclose(seen.cosines, by_definition(latest, client, 5), atol=1e-5)


def test_clustered_sampling_chooses_the_same_by_either() -> None:
    class ByUpdates(ClusteredUpdateSelector):
        name = "clustered-update"
        cosines_suffice = False

    data = toy.images(samples=120)
    cfg = toy.config(selector="clustered-update", clients=12, cohort="3", rounds=14, dropout=0.2, seed=5)
    memories = toy.Memory(), toy.Memory()
    options = replace(CPU, checkpoint_every=7)
    (by_cosines,) = run_stack([Task(cfg, memories[0])], data, options)
    own = Task(cfg, memories[1], selector=lambda config: ByUpdates(config.cohort_size, config.seed))
    (by_updates,) = run_stack([own], data, options)
    assert cohorts(by_cosines) == cohorts(by_updates)
    assert toy.difference(by_cosines, by_updates) == 0
    (lean, _), (full, _) = (memory.saves[0] for memory in memories)
    assert "selector.vectors" in full.tensors
    assert [name for name in lean.tensors if name.startswith("selector.")] == ["selector.distances"]
    trained = {client for record in by_cosines.records[:7] for client in record.trained}
    assert {(row.vector, row.client) for row in lean.rows} == {("vectors.updates", client) for client in trained}
    again = toy.Memory()  # from a checkpoint of a version whose selector kept the updates
    again.saved, again.records = memories[1].saves[0], list(memories[1].saves[0][1])
    with pytest.raises(InputError, match=r"vectors.updates of shape nothing, this run needs \(12, .*start anew"):
        run_stack([Task(cfg, again)], data, CPU)

"""The adapters of examples/adapters, each inside its framework where that is installed; none has more than 40 lines."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedentopt import EntropySelector

FOLDER = Path(__file__).parent.parent / "examples" / "adapters"
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 5, 600)
INDICES = [np.flatnonzero((k % 5 == LABELS) & (np.arange(600) % 3 == k % 3))[:20] for k in range(12)]
COUNTS = {f"node-{k:02d}": np.bincount(LABELS[places], minlength=5).tolist() for k, places in enumerate(INDICES)}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(ids: list[Any], rounds: int, size: int, buffer: int) -> list[list[Any]]:
    selector = EntropySelector(size, buffer)
    selector.register(np.array(list(COUNTS.values())), ids=ids)
    return [list(selector.select().clients) for _ in range(rounds)]


@pytest.mark.parametrize("example", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_adapter_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 40


def test_fl_bench_gets_its_whole_stream() -> None:
    stream = load("fl_bench_stream").sample_stream(LABELS.tolist(), INDICES, rounds=9, join_ratio=0.25)
    assert stream == expected(list(range(12)), 9, size=3, buffer=4)
    assert all(type(client) is int for cohort in stream for client in cohort)


def test_pfl_draws_cohorts_user_by_user() -> None:
    pytest.importorskip("pfl", reason="pfl is not installed")
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset

    sampler = load("pfl_sampler").EntropyUserSampler(COUNTS, cohort_size=3, buffer_size=4)
    data = FederatedDataset(lambda user: Dataset([[user]], user_id=user), sampler)
    drawn = [[user.user_id for user, _ in data.get_cohort(3)] for _ in range(6)]
    assert drawn == expected(list(COUNTS), 6, size=3, buffer=4)
    with pytest.raises(ValueError, match="12 users make no cohort of 13"):
        load("pfl_sampler").EntropyUserSampler(COUNTS, cohort_size=13)


def test_fluke_trains_the_cohorts() -> None:
    pytest.importorskip("fluke", reason="fluke is not installed")
    import torch
    from fluke import FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader

    FlukeENV().set_seed(0)
    x = torch.from_numpy(RNG.normal(size=(600, 8)).astype(np.float32))
    y = torch.from_numpy(LABELS)
    optimizer = OptimizerConfigurator({"name": "SGD", "lr": 0.1}, {"name": "StepLR", "step_size": 1, "gamma": 1.0})
    clients = [
        Client(k, FastDataLoader(x[i], y[i], num_labels=5, batch_size=10), None, optimizer, torch.nn.CrossEntropyLoss())
        for k, i in enumerate(INDICES)
    ]
    server = load("fluke_server").EntropyServer(torch.nn.Linear(8, 5), None, clients)
    before = server.model.weight.detach().clone()
    chosen: list[list[int]] = []
    algorithm = FedAVG(12, None, {}, clients=clients, server=server)
    algorithm.attach(SimpleNamespace(selected_clients=lambda round, clients: chosen.append([c.index for c in clients])))
    algorithm.run(n_rounds=4, eligible_perc=0.25, finalize=False)
    assert chosen == expected(list(range(12)), 4, size=3, buffer=4)
    assert not torch.equal(server.model.weight, before)


def test_fed_biomed_samples_the_cohorts_and_goes_on_from_a_breakpoint() -> None:
    pytest.importorskip("fedbiomed", reason="Fed-BioMed is not installed")
    from fedbiomed.researcher.strategies import Strategy

    made = load("fedbiomed_strategy").EntropyStrategy
    nodes = ["unknown", *reversed(COUNTS)]
    straight = made(COUNTS, cohort_size=3, buffer_size=4)
    assert isinstance(straight, Strategy)
    wanted = expected(list(COUNTS), 6, size=3, buffer=4)
    assert [straight.sample_nodes(nodes, number) for number in range(3)] == wanted[:3]
    kept = json.loads(json.dumps(straight.save_state_breakpoint()))
    again = made(COUNTS, cohort_size=3, buffer_size=4)
    again.load_state_breakpoint(kept)
    assert [again.sample_nodes(nodes, number) for number in range(3, 6)] == wanted[3:]

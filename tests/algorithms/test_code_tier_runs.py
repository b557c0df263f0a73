"""Local objectives that are code, through the engine.

FedNTD and MOON against straight-line float64 torch, and a method of another tier written as code.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import toy
from fedentopt.algorithms import ALGORITHMS, Algorithm, FedNTD, Round, Vectors, setting
from fedentopt.errors import InputError
from fedentopt.models import build
from fedentopt.partition import parse, partition
from fedentopt.randomness import key
from fedentopt.simulation import simulate
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from sample_order import batches

CLASSES = 4
SETTINGS = {
    "model": "toy:layered", "clients": 5, "cohort": "2", "rounds": 5, "epochs": 2, "lr": 0.05, "lr_decay": 0.9,
    "weight_decay": 1e-2, "momentum": 0.9, "partition": "dir:1", **toy.PLAIN,
}  # fmt: skip


def ntd(model, start, previous, x, y, beta=0.7, tau=2.0):
    """Lee et al.: cross-entropy + beta tau^2 KL(global without the true class || local without it)."""
    z, g = model(x), start(x)
    distances = []
    for row, other, label in zip(z, g, y, strict=True):
        keep = [c for c in range(CLASSES) if c != label]
        p, q = (other[keep] / tau).softmax(0), (row[keep] / tau).softmax(0)
        distances.append((p * (p.log() - q.log())).sum())
    return F.cross_entropy(z, y) + beta * tau**2 * torch.stack(distances).mean()


def moon(model, start, previous, x, y, mu=0.8, tau=0.4):
    """Li et al.: cross-entropy - mu log(e^(s_glob/tau) / (e^(s_glob/tau) + e^(s_prev/tau)))."""
    loss = F.cross_entropy(model(x), y)
    if previous is None:
        return loss
    f, f_glob, f_prev = (net[:-1](x) for net in (model, start, previous))

    def cosine(a, b):
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=1e-8)

    up, down = (cosine(f, f_glob) / tau).exp(), (cosine(f, f_prev) / tau).exp()
    return loss - mu * (up / (up + down)).log().mean()


def reference(data, config, cohorts, objective):
    """The run written out: final parameters in float64."""
    parts = partition(data.y_train, parse(config.partition), 5, config.seed, num_classes=CLASSES, min_samples=1)
    x = (torch.from_numpy(data.x_train).double() / 255 - 0.4) / 0.25
    y = torch.from_numpy(data.y_train)
    server = build(config.model, CLASSES, seed=key(config.seed, "model") >> 1, image_size=8).double()
    last: dict[int, nn.Module] = {}
    for number, cohort in enumerate(cohorts, start=1):
        lr = config.lr * config.lr_decay ** (number - 1)
        start = copy.deepcopy(server).requires_grad_(False)
        sizes = np.array([len(parts.indices[k]) for k in cohort], dtype=float)
        shares = sizes / sizes.sum()
        trained = []
        for k in cohort:
            model = copy.deepcopy(server)
            optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=config.weight_decay)
            for chosen in batches(parts.indices[k], config, number, k):
                optimiser.zero_grad()
                objective(model, start, last.get(k), x[chosen], y[chosen]).backward()
                optimiser.step()
            last[k] = copy.deepcopy(model).requires_grad_(False)
            trained.append(model.state_dict())
        mean = {n: sum(p * m[n] for p, m in zip(shares, trained, strict=True)) for n in trained[0]}
        server.load_state_dict(mean)
    return server.state_dict()


@pytest.mark.parametrize("trainer", ["loop", "streams"])
@pytest.mark.parametrize(
    ("name", "own", "objective"),
    [("fedntd", {"beta": 0.7, "tau": 2.0}, ntd), ("moon", {"mu": 0.8, "tau": 0.4}, moon)],
)
def test_against_straight_line_torch(name: str, own: dict, objective, trainer: str) -> None:
    data = toy.images(90, CLASSES)
    config = toy.config(algorithm=name, **SETTINGS, **{f"algorithm.{key}": value for key, value in own.items()})
    [outcome] = toy.run([config], data, trainer=trainer)
    cohorts = [record.trained for record in outcome.records]
    assert len({k for cohort in cohorts for k in cohort}) > 3
    assert any(k in cohorts[i] for i in range(4) for k in cohorts[i + 1])  # somebody trains twice in a row
    expected = reference(data, config, cohorts, objective)
    plain = toy.run([toy.config(**SETTINGS)], data, trainer=trainer)[0]
    gap = max(float((outcome.model[n].double() - expected[n]).abs().max()) for n in expected)
    away = max(float((plain.model[n].double() - expected[n]).abs().max()) for n in expected)
    assert gap < 2e-5
    assert away > 50 * gap  # the term matters


@pytest.mark.parametrize("name", ["fedntd", "moon"])
def test_alone_in_a_sweep_and_resumed_are_the_same_bits(name: str) -> None:
    data = toy.images(90, CLASSES)
    configs = [toy.config(algorithm=name, seed=seed, **SETTINGS) for seed in (0, 1)]
    memories = [toy.Memory() for _ in configs]
    options = RunOptions(device="cpu", checkpoint_every=1)
    together = run_stack([Task(c, m) for c, m in zip(configs, memories, strict=True)], data, options)
    for config, memory, outcome in zip(configs, memories, together, strict=True):
        assert toy.difference(toy.run([config], data)[0], outcome) == 0
        for saved in memory.saves:
            again = toy.Memory()
            again.saved = saved
            [resumed] = run_stack([Task(config, again)], data, options)
            assert toy.difference(resumed, outcome) == 0
            assert [r.accuracy for r in resumed.records] == [r.accuracy for r in outcome.records]


class DynAsCode(Algorithm):
    """FedDyn, its local objective written out as code on flat parameters."""

    alpha: float = setting(0.01, help="strength", above=0)
    server_vectors = ("h",)
    client_vectors = ("h",)

    def local_loss(self, model, start, batch, context):
        w, anchor = context.flat(model), context.flat(start)
        pull = self.alpha / 2 * (w - anchor).square().sum()
        return F.cross_entropy(model(batch.x), batch.y) - context.vectors["h"] @ w + pull

    def absorb(self, vectors: Vectors, start, trained, round: Round) -> None:
        changes = trained - start
        vectors.client["h"] = vectors.client["h"] - self.alpha * changes
        vectors.server["h"] = vectors.server["h"] - self.alpha / round.total_clients * changes.sum(0)

    def step(self, server, start, trained, shares):
        return trained.mean(0) - server["h"] / self.alpha


@pytest.mark.parametrize("trainer", ["loop", "streams"])
@pytest.mark.parametrize("model", ["toy:layered", "toy:wide"])  # wide: convolutions, channels last
def test_feddyn_as_code_is_feddyn(trainer: str, model: str) -> None:
    data = toy.images(90, CLASSES)
    built_in = toy.config(algorithm="feddyn", **SETTINGS | {"model": model}, **{"algorithm.alpha": 0.3})
    own = toy.config(algorithm=f"{__name__}:DynAsCode", **SETTINGS | {"model": model}, **{"algorithm.alpha": 0.3})
    expected, outcome = (toy.run([config], data, trainer=trainer)[0] for config in (built_in, own))
    assert toy.difference(outcome, expected) < 2e-5


def test_a_stack_of_code_is_refused_by_the_stacked_trainer() -> None:
    with pytest.raises(InputError, match="trainer: a method whose local objective is code"):
        toy.run([toy.config(algorithm="fedntd")], toy.images(), trainer="stacked")


@pytest.mark.parametrize("error", [SystemExit(0), ZeroDivisionError("ours")])
def test_what_a_built_in_objective_raises_is_a_bug_or_the_end_and_passes(monkeypatch, error):
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(FedNTD, "local_loss", broken)
    small = {"dataset": "digits", "clients": 5, "cohort": "2", "rounds": 1, "epochs": 1}
    with pytest.raises(type(error)) as found:
        simulate({"algorithm": "fedntd", **small})
    assert found.value is error


class Broken(Algorithm):
    """Fails in its first batch."""

    def local_loss(self, *_: object) -> torch.Tensor:
        raise ZeroDivisionError("mine")


def test_what_one_that_a_user_has_registered_raises_names_it(monkeypatch):
    monkeypatch.setattr(ALGORITHMS, "_classes", {**ALGORITHMS._classes, "broken": Broken})
    with pytest.raises(InputError, match="algorithm: broken: local_loss raised ZeroDivisionError: mine"):
        toy.run([toy.config(algorithm="broken")], toy.images())


def test_a_model_of_ones_own_is_named_not_the_built_in_objective_in_which_it_fails():
    config = toy.config(**SETTINGS | {"algorithm": "fedntd", "model": f"{__name__}:leaving"})
    with pytest.raises(
        InputError, match=f"model: '{__name__}:leaving': local_loss of fedntd raised SystemExit: enough"
    ):
        toy.run([config], toy.images(samples=90, classes=CLASSES))


def leaving(num_classes: int) -> nn.Module:
    """Ends the process when it is trained, and only then."""

    class Leaving(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 2 and self.training:
                raise SystemExit("enough")
            return super().forward(x)

    return nn.Sequential(nn.Flatten(), Leaving(3 * 64, num_classes))
